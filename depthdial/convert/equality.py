"""The proof that a conversion kept what it promised: logits and layers of base and result.

Both run in float32 on the same tokens, whatever their weights are stored in, and in float64 where
float32 rounds more than a promise allows. What a method promises is in its `Plan`; a broken
promise is an error, and nothing is written then.
Letters: B rows, T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from depthdial.convert.base_model import Converted, block_places
from depthdial.model.looped_lm import LoopedLM

TOLERANCE = 1e-4
"""Largest absolute difference of logits that counts as equal."""


@dataclass(frozen=True)
class LayerDifference:
    """Hidden states after one executed layer, base against result.

    Fields:
        layer: of the base, counted from 0. loop_idx: how often the base had run it before.
        max_abs: largest absolute difference. base_rms: root mean square of the base's states.
    """

    layer: int
    loop_idx: int
    max_abs: float
    base_rms: float


@dataclass(frozen=True)
class Comparison:
    """Base and result at one pair of loop counts.

    Fields:
        base_loops, num_loops: of base and result.
        max_abs: largest absolute difference of logits. mean_kl: of the base's next-token
            distribution to the result's, nats per token. is_identical: bit for bit.
        layers: in the order of execution; empty where the two run different numbers of layers.
    """

    base_loops: int
    num_loops: int
    max_abs: float
    mean_kl: float
    is_identical: bool
    layers: tuple[LayerDifference, ...]

    @property
    def is_close(self) -> bool:
        """Logits within TOLERANCE."""
        return self.max_abs <= TOLERANCE


def is_kept(converted: Converted, comparisons: Sequence[Comparison]) -> bool:
    """Whether the plan's promise holds in every comparison."""
    if converted.promises == "none":
        return True
    return all(x.is_identical if converted.promises == "bits" else x.is_close for x in comparisons)


@torch.no_grad()
def compare(
    base: LoopedLM, result: LoopedLM, tokens_BT: Tensor, converted: Converted
) -> list[Comparison]:
    """Both models at every pair of loop counts that the plan names.

    Layers are compared at the first pair.
    Raises: ValueError for logits that are no finite numbers, of which nothing can be said.
    """
    comparisons = []
    for pair in converted.pairs:
        expected_BTV, expected_layers = run_layers(base, tokens_BT, pair.base)
        given_BTV, given_layers = run_layers(result, tokens_BT, pair.result)
        _check_finite("base", expected_BTV, pair.base)
        _check_finite("result", given_BTV, pair.result)
        layers: tuple[LayerDifference, ...] = ()
        if pair == converted.pairs[0]:
            layers = _layer_differences(expected_layers, given_layers, matching=converted.matching)
        comparisons.append(
            Comparison(
                base_loops=pair.base,
                num_loops=pair.result,
                max_abs=float((given_BTV - expected_BTV).abs().max()),
                mean_kl=mean_kl(expected_BTV, given_BTV),
                is_identical=torch.equal(given_BTV, expected_BTV),
                layers=layers,
            )
        )
    return comparisons


def _check_finite(whose: str, logits_BTV: Tensor, num_loops: int) -> None:
    if bool(logits_BTV.isfinite().all()):
        return
    where = (
        "Its weights hold NaN or infinity, or overflow: import it again, or train it further "
        "before it is converted."
        if whose == "base"
        else "Nothing was written. Choose another method or core."
    )
    raise ValueError(
        f"the logits of the {whose} at {num_loops} loops are not all finite numbers. {where}"
    )


def check_promise(name: str, converted: Converted, comparisons: Sequence[Comparison]) -> None:
    """Refuse a result that is not what its method promises. Raises: ValueError."""
    if is_kept(converted, comparisons):
        return
    worst = max(comparisons, key=lambda x: x.max_abs)
    wanted = "bit for bit" if converted.promises == "bits" else f"within {TOLERANCE:g}"
    raise ValueError(
        f"'{name}' promises to equal the base {wanted} at {worst.num_loops} loops, but logits "
        f"differ by up to {worst.max_abs:.3g} (mean KL {worst.mean_kl:.3g} nats). Nothing was "
        "written. The base has a part that this method does not carry over; please report its "
        "config."
    )


