"""The code of docs/transformers.md runs as it stands, block after block."""

import re
from pathlib import Path

import torch
from toys import toy_model

from depthdial.data.tokenizer import train_bpe
from depthdial.model.checkpoint import load_model, save_model

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"


def test_the_page_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokenizer = train_bpe(["Fellow citizens of the Senate. " * 20], 270, allow_fewer=True)
    save_model(toy_model(vocab_size=tokenizer.vocab_size), "model")
    tokenizer.save("model")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(blocks) == 5
    names = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert names["short"].shape[0] == names["mixed"].shape[0] == 2
    assert load_model("deeper").config.num_loops == names["deeper"].config.num_loops == 3
    assert torch.isfinite(names["out"].logits).all()
    assert Path("for-others", "modeling_depthdial.py").is_file()
