"""The commands that look at a model: generate, plan. The frame is in `test_cli.py`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from depthdial.api.model import load_recipe
from depthdial.config import POLICIES, DepthConfig, ModelConfig
from depthdial.model.presets import preset

Command = Callable[..., Any]


class TestGenerate:
    def test_stdout_is_the_continuation_alone(self, cli: Command, tiny_run: Path) -> None:
        import depthdial

        code, out, err = cli("generate", tiny_run, "The ship", "--num-loops", "3")
        [expected] = depthdial.load(tiny_run).generate("The ship", num_loops=3)
        assert (code, out) == (0, expected.text + "\n")
        assert err.startswith("k = 3: ")

    def test_compare_shows_every_trained_loop_count(self, cli: Command, tiny_run: Path) -> None:
        code, out, _ = cli("generate", tiny_run, "The ship", "--compare", "--max-new-tokens=5")
        assert code == 0
        assert [line[:5] for line in out.splitlines() if line.startswith("k = ")] == [
            "k = 1",
            "k = 2",
            "k = 3",
        ]

    def test_compare_takes_a_list_and_equal_depths_give_equal_text(
        self, cli: Command, tiny_run: Path
    ) -> None:
        argv = ["--num-loops", "2,2", "--temperature", "1", "--max-new-tokens", "6"]
        _, out, _ = cli("generate", tiny_run, "The ship", "--compare", *argv)
        first, second = out.partition("k = 2")[2].split("k = 2")
        assert first.split() == second.split() != []

    def test_an_exit_rule_says_how_many_loops_a_token_took(
        self, cli: Command, tiny_run: Path
    ) -> None:
        """Three for the prompt's token, one for each of the other four; such models are warned
        about."""
        argv = ["--num-loops", "3", "--max-new-tokens", "5", "--exit-rule", "latent_diff"]
        code, _, err = cli("generate", tiny_run, "The ship", *argv, "--exit-threshold", "1e9")
        assert code == 0
        assert "5 new at 1.40 loops per token" in err
        assert "warning: the loops of this model depend on how many" in err

    @pytest.mark.parametrize(
        ("loops", "exit_code", "message"),
        [
            ("0", 1, "--num-loops 0: give whole numbers of at least 1.\n"),
            ("-1", 1, "--num-loops -1: give whole numbers of at least 1.\n"),
            ("two", 2, "--num-loops needs whole numbers of at least 1, got 'two'.\n"),
            ("2.5", 2, "--num-loops needs whole numbers of at least 1, got '2.5'.\n"),
            ("4", 1, "--num-loops 4: this model is made for 1 to 3 loops (training ran k = "),
        ],
    )
    def test_a_wrong_loop_count_is_told_what_is_allowed(
        self, cli: Command, tiny_run: Path, loops: str, exit_code: int, message: str
    ) -> None:
        code, out, err = cli("generate", tiny_run, "The", "--num-loops", loops)
        assert (code, out) == (exit_code, "")
        assert err.startswith(f"error: {message}")

    @pytest.mark.parametrize(
        ("argv", "code", "message"),
        [
            (["--temperature", "warm"], 2, "needs a number in plain decimal digits, got 'warm'"),
            (["--top-p", "0"], 1, "0 < top_p <= 1"),
            (["--temperature", "1e-40"], 1, "temperature 0 or 1e-06 <= temperature"),
            (["--top-k", "3"], 1, "top_k: no effect at temperature=0"),
            (["--device", "nowhere"], 1, "device 'nowhere' cannot be used here"),
            (["--max-new-tokens", "500"], 1, "the model's context is 48"),
            (["--num-loops", "1,2"], 2, "several loop counts go with --compare"),
            (["--step-sizes", "0.5,0.5"], 1, "step_sizes has no effect: this model is not"),
            (
                ["--step-sizes", "0.5,half"],
                2,
                "--step-sizes needs a number in plain decimal digits, got 'half'",
            ),
            (["--step-sizes", "1", "--compare"], 2, "are of one loop count; leave --compare out"),
            (["--num-loop", "1"], 2, "Did you mean '--num-loops'?"),
            (["--exit-rule", "latent"], 1, "unknown stopping rule 'latent'"),
            (["--exit-rule", "q_exit"], 1, "q_exit needs a threshold"),
            (["--exit-rule", "cdf"], 1, "cdf reads an exit gate, and this model has none"),
            (["--exit-rule", "kl", "--exit-threshold", "0"], 1, "kl takes a positive number"),
            (["--exit-threshold", "1"], 2, "--exit-threshold goes with --exit-rule"),
            (["--cache-policy", "none"], 2, "unknown cache policy 'none'"),
        ],
    )
    def test_a_wrong_option_is_told_what_is_allowed(
        self,
        cli: Command,
        tiny_run: Path,
        argv: Sequence[str],
        code: int,
        message: str,
    ) -> None:
        outcome = cli("generate", tiny_run, "The", *argv)
        assert outcome.code == code
        assert message in outcome.err

    def test_an_empty_prompt_is_refused(self, cli: Command, tiny_run: Path) -> None:
        code, _, err = cli("generate", tiny_run, "")
        assert (code, err) == (1, "error: prompt 0 is empty; give at least one character.\n")


def memory_rows(out: str) -> dict[str, list[str]]:
    """Row of the memory table -> its cells, over all parts of the table."""
    rows: dict[str, list[str]] = {}
    for line in out.partition("Cached keys and values")[2].splitlines():
        name, *cells = re.split(r"\s{2,}", line.strip())
        if cells and all(re.fullmatch(r"[\d.]+ (B|KiB|MiB|GiB)", cell) for cell in cells):
            rows.setdefault(name, []).extend(cells)
    return rows


class TestPlan:
    def test_gpt_05b_with_the_numbers_of_the_paper(self, cli: Command) -> None:
        """D_eff 30 and 86; Eq. 5 at f = 0.15, K = 5, a quarter of the tokens mixed: 1.198."""
        code, out, _ = cli("plan", "elr-0.5b", "--switch-frac", "0.75")
        assert code == 0
        assert "498M parameters" in out
        assert "Training: 1.20 times" in out and "mean 2.70" in out
        assert [line.split()[:2] for line in out.splitlines() if line.startswith("5 ")][0] == [
            "5",
            "86",
        ]

    def test_training_of_a_fixed_depth_costs_that_depth(self, cli: Command, tmp_path: Path) -> None:
        """4 loops of 4 sublayers between 2 and 2: 20 instead of 8, 2.5 times."""
        depth = {"depth": DepthConfig(sampler="fixed", fixed_loops=4)}
        path = tmp_path / "fixed.json"
        path.write_text(load_recipe("tiny-text", depth).to_json(), encoding="utf-8")
        out = cli("plan", path).out
        assert "Training: 2.50 times" in out
        assert "Depth: always 4 loops, mean 4.00, in 100% of the steps" in out

    @pytest.mark.parametrize("sampler", ["override", "sync_weighted", "independent_uniform"])
    def test_training_costs_the_mean_of_the_sampler(
        self, cli: Command, tmp_path: Path, sampler: str
    ) -> None:
        frac = 0.0 if sampler.endswith("uniform") else 0.25
        depth = {"depth": DepthConfig(sampler=sampler, override_frac=frac)}
        path = tmp_path / "drawn.json"
        path.write_text(load_recipe("tiny-text", depth).to_json(), encoding="utf-8")
        mean = frac + (1 - frac) * 2.5
        out = cli("plan", path).out
        assert f"Training: {(4 + 4 * mean) / 8:.2f} times" in out
        assert f"Depth: {sampler} draws from 1..4 loops" in out and f"mean {mean:.2f}" in out

    def test_every_cache_policy_has_its_row(self, cli: Command) -> None:
        rows = memory_rows(cli("plan", "tiny-text").out)
        named = {name.partition(",")[0] for name in rows}
        assert named == {*POLICIES, "weights and per_loop"}
        assert {f"collapse_{x}, prompt" for x in ("last", "first", "mean")} < rows.keys()

    def test_any_number_of_policies_fits_the_line(self, cli: Command) -> None:
        """A column per policy was wider than a terminal from the sixth on."""
        out = cli("plan", "gpt-0.5b", "--num-loops", *map(str, range(1, 14))).out
        assert max(map(len, out.splitlines())) <= 80
        assert [len(cells) for cells in memory_rows(out).values()] == [13] * 12

    def test_memory_of_many_loops_is_shown_at_powers_of_two(
        self, cli: Command, tmp_path: Path
    ) -> None:
        path = tmp_path / "config.json"
        path.write_text(preset("tiny-text").replace(max_loops=40).to_json(), encoding="utf-8")
        out = cli("plan", path).out
        assert [int(k) for k in re.findall(r"k = (\d+)", out)] == [1, 2, 4, 8, 16, 32, 40]

    def test_memory_is_that_of_the_policy_of_the_model(self, cli: Command, tmp_path: Path) -> None:
        path = tmp_path / "config.json"
        config = preset("tiny-text").replace(**{"loop.cache_policy": "last_step"})
        path.write_text(config.to_json(), encoding="utf-8")
        own = memory_rows(cli("plan", path, "--dtype", "fp32").out)["weights and last_step"]
        assert len(set(own)) == 1

    def test_b50_cache_grows_with_loops_per_loop_only(self, cli: Command) -> None:
        """15 attention sublayers of 1,024 channels, 131,072 tokens, 2 bytes: 7.5 GiB at k = 1."""
        argv = ["gpt-0.5b", "--num-loops", "1", "4", "6", "--context", "131072"]
        _, out, _ = cli("plan", *argv)
        rows = memory_rows(out)
        assert re.findall(r"k = \S+", out) == ["k = 1", "k = 4", "k = 6*"]
        assert rows["per_loop"] == ["7.50 GiB", "18.00 GiB", "25.00 GiB"]
        assert rows["last_step"] == ["7.50 GiB"] * 3
        assert "* more loops than the max_loops = 5 that the model is made for" in out
        assert "longer than the context the model is meant for (4,096)" in out

    @pytest.mark.parametrize("k", ["1000000", "9" * 5000])
    @pytest.mark.parametrize(
        "command", [["plan", "gpt-0.5b"], ["inspect", "a"], ["generate", "a", "b"]]
    )
    def test_f31_absurd_loop_counts_are_refused(
        self, cli: Command, command: list[str], k: str
    ) -> None:
        code, out, err = cli(*command, "--num-loops", k)
        assert (code, out) == (1, "") and err.endswith(": at most 1,024 loops run.\n")
        assert len(err) < 100

    def test_f31_many_loops_are_planned_by_powers_of_two(
        self, cli: Command, tmp_path: Path
    ) -> None:
        path = tmp_path / "config.json"
        path.write_text(preset("tiny-text").replace(max_loops=100).to_json(), encoding="utf-8")
        lines = cli("plan", path).out.partition("Cached")[0].splitlines()
        first = [line.split()[0].rstrip("*") for line in lines if line.strip()]
        loops = [int(word) for word in first if word.isdecimal()]
        assert loops[:8] == [1, 2, 4, 8, 16, 32, 64, 100]

    def test_guessed_fields_of_a_preset_are_named(self, cli: Command) -> None:
        assert "Guessed, as not published: num_heads" in cli("plan", "gpt-0.5b").out

    def test_a_run_and_a_model_directory_are_taken(self, cli: Command, tiny_run: Path) -> None:
        of_run = cli("plan", tiny_run).out
        of_model = cli("plan", tiny_run / "checkpoints" / "step_4").out
        assert of_run.splitlines()[1] == of_model.splitlines()[1]

    def test_b15_loop_counts_outside_training_are_marked(
        self, cli: Command, tiny_run: Path
    ) -> None:
        """A run and its checkpoint say the same; all up to max_loops once counted as trained."""
        newest = tiny_run / "checkpoints" / "step_4"
        trained = ModelConfig.from_file(newest / "config.json").trained_at
        assert {1} < set(trained) < {1, 2, 3, 4}
        for path in (tiny_run, newest):
            out = cli("plan", path, "--num-loops", "1", "2", "3", "4").out
            words = ", ".join(map(str, trained))
            assert f"made for 1 to 3 loops; training ran k = {words}\n" in out
            marked = {int(k) for k in re.findall(r"(?m)^ *(\d)\* ", out)}
            assert marked == {1, 2, 3, 4} - set(trained)
            assert f"* outside training, which ran k = {words}" in out

    @pytest.mark.parametrize(
        ("argv", "code", "message"),
        [
            (["gpt-0.5"], 1, "Did you mean 'gpt-0.5b'?"),
            (["gpt-0.5b", "--num-loops", "0"], 1, "--num-loops 0: give whole numbers"),
            (["gpt-0.5b", "--context", "0"], 1, "context=0"),
            (["gpt-0.5b", "--context", "long"], 2, "--context needs a whole number"),
            (["gpt-0.5b", "--switch-frac", "2"], 1, "switch_frac=2.0: Input should be less"),
            (
                ["tiny-text-baseline", "--override-frac", "0.5"],
                1,
                "override_frac=0.5 has no effect",
            ),
            (["nowhere/config.json"], 1, "no configuration at nowhere/config.json"),
            (["heal-text"], 1, "recipe heal-text has no model of its own: it starts from a model"),
        ],
    )
    def test_wrong_input_is_told_what_is_allowed(
        self, cli: Command, argv: Sequence[str], code: int, message: str
    ) -> None:
        outcome = cli("plan", *argv)
        assert outcome.code == code
        assert message in outcome.err
