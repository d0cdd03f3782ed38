"""The command prepare: your text as training data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jsonargparse

from depthdial.cli.console import remark, write
from depthdial.cli.options import Options, UsageError, naming_flags, new_parser, number

if TYPE_CHECKING:
    from depthdial.data.tokenizer import Tokenizer


def prepare_parser() -> jsonargparse.ArgumentParser:
    """Flags of `prepare`."""
    parser = new_parser(
        "prepare",
        usage="PATH... --out DIR [--vocab-size N] [...]",
        description="Turn txt, jsonl and parquet files, or folders of them, into training data.\n\n"
        "  depthdial prepare speeches/ letters.jsonl --out my-data --vocab-size 4096\n"
        "  depthdial train tiny-text --data.path my-data --model.vocab_size 4096",
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument(
        "--vocab-size",
        metavar="N",
        help="tokens of the tokenizer to train, at least 257 (up to 4096, as the text allows)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="use this tokenizer.json, or that of this model directory, instead of training one",
    )
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="jsonl key or parquet column (text)"
    )
    parser.add_argument(
        "--valid-frac",
        default="0.05",
        metavar="X",
        help="share of documents held out, in [0, 1) (0.05)",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace DIR if it holds prepared data; other files in it stay",
    )
    return parser


def run_prepare(options: Options) -> int:
    """Prepare, and print what was written and skipped."""
    from depthdial.data.text import prepare

    if options.vocab_size is not None and options.tokenizer is not None:
        raise UsageError("give --vocab-size (to train a tokenizer) or --tokenizer, not both.")
    with naming_flags("vocab_size", "text_field", "valid_frac"):
        report = prepare(
            options.paths,
            options.out,
            vocab_size=number(options.vocab_size, "--vocab-size", whole=True),
            tokenizer=None if options.tokenizer is None else _tokenizer(options.tokenizer),
            text_field=options.text_field,
            valid_frac=number(options.valid_frac, "--valid-frac", whole=False),
            overwrite=options.overwrite,
        )
    write(report)
    remark(
        f"next: depthdial train tiny-text --data.path {options.out} "
        f"--model.vocab_size {report.vocab_size}"
    )
    return 0


def _tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a file, or of a model directory with its end-of-text token."""
    from depthdial.data.tokenizer import Tokenizer

    return Tokenizer.from_dir(path) if Path(path).is_dir() else Tokenizer.from_file(path)
