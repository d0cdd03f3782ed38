"""What a model writes at every loop count, for a reader of the report.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from depthdial.engine.generate import generate
from depthdial.engine.sampling import Sampling
from depthdial.eval.depth_sweep import POINTER_ROWS
from depthdial.studies.finished_run import FinishedRun

SAMPLE_PROMPTS, SAMPLE_PROMPT_TOKENS, SAMPLE_NEW_TOKENS = 2, 24, 48


def text_samples(run: FinishedRun, baseline: FinishedRun | None) -> list[dict[str, Any]]:
    """Continuations of held-out openings at every loop count up to max_loops.

    As in training, a document follows the end-of-text token. A model whose context does not hold
    a prompt and something to write has no samples.
    """
    sides = [run] if baseline is None else [run, baseline]
    context = min(side.model.config.max_context for side in sides)
    prompt_tokens = min(SAMPLE_PROMPT_TOKENS, context // 2)
    if prompt_tokens < 2:
        return []
    start_id = run.start_id()
    samples = []
    for document in run.validation_documents()[:SAMPLE_PROMPTS]:
        opening = [int(token) for token in document.tokens_T[: prompt_tokens - 1]]
        ids = [start_id, *opening]
        new_tokens = min(SAMPLE_NEW_TOKENS, context - len(ids))
        samples.append(
            {
                "prompt": run.tokenizer.decode(opening),
                "baseline": None
                if baseline is None
                else _continuation(baseline, ids, num_loops=1, new_tokens=new_tokens),
                "outputs": [
                    {
                        "num_loops": k,
                        "text": _continuation(run, ids, num_loops=k, new_tokens=new_tokens),
                    }
                    for k in range(1, run.model.config.max_loops + 1)
                ],
            }
        )
    return samples


def _continuation(side: FinishedRun, ids: list[int], *, num_loops: int, new_tokens: int) -> str:
    [row] = generate(
        side.model,
        [ids],
        num_loops=num_loops,
        max_new_tokens=new_tokens,
        sampling=Sampling(temperature=0.7, top_p=0.95, seed=0),
        stop_ids=(side.start_id(),),
    )
    return side.tokenizer.decode(row.token_ids)


def pointer_samples(run: FinishedRun, baseline: FinishedRun | None) -> list[dict[str, Any]]:
    """One unseen program answered at every loop count, wrong answers in brackets."""
    # The first program that the sweep does not count.
    batch = run.validation_programs().rows(POINTER_ROWS, 1)
    wanted = batch.targets_BT[0].tolist()
    program = run.tokenizer.decode(batch.tokens_BT[0].tolist())
    right = " ".join(str(value) for value in wanted)
    tokens_BT = batch.tokens_BT
    return [
        {
            "prompt": f"{program}\nright answers: {right} (wrong ones stand in brackets)",
            "baseline": None
            if baseline is None
            else _answers(baseline, tokens_BT, wanted, num_loops=1),
            "outputs": [
                {"num_loops": k, "text": _answers(run, tokens_BT, wanted, num_loops=k)}
                for k in range(1, run.model.config.max_loops + 1)
            ],
        }
    ]


@torch.no_grad()
def _answers(
    side: FinishedRun, tokens_BT: torch.Tensor, wanted: list[int], *, num_loops: int
) -> str:
    device = side.model.embedding.weight.device
    given_T = side.model(tokens_BT.to(device), num_loops=num_loops)[0].argmax(dim=-1)
    pairs = zip(given_T.tolist(), wanted, strict=True)
    return " ".join(str(given) if given == value else f"[{given}]" for given, value in pairs)
