"""Toys behind the transformers face, and greedy decoding through it."""

import torch
from toys import toy_config, toy_model, toy_tokens

from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import DepthdialForCausalLM

TOKENS = toy_tokens(3, 7)
PADS = (3, 0, 2)
MASK = (torch.arange(7) >= torch.tensor(PADS)[:, None]).long()


def wrapped_toy(**changes) -> DepthdialForCausalLM:
    """A toy with random conditioning."""
    wrapped = DepthdialForCausalLM(DepthdialConfig(**toy_config(**changes).to_dict())).eval()
    wrapped.model.load_state_dict(toy_model(**changes).state_dict())
    return wrapped


def greedy(model, tokens=TOKENS, *, mask=None, new=8, **arguments):
    """New token ids of greedy decoding."""
    mask = torch.ones_like(tokens) if mask is None else mask
    ids = model.generate(
        tokens, attention_mask=mask, max_new_tokens=new, do_sample=False, **arguments
    )
    return ids[:, tokens.shape[1] :]
