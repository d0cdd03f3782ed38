"""`forward` and files of the transformers model: masks, losses, states, strict loading."""

import json

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from toys import VOCAB, toy_config, toy_model, toy_tokens
from transformers import AutoConfig, AutoModelForCausalLM

from depthdial.hf.cache import DepthdialCache
from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import DepthdialForCausalLM
from depthdial.model.call import Call
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

TOKENS = toy_tokens(3, 9)
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9, [0] + [1] * 8])


def fresh(**changes) -> DepthdialForCausalLM:
    """A toy straight from a config."""
    return DepthdialForCausalLM(DepthdialConfig(**toy_config(**changes).to_dict())).eval()


@pytest.fixture(scope="module")
def model():
    """A toy with random conditioning."""
    wrapped = fresh()
    wrapped.model.load_state_dict(toy_model().state_dict())
    return wrapped


# ---- the function


def test_there_is_one_looped_lm_and_its_logits_are_the_answer(model):
    assert type(model.model) is LoopedLM
    assert [type(m) for m in model.modules()].count(LoopedLM) == 1
    assert torch.equal(model(TOKENS, num_loops=3).logits, model.model(TOKENS, num_loops=3))


def test_the_configs_loop_count_is_the_default(model):
    assert torch.equal(model(TOKENS).logits, model(TOKENS, num_loops=2).logits)


