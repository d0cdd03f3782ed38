"""Conversions from folder to folder: the table of promises, what is written, what is refused."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from goldens import GOLDEN, open_golden

from depthdial.convert.base_model import Converted, CoreRange
from depthdial.convert.convert import CONVERSIONS, convert, convert_model
from depthdial.convert.methods import METHODS, method_named, read_options
from depthdial.data.tokenizer import train_bpe
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

TEXT = "The ship sailed past the island, and the island saw the ship no more. "
SMALL = {"d_cond": 8, "rank": 4}
NONE, CLOSE, BITS = "none", "close", "bits"
TABLE = [
    ("loop-window", {}, (1,), BITS),
    ("damped", {}, (1,), BITS),
    ("anchored", {}, (1,), BITS),
    ("tie-layers", {}, (2,), NONE),
    ("relaxed-recursive", {"rank": 4}, (2,), NONE),
    ("relaxed-recursive", {"rank": "full", "norms": "tied"}, (2,), NONE),
    ("relaxed-recursive", {"rank": "full"}, (2,), CLOSE),
    ("relaxed-recursive", {"rank": "full", "order": "sequence"}, (2,), CLOSE),
    ("retrofitted-recurrence", {}, (1, 2, 4), CLOSE),
    ("retrofitted-recurrence", {"prelude": 0}, (1, 2, 4), NONE),
    ("decay-gate", {}, (1,), NONE),
    ("decay-gate-ungated-first", {}, (1,), BITS),
    ("elr-graft", SMALL, (1, 2, 4), BITS),
    ("elr-graft", {"start": "beta_one", **SMALL}, (1, 2, 4), CLOSE),
    ("elr-graft", {"start": "plain", **SMALL}, (1, 2, 4), NONE),
    ("later-deltas", {}, (1,), BITS),
    ("joint-deltas", {}, (1,), BITS),
]
"""Method, options, loop counts that stand for the dense base, what is equal there."""


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A dense model with tokenizer, licence and origin, as an import leaves it."""
    root = tmp_path_factory.mktemp("bases") / "dense"
    golden, tokenizer = open_golden("llama"), train_bpe([TEXT], 257)
    model = LoopedLM(golden.config.replace(vocab_size=257, max_context=48), seed=3)
    save_model(model, root)
    tokenizer.save(root)
    (root / "LICENSE").write_text("the licence")
    origin = {
        "format_version": 1, "family": "llama", "source": "x", "config": {}, "tensors": {},
        "dtype": "float32",
        "kept_tensors": [], "changed_files": {}, "sha256": {},
    }  # fmt: skip
    (root / "origin.json").write_text(json.dumps(origin))
    return root


@pytest.fixture(scope="module")
def looped_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases") / "looped"
    save_model(open_golden("ouro").model(), root)
    return root


# ---- the table


@pytest.mark.parametrize(("method", "options", "loops", "equal"), TABLE)
def test_what_equals_the_base_and_where(method, options, loops, equal):
    golden = open_golden("llama")
    base, x = golden.model().eval(), golden.vectors["input_ids"]
    result = convert_model(
        base, x, method=method, core_range=CoreRange(1, 5), options=read_options(method, options)
    )
    assert result.converted.promises == equal
    assert tuple(pair.result for pair in result.converted.pairs) == loops
    assert bool(result.converted.why_not) == (equal == NONE)
    for k in loops:
        difference = (result.model(x, num_loops=k) - golden.vectors["logits"]).abs().max()
        assert (difference <= 1e-4) == (equal != NONE), f"{difference} at {k} loops"
        if equal == BITS and k == 1:
            assert torch.equal(result.model(x, num_loops=1), base(x, num_loops=1))


def test_the_table_has_every_method_for_dense_models():
    dense = {name for name, method in METHODS.items() if method.takes_core}
    assert {method for method, *_ in TABLE} == dense


def test_every_method_is_carried_out_and_says_what_it_promises():
    assert CONVERSIONS.keys() == METHODS.keys()
    for name, method in METHODS.items():
        stated = {equal for other, _, _, equal in TABLE if other == name}
        assert ("none" in method.promise) == (NONE in stated)


