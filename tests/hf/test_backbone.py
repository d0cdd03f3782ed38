"""The model without its head, as trainers call `base_model` and multiply by the head's weight."""

import pytest
import torch
import torch.nn.functional as F
from toys import VOCAB, toy_tokens
from wrapped import MASK, TOKENS, wrapped_toy

from depthdial.config import NGPTConfig
from depthdial.hf.backbone import Backbone
from depthdial.hf.cache import CACHE_FIELD, DepthdialCache

TRAINS = True
KINDS = {
    "untied": {},
    "tied": {"tie_embeddings": True},
    "capped": {"logit_soft_cap": 3.0},
    "norm in the loop": {"final_norm": "loop", "split": (4, 4, 0)},
    "scaled scores": {
        "norm": "ngpt", "final_norm": "none", "modulation": None, "loop.injection": "add",
        "ngpt": NGPTConfig(alpha_init=0.05, scale_std=0.02), "loop.unit_norm": True,
        "qk_norm": "none",
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    wrapped = wrapped_toy(**KINDS[request.param])
    if wrapped.model.logit_scale is not None:
        with torch.no_grad():
            wrapped.model.logit_scale.copy_(torch.linspace(0.01, 0.05, VOCAB))
    return wrapped


def scores(model, hidden):
    """What a trainer computes: last states times the weight of the head, its bias, the cap."""
    head, cap = model.get_output_embeddings(), model.config.final_logit_softcapping
    logits = F.linear(hidden, head.weight, head.bias)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.mark.parametrize("num_loops", [None, 1, 3, torch.tensor([1, 4, 2])])
def test_f08_the_backbone_times_the_heads_weight_gives_the_logits(model, num_loops):
    """`base_model` was the LoopedLM itself, which knows none of these names."""
    hidden = model.base_model(
        input_ids=TOKENS, attention_mask=MASK, num_loops=num_loops
    ).last_hidden_state
    expected = model(TOKENS, MASK, num_loops=num_loops).logits
    assert hidden.shape == (3, 7, 32)
    assert torch.allclose(scores(model, hidden)[MASK == 1], expected[MASK == 1], atol=1e-5)
    if model.config.final_logit_softcapping is None:
        head = model.get_output_embeddings()
        assert torch.allclose(head(hidden)[MASK == 1], expected[MASK == 1], atol=1e-5)


def test_f08_gradients_through_backbone_and_head_are_those_of_the_loss(model):
    found = []
    for is_fused in (True, False):
        model.zero_grad()
        if is_fused:
            hidden = model.base_model(TOKENS, num_loops=3, use_cache=False).last_hidden_state
            logits = scores(model, hidden[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten()).backward()
        else:
            model(TOKENS, labels=TOKENS, num_loops=3).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.allclose(g, found[1][name], atol=1e-5) for name, g in found[0].items())


def test_f08_the_backbone_takes_what_trainers_pass():
    model = wrapped_toy()
    positions = MASK.cumsum(1) - MASK
    out = model.base_model(
        input_ids=TOKENS, attention_mask=MASK, position_ids=positions, return_dict=True,
        output_hidden_states=False, use_cache=False, logits_to_keep=3, num_loops=2,
    )  # fmt: skip
    whole = model.base_model(TOKENS, MASK, num_loops=2).last_hidden_state
    assert torch.allclose(out.last_hidden_state, whole[:, -3:], atol=1e-6)
    assert out.hidden_states is None and out.get(CACHE_FIELD) is None


def test_f08_the_backbone_gives_states_and_cache_as_the_model_does():
    model = wrapped_toy()
    out = model.base_model(TOKENS, use_cache=True, output_hidden_states=True, num_loops=3)
    expected = model(TOKENS, use_cache=True, output_hidden_states=True, num_loops=3)
    assert isinstance(out[CACHE_FIELD], DepthdialCache)
    assert all(map(torch.equal, out.hidden_states, expected.hidden_states))
    first = model.base_model(TOKENS, num_loops=3, return_dict=False)[0]
    assert torch.equal(first, out.last_hidden_state)


def test_f08_the_backbone_refuses_what_the_model_refuses():
    model = wrapped_toy()
    for arguments, message in (
        ({"num_loops": 5}, "exceeds max_loops=4"),
        ({"cache_policy": "last_step"}, "no effect without a cache"),
        ({"inputs_embeds": torch.zeros(3, 7, 32), "input_ids": None}, "inputs_embeds is not taken"),
    ):
        with pytest.raises(ValueError, match=message):
            model.base_model(**{"input_ids": TOKENS, **arguments})


def test_f08_there_is_one_backbone_and_no_tensor_twice():
    model = wrapped_toy()
    assert type(model.base_model) is Backbone and model.base_model is model.base_model
    assert model.get_decoder() is model.base_model
    assert model.base_model.looped is model.model
    assert not [name for name in model.state_dict() if not name.startswith("model.")]
    assert sum(1 for _ in model.parameters()) == sum(1 for _ in model.model.parameters())


def test_f08_a_hook_on_the_backbone_sees_every_call():
    model, seen = wrapped_toy(), []
    model.base_model.register_forward_hook(lambda _, __, out: seen.append(out.last_hidden_state))
    logits = model(TOKENS, num_loops=2).logits
    assert len(seen) == 1 and torch.allclose(scores(model, seen[0]), logits, atol=1e-6)


def test_f08_a_plain_embedding_serves_as_the_head_of_a_tied_model_too():
    model = wrapped_toy(tie_embeddings=True)
    plain = torch.nn.Embedding(VOCAB, 32)
    model.set_input_embeddings(plain)
    hidden = model.base_model(TOKENS, num_loops=2).last_hidden_state
    assert torch.allclose(model(TOKENS, num_loops=2).logits, hidden @ plain.weight.T, atol=1e-5)
    assert model.get_input_embeddings().weight is plain.weight


def test_f08_packed_rows_keep_their_documents_apart_in_the_backbone():
    model = wrapped_toy()
    packed = toy_tokens(1, 10)
    positions = torch.arange(5).repeat(2)[None]
    both = model.base_model(packed, position_ids=positions, num_loops=3).last_hidden_state
    second = model.base_model(packed[:, 5:], num_loops=3).last_hidden_state
    assert torch.allclose(both[:, 5:], second, atol=1e-5)
