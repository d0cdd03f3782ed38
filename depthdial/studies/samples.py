"""What a model writes at every loop count, for a reader of the report.

Letters: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from depthdial.data.packing import IGNORE
from depthdial.data.pointer_chains import PointerChains
from depthdial.engine.generate import generate
from depthdial.engine.sampling import Sampling
from depthdial.eval.depth_sweep import likeliest_answers, question_count
from depthdial.studies.finished_run import FinishedRun
from depthdial.training.sources import TaskRows

SAMPLE_PROMPTS, SAMPLE_PROMPT_TOKENS, SAMPLE_NEW_TOKENS = 2, 24, 48

TRIED_ROWS = 20

Layout = Callable[[list[str]], str]
"""From the text of each answer, in the order of the questions, to the text of a sample."""


def text_samples(run: FinishedRun, baseline: FinishedRun | None) -> list[dict[str, Any]]:
    """Continuations of held-out openings at every loop count up to max_loops.

    A document is opened as the model expects. A model whose context does not hold a prompt and
    something to write has no samples.
    """
    sides = [run] if baseline is None else [run, baseline]
    context = min(side.model.config.max_context for side in sides)
    opening_ids = run.tokenizer.opening_ids
    prompt_tokens = min(SAMPLE_PROMPT_TOKENS, context // 2) - len(opening_ids)
    if prompt_tokens < 1:
        return []
    samples = []
    for document in run.validation_documents()[:SAMPLE_PROMPTS]:
        opening = [int(token) for token in document.tokens_T[:prompt_tokens]]
        ids = [*opening_ids, *opening]
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
        stop_ids=side.tokenizer.stop_ids,
    )
    # Published models embed more ids than their tokenizers spell.
    spelt = [token for token in row.token_ids if token < side.tokenizer.vocab_size]
    return side.tokenizer.decode(spelt)


def question_samples(run: FinishedRun, baseline: FinishedRun | None) -> list[dict[str, Any]]:
    """One unseen row answered at every loop count, wrong answers in brackets."""
    source = run.unseen_rows()
    row = _telling_row(source)
    prompt, layout = _laid_out(run, source, row=row)
    return [
        {
            "prompt": f"{prompt} (wrong ones stand in brackets)",
            "baseline": None
            if baseline is None
            else layout(_answers(baseline, source, row=row, num_loops=1)),
            "outputs": [
                {"num_loops": k, "text": layout(_answers(run, source, row=row, num_loops=k))}
                for k in range(1, run.model.config.max_loops + 1)
            ],
        }
    ]


def _telling_row(source: TaskRows) -> int:
    """The first row that the sweep does not count and whose answers are not all alike."""
    first = question_count(source).num_rows
    targets_BT = source.rows(first, TRIED_ROWS).targets_BT
    for place, targets_T in enumerate(targets_BT):
        if len(targets_T[targets_T != IGNORE].unique()) > 1:
            return first + place
    # One chain has one answer.
    return first


def _laid_out(run: FinishedRun, source: TaskRows, *, row: int) -> tuple[str, Layout]:
    """The prompt of a row, and how its answers are written."""
    [tokens_T], [targets_T] = source.rows(row, 1)[:2]
    spelt = [run.tokenizer.decode([token]) for token in tokens_T.tolist()]
    if not isinstance(source, PointerChains):
        right = " ".join(str(value) for value in targets_T.tolist())
        return f"{' '.join(spelt)}\nright answers: {right}", " ".join
    lines = "".join(spelt).splitlines()
    asked_at = (targets_T != IGNORE).nonzero().flatten().tolist()
    letters = [spelt[place - 1] for place in asked_at]
    depths = source.depths(row, 1)[0, asked_at].tolist()

    def by_depth(answers: list[str]) -> str:
        """One line for each number of look-ups."""
        pairs = [f"{letter}={answer}" for letter, answer in zip(letters, answers, strict=True)]
        return "\n".join(
            f"{depth}: " + " ".join(p for p, d in zip(pairs, depths, strict=True) if d == depth)
            for depth in sorted(set(depths))
        )

    told = [line for line in lines if not line.endswith("=")]
    return f"{' '.join(told)}\nanswers for every letter, by number of look-ups", by_depth


@torch.no_grad()
def _answers(side: FinishedRun, source: TaskRows, *, row: int, num_loops: int) -> list[str]:
    """The answer to each question of a row as text, wrong ones in brackets."""
    batch = source.rows(row, 1)
    device = side.model.embedding.weight.device
    logits_BTV = side.model(batch.tokens_BT.to(device), num_loops=num_loops).float().cpu()
    given_T = likeliest_answers(logits_BTV, source.answer_ids)[0]
    is_asked_T = batch.targets_BT[0] != IGNORE
    pairs = zip(given_T[is_asked_T].tolist(), batch.targets_BT[0, is_asked_T].tolist(), strict=True)
    spell = _speller(side, source)
    return [spell(given) if given == wanted else f"[{spell(given)}]" for given, wanted in pairs]


def _speller(side: FinishedRun, source: TaskRows) -> Callable[[int], str]:
    """An answer as text: a digit of the model's tokenizer, or the value that a program has."""
    if isinstance(source, PointerChains):
        return lambda token: side.tokenizer.decode([token])
    return str
