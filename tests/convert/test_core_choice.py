"""The curve over layers and the core that it proposes."""

import math

import pytest
import torch
from goldens import open_golden

from depthdial.convert.base_model import CoreRange
from depthdial.convert.core_choice import (
    NUM_TEXTS,
    PIECE_CHARS,
    angular_distance,
    between_knees,
    calmest,
    layer_distances,
    measure_core,
    read_pieces,
)
from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.model.looped_lm import LoopedLM
from depthdial.report.core_choice import core_png, core_svg

BATHTUB = [0.5, 0.2, 0.09, 0.08, 0.07, 0.08, 0.06, 0.07, 0.09, 0.1, 0.3]


@pytest.fixture(scope="module")
def golden():
    return open_golden("llama")


@pytest.mark.parametrize(
    ("turn", "distance"), [(0.0, 0.0), (1e-3, 1e-3 / math.pi), (math.pi / 2, 0.5), (math.pi, 1.0)]
)
def test_the_distance_is_the_angle_in_half_circles(turn, distance):
    first = torch.tensor([[[2.0, 0.0]]])
    second = 3 * torch.tensor([[[math.cos(turn), math.sin(turn)]]])
    assert float(angular_distance(first, second)) == pytest.approx(distance, abs=1e-6)


def test_distances_are_those_of_the_reference_states(golden):
    vectors = golden.vectors
    rows = vectors["input_ids"].tolist()
    states = [vectors["embeddings"], *vectors["layer_outputs"]]
    expected = [
        float(torch.nn.functional.cosine_similarity(a, b, dim=-1).arccos().mean() / math.pi)
        for a, b in zip(states, states[1:], strict=False)
    ]
    assert layer_distances(golden.model(), rows) == pytest.approx(expected, abs=1e-5)


def test_rows_of_different_lengths_count_their_own_tokens(golden):
    model, rows = golden.model(), golden.vectors["input_ids"].tolist()
    mixed = [rows[0], rows[1][:5], rows[1][:9]]
    weights = [len(row) for row in mixed]
    alone = [layer_distances(model, [row]) for row in mixed]
    expected = [
        sum(w * one[layer] for w, one in zip(weights, alone, strict=True)) / sum(weights)
        for layer in range(6)
    ]
    assert layer_distances(model, mixed) == pytest.approx(expected, abs=1e-6)


def test_the_window_lies_between_the_two_knees():
    assert between_knees(BATHTUB) == CoreRange(2, 10)


@pytest.mark.parametrize(
    ("distances", "core_range"),
    [
        ([0.5, 0.1, 0.1, 0.1, 0.1], CoreRange(1, 5)),
        ([0.1, 0.1, 0.1, 0.1, 0.5], CoreRange(0, 4)),
        ([0.1, 0.1, 0.1], CoreRange(0, 3)),
        ([0.9, 0.1, 0.9], CoreRange(1, 2)),
    ],
)
def test_curves_without_a_side_keep_that_end(distances, core_range):
    assert between_knees(distances) == core_range


def test_the_calmest_run_has_the_smallest_sum():
    assert calmest(BATHTUB, CoreRange(2, 10), 4) == CoreRange(4, 8)
    assert calmest(BATHTUB, CoreRange(2, 10), 8) == CoreRange(2, 10)


@pytest.mark.parametrize("count", [0, 9])
def test_more_layers_than_lie_between_the_knees_are_refused(count):
    with pytest.raises(ValueError, match=rf"{count} layers were asked for, .* 8 between"):
        calmest(BATHTUB, CoreRange(2, 10), count)


def test_the_embedded_corpus_gives_the_texts():
    pieces = read_pieces(None, NUM_TEXTS, purpose="this")
    assert len(set(pieces)) == NUM_TEXTS >= 256
    assert min(map(len, pieces)) >= PIECE_CHARS - 2


def test_texts_of_a_user_are_spread_over_all_documents(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " * PIECE_CHARS * 2)
    pieces = read_pieces(tmp_path, 6, purpose="this")
    assert [piece[0] for piece in pieces] == list("aabbcc")


def test_too_little_text_is_refused(tmp_path):
    (tmp_path / "short.txt").write_text("word " * PIECE_CHARS)
    with pytest.raises(ValueError, match="gives 4 pieces of 400 characters, but this needs 256"):
        read_pieces(tmp_path, 256, purpose="this")


def test_a_model_is_measured_on_its_own_tokens(golden, tmp_path):
    (tmp_path / "text.txt").write_text("the ship sailed past the island " * 100)
    tokenizer = byte_tokenizer()
    model = golden.model(vocab_size=96)
    curve = measure_core(model, Folded(tokenizer), texts=tmp_path, num_texts=4, num_layers=1)
    assert (curve.num_texts, curve.source, len(curve.distances)) == (4, tmp_path.name, 6)
    assert curve.num_tokens == 4 * min(64, model.config.max_context)
    assert curve.knees == between_knees(curve.distances)
    assert curve.proposed == calmest(curve.distances, curve.knees, 1)
    assert set(curve.as_json()) >= {"distances", "knees", "proposed", "num_texts"}


def byte_tokenizer() -> Tokenizer:
    return train_bpe(["the ship sailed past the island "], 257)


class Folded:
    """A tokenizer whose ids are folded into the golden model's vocabulary."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.opening_ids = ()

    def encode_batch(self, texts):
        return [[i % 96 for i in ids] for ids in self.tokenizer.encode_batch(texts)]


def test_two_layers_are_too_few(golden):
    model = LoopedLM(golden.config.replace(split=[0, 4, 0]))
    with pytest.raises(ValueError, match="has 2 layers, too few"):
        measure_core(model, Folded(byte_tokenizer()))


def test_the_figure_is_drawn_and_equal_data_give_equal_bytes():
    image = core_png(BATHTUB, (4, 8), (2, 10))
    assert image.startswith(b"\x89PNG")
    assert image == core_png(BATHTUB, (4, 8), (2, 10)) != core_png(BATHTUB, (2, 10), (2, 10))


def test_the_figure_for_pages_names_core_and_knees():
    svg = core_svg(BATHTUB, (4, 8), (2, 10), prefix="w")
    assert "core 4:8" in svg and "prelude" in svg and "coda" in svg and "knee" in svg
    assert "#1c5d99" not in svg
