"""What a GenerationConfig says, guidance, drafts at the end, and scores that are no numbers."""

import pytest
import torch
from toys import toy_tokens
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor
from wrapped import TOKENS, greedy, wrapped_toy

from depthdial.config import TimeModulationConfig
from depthdial.hf.cache import CACHE_FIELD, DepthdialCache
from depthdial.model.checkpoint import save_model

OTHER = toy_tokens(3, 4, seed=3)


@pytest.fixture(scope="module")
def model():
    """A toy with random conditioning."""
    return wrapped_toy()


def timed_toy():
    """A toy that is conditioned on step sizes, strongly enough to write another text by them."""
    timed = wrapped_toy(modulation=TimeModulationConfig(kind="time_step", embed_dim=16))
    for parameter in timed.model.modulation.parameters():
        parameter *= 5
    return timed


# ---- settings


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cache_implementation": "paged"}, "named by cache_policy"),
        ({"max_cache_len": 9}, "max_cache_len=9 has no effect: pass a DepthdialCache"),
        ({"cache_config": {"a": 1}}, "named by cache_policy"),
        ({"assistant_early_exit": 1}, "fewer loops: pass assistant_model"),
        ({"dola_layers": "low"}, "it counts layers, and the states of a looped model"),
        ({"remove_invalid_values": True}, "no finite numbers are an error"),
    ],
)
def test_f16_settings_of_transformers_without_effect_are_refused(model, setting, message):
    with pytest.raises(ValueError, match=message):
        model.generate(TOKENS, max_new_tokens=4, **setting)


def generated_with(model, place, settings, **arguments):
    """New tokens where the settings stand in a GenerationConfig given, or in the model's own."""
    before, given = model.generation_config, GenerationConfig(**settings)
    try:
        if place == "model":
            model.generation_config, given = given, None
        ids = model.generate(
            TOKENS, attention_mask=torch.ones_like(TOKENS), generation_config=given, **arguments
        )
    finally:
        model.generation_config = before
    return ids[:, TOKENS.shape[1] :]


@pytest.mark.parametrize("num_loops", [1, 4])
@pytest.mark.parametrize("place", ["argument", "model"])
def test_f16_the_loop_count_of_a_generation_config_is_obeyed(model, place, num_loops):
    """It was ignored: the text came at the model's own loop count."""
    expected = greedy(model, num_loops=num_loops)
    settings = {"num_loops": num_loops, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(generated_with(model, place, settings), expected)
    # An argument of the call itself wins.
    assert torch.equal(
        generated_with(model, place, settings | {"num_loops": 3}, num_loops=num_loops), expected
    )


@pytest.mark.parametrize("place", ["argument", "model"])
def test_f16_every_depth_setting_of_a_generation_config_is_obeyed(model, place):
    """Loop counts by row and cache policies are told apart from the model's own."""
    loops = torch.tensor([3, 4, 2])
    settings = {
        "num_loops": loops,
        "cache_policy": "share_first",
        "max_new_tokens": 16,
        "do_sample": False,
    }
    expected = greedy(model, num_loops=loops, cache_policy="share_first", new=16)
    assert torch.equal(generated_with(model, place, settings), expected)
    assert not torch.equal(expected, greedy(model, num_loops=loops, new=16))
    assert not torch.equal(expected, greedy(model, cache_policy="share_first", new=16))


def test_f16_step_sizes_of_a_generation_config_are_obeyed():
    timed = timed_toy()
    settings = {"step_sizes": [0.9, 0.1], "max_new_tokens": 16, "do_sample": False}
    expected = greedy(timed, step_sizes=[0.9, 0.1], new=16)
    assert torch.equal(generated_with(timed, "argument", settings), expected)
    assert not torch.equal(expected, greedy(timed, new=16))


def test_f16_an_assistant_keeps_the_loop_count_of_its_own_generation_config(model, tmp_path):
    save_model(model.model, tmp_path)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path)
    assistant.generation_config.num_loops = 1
    seen = []
    hook = assistant.model.core_stack.register_forward_hook(lambda *_: seen.append("pass"))
    expected = greedy(model, TOKENS[:1], num_loops=None, new=5)
    assert torch.equal(greedy(model, TOKENS[:1], new=5, assistant_model=assistant), expected)
    calls = len(seen)
    assistant.generation_config.num_loops = 2
    greedy(model, TOKENS[:1], new=5, assistant_model=assistant)
    hook.remove()
    assert 0 < calls < len(seen) - calls


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_loops": 9}, "exceeds max_loops=4"),
        ({"num_loops": "2"}, "num_loops"),
        ({"cache_policy": "last_stepp"}, "last_stepp"),
        ({"step_sizes": [1.0]}, "step_sizes has no effect"),
        ({"max_loops": 4}, "has max_loops=4, which nothing reads"),
        ({"exit_rule": "entropy"}, "Of the depth it may set num_loops, step_sizes, cache_policy"),
        ({"assistant_early_exit": 1}, "fewer loops: pass assistant_model"),
        ({"cache_implementation": "dynamic"}, "named by cache_policy"),
    ],
)
@pytest.mark.parametrize("place", ["argument", "model"])
def test_f16_a_depth_setting_that_would_be_ignored_is_refused(model, place, settings, message):
    with pytest.raises(ValueError, match=message):
        generated_with(model, place, {"max_new_tokens": 2, "do_sample": False} | settings)


