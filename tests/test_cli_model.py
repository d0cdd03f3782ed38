"""The commands that look at a model: sweep, generate, plan. The frame is in `test_cli.py`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from depthdial.cli import main

TEXTS = [f"Chapter {i}. The ship sailed {i} days past the island of birds. " * 12 for i in range(9)]
TINY = {
    "model.vocab_size": "300",
    "model.d_model": "16",
    "model.num_heads": "2",
    "model.num_kv_heads": "1",
    "model.head_dim": "8",
    "model.d_ff": "32",
    "model.max_context": "48",
    "model.max_loops": "3",
    "model.num_loops": "2",
    "model.modulation": "{d_cond: 8, rank: 4, embed_dim: 8}",
    "data.context": "16",
    "train.batch_size": "8",
    "train.steps": "4",
    "train.val_every": "4",
    "train.val_rows": "4",
    "train.checkpoint_every": "2",
}


class Outcome(NamedTuple):
    """What one command line did."""

    code: int
    out: str
    err: str


def cli(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> Outcome:
    """Run one command line in this process."""
    capsys.readouterr()
    code = main([str(part) for part in argv])
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def flags(**changes: str) -> list[str]:
    """Flags of the tiny recipe; `train__steps="9"` changes one."""
    values = TINY | {name.replace("__", "."): text for name, text in changes.items()}
    return [part for name, text in values.items() for part in (f"--{name}", text)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, the prepared folder `data`, the runs `runs/tiny` and `runs/plain` (its baseline)."""
    root = tmp_path_factory.mktemp("cli")
    (root / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (root / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    texts, data, runs = (str(root / name) for name in ("texts", "data", "runs"))
    valid = ["--valid-frac", "0.3"]
    assert main(["prepare", texts, "--out", data, "--vocab-size", "300", *valid]) == 0
    common = ["--root", runs, "--data.path", data]
    assert main(["train", "tiny-text", "--name", "tiny", *common, *flags()]) == 0
    plain = flags(model__max_loops="1", model__num_loops="1", model__modulation="null")
    assert main(["train", "tiny-text-baseline", "--name", "plain", *common, *plain]) == 0
    return root


@pytest.fixture
def run(folder: Path) -> Path:
    return folder / "runs" / "tiny"


class TestSweep:
    def test_a_run_is_measured_on_its_held_out_documents(
        self, capsys: pytest.CaptureFixture[str], folder: Path, run: Path
    ) -> None:
        code, out, _ = cli(capsys, "sweep", run)
        assert code == 0
        assert out.startswith(f"held-out documents of {folder / 'data'}\n")
        assert "Loss in nats per token" in out and "Cost per token" in out
        assert max(len(line.rstrip()) for line in out.splitlines()[1:]) <= 80

    def test_b15_loop_counts_beyond_training_are_marked(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        _, out, _ = cli(capsys, "sweep", run, "--no-timing")
        first = [line.split()[0] for line in out.splitlines() if line.strip()]
        assert first.count("4*") == first.count("5*") == 2
        assert "3*" not in first
        assert "* outside training: more loops than max_loops = 3" in out

    def test_json_holds_every_depth_and_the_verdict_against_the_baseline(
        self, capsys: pytest.CaptureFixture[str], folder: Path, run: Path
    ) -> None:
        plain = folder / "runs" / "plain"
        argv = ["sweep", run, "--loops", "1,3,4", "--baseline", plain, "--json"]
        code, out, _ = cli(capsys, *argv)
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
        self, capsys: pytest.CaptureFixture[str], folder: Path, run: Path
    ) -> None:
        argv = ["--baseline", folder / "runs" / "plain", "--no-timing", "--loops", "1,2"]
        _, out, _ = cli(capsys, "sweep", run, *argv)
        assert "Against the baseline" in out
        assert [line for line in out.splitlines() if line.rstrip().endswith("one-loop tax")]

    def test_save_writes_the_loss_of_every_document(
        self, capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
    ) -> None:
        from depthdial.eval.depth_sweep import DepthSweep

        path = tmp_path / "sweep.json"
        assert cli(capsys, "sweep", run, "--loops", "1", "--no-timing", "--save", path).code == 0
        assert DepthSweep.load(path).nll_KN.shape[0] == 1

    def test_other_text_is_measured_and_a_single_document_has_no_interval(
        self, capsys: pytest.CaptureFixture[str], folder: Path, run: Path
    ) -> None:
        argv = ["--data", folder / "texts" / "0.txt", "--loops", "1", "--no-timing"]
        code, out, _ = cli(capsys, "sweep", run, *argv)
        assert code == 0
        assert "no intervals: they need at least 2 documents" in out

    @pytest.mark.parametrize("loops", ["0", "1,x", "1.5"])
    def test_a_loop_count_below_one_or_not_whole_is_refused(
        self, capsys: pytest.CaptureFixture[str], run: Path, loops: str
    ) -> None:
        code, _, err = cli(capsys, "sweep", run, "--loops", loops)
        assert code == 1
        assert "num_loops" in err and "give an int >= 1" in err

    def test_a_model_outside_a_run_needs_data(
        self, capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(run / "checkpoints" / "step_4", tmp_path / "model")
        code, _, err = cli(capsys, "sweep", tmp_path / "model")
        assert code == 1
        assert "Give --data" in err

    def test_pointer_programs_are_measured_by_number_of_look_ups(
        self, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        argv = flags(model__vocab_size="32", model__modulation="null")
        assert cli(capsys, "train", "tiny-pointer", "--root", tmp_path, *argv).code == 0
        code, out, _ = cli(capsys, "sweep", tmp_path / "tiny-pointer", "--no-timing", "--loops=1,2")
        assert code == 0
        assert "look-ups" in out and "bits/byte" not in out


class TestGenerate:
    def test_stdout_is_the_continuation_alone(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        import depthdial

        code, out, err = cli(capsys, "generate", run, "The ship", "--num-loops", "3")
        [expected] = depthdial.load(run).generate("The ship", num_loops=3)
        assert (code, out) == (0, expected.text + "\n")
        assert err.startswith("k = 3: ")

    def test_compare_shows_every_trained_loop_count(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        code, out, _ = cli(capsys, "generate", run, "The ship", "--compare", "--max-new-tokens=5")
        assert code == 0
        assert [line[:5] for line in out.splitlines() if line.startswith("k = ")] == [
            "k = 1",
            "k = 2",
            "k = 3",
        ]

    def test_compare_takes_a_list_and_equal_depths_give_equal_text(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        argv = ["--num-loops", "2,2", "--temperature", "1", "--max-new-tokens", "6"]
        _, out, _ = cli(capsys, "generate", run, "The ship", "--compare", *argv)
        first, second = out.partition("k = 2")[2].split("k = 2")
        assert first.split() == second.split() != []

    @pytest.mark.parametrize(
        ("loops", "message"),
        [
            ("0", "num_loops=0 is not allowed; give an int >= 1"),
            ("-1", "num_loops=-1 is not allowed; give an int >= 1"),
            ("two", "num_loops is 'two' (str); give an int >= 1"),
            ("2.5", "num_loops is 2.5 (float); give an int >= 1"),
            ("4", "num_loops=4 exceeds max_loops=3"),
        ],
    )
    def test_a_wrong_loop_count_is_told_what_is_allowed(
        self, capsys: pytest.CaptureFixture[str], run: Path, loops: str, message: str
    ) -> None:
        code, out, err = cli(capsys, "generate", run, "The", "--num-loops", loops)
        assert (code, out) == (1, "")
        assert err.startswith(f"error: {message}")

    @pytest.mark.parametrize(
        ("argv", "code", "message"),
        [
            (["--temperature", "warm"], 2, "--temperature needs a number, got 'warm'"),
            (["--top-p", "0"], 1, "0 < top_p <= 1"),
            (["--max-new-tokens", "500"], 1, "the model's context is 48"),
            (["--num-loops", "1,2"], 2, "several loop counts go with --compare"),
            (["--num-loop", "1"], 2, "Did you mean '--num-loops'?"),
            (["--cache-policy", "none"], 2, "invalid choice: 'none'"),
        ],
    )
    def test_a_wrong_option_is_told_what_is_allowed(
        self,
        capsys: pytest.CaptureFixture[str],
        run: Path,
        argv: Sequence[str],
        code: int,
        message: str,
    ) -> None:
        outcome = cli(capsys, "generate", run, "The", *argv)
        assert outcome.code == code
        assert message in outcome.err

    def test_an_empty_prompt_is_refused(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        code, _, err = cli(capsys, "generate", run, "")
        assert (code, err) == (1, "error: prompt 0 is empty; give at least one token.\n")


class TestPlan:
    def test_gpt_05b_with_the_numbers_of_the_paper(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """D_eff 30 and 86; Eq. 5 at f = 0.15, K = 5, a quarter of the tokens mixed: 1.198."""
        code, out, _ = cli(capsys, "plan", "elr-0.5b", "--switch-frac", "0.75")
        assert code == 0
        assert "498M parameters" in out
        assert "Training: 1.20 times" in out and "mean 2.70" in out
        assert [line.split()[:2] for line in out.splitlines() if line.startswith("5 ")][0] == [
            "5",
            "86",
        ]

    def test_b50_cache_grows_with_loops_per_loop_only(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """15 attention sublayers of 1,024 channels, 131,072 tokens, 2 bytes: 7.5 GiB at k = 1."""
        argv = ["gpt-0.5b", "--num-loops", "1", "4", "6", "--context", "131072"]
        _, out, _ = cli(capsys, "plan", *argv)
        rows = [line.split() for line in out.splitlines() if line.rstrip().endswith("GiB")]
        assert [row[0] for row in rows] == ["1", "4", "6*"]
        per_loop, _, _, last_step, _ = zip(*(row[1::2] for row in rows), strict=True)
        assert per_loop == ("7.50", "18.00", "25.00")
        assert set(last_step) == {"7.50"}
        assert "* outside training: more loops than max_loops = 5" in out
        assert "longer than the context the model is meant for (4,096)" in out

    def test_guessed_fields_of_a_preset_are_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert "Guessed, as not published: num_heads" in cli(capsys, "plan", "gpt-0.5b").out

    def test_a_run_and_a_model_directory_are_taken(
        self, capsys: pytest.CaptureFixture[str], run: Path
    ) -> None:
        of_run = cli(capsys, "plan", run).out
        of_model = cli(capsys, "plan", run / "checkpoints" / "step_4").out
        assert of_run.splitlines()[1] == of_model.splitlines()[1]

    @pytest.mark.parametrize(
        ("argv", "code", "message"),
        [
            (["gpt-0.5"], 1, "Did you mean 'gpt-0.5b'?"),
            (["gpt-0.5b", "--num-loops", "0"], 1, "num_loops=0: give a whole number"),
            (["gpt-0.5b", "--context", "0"], 1, "context=0"),
            (["gpt-0.5b", "--context", "long"], 2, "--context needs a whole number"),
            (["gpt-0.5b", "--switch-frac", "2"], 1, "--switch-frac 2: give a fraction"),
            (["nowhere/config.json"], 1, "no configuration at nowhere/config.json"),
        ],
    )
    def test_wrong_input_is_told_what_is_allowed(
        self, capsys: pytest.CaptureFixture[str], argv: Sequence[str], code: int, message: str
    ) -> None:
        outcome = cli(capsys, "plan", *argv)
        assert outcome.code == code
        assert message in outcome.err
