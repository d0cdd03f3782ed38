"""Tables and numbers as the commands print them: aligned, with units, at most 80 wide.

Nothing here measures anything or knows a model; it lays out the texts it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from depthdial.cli.console import styled

MOST_WIDTH = 80
COLUMN_GAP = 2


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = ()
) -> Table:
    """A borderless table; columns are flushed right except those whose index is in `left`."""
    heading = None
    if title:
        # A title longer than its table stays on one line.
        heading = styled(title, "bold")
        heading.no_wrap, heading.overflow = True, "ignore"
    grid = Table(
        title=heading,
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, COLUMN_GAP, 0, 0),
        show_header=any(columns),
    )
    for idx, name in enumerate(columns):
        justify = "left" if idx in left else "right"
        grid.add_column(styled(name, "dim"), justify=justify, no_wrap=idx not in left)
    for row in rows:
        grid.add_row(*(styled(cell) for cell in row))
    return grid


def tables_by_loops(
    title: str, what: str, rows: Mapping[str, Sequence[str]], loops: Iterable[str]
) -> list[Table]:
    """A row per name and a column per loop count, in as many tables as the width asks for.

    Args: what: heading of the names; rows: name -> one cell per loop count; loops: the headings.
    """
    loops = list(loops)
    cells = [cell for values in rows.values() for cell in values]
    width = max(map(len, (*cells, *loops))) + COLUMN_GAP
    names = max(map(len, (*rows, what))) + COLUMN_GAP
    per_table = max(1, (MOST_WIDTH - names) // width)
    return [
        table(
            title if start == 0 else "",
            (what, *loops[start : start + per_table]),
            [(name, *values[start : start + per_table]) for name, values in rows.items()],
            left=(0,),
        )
        for start in range(0, len(loops), per_table)
    ]


def separated(parts: Sequence[Table]) -> list[Table | str]:
    """Tables with an empty line between them."""
    return [item for part in parts for item in ("", part)][1:]


def facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Names and their values, one a line; long values wrap under themselves."""
    return table(title, ("", ""), rows, left=(0, 1))


def bullets(title: str, sentences: Sequence[str]) -> Table:
    """A list of sentences under a title; long ones wrap under themselves."""
    return table(title, ("", ""), [("-", sentence) for sentence in sentences], left=(0, 1))


def loop_range(loops: Sequence[int]) -> str:
    """`k = 1, 4..8`: ascending loop counts, three and more neighbours as a range."""
    runs: list[list[int]] = []
    for num_loops in loops:
        if runs and num_loops == runs[-1][-1] + 1:
            runs[-1].append(num_loops)
        else:
            runs.append([num_loops])
    words = [f"{run[0]}..{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"k = {', '.join(words)}" if words else "nothing yet"


def signed(value: float) -> str:
    """`+0.0123`, with a true minus sign left to reports: this text is also read by scripts."""
    return f"{value:+.4f}"


def shown_loops(max_loops: int, most: int) -> list[int]:
    """All loop counts that a model is made for; for more than `most`, powers of two and the
    largest."""
    if max_loops <= most:
        return list(range(1, max_loops + 1))
    powers = [1 << exponent for exponent in range(max_loops.bit_length())]
    return sorted({*powers, max_loops})


def short_count(value: float) -> str:
    """`4.10M`: three significant digits and a decimal unit."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)}{unit}"
    return f"{value:.3g}"


def flops(value: float) -> str:
    """`1.13 GFLOP`."""
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{_three_digits(value / scale)} {unit}FLOP"
    return f"{value:.3g} FLOP"


def size(num_bytes: int) -> str:
    """`1.50 GiB`: binary units, as memory is sold and measured."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.2f} {unit}"
    return f"{num_bytes} B"


def _three_digits(value: float) -> str:
    """`1.13`, `11.0`, `854`: trailing zeros kept, so that columns compare."""
    return f"{value:#.3g}".rstrip(".")
