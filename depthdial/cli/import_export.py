"""Commands that open and write published checkpoints: import, export. `inspect` has its own file.

What they do is in `formats/import_export.py`; here are flags and the lines that say what happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jsonargparse

from depthdial.cli.console import remark, result_console
from depthdial.cli.options import Options, new_parser
from depthdial.cli.tables import (
    bullets,
    facts,
    loop_range,
    short_count,
    size,
)

if TYPE_CHECKING:
    from depthdial.config import ModelConfig
    from depthdial.formats.import_export import ImportReport

GGUF_DTYPES = ("fp32", "bf16")


def import_parser() -> jsonargparse.ArgumentParser:
    """Flags of `import`."""
    parser = new_parser(
        "import",
        usage="SRC DST [--family NAME] [--dtype fp32|bf16] [...]",
        description="Turn a published checkpoint into a model folder that every command opens.\n"
        "The source is only read; every tensor and config key is accounted for, or\n"
        "nothing is written.\n\n"
        "  depthdial import checkpoints/looped-1.4b models/looped\n"
        "  depthdial import checkpoints/small.Q4_1.gguf models/small --dtype bf16",
    )
    parser.add_argument("source", metavar="SRC", help="folder, .gguf file, or hub id org/name")
    parser.add_argument("destination", metavar="DST", help="folder to write; must not exist")
    parser.add_argument("--family", metavar="NAME", help="the source's family (recognised)")
    parser.add_argument(
        "--dtype",
        choices=GGUF_DTYPES,
        help="numbers of a GGUF file's weights (fp32); other checkpoints keep theirs",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model folder that is there"
    )
    return parser


def run_import(options: Options) -> int:
    """Import one checkpoint and say what a user should know of it."""
    import torch

    from depthdial.formats.import_export import import_checkpoint

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, None: None}
    report = import_checkpoint(
        options.source,
        options.destination,
        family=options.family,
        overwrite=options.overwrite,
        dtype=dtypes[options.dtype],
    )
    _print_import(report)
    return 0


def export_parser() -> jsonargparse.ArgumentParser:
    """Flags of `export`."""
    parser = new_parser(
        "export",
        usage="DIR --as FAMILY DST [--overwrite]",
        description="Write a model in a published format. A model that was imported from it gets\n"
        "its own config, files and tokenizer back.\n\n"
        "  depthdial export models/looped --as FAMILY exports/looped\n"
        "  depthdial export runs/tiny-text --as hf exports/tiny-text\n\n"
        "`depthdial inspect models/looped` names the family that a model came from.",
    )
    parser.add_argument("model", metavar="DIR", help="run, checkpoint or model folder")
    parser.add_argument("destination", metavar="DST", help="folder to write; must not exist")
    parser.add_argument(
        "--as",
        dest="family",
        metavar="FAMILY",
        required=True,
        help="published format; hf for a folder that transformers opens with its own code",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a model folder that is there"
    )
    return parser


def run_export(options: Options) -> int:
    """Export one model."""
    from depthdial.api.paths import model_folder
    from depthdial.formats.hf_export import FORMAT, export_hf
    from depthdial.formats.import_export import export_checkpoint

    folder = model_folder(options.model)
    if options.family == FORMAT:
        report = export_hf(folder, options.destination, overwrite=options.overwrite)
    else:
        report = export_checkpoint(
            folder, options.destination, family=options.family, overwrite=options.overwrite
        )
    console = result_console()
    console.print(str(report.folder), style="bold", soft_wrap=True)
    rows = (
        ("format", report.family),
        ("tensors", f"{report.num_tensors} ({size(report.num_bytes)})"),
        ("files", ", ".join(report.files)),
    )
    console.print(facts("", rows))
    if report.warnings:
        console.print("", bullets("Warnings", report.warnings))
    if report.as_it_came:
        remark("config, tensor names and tokenizer are those of the imported checkpoint.")
    return 0


def _print_import(report: ImportReport) -> None:
    config, tokens = report.config, report.tokens
    stops = ", ".join(map(str, sorted(tokens.stop_ids))) or "none"
    console = result_console()
    console.print(str(report.folder), style="bold", soft_wrap=True)
    console.print(
        facts(
            "",
            (
                ("imported from", report.family),
                ("parameters", f"{short_count(report.num_parameters)} ({size(report.num_bytes)})"),
                ("tensors", f"{report.num_source_tensors} read, all accounted for"),
                *_loop_rows(config),
                ("text", "tokenizer carried over" if tokens.has_tokenizer else "token ids only"),
                ("stop ids", stops),
                ("chat template", tokens.template_in or "none"),
            ),
        )
    )
    for title, sentences in (("Warnings", report.warnings), ("Notes", report.notes)):
        if sentences:
            console.print("", bullets(title, sentences))
    remark(f"Look at it: depthdial inspect {report.folder}")


def _loop_rows(config: ModelConfig) -> list[tuple[str, str]]:
    if config.max_loops == 1:
        return [("loops", "1: a dense model")]
    return [
        ("loops", f"{config.num_loops} by default, made for 1 to {config.max_loops}"),
        ("training ran", loop_range(config.trained_at)),
    ]
