"""Every token is scored once, whatever the window; depths beyond training are marked."""

import json
import math

import numpy as np
import pytest
import torch

from depthdial.config import ModelConfig
from depthdial.data.packing import IGNORE, Batch
from depthdial.data.pointer_chains import PointerChains
from depthdial.data.shards import TokenDocument
from depthdial.data.synthetic import PointerPrograms
from depthdial.data.tokenizer import train_bpe
from depthdial.eval.depth_sweep import (
    CHAIN_ROWS,
    POINTER_MAX_DEPTH,
    POINTER_ROWS,
    DepthSweep,
    document_rows,
    question_count,
    sweep_documents,
    sweep_questions,
)
from depthdial.eval.latency import measure_latencies, measure_latency
from depthdial.model.looped_lm import LoopedLM

VOCAB, CONTEXT = 97, 16


def small_model(**changes) -> LoopedLM:
    config = ModelConfig(
        vocab_size=VOCAB, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=2, head_dim=8,
        d_ff=16, max_context=64, num_loops=2, max_loops=3, init_std=0.2,
    )  # fmt: skip
    return LoopedLM(config.replace(**changes) if changes else config)


def uniform_model() -> LoopedLM:
    model = small_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    return model


def document(length: int, seed: int = 0) -> TokenDocument:
    rng = np.random.default_rng(seed + length)
    return TokenDocument(f"d{length}", rng.integers(0, VOCAB, length), 3 * length)


def test_bits_per_byte_leave_out_the_bytes_of_a_token_that_is_not_scored():
    docs = [document(4)._replace(first_bytes=2), document(7)._replace(first_bytes=5)]
    sweep = sweep_documents(uniform_model(), docs, loops=[1], context=CONTEXT, start_id=None)
    assert sweep.bytes_N.tolist() == [12 - 2, 21 - 5]
    assert sweep.bits_per_byte(1) == pytest.approx((3 + 6) * 6.59991 / (10 + 16), rel=1e-6)
    whole = sweep_documents(uniform_model(), docs, loops=[1], context=CONTEXT, start_id=0)
    assert whole.bytes_N.tolist() == [12, 21]


LENGTHS = [1, CONTEXT - 1, CONTEXT, CONTEXT + 1, 2 * CONTEXT + 3]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("stride", [1, 5, CONTEXT])
def test_b45_uniform_model_has_perplexity_97_and_exact_bits_per_byte(length, stride):
    sweep = sweep_documents(
        uniform_model(), [document(length)], loops=[1, 2], context=CONTEXT, stride=stride,
        start_id=0,
    )  # fmt: skip
    assert sweep.tokens_N.tolist() == [length]
    assert math.exp(sweep.mean_loss(2)) == pytest.approx(97, rel=1e-6)
    assert sweep.bits_per_byte(2) == pytest.approx(length * 6.59991 / (3 * length), rel=1e-6)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("stride", [1, 5, CONTEXT])
def test_b45_each_token_is_scored_exactly_once_from_its_predecessors(length, stride):
    doc = TokenDocument("d", np.arange(100, 100 + length), length)
    seen = []
    for row in document_rows([doc], context=CONTEXT, stride=stride, start_id=7):
        read, scored = row.scored.prefix_ids.tolist(), row.scored.target_ids.tolist()
        tokens = read + scored
        assert len(tokens) - 1 <= CONTEXT
        for given, target in zip(tokens[len(read) - 1 :], scored, strict=False):
            assert given == (target - 1 if target > 100 else 7)
            seen.append(target)
    assert seen == list(range(100, 100 + length))


def test_document_losses_equal_one_forward_per_document():
    model, docs = small_model(), [document(n) for n in (5, 16, 9)]
    sweep = sweep_documents(model, docs, loops=[1, 3], context=CONTEXT, start_id=0)
    for doc_idx, doc in enumerate(docs):
        tokens = torch.tensor([[0, *doc.tokens_T[:-1]]])
        with torch.no_grad():
            logp = model(tokens, num_loops=3).log_softmax(-1)[0]
        expected = -logp[torch.arange(len(doc.tokens_T)), torch.tensor(doc.tokens_T)].sum()
        assert sweep.nll(3)[doc_idx] == pytest.approx(float(expected), rel=1e-5)


