"""Commands that write a report: report for one run, demo for runs that it trains."""

from __future__ import annotations

import jsonargparse

from depthdial.cli.console import progress_console, remark, write
from depthdial.cli.options import Options, new_parser


def report_parser() -> jsonargparse.ArgumentParser:
    """Flags of `report`."""
    parser = new_parser(
        "report",
        usage="RUN [--baseline RUN]",
        description="Measure a run at every loop count and write its report.html (one file).",
    )
    parser.add_argument("run", help="folder of the run, e.g. runs/tiny-text")
    parser.add_argument(
        "--baseline", metavar="RUN", help="run of the matched non-looped model, to compare with"
    )
    return parser


def run_report(options: Options) -> int:
    """Write the report and print where it is."""
    from depthdial.api.paths import check_is_run
    from depthdial.studies.report_run import report_run

    check_is_run(options.run)
    if options.baseline is not None:
        check_is_run(options.baseline)
    remark("measuring every loop count ...")
    paths = report_run(options.run, baseline=options.baseline)
    write(paths.html)
    write(paths.curve)
    return 0


def demo_parser() -> jsonargparse.ArgumentParser:
    """Flags of `demo`."""
    parser = new_parser(
        "demo",
        usage="[--out DIR] [--quick]",
        description="Train text and pointer programs with and without loops, measure every loop\n"
        "count, and write one report. About 8 minutes on two idle CPU cores, at most 12;\n"
        "a second call goes on where the first one stopped.",
    )
    parser.add_argument(
        "--out", default="runs/demo", metavar="DIR", help="folder to write (runs/demo)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="20 steps per run: shows that it works, no results"
    )
    return parser


def run_demo(options: Options) -> int:
    """Run the demonstration and print where its report is."""
    from depthdial.studies import demo

    paths = demo.run_demo(options.out, quick=options.quick, console=progress_console())
    write(paths.html)
    return 0
