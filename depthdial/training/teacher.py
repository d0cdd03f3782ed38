"""The teacher of a distillation: a frozen model that shares no memory with the student.

What the divergence from it weighs is in `objective.py`.
Letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthdial.config import Recipe
from depthdial.data.packing import Batch
from depthdial.data.tokenizer import Tokenizer
from depthdial.model.checkpoint import in_own_memory, load_model
from depthdial.model.looped_lm import LoopedLM


class Teacher(nn.Module):
    """A model that is only read, at one loop count."""

    def __init__(self, model: LoopedLM, *, num_loops: int) -> None:
        super().__init__()
        self.model = model.eval().requires_grad_(False)
        self.num_loops = num_loops

    @torch.no_grad()
    def forward(self, batch: Batch) -> Tensor:
        """Logits [B, T, V] without gradient."""
        return self.model(
            batch.tokens_BT,
            num_loops=self.num_loops,
            padding_mask_BT=batch.padding_mask_BT,
            document_ids_BT=batch.document_ids_BT,
        )


def teacher_folder(recipe: Recipe) -> str | None:
    """Model directory of a recipe's teacher; None without distillation."""
    distill = recipe.objective.distill
    return None if distill is None else distill.teacher or recipe.train.init


def open_teacher(recipe: Recipe, tokenizer: Tokenizer) -> Teacher | None:
    """The teacher of a recipe, in float32 on its device; None without distillation.

    Args: tokenizer: of the training data.
    Raises: FileNotFoundError; ValueError if the teacher's token ids are not the student's, or it
        was not trained for so many loops.
    """
    folder, distill = teacher_folder(recipe), recipe.objective.distill
    if folder is None or distill is None:
        return None
    model = in_own_memory(load_model(folder, device=recipe.train.device))
    if model.config.vocab_size != recipe.model.vocab_size:
        raise ValueError(
            f"the teacher {folder} has {model.config.vocab_size} token ids, the student "
            f"{recipe.model.vocab_size}; a teacher must have the same."
        )
    if Tokenizer.from_dir(folder).to_json() != tokenizer.to_json():
        raise ValueError(
            f"the teacher {folder} has another tokenizer than the training data, so the same ids "
            "mean other text. Choose a teacher of the same tokenizer."
        )
    if distill.teacher_loops > model.config.max_loops:
        raise ValueError(
            f"objective.distill.teacher_loops={distill.teacher_loops} exceeds max_loops="
            f"{model.config.max_loops} of the teacher {folder}."
        )
    return Teacher(model, num_loops=distill.teacher_loops)
