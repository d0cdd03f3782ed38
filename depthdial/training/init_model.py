"""The model of a run's first step: new, or from a model directory with what travels with it.

The recipe's model must be the folder's, but for the loop limits and a modulation that the run
grafts; anything else is a conversion, which `depthdial convert` makes and proves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from depthdial.config import (
    LoopConfig,
    ModelConfig,
    ModulationConfig,
    Recipe,
    TimeModulationConfig,
    named_rule,
)
from depthdial.config.effects import possible_draws
from depthdial.config.recipe import WRITTEN_BY_TRAINING
from depthdial.disk import hash_file
from depthdial.model.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    in_own_memory,
    load_model,
    read_config,
)
from depthdial.model.folder import companions
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.sublayer import placed_layers
from depthdial.training.optim import check_optim_effects
from depthdial.training.patterns import (
    check_patterns,
    freeze_parameters,
    frozen_names,
)

OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
FREE_KEYS = ("num_loops", "max_loops", "modulation", *WRITTEN_BY_TRAINING)
FREE_LOOP_KEYS = ("cache_policy", "beyond_max_loops")
"""Keys of the recipe's model, and of its loop, that may differ from the folder's."""


def first_model(recipe: Recipe, *, starts_late: bool) -> LoopedLM:
    """The model of the first step on its device, frozen as the recipe says; its config knows what
    was trained before.

    Args: starts_late: the first steps run one loop; a modulation is then grafted after them, and
        until then a new model has none.
    Raises: as `load_init` and `check_patterns`.
    """
    config, settings = recipe.model, recipe.train
    check_optim_options(recipe)
    if settings.init is not None:
        model = load_init(settings.init, config)
        has_modulation = model.config.modulation is not None
        if (
            starts_late
            and has_modulation
            and max(possible_draws(recipe.depth, config.max_loops)) == 1
        ):
            raise ValueError(
                f"depth.switch_frac={recipe.depth.switch_frac} has no effect: every row runs one "
                f"loop from the start, and {settings.init} has its modulation already. Leave it "
                "at 0.0."
            )
    else:
        config = config.replace(modulation=None) if starts_late else config
        model = LoopedLM(config.with_trained(()), seed=settings.seed)
    freeze(model, recipe.optim.freeze)
    return model.to(settings.device)


def freeze(model: LoopedLM, patterns: Iterable[str]) -> tuple[str, ...]:
    """Take what the patterns of `optim.freeze` stand for out of training. Returns: its names."""
    return freeze_parameters(model, patterns, base=base_names(model.config))


def base_names(config: ModelConfig) -> frozenset[str]:
    """Parameters that a model of this config has in common with one that does not loop.

    Found by leaving out all that a config adds for its loops, so that a part of the base cannot be
    forgotten in a list: an untied head, learned positions, scales of logits.
    """
    plain = config.replace(
        loop=LoopConfig(update="replace"),
        modulation=None,
        loop_lora=None,
        exit_gate="none",
        exit_gate_stale=False,
        prelude_norm=False,
        segments=(),
        # Names do not depend on widths, and another width needs an injection.
        core_d_model=None,
    )
    with torch.device("meta"):
        return frozenset(name for name, _ in LoopedLM(plain).named_parameters())


def check_optim_options(recipe: Recipe) -> None:
    """Every pattern and every option of the optimizer has an effect on the recipe's model, a
    grafted modulation included.

    Raises: as `check_patterns` and `check_optim_effects`.
    """
    with torch.device("meta"):
        parameters = dict(LoopedLM(recipe.model).named_parameters())
    base = base_names(recipe.model)
    check_patterns(recipe.optim, parameters, base=base)
    frozen = frozen_names(recipe.optim.freeze, parameters, base=base)
    trained = {name: p for name, p in parameters.items() if name not in frozen}
    check_optim_effects(recipe.optim, trained, placed_layers(recipe.model))


def load_init(folder: str | Path, config: ModelConfig) -> LoopedLM:
    """The folder's weights in float32, in a model with the loop limits of `config`.

    Without a modulation in the folder it has none yet: the run grafts that of `config`.
    Raises: as `load_model`; ValueError if `config` is another model than the folder's.
    """
    stored = read_config(folder)
    check_agreement(config, stored, folder)
    tensors = load_model(folder).state_dict()
    known = config.replace(modulation=stored.modulation, exit_gate_stale=stored.exit_gate_stale)
    with torch.device("meta"):
        model = LoopedLM(known.with_trained(_still_trained(config, stored)))
    model.load_state_dict(tensors, assign=True)
    return in_own_memory(model)


def _still_trained(config: ModelConfig, stored: ModelConfig) -> tuple[int, ...]:
    """Loop counts of the folder's training that hold for the run's model."""
    policies = {config.loop.cache_policy, stored.loop.cache_policy}
    if len(policies) > 1 and any(named_rule(policy).shares_first for policy in policies):
        # Another function without a cache too; at one loop it is none.
        return tuple(k for k in stored.trained_at if k == 1)
    return stored.trained_at


def check_agreement(config: ModelConfig, stored: ModelConfig, folder: str | Path) -> None:
    """The model of a recipe is the folder's.

    Raises: ValueError naming the first key that differs, with both values.
    """
    wanted, found = _comparable(config), _comparable(stored)
    for key, value in wanted.items():
        if value != found[key]:
            raise ValueError(
                f"model.{key}={value!r}, but train.init={folder} has {found[key]!r}. Weights can "
                "start another model only through `depthdial convert`; here num_loops, max_loops, "
                "loop.cache_policy and loop.beyond_max_loops may differ, and a modulation of kind "
                "'elr' may be added."
            )
    if stored.modulation is None:
        _check_graft(config.modulation, stored)
    elif config.modulation != stored.modulation:
        raise ValueError(
            f"model.modulation={config.modulation!r}, but train.init={folder} has "
            f"{stored.modulation!r}, which is trained; leave it out."
        )
    elif isinstance(stored.modulation, ModulationConfig) and config.max_loops != stored.max_loops:
        raise ValueError(
            f"model.max_loops={config.max_loops}, but the modulation of train.init={folder} was "
            f"trained on k / {stored.max_loops}; another limit would change every budget."
        )


def _check_graft(
    added: ModulationConfig | TimeModulationConfig | None, stored: ModelConfig
) -> None:
    """A modulation that is added starts as the function that was trained. Raises: ValueError."""
    if added is None:
        return
    if not isinstance(added, ModulationConfig):
        raise ValueError(
            f"model.modulation.kind='{added.kind}' cannot be added to trained weights: its gates "
            "start closed. Only kind 'elr' keeps the function."
        )
    later = [k for k in stored.trained_at if k > 1]
    if later and added.neutral == "one_loop":
        raise ValueError(
            f"model.modulation.neutral='one_loop' starts as another function at {later[0]} and "
            "more loops, which these weights are trained at. Give model.modulation.neutral="
            "'every_loop', which changes no loop count."
        )


def folder_facts(folder: str | Path) -> dict[str, Any]:
    """What tells a model directory from any other, without its place on the machine.

    Returns: name, sha256 of everything together, and that of each file.
    """
    files = {
        path.name: hash_file(path)
        for path in (Path(folder) / CONFIG_FILE, Path(folder) / WEIGHTS_FILE, *companions(folder))
    }
    whole = hashlib.sha256("".join(f"{n} {files[n]}\n" for n in sorted(files)).encode())
    return {"name": Path(folder).resolve().name, "sha256": whole.hexdigest(), "files": files}


def _comparable(config: ModelConfig) -> dict[str, Any]:
    """Keys that must agree, by dotted name."""
    values = config.to_dict()
    loop = values.pop("loop")
    found = {key: value for key, value in values.items() if key not in FREE_KEYS}
    found |= {f"loop.{key}": value for key, value in loop.items() if key not in FREE_LOOP_KEYS}
    return found
