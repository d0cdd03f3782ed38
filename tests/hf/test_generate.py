"""`generate` of the transformers model: cache, padding, beams, policies, assistants, pipelines."""

import pytest
import torch
from toys import MAX_LOOPS, VOCAB, toy_model, toy_tokens
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
from wrapped import MASK, PADS, TOKENS, greedy, wrapped_toy

from depthdial.data.tokenizer import Tokenizer, train_bpe
from depthdial.engine.generate import generate
from depthdial.hf.cache import DepthdialCache
from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import CACHE_FIELD, DepthdialForCausalLM
from depthdial.model.checkpoint import save_model

POLICIES = (
    "per_loop",
    "collapse_last",
    "collapse_first",
    "collapse_mean",
    "last_step",
    "share_first",
    "stash_first",
    "stash_last",
)


@pytest.fixture(scope="module")
def model():
    """A toy with random conditioning."""
    return wrapped_toy()


@pytest.mark.parametrize("num_loops", range(1, MAX_LOOPS + 1))
def test_b01_with_cache_is_without(model, num_loops):
    with_cache = greedy(model, num_loops=num_loops, new=16)
    assert torch.equal(with_cache, greedy(model, num_loops=num_loops, new=16, use_cache=False))


def test_b01_the_cache_has_a_slot_per_attention_layer_and_loop(model):
    out = model.generate(TOKENS, num_loops=3, max_new_tokens=2, return_dict_in_generate=True)
    cache = out[CACHE_FIELD]
    assert isinstance(cache, DepthdialCache)
    assert len(cache) == 2 + 3 * 2 + 2


@pytest.mark.parametrize("use_cache", [True, False])
def test_b04_left_padded_rows_are_the_rows_alone(model, use_cache):
    batch = greedy(model, mask=MASK, num_loops=3, use_cache=use_cache)
    for row, pads in enumerate(PADS):
        solo = greedy(model, TOKENS[row : row + 1, pads:], num_loops=3)
        assert torch.equal(batch[row], solo[0])


def test_rows_have_loop_counts_of_their_own(model):
    loops = torch.tensor([1, 4, 2])
    batch = greedy(model, mask=MASK, num_loops=loops)
    for row, (pads, count) in enumerate(zip(PADS, loops.tolist(), strict=True)):
        solo = greedy(model, TOKENS[row : row + 1, pads:], num_loops=count)
        assert torch.equal(batch[row], solo[0])


def test_the_configs_loop_count_is_the_default(model):
    assert torch.equal(greedy(model), greedy(model, num_loops=2))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_cache_policy_gives_the_tokens_of_our_own_generation(model, policy):
    """Ours ends the prompt itself; here `generate` of transformers must be made to."""
    prompts = [TOKENS[row, pads:].tolist() for row, pads in enumerate(PADS)]
    expected = generate(model.model, prompts, num_loops=3, max_new_tokens=8, cache_policy=policy)
    actual = greedy(model, mask=MASK, num_loops=3, cache_policy=policy)
    assert actual.tolist() == [row.token_ids for row in expected]


def test_policies_differ_at_all(model):
    """Else the test above would say nothing."""
    found = {
        tuple(greedy(model, num_loops=3, new=16, cache_policy=policy).flatten().tolist())
        for policy in ("per_loop", "share_first", "collapse_mean")
    }
    assert len(found) == 3


def test_the_configs_policy_is_the_default(model):
    config = model.config.looped.replace(**{"loop.cache_policy": "share_first"})
    other = DepthdialForCausalLM(DepthdialConfig(**config.to_dict())).eval()
    other.load_state_dict(model.state_dict())
    expected = greedy(model, num_loops=3, cache_policy="share_first")
    assert torch.equal(greedy(other, num_loops=3), expected)


@pytest.mark.parametrize("mask", [None, MASK])
def test_beams_with_cache_are_beams_without(model, mask):
    beams = [
        greedy(model, mask=mask, num_loops=2, num_beams=4, num_return_sequences=2, use_cache=c)
        for c in (True, False)
    ]
    assert beams[0].shape == (6, 8)
    assert torch.equal(*beams)


