"""Sections and reports of chosen numbers, and the words that follow from them."""

from html.parser import HTMLParser

from depthdial.report.data import read_report_data
from depthdial.report.findings import describe_section, summarise_section

BASELINE_LOSS = 2.0


def difference(estimate, half=0.002):
    return {"estimate": estimate, "low": estimate - half, "high": estimate + half}


def accuracy_cells(solved, *, measured=12):
    """Right up to `solved` dependency look-ups, guessing beyond."""
    return [
        {
            "dependency_depth": depth,
            "accuracy": 0.99 if depth <= solved else 0.125,
            "low": 0.98 if depth <= solved else 0.1,
            "high": 1.0 if depth <= solved else 0.15,
            "positions": 500,
        }
        for depth in range(1, measured + 1)
    ]


def make_section(losses, *, half=0.002, untrained=(), solved=None, baseline_solved=5, **changes):
    """A section whose looped model has `losses` at k = 1, 2, ...; the margin is 0.01."""
    depths = []
    for idx, loss in enumerate(losses):
        depths.append(
            {
                "num_loops": idx + 1,
                "trained": idx + 1 not in untrained,
                "loss": loss,
                "low": loss - 0.05,
                "high": loss + 0.05,
                "executed_sublayers": 8 + 4 * idx,
                "flops_per_token": 1e6 + 5e5 * idx,
                "vs_baseline": difference(loss - BASELINE_LOSS, half),
                "vs_previous": None if idx == 0 else difference(loss - losses[idx - 1], half),
                "accuracy_by_depth": None if solved is None else accuracy_cells(solved[idx]),
            }
        )
    section = {
        "name": "Held-out messages",
        "kind": "text" if solved is None else "pointer_program",
        "what": "Next-token prediction on held-out documents.",
        "margin": 0.01,
        "documents": 200,
        "tokens": 40_000,
        "num_seeds": 1,
        "baseline": {
            "loss": BASELINE_LOSS,
            "low": 1.95,
            "high": 2.05,
            "executed_sublayers": 8,
            "flops_per_token": 1e6,
            "accuracy_by_depth": None if solved is None else accuracy_cells(baseline_solved),
        },
        "depths": depths,
        "hardware": "2 CPU cores",
    }
    return section | changes


def make_report(*sections):
    return {
        "title": "Test report",
        "created": "2025-01-01",
        "sections": list(sections),
        "provenance": {
            "tiny": {"seed": 3, "versions": {"torch": "2.13.0"}},
            "tiny-baseline": {"seed": 4, "versions": {"torch": "2.13.0"}},
        },
    }


def full_section(**changes):
    """Every optional part present."""
    cost = {"params": 1000, "steps": 10, "tokens": 5000, "flops": 1.5e12, "seconds": 75.0}
    curve = [
        {"model": model, "step": step, "num_loops": k, "loss": 3.0 - 0.01 * step}
        for step in range(0, 50, 5)
        for model, k in (("baseline", 1), ("looped", 1), ("looped", 2))
    ]
    section = make_section(
        [1.9, 1.7, 1.6, 1.65],
        untrained=(4,),
        solved=[5, 7, 9, 9],
        samples=[
            {
                "prompt": "The year",
                "baseline": " was good",
                "outputs": [{"num_loops": 1, "text": " was long"}, {"num_loops": 4, "text": " x"}],
            }
        ],
        training={"looped": cost, "baseline": cost | {"flops": 1.0e12}},
        training_curve=curve,
        settings={"model": {"loop": {"update": "adaptive_delta"}}},
        chance_accuracy=0.125,
        timing_note="Forward of 16 rows.",
    )
    for depth in section["depths"]:
        depth["ms_per_token_min"], depth["ms_per_token_median"] = 0.1, 0.12
    return section | changes


def words(section):
    return describe_section(read_report_data(make_report(section)).sections[0])


def headline(section):
    return summarise_section(read_report_data(make_report(section)).sections[0])


def said(section):
    return " ".join(words(section)) + " " + headline(section)


class Tags(HTMLParser):
    """Collects tags and attributes, and checks that elements close in order."""

    VOID = {"meta", "link", "br"}

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page):
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    return tags
