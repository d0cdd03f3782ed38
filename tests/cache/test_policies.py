"""What the names of cache policies mean, and which entry a loop reads."""

import pytest
import torch

from depthdial.cache.policies import CacheRule, cache_rule, find_entries
from depthdial.config import CACHE_POLICIES, ModelConfig


def config(**changes) -> ModelConfig:
    """4 attention layers in the core."""
    fields = {
        "vocab_size": 9, "d_model": 8, "layout": "AF", "split": (2, 8, 2), "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 4, "d_ff": 8, "max_context": 16,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_every_policy_of_the_config_has_a_rule(policy):
    assert isinstance(cache_rule(policy, config()), CacheRule)


@pytest.mark.parametrize(
    ("policy", "groups"),
    [
        ("per_loop", [0, 1, 2, 3, 4]),
        ("huginn:latest-m4", [0, 1, 2, 3, 4]),
        ("huginn:compress-s4", [0, 0, 0, 0, 0]),
        ("huginn:latest-m4-compress-s12", [0, 1, 2, 0, 1]),
        ("huginn:compress-anchor", [0, 1, 2, 3, 4]),
        ("parcae:compress-s2", [0, 1, 0, 1, 0]),
        ("parcae:compress-stride2", [0, 0, 1, 1, 2]),
        ("parcae:compress-first2", [0, 1, 2, 2, 2]),
        ("parcae:compress-last2", [0, 0, 0, 1, 2]),
    ],
)
def test_groups_of_five_loops(policy, groups):
    rule = cache_rule(policy, config())
    assert [int(rule.group(i, torch.tensor([5]))[0]) for i in range(5)] == groups
    assert rule.num_groups(5) == len(set(groups))


@pytest.mark.parametrize("policy", ["huginn:compress-anchor", "huginn:latest-m4-compress-anchor"])
def test_the_anchor_keeps_eight_loops_and_one_for_all_later_ones(policy):
    """In the published running numbers of a core of four layers: n below 34 stays, then
    34 + (n - 34) mod 4."""
    rule = cache_rule(policy, config())
    numbers = [2 + 4 * loop_idx for loop_idx in range(20)]
    kept = [n if n < 34 else 34 + (n - 34) % 4 for n in numbers]
    groups = [int(rule.group(i, torch.tensor([20]))[0]) for i in range(20)]
    assert [2 + 4 * group for group in groups] == kept
    assert [rule.num_groups(k) for k in (1, 8, 9, 20)] == [1, 8, 9, 9]
    assert rule.missing == ("latest" if "latest" in policy else "refuse")


def test_the_last_loops_have_the_same_groups_whatever_the_loop_count():
    rule = cache_rule("parcae:compress-last2", config())
    num_loops = torch.tensor([1, 2, 3, 6])
    assert rule.group(0, num_loops).tolist() == [2, 1, 0, 0]
    assert torch.stack([rule.group(k - 1, torch.tensor([k])) for k in (1, 2, 3, 6)]).unique() == 2


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("huginn:latest-m3", "for a core of 3 attention layers.*has 4; write m4"),
        ("huginn:always-last-m8", "for a core of 8 attention layers"),
        ("huginn:compress-s6", "keeps 6 layers.*has 4 attention layers; give a multiple"),
        ("huginn:compress-s0", "keeps 0 layers"),
        ("huginn:latest-m4-compress-s2", "keeps 2 layers"),
        ("huginn:latest-m2-compress-s4", "for a core of 2 attention layers"),
        ("parcae:compress-stride0", "number of at least 1"),
        ("huginn:latest-m2-compress-anchor", "for a core of 2 attention layers"),
        ("huginn:full", "unknown cache policy 'huginn:full'"),
        ("last", "unknown cache policy 'last'"),
    ],
)
def test_a_name_that_does_not_fit_the_core_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        cache_rule(policy, config())


def test_sliding_layers_count_as_attention_layers():
    sliding = config(layout="SA", split=(2, 4, 2), sliding={"window": 3})
    assert cache_rule("huginn:latest-m4", sliding).missing == "latest"


def test_a_model_that_mixes_loops_takes_per_loop_alone():
    mixing = config(loop={"local_window": 3})
    assert cache_rule("per_loop", mixing) == CacheRule()
    with pytest.raises(ValueError, match="share_first.*does not go with loop.local_window=3"):
        cache_rule("share_first", mixing)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"segments": (4, 4), "loop": {"update": "replace"}}, r"segments=\[4, 4\].*as a whole"),
        ({"modulation": {"kind": "time_step"}}, "time_step.*no step size"),
    ],
)
def test_an_extra_pass_that_the_model_has_no_rule_for_is_refused(changes, reason):
    model = config(**changes)
    with pytest.raises(ValueError, match=f"stash_last.*{reason}"):
        cache_rule("stash_last", model)
    changes["loop"] = {**changes.get("loop", {}), "cache_policy": "stash_last"}
    with pytest.raises(ValueError, match=f"stash_last.*{reason}"):
        config(**changes)


# ---- which entry is read: rows of 4 tokens that ran 3, 1, 2 and 2 loops, the last of this call

RAN = torch.tensor([[3, 1, 2, 2]])


def entries(missing, *, loop, ran=RAN, end=4):
    has_GBS = torch.stack([ran > group for group in range(3)])
    return find_entries(
        CacheRule(missing=missing), has_GBS, torch.tensor([loop]), ends_B=torch.tensor([end])
    )


@pytest.mark.parametrize(
    ("missing", "reads"), [("latest", [1, 0, 1, 1]), ("newest", [2, 0, 1, 1]), ("skip", [1] * 4)]
)
def test_entries_that_a_loop_reads_where_one_token_lacks_its_own(missing, reads):
    found = entries(missing, loop=1)
    assert found.reads_BS.tolist() == [reads]
    assert found.sources == tuple(sorted(set(reads)))
    assert found.targets == (1,)
    lacking = [[False, True, False, False]] if missing == "skip" else None
    assert (found.missing_BS if lacking is None else found.missing_BS.tolist()) == lacking


@pytest.mark.parametrize("missing", ["latest", "newest", "skip"])
def test_a_loop_that_every_token_ran_reads_its_own_entries(missing):
    found = entries(missing, loop=0)
    assert found.reads_BS.tolist() == [[0] * 4]
    assert found.missing_BS is None


def test_the_newest_rule_acts_in_rows_that_lack_an_entry_alone():
    """A neighbour in the batch must not change what a row reads."""
    has_GBS = torch.stack(
        [torch.tensor([[3, 1, 2, 2], [3, 2, 3, 2]]) > group for group in range(3)]
    )
    found = find_entries(
        CacheRule(missing="newest"), has_GBS, torch.tensor([1, 1]), ends_B=torch.tensor([4, 4])
    )
    assert found.reads_BS.tolist() == [[2, 0, 1, 1], [1, 1, 1, 1]]


def test_what_stands_behind_a_shorter_row_is_neither_read_nor_missed():
    found = entries("skip", loop=1, ran=torch.tensor([[3, 2, 0, 0]]), end=2)
    assert found.missing_BS is None
    assert found.reads_BS.tolist() == [[1] * 4]