def run_layers(
    model: LoopedLM, tokens_BT: Tensor, num_loops: int
) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Logits, and (layer, its output) of every executed layer in order."""
    stacks = (model.prelude_stack, model.core_stack, model.coda_stack)
    sublayers = [sublayer for stack in stacks for sublayer in stack]
    outputs: list[tuple[int, Tensor]] = []
    hooks = [
        sublayers[places[-1]].register_forward_hook(
            lambda module, inputs, output, layer=layer: outputs.append((layer, output))
        )
        for layer, places in enumerate(block_places(model.config))
    ]
    try:
        logits_BTV = model(tokens_BT, num_loops=num_loops)
    finally:
        for hook in hooks:
            hook.remove()
    return logits_BTV, outputs


def mean_kl(expected_BTV: Tensor, given_BTV: Tensor) -> float:
    """Mean over tokens of KL(expected || given) of the next-token distributions, nats."""
    total = 0.0
    # Row by row and in float64: vocabularies are wide, and differences here may be 1e-10.
    for expected_TV, given_TV in zip(expected_BTV, given_BTV, strict=True):
        log_p = expected_TV.to(torch.float64).log_softmax(dim=-1)
        log_q = given_TV.to(torch.float64).log_softmax(dim=-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total / (expected_BTV.shape[0] * expected_BTV.shape[1])


def widened(
    tensors: Mapping[str, Tensor], dtype: torch.dtype, memo: dict[int, Tensor]
) -> dict[str, Tensor]:
    """The tensors in a wider dtype; one that was widened before is taken from `memo`.

    Args: memo: address of the data -> its copy; shared between base and result.
    """
    wide = {}
    for name, tensor in tensors.items():
        if tensor.dtype == dtype:
            wide[name] = tensor
            continue
        if tensor.data_ptr() not in memo:
            memo[tensor.data_ptr()] = tensor.to(dtype)
        wide[name] = memo[tensor.data_ptr()].view(tensor.shape)
    return wide


def as_json(converted: Converted, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """What equality.json says of promise and measurement."""
    return {
        "promise": {"bits": "identical", "close": f"within {TOLERANCE:g}"}.get(
            converted.promises, "none"
        ),
        "why_none": converted.why_not or None,
        "tolerance": TOLERANCE,
        "compared": [
            {
                "base_loops": measured.base_loops,
                "num_loops": measured.num_loops,
                "max_abs_logit_difference": measured.max_abs,
                "mean_kl_nats": measured.mean_kl,
                "is_identical": measured.is_identical,
                "layers": [
                    {
                        "layer": x.layer,
                        "loop_idx": x.loop_idx,
                        "max_abs_difference": x.max_abs,
                        "base_rms": x.base_rms,
                    }
                    for x in measured.layers
                ],
            }
            for measured in comparisons
        ],
    }


def _layer_differences(
    expected: Sequence[tuple[int, Tensor]],
    given: Sequence[tuple[int, Tensor]],
    *,
    matching: Sequence[int] | None,
) -> tuple[LayerDifference, ...]:
    places = range(len(expected)) if matching is None else matching
    if len(places) != len(given):
        assert matching is None, f"{len(matching)} layers matched, {len(given)} were run"
        return ()
    loops_run: dict[int, int] = {}
    differences = []
    for place, (_, output_BTD) in zip(places, given, strict=True):
        layer, wanted_BTD = expected[place]
        loop_idx = loops_run[layer] = loops_run.get(layer, -1) + 1
        differences.append(
            LayerDifference(
                layer=layer,
                loop_idx=loop_idx,
                max_abs=float((output_BTD - wanted_BTD).abs().max()),
                base_rms=float(wanted_BTD.square().mean().sqrt()),
            )
        )
    return tuple(differences)
