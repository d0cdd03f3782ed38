"""The transformers face on every published family: done-when 2 of the importers.

The reference logits of each golden case are compared in tests/convert; here the wrapped model must
be that model, through files, caches, padding and beams.
"""

import pytest
import torch
from goldens import close, open_golden
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from depthdial.cache.contiguous import ContiguousCache
from depthdial.convert.base_model import CoreRange
from depthdial.convert.convert import convert_model
from depthdial.convert.methods import read_options
from depthdial.engine.generate import generate
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.hf.model import DepthdialForCausalLM
from depthdial.model.checkpoint import load_model, save_model
from depthdial.model.looped_lm import LoopedLM

LOOP_SPLIT = {"enable_double_loop_split": True, "loop_middle_layers": 2}
SWITCHES = {
    "nanbeige, norm skipped": {"skip_loop_final_norm": True},
    "nanbeige, split": LOOP_SPLIT,
    "nanbeige, split with shared keys": {**LOOP_SPLIT, "loop_share_kv": True},
}
"""Case -> keys of Nanbeige's published config that are changed."""
CASES = (
    "dory",
    "huginn",
    "iquest-loop",
    "llama",
    "loopformer",
    "loopus",
    "nanbeige",
    *SWITCHES,
    "ouro",
    "parcae",
    "parcae, f02 core of another width and capped logits",
    "qwen3",
    "retrofit",
    "retrofit, converted here",
    "rrt-lora",
)
PADS = (4, 0, 1)
NEW_TOKENS = 6


def retrofitted(folder):
    """The dense case converted, one layer dropped, exported as `retrofit` and imported again."""
    golden = open_golden("llama")
    model = convert_model(
        golden.model().eval(),
        golden.vectors["input_ids"],
        method="retrofitted-recurrence",
        core_range=CoreRange(1, 4),
        options=read_options("retrofitted-recurrence", {"coda": 1}),
    ).model
    # As after training: with [0 | I] no loop reads the state of the one before.
    model.injection.adapter.weight[:, :32] += 0.1 * torch.eye(32)
    save_model(model, folder / "converted")
    export_checkpoint(folder / "converted", folder / "exported", family="retrofit")
    import_checkpoint(folder / "exported", folder / "imported")
    return load_model(folder / "imported").eval()


def model_of(name, folder):
    """A family's model. folder: for files on the way."""
    if name == "retrofit, converted here":
        return retrofitted(folder)
    if name in SWITCHES:
        return open_golden("nanbeige", **SWITCHES[name]).model().eval()
    if "f02" in name:
        config = open_golden("parcae").config.replace(
            core_d_model=36, core_num_heads=3, core_num_kv_heads=3, logit_soft_cap=2.0, init_std=0.3
        )
        return LoopedLM(config).eval()
    return open_golden(name).model().eval()


class Case:
    """One family's model in a folder, opened with transformers."""

    def __init__(self, name, folder):
        self.folder, self.ours = folder / "model", model_of(name, folder)
        save_model(self.ours, self.folder)
        self.model = AutoModelForCausalLM.from_pretrained(self.folder)
        generator = torch.Generator().manual_seed(5)
        config = self.ours.config
        self.tokens = torch.randint(0, config.vocab_size, (3, 9), generator=generator)
        self.mask = (torch.arange(9) >= torch.tensor(PADS)[:, None]).long()
        self.loops = sorted({1, min(config.max_loops, 4)})
        # Only these keep every entry that the whole text would read at once.
        exact = config.loop.cache_policy == "share_first"
        self.policy = config.loop.cache_policy if exact else "per_loop"

    def greedy(self, tokens, mask, *, use_cache=True, **arguments):
        """New token ids."""
        policy = {"cache_policy": self.policy} if use_cache else {}
        ids = self.model.generate(
            tokens, attention_mask=mask, max_new_tokens=NEW_TOKENS, do_sample=False,
            use_cache=use_cache, **policy, **arguments,
        )  # fmt: skip
        return ids[:, tokens.shape[1] :]


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    with torch.no_grad():
        return Case(request.param, tmp_path_factory.mktemp("case"))


def test_the_wrapped_model_is_the_one_looped_lm(case):
    assert type(case.model) is DepthdialForCausalLM
    assert type(case.model.model) is LoopedLM
    assert case.model.config.looped == case.ours.config
    for num_loops in case.loops:
        actual = case.model(case.tokens, case.mask, num_loops=num_loops).logits
        expected = case.ours(case.tokens, num_loops=num_loops, padding_mask_BT=case.mask)
        assert torch.allclose(actual, expected, atol=1e-5)


