"""What the names of cache policies mean, and which entry a loop reads."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from depthdial.cache.groups import find_entries, group_of
from depthdial.config import POLICIES, CacheRule, ModelConfig, cache_rule

PACKAGE = Path(__file__).parents[2] / "depthdial"
OWNER = "config/policies.py"
PREFIXES = ("huginn", "parcae", "collapse", "stash")


def config(**changes) -> ModelConfig:
    """4 attention layers in the core."""
    fields = {
        "vocab_size": 9, "d_model": 8, "layout": "AF", "split": (2, 8, 2), "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 4, "d_ff": 8, "max_context": 16,
    }  # fmt: skip
    return ModelConfig(**(fields | changes))


@pytest.mark.parametrize("policy", POLICIES)
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
    assert [int(group_of(rule, i, torch.tensor([5]))[0]) for i in range(5)] == groups
    assert rule.num_groups(5) == len(set(groups))


@pytest.mark.parametrize("policy", ["huginn:compress-anchor", "huginn:latest-m4-compress-anchor"])
def test_the_anchor_keeps_eight_loops_and_one_for_all_later_ones(policy):
    """In the published running numbers of a core of four layers: n below 34 stays, then
    34 + (n - 34) mod 4."""
    rule = cache_rule(policy, config())
    numbers = [2 + 4 * loop_idx for loop_idx in range(20)]
    kept = [n if n < 34 else 34 + (n - 34) % 4 for n in numbers]
    groups = [int(group_of(rule, i, torch.tensor([20]))[0]) for i in range(20)]
    assert [2 + 4 * group for group in groups] == kept
    assert [rule.num_groups(k) for k in (1, 8, 9, 20)] == [1, 8, 9, 9]
    assert rule.reads_missing == ("latest" if "latest" in policy else "refuse")


def test_the_last_loops_have_the_same_groups_whatever_the_loop_count():
    rule = cache_rule("parcae:compress-last2", config())
    num_loops = torch.tensor([1, 2, 3, 6])
    assert group_of(rule, 0, num_loops).tolist() == [2, 1, 0, 0]
    last = [group_of(rule, k - 1, torch.tensor([k])) for k in (1, 2, 3, 6)]
    assert torch.stack(last).unique() == 2


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
    sliding = config(layout="SA", split=(2, 4, 2), d_ff=None, sliding={"window": 3})
    assert cache_rule("huginn:latest-m4", sliding).reads_missing == "latest"


def test_a_model_that_mixes_loops_takes_per_loop_alone():
    mixing = config(loop={"local_window": 3})
    assert cache_rule("per_loop", mixing) == POLICIES["per_loop"]
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
        CacheRule("", reads_missing=missing),
        has_GBS,
        torch.tensor([loop]),
        ends_B=torch.tensor([end]),
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
        CacheRule("", reads_missing="newest"),
        has_GBS,
        torch.tensor([1, 1]),
        ends_B=torch.tensor([4, 4]),
    )
    assert found.reads_BS.tolist() == [[2, 0, 1, 1], [1, 1, 1, 1]]


def test_what_stands_behind_a_shorter_row_is_neither_read_nor_missed():
    found = entries("skip", loop=1, ran=torch.tensor([[3, 2, 0, 0]]), end=2)
    assert found.missing_BS is None
    assert found.reads_BS.tolist() == [[1] * 4]


# ---- a policy's facts are asked of its rule


def policies_in(node: ast.AST | None, names: dict[str, ast.AST]) -> set[str]:
    """Names of policies, or their beginnings, that an expression writes out, also by the name of
    a constant of its file."""
    if isinstance(node, ast.Name) and node.id in names:
        return policies_in(names[node.id], {})
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        is_policy = node.value in POLICIES or node.value.startswith(PREFIXES)
        return {node.value} if is_policy else set()
    if isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Call):
        parts = node.args if isinstance(node, ast.Call) else node.elts
        return set().union(*(policies_in(part, names) for part in parts))
    return set()


def policy_comparisons(source: str) -> Iterator[tuple[int, str]]:
    """(line, code) wherever the name of a policy decides something."""
    tree = ast.parse(source)
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        found: set[str] = set()
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            found = set().union(*(policies_in(side, names) for side in sides))
        elif isinstance(node, ast.MatchValue):
            found = policies_in(node.value, names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in ("startswith", "endswith", "partition", "split"):
                found = set().union(*(policies_in(part, names) for part in node.args))
        if found:
            yield node.lineno, ast.unparse(node)


def test_no_other_file_compares_names_of_policies():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {code}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) != OWNER and "families" not in path.parts
        for line, code in policy_comparisons(path.read_text(encoding="utf-8"))
    ]
    assert not found, "ask the CacheRule instead:\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["nanbeige", "dory", "huginn", "parcae"])
def test_a_family_maps_names_of_policies_and_asks_rules_for_the_rest(name):
    """A family has a name of its own, which may be that of a policy too."""
    source = (PACKAGE / f"formats/families/{name}.py").read_text(encoding="utf-8")
    found = [code for _, code in policy_comparisons(source) if "policy" in code]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "if policy == 'per_loop': pass",
        "SAFE = ('per_loop', 'share_first')\nok = policy in SAFE",
        "if policy.startswith('collapse_'): pass",
        "match policy:\n    case 'last_step': pass",
    ],
)
def test_self_a_comparison_of_policies_is_seen(source):
    assert list(policy_comparisons(source))


@pytest.mark.parametrize(
    "source",
    ["policy = 'per_loop'", "modes = {'last_loop': 'last_step'}", "if policy != given: pass"],
)
def test_self_names_of_policies_that_decide_nothing_are_allowed(source):
    assert not list(policy_comparisons(source))
