"""The command line: what it prints where, exit codes, and what wrong input is told."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from depthdial import __version__
from depthdial.cli.main import COMMANDS
from depthdial.cli.options import recipe_keys
from depthdial.config import Recipe
from depthdial.config.base import _members
from depthdial.recipes import recipe_names
from depthdial.training.progress import RichObserver

ROOT = Path(__file__).parents[2]
Command = Callable[..., Any]


class TestFrame:
    def test_help_names_every_command_in_at_most_80_columns(self, cli: Command) -> None:
        code, out, _ = cli("--help")
        assert code == 0
        assert all(f"  {name} " in out for name in COMMANDS)
        assert max(map(len, out.splitlines())) <= 80

    def test_help_imports_neither_torch_nor_pydantic(self) -> None:
        program = (
            "import sys; from depthdial.cli.main import main; code = main(['--help']); "
            "sys.exit(code or 'torch' in sys.modules or 'pydantic' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
        assert done.returncode == 0

    def test_help_of_train_imports_no_torch(self) -> None:
        program = (
            "import sys; from depthdial.cli.main import main; code = main(['train', '--help']); "
            "sys.exit(code or 'torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
        assert done.returncode == 0

    @pytest.mark.parametrize("command", sorted(COMMANDS))
    def test_help_of_every_command_fits_80_columns(
        self, command: str, cli: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        code, out, _ = cli(command, "--help")
        assert code == 0
        assert out.startswith(f"usage: depthdial {command}")
        assert max(map(len, out.splitlines())) <= 80

    def test_the_package_runs_as_the_command(self) -> None:
        command = [sys.executable, "-m", "depthdial", "--version"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"depthdial {__version__}\n")

    def test_version(self, cli: Command) -> None:
        assert cli("--version") == (0, f"depthdial {__version__}\n", "")

    def test_no_command_is_a_usage_error(self, cli: Command) -> None:
        assert cli().code == 2

    def test_an_unknown_command_gets_the_nearest_one(self, cli: Command) -> None:
        code, out, err = cli("genrate", "x")
        assert (code, out) == (2, "")
        assert "unknown command 'genrate'. Did you mean 'generate'?" in err

    def test_ctrl_c_outside_training_exits_130(
        self, cli: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(name: str) -> str:
            raise KeyboardInterrupt

        monkeypatch.setattr("depthdial.data.corpora.describe_corpus", interrupt)
        code, _, err = cli("list")
        assert (code, err) == (130, "stopped.\n")

    def test_debug_shows_the_traceback(self, cli: Command) -> None:
        with pytest.raises(FileNotFoundError):
            cli("resume", "nowhere", "--debug")


class TestRecipeFlags:
    def test_every_key_of_a_recipe_is_in_the_help_with_range_and_default(
        self, cli: Command, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "2000")
        out = " ".join(cli("train", "--help").out.split())
        for key in recipe_keys():
            assert f"--{key.name} VALUE {key.description} ({key.values}; {key.default})" in out
        assert "Peak learning rate of the block matrices. (number > 0; default 0.004)" in out

    def test_the_keys_are_those_of_the_recipe_without_constants(self) -> None:
        def keys(config: type[BaseModel], prefix: str = "") -> set[str]:
            found = set()
            for name, field in config.model_fields.items():
                members = set(_members(field.annotation).values())
                # A group of the recipe itself is given by its keys only.
                found |= {f"{prefix}{name}"} if prefix or not members else set()
                for member in members:
                    found |= keys(member, f"{prefix}{name}.")
            return found

        constants = {"model.model_type", "model.architectures", "model.format_version"}
        assert {key.name for key in recipe_keys()} == keys(Recipe) - constants

    def test_a_group_of_several_kinds_has_the_keys_of_each(self) -> None:
        keys = {key.name: key for key in recipe_keys()}
        assert keys["model.modulation.kind"].values == "elr | time_step"
        assert keys["model.modulation.rank"].description.startswith("kind elr: ")
        assert not keys["model.modulation.embed_dim"].description.startswith("kind")
        assert len(keys) == len(recipe_keys())

    def test_lists_and_named_values_are_read_from_flags(self, cli: Command) -> None:
        rates = "{loop_lora.*: 2e-3, core_stack.*: 1e-4}"
        flags = ("--optim.freeze", "prelude_stack.*,embedding.*", "--optim.lr_by_pattern", rates)
        out = yaml.safe_load(cli("train", "tiny-text", *flags, "--print-config").out)["optim"]
        assert out["freeze"] == ["prelude_stack.*", "embedding.*"]
        assert out["lr_by_pattern"] == {"loop_lora.*": 2e-3, "core_stack.*": 1e-4}

    def test_a_list_is_taken_away_by_null(self, cli: Command, tmp_path: Path) -> None:
        """A recipe with a list of loop counts can so have another sampler."""
        listed = ("--depth.sampler", "listed", "--depth.listed_loops", "1,2,2",
                  "--depth.override_frac", "0")  # fmt: skip
        flags = ("--depth.sampler", "sync_uniform", "--depth.listed_loops", "null")
        path = tmp_path / "listed.yaml"
        path.write_text(cli("train", "tiny-text", *listed, "--print-config").out, encoding="utf-8")
        out = yaml.safe_load(cli("train", str(path), *flags, "--print-config").out)["depth"]
        assert (out["sampler"], out["listed_loops"]) == ("sync_uniform", None)

    def test_an_unknown_key_gets_the_nearest_one(self, cli: Command) -> None:
        code, out, err = cli("train", "tiny-text", "--model.loop.updat", "delta")
        assert (code, out) == (2, "")
        assert "unknown key 'model.loop.updat'. Did you mean 'model.loop.update'?" in err

    def test_an_unknown_key_in_a_recipe_file_gets_the_nearest_one(
        self, cli: Command, tmp_path: Path
    ) -> None:
        values = Recipe.from_file(ROOT / "depthdial/recipes/tiny-text.yaml").to_dict()
        values["train"]["stepz"] = 3
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump(values), encoding="utf-8")
        code, _, err = cli("train", path)
        assert code == 1
        assert f"error: {path}: unknown key 'train.stepz'. Did you mean 'steps'?" in err

    def test_print_config_gives_a_recipe_with_the_overrides(
        self, cli: Command, tmp_path: Path
    ) -> None:
        changes = ["--optim.lr", "2e-3", "--model.split", "2,4,4", "--model.layout", "AF"]
        code, out, _ = cli(
            "train", "tiny-text", "--print-config", *changes, "--model.modulation", "null"
        )
        path = tmp_path / "printed.yaml"
        path.write_text(out, encoding="utf-8")
        recipe = Recipe.from_file(path)
        assert code == 0
        assert recipe.optim.lr == 2e-3
        assert recipe.model.split == (2, 4, 4)
        assert recipe.model.modulation is None

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("train.steps", "0", "train.steps=0: Input should be greater than or equal to 1"),
            ("train.steps", "many", "train.steps='many': Input should be a valid integer"),
            ("model.max_loops", "0", "model.max_loops=0: Input should be greater"),
            ("model.max_loops", "2.5", "model.max_loops=2.5: Input should be a valid integer"),
            ("model.split", "2,4,1", "split [2, 4, 1] adds up to 7 sublayers"),
            ("model.loop.update", "dleta", "Input should be 'replace', 'residual', 'delta'"),
            (
                "train.steps",
                "2020-01-01",
                "train.steps='2020-01-01': Input should be a valid integer",
            ),
            ("optim.lr", "1e400", "optim.lr=inf: Input should be a finite number"),
            ("optim.lr", ".nan", "optim.lr=nan: Input should be a finite number"),
            ("model.loop", "5", "model.loop=5: Input should be an object"),
            ("name", "../out", "name='../out': String should match pattern"),
        ],
    )
    def test_a_wrong_value_is_told_with_key_value_and_rule(
        self, cli: Command, key: str, value: str, message: str
    ) -> None:
        code, _, err = cli("train", "tiny-text", "--print-config", f"--{key}={value}")
        assert code == 1
        assert err.startswith("error: ") and message in err
        assert "Traceback" not in err

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_group_that_is_null_beside_a_key_of_it_is_refused(
        self, cli: Command, order: int
    ) -> None:
        flags = ["--model.modulation=null", "--model.modulation.rank=4"][::order]
        code, out, err = cli("train", "tiny-text", "--print-config", *flags)
        assert (code, out) == (1, "")
        assert "model.modulation=null and model.modulation.rank=4 contradict each other" in err

    @pytest.mark.parametrize("order", [1, -1])
    def test_a_key_changes_the_group_given_beside_it(self, cli: Command, order: int) -> None:
        flags = ["--model.modulation={d_cond: 8, rank: 2}", "--model.modulation.rank=4"][::order]
        _, out, _ = cli("train", "tiny-text", "--print-config", *flags)
        modulation = yaml.safe_load(out)["model"]["modulation"]
        assert (modulation["d_cond"], modulation["rank"]) == (8, 4)

    def test_the_loop_can_be_given_as_a_group(self, cli: Command) -> None:
        flags = ["--model.loop", "{update: delta}", "--model.loop.delta_init", "0.1"]
        code, out, _ = cli("train", "tiny-text", "--print-config", *flags)
        loop = yaml.safe_load(out)["model"]["loop"]
        assert (code, loop["update"], loop["delta_init"]) == (0, "delta", 0.1)

    def test_a_value_that_cannot_be_read_is_a_usage_error(self, cli: Command) -> None:
        code, _, err = cli("train", "tiny-text", "--optim.betas", "[0.9")
        assert code == 2
        assert "--optim.betas needs list of number in [0, 1)" in err


class TestTrainAndResume:
    def test_the_result_goes_to_stdout_and_progress_to_stderr(
        self, cli: Command, tiny_flags: Command, tiny_folder: Path
    ) -> None:
        where = [
            "--root",
            tiny_folder / "runs",
            "--data.path",
            tiny_folder / "data",
            "--name",
            "again",
        ]
        code, out, err = cli("train", "tiny-text", *where, *tiny_flags())
        assert code == 0
        assert out.startswith(f"{tiny_folder / 'runs' / 'again'}: finished after 4 of 4 steps")
        assert "validation loss at step 4: k=1 " in out and "k=3 " in out
        assert "mixed depth starts" in err and "mixed depth" not in out

    def test_an_existing_run_is_refused_with_the_way_on(
        self, cli: Command, tiny_flags: Command, tiny_folder: Path, tiny_run: Path
    ) -> None:
        before = sorted(path.name for path in tiny_run.rglob("*"))
        where = [
            "--root",
            tiny_folder / "runs",
            "--data.path",
            tiny_folder / "data",
            "--name",
            "tiny",
        ]
        code, out, err = cli("train", "tiny-text", *where, *tiny_flags())
        assert (code, out) == (1, "")
        assert f"{tiny_run} exists already" in err and f"depthdial resume {tiny_run}" in err
        assert sorted(path.name for path in tiny_run.rglob("*")) == before

    @pytest.mark.parametrize(
        ("number", "code", "status"),
        [(signal.SIGTERM, 75, "terminated"), (signal.SIGINT, 130, "interrupted")],
    )
    def test_a_signal_saves_and_resume_finishes_the_run(
        self,
        cli: Command,
        tiny_flags: Command,
        monkeypatch: pytest.MonkeyPatch,
        tiny_folder: Path,
        tmp_path: Path,
        number: signal.Signals,
        code: int,
        status: str,
    ) -> None:
        record = RichObserver.record

        def record_then_signal(self: RichObserver, values: dict[str, Any]) -> None:
            record(self, values)
            if values["step"] == 3:
                signal.raise_signal(number)

        where = ["--root", tmp_path, "--data.path", tiny_folder / "data", "--name", "stopped"]
        with monkeypatch.context() as patch:
            patch.setattr(RichObserver, "record", record_then_signal)
            stopped = cli("train", "tiny-text", *where, *tiny_flags(train__steps="6"))
        run = tmp_path / "stopped"
        assert stopped.code == code
        assert f"{run}: {status} after 3 of 6 steps" in stopped.out
        assert f"depthdial resume {run}" in stopped.err.replace("\n", "")
        assert (run / "checkpoints" / "step_3").is_dir()
        resumed = cli("resume", run)
        assert resumed.code == 0
        assert f"{run}: finished after 6 of 6 steps" in resumed.out

    def test_a_damaged_checkpoint_falls_back_to_the_previous_and_names_it(
        self, cli: Command, tiny_run: Path, tmp_path: Path
    ) -> None:
        copy = tmp_path / "tiny"
        shutil.copytree(tiny_run, copy)
        weights = copy / "checkpoints" / "step_4" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1])
        code, out, err = cli("resume", copy)
        assert code == 0
        assert "warning: checkpoint step_4 is skipped: 'model.safetensors' has" in err
        assert "Using step_2 instead." in err
        assert "finished after 4 of 4 steps" in out

    def test_a_full_disk_is_one_message_and_loses_nothing(
        self,
        cli: Command,
        tiny_flags: Command,
        monkeypatch: pytest.MonkeyPatch,
        tiny_folder: Path,
        tmp_path: Path,
    ) -> None:
        from depthdial.training import session

        save_model = session.save_model

        def save_then_full(model: Any, path: Path, *, trained_loops: set[int]) -> None:
            save_model(model, path, trained_loops=trained_loops)
            if path.name == ".step_4.tmp":
                raise OSError(28, "No space left on device")

        monkeypatch.setattr(session, "save_model", save_then_full)
        where = ["--root", tmp_path, "--data.path", tiny_folder / "data", "--name", "full"]
        code, _, err = cli("train", "tiny-text", *where, *tiny_flags())
        assert code == 1
        message = " ".join(err[err.index("error: ") :].split())
        assert "No space left on device" in message and "step_2 is still good" in message
        assert "Errno" not in message.removeprefix("error: ")[:30] and "Traceback" not in err

    def test_a_gradient_that_is_no_number_is_one_message_and_a_lower_rate_goes_on(
        self, cli: Command, tiny_flags: Command, tiny_folder: Path, tmp_path: Path
    ) -> None:
        where = ["--root", tmp_path, "--data.path", tiny_folder / "data", "--name", "wild"]
        rate = ["--optim.optimizer", "adamw", "--optim.warmup_frac", "0", "--optim.lr", "1e30"]
        code, _, err = cli("train", "tiny-text", *where, *tiny_flags(), *rate)
        assert code == 1
        message = " ".join(err[err.index("error: ") :].split())
        assert message.startswith("error: the gradient norm is nan; this step was not taken.")
        assert "depthdial resume" in message and "Traceback" not in err
        code, out, _ = cli("resume", tmp_path / "wild", "--optim.lr", "1e-3")
        assert code == 0
        assert "finished after 4 of 4 steps" in out

    def test_b39_a_new_rate_acts_on_the_next_step_and_is_written_down(
        self, cli: Command, tiny_run: Path, tmp_path: Path
    ) -> None:
        copies = [tmp_path / name / "tiny" for name in ("same", "other")]
        for copy in copies:
            shutil.copytree(tiny_run, copy)
            shutil.rmtree(copy / "checkpoints" / "step_4")
        assert cli("resume", copies[0]).code == 0
        assert cli("resume", copies[1], "--optim.lr", "1e-3").code == 0
        same, other = (self.records(copy, name="lr/") for copy in copies)
        before = Recipe.from_file(tiny_run / "config.json").optim.lr
        assert Recipe.from_file(copies[1] / "config.json").optim.lr == 1e-3
        assert [same[i] == other[i] for i in range(4)] == [True, True, False, False]
        for name, rate in same[2].items():
            assert other[2][name] == pytest.approx(rate * 1e-3 / before)

    @staticmethod
    def records(run: Path, *, name: str) -> list[dict[str, float]]:
        """Values whose names begin with `name`, of every training step."""
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        values = [json.loads(line) for line in lines]
        return [
            {key: value for key, value in line.items() if key.startswith(name)}
            for line in values
            if "train/loss" in line
        ]

    def test_resume_offers_the_keys_that_may_change_and_no_others(self, cli: Command) -> None:
        from depthdial.training.session import RESUME_KEYS

        out = cli("resume", "--help").out
        offered = {key.name for key in recipe_keys() if f"--{key.name} VALUE" in out}
        assert offered == set(RESUME_KEYS)
        assert "default" not in out

    @pytest.mark.parametrize("key", ["train.steps", "model.d_ff", "data.context", "name"])
    def test_resume_refuses_a_key_that_would_make_it_another_run(
        self, cli: Command, tiny_run: Path, key: str
    ) -> None:
        code, _, err = cli("resume", tiny_run, f"--{key}", "9")
        assert code == 2
        assert f"`depthdial resume` cannot change the recipe key '{key}'" in err

    @pytest.mark.parametrize(
        "argv",
        [
            ["resume", "CHECKPOINT"],
            ["report", "CHECKPOINT"],
            ["report", "RUN", "--baseline", "CHECKPOINT"],
        ],
    )
    def test_a_checkpoint_in_place_of_a_run_is_told_its_run(
        self, cli: Command, tiny_run: Path, argv: list[str]
    ) -> None:
        checkpoint = tiny_run / "checkpoints" / "step_2"
        places = {"CHECKPOINT": checkpoint, "RUN": tiny_run}
        code, out, err = cli(*(places.get(part, part) for part in argv))
        assert (code, out) == (1, "")
        assert err.endswith(
            f"error: {checkpoint} is a checkpoint of the run {tiny_run}, not a run. "
            f"Give {tiny_run}{' --checkpoint step_2' if argv[0] == 'resume' else ''}.\n"
        )

    def test_resume_of_no_run_says_what_a_run_is(self, cli: Command) -> None:
        code, _, err = cli("resume", "nowhere")
        assert code == 1
        assert err.startswith("error: nowhere is no run")


class TestPrepare:
    def test_counts_go_to_stdout_and_the_next_command_to_stderr(
        self, cli: Command, tmp_path: Path
    ) -> None:
        lines = [json.dumps({"body": text}) for text in ["one two", "", "three four", "five"]]
        (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
        code, out, err = cli(
            "prepare", tmp_path / "a.jsonl", "--out", tmp_path / "d", "--text-field", "body"
        )
        assert code == 0
        assert "skipped 1 empty documents" in out
        assert "--data.path" in err and "--model.vocab_size" in err

    def test_text_shorter_than_the_context_is_refused(
        self, cli: Command, tiny_flags: Command, tmp_path: Path
    ) -> None:
        (tmp_path / "a.txt").write_text("a short text of no great length", encoding="utf-8")
        data = tmp_path / "data"
        assert cli("prepare", tmp_path / "a.txt", "--out", data).code == 0
        vocab = json.loads((data / "meta.json").read_text("utf-8"))["vocab_size"]
        code, _, err = cli("train", "tiny-text", "--root", tmp_path, "--data.path", data,
            *tiny_flags(model__vocab_size=str(vocab), data__context="48"),
        )  # fmt: skip
        assert code == 1
        assert "one row of context 48 needs 49. Give more text, a context of at most" in err

    @pytest.mark.parametrize(
        ("argv", "code", "message"),
        [
            (["--valid-frac", "1"], 1, "--valid-frac 1.0 must be at least 0 and below 1"),
            (["--vocab-size", "9"], 1, "--vocab-size 9 is too small"),
            (["--text-field", "title"], 1, "it has text. Choose one with --text-field."),
            (["--out", "OUT"], 1, "allow prepared data to be replaced: --overwrite"),
            (["--vocab-size", "300", "--tokenizer", "t.json"], 2, "give --vocab-size (to train"),
        ],
    )
    def test_errors_name_the_flags_of_the_command(
        self, cli: Command, tmp_path: Path, argv: list[str], code: int, message: str
    ) -> None:
        (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n', encoding="utf-8")
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "file").touch()
        changed = [str(tmp_path / "full") if part == "OUT" else part for part in argv]
        out = [] if "--out" in argv else ["--out", tmp_path / "d"]
        outcome = cli("prepare", tmp_path / "a.jsonl", *out, *changed)
        assert outcome.code == code
        assert message in outcome.err

    def test_only_empty_documents_are_refused(self, cli: Command, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("  \n", encoding="utf-8")
        code, _, err = cli("prepare", tmp_path / "a.txt", "--out", tmp_path / "d")
        assert (code, err) == (1, "error: nothing to prepare: the only document is empty.\n")


class TestReportAndList:
    def test_report_prints_the_files_it_wrote(
        self, cli: Command, tiny_folder: Path, tiny_run: Path
    ) -> None:
        pytest.importorskip("matplotlib")
        code, out, _ = cli("report", tiny_run, "--baseline", tiny_folder / "runs" / "plain")
        assert code == 0
        assert [Path(line).name for line in out.splitlines()] == ["report.html", "curve.png"]
        assert all(Path(line).stat().st_size > 0 for line in out.splitlines())

    def test_list_names_every_recipe_and_corpus(self, cli: Command) -> None:
        code, out, _ = cli("list")
        assert code == 0
        for name in (*recipe_names(), "gpt-0.5b", "annual-messages", "stdlib"):
            assert any(line.startswith(f"{name} ") for line in out.splitlines())

    def test_list_tells_recipes_that_start_from_a_model_apart(self, cli: Command) -> None:
        parts = cli("list").out.split("\n\n")
        [healing] = [part for part in parts if "start from a model directory" in part]
        assert "--init" in healing.splitlines()[0]
        assert [line.split()[0] for line in healing.splitlines()[1:] if line] == ["heal-text"]


def test_a_reader_that_leaves_a_pipe_causes_no_traceback() -> None:
    command = f"{sys.executable} -m depthdial.cli.main train --help | head -1"
    done = subprocess.run(
        command, shell=True, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.stdout.startswith("usage: depthdial train")
    assert done.stderr == ""


def test_f10_a_closed_standard_output_is_no_traceback():
    command = f"{sys.executable} -m depthdial list >&-"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_f31_plan_has_the_largest_context_of_any_model(cli):
    assert "beyond 16,777,216" in cli("plan", "gpt-0.5b", "--context", "9" * 20).err