def test_the_documentation_has_the_same_table():
    text = (Path(__file__).parents[2] / "docs" / "conversions.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{name}` | {x.summary} | {x.setting} | {x.promise} |" for name, x in METHODS.items()
    ]


# ---- options


def test_an_option_of_another_method_is_refused_with_its_owners():
    with pytest.raises(ValueError, match="gate_rank=3 has no effect .* decay-gate, decay-gate-un"):
        read_options("elr-graft", {"gate_rank": 3})


def test_an_unknown_option_gets_the_nearest_one():
    with pytest.raises(ValueError, match="unknown key 'selecton'. Did you mean 'selection'"):
        read_options("tie-layers", {"selecton": "lower"})


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("tie-layers", {"num_loops": 1}),
        ("tie-layers", {"order": "zigzag"}),
        ("relaxed-recursive", {"rank": 0}),
        ("relaxed-recursive", {"rank": "half"}),
        ("later-deltas", {"rate": 1.5}),
        ("loop-window", {"max_loops": 1}),
        ("loop-window", {"cache_policy": "some"}),
        ("retrofitted-recurrence", {"prelude": -1}),
    ],
)
def test_options_out_of_range_are_refused_by_name(method, options):
    with pytest.raises(ValueError, match=next(iter(options))):
        read_options(method, options)


def test_an_unknown_method_gets_the_nearest_one():
    with pytest.raises(ValueError, match="unknown method 'elr-graf'. Did you mean 'elr-graft'"):
        method_named("elr-graf")


# ---- folders


@pytest.mark.parametrize("name", ["loop-window", "relaxed-recursive", "elr-graft"])
def test_b41_the_base_stays_as_it_is_and_its_text_files_are_carried_over(folder, tmp_path, name):
    before = hashes(folder)
    convert(folder, tmp_path / "out", method=name, core="1:5")
    after = hashes(tmp_path / "out")
    assert hashes(folder) == before
    for carried in ("tokenizer.json", "tokenizer_config.json", "origin.json", "LICENSE"):
        assert after[carried] == before[carried]
    assert not list(tmp_path.glob(".*"))


def test_b34_a_looped_window_takes_no_more_room_than_the_base(folder, tmp_path):
    sizes = []
    for k in (2, 9):
        out = tmp_path / str(k)
        convert(folder, out, method="loop-window", core="1:5", options={"max_loops": k})
        sizes.append((out / "model.safetensors").stat().st_size)
    assert sizes[0] == sizes[1] <= (folder / "model.safetensors").stat().st_size + 512


def test_the_written_model_is_the_one_that_was_compared(folder, tmp_path):
    report = convert(folder, tmp_path / "out", method="elr-graft", core="1:5", options=SMALL)
    model, x = load_model(tmp_path / "out"), torch.arange(12)[None]
    assert torch.equal(model(x, num_loops=1), load_model(folder)(x, num_loops=1))
    assert model.config == report.config
    for name, tensor in report.result.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


def test_the_record_holds_method_window_base_and_measurement(folder, tmp_path):
    report = convert(folder, tmp_path / "out", method="later-deltas", core="1:5", seed=4)
    record = json.loads((tmp_path / "out" / "equality.json").read_text())
    assert record["method"] == "later-deltas"
    assert record["options"] == {"max_loops": 4, "rank": 16, "norms": "own", "rate": 0.1}
    assert (record["core"], record["core_is_proposed"], record["seed"]) == ([1, 5], False, 4)
    known = hashes(folder)
    assert record["base_sha256"] == {n: known[n] for n in ("config.json", "model.safetensors")}
    assert record["promise"] == "identical"
    assert record["compared"][0]["max_abs_logit_difference"] == 0.0
    assert record["compared_on"] == "4 x 48 tokens of text"
    assert record["compared_in"] == "float32"
    assert record["new_parameters"] == sum(report.new_parameters.values()) > 0
    assert {name.partition(".")[0] for name in report.new_parameters} == {
        "state_update",
        "loop_lora",
    }