def test_generation_with_cache_is_without(case):
    for num_loops in case.loops:
        with_cache, without = (
            case.greedy(case.tokens, case.mask, num_loops=num_loops, use_cache=use_cache)
            for use_cache in (True, False)
        )
        assert torch.equal(with_cache, without)


def test_our_own_generation_is_that_of_the_face(case):
    prompts = [case.tokens[row, pads:].tolist() for row, pads in enumerate(PADS)]
    for num_loops in case.loops:
        ours = generate(
            case.ours, prompts, num_loops=num_loops, max_new_tokens=NEW_TOKENS,
            cache_policy=case.policy,
        )  # fmt: skip
        theirs = case.greedy(case.tokens, case.mask, num_loops=num_loops)
        assert [row.token_ids for row in ours] == theirs.tolist()


def test_tokens_one_by_one_in_our_cache_have_the_logits_of_one_pass(case):
    for num_loops in case.loops:
        cache = ContiguousCache(case.ours.config, batch_size=3, capacity=9, policy=case.policy)
        pieces = case.tokens.split([4, 1, 1, 1, 1, 1], dim=1)
        logits = [case.ours(piece, num_loops=num_loops, cache=cache) for piece in pieces]
        close(torch.cat(logits, dim=1), case.ours(case.tokens, num_loops=num_loops), 1e-4)


def test_left_padded_rows_are_the_rows_alone(case):
    num_loops = case.loops[-1]
    batch = case.greedy(case.tokens, case.mask, num_loops=num_loops)
    for row, pads in enumerate(PADS):
        tokens = case.tokens[row : row + 1, pads:]
        solo = case.greedy(tokens, torch.ones_like(tokens), num_loops=num_loops)
        assert torch.equal(batch[row], solo[0])


def test_left_padded_logits_are_those_of_the_rows_alone(case):
    num_loops = case.loops[-1]
    batch = case.model(case.tokens, case.mask, num_loops=num_loops).logits
    for row, pads in enumerate(PADS):
        solo = case.model(case.tokens[row : row + 1, pads:], num_loops=num_loops).logits
        assert torch.allclose(batch[row, pads:], solo[0], atol=1e-4)


def test_beams_with_cache_are_beams_without(case):
    beams = [
        case.greedy(case.tokens, case.mask, num_beams=3, use_cache=use_cache)
        for use_cache in (True, False)
    ]
    assert torch.equal(*beams)


def test_b36_three_rounds_leave_config_and_weights_byte_for_byte(case, tmp_path):
    names = ("config.json", "model.safetensors")
    first = [(case.folder / name).read_bytes() for name in names]
    wrapped = case.model
    for round_ in ("1", "2", "3"):
        wrapped.save_pretrained(tmp_path / round_)
        wrapped = AutoModelForCausalLM.from_pretrained(tmp_path / round_)
        assert [(tmp_path / round_ / name).read_bytes() for name in names] == first


def test_b49_states_of_every_loop_and_the_last_gives_the_logits(case):
    for num_loops in case.loops:
        out = case.model(case.tokens, num_loops=num_loops, output_hidden_states=True)
        assert len(out.hidden_states) == num_loops + 2
        assert torch.equal(case.ours.head(out.hidden_states[-1]), out.logits)


# ---- switches of the dense layers, which no golden case has

ROTATION = {
    "default": {"rope_type": "default", "rope_theta": 10_000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rotation", ROTATION)
def test_biases_and_scaled_rotation_are_those_of_transformers_own_llama(
    tmp_path, rotation, has_bias
):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=48, num_hidden_layers=2, max_position_embeddings=512,
        initializer_range=0.3, attention_bias=has_bias, mlp_bias=has_bias,
        rope_parameters=ROTATION[rotation],
    )  # fmt: skip
    torch.manual_seed(3)
    theirs = LlamaForCausalLM(config).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias"):
            parameter.normal_()
    theirs.save_pretrained(tmp_path / "source")
    import_checkpoint(tmp_path / "source", tmp_path / "ours")
    ours = load_model(tmp_path / "ours").eval()
    tokens = torch.randint(0, 64, (2, 200))
    assert ours.config.attention_bias == ("qkvo" if has_bias else "none")
    assert (ours.config.rope_scaling is None) == (rotation == "default")
    close(ours(tokens, num_loops=1), theirs(tokens).logits, 1e-4)
