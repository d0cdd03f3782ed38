"""Configuration models: strict, frozen, read from JSON or YAML dictionaries.

This is the name to import; the parts are `config/model.py` (a model), `config/recipe.py` (a
training run), `config/training.py` (its parts), `config/model_checks.py` (rules between fields),
`config/base.py` and `config/text.py`.
Derived numbers (parameters, FLOPs, cache bytes) are functions in `model/count/costs.py`.
"""

from depthdial.config.base import StrictConfig, nearest_name, set_dotted, shortest_pattern
from depthdial.config.model import (
    CachePolicy,
    InjectionName,
    LoopConfig,
    LoopLoraConfig,
    ModelConfig,
    ModulationConfig,
    NGPTConfig,
    RopeScaling,
    SlidingConfig,
    TimeModulationConfig,
    UpdateName,
)
from depthdial.config.model_checks import (
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
from depthdial.config.recipe import (
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
    "LoopLoraConfig",
    "check_cache_policy",
    "nearest_name",
    "policy_obstacle",
    "set_dotted",
    "shortest_pattern",
]
