"""What the project knows about one published family, as data and a few functions.

The families themselves are in `families/`, their list in `families/registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from depthdial.config import ModelConfig, is_read, named_rule
from depthdial.formats.source_config import WITHOUT_EFFECT, SourceConfig
from depthdial.formats.tensors.rules import TensorRule

NOT_IN_SOURCES = {
    "init_std",
    "max_loops",
    "loop.beyond_max_loops",
    "loop.delta_init",
    "loop.gamma_init",
    "loop.random_state_seed",
    "trained_loops",
    "exit_gate_stale",
}
"""Fields of ours that a published format may leave out: they concern training, or what our own
tools do beyond it."""

DENSE = {
    "max_loops": 1,
    "prelude_norm": False,
    "modulation": None,
    "loop_lora": None,
    "segments": [],
    "core_d_model": None,
    "core_num_heads": None,
    "core_num_kv_heads": None,
    "exit_gate": "none",
    "loop.update": "replace",
    "loop.injection": "none",
    "loop.initial_state": "prelude",
    "loop.unit_norm": False,
    "loop.state_projection": False,
    "loop.local_window": None,
}
"""Fields whose values say that the split of a model has no effect on what it computes."""


@dataclass(frozen=True)
class Family:
    """Two-way translation between a published format and ours."""

    name: str
    """Name on the command line."""
    summary: str
    """One sentence for people: what the family is and what it is published as."""
    matches: Callable[[dict[str, Any]], bool]
    """Whether a config.json is of this family."""
    read: Callable[[SourceConfig], ModelConfig]
    """Source config -> ours. ValueError names what this runtime cannot do."""
    rules: Callable[[ModelConfig, dict[str, Any]], list[TensorRule]]
    """Tensors of a model of ours and of the source config that it came from or goes to."""
    to_source: Callable[[ModelConfig], dict[str, Any]]
    """Ours -> a source config in the published spelling, as far as the format can say it."""
    limits: Callable[[ModelConfig], list[str]]
    """What this runtime does differently from the published one, in sentences for people."""
    choices: Callable[[dict[str, Any]], list[str]] = lambda values: []
    """Settings of a source config that are a choice of each request here, in sentences."""

    def notes(self, config: ModelConfig, source: dict[str, Any]) -> tuple[str, ...]:
        """What a user should know of a source config that was read as `config`."""
        return (*self.choices(source), *self.limits(config))

    def write(self, config: ModelConfig, origin: dict[str, Any] | None) -> dict[str, Any]:
        """The source config of an export.

        Args: origin: source config that the model came from; returned unchanged where it still
            says what the model is. Otherwise its keys without effect (special tokens, class
            names) are kept.
        Raises: ValueError naming the fields that the format cannot say.
        """
        if origin is not None and not self._differences(config, origin):
            return dict(origin)
        try:
            values = self.to_source(config)
            if origin is not None and self.matches(origin):
                values |= {key: origin[key] for key in origin if key in WITHOUT_EFFECT}
            problem = "; ".join(self._differences(config, values))
        except ValueError as error:
            problem = str(error).removesuffix(".")
        if problem:
            raise ValueError(
                f"this model cannot be written as '{self.name}': {problem}. Export it as another "
                "family, or as 'hf', which can say everything."
            )
        return values

    def _differences(self, config: ModelConfig, values: dict[str, Any]) -> list[str]:
        """Fields in which a source config means another model than ours."""
        if not self.matches(values):
            return [f"it is not a config of '{self.name}'"]
        meant = self.read(SourceConfig(values, called="the config that it would get"))
        # A format that has no split, or no policy, still says a dense model that has one.
        return min(
            _differing(meant, config), _differing(simplest(meant), simplest(config)), key=len
        )


def _differing(meant: ModelConfig, config: ModelConfig) -> list[str]:
    """Fields in which one config would be another, but for those that no format says."""
    read, ours = _flat(meant), _flat(config)
    return [
        f"{key}={ours.get(key)!r} would be read as {read.get(key)!r}"
        for key in sorted(read.keys() | ours.keys())
        if key not in NOT_IN_SOURCES and read.get(key) != ours.get(key)
    ]


def simplest(config: ModelConfig) -> ModelConfig:
    """One config for all that are the same dense model by construction.

    At one loop the whole stack is a core that runs once, wherever it is split; a final norm in
    each loop is one before the head, and most cache policies are the same.
    """
    dense = config.replace(final_norm="head") if config.final_norm == "loop" else config
    if loop_traces(dense):
        return config
    if named_rule(dense.loop.cache_policy).same_at_one_loop:
        dense = dense.replace(**{"loop.cache_policy": "per_loop"})
    has_edges = is_read(dense.prelude_layout + dense.coda_layout, "d_ff")
    if dense.core_d_ff not in (None, dense.d_ff) and has_edges:
        # Two widths of MLP need the split that says which layers have which.
        return dense
    d_ff = dense.core_d_ff or dense.d_ff
    return dense.replace(split=[0, sum(dense.split), 0], d_ff=d_ff, core_d_ff=None)


def _flat(config: ModelConfig) -> dict[str, Any]:
    """Dotted key -> value; the layout written out, since sources spell it in their own way."""
    flat: dict[str, Any] = {}

    def visit(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                visit(value, f"{prefix}{key}.")
            elif value is not None:
                flat[f"{prefix}{key}"] = value

    visit(config.to_dict(), "")
    flat["layout"] = config.sublayers
    for name, default in (
        ("core_d_ff", config.d_ff),
        ("core_d_model", config.d_model),
        ("core_num_heads", config.num_heads),
        ("core_num_kv_heads", config.num_kv_heads),
        ("qk_norm_eps", config.norm_eps),
    ):
        if flat.get(name) == default:
            del flat[name]
    return flat


def loop_traces(config: ModelConfig) -> list[str]:
    """Fields by which the split of a model means something; none for a dense model."""
    values = config.to_dict()
    wrong = []
    for key, wanted in DENSE.items():
        found: Any = values
        for part in key.split("."):
            found = found[part]
        if found != wanted:
            wrong.append(f"{key}={found!r} instead of {wanted!r}")
    if config.final_norm not in ("head", "none"):
        wrong.append(f"final_norm='{config.final_norm}' instead of 'head'")
    return wrong
