"""Configuration models: strict, frozen, read from JSON or YAML dictionaries.

This is the name to import; the parts are `config/model.py` (a model), `config/recipe.py` (a
training run), `config/training.py` (its parts), `config/model_checks.py` (rules between fields),
`config/base.py` and `config/text.py`.
Derived numbers (parameters, FLOPs, cache bytes) are functions in `model/count/costs.py`.
"""

from depthdial.config.base import StrictConfig, nearest_name, set_dotted, shortest_pattern
from depthdial.config.letters import (
    LETTERS,
    AttentionKeys,
    LayerFacts,
    Reach,
    SlotKind,
    count_slots,
    is_read,
    slot_kinds,
)
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
from depthdial.config.policies import (
    POLICIES,
    CacheRule,
    cache_rule,
    check_cache_policy,
    named_rule,
    policy_obstacle,
    reads_first_keys,
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
    "LETTERS",
    "POLICIES",
    "AttentionKeys",
    "CachePolicy",
    "CacheRule",
    "DataConfig",
    "DepthConfig",
    "DistillConfig",
    "InjectionName",
    "LayerFacts",
    "LoopConfig",
    "ModelConfig",
    "ModulationConfig",
    "NGPTConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "Recipe",
    "Reach",
    "RopeScaling",
    "SamplerName",
    "SlidingConfig",
    "SlotKind",
    "StrictConfig",
    "TimeModulationConfig",
    "TrainConfig",
    "TrajectoryConfig",
    "UpdateName",
    "LoopLoraConfig",
    "cache_rule",
    "check_cache_policy",
    "count_slots",
    "is_read",
    "named_rule",
    "nearest_name",
    "policy_obstacle",
    "reads_first_keys",
    "set_dotted",
    "shortest_pattern",
    "slot_kinds",
]