def test_beams_carry_the_loop_count_of_their_row(model):
    loops = torch.tensor([1, 4, 2])
    beams = greedy(model, num_loops=loops, num_beams=3)
    for row, count in enumerate(loops.tolist()):
        solo = greedy(model, TOKENS[row : row + 1], num_loops=count, num_beams=3)
        assert torch.equal(beams[row], solo[0])


def test_samples_of_a_seed_are_the_same_with_and_without_cache(model):
    found = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        ids = model.generate(
            TOKENS, num_loops=3, max_new_tokens=8, do_sample=True, num_return_sequences=3,
            use_cache=use_cache,
        )  # fmt: skip
        found.append(ids)
    assert torch.equal(*found)
    assert len({tuple(row) for row in found[0].tolist()}) > 3


def test_a_prompt_in_chunks_is_the_prompt_at_once(model):
    chunked = greedy(model, mask=MASK, num_loops=3, prefill_chunk_size=2)
    assert torch.equal(chunked, greedy(model, mask=MASK, num_loops=3))


@pytest.mark.parametrize("policy", ["per_loop", "share_first"])
def test_looking_tokens_up_in_the_prompt_changes_nothing(model, policy):
    prompt = TOKENS[:1].repeat(1, 3)
    plain = greedy(model, prompt, num_loops=3, new=16, cache_policy=policy)
    looked_up = greedy(
        model, prompt, num_loops=3, new=16, cache_policy=policy, prompt_lookup_num_tokens=3
    )
    assert torch.equal(plain, looked_up)


def test_a_shallow_assistant_changes_nothing(model, tmp_path):
    """One loop of the same weights drafts, the model at its own loop count decides."""
    save_model(model.model, tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=4)
    assistant = AutoModelForCausalLM.from_pretrained(tmp_path, num_loops=1)
    drafted = greedy(target, TOKENS[:1], new=24, assistant_model=assistant)
    assert torch.equal(drafted, greedy(target, TOKENS[:1], new=24))


@pytest.mark.parametrize("policy", ["last_step", "collapse_last"])
def test_taking_tokens_back_is_refused_where_it_leaves_a_trace(model, policy):
    with pytest.raises(ValueError, match=f"cache policy '{policy}' cannot do without a trace"):
        greedy(model, TOKENS[:1], cache_policy=policy, prompt_lookup_num_tokens=3)


def test_a_conversation_goes_on_with_its_cache(model):
    cache = DepthdialCache(model.config.looped, capacity=40)
    first = model.generate(
        TOKENS, attention_mask=MASK, num_loops=3, max_new_tokens=5, **{CACHE_FIELD: cache}
    )
    longer = torch.cat([first, toy_tokens(3, 4, seed=1)], dim=1)
    mask = torch.cat([MASK, torch.ones(3, 9, dtype=torch.int64)], dim=1)
    again = greedy(model, longer, mask=mask, num_loops=3, **{CACHE_FIELD: cache})
    assert torch.equal(again, greedy(model, longer, mask=mask, num_loops=3))
    assert cache.get_seq_length() == 7 + 5 + 4 + 8 - 1


def test_states_of_every_call_come_where_they_are_asked_for(model):
    out = model.generate(
        TOKENS, num_loops=3, max_new_tokens=4, output_hidden_states=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert [len(states) for states in out.hidden_states] == [5] * 4
    assert [states[0].shape[1] for states in out.hidden_states] == [7, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_lops": 2}, "num_lops"),
        ({"num_loops": 5}, "exceeds max_loops=4"),
        ({"cache_implementation": "static"}, "named by cache_policy"),
        ({"cache_policy": "last_stepp"}, "last_stepp"),
        ({"cache_policy": "last_step", "use_cache": False}, "no effect without a cache"),
        ({"max_new_tokens": 122}, "up to 129 tokens; the model's context is 128"),
    ],
)
def test_what_generation_cannot_do_is_refused(model, arguments, message):
    with pytest.raises(ValueError, match=message):
        model.generate(TOKENS, **{"max_new_tokens": 4, **arguments})