def test_a_window_that_is_not_given_is_proposed_and_drawn(folder, tmp_path):
    (tmp_path / "text.txt").write_text(TEXT * 2000)
    out = tmp_path / "out"
    report = convert(folder, out, method="loop-window", texts=tmp_path / "text.txt")
    curve = json.loads((out / "core_choice.json").read_text())
    assert curve["num_texts"] >= 256
    assert len(curve["distances"]) == 6
    assert tuple(curve["proposed"]) == report.core_range == report.curve.knees
    assert (out / "core_choice.png").read_bytes().startswith(b"\x89PNG")
    one = convert(folder, tmp_path / "one", method="loop-window", core_layers=1,
                  texts=tmp_path / "text.txt")  # fmt: skip
    assert one.core_range.end - one.core_range.start == 1
    assert json.loads((tmp_path / "one" / "equality.json").read_text())["core_is_proposed"]


def test_without_matplotlib_the_numbers_come_without_the_figure(folder, tmp_path, monkeypatch):
    def missing(*arguments, **options):
        raise ImportError("figures need matplotlib")

    monkeypatch.setattr("depthdial.convert.convert.core_png", missing)
    (tmp_path / "text.txt").write_text(TEXT * 2000)
    with pytest.warns(UserWarning, match="no core_choice.png: figures need matplotlib"):
        convert(folder, tmp_path / "out", method="loop-window", texts=tmp_path / "text.txt")
    assert (tmp_path / "out" / "core_choice.json").is_file()
    assert not (tmp_path / "out" / "core_choice.png").exists()


def test_a_model_that_loops_already_needs_no_window_and_no_text(looped_folder, tmp_path):
    report = convert(looped_folder, tmp_path / "out", method="elastic-fixed", options=SMALL)
    assert (report.core_range, report.curve) == (None, None)
    record = json.loads((tmp_path / "out" / "equality.json").read_text())
    assert record["core"] is None
    assert record["compared_on"].endswith("random tokens")
    assert [pair["num_loops"] for pair in record["compared"]] == [4, 1]


def test_a_broken_promise_writes_nothing(folder, tmp_path, monkeypatch):
    def broken(base, core_range, options, seed):
        converted = CONVERSIONS["damped"](base, core_range, options, seed)
        tensors = dict(converted.tensors)
        tensors["final_norm.weight"] = 1.001 * tensors["final_norm.weight"]
        return Converted(converted.config, tensors, converted.pairs, "close")

    monkeypatch.setitem(CONVERSIONS, "loop-window", broken)
    with pytest.raises(ValueError, match="'loop-window' promises to equal the base within 0.0001"):
        convert(folder, tmp_path / "out", method="loop-window", core="1:5")
    assert list(tmp_path.iterdir()) == []


