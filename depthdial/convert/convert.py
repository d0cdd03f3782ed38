"""Make a pretrained model elastic: `convert` reads a model folder and writes another one.

The methods are listed in `methods.py`, and what each decides is in `tying.py`, `low_rank.py` and
`grafts.py`. Here the core is found, the result put together, compared with the base and written;
a result that is not what its method promises is not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthdial.config import ModelConfig, StrictConfig
from depthdial.config.text_files import dump_json
from depthdial.convert.base_model import (
    STACKS,
    BaseModel,
    Converted,
    CoreRange,
    block_places,
    check_dense,
    read_core_range,
)
from depthdial.convert.core_choice import CoreCurve, measure_core, read_pieces
from depthdial.convert.equality import (
    Comparison,
    as_json,
    check_promise,
    compare,
    is_kept,
    widened,
)
from depthdial.convert.grafts import (
    decay_gate,
    decay_gate_ungated_first,
    elastic_fixed,
    elr_graft,
    retrofitted_recurrence,
)
from depthdial.convert.low_rank import joint_deltas, later_deltas, relaxed_recursive
from depthdial.convert.merging import merge_first_pass
from depthdial.convert.methods import method_named, read_options
from depthdial.convert.tying import anchored, damped, loop_core, tie_layers
from depthdial.data.tokenizer import TOKENIZER_FILE, Tokenizer
from depthdial.disk import new_folder
from depthdial.model.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_model, save_model
from depthdial.model.folder import (
    ORIGIN_FILE,
    ORIGIN_TENSORS_FILE,
    copy_files,
    copy_licences,
    copy_own,
    hash_files,
)
from depthdial.model.init_weights import init_weights
from depthdial.model.looped_lm import LoopedLM
from depthdial.report.core_choice import core_png

EQUALITY_FILE, CORE_FILE, PLOT_FILE = "equality.json", "core_choice.json", "core_choice.png"
PROOF_ROWS, PROOF_TOKENS = 4, 64
"""Texts and tokens of each on which base and result are compared."""

ConversionFunction = Callable[[BaseModel, CoreRange | None, Any, int], Converted]


def _without_seed(converted: Callable[[BaseModel, Any, Any], Converted]) -> ConversionFunction:
    return lambda base, core_range, options, seed: converted(base, core_range, options)


CONVERSIONS: dict[str, ConversionFunction] = {
    "loop-window": _without_seed(loop_core),
    "damped": _without_seed(damped),
    "anchored": _without_seed(anchored),
    "tie-layers": _without_seed(tie_layers),
    "relaxed-recursive": _without_seed(relaxed_recursive),
    "retrofitted-recurrence": _without_seed(retrofitted_recurrence),
    "decay-gate": lambda base, core_range, options, seed: decay_gate(
        base, core_range, options, seed=seed
    ),
    "decay-gate-ungated-first": _without_seed(decay_gate_ungated_first),
    "elr-graft": _without_seed(elr_graft),
    "later-deltas": _without_seed(later_deltas),
    "joint-deltas": _without_seed(joint_deltas),
    "elastic-fixed": _without_seed(elastic_fixed),
    "merge-first-pass": _without_seed(merge_first_pass),
}
"""What carries out each method of `methods.METHODS`."""


@dataclass(frozen=True)
class ConvertedModel:
    """A base converted in memory.

    Fields:
        model: the result. plan: what the method promised. comparisons: what was measured.
        compared_in: name of the dtype of these: float32, or float64 where that rounds too much.
    """

    model: LoopedLM
    converted: Converted
    comparisons: tuple[Comparison, ...]
    compared_in: str


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion wrote.

    Fields:
        folder, method: as asked. options: with their defaults.
        base_config: of the base. core_range: its layers that loop; None where it loops already.
        curve: that proposed the core; None where it was given.
        result: model, promise and measurement.
        new_parameters: name -> numbers, of parameters that are in no layer of the base.
        compared_on: what base and result were run on, in words.
    """

    folder: Path
    method: str
    options: StrictConfig
    base_config: ModelConfig
    core_range: CoreRange | None
    curve: CoreCurve | None
    result: ConvertedModel
    new_parameters: Mapping[str, int]
    compared_on: str

    @property
    def config(self) -> ModelConfig:
        """Config of the result."""
        return self.result.model.config


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    method: str,
    core: str | None = None,
    core_layers: int | None = None,
    options: Mapping[str, Any] | None = None,
    texts: str | Path | None = None,
    seed: int = 0,
    overwrite: bool = False,
) -> ConversionReport:
    """Convert a model folder by one of the methods of `methods.METHODS`.

    The source is only read. The destination gets the model, the tokenizer files, origin.json,
    equality.json, and, where the core was proposed, core_choice.json and core_choice.png; it
    appears when all of them are complete.

    Args:
        core: layers a:b of the base that loop, counted from 0; None to propose them from the
            curve of the hidden states.
        core_layers: how many layers to propose; None for all between the knees of the curve.
        options: of the method, by name; see `methods.py`.
        texts: file or folder of text for curve and comparison; None for the embedded corpus.
        seed: of new parameters.
        overwrite: replace a model folder at `destination`.

    Raises: FileNotFoundError; ValueError for an option without effect or out of range, a base that
        the method is not for, a result that is not what the method promises, or a destination
        that is taken.
    """
    source, texts = Path(source), None if texts is None else Path(texts)
    chosen = read_options(method, dict(options or {}))
    read = [source] if texts is None else [source, texts]
    with new_folder(
        Path(destination), kind="a model folder", overwrite=overwrite, apart_from=read
    ) as folder:
        base, tokenizer = load_model(source).eval(), _tokenizer_of(source)
        _check_ids(base.config, tokenizer, source)
        if texts is not None and tokenizer is None:
            raise ValueError(
                f"texts={texts} has no effect: {source} has no {TOKENIZER_FILE}. Remove it."
            )
        core_range, curve = _core_range(
            base, tokenizer, method=method, core=core, core_layers=core_layers, texts=texts
        )
        tokens_BT, compared_on = _proof_tokens(base.config, tokenizer, texts=texts, seed=seed)
        result = convert_model(
            base, tokens_BT, method=method, core_range=core_range, options=chosen, seed=seed
        )
        report = ConversionReport(
            folder=Path(destination),
            method=method,
            options=chosen,
            base_config=base.config,
            core_range=core_range,
            curve=curve,
            result=result,
            new_parameters=_new_parameters(base, result.model),
            compared_on=compared_on,
        )
        save_model(result.model, folder)
        _write_records(report, folder, source=source, seed=seed)
    return report