def test_grouping_of_rows_does_not_change_the_losses():
    model, docs = small_model(), [document(n, seed=n) for n in (3, 40, 17, 1)]
    sweeps = [
        sweep_documents(model, docs, loops=[2], context=CONTEXT, start_id=0, rows_per_forward=n)
        for n in (1, 3, 16)
    ]
    for other in sweeps[1:]:
        np.testing.assert_allclose(other.nll_KN, sweeps[0].nll_KN, rtol=1e-5)


def test_overlap_gives_more_context():
    model, docs = small_model(), [document(60)]
    wide = sweep_documents(model, docs, loops=[1], context=CONTEXT, stride=1, start_id=0)
    tight = sweep_documents(model, docs, loops=[1], context=CONTEXT, start_id=0)
    assert wide.mean_loss(1) != pytest.approx(tight.mean_loss(1), rel=1e-6)


def test_b15_depths_beyond_training_are_swept_and_marked():
    sweep = sweep_documents(
        small_model(), [document(8)], loops=range(1, 6), context=CONTEXT, start_id=0
    )
    assert [sweep.is_trained(k) for k in sweep.loops] == [True, True, True, False, False]
    assert np.isfinite(sweep.nll_KN).all()


def test_b15_a_loop_count_that_training_never_ran_is_marked_even_below_max_loops():
    docs, programs = [document(8)], PointerPrograms(0, split="valid")
    text = sweep_documents(
        small_model(), docs, loops=range(1, 5), context=CONTEXT, start_id=0, trained_loops=[2]
    )
    pointer = sweep_questions(
        small_model(vocab_size=32), programs, loops=range(1, 5), num_rows=2, trained_loops=[3, 1]
    )
    assert [text.is_trained(k) for k in text.loops] == [False, True, False, False]
    assert [pointer.is_trained(k) for k in pointer.loops] == [True, False, True, False]
    assert DepthSweep.from_dict(pointer.to_dict()).trained_loops == (1, 3)


def test_sweeps_of_the_same_documents_are_paired_whatever_the_model():
    docs = [document(8), document(3)]
    first, second = (
        sweep_documents(model, docs, loops=[1], context=CONTEXT, start_id=0)
        for model in (small_model(), small_model(d_ff=32))
    )
    first.check_paired(second)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ([document(8)], "2 and 1 documents"),
        ([document(3), document(8)], "document 'd8' here is 'd3' there"),
        (
            [document(8), TokenDocument("d3", np.zeros(5, dtype=np.int64), 9)],
            "document 'd3' has 3 tokens here and 5 there",
        ),
    ],
)
def test_sweeps_of_different_documents_are_not_paired(other, message):
    model = small_model()
    sweeps = [
        sweep_documents(model, docs, loops=[1], context=CONTEXT, start_id=0)
        for docs in ([document(8), document(3)], other)
    ]
    with pytest.raises(ValueError, match=message):
        sweeps[0].check_paired(sweeps[1])


def test_a_sweep_survives_its_file(tmp_path):
    sweep = sweep_documents(
        small_model(), [document(8), document(3)], loops=[1, 2], context=CONTEXT, start_id=0
    )
    sweep.save(tmp_path / "sweep.json")
    again = DepthSweep.load(tmp_path / "sweep.json")
    assert again.to_dict() == sweep.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loops": [0]}, "num_loops=0"),
        ({"loops": []}, "no loop counts"),
        ({"stride": CONTEXT + 1}, "stride=17 must lie in 1..16"),
        ({"documents": []}, "no documents"),
        ({"documents": [TokenDocument("void", np.array([], dtype=np.int64), 0)]}, "'void'"),
    ],
)
def test_b23_bad_requests_say_what_is_wrong(changes, message):
    request = {"documents": [document(4)], "loops": [1], "context": CONTEXT, "start_id": 0}
    request |= changes
    with pytest.raises(ValueError, match=message):
        sweep_documents(small_model(), request.pop("documents"), **request)


