"""Tied layers and their low-rank corrections against the golden case rrt-lora (its README)."""

import json

import pytest
import torch
from goldens import GOLDEN, close, open_golden

from depthdial.convert.base_model import CoreRange
from depthdial.convert.convert import convert_model
from depthdial.convert.methods import read_options
from depthdial.convert.tying import stepwise_layers, tied_groups
from depthdial.model.looped_lm import LoopedLM

LOGITS, PRODUCTS = 1e-4, 1e-5
NUM_LAYERS, LOOPS, TIED = 8, 2, 4
SELECTIONS = ("stepwise", "average", "lower")
MODULES = {
    "self_attn.q_proj": (0, "q_proj"),
    "self_attn.k_proj": (0, "k_proj"),
    "self_attn.v_proj": (0, "v_proj"),
    "self_attn.o_proj": (0, "o_proj"),
    "mlp.gate_proj": (1, "gate_proj"),
    "mlp.up_proj": (1, "up_proj"),
    "mlp.down_proj": (1, "down_proj"),
}
"""Golden module -> (sublayer of the layer, our name)."""
NORMS = {"input_layernorm": 0, "post_attention_layernorm": 1}


@pytest.fixture(scope="module")
def golden():
    return open_golden("rrt-lora")


@pytest.fixture(scope="module")
def facts():
    return json.loads((GOLDEN / "rrt-lora" / "rrt.json").read_text())


def convert(golden, method, **options):
    return convert_model(
        golden.model().eval(),
        golden.vectors["input_ids"],
        method=method,
        core_range=CoreRange(0, NUM_LAYERS),
        options=read_options(method, options),
    )


@pytest.fixture(scope="module")
def relaxed(golden):
    """(selection, rank, norms) -> conversion; each is made once."""
    made = {}

    def make(selection, rank, norms="tied"):
        key = (selection, rank, norms)
        if key not in made:
            options = {"selection": selection, "rank": rank, "norms": norms}
            made[key] = convert(golden, "relaxed-recursive", **options)
        return made[key]

    return make


def test_the_dense_source(golden):
    model = golden.model()
    assert type(model) is LoopedLM
    close(model(golden.vectors["input_ids"], num_loops=1), golden.vectors["logits_dense"], LOGITS)


def test_which_layers_are_chosen(facts):
    assert stepwise_layers(NUM_LAYERS, TIED) == facts["stepwise_sources"]
    assert tied_groups(TIED, LOOPS, order="cycle") == facts["average_sources"]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_tied_weights_and_their_logits(golden, selection):
    model = convert(golden, "tie-layers", selection=selection).model
    assert model.config.split == (0, 2 * TIED, 0)
    for layer in range(TIED):
        prefix = f"shared_{selection}.{layer}."
        for module, (sublayer, name) in MODULES.items():
            ours = model.core_stack[2 * layer + sublayer].mixer.get_submodule(name).weight
            close(ours, golden.vectors[f"{prefix}{module}"], PRODUCTS)
        for norm, sublayer in NORMS.items():
            ours = model.core_stack[2 * layer + sublayer].norm.weight
            close(ours, golden.vectors[f"{prefix}{norm}"], PRODUCTS)
    logits = model(golden.vectors["input_ids"], num_loops=LOOPS)
    close(logits, golden.vectors[f"logits_{selection}_rigid"], LOGITS)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_products_of_rank_4(golden, relaxed, facts, selection):
    rank = facts["rank_with_products"]
    deltas = relaxed(selection, rank).model.loop_lora
    for layer in range(NUM_LAYERS):
        for module, (sublayer, name) in MODULES.items():
            pair = deltas.sublayers[2 * (layer % TIED) + sublayer].get_submodule(name)
            product = pair.up[layer // TIED] @ pair.down[layer // TIED]
            wanted = golden.vectors.get(f"delta_{selection}_r{rank}.{layer}.{module}")
            close(product, torch.zeros_like(product) if wanted is None else wanted, PRODUCTS)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_singular_values(golden, relaxed, selection):
    """Norms of the columns of `up` are the singular values: `down` is orthonormal."""
    deltas = relaxed(selection, "full").model.loop_lora
    compared = 0
    for layer in range(NUM_LAYERS):
        for module, (sublayer, name) in MODULES.items():
            wanted = golden.vectors.get(f"singular_{selection}.{layer}.{module}")
            if wanted is None:
                continue
            pair = deltas.sublayers[2 * (layer % TIED) + sublayer].get_submodule(name)
            values = pair.up[layer // TIED].norm(dim=0)
            close(values[: len(wanted)], wanted, PRODUCTS)
            compared += 1
    assert compared >= TIED * len(MODULES)


@pytest.mark.parametrize("rank", [2, 4, 8])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_logits_at_low_rank(golden, relaxed, selection, rank):
    logits = relaxed(selection, rank).model(golden.vectors["input_ids"], num_loops=LOOPS)
    close(logits, golden.vectors[f"logits_{selection}_r{rank}"], LOGITS)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_full_rank_with_tied_norms_promises_nothing(golden, relaxed, selection):
    result = relaxed(selection, "full")
    logits = result.model(golden.vectors["input_ids"], num_loops=LOOPS)
    close(logits, golden.vectors[f"logits_{selection}_full_tied_norms"], LOGITS)
    assert result.converted.promises == "none"
    assert "norm.weight" in result.converted.why_not


@pytest.mark.parametrize("selection", SELECTIONS)
def test_full_rank_with_own_norms_is_the_dense_model(golden, relaxed, selection):
    result = relaxed(selection, "full", norms="own")
    logits = result.model(golden.vectors["input_ids"], num_loops=LOOPS)
    close(logits, golden.vectors["logits_dense"], LOGITS)
    assert result.converted.promises == "close"
    assert [x.layer for x in result.comparisons[0].layers] == list(range(NUM_LAYERS))
    assert max(x.max_abs for x in result.comparisons[0].layers) < LOGITS


@pytest.mark.parametrize("selection", SELECTIONS)
def test_full_rank_layer_by_layer_is_the_dense_model_in_sequence_too(golden, selection):
    options = {"selection": selection, "rank": "full", "order": "sequence"}
    result = convert(golden, "relaxed-recursive", **options)
    assert result.model.config.segments == (2,) * TIED
    logits = result.model(golden.vectors["input_ids"], num_loops=LOOPS)
    close(logits, golden.vectors["logits_dense"], LOGITS)
