"""Methods that add an adapter, a gate or conditioning to a pretrained model.

What starts at other values than in a fresh model is written here; everything else is initialised
by `model/init_weights.py`. Stored low-rank differences are in `low_rank.py`.
Letters: D model width, R low rank of a gate.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from depthdial.config import LoopConfig, LoopLoraConfig, ModelConfig, ModulationConfig
from depthdial.convert.base_model import (
    BaseModel,
    Block,
    Converted,
    CoreRange,
    LoopPair,
    looped_config,
    placed,
)
from depthdial.convert.low_rank import copied_norms, core_sublayers
from depthdial.convert.methods import (
    DecayGateOptions,
    ElasticFixedOptions,
    ELROptions,
    RecurrenceOptions,
)
from depthdial.convert.tying import ONE_LOOP, looped

BETA_ONE_GAMMA = 1.8545865
"""softplus of it is 2, so that sigmoid(0) * softplus(gamma) = 1."""
DECAY_STEP_RANGE = (1e-3, 1e-1)
"""Range of the log-uniform steps at which the decay gate's biases start (arXiv 2605.11011)."""
DEFAULT_DELTA_RANK = 16
DEFAULT_MODULATION = 256


def retrofitted_recurrence(
    base: BaseModel, core_range: CoreRange, options: RecurrenceOptions
) -> Converted:
    """z = W [s; h] before a core of plain layers, W = [0 | I] (arXiv 2511.07384).

    Raises: ValueError for more layers below or above the core than the base has there.
    """
    blocks, d_model = base.blocks(), base.config.d_model
    below, above = blocks[: core_range.start], blocks[core_range.end :]
    prelude = _kept(below, options.prelude, "prelude", where=f"below the core {core_range}")
    coda = _kept(above, options.coda, "coda", where=f"above the core {core_range}")
    parts = below[:prelude], blocks[core_range.start : core_range.end], above[len(above) - coda :]
    is_random = options.initial_state == "random"
    loop = LoopConfig(
        update="replace",
        injection="concat",
        initial_state=options.initial_state,
        random_state_std=math.sqrt(2 / (5 * d_model)) if is_random else None,
    )
    config = looped_config(base.config, *parts, loop=loop, max_loops=options.max_loops)
    dtype = base.tensors["embedding.weight"].dtype
    adapter = torch.cat([torch.zeros(d_model, d_model), torch.eye(d_model)], dim=1).to(dtype)
    tensors = base.other_tensors() | placed(*parts) | {"injection.adapter.weight": adapter}
    num_dropped = len(below) - prelude + len(above) - coda
    kept = [*range(prelude), *range(core_range.start, core_range.end)]
    kept += range(len(blocks) - coda, len(blocks))
    return Converted(
        config=config,
        tensors=tensors,
        pairs=_from_one(options.max_loops),
        promises="none" if num_dropped else "close",
        why_not=f"{num_dropped} layers were dropped" if num_dropped else "",
        matching=tuple(kept),
    )


def decay_gate(
    base: BaseModel, core_range: CoreRange, options: DecayGateOptions, *, seed: int
) -> Converted:
    """The gate with its published start: log_decay = log(1..D), up uniform, log-uniform steps."""
    loop = LoopConfig(update="decay_gate", gate_rank=_gate_rank(base.config, options))
    converted = looped(base, core_range, loop=loop, max_loops=options.max_loops)
    dtype = base.tensors["embedding.weight"].dtype
    start = published_decay_gate(base.config.d_model, _gate_rank(base.config, options), seed=seed)
    tensors = dict(converted.tensors) | {name: tensor.to(dtype) for name, tensor in start.items()}
    why_not = "the gate starts nearly closed in most channels"
    return Converted(converted.config, tensors, ONE_LOOP, "none", why_not=why_not)


def decay_gate_ungated_first(
    base: BaseModel, core_range: CoreRange, options: DecayGateOptions
) -> Converted:
    """The same gate, without effect in the first pass and at 0.95 in the later ones."""
    rank = _gate_rank(base.config, options)
    loop = LoopConfig(update="decay_gate", gate_rank=rank, gate_bypass="first_only")
    return looped(base, core_range, loop=loop, max_loops=options.max_loops)


def elr_graft(base: BaseModel, core_range: CoreRange, options: ELROptions) -> Converted:
    """ELR's gate and modulation (arXiv 2610.12582) on a core, without re-injection.

    The heads start at zero, so that no pass after the first moves the state.
    """
    loop = LoopConfig(
        update="adaptive_delta",
        gate_bypass="first_only" if options.start == "ungated_first" else "never",
        gamma_init=BETA_ONE_GAMMA if options.start == "beta_one" else 0.0,
    )
    converted = looped(base, core_range, loop=loop, max_loops=options.max_loops)
    modulation = ModulationConfig(d_cond=options.d_cond, rank=options.rank)
    config = converted.config.replace(modulation=modulation)
    tensors = dict(converted.tensors)
    if options.start == "beta_one":
        tensors |= _open_gamma(config)
    pairs = _from_one(options.max_loops)
    if options.start == "plain":
        why_not = "the gate starts at 0.3466 in the first pass"
        return Converted(config, tensors, pairs, "none", why_not=why_not)
    return Converted(
        config, tensors, pairs, "bits" if options.start == "ungated_first" else "close"
    )