def test_f16_a_mistyped_setting_of_a_given_config_is_refused_with_the_nearest(model):
    message = "has num_lops=1, which nothing reads. Did you mean 'num_loops'"
    with pytest.raises(ValueError, match=message):
        generated_with(model, "argument", {"num_lops": 1, "max_new_tokens": 2})


def test_f16_a_publishers_own_key_in_the_models_config_is_left_alone(model):
    settings = {"chat_format": "chatml", "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(generated_with(model, "model", settings), greedy(model))


def test_f16_a_loop_count_saved_with_the_generation_config_is_obeyed_again(model, tmp_path):
    """transformers wrote it and did not read it."""
    source = AutoModelForCausalLM.from_config(model.config)
    source.load_state_dict(model.state_dict())
    source.generation_config.num_loops = 1
    with pytest.warns(UserWarning, match="only transformers reads num_loops of"):
        source.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(greedy(again), greedy(model, num_loops=1))


def test_f16_batches_without_entries_of_loops_are_refused(model):
    """The prompt came back as the answer, and the reason stood in a log."""
    with pytest.raises(ValueError, match="keeps no keys and values of loops"):
        model.generate_batch([[1, 2]], max_new_tokens=2)


# ---- drafts


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_f16_looking_tokens_up_works_to_the_last_token_of_the_context(model, positions):
    """Tokens were tried beyond it, where a given cache is full and positions are unknown."""
    model = wrapped_toy(positions="learned", rotary_frac=1.0) if positions == "learned" else model
    prompt = TOKENS[:1].repeat(1, 17)
    plain = greedy(model, prompt, num_loops=3, new=9)
    for tried in (1, 5, 40):
        cache = DepthdialCache(model.config.looped, capacity=128)
        for more in ({}, {CACHE_FIELD: cache}):
            looked_up = greedy(
                model, prompt, num_loops=3, new=9, prompt_lookup_num_tokens=tried, **more
            )
            assert torch.equal(plain, looked_up)


# ---- guidance


def guided(model, *, num_loops, policy=None, new=6, **arguments):
    """Greedy decoding by hand at scale 1.5, each prompt with a cache of its own."""
    caches = [DepthdialCache(model.config.looped, policy=policy) for _ in range(2)]
    inputs, texts = [TOKENS, OTHER], []
    for _ in range(new):
        ours, other = (
            model(ids, num_loops=num_loops, cache=cache, **arguments).logits[:, -1].log_softmax(-1)
            for ids, cache in zip(inputs, caches, strict=True)
        )
        for cache in caches:
            cache.end_prompt()
        best = (1.5 * (ours - other) + other).argmax(dim=-1, keepdim=True)
        inputs = [best, best]
        texts.append(best)
    return torch.cat(texts, dim=1)


GUIDANCE = {"guidance_scale": 1.5, "negative_prompt_ids": OTHER, "new": 6}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("num_loops", [1, 3, torch.tensor([1, 4, 2])])
def test_f33_guidance_runs_both_branches_at_the_loop_count_of_the_call(model, num_loops, use_cache):
    """The second branch ran at the count of the config, which is 2."""
    actual = greedy(model, num_loops=num_loops, use_cache=use_cache, **GUIDANCE)
    assert torch.equal(actual, guided(model, num_loops=num_loops))


def test_f33_guidance_at_another_loop_count_is_another_text(model):
    """Else the test above would say nothing."""
    assert not torch.equal(guided(model, num_loops=1), guided(model, num_loops=3))


@pytest.mark.parametrize("policy", ["share_first", "collapse_mean", "last_step"])
def test_f33_guidance_runs_both_branches_under_the_cache_policy_of_the_call(model, policy):
    actual = greedy(model, num_loops=3, cache_policy=policy, **GUIDANCE)
    assert torch.equal(actual, guided(model, num_loops=3, policy=policy))


def test_f33_guidance_runs_both_branches_with_the_step_sizes_of_the_call():
    timed, steps = timed_toy(), [0.9, 0.1]
    actual = greedy(timed, num_loops=2, step_sizes=steps, **GUIDANCE)
    assert torch.equal(actual, guided(timed, num_loops=2, step_sizes=steps))


def test_f33_a_processor_made_by_its_user_follows_each_call(model):
    settings = {"num_loops": 1, "new": 6}
    for num_loops in (1, 3):
        processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, model, OTHER)
        for _ in range(2):
            # A second call starts from its prompt again.
            processor.unconditional_context |= {"input_ids": OTHER, "first_pass": True}
            processor.unconditional_context |= {"attention_mask": None, CACHE_FIELD: None}
            settings["num_loops"] = num_loops
            actual = greedy(model, logits_processor=LogitsProcessorList([processor]), **settings)
            assert torch.equal(actual, guided(model, num_loops=num_loops))


