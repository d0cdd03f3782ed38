"""Configuration models: strict, frozen, read from JSON or YAML dictionaries.

This is the name to import; the parts are `config_model.py` (a model), `config_recipe.py` (a
training run), `config_training.py` (its parts), `config_checks.py` (rules between fields),
`config_base.py` and `config_text.py`.
Derived numbers (parameters, FLOPs, cache bytes) are functions in `model/count.py`.
"""

from depthdial.config_base import StrictConfig, nearest_name, set_dotted, shortest_pattern
from depthdial.config_checks import (
    ATTENTION,
    ATTENTION_LETTERS,
    CACHE_POLICIES,
    FEED_FORWARD,
    PUBLISHED_POLICY,
    SLIDING,
    SUBLAYER_LETTERS,
    VALUE_GATE_CHANNELS,
    check_cache_policy,
    policy_obstacle,
)
from depthdial.config_model import (
    CachePolicy,
    InjectionName,
    LoopConfig,
    ModelConfig,
    ModulationConfig,
    NGPTConfig,
    RopeScaling,
    SlidingConfig,
    TimeModulationConfig,
    UpdateName,
    VisitDeltaConfig,
)
from depthdial.config_recipe import (
    DataConfig,
    DepthConfig,
    DistillConfig,
    ObjectiveConfig,
    OptimConfig,
    Recipe,
    SamplerName,
    TrainConfig,
    TrajectoryConfig,
)

__all__ = [
    "ATTENTION",
    "ATTENTION_LETTERS",
    "CACHE_POLICIES",
    "FEED_FORWARD",
    "PUBLISHED_POLICY",
    "SLIDING",
    "SUBLAYER_LETTERS",
    "VALUE_GATE_CHANNELS",
    "CachePolicy",
    "DataConfig",
    "DepthConfig",
    "DistillConfig",
    "InjectionName",
    "LoopConfig",
    "ModelConfig",
    "ModulationConfig",
    "NGPTConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "Recipe",
    "RopeScaling",
    "SamplerName",
    "SlidingConfig",
    "StrictConfig",
    "TimeModulationConfig",
    "TrainConfig",
    "TrajectoryConfig",
    "UpdateName",
    "VisitDeltaConfig",
    "check_cache_policy",
    "nearest_name",
    "policy_obstacle",
    "set_dotted",
    "shortest_pattern",
]