def elastic_fixed(base: BaseModel, core_range: None, options: ElasticFixedOptions) -> Converted:
    """Gate and conditioning that start as identity at every loop of a model that loops already.

    A gate is grafted where each pass replaces the state; conditioning where there is none.
    Raises: ValueError for a model that runs its layers once, that has both, or that cannot take
        the conditioning asked for.
    """
    config = base.config
    if config.max_loops == 1:
        raise ValueError(
            "elastic-fixed is for a model that loops already, and this base runs its layers once. "
            "Choose a method for dense models."
        )
    needs_gate = config.loop.update == "replace"
    needs_conditioning = config.modulation is None and config.loop_lora is None
    if not needs_gate and not needs_conditioning:
        raise ValueError(
            f"this base has a gate (loop.update='{config.loop.update}') and conditioning already; "
            "there is nothing to graft. Train it as it is."
        )
    max_loops = _elastic_max(config, options)
    changes = {"max_loops": max_loops}
    if needs_gate:
        changes |= {"loop.update": "adaptive_delta", "loop.gamma_init": BETA_ONE_GAMMA}
    tensors = dict(base.tensors)
    if needs_conditioning:
        changes |= _conditioning(config, options)
    elif options.conditioning or options.rank or options.d_cond:
        raise ValueError(
            "this base is conditioned on its loops already; leave out conditioning, rank and "
            "d_cond."
        )
    result = config.replace(**changes)
    if needs_gate:
        tensors |= _open_gamma(result)
    if needs_conditioning and result.loop_lora is not None and result.loop_lora.norms:
        sublayers = core_sublayers(tensors, config.split[1])
        tensors |= copied_norms(sublayers, result.loop_lora.num_sets)
    native = config.num_loops
    loops = dict.fromkeys((native, 1, config.max_loops))
    return Converted(result, tensors, tuple(LoopPair(k, k) for k in loops), "close")


def published_decay_gate(d_model: int, rank: int, *, seed: int) -> dict[str, Tensor]:
    """The gate's tensors as LoopUS starts them: down as a plain linear map, up uniform within
    rank^-1/2, biases that give steps log-uniform in DECAY_STEP_RANGE, log_decay = log(1..D).
    """
    low, high = map(math.log, DECAY_STEP_RANGE)
    steps_D = torch.exp(_uniform("state_update.up.bias", (d_model,), low, high, seed=seed))
    bound_down, bound_up = d_model**-0.5, rank**-0.5
    return {
        "state_update.down.weight": _uniform(
            "state_update.down.weight", (rank, d_model), -bound_down, bound_down, seed=seed
        ),
        "state_update.up.weight": _uniform(
            "state_update.up.weight", (d_model, rank), -bound_up, bound_up, seed=seed
        ),
        # The inverse of softplus.
        "state_update.up.bias": steps_D + torch.log(-torch.expm1(-steps_D)),
        "state_update.log_decay": torch.arange(1, d_model + 1, dtype=torch.float32).log(),
    }


def _uniform(name: str, shape: Sequence[int], low: float, high: float, *, seed: int) -> Tensor:
    """Uniform values from a generator keyed by (seed, name), as in `init_weights`."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
    return low + (high - low) * torch.rand(*shape, generator=generator)


def _gate_rank(config: ModelConfig, options: DecayGateOptions) -> int:
    return options.gate_rank or -(-config.d_model // 16)


def _from_one(max_loops: int) -> tuple[LoopPair, ...]:
    """One loop of the base against 1, 2 and the most loops of the result."""
    loops = sorted({1, min(2, max_loops), max_loops})
    return tuple(LoopPair(1, k) for k in loops)


def _kept(blocks: Sequence[Block], asked: int | None, name: str, *, where: str) -> int:
    if asked is not None and asked > len(blocks):
        raise ValueError(
            f"{name}={asked}, but the base has {len(blocks)} layers {where}. Give at most so many."
        )
    return len(blocks) if asked is None else asked


def _open_gamma(config: ModelConfig) -> dict[str, Tensor]:
    """gamma of a gate that is open, beta = 1, wherever W z + b is 0.

    Kept in float32 whatever the other weights are: rounded to bf16 it gives beta = 0.9974.
    """
    gamma = torch.full((config.d_model,), config.loop.gamma_init)
    beta = 0.5 * F.softplus(gamma[:1])
    assert abs(float(beta) - 1) < 1e-6, f"gamma {config.loop.gamma_init} gives beta {float(beta)}"
    return {"state_update.gamma": gamma}


def _elastic_max(config: ModelConfig, options: ElasticFixedOptions) -> int:
    max_loops = options.max_loops or config.max_loops
    if max_loops < config.max_loops:
        raise ValueError(
            f"max_loops={max_loops} is below the {config.max_loops} loops that the base was "
            "trained for. Leave it out, or give more."
        )
    if isinstance(config.modulation, ModulationConfig) and max_loops != config.max_loops:
        raise ValueError(
            f"max_loops={max_loops}, but the modulation of the base was trained on "
            f"k / {config.max_loops}; another limit would change every budget. Leave it out."
        )
    return max_loops


def _conditioning(config: ModelConfig, options: ElasticFixedOptions) -> dict[str, object]:
    """Config changes of the conditioning of a looped base."""
    takes_modulation = config.norm != "ngpt"
    kind = options.conditioning or ("modulation" if takes_modulation else "loop_lora")
    if kind == "modulation":
        return {
            "modulation": ModulationConfig(
                d_cond=options.d_cond or DEFAULT_MODULATION,
                rank=options.rank or DEFAULT_MODULATION,
                neutral="every_loop",
            )
        }
    if options.d_cond is not None:
        raise ValueError(
            f"d_cond={options.d_cond} has no effect: the sublayers of this base take no "
            "modulation, so the loops get stored differences. Remove it."
        )
    return {
        "loop_lora": LoopLoraConfig(
            rank=options.rank or DEFAULT_DELTA_RANK,
            sets_by_loop=tuple(range(config.max_loops)),
            norms=config.norm_gain and takes_modulation,
        )
    }