def convert_model(
    base: LoopedLM,
    tokens_BT: Tensor,
    *,
    method: str,
    core_range: CoreRange | None,
    options: StrictConfig,
    seed: int = 0,
) -> ConvertedModel:
    """Convert in memory and compare; the result shares every tensor that it does not change.

    Args: tokens_BT: to compare on. Others as in `convert`; options: as `read_options` gives them.
    Raises: ValueError as `convert`.
    """
    parts = BaseModel(base.config, base.state_dict())
    if method_named(method).takes_core:
        check_dense(base.config)
        assert core_range is not None, f"'{method}' needs a core"
    converted = CONVERSIONS[method](parts, core_range, options, seed)
    trained = converted.trained_loops(base.config)
    converted = replace(converted, config=converted.config.with_trained(trained))
    model = with_new_modules(converted, seed=seed)
    comparisons, compared_in = _compared(base, model, converted, tokens_BT)
    check_promise(method, converted, comparisons)
    return ConvertedModel(model, converted, tuple(comparisons), compared_in)


def _compared(
    base: LoopedLM, model: LoopedLM, converted: Converted, tokens_BT: Tensor
) -> tuple[list[Comparison], str]:
    """Comparisons, and the dtype they were made in."""
    comparisons = _compared_in(torch.float32, base, model, converted, tokens_BT)
    # Logits of large models, summed in another order, differ by more in float32.
    if converted.promises == "close" and not is_kept(converted, comparisons):
        return _compared_in(torch.float64, base, model, converted, tokens_BT), "float64"
    return comparisons, "float32"


def _compared_in(
    dtype: torch.dtype, base: LoopedLM, model: LoopedLM, converted: Converted, tokens_BT: Tensor
) -> list[Comparison]:
    memo: dict[int, Tensor] = {}
    return compare(
        assembled(base.config, widened(base.state_dict(), dtype, memo)),
        assembled(converted.config, widened(model.state_dict(), dtype, memo)),
        tokens_BT,
        converted,
    )


def with_new_modules(converted: Converted, *, seed: int) -> LoopedLM:
    """The result; parameters that the plan leaves out get the values of a fresh model."""
    with torch.device("meta"):
        model = LoopedLM(converted.config)
    missing = model.state_dict().keys() - converted.tensors.keys()
    unknown = converted.tensors.keys() - model.state_dict().keys()
    assert not unknown, f"the result has no {sorted(unknown)[:3]}"
    tensors, like = dict(converted.tensors), converted.tensors["embedding.weight"]
    for part in sorted({name.partition(".")[0] for name in missing}):
        module = model.get_submodule(part).to_empty(device="cpu")
        init_weights(module, converted.config, seed=seed, prefix=part)
        fresh = {f"{part}.{name}": t.to(like.dtype) for name, t in module.state_dict().items()}
        tensors |= {name: t for name, t in fresh.items() if name in missing}
    return assembled(converted.config, tensors)