def test_a_model_from_a_config_has_our_initial_values():
    assert all(
        torch.equal(a, b)
        for a, b in zip(fresh().parameters(), LoopedLM(toy_config()).parameters(), strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_b03_masks_of_every_kind_agree_and_hide_what_stands_there(model, dtype):
    expected = model(TOKENS, MASK).logits
    noise = torch.where(MASK == 0, toy_tokens(3, 9, seed=99), TOKENS)
    actual = model(noise, MASK.to(dtype)).logits
    assert torch.allclose(actual[MASK == 1], expected[MASK == 1], atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (MASK[:, :-1], "padding_mask_BT has shape"),
        (MASK[:, None], "give the padding mask"),
        (MASK * -1e9, "values besides 0 and 1"),
    ],
)
def test_b03_masks_of_another_shape_or_meaning_are_refused(model, mask, message):
    with pytest.raises(ValueError, match=message):
        model(TOKENS, mask)


@pytest.mark.parametrize("num_loops", [1, 2, 4])
def test_b04_left_padding_moves_no_position(model, num_loops):
    for pads in range(4):
        padded = torch.cat([toy_tokens(3, pads, seed=5), TOKENS], dim=1)
        mask = (torch.arange(pads + 9) >= pads).long().expand(3, -1)
        actual = model(padded, mask, num_loops=num_loops).logits[:, -1]
        expected = model(TOKENS, num_loops=num_loops).logits[:, -1]
        assert torch.allclose(actual, expected, atol=1e-5)


def test_given_positions_are_used(model):
    shifted = model(TOKENS, position_ids=torch.arange(9)[None] + 5).logits
    counted = model(TOKENS).logits
    doubled = model(TOKENS, position_ids=torch.arange(9)[None] * 2, attention_mask=MASK**0).logits
    # Rotary positions are relative: a shift changes nothing, a stretch does.
    assert torch.allclose(shifted, counted, atol=1e-5)
    assert not torch.allclose(doubled, counted, atol=1e-2)


def test_positions_that_start_again_separate_documents(model):
    packed = TOKENS[:2].reshape(1, 18)
    positions = torch.arange(9).repeat(2)[None]
    actual = model(packed, position_ids=positions).logits
    expected = torch.cat([model(TOKENS[i : i + 1]).logits for i in range(2)], dim=1)
    assert torch.allclose(actual, expected, atol=1e-5)


def test_rows_of_one_batch_have_loop_counts_of_their_own(model):
    loops = torch.tensor([3, 1, 4])
    actual = model(TOKENS, num_loops=loops).logits
    for row, count in enumerate(loops.tolist()):
        expected = model(TOKENS[row : row + 1], num_loops=count).logits[0]
        assert torch.allclose(actual[row], expected, atol=1e-5)


@pytest.mark.parametrize("num_loops", [0, 5, 2.0, [2, 2, 2], torch.tensor([1, 2])])
def test_a_loop_count_that_the_model_has_not_is_refused(model, num_loops):
    with pytest.raises(ValueError, match="num_loops"):
        model(TOKENS, num_loops=num_loops)


@pytest.mark.parametrize("num_loops", [1, 3])
def test_b49_hidden_states_are_prelude_loops_coda_and_the_last_gives_the_logits(model, num_loops):
    out = model(TOKENS, num_loops=num_loops, output_hidden_states=True)
    assert len(out.hidden_states) == num_loops + 2
    begun = model.model.begin(Call(TOKENS, num_loops=num_loops))
    loops = [p.state_BTD for p in model.model.iterate(begun)]
    expected = [begun.h_in_BTD, *loops]
    assert all(map(torch.equal, out.hidden_states, expected))
    assert torch.equal(model.model.head(out.hidden_states[-1]), out.logits)


def test_b49_states_of_mixed_depths_stand_in_user_order_and_stay_at_their_last(model):
    out = model(TOKENS, num_loops=torch.tensor([3, 1, 4]), output_hidden_states=True)
    assert len(out.hidden_states) == 6
    for row, count in enumerate((3, 1, 4)):
        solo = model(TOKENS[row : row + 1], num_loops=count, output_hidden_states=True)
        solo_states = list(solo.hidden_states)
        solo_states[-1:-1] = [solo_states[-2]] * (4 - count)
        for mine, theirs in zip(out.hidden_states, solo_states, strict=True):
            assert torch.allclose(mine[row], theirs[0], atol=1e-5)


def test_the_loss_is_the_shifted_mean_without_ignored_labels(model):
    labels = TOKENS.masked_fill(MASK == 0, -100)
    out = model(TOKENS, MASK, labels=labels)
    flat = out.logits[:, :-1].reshape(-1, VOCAB)
    expected = F.cross_entropy(flat, labels[:, 1:].reshape(-1))
    assert out.loss == pytest.approx(float(expected), abs=1e-6)


def test_few_positions_can_be_read_out(model):
    full = model(TOKENS).logits
    assert torch.allclose(model(TOKENS, logits_to_keep=2).logits, full[:, -2:], atol=1e-6)
    picked = model(TOKENS, logits_to_keep=torch.tensor([0, 4])).logits
    assert torch.allclose(picked, full[:, [0, 4]], atol=1e-6)


def test_a_tuple_holds_the_same(model):
    loss, logits = model(TOKENS, labels=TOKENS, return_dict=False)
    assert torch.equal(logits, model(TOKENS).logits)
    assert loss.ndim == 0


def test_b05_tokens_one_by_one_with_a_cache_are_the_whole_text(model):
    cache = DepthdialCache(model.config.looped, capacity=9)
    steps = [
        model(TOKENS[:, i : i + 1], MASK[:, : i + 1], cache=cache, num_loops=3).logits
        for i in range(9)
    ]
    expected = model(TOKENS, MASK, num_loops=3).logits
    assert torch.allclose(torch.cat(steps, dim=1)[MASK == 1], expected[MASK == 1], atol=1e-5)


def test_use_cache_makes_a_cache_and_both_names_take_it(model):
    out = model(TOKENS[:, :5], use_cache=True)
    cache = out.to_tuple()[1]
    assert isinstance(cache, DepthdialCache) and cache.get_seq_length() == 5
    rest = model(TOKENS[:, 5:], past_key_values=cache).logits
    assert torch.allclose(rest, model(TOKENS).logits[:, 5:], atol=1e-5)
    assert len(model(TOKENS).to_tuple()) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs_embeds": torch.zeros(3, 9, 32)}, "inputs_embeds is not taken"),
        ({"output_attentions": True}, "attention weights are not kept"),
        ({"labels": TOKENS, "logits_to_keep": 1}, "logits_to_keep=0"),
        ({"labels": TOKENS[:, 1:]}, "labels have shape"),
        ({"cache_policy": "last_step"}, "no effect without a cache"),
        ({"step_sizes": torch.ones(2) / 2}, "step_sizes has no effect"),
        ({"cache": object()}, "the cache is a object"),
    ],
)
def test_arguments_without_effect_are_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model(TOKENS, **arguments)


def test_an_unknown_argument_is_refused(model):
    with pytest.raises(TypeError, match="num_steps"):
        model(TOKENS, num_steps=3)


def test_contradicting_caches_are_refused(model):
    cache = DepthdialCache(model.config.looped, policy="last_step")
    for arguments, message in (
        ({"past_key_values": cache}, "one argument"),
        ({"use_cache": False}, "contradict"),
        ({"cache_policy": "per_loop"}, "follows 'last_step'"),
    ):
        with pytest.raises(ValueError, match=message):
            model(TOKENS, cache=cache, **arguments)


def test_what_is_not_supported_says_so(model):
    with pytest.raises(ValueError, match="not support (gradient|activation) checkpointing"):
        model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="cannot be resized to 70"):
        model.resize_token_embeddings(70)
    assert model.resize_token_embeddings(VOCAB) is model.get_input_embeddings()


