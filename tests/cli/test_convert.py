"""The `convert` command: its flags, its summary, its exit codes."""

import json

import pytest
import torch
from goldens import open_golden

from depthdial.cli.convert import option_texts
from depthdial.convert.methods import METHODS
from depthdial.data.tokenizer import train_bpe
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

TEXT = "The ship sailed past the island, and the island saw the ship no more. "


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases") / "dense"
    save_model(LoopedLM(open_golden("llama").config.replace(vocab_size=257)), folder)
    train_bpe([TEXT], 257).save(folder)
    return folder


def test_help_lists_every_method_and_every_option(cli):
    code, out, _ = cli("convert", "--help")
    assert code == 0
    assert all(f"\n  {name}\n" in out for name in METHODS)
    options = {name for method in METHODS.values() for name in method.options.model_fields}
    assert options == option_texts().keys()
    assert all(f"--{name.replace('_', '-')} VALUE" in out for name in options)


def test_help_of_an_option_names_values_methods_and_defaults():
    text = option_texts()["selection"]
    assert "stepwise | average | lower" in text
    assert "(tie-layers: stepwise; relaxed-recursive: average)" in text


def test_the_summary_says_what_is_exact_and_what_is_new(cli, base, tmp_path):
    out_folder = tmp_path / "out"
    code, out, err = cli("convert", base, out_folder, "--method", "later-deltas", "--core", "1:5")
    assert code == 0, err
    words = " ".join(out.split())
    assert "core 1:5 of the base's layers, as given; 2 + 8 + 2 sublayers" in words
    assert "of them new, in loop_lora, state_update" in words
    assert "1 to 4, 1 where a request names none" in words
    assert "equals the base bit for bit at k = 1 before any training" in words
    assert "identical" in out.splitlines()[-1]
    assert f"depthdial train RECIPE --init {out_folder}" in err
    assert load_model(out_folder).config.loop.update == "delta"


def test_a_method_without_promise_says_why_and_what_was_measured(cli, base, tmp_path):
    argv = ("--method", "tie-layers", "--core", "0:6", "--num-loops", "3", "--order", "sequence")
    code, out, err = cli("convert", base, tmp_path / "out", *argv)
    assert code == 0, err
    assert "none: 6 distinct layers became 2" in " ".join(out.split())
    assert "none new" in out
    measured = json.loads((tmp_path / "out" / "equality.json").read_text())["compared"][0]
    assert f"{measured['max_abs_logit_difference']:.2g}" in out.splitlines()[-1]
    assert load_model(tmp_path / "out").config.segments == (2, 2)


def test_a_proposed_window_is_named_with_its_figure(cli, base, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 2000)
    code, out, err = cli(
        "convert", base, tmp_path / "out", "--method", "loop-window", "--core-layers", "2",
        "--texts", tmp_path / "text.txt",
    )  # fmt: skip
    assert code == 0, err
    assert "proposed, see core_choice.png" in " ".join(out.split())
    proposed = json.loads((tmp_path / "out" / "core_choice.json").read_text())["proposed"]
    assert proposed[1] - proposed[0] == 2


def test_a_looped_model_becomes_elastic(cli, tmp_path):
    save_model(open_golden("ouro").model(), tmp_path / "base")
    argv = ("--method", "elastic-fixed", "--max-loops", "6", "--d-cond", "8", "--rank", "4")
    code, out, err = cli("convert", tmp_path / "base", tmp_path / "out", *argv)
    assert code == 0, err
    assert "1 to 6, 4 where a request names none" in " ".join(out.split())
    assert "equals the base within 1e-4 at k = 4, 1" in " ".join(out.split())


@pytest.mark.parametrize(
    ("argv", "exit_code", "message"),
    [
        (("--core", "1:5"), 2, "give --method and one of loop-window, damped"),
        (("--method", "elr"), 2, "invalid choice"),
        (("--method", "loop-window", "--core", "9:12"), 1, "core '9:12' is no core"),
        (("--method", "loop-window", "--core-layers", "two"), 2, "needs a whole number"),
        (("--method", "loop-window", "--seed", "x"), 2, "--seed needs a whole number"),
        (("--method", "loop-window", "--rate", "0.1"), 1, "rate=0.1 has no effect with"),
        (("--method", "later-deltas", "--rate", "2"), 1, "less than or equal to 1"),
        (("--method", "later-deltas", "--rate", "[1"), 2, "--rate cannot read '[1'"),
        (("--method", "loop-window", "--wide", "3"), 2, "unknown option '--wide'"),
    ],
)
def test_a_wrong_command_line_is_told_what_is_right(cli, base, tmp_path, argv, exit_code, message):
    code, out, err = cli("convert", base, tmp_path / "out", *argv)
    assert (code, out) == (exit_code, "")
    assert err.startswith("error: ") and message in err
    assert list(tmp_path.iterdir()) == []


def test_a_converted_model_generates_at_every_loop_count(cli, base, tmp_path):
    cli("convert", base, tmp_path / "out", "--method", "anchored", "--core", "1:5")
    for k in ("1", "3"):
        argv = ("The ship", "--num-loops", k, "--max-new-tokens", "3")
        assert cli("generate", tmp_path / "out", *argv).code == 0
    plain = cli("generate", base, "The ship", "--num-loops", "1", "--max-new-tokens", "8")
    converted = cli("generate", tmp_path / "out", "The ship", "--num-loops", "1",
                    "--max-new-tokens", "8")  # fmt: skip
    assert converted.out == plain.out


def test_stashing_the_plain_pass_decodes_as_the_base_at_one_loop(base, cli, tmp_path):
    """The one entry per token that stays is the base's own."""
    from depthdial.cache.contiguous import ContiguousCache

    cli("convert", base, tmp_path / "out", "--method", "damped", "--core", "1:5")
    model, x = load_model(tmp_path / "out"), torch.arange(9)[None]
    cache = ContiguousCache(model.config, batch_size=1, capacity=9)
    pieces = [model(part, num_loops=1, cache=cache) for part in x.split([6, 1, 1, 1], dim=1)]
    expected = load_model(base)(x, num_loops=1)
    torch.testing.assert_close(torch.cat(pieces, dim=1), expected, rtol=0, atol=1e-5)
