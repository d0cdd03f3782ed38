"""The command list: shipped recipes, presets and corpora."""

from __future__ import annotations

import jsonargparse

from depthdial.cli.console import result_console
from depthdial.cli.options import Options, new_parser
from depthdial.cli.tables import short_count, table


def list_parser() -> jsonargparse.ArgumentParser:
    """`list` has no flags of its own."""
    return new_parser(
        "list", usage="", description="Names that commands know: recipes, presets, corpora."
    )


def run_list(options: Options) -> int:
    """Print recipes, presets and corpora, one per line."""
    from depthdial.data.corpora import corpus_names, describe_corpus
    from depthdial.model.count import count_parameters
    from depthdial.model.presets import preset, preset_names
    from depthdial.recipes import needs_init, recipe_file, recipe_names

    complete, healing = [], []
    for name in recipe_names():
        path = recipe_file(name)
        first_line = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        (healing if needs_init(path) else complete).append((name, first_line))
    presets = []
    for name in preset_names():
        config = preset(name)
        split = "/".join(map(str, config.split))
        parameters = short_count(count_parameters(config).total)
        presets.append(
            (name, f"{parameters} parameters, {split} sublayers, K = {config.max_loops}")
        )
    corpora = [(name, describe_corpus(name)) for name in corpus_names()]
    console = result_console()
    for title, rows in (
        ("Recipes: depthdial train NAME", complete),
        ("Recipes that start from a model directory: depthdial train NAME --init MODEL", healing),
        ("Presets: depthdial plan NAME", presets),
        ("Corpora: --data.corpus NAME", corpora),
    ):
        console.print(table(title, ("", ""), rows, left=(0, 1)), "")
    return 0
