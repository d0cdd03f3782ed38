"""The `convert` command: make a pretrained model elastic, and say what is exact at which k.

What the methods do is in `convert/`; their names and options, which become flags here, are in
`convert/methods.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import jsonargparse
import yaml
from pydantic.fields import FieldInfo

from depthdial.cli.console import remark, result_console
from depthdial.cli.options import Options, UsageError, new_parser, number
from depthdial.cli.tables import facts, loop_range, short_count, table
from depthdial.config.text import load_yaml
from depthdial.convert.methods import METHODS

if TYPE_CHECKING:
    from depthdial.convert.convert import ConversionReport


def convert_parser() -> jsonargparse.ArgumentParser:
    """Flags of `convert`: its own, and one for every option of some method."""
    parser = new_parser(
        "convert",
        usage="BASE DST --method NAME [--core A:B] [...]",
        description="Turn a dense model into one that loops some of its layers, or a model that\n"
        "loops a fixed number of times into an elastic one. The result is compared with\n"
        "the base, and not written if it is not what the method promises.\n\n"
        "  depthdial convert models/dense models/elastic --method later-deltas\n"
        "  depthdial convert models/dense models/elastic --method elr-graft --core 10:20\n\n"
        f"methods:\n{_wrapped_methods()}",
    )
    parser.add_argument("base", metavar="BASE", help="run, checkpoint, model folder, or hub id")
    parser.add_argument("destination", metavar="DST", help="folder to write; must not exist")
    parser.add_argument(
        "--method", metavar="NAME", choices=list(METHODS), help="one of the above; must be given"
    )
    parser.add_argument(
        "--core",
        metavar="A:B",
        help="layers of the base that loop, counted from 0, B not among them (proposed from how "
        "far each layer turns the hidden states)",
    )
    parser.add_argument(
        "--core-layers",
        metavar="N",
        help="propose so many layers, the calmest (all between the knees of the curve)",
    )
    parser.add_argument(
        "--texts",
        metavar="PATH",
        help="text to look at layers and compare with, file or folder (the embedded corpus)",
    )
    parser.add_argument("--seed", default="0", metavar="N", help="of new parameters (0)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model folder that is there"
    )
    group = parser.add_argument_group("options of methods")
    for name, text in option_texts().items():
        group.add_argument(f"--{name.replace('_', '-')}", dest=name, metavar="VALUE", help=text)
    return parser


def option_texts() -> dict[str, str]:
    """Option -> its help: what it means, its values, the methods that have it, its defaults."""
    fields: dict[str, dict[str, FieldInfo]] = {}
    for name, method in METHODS.items():
        for option, field in method.options.model_fields.items():
            fields.setdefault(option, {})[name] = field
    return {option: _help(owners).replace("%", "%%") for option, owners in fields.items()}


def run_convert(options: Options) -> int:
    """Convert one model and print what was kept."""
    from depthdial.api.paths import model_folder
    from depthdial.convert.convert import convert

    if options.method is None:
        raise UsageError(f"give --method and one of {', '.join(METHODS)}.")
    given = {name: options[name] for name in option_texts() if options[name] is not None}
    report = convert(
        model_folder(options.base),
        options.destination,
        method=options.method,
        core=options.core,
        core_layers=number(options.core_layers, "--core-layers", whole=True),
        options={name: _value(name, text) for name, text in given.items()},
        texts=options.texts,
        seed=number(options.seed, "--seed", whole=True),
        overwrite=options.overwrite,
    )
    print_report(report)
    return 0


def print_report(report: ConversionReport) -> None:
    """What was made, what is new in it, and what equals the base at which loop counts."""
    console = result_console()
    new = sum(report.new_parameters.values())
    total = sum(t.numel() for t in report.result.model.state_dict().values())
    parts = sorted({name.partition(".")[0] for name in report.new_parameters})
    rows = [
        ("method", f"{report.method}: {METHODS[report.method].summary}"),
        ("layers", _layers_text(report)),
        ("parameters", f"{short_count(total)}, {_new_text(new, parts)}"),
        ("loops", _loops_text(report)),
        ("training ran", loop_range(report.config.trained_at)),
        ("promise", _promise_text(report)),
    ]
    console.print(facts(f"{report.folder}: converted", rows))
    rows = [
        (
            f"{x.num_loops}",
            f"{x.base_loops}",
            "identical" if x.is_identical else f"{x.max_abs:.2g}",
            f"{x.mean_kl:.2g}",
            f"{max((layer.max_abs for layer in x.layers), default=0.0):.2g}" if x.layers else "",
        )
        for x in report.result.comparisons
    ]
    columns = ("loops k", "base's loops", "logits, max |diff|", "KL, nats", "layers, max |diff|")
    console.print()
    title = f"against the base, {report.compared_on}, {report.result.compared_in}"
    console.print(table(title, columns, rows))
    remark(
        f"equality.json has every layer. Look at it: depthdial sweep {report.folder}; "
        f"train it: depthdial train RECIPE --init {report.folder}"
    )


def _layers_text(report: ConversionReport) -> str:
    prelude, core, coda = report.config.split
    counts = f"{prelude} + {core} + {coda} sublayers (prelude, core, coda)"
    if report.core_range is None:
        return counts
    how = "proposed, see core_choice.png" if report.curve is not None else "as given"
    return f"core {report.core_range} of the base's layers, {how}; {counts}"


def _new_text(count: int, parts: list[str]) -> str:
    if not count:
        return "none new"
    return f"{short_count(count)} of them new, in {', '.join(parts)}"


def _loops_text(report: ConversionReport) -> str:
    config = report.config
    if config.num_loops == config.max_loops:
        return f"{config.num_loops}"
    return f"1 to {config.max_loops}, {config.num_loops} where a request names none"


def _promise_text(report: ConversionReport) -> str:
    plan = report.result.converted
    if plan.promises == "none":
        return f"none: {plan.why_not}"
    kept = "bit for bit" if plan.promises == "bits" else "within 1e-4"
    pairs = ", ".join(str(pair.result) for pair in plan.pairs)
    return f"equals the base {kept} at k = {pairs} before any training"


def _value(name: str, text: str) -> Any:
    """Value of an option in plain JSON types; the method checks its range. Raises: UsageError."""
    try:
        return load_yaml(text)
    except yaml.YAMLError:
        raise UsageError(f"--{name.replace('_', '-')} cannot read '{text}'.") from None


def _shown(value: object) -> str:
    """A default as one would type it."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _help(owners: dict[str, FieldInfo]) -> str:
    """Each meaning of an option once, with the methods and defaults that go with it."""
    meanings: dict[str, dict[str, list[str]]] = {}
    for name, field in owners.items():
        description = " ".join((field.description or "").split()).removesuffix(".")
        choices = " | ".join(dict.fromkeys(_choices(field.annotation)))
        meaning = f"{description}: {choices}" if choices else description
        meanings.setdefault(meaning, {}).setdefault(_shown(field.default), []).append(name)
    sentences = []
    for meaning, by_default in meanings.items():
        defaults = [f"{', '.join(names)}: {value}" for value, names in by_default.items()]
        sentences.append(f"{meaning} ({'; '.join(defaults)})")
    return ". ".join(sentences)


def _choices(annotation: Any) -> Iterator[str]:
    """Words that an option may be."""
    if get_origin(annotation) is Literal:
        yield from map(str, get_args(annotation))
    else:
        for argument in get_args(annotation):
            yield from _choices(argument)


def _wrapped_methods() -> str:
    """Names, and the summaries below them: together they would pass 80 columns."""
    return "\n".join(f"  {name}\n      {METHODS[name].summary}" for name in METHODS)
