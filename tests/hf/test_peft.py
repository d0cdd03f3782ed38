"""LoRA by peft itself, where it is installed; `tests/invariants/test_adapters.py` needs no peft."""

from __future__ import annotations

import pytest
import torch

from depthdial.model.checkpoint import load_model

peft = pytest.importorskip("peft")
TRAINS = True

CONFIG = {
    "vocab_size": 40, "d_model": 16, "split": [2, 2, 2], "num_heads": 2, "num_kv_heads": 1,
    "head_dim": 8, "d_ff": 24, "max_context": 32, "num_loops": 2, "max_loops": 3, "init_std": 0.2,
}  # fmt: skip
TOKENS = torch.arange(24).reshape(2, 12) % 40


@pytest.mark.parametrize(
    ("changes", "lora"),
    [
        ({}, {"target_modules": "all-linear"}),
        ({}, {"target_modules": ["gate"]}),
        ({}, {"target_modules": ["lm_head"]}),
        ({}, {"target_modules": "all-linear", "modules_to_save": ["lm_head"]}),
        ({"loop": {"update": "decay_gate", "gate_rank": 4}}, {"target_modules": ["up", "down"]}),
        (
            {"modulation": {"d_cond": 8, "rank": 4, "embed_dim": 8}},
            {"target_modules": "all-linear"},
        ),
        (
            {"modulation": {"d_cond": 8, "rank": 4, "embed_dim": 8}},
            {"target_modules": ["embedding"]},
        ),
        ({"tie_embeddings": True}, {"target_modules": ["embedding", "q_proj"]}),
        (
            {"tie_embeddings": True},
            {"target_modules": ["q_proj"], "modules_to_save": ["embedding"]},
        ),
        (
            {"loop_lora": {"rank": 2, "sets_by_loop": [-1, 0]}},
            {"target_modules": ["q_proj", "v_proj"], "exclude_modules": r".*loop_lora.*"},
        ),
    ],
)
def test_f26_lora_acts_trains_and_merges(changes, lora, tmp_path):
    from depthdial.hf import DepthdialConfig, DepthdialForCausalLM

    torch.manual_seed(0)
    plain = DepthdialForCausalLM(DepthdialConfig(**CONFIG, **changes)).eval()
    before = plain(input_ids=TOKENS, num_loops=3).logits.detach()
    model = peft.get_peft_model(plain, peft.LoraConfig(r=4, lora_alpha=8, **lora))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.3 * torch.randn_like(parameter)
    output = model(input_ids=TOKENS, num_loops=3, labels=TOKENS)
    output.loss.backward()
    assert [name for name, p in trained.items() if p.grad is None or not p.grad.any()] == []
    adapted = output.logits.detach()
    assert (adapted - before).abs().max() > 1e-2
    merged = model.merge_and_unload()
    torch.testing.assert_close(
        merged(input_ids=TOKENS, num_loops=3).logits, adapted, rtol=0, atol=1e-4
    )
    merged.save_pretrained(tmp_path)
    ours = load_model(tmp_path).eval()
    torch.testing.assert_close(ours(TOKENS, num_loops=3), adapted, rtol=0, atol=1e-4)
