"""The `sweep` command: losses, intervals, verdicts, cost, and options that must have an effect."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from depthdial.eval.depth_sweep import DepthSweep
from depthdial.eval.latency import Latency

Command = Callable[..., Any]


class TestSweep:
    def test_a_run_is_measured_on_its_held_out_documents(
        self, cli: Command, tiny_folder: Path, tiny_run: Path
    ) -> None:
        code, out, _ = cli("sweep", tiny_run)
        assert code == 0
        assert out.startswith(f"held-out documents of {tiny_folder / 'data'}\n")
        assert "Loss in nats per token" in out and "Cost per token" in out
        assert max(len(line.rstrip()) for line in out.splitlines()[1:]) <= 80

    def test_b15_loop_counts_that_no_step_ran_are_marked(
        self, cli: Command, tiny_run: Path
    ) -> None:
        _, out, _ = cli("sweep", tiny_run, "--no-timing")
        records = map(json.loads, (tiny_run / "metrics.jsonl").read_text().splitlines())
        ran = {k for record in records for k in record.get("loops/per_slice", ())}
        shown = re.findall(r"(?m)^ *(\d\*?) +[\d.]", out)
        assert shown == [f"{k}" if k in ran else f"{k}*" for k in (1, 2, 3, 4, 5)] * 2
        assert {1} < ran < {1, 2, 3, 4}
        assert f"* outside training, which ran k = {', '.join(map(str, sorted(ran)))}\n" in out

    def test_b15_loop_counts_that_training_skipped_are_marked(
        self, cli: Command, tiny_flags: Command, tiny_folder: Path, tmp_path: Path
    ) -> None:
        where = ["--root", tmp_path, "--data.path", tiny_folder / "data", "--name", "fixed"]
        draws = ["--depth.sampler=fixed", "--depth.fixed_loops=3", "--depth.override_frac=0"]
        short = tiny_flags(train__steps=2)
        code = cli("train", "tiny-text", *where, *short, *draws, "--depth.switch_frac=0").code
        assert code == 0
        _, out, _ = cli("sweep", tmp_path / "fixed", "--no-timing")
        shown = re.findall(r"(?m)^ *(\d\*?) +[\d.]", out)
        assert shown == ["1*", "2*", "3", "4*", "5*"] * 2
        assert "* outside training, which ran k = 3" in out

    def test_json_holds_every_depth_and_the_verdict_against_the_baseline(
        self, cli: Command, tiny_folder: Path, tiny_run: Path
    ) -> None:
        plain = tiny_folder / "runs" / "plain"
        argv = ["sweep", tiny_run, "--num-loops", "1,3,4", "--baseline", plain, "--json"]
        code, out, _ = cli(*argv)
        values = json.loads(out)
        assert code == 0
        assert [d["num_loops"] for d in values["depths"]] == [1, 3, 4]
        assert [d["is_trained"] for d in values["depths"]] == [True, True, False]
        for depth in values["depths"]:
            low, high = depth["interval"]
            assert low <= depth["loss"] <= high
            assert depth["vs_baseline"]["verdict"] in ("equal", "lower", "higher", "undecided")
            assert depth["ms_per_token_min"] > 0

    def test_the_one_loop_tax_is_printed_against_a_baseline(
        self, cli: Command, tiny_folder: Path, tiny_run: Path
    ) -> None:
        argv = ["--baseline", tiny_folder / "runs" / "plain", "--no-timing", "--num-loops", "1,2"]
        _, out, _ = cli("sweep", tiny_run, *argv)
        assert "Against the baseline" in out
        assert [line for line in out.splitlines() if line.rstrip().endswith("one-loop tax")]

    def test_save_writes_the_loss_of_every_document(
        self, cli: Command, tiny_run: Path, tmp_path: Path
    ) -> None:

        path = tmp_path / "sweep.json"
        assert cli("sweep", tiny_run, "--num-loops", "1", "--no-timing", "--save", path).code == 0
        assert DepthSweep.load(path).nll_KN.shape[0] == 1

    def test_other_text_is_measured_and_a_single_document_has_no_interval(
        self, cli: Command, tiny_folder: Path, tiny_run: Path
    ) -> None:
        argv = ["--data", tiny_folder / "texts" / "0.txt", "--num-loops", "1", "--no-timing"]
        code, out, _ = cli("sweep", tiny_run, *argv)
        assert code == 0
        assert "no intervals: they need at least 2 documents" in out

    def test_f18_a_prepared_folder_beside_files_is_refused(
        self, cli: Command, tiny_run: Path, tiny_folder: Path
    ) -> None:
        """Its text was dropped without a word."""
        file = tiny_folder / "texts" / "1.txt"
        for order in ((tiny_folder / "data", file), (file, tiny_folder / "data")):
            outcome = cli("sweep", tiny_run, "--data", *order, "--no-timing")
            assert outcome.code == 1
            assert f"{tiny_folder / 'data'} is a folder written by `depthdial prepare`" in (
                outcome.err
            )

    def test_f18_files_that_cannot_be_measured_are_named(
        self, cli: Command, tiny_run: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "a.txt").write_text("The ship sailed past the island. " * 9, encoding="utf-8")
        (tmp_path / "b.pdf").write_bytes(b"x")
        outcome = cli("sweep", tiny_run, "--data", tmp_path, "--no-timing")
        assert outcome.code == 0 and "skipped 1 files that are not .txt" in outcome.err
        assert "b.pdf" in outcome.err
        (tmp_path / "empty").mkdir()
        outcome = cli("sweep", tiny_run, "--data", tmp_path / "a.txt", tmp_path / "empty")
        assert outcome.code == 1 and "nothing of it would be read" in outcome.err

    @pytest.mark.parametrize(("loops", "exit_code"), [("0", 1), ("1,x", 2), ("1.5", 2)])
    def test_a_loop_count_below_one_or_not_whole_is_refused(
        self, cli: Command, tiny_run: Path, loops: str, exit_code: int
    ) -> None:
        code, _, err = cli("sweep", tiny_run, "--num-loops", loops)
        assert code == exit_code
        assert err.startswith("error: --num-loops") and "whole numbers of at least 1" in err

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--context", "0"], "rows of 0 tokens do not fit {run}, whose context is 48. Give"),
            (["--context", "49"], "rows of 49 tokens do not fit {run}, whose context is 48. Give"),
            (["--baseline", "absent/runs/tinny"], "no model at absent/runs/tinny"),
            (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
            (
                ["--save", "absent/sweep.json"],
                "--save absent/sweep.json: there is no folder absent",
            ),
            (["--save", "."], ". is no regular file"),
        ],
    )
    def test_what_cannot_work_is_refused_before_anything_is_measured(
        self, cli: Command, tiny_run: Path, argv: list[str], message: str
    ) -> None:
        code, out, err = cli("sweep", tiny_run, *argv)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {message.format(run=tiny_run)}")

    def test_a_baseline_with_another_tokenizer_is_refused_before_anything_is_measured(
        self, cli: Command, tiny_run: Path, pointer_run: Path
    ) -> None:
        code, out, err = cli("sweep", tiny_run, "--baseline", pointer_run, "--context", "16")
        assert (code, out) == (1, "")
        assert "have different tokenizers" in err and "measuring" not in err

    @pytest.mark.parametrize("format", [[], ["--json"]])
    def test_a_full_disk_takes_no_result_away(
        self,
        cli: Command,
        tiny_run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        format: list[str],
    ) -> None:
        path = tmp_path / "sweep.json"
        argv = ["sweep", tiny_run, "--num-loops", "1", "--no-timing", "--save", path, *format]
        assert cli(*argv).code == 0
        older = path.read_text()

        def full(path: Path, text: str) -> None:
            path.write_text(text[:9])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("depthdial.eval.depth_sweep.write_synced", full)
        code, out, err = cli(*argv)
        assert code == 1 and "loss" in out.lower()
        assert f"could not write {path}: No space left on device; the file that was there" in err
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("sweep.json", older)]

    def test_a_model_outside_a_run_needs_data(
        self, cli: Command, tiny_run: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(tiny_run / "checkpoints" / "step_4", tmp_path / "model")
        code, _, err = cli("sweep", tmp_path / "model")
        assert code == 1
        assert "Give --data" in err

    def test_a_margin_without_a_baseline_is_refused(self, cli: Command, tiny_run: Path) -> None:
        code, _, err = cli("sweep", tiny_run, "--margin", "0.1")
        assert (code, err.splitlines()[-1]) == (
            2,
            "error: --margin goes with --baseline; without it nothing is compared.",
        )

    def test_a_negative_margin_is_refused_before_anything_is_measured(
        self, cli: Command, tiny_run: Path
    ) -> None:
        code, _, err = cli("sweep", tiny_run, "--baseline", tiny_run, "--margin", "-1")
        assert (code, err) == (1, "error: --margin -1: give nats per token, at least 0.\n")

    def test_times_are_taken_in_the_precision_of_the_losses(
        self, cli: Command, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        def record(*args: Any, loops: tuple[int, ...], **options: Any) -> dict[int, Latency]:
            seen.append(torch.is_autocast_enabled("cpu"))
            return {k: Latency(1.0, 1.0) for k in loops}

        monkeypatch.setattr("depthdial.eval.latency.measure_latency", record)
        fp32 = cli("sweep", tiny_run, "--num-loops", "1").out
        bf16 = cli("sweep", tiny_run, "--num-loops", "1", "--precision", "bf16").out
        assert seen == [False, True]
        assert "one sequence in fp32" in fp32 and "one sequence in bf16" in bf16

    def test_bf16_decoding_can_be_timed(self, cli: Command, tiny_run: Path) -> None:
        argv = ["--num-loops", "1,2", "--precision", "bf16", "--json"]
        depths = json.loads(cli("sweep", tiny_run, *argv).out)["depths"]
        assert all(depth["ms_per_token_min"] > 0 for depth in depths)


def constructed(nll_KN: np.ndarray, *, loops: tuple[int, ...]) -> DepthSweep:
    """A sweep of 40 documents of 100 tokens each, with the given sums of losses."""
    count = nll_KN.shape[1]
    return DepthSweep(
        loops=loops,
        max_loops=4,
        trained_loops=(1, 2, 3, 4),
        names=tuple(f"document {n}" for n in range(count)),
        tokens_N=np.full(count, 100),
        bytes_N=np.zeros(count, dtype=np.int64),
        nll_KN=nll_KN,
    )


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> dict[str, DepthSweep]:
    """What the command measures: `looped` first, then `baseline`; tests may replace either.

    Per token and against the baseline, the looped model is 0.001 and 0.1 lower, 0.1 higher, and
    0.2 now higher, now lower.
    """
    baseline = np.full((1, 40), 300.0)
    swing = np.where(np.arange(40) % 2, 20.0, -20.0)
    offsets = [np.full(40, -0.1), np.full(40, -10.0), np.full(40, 10.0), swing]
    values = {
        "looped": constructed(baseline + np.array(offsets), loops=(1, 2, 3, 4)),
        "baseline": constructed(baseline, loops=(1,)),
    }
    order = iter(("looped", "baseline"))
    monkeypatch.setattr("depthdial.api.model.sweep", lambda *args, **options: values[next(order)])
    return values


class TestVerdicts:
    WORDS = ("equal", "lower", "higher", "undecided")

    def argv(self, tiny_folder: Path) -> list[str | Path]:
        runs = tiny_folder / "runs"
        return ["sweep", runs / "tiny", "--baseline", runs / "plain", "--no-timing"]

    def test_verdicts_follow_from_the_constructed_losses(
        self, cli: Command, tiny_folder: Path, sweeps: dict[str, DepthSweep]
    ) -> None:
        values = json.loads(cli(*self.argv(tiny_folder), "--json").out)
        against = [depth["vs_baseline"] for depth in values["depths"]]
        assert tuple(a["verdict"] for a in against) == self.WORDS
        assert [a["difference"] for a in against] == pytest.approx([-0.001, -0.1, 0.1, 0.0])
        assert against[1]["interval"] == pytest.approx([-0.1, -0.1])

    def test_the_table_prints_the_same_words(
        self, cli: Command, tiny_folder: Path, sweeps: dict[str, DepthSweep]
    ) -> None:
        out = cli(*self.argv(tiny_folder)).out
        lines = out.partition("Against the baseline")[2].splitlines()[2:6]
        assert tuple(line.replace("one-loop tax", "").split()[-1] for line in lines) == self.WORDS

    @pytest.mark.parametrize(
        ("trained", "words"),
        [((), "nothing yet"), ((1, 3), "k = 1, 3"), ((1, 2, 3), "k = 1..3"), ((4,), "k = 4")],
    )
    def test_b15_the_trained_loop_counts_are_told(
        self,
        cli: Command,
        tiny_folder: Path,
        sweeps: dict[str, DepthSweep],
        trained: tuple[int, ...],
        words: str,
    ) -> None:
        sweeps["looped"] = replace(sweeps["looped"], trained_loops=trained)
        out = cli(*self.argv(tiny_folder)).out
        assert f"* outside training, which ran {words}\n" in out

    def test_a_wider_margin_makes_the_difference_equal(
        self, cli: Command, tiny_folder: Path, sweeps: dict[str, DepthSweep]
    ) -> None:
        values = json.loads(cli(*self.argv(tiny_folder), "--json", "--margin", "0.15").out)
        assert values["margin"] == 0.15
        assert values["depths"][1]["vs_baseline"]["verdict"] == "equal"

    @pytest.mark.parametrize("field", ["names", "tokens_N"])
    def test_sweeps_of_unequal_documents_are_not_compared(
        self, cli: Command, tiny_folder: Path, sweeps: dict[str, DepthSweep], field: str
    ) -> None:
        other = {"names": sweeps["baseline"].names[::-1], "tokens_N": np.full(40, 99)}[field]
        sweeps["baseline"] = replace(sweeps["baseline"], **{field: other})
        code, out, err = cli(*self.argv(tiny_folder))
        assert (code, out) == (1, "")
        assert "the two sweeps cannot be paired" in err


@pytest.fixture(scope="module")
def pointer_run(tmp_path_factory: pytest.TempPathFactory, tiny_flags: Command) -> Path:
    from depthdial.cli.main import main

    root = tmp_path_factory.mktemp("pointer")
    argv = tiny_flags(model__vocab_size=32, model__modulation=None)
    assert main(["train", "tiny-pointer", "--root", str(root), *argv]) == 0
    return root / "tiny-pointer"


class TestPointerPrograms:
    def test_answers_are_counted_by_dependency_depth(self, cli: Command, pointer_run: Path) -> None:
        code, out, _ = cli("sweep", pointer_run, "--no-timing", "--num-loops=1,2")
        assert code == 0
        assert "Right answers by dependency depth" in out and "bits/byte" not in out

    def test_json_holds_the_answers_of_the_table(self, cli: Command, pointer_run: Path) -> None:
        argv = ["sweep", pointer_run, "--no-timing", "--num-loops=2"]
        [depth] = json.loads(cli(*argv, "--json").out)["depths"]
        answers = depth["accuracy_by_depth"]
        _, _, table = cli(*argv).out.partition("Right answers by dependency depth")
        rows = re.findall(r"(?m)^ *(\d+) +(\S+%) +([\d,]+)$", table)
        assert rows == [
            (str(a["dependency_depth"]), f"{a['correct'] / a['answers']:.1%}", f"{a['answers']:,}")
            for a in answers
        ]
        assert len(rows) > 5

    def test_a_context_is_refused(self, cli: Command, pointer_run: Path) -> None:
        code, out, err = cli("sweep", pointer_run, "--context", "8")
        assert (code, out) == (2, "")
        assert (
            "--context has no effect on pointer programs: a row is one program of 16 words" in err
        )


@pytest.fixture
def few_chains(monkeypatch: pytest.MonkeyPatch) -> int:
    """Sweeps solve that many rows of chains."""
    monkeypatch.setattr("depthdial.eval.depth_sweep.CHAIN_ROWS", 20)
    return 20


class TestPointerChains:
    """A run that started from a model directory, which is gone."""

    def test_answers_are_counted_by_look_ups(
        self, cli: Command, chain_run: Path, few_chains: int
    ) -> None:
        code, out, err = cli("sweep", chain_run, "--no-timing", "--num-loops=1,2,3")
        assert (code, err.splitlines()) == (0, ["measuring 3 loop counts ..."])
        assert out.startswith(
            "unseen pointer chains, 2 chains of 3 letters each\n20 rows, 120 answers, rows of 42 "
            "tokens\n"
        )
        _, _, table = out.partition("Right answers by dependency depth")
        rows = re.findall(r"(?m)^ *(\d) +(?:[\d.]+% +){3}(\d+)$", table)
        assert rows == [("1", "40"), ("2", "40"), ("3", "40")]
        assert table.splitlines()[-1] == (
            "depth is the number of look-ups from a letter to its digit; naming the digit of any "
            "chain gives 55.0%"
        )

    def test_json_holds_what_guessing_scores(
        self, cli: Command, chain_run: Path, few_chains: int
    ) -> None:
        argv = ["sweep", chain_run, "--no-timing", "--num-loops=3", "--json"]
        values = json.loads(cli(*argv).out)
        assert values["chance_accuracy"] == pytest.approx(0.55)
        [depth] = values["depths"]
        assert [at["answers"] for at in depth["accuracy_by_depth"]] == [40, 40, 40]
        assert not depth["is_trained"]

    def test_a_context_is_refused(self, cli: Command, chain_run: Path) -> None:
        code, out, err = cli("sweep", chain_run, "--context", "8")
        assert (code, out) == (2, "")
        assert "no effect on pointer chains: a row is 2 chains of 3 letters" in err

    def test_text_can_be_measured_too(
        self, cli: Command, chain_run: Path, tiny_folder: Path
    ) -> None:
        argv = ["sweep", chain_run, "--data", tiny_folder / "texts", "--num-loops=1", "--no-timing"]
        code, out, _ = cli(*argv)
        assert code == 0
        assert "bits/byte" in out and "Right answers" not in out

    def test_another_run_on_chains_is_a_baseline(
        self, cli: Command, chain_run: Path, few_chains: int
    ) -> None:
        argv = ["sweep", chain_run, "--baseline", chain_run, "--num-loops=2", "--no-timing"]
        code, out, _ = cli(*argv)
        assert code == 0
        assert re.search(r"(?m)^2 +\+0.0000 .* equal", out)
