"""One self-contained page and its figures, from JSON data alone."""

from depthdial.report.page import ReportPaths, build_report, write_report

__all__ = ["ReportPaths", "build_report", "write_report"]