# ---- files


@pytest.mark.parametrize("tied", [False, True])
def test_b34_b36_three_rounds_leave_config_and_weights_byte_for_byte(opened, tmp_path, tied):
    wrapped = opened(toy_model(tie_embeddings=tied), "0")
    names = ("config.json", "model.safetensors")
    first = [(tmp_path / "0" / name).read_bytes() for name in names]
    for round_ in ("1", "2", "3"):
        wrapped.save_pretrained(tmp_path / round_)
        wrapped = AutoModelForCausalLM.from_pretrained(tmp_path / round_)
        assert [(tmp_path / round_ / name).read_bytes() for name in names] == first
    assert torch.equal(
        load_model(tmp_path / "3")(TOKENS, num_loops=3), wrapped(TOKENS, num_loops=3).logits
    )


@pytest.mark.parametrize("max_loops", [4, 40])
def test_b34_each_unique_tensor_is_stored_once(tmp_path, max_loops):
    wrapped = fresh(tie_embeddings=True, max_loops=max_loops)
    wrapped.save_pretrained(tmp_path)
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    assert stored.keys() == wrapped.model.state_dict().keys()
    assert sum(t.numel() for t in stored.values()) == wrapped.num_parameters()


def test_a_given_state_dict_is_written_under_our_names_and_left_alone(tmp_path):
    wrapped = fresh()
    state = {name: tensor * 2 for name, tensor in wrapped.state_dict().items()}
    wrapped.save_pretrained(tmp_path, state_dict=state)
    assert len(state) == len(wrapped.state_dict())
    doubled = load_model(tmp_path).state_dict()
    assert all(torch.equal(doubled[n], 2 * t) for n, t in wrapped.model.state_dict().items())


def test_a_state_dict_is_loaded_under_the_names_of_a_file_or_of_the_wrapper():
    """Trainers resume by load_state_dict(strict=False): our names were then skipped silently."""
    source, expected = toy_model(), toy_model().state_dict()
    for names in (source.state_dict(), {f"model.{n}": t for n, t in expected.items()}):
        wrapped = fresh()
        result = wrapped.load_state_dict(names, strict=False)
        assert not result.missing_keys and not result.unexpected_keys
        assert all(torch.equal(wrapped.model.state_dict()[n], t) for n, t in expected.items())


def test_a_device_map_is_taken(opened):
    assert opened(toy_model(), device_map="cpu").device.type == "cpu"


def test_the_dtype_of_the_file_or_of_the_argument_is_used(opened, tmp_path):
    assert opened(toy_model().bfloat16()).dtype == torch.bfloat16
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}


def test_a_wide_gain_stays_as_wide_as_in_the_file(tmp_path):
    """transformers rounded it to the format of the others, and the gate was no longer open."""
    model = toy_model().bfloat16()
    model.state_update.gamma = torch.nn.Parameter(torch.full((32,), 1.8546))
    save_model(model, tmp_path / "a")
    for arguments in ({}, {"dtype": "auto"}):
        wrapped = AutoModelForCausalLM.from_pretrained(tmp_path / "a", **arguments)
        assert wrapped.dtype == torch.bfloat16
        assert torch.equal(wrapped.model.state_update.gamma, model.state_update.gamma)
        assert torch.equal(wrapped(TOKENS, num_loops=3).logits, model(TOKENS, num_loops=3))
    wrapped.save_pretrained(tmp_path / "b")
    stored = safetensors.torch.load_file(tmp_path / "b" / "model.safetensors")
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in stored.items())
    assert {name for name, t in stored.items() if t.dtype == torch.float32} == {
        "state_update.gamma"
    }


def test_matrices_in_two_formats_are_opened_in_the_wider_one(tmp_path):
    model = toy_model().bfloat16()
    model.embedding.float()
    save_model(model, tmp_path)
    wrapped = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {p.dtype for p in wrapped.parameters()} == {torch.float32}
    expected = toy_model().bfloat16().float()(TOKENS, num_loops=3)
    assert torch.allclose(wrapped(TOKENS, num_loops=3).logits, expected, atol=1e-5)