def test_what_float32_rounds_away_is_compared_in_float64(monkeypatch):
    """Differences of a large model at full rank pass 1e-4 by the order of summation alone."""
    golden = open_golden("llama")
    base, x = golden.model().eval(), golden.vectors["input_ids"]
    options = read_options("relaxed-recursive", {"rank": "full"})
    arguments = {"method": "relaxed-recursive", "core_range": CoreRange(1, 5), "options": options}
    assert convert_model(base, x, **arguments).compared_in == "float32"
    monkeypatch.setattr("depthdial.convert.equality.TOLERANCE", 1e-6)
    result = convert_model(base, x, **arguments)
    assert result.compared_in == "float64"
    assert result.comparisons[0].max_abs < 1e-6
    monkeypatch.setattr("depthdial.convert.equality.TOLERANCE", 1e-12)
    with pytest.raises(ValueError, match="promises to equal the base within 1e-12"):
        convert_model(base, x, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "loop-window", "core": "5:1"}, "core '5:1' is no core"),
        ({"method": "loop-window", "core": "1:5", "core_layers": 2}, "core=1:5 and core_layers=2"),
        ({"method": "elastic-fixed", "core": "1:5"}, "core=1:5 has no effect with the method"),
        ({"method": "elastic-fixed", "core_layers": 2}, "core_layers=2 has no effect with"),
        ({"method": "elastic-fixed"}, "this base runs its layers once"),
        ({"method": "tie-layers", "core": "1:5", "options": {"num_loops": 3}}, "3 passes do not"),
    ],
)
def test_wrong_arguments_are_refused_and_write_nothing(folder, tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        convert(folder, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_looped_base_is_refused_by_methods_for_dense_ones(looped_folder, tmp_path):
    with pytest.raises(ValueError, match="a core is chosen in a dense model"):
        convert(looped_folder, tmp_path / "out", method="loop-window", core="1:2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({}, "has no tokenizer.json, so its layers cannot"), ({"texts": "x.txt"}, "texts=x.txt has")],
)
def test_without_a_tokenizer_no_window_is_proposed(tmp_path, arguments, message):
    save_model(open_golden("llama").model(), tmp_path / "base")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "base", tmp_path / "out", method="loop-window", **arguments)


def test_a_destination_that_is_taken_is_left_alone(folder, tmp_path):
    out = tmp_path / "out"
    convert(folder, out, method="loop-window", core="1:5")
    before = hashes(out)
    with pytest.raises(ValueError, match="exists and is not empty"):
        convert(folder, out, method="damped", core="1:5")
    assert hashes(out) == before
    convert(folder, out, method="damped", core="1:5", overwrite=True)
    assert load_model(out).config.loop.update == "damped"


def test_equal_seeds_give_equal_bytes(folder, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        convert(folder, tmp_path / name, method="elr-graft", core="1:5", options=SMALL, seed=seed)
    weights = [hashes(tmp_path / name)["model.safetensors"] for name in "abc"]
    assert weights[0] == weights[1] != weights[2]


def test_a_conversion_can_be_converted_no_further(folder, tmp_path):
    """Its core already means something; nothing is looped twice unseen."""
    convert(folder, tmp_path / "once", method="loop-window", core="1:5")
    with pytest.raises(ValueError, match="max_loops=4 instead of 1"):
        convert(tmp_path / "once", tmp_path / "twice", method="loop-window", core="2:3")


@pytest.mark.parametrize("method", ["tie-layers", "loop-window", "joint-deltas"])
def test_a_base_without_finite_logits_is_refused_whatever_is_promised(method):
    golden = open_golden("llama")
    base = golden.model().eval()
    with torch.no_grad():
        base.embedding.weight[int(golden.vectors["input_ids"][0, 0]), 0] = torch.nan
    with pytest.raises(ValueError, match="the logits of the base at 1 loops are not all finite"):
        convert_model(
            base, golden.vectors["input_ids"], method=method, core_range=CoreRange(1, 5),
            options=read_options(method, {}),
        )  # fmt: skip


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "base")
    train_bpe([TEXT], 270, allow_fewer=True).save(tmp_path / "base")
    with pytest.raises(ValueError, match=r"has 2\d\d ids, but the model reads 257"):
        convert(tmp_path / "base", tmp_path / "x", method="loop-window", core="1:5")


def test_a_published_checkpoint_is_told_to_be_imported(tmp_path):
    with pytest.raises(ValueError, match="model_type 'llama'.*depthdial import SRC DST"):
        convert(GOLDEN / "llama", tmp_path / "x", method="loop-window", core="1:5")


def test_texts_may_not_lie_where_the_result_goes(folder, tmp_path):
    convert(folder, tmp_path / "x", method="loop-window", core="1:5")
    (tmp_path / "x" / "mine.txt").write_text(TEXT)
    with pytest.raises(ValueError, match="lie in one another; what is read is never changed"):
        convert(
            folder, tmp_path / "x", method="loop-window", core="1:5", overwrite=True,
            texts=tmp_path / "x" / "mine.txt",
        )  # fmt: skip
    assert (tmp_path / "x" / "mine.txt").exists()
