"""One pass of the core is one graph, whatever the loop index, the loop count and the segment."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from depthdial.config import ModelConfig
from depthdial.model.looped_lm import LoopedLM

ELASTIC = {"update": "adaptive_delta"}
DELTAS = {"rank": 2, "norms": True}
CASES = {
    "one core": ({"loop": ELASTIC}, 1),
    "differences of every loop": ({"loop_lora": DELTAS | {"sets_by_loop": [0, 1, 0]}}, 1),
    "a loop without differences": ({"loop_lora": DELTAS | {"sets_by_loop": [-1, 0]}}, 2),
    "keys of the first loop": ({"loop": ELASTIC | {"cache_policy": "share_first"}}, 2),
    "keys of the first loop and own": ({"loop": ELASTIC | {"local_window": 3}}, 2),
    "anchored, first loop ungated": (
        {"loop": {"update": "anchored", "gate_bypass": "first_only"}},
        1,
    ),
    "equal segments": ({"segments": (2, 2, 2)}, 1),
    "unequal segments": ({"segments": (2, 4)}, 2),
    "segments with differences": (
        {"segments": (2, 2, 2), "loop_lora": DELTAS | {"sets_by_loop": [0, 1]}},
        1,
    ),
}
"""Changes of the config, and the graphs that all passes of all loop counts need."""


def model_of(changes):
    fields = {
        "vocab_size": 23, "d_model": 16, "split": (2, 6, 2), "num_heads": 2, "num_kv_heads": 1,
        "head_dim": 6, "d_ff": 24, "max_context": 32, "max_loops": 4, "init_std": 0.2,
        "loop": {"update": "replace"},
    }  # fmt: skip
    model = LoopedLM(ModelConfig.from_dict(fields | changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "loop_lora" in name:
                generator = torch.Generator().manual_seed(len(name))
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def gradients(model, tokens, num_loops):
    model.zero_grad()
    logits = model(tokens, num_loops=num_loops)
    logits.square().mean().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), found


@pytest.mark.parametrize("name", CASES)
def test_a_pass_is_one_graph_and_gives_what_the_eager_one_does(name):
    changes, num_graphs = CASES[name]
    model = model_of(changes)
    tokens = torch.randint(0, 23, (2, 7), generator=torch.Generator().manual_seed(0))
    eager = {k: gradients(model, tokens, k) for k in (3, 1, 4)}
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    model.loop = torch.compile(model.loop, backend=backend, fullgraph=True)
    for num_loops, (logits, grads) in eager.items():
        ours, found = gradients(model, tokens, num_loops)
        torch.testing.assert_close(ours, logits, rtol=0, atol=1e-6)
        assert found.keys() == grads.keys()
        for parameter, grad in found.items():
            torch.testing.assert_close(grad, grads[parameter], rtol=1e-4, atol=1e-7)
    assert backend.frame_count == num_graphs


def test_segments_share_their_sublayers_with_the_core():
    model = model_of({"segments": (2, 4)})
    assert [len(stack) for stack in model.segment_stacks] == [2, 4]
    assert model.segment_stacks[1][0] is model.core_stack[2]
    assert not any("segment" in name for name, _ in model.named_modules())