def assembled(config: ModelConfig, tensors: Mapping[str, Tensor]) -> LoopedLM:
    """A model that holds these very tensors."""
    with torch.device("meta"):
        model = LoopedLM(config)
    model.load_state_dict(dict(tensors), assign=True)
    return model.eval()


def _check_no_core(method: str, *, core: str | None, core_layers: int | None) -> None:
    for name, value in (("core", core), ("core_layers", core_layers)):
        if value is not None:
            raise ValueError(f"{name}={value} has no effect with the method '{method}'. Remove it.")


def _core_range(
    base: LoopedLM,
    tokenizer: Tokenizer | None,
    *,
    method: str,
    core: str | None,
    core_layers: int | None,
    texts: Path | None,
) -> tuple[CoreRange | None, CoreCurve | None]:
    """The core that was given, or the one that the base's curve proposes; None for none."""
    if not method_named(method).takes_core:
        _check_no_core(method, core=core, core_layers=core_layers)
        return None, None
    check_dense(base.config)
    if core is not None:
        if core_layers is not None:
            raise ValueError(
                f"core={core} and core_layers={core_layers}: give the layers, or how many to "
                "propose."
            )
        return read_core_range(core, len(block_places(base.config))), None
    if tokenizer is None:
        raise ValueError(
            f"the base has no {TOKENIZER_FILE}, so its layers cannot be looked at on text. Give "
            "the core as a:b."
        )
    wide = assembled(base.config, widened(base.state_dict(), torch.float32, {}))
    curve = measure_core(wide, tokenizer, texts=texts, num_layers=core_layers)
    return curve.proposed, curve


def _tokenizer_of(folder: Path) -> Tokenizer | None:
    return Tokenizer.from_dir(folder) if (folder / TOKENIZER_FILE).is_file() else None


def _check_ids(config: ModelConfig, tokenizer: Tokenizer | None, folder: Path) -> None:
    if tokenizer is not None and tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer of {folder} has {tokenizer.vocab_size} ids, but the model reads "
            f"{config.vocab_size}. It is that of another model: copy the right one."
        )


def _proof_tokens(
    config: ModelConfig, tokenizer: Tokenizer | None, *, texts: Path | None, seed: int
) -> tuple[Tensor, str]:
    """Token ids [B, T] to compare on, and what they are."""
    length = min(PROOF_TOKENS, config.max_context)
    if tokenizer is None:
        generator = torch.Generator().manual_seed(seed)
        shape = (PROOF_ROWS, length)
        tokens_BT = torch.randint(0, config.vocab_size, shape, generator=generator)
        return tokens_BT, f"{PROOF_ROWS} x {length} random tokens"
    pieces = read_pieces(texts, PROOF_ROWS, purpose="the comparison with the base")
    opening = list(tokenizer.opening_ids)
    rows = [[*opening, *ids][:length] for ids in tokenizer.encode_batch(pieces)]
    length = min(map(len, rows))
    tokens_BT = torch.tensor([row[:length] for row in rows])
    return tokens_BT, f"{PROOF_ROWS} x {length} tokens of text"


def _new_parameters(base: LoopedLM, result: LoopedLM) -> dict[str, int]:
    """Parameters that the base lacks, other than layers under a new name."""
    known = base.state_dict().keys()
    return {
        name: tensor.numel()
        for name, tensor in result.state_dict().items()
        if name not in known and not name.startswith(STACKS)
    }


def _write_records(report: ConversionReport, folder: Path, *, source: Path, seed: int) -> None:
    """Everything beside the model: tokenizer, licences, origin, equality and curve."""
    copy_files(source, folder)
    copy_licences(source, folder)
    for name in (ORIGIN_FILE, ORIGIN_TENSORS_FILE):
        if (source / name).is_file():
            copy_own(source, name, folder)
    values = {
        "method": report.method,
        "options": report.options.to_dict(),
        "core": None if report.core_range is None else list(report.core_range),
        "core_is_proposed": report.curve is not None,
        "seed": seed,
        "base_sha256": hash_files(source / name for name in (CONFIG_FILE, WEIGHTS_FILE)),
        "new_parameters": sum(report.new_parameters.values()),
        "compared_on": report.compared_on,
        "compared_in": report.result.compared_in,
        **as_json(report.result.converted, report.result.comparisons),
    }
    (folder / EQUALITY_FILE).write_text(dump_json(values), encoding="utf-8")
    if report.curve is not None:
        (folder / CORE_FILE).write_text(dump_json(report.curve.as_json()), encoding="utf-8")
        _plot(report.curve, folder / PLOT_FILE)


def _plot(curve: CoreCurve, path: Path) -> None:
    try:
        image = core_png(curve.distances, core=curve.proposed, knees=curve.knees)
    except ImportError as error:
        warnings.warn(f"no {PLOT_FILE}: {error}", stacklevel=2)
        return
    path.write_bytes(image)