def test_a_missing_tensor_is_an_error_and_not_drawn_anew(tmp_path):
    save_model(toy_model(), tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["core_stack.0.mixer.q_projj.weight"] = tensors.pop("core_stack.0.mixer.q_proj.weight")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing: .*q_proj\.weight; unexpected: .*q_projj"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_tensor_of_another_shape_is_an_error(tmp_path):
    save_model(toy_model(), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"d_ff": 40}))
    with pytest.raises((RuntimeError, ValueError), match="mismatch"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="mismatched: "):
        AutoModelForCausalLM.from_pretrained(tmp_path, ignore_mismatched_sizes=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_loops": 9}, "max_loops=9, but .* was stored with 4.*beyond_max_loops"),
        ({"max_loops": 3}, "max_loops=3, but .* was stored with 4"),
        ({"norm_eps": 1e-3}, "norm_eps=0.001, but .* was stored with 1e-06"),
        ({"loop": {"gate_bypass": "first_only"}}, "loop.gate_bypass='first_only', but .* 'never'"),
        ({"modulation": {"embed_scale": 7.0}}, "modulation.embed_scale=7.0"),
    ],
)
def test_f33_a_change_that_makes_another_model_of_the_weights_is_refused(
    tmp_path, changes, message
):
    """max_loops=9 changed the budget k / K of every loop, without a word."""
    save_model(toy_model(), tmp_path)
    for arguments in (changes, {"config": AutoConfig.from_pretrained(tmp_path, **changes)}):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path, **arguments)
    with pytest.raises(ValueError, match=message):
        DepthdialForCausalLM.from_pretrained(tmp_path, **changes)
    # For a model with new weights the same change is a choice.
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path, **changes))


def test_f33_settings_of_use_may_differ_from_the_stored_ones(tmp_path):
    save_model(toy_model(), tmp_path)
    changes = {
        "num_loops": 4,
        "max_context": 64,
        "rope_scaling": {"kind": "linear", "factor": 2.0},
        "loop": {"cache_policy": "last_step", "beyond_max_loops": "extrapolate"},
    }
    wrapped = AutoModelForCausalLM.from_pretrained(tmp_path, **changes)
    assert torch.equal(wrapped(TOKENS).logits, wrapped(TOKENS, num_loops=4).logits)
    assert wrapped(TOKENS, num_loops=7).logits.isfinite().all()
    assert wrapped.config.looped == toy_config().replace(
        **{key: value for key, value in changes.items() if key != "loop"},
        **{f"loop.{key}": value for key, value in changes["loop"].items()},
    )


def test_f33_a_model_in_several_files_opens_and_keeps_the_format_of_each_tensor(tmp_path):
    """The wide gain was rounded: only the formats of a single file were asked for."""
    model = toy_model().bfloat16()
    model.state_update.gamma = torch.nn.Parameter(torch.full((32,), 1.8546))
    save_model(model, tmp_path / "one")
    wrapped = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    wrapped.save_pretrained(tmp_path / "several", max_shard_size="20KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "several")
    assert torch.equal(again.model.state_update.gamma, model.state_update.gamma)
    assert torch.equal(again(TOKENS, num_loops=3).logits, model(TOKENS, num_loops=3))


def test_f33_a_model_in_several_files_is_described_and_the_way_out_leads_out(tmp_path):
    """It was called a pickle."""
    fresh().save_pretrained(tmp_path / "several", max_shard_size="50KB")
    with pytest.raises(
        FileNotFoundError, match=r"in several files.*AutoModelForCausalLM"
    ) as caught:
        load_model(tmp_path / "several")
    assert "pickle" not in str(caught.value)
    AutoModelForCausalLM.from_pretrained(tmp_path / "several").save_pretrained(tmp_path / "one")
    assert torch.equal(
        load_model(tmp_path / "one")(TOKENS, num_loops=3), fresh()(TOKENS, num_loops=3).logits
    )


def test_loading_info_comes_where_it_is_asked_for(tmp_path):
    save_model(toy_model(), tmp_path)
    wrapped, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(wrapped) is DepthdialForCausalLM
    assert not info["missing_keys"]


def test_embeddings_can_be_reached_and_replaced(tmp_path):
    tied, untied = fresh(tie_embeddings=True), fresh()
    assert tied.get_output_embeddings() is tied.get_input_embeddings()
    with pytest.raises(ValueError, match="is its embedding"):
        tied.set_output_embeddings(torch.nn.Linear(32, VOCAB))
    head, embedding = torch.nn.Linear(32, VOCAB, bias=False), torch.nn.Embedding(VOCAB, 32)
    untied.set_output_embeddings(head)
    untied.set_input_embeddings(embedding)
    assert untied.get_output_embeddings() is head and untied.model.lm_head is head
    assert untied.get_input_embeddings() is embedding


def test_a_training_step_reaches_every_part_of_the_loop():
    with torch.enable_grad():
        wrapped = fresh().train()
        wrapped(TOKENS, labels=TOKENS, num_loops=2).loss.backward()
    assert all(p.grad is not None for p in wrapped.model.core_stack.parameters())
    assert wrapped.model.state_update.gate.weight.grad.abs().sum() > 0