def test_pointer_sweep_counts_every_position_once_and_a_perfect_answer_is_right():
    source = PointerPrograms(0, split="valid")
    model = small_model(vocab_size=32)
    sweep = sweep_questions(model, source, loops=[1, 2], num_rows=10, max_depth=40)
    assert sweep.total_NP.sum() == 10 * source.context
    assert (sweep.correct_KNP <= sweep.total_NP).all()
    assert sweep.tokens_N.sum() == 10 * source.context

    class Oracle(LoopedLM):
        """Puts all weight on the answer."""

        def forward(self, tokens_BT, **_):
            values = torch.as_tensor(np.asarray(source.answers(tokens_BT).values_BT))
            return 50.0 * torch.nn.functional.one_hot(values, 32).float()

    oracle = Oracle(model.config)
    right = sweep_questions(oracle, source, loops=[1], num_rows=10, max_depth=40)
    assert (right.correct_KNP[0] == right.total_NP).all()


def test_latency_reports_every_depth():
    times = measure_latency(small_model(), loops=[1, 3], prompt_tokens=4, new_tokens=2, rounds=3)
    assert set(times) == {1, 3}
    assert all(0 < t.min_ms <= t.median_ms for t in times.values())


def test_latencies_of_several_models_are_measured_in_turn(monkeypatch):
    """Load that comes and goes must not hit one side alone."""
    from depthdial.eval import latency

    first, second = small_model(), small_model(max_loops=1, num_loops=1)
    timed, decode = [], latency._decode_seconds

    def spy(model, num_loops, table, **lengths):
        timed.append((model, num_loops))
        return decode(model, num_loops, table, **lengths)

    monkeypatch.setattr(latency, "_decode_seconds", spy)
    sides = [(second, 1), (first, 1), (first, 3)]
    times = measure_latencies(sides, prompt_tokens=4, new_tokens=2, rounds=2)
    assert timed == sides * 2
    assert len(times) == 3 and all(0 < t.min_ms <= t.median_ms for t in times)


def test_default_programs_can_show_90_percent_at_every_counted_depth():
    """A depth with fewer than 36 programs could not be shown solved by a perfect model."""
    depths_BT = PointerPrograms(0, split="valid").depths(0, POINTER_ROWS)
    for depth in range(1, POINTER_MAX_DEPTH + 1):
        assert int((depths_BT == depth).any(dim=1).sum()) >= 36, depth


def test_answers_are_chosen_among_the_answer_tokens_where_a_source_names_them():
    """The likeliest token of all may be none of the ten digits."""

    class Questions:
        answer_ids = torch.tensor([4, 9])

        def rows(self, first_row, num_rows):
            tokens = torch.zeros(num_rows, 3, dtype=torch.int64)
            targets = torch.full((num_rows, 3), IGNORE)
            targets[:, 2] = 9
            return Batch(tokens_BT=tokens, targets_BT=targets)

        def depths(self, first_row, num_rows):
            return (self.rows(first_row, num_rows).targets_BT != IGNORE).long()

    model = small_model()
    with torch.no_grad():
        model.final_norm.weight.fill_(0.0)
        # Equal logits everywhere: the first of the answer tokens wins, not token 0.
    sweep = sweep_questions(model, Questions(), loops=[1], num_rows=2, max_depth=1)
    assert sweep.correct_KNP.tolist() == [[[0], [0]]] and sweep.total_NP.tolist() == [[1], [1]]
    Questions.answer_ids = torch.tensor([9, 4])
    sweep = sweep_questions(model, Questions(), loops=[1], num_rows=2, max_depth=1)
    assert sweep.correct_KNP.tolist() == [[[1], [1]]] and sweep.tokens_N.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "Expecting property name"),
        ("[1, 2]", "it holds a list"),
        ('{"loops": [1]}', "it lacks the keys max_loops, trained_loops, names"),
    ],
)
def test_a_file_that_is_no_sweep_is_refused_with_what_to_give(tmp_path, text, message):
    """A foreign file was once a KeyError."""
    (tmp_path / "foreign.json").write_text(text)
    with pytest.raises(ValueError, match=f"foreign.json is no sweep .*{message}.*--save"):
        DepthSweep.load(tmp_path / "foreign.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loops": [1, 2]}, "its losses are no table of 2 loop counts x 1 rows"),
        ({"nll_KN": None}, "its losses are no table of 1 loop counts x 1 rows"),
        ({"tokens_N": [3, 4]}, "its losses are no table of 1 loop counts x 1 rows"),
        ({"names": 5}, "is not iterable"),
    ],
)
def test_a_damaged_sweep_is_refused(tmp_path, change, message):
    sweep = sweep_documents(uniform_model(), [document(3)], loops=[1], context=8, start_id=0)
    (tmp_path / "damaged.json").write_text(json.dumps(sweep.to_dict() | change))
    with pytest.raises(ValueError, match=f"damaged.json is no sweep .*{message}"):
        DepthSweep.load(tmp_path / "damaged.json")