def test_padding_does_not_count_against_the_context(model):
    long = torch.cat([torch.zeros(1, 100, dtype=torch.int64), TOKENS[:1]], dim=1)
    mask = (torch.arange(107) >= 100).long()[None]
    expected = greedy(model, TOKENS[:1], num_loops=1, new=30)
    assert torch.equal(greedy(model, long, mask=mask, num_loops=1, new=30), expected)


# ---- text


@pytest.fixture(scope="module")
def text_folder(tmp_path_factory):
    """A model folder of ours with a tokenizer."""
    folder = tmp_path_factory.mktemp("text")
    tokenizer = train_bpe(["Fellow citizens of the Senate. " * 20], 270, allow_fewer=True)
    tokenizer.save(folder)
    save_model(toy_model(vocab_size=tokenizer.vocab_size), folder)
    return folder


def test_a_pipeline_opens_a_folder_and_takes_num_loops(text_folder):
    generator = pipeline("text-generation", model=str(text_folder))
    assert type(generator.model) is DepthdialForCausalLM
    prompts = ["Fellow", "citizens of the"]
    settings = {"num_loops": 3, "max_new_tokens": 6, "do_sample": False}
    found = [generator(prompt, **settings)[0]["generated_text"] for prompt in prompts]
    tokenizer = Tokenizer.from_dir(text_folder)
    expected = generate(
        generator.model.model, tokenizer.encode_batch(prompts), num_loops=3, max_new_tokens=6
    )
    for text, prompt, row in zip(found, prompts, expected, strict=True):
        assert text == prompt + tokenizer.decode(row.token_ids)


@pytest.mark.parametrize("more", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_f08_stop_strings_end_a_text_and_need_its_tokenizer(text_folder, more):
    """`generate` handed the tokenizer on to the model, which knows no such argument."""
    model = AutoModelForCausalLM.from_pretrained(text_folder)
    tokenizer = AutoTokenizer.from_pretrained(text_folder)
    inputs = tokenizer("citizens of the", return_tensors="pt")
    settings = {"num_loops": 3, "max_new_tokens": 12, "do_sample": False, **more}
    whole = model.generate(**inputs, **settings)[0].tolist()
    # Single bytes of a random model are no text as a rule.
    places = range(inputs["input_ids"].shape[1], len(whole))
    place = next(i for i in places if tokenizer.decode(whole[i]).isprintable())
    stop = tokenizer.decode(whole[place])
    stopped = model.generate(**inputs, **settings, stop_strings=[stop], tokenizer=tokenizer)[0]
    assert stopped.tolist()[: place + 1] == whole[: place + 1]
    assert stop in tokenizer.decode(stopped[len(inputs["input_ids"][0]) :])
    if "num_beams" not in more:
        assert len(stopped) == place + 1 < len(whole)
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(**inputs, **settings, stop_strings=[stop])


def test_b36_model_and_tokenizer_saved_together_three_times_are_ours_again(text_folder, tmp_path):
    source = text_folder
    for name in ("1", "2", "3"):
        AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / name)
        AutoTokenizer.from_pretrained(source).save_pretrained(tmp_path / name)
        source = tmp_path / name
    assert (source / "config.json").read_bytes() == (text_folder / "config.json").read_bytes()
    ours, theirs = Tokenizer.from_dir(text_folder), Tokenizer.from_dir(source)
    assert theirs.encode("citizens of the") == ours.encode("citizens of the")
    assert (theirs.stop_ids, theirs.opening_ids) == (ours.stop_ids, ours.opening_ids)


def test_the_toy_vocabulary_is_smaller_than_the_text_one(text_folder):
    """The folder's model must not be the cached toy by accident."""
    assert AutoModelForCausalLM.from_pretrained(text_folder).config.vocab_size > VOCAB
