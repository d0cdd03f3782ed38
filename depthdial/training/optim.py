"""Which parameter is trained by which rule, and at which learning rate.

Here live the groups, the Muon and AdamW pair behind one class, its state as named tensors,
and the warmup-stable-decay schedule. Patterns of names are in `patterns.py`; what the loss is and
when to step is not decided here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from depthdial.config import OptimConfig, nearest_name
from depthdial.config.effects import Idle, check_effects, whole_steps
from depthdial.layers.layer_type import OptimizerGroup
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.sublayer import Placed, placed_layers, split_mixer_name
from depthdial.training.patterns import lr_pattern

STACK = r"(prelude|core|coda)_stack\.\d+\."
RULES: tuple[tuple[OptimizerGroup, re.Pattern[str], int | None], ...] = tuple(
    (group, re.compile(pattern), ndim)
    for group, pattern, ndim in (
        ("decayed", r"(embedding|position_embedding|lm_head)\.weight", 2),
        ("undecayed", STACK + r"(norm|post_norm)\.weight|" + STACK + "alpha", 1),
        # What decides how fast the state moves: decay would pull it to a function that nobody
        # chose (a gate to one half, an injection to nothing).
        ("undecayed", r"(state_update|injection|exit_gate)\..+", None),
        ("undecayed", r"state_projection\.weight", 2),
        ("undecayed", r"(final_norm|prelude_norm)\.weight|logit_scale", 1),
        ("undecayed", r"modulation\..+", 1),
        ("undecayed", r"modulation\..*bias", None),
        ("decayed", r"modulation\..+", None),
        # Decay pulls a loop's difference to zero, that is, to the weights that all loops share.
        ("decayed", r"loop_lora\.sublayers\.\d+\.\w+\.(down|up)", 3),
        ("undecayed", r"loop_lora\.sublayers\.\d+\.(post_|q_|k_)?norm", 2),
    )
)
"""(group, whole name, dimensions or None for any) outside the mixers, whose parameters are grouped
by their `LayerType`; the first rule that fits decides."""

# State that torch keeps per parameter, and of which shape: "like" the parameter or a scalar.
STATE_KEYS = {
    "muon": {"momentum_buffer": "like"},
    "adamw": {"step": "scalar", "exp_avg": "like", "exp_avg_sq": "like"},
}


def parameter_group(name: str, parameter: Tensor, placed: Placed) -> OptimizerGroup:
    """Group of one parameter.

    matrices: linear maps of the blocks. decayed: embeddings, head, modulation matrices, low-rank
    loop_lora. undecayed: norms, biases, gates, scales, state update, injection and
    state projection (arXiv 2604.12946). A mixer's are as its `LayerType` says.

    Args: placed: the layers of the model.
    Raises: ValueError for a name that no rule knows, so that a new module cannot fall into a
        group by accident.
    """
    of_mixer = split_mixer_name(name, placed)
    if of_mixer is not None:
        layer, inner = of_mixer
        group = layer.group_of(inner, parameter)
        if group is not None:
            return group
    for group, pattern, ndim in RULES:
        if pattern.fullmatch(name) and ndim in (None, parameter.ndim):
            return group
    raise ValueError(
        f"parameter '{name}' of shape {tuple(parameter.shape)} belongs to no optimizer group. "
        "Add a rule for it to RULES, or to `LayerType.groups` of its layer."
    )


def group_parameters(model: LoopedLM) -> dict[OptimizerGroup, dict[str, nn.Parameter]]:
    """Every trainable parameter object once, by identity, under its first name.

    Raises: ValueError if one parameter has two names of different groups.
    """
    groups: dict[OptimizerGroup, dict[str, nn.Parameter]] = {
        "matrices": {},
        "decayed": {},
        "undecayed": {},
    }
    placed = placed_layers(model.config)
    seen: dict[int, tuple[str, OptimizerGroup]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            continue
        group = parameter_group(name, parameter, placed)
        first_name, first_group = seen.setdefault(id(parameter), (name, group))
        if group != first_group:
            raise ValueError(
                f"'{first_name}' ({first_group}) and '{name}' ({group}) are one parameter in two "
                "optimizer groups; untie them or give both names one group."
            )
        groups[group][first_name] = parameter
    return groups


def check_optim_effects(
    config: OptimConfig, parameters: Mapping[str, Tensor], placed: Placed
) -> None:
    """Every option of the optimizer has an effect on the parameters that are trained.

    Args: parameters: those that are trained, by name, modules that are grafted later included;
        placed: the layers of the model.
    Raises: ValueError for an option that no parameter takes.
    """
    groups = {name: parameter_group(name, p, placed) for name, p in parameters.items()}
    is_muon = config.optimizer == "muon"
    by_muon = {name for name, group in groups.items() if is_muon and group == "matrices"}
    shared = {name: group for name, group in groups.items() if lr_pattern(name, config) is None}
    takes_lr = {name for name, group in shared.items() if _takes_lr(group, config)}
    if not takes_lr:
        what = "optim.lr_by_pattern" + (" or optim.adamw_lr" if config.adamw_lr else "")
        raise ValueError(
            f"optim.lr={config.lr} has no effect: every trained parameter has its rate from "
            f"{what}. Leave one of these out and set optim.lr to its rate."
        )
    table = (
        Idle(
            ("adamw_lr",),
            lambda c: len(takes_lr) == len(shared),
            "because no trained parameter takes it: block matrices have lr, others have rates of "
            "their own",
        ),
        Idle(
            ("momentum",),
            lambda c: not by_muon,
            "because no block matrix is trained, and Muon trains nothing else",
        ),
        Idle(
            ("betas", "eps"),
            lambda c: by_muon == set(groups),
            "because only block matrices are trained, and Muon trains them",
        ),
        Idle(
            ("weight_decay",),
            lambda c: c.weight_decay > 0 and set(groups.values()) == {"undecayed"},
            "because no trained parameter has weight decay",
        ),
    )
    check_effects(config, table, prefix="optim.")


def _takes_lr(group: OptimizerGroup, config: OptimConfig) -> bool:
    """Whether parameters of a group without a pattern have the rate `lr`."""
    return group == "matrices" or config.adamw_lr is None


class Optimizers:
    """Muon for block matrices and AdamW for the rest, or AdamW for everything.

    Frozen parameters (`requires_grad` False) are not held and have no state. The parameters of a
    pattern with its own learning rate form a group of their own, named `group:pattern`.

    The state of every parameter exists from the start (zeros, step 0; what torch itself would
    begin with), so that a saved state is complete even if a parameter had no gradient yet.
    """

    def __init__(self, model: LoopedLM, config: OptimConfig) -> None:
        self.config = config
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._groups: dict[str, dict] = {}
        self._names: dict[nn.Parameter, str] = {}
        self._lr_scale = 1.0
        self.add_module_parameters(model)

    def add_module_parameters(self, model: LoopedLM) -> tuple[str, ...]:
        """Take in parameters that appeared in the model, e.g. by a graft.

        New ones start with zero moments and their own step 0, at the present learning rate;
        the moments of old ones stay.

        Returns: names of the new parameters.
        Raises: ValueError if a parameter trained so far is gone from the model.
        """
        groups = group_parameters(model)
        present = {p: name for members in groups.values() for name, p in members.items()}
        gone = [name for parameter, name in self._names.items() if parameter not in present]
        if gone:
            raise ValueError(
                f"{len(gone)} trained parameters are gone from the model, first '{gone[0]}'. "
                "Add modules without replacing parameters, or build new Optimizers."
            )
        added = {
            group: {name: p for name, p in members.items() if p not in self._names}
            for group, members in groups.items()
        }
        self._names = present
        for group, members in added.items():
            for pattern, parameters in self._by_pattern(members).items():
                self._extend_group(group, pattern, parameters)
        return tuple(name for members in added.values() for name in members)

    def group_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter names in each group that has any."""
        return {
            group: tuple(self._names[p] for p in settings["params"])
            for group, settings in self._groups.items()
        }

    def learning_rates(self) -> dict[str, float]:
        """Present learning rate of each group."""
        return {group: settings["lr"] for group, settings in self._groups.items()}

    def set_lr_scale(self, scale: float) -> None:
        """Set every learning rate to its peak times `scale` (from `lr_scale_at`)."""
        self._lr_scale = scale
        for settings in self._groups.values():
            settings["lr"] = settings["peak_lr"] * scale

    def clip_gradients(self) -> float:
        """Scale all gradients down to the global norm `grad_clip`, if they exceed it.

        Returns: the norm before clipping.
        Raises: FloatingPointError if it is not finite; weights and moments are untouched.
        """
        norm = float(nn.utils.clip_grad_norm_(list(self._names), self.config.grad_clip))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"the gradient norm is {norm}; this step was not taken. Resume from the last "
                "checkpoint with a lower learning rate: depthdial resume RUN --optim.lr X. Had it "
                "diverged before, name an older one: --checkpoint step_N."
            )
        return norm

    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for optimizer in self._optimizers.values():
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients, so that a parameter without one is skipped by `step`."""
        for optimizer in self._optimizers.values():
            optimizer.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and step counters as `<rule>.<parameter name>.<state>`, e.g.
        `adamw.embedding.weight.exp_avg`. The live tensors, not copies; no settings.
        """
        return {
            f"{rule}.{self._names[parameter]}.{key}": optimizer.state[parameter][key]
            for rule, optimizer in self._optimizers.items()
            for settings in optimizer.param_groups
            for parameter in settings["params"]
            for key in STATE_KEYS[rule]
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Copy saved moments in. Learning rates, decay and all other settings stay those of
        this object's config: a resumed run takes its settings from the new config.

        Raises: ValueError if a tensor is missing, unknown, or of another shape or dtype;
            nothing is copied then.
        """
        own = self.state_tensors()
        missing = [name for name in own if name not in tensors]
        unknown = [name for name in tensors if name not in own]
        if missing or unknown:
            hint = nearest_name(unknown[0], list(own)) if unknown and len(own) < 50 else ""
            raise ValueError(
                f"optimizer state does not fit: {len(missing)} tensors missing {missing[:3]}, "
                f"{len(unknown)} unknown {unknown[:3]}.{hint} The model and optim.optimizer must "
                "be those of the checkpoint."
            )
        for name, target in own.items():
            source = tensors[name]
            if source.shape != target.shape or source.dtype != target.dtype:
                raise ValueError(
                    f"optimizer state '{name}' is {source.dtype} {tuple(source.shape)} in the "
                    f"checkpoint, {target.dtype} {tuple(target.shape)} in this run."
                )
        for name, target in own.items():
            target.copy_(tensors[name])

    def _by_pattern(self, members: dict[str, nn.Parameter]) -> dict[str | None, list[nn.Parameter]]:
        """Parameters of one group, apart for each learning rate of their own."""
        parts: dict[str | None, list[nn.Parameter]] = {}
        for name, parameter in members.items():
            parts.setdefault(lr_pattern(name, self.config), []).append(parameter)
        return parts

    def _extend_group(
        self, group: OptimizerGroup, pattern: str | None, parameters: list[nn.Parameter]
    ) -> None:
        """Put parameters at the end of a group, making the group on first use."""
        rule = "muon" if group == "matrices" and self.config.optimizer == "muon" else "adamw"
        name = group if pattern is None else f"{group}:{pattern}"
        if name in self._groups:
            self._groups[name]["params"].extend(parameters)
        else:
            settings = self._new_settings(group, pattern, parameters)
            if rule in self._optimizers:
                self._optimizers[rule].add_param_group(settings)
            else:
                self._optimizers[rule] = self._new_optimizer(rule, settings)
            self._groups[name] = self._optimizers[rule].param_groups[-1]
        for parameter in parameters:
            self._optimizers[rule].state[parameter] = _zero_state(rule, parameter)

    def _new_settings(
        self, group: OptimizerGroup, pattern: str | None, parameters: list[nn.Parameter]
    ) -> dict:
        """Learning rate and decay of a group."""
        config = self.config
        peak_lr = config.lr
        if pattern is not None:
            peak_lr = config.lr_by_pattern[pattern]
        elif not _takes_lr(group, config):
            assert config.adamw_lr is not None, "the rate of what does not take lr"
            peak_lr = config.adamw_lr
        return {
            "params": parameters,
            "lr": peak_lr * self._lr_scale,
            "peak_lr": peak_lr,
            "weight_decay": 0.0 if group == "undecayed" else config.weight_decay,
        }

    def _new_optimizer(self, rule: str, settings: dict) -> torch.optim.Optimizer:
        """torch optimizer with its first group."""
        config = self.config
        if rule == "muon":
            # match_rms_adamw makes one learning rate serve both rules (arXiv 2502.16982).
            return torch.optim.Muon(
                [settings], momentum=config.momentum, adjust_lr_fn="match_rms_adamw"
            )
        return torch.optim.AdamW([settings], betas=config.betas, eps=config.eps, fused=True)


def lr_scale_at(config: OptimConfig, *, step: int, total_steps: int) -> float:
    """Learning rate of a step (0-based) as a fraction of the peak: rise, plateau, fall.

    The first of W warmup steps has 1/W; the last of all steps has `min_lr_frac` if there is a
    fall. Both lengths are fractions of `total_steps`, rounded down.
    Raises: ValueError if the step is out of range.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step={step} must lie in 0..{total_steps - 1}.")
    warmup_steps = whole_steps(config.warmup_frac, total_steps)
    decay_steps = whole_steps(config.decay_frac, total_steps)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    steps_left = total_steps - 1 - step
    if steps_left >= decay_steps:
        return 1.0
    return config.min_lr_frac + (1.0 - config.min_lr_frac) * steps_left / decay_steps


def _zero_state(rule: str, parameter: nn.Parameter) -> dict[str, Tensor]:
    """State of a parameter that was never updated."""
    # float32 step on the parameter's device: what torch's fused AdamW counts in.
    scalar = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {
        key: torch.zeros_like(parameter) if shape == "like" else scalar
        for key, shape in STATE_KEYS[rule].items()
    }