@pytest.mark.parametrize("more", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 3}])
def test_f33_guidance_that_transformers_would_lose_on_the_way_is_refused(model, more):
    with pytest.raises(ValueError, match="neither follows beams nor takes drafts back"):
        greedy(model, TOKENS[:1], guidance_scale=1.5, **more)


# ---- scores that are no numbers


@pytest.fixture
def broken():
    """A toy whose token 3 has a vector that is no number."""
    wrapped = wrapped_toy()
    wrapped.model.embedding.weight[3, 0] = float("nan")
    return wrapped


BROKEN_TOKENS = TOKENS.index_fill(1, torch.tensor([2]), 3)


@pytest.mark.parametrize(
    "more",
    [{}, {"do_sample": True}, {"num_beams": 2}, {"use_cache": False}, {"guidance_scale": 1.5}],
)
def test_f33_scores_that_are_no_numbers_are_refused_and_not_drawn_from(broken, more):
    """Greedy decoding took token 0, sampling ended inside of torch."""
    settings = {"num_loops": 1, "max_new_tokens": 3} | more
    with pytest.raises(ValueError, match="next-token scores that are no finite numbers"):
        broken.generate(BROKEN_TOKENS, **settings)
    assert 3 not in TOKENS
    assert greedy(broken, num_loops=1, new=1).shape == (3, 1)


def test_f33_drafts_are_not_judged_by_scores_that_are_no_numbers(broken):
    with pytest.raises(ValueError, match="next-token scores that are no finite numbers"):
        greedy(broken, BROKEN_TOKENS[:1].repeat(1, 3), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_f33_infinite_scores_are_refused_too(value):
    wrapped = wrapped_toy()
    wrapped.model.lm_head.weight[5] = value
    with pytest.raises(ValueError, match="next-token scores that are no finite numbers"):
        greedy(wrapped, num_loops=1)


def test_f33_guidance_by_a_prompt_whose_scores_are_no_numbers_is_refused(broken):
    other = OTHER.index_fill(1, torch.tensor([1]), 3)
    with pytest.raises(ValueError, match="next-token scores that are no finite numbers"):
        greedy(broken, num_loops=1, guidance_scale=1.5, negative_prompt_ids=other)