def test_chains_are_counted_up_to_their_length_and_programs_up_to_sixteen():
    chains = PointerChains(train_bpe(["a b"], 257), 0, num_chains=1, chain_length=20)
    assert question_count(chains) == (CHAIN_ROWS, 20)
    assert question_count(PointerPrograms(0)) == (POINTER_ROWS, POINTER_MAX_DEPTH)


def test_f12_a_loss_that_is_no_number_is_refused_with_loop_count_and_document():
    model = small_model()
    with torch.no_grad():
        model.core_stack[0].mixer.v_proj.weight.fill_(float("inf"))
    docs = [document(5), document(7)]
    with pytest.raises(ValueError, match="'d5' at num_loops=1 is nan"):
        sweep_documents(model, docs, loops=[1, 2], context=CONTEXT, start_id=0)
    with pytest.raises(ValueError, match="'row 0' at num_loops=1 is nan"):
        sweep_questions(model, PointerPrograms(seed=0), loops=[1], num_rows=2, max_depth=2)


def test_f12_what_a_sweep_writes_is_json(tmp_path):
    """NaN is a word of Python; other readers refuse the whole file."""
    sweep = sweep_documents(small_model(), [document(5)], loops=[1], context=CONTEXT, start_id=0)
    sweep.nll_KN[0, 0] = float("nan")
    with pytest.raises(ValueError, match="not JSON compliant"):
        sweep.save(tmp_path / "sweep.json")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rows_per_forward": -1}, "rows_per_forward=-1"),
        ({"rows_per_forward": 0}, "rows_per_forward=0"),
        ({"precision": "bf61"}, "precision='bf61' is unknown"),
    ],
)
def test_f29_a_number_that_would_score_nothing_is_refused(wrong, words):
    with pytest.raises(ValueError, match=words):
        sweep_documents(
            small_model(), [document(5)], loops=[1], context=CONTEXT, start_id=0, **wrong
        )
    with pytest.raises(ValueError, match=words):
        sweep_questions(small_model(), PointerPrograms(seed=0), loops=[1], num_rows=2, **wrong)


@pytest.mark.parametrize("wrong", [{"num_rows": 0}, {"max_depth": 0}])
def test_f29_questions_without_rows_or_depths_are_refused(wrong):
    with pytest.raises(ValueError, match="must be at least 1"):
        sweep_questions(small_model(), PointerPrograms(seed=0), loops=[1], **wrong)


def test_f22_a_sweep_replaces_an_older_sweep_and_nothing_else(tmp_path):
    """`--save` on a text, on weights or on token files took their place."""
    sweep = sweep_documents(small_model(), [document(5)], loops=[1], context=CONTEXT, start_id=0)
    path = tmp_path / "sweep.json"
    sweep.save(path)
    sweep.save(path)
    for name, content in (("text.txt", b"dear diary"), ("model.safetensors", b"\x00\x01"),
                          ("other.json", b'{"a": 1}')):  # fmt: skip
        other = tmp_path / name
        other.write_bytes(content)
        with pytest.raises(ValueError, match="holds something else than a sweep"):
            sweep.save(other)
        assert other.read_bytes() == content
