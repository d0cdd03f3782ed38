"""Running a model until a rule says stop: a depth per row, found while the loops run.

What the rules measure is in `model/stopping_rules.py`; sampling tokens is in `generate.py`.
A call of several tokens takes one depth per row from its last token, so that the logits of its
earlier tokens depend on later ones: right for a prompt, wrong for scoring text.
Letters: B batch, T query tokens, D model width, V vocabulary, L most loops of a row, N rows that
still loop.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from typing import NamedTuple

import torch
from torch import Tensor

from depthdial.cache.loop_counts import NumLoops
from depthdial.cache.protocol import LoopCache
from depthdial.config import ModelConfig
from depthdial.model.call import Begun, Call
from depthdial.model.halting import stale_gate
from depthdial.model.looped_lm import LoopedLM, LoopPass
from depthdial.model.stopping_rules import ExitPoint, StoppingRule


class AdaptiveRun(NamedTuple):
    """Result of `run_until`.

    Fields:
        logits_BTV: after each row's own number of loops.
        loops_B: those numbers, int64 on the CPU; 0 for a row that brought padding only.
        values_BL: what the rule measured after each pass, on the CPU; NaN where it did not.
        is_causal: whether no logits depend on later tokens: true of calls of one token.
    """

    logits_BTV: Tensor
    loops_B: Tensor
    values_BL: Tensor
    is_causal: bool


@torch.no_grad()
def run_until(model: LoopedLM, call: Call, *, rule: StoppingRule) -> AdaptiveRun:
    """Logits of every row after as many loops as the rule lets it run.

    A row that stops is taken out of the batch at once: it computes nothing more, and stores no
    entries of later loops. Under cache policies where later tokens would miss those entries, they
    become copies of its last loop's.

    Args: call: its loop counts are the most that a row may run, and what the model is conditioned
        on, if it is.

    Raises: ValueError as `LoopedLM.forward` and `check_can_stop` do.
    """
    check_can_stop(model.config, rule, cache=call.cache)
    begun = model.begin(call)
    watch = _Watch(model, begun, rule=rule)
    state_BTD = torch.empty_like(begun.initial_state_BTD)
    passes = model.iterate(begun)
    done: LoopPass | None = next(passes)
    while done is not None:
        rows = watch.rows_of(done)
        stops = watch.stops(done)
        state_BTD[rows[stops]] = done.state_BTD[stops]
        done = _go_on(passes, keep=~stops.cpu())
    if call.cache is not None:
        _fill_missing(call.cache, watch.loops_B, call.num_loops)
    logits_BTV = model.head(model.finish(state_BTD, begun))
    loops_B = torch.where(watch.has_token_B.cpu(), watch.loops_B, 0)
    return AdaptiveRun(logits_BTV, loops_B, watch.values_BL, is_causal=call.tokens_BT.shape[1] == 1)


def check_can_stop(
    config: ModelConfig, rule: StoppingRule, *, cache: LoopCache | None = None
) -> None:
    """Refuse models and caches for which stopping early has no meaning.

    Raises: ValueError for a rule that reads an exit gate which the model does not have, a core in
        segments, a state update that completes in its last loop, or a cache policy that counts
        loops from the last.
    """
    if rule.needs_gate and config.exit_gate == "none":
        raise ValueError(
            f"the stopping rule {rule.name} reads an exit gate, and this model has none. Choose a "
            "rule that compares states or readouts, such as kl or latent_diff."
        )
    if config.segments:
        raise ValueError(
            f"segments={list(config.segments)}: each part of the core runs all its loops before "
            "the next, so a row cannot stop between them. Choose the number of loops beforehand."
        )
    if config.loop.update == "anchored":
        raise ValueError(
            "loop.update='anchored' mixes the first loop's result in after the last loop, so a "
            "row cannot stop before it. Choose the number of loops beforehand."
        )
    if cache is not None and cache.exit_obstacle is not None:
        raise ValueError(cache.exit_obstacle)


def warn_if_conditioned(config: ModelConfig) -> None:
    """Warn where stopping after i of k loops is another function than i loops."""
    if config.modulation is not None or config.loop.update == "damped":
        warnings.warn(
            "the loops of this model depend on how many there are to be: stopping early is not "
            "the same as asking for fewer loops, and training has not seen it.",
            stacklevel=2,
        )


def warn_if_stale(config: ModelConfig, rule: StoppingRule) -> None:
    """Warn where a rule reads an exit gate that was not trained with the other weights."""
    if rule.needs_gate:
        for sentence in stale_gate(config):
            warnings.warn(sentence, stacklevel=2)


class _Watch:
    """What is known of each row of one call while its loops run; rows in the user's order."""

    def __init__(self, model: LoopedLM, begun: Begun, *, rule: StoppingRule) -> None:
        self.model, self.begun, self.rule = model, begun, rule
        tokens_BT, padding_mask_BT = begun.call.tokens_BT, begun.call.padding_mask_BT
        is_token_BT = torch.ones_like(tokens_BT) if padding_mask_BT is None else padding_mask_BT
        self.max_loops, self.is_token_BT = begun.call.num_loops, is_token_BT.bool()
        self.has_token_B = self.is_token_BT.any(dim=1)
        places_T = torch.arange(is_token_BT.shape[1], device=is_token_BT.device)
        self.last_B = (places_T * self.is_token_BT).amax(dim=1)
        batch_size, most = len(is_token_BT), int(torch.as_tensor(self.max_loops).max())
        self.loops_B = torch.zeros(batch_size, dtype=torch.int64)
        self.values_BL = torch.full((batch_size, most), torch.nan)
        self.all_rows = torch.arange(batch_size, device=is_token_BT.device)
        self.memory = rule.begin(self._point(begun.initial_state_BTD, self.all_rows)).clone()

    def rows_of(self, done: LoopPass) -> Tensor:
        """Rows of a pass, on the model's device."""
        return self.all_rows if done.rows is None else done.rows.to(self.all_rows.device)

    def stops(self, done: LoopPass) -> Tensor:
        """Which rows of the pass stop, by the rule or because their loops are done."""
        rows, loop_idx = self.rows_of(done), done.loop_idx
        stops = ~self.has_token_B[rows]
        is_due = self.rule.is_due(loop_idx)
        if is_due or self.rule.counts_every_pass:
            point = self._read_out(self._point(done.state_BTD, rows), done)
            value_N, self.memory[rows] = self.rule.measure(point, self.memory[rows])
            measured_N = torch.where(self.has_token_B[rows], value_N, torch.nan)
            self.values_BL[rows.cpu(), loop_idx] = measured_N.to(self.values_BL)
            if is_due:
                stops = stops | self.rule.stops(value_N)
        stops[len(rows) - done.num_leaving :] = True
        self.loops_B[rows[stops].cpu()] = loop_idx + 1
        return stops

    def _point(self, state_NTD: Tensor, rows: Tensor) -> ExitPoint:
        return ExitPoint(
            state_NTD=state_NTD,
            is_token_NT=self.is_token_BT[rows],
            last_N=self.last_B[rows],
            logits_NV=None,
            gate_logit_N=None,
            vocab_size=self.model.config.vocab_size,
        )

    def _read_out(self, point: ExitPoint, done: LoopPass) -> ExitPoint:
        """The point with the readouts that the rule needs."""
        model, rows = self.model, self.rows_of(done)
        last = (torch.arange(len(rows), device=rows.device), point.last_N)
        if self.rule.needs_gate:
            assert model.exit_gate is not None, "check_can_stop has refused"
            gate_logit_N = model.exit_gate(done.state_BTD[last][:, None])[:, 0]
            point = point._replace(gate_logit_N=gate_logit_N)
        if self.rule.needs_logits:
            # On a cache this writes the coda's entries of the call's tokens, and so does every
            # later check and the end of the call, at the same positions: the last one counts.
            x_NTD = model.coda(
                done.state_BTD,
                mods=model.coda_modulation(
                    self._budget(done.rows),
                    table=self.begun.call.table,
                    device=done.state_BTD.device,
                ),
                slots=self.begun.binding.slots("coda", rows=done.rows),
                ctx=self.begun.ctx if done.rows is None else self.begun.ctx.narrow(rows),
            )
            point = point._replace(logits_NV=model.head(x_NTD[last]))
        return point

    def _budget(self, rows: Tensor | None) -> NumLoops:
        if isinstance(self.max_loops, int) or rows is None:
            return self.max_loops
        return self.max_loops[rows]


def _go_on(passes: Generator[LoopPass, Tensor | None, None], *, keep: Tensor) -> LoopPass | None:
    """The next pass; None after the last row has stopped."""
    try:
        return passes.send(keep)
    except StopIteration:
        return None


def _fill_missing(cache: LoopCache, loops_B: Tensor, max_loops: NumLoops) -> None:
    """Give the deeper entries of rows that stopped early."""
    stopped_B = loops_B < torch.as_tensor(max_loops)
    for loops in loops_B[stopped_B].unique().tolist():
        cache.fill(((loops_B == loops) & stopped_B).nonzero()[:, 0], loops - 1)
