"""What is done to a loss module from outside: compiled blocks, gradients in every process.

The blocks are prelude, one pass of the core, coda, and head with loss. Nothing here changes the
model: a compiled block is handed to each call (`model/call.py: Blocks`).
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from depthdial.model.call import Blocks
from depthdial.training.step import LossModule, Readouts

# Every (rows, dtype, grad mode) of a block is one graph; hitting the limit is an error, never a
# silent return to eager speed.
RECOMPILE_LIMIT = 64


def compile_blocks(loss_module: LossModule) -> bool:
    """Let the blocks of a loss module run compiled wherever gradients are computed.

    One pass is one graph, so a new loop count needs no new compilation. Validation and a teacher,
    which compute no gradients, stay eager. Without a C++ compiler on a CPU everything stays eager,
    with a warning.

    Returns: whether the blocks are compiled.
    """
    candidates = [os.environ.get("CXX", "g++"), "clang++"]
    if loss_module.model.embedding.weight.device.type == "cpu" and not any(
        shutil.which(name) for name in candidates
    ):
        warnings.warn(
            f"train.compile needs a C++ compiler, and none of {candidates} was found; training "
            "runs eagerly, which is slower and gives the same results up to rounding.",
            stacklevel=2,
        )
        return False
    model, readouts = loss_module.model, loss_module.eager_readouts()
    loss_module.compiled = (
        Blocks(_compiled(model.prelude), _compiled(model.loop), _compiled(model.coda)),
        Readouts(*map(_compiled, readouts)),
    )
    return True


def _compiled(block: Callable[..., Any]) -> Callable[..., Any]:
    """A block that compiles at its first call of each kind."""
    compiled = torch.compile(block)

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            fail_on_recompile_limit_hit=True,
            # Positions that are scored, of a comparison with a teacher, differ from batch to batch.
            capture_dynamic_output_shape_ops=True,
        ):
            return compiled(*args, **kwargs)

    return call


class _Touch(torch.autograd.Function):
    """The first tensor unchanged; backward also gives every other tensor a gradient of zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads[0], *(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)


def share_gradients(loss_module: LossModule) -> None:
    """Let every trained parameter get a gradient in each process, zero where no row uses it.

    Processes that run different loop counts use different parameters; a reduction of gradients
    waits for the same ones everywhere. Call this before a parallel wrapper wraps the module.
    """
    loss_module.touch = _touch


def _touch(x_BTD: Tensor, model: nn.Module) -> Tensor:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return _Touch.apply(x_BTD, *trained)
