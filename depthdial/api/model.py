"""The Python front door: open a model, generate text, train a recipe, measure the depth curve.

Here text meets token ids: everything below speaks ids only. What paths stand for is in
`api/paths.py`, what a command prints in `cli/`. Torch is imported by the functions that need it,
so that a recipe can be read, checked and refused at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from depthdial.api.data import token_documents
from depthdial.api.paths import check_is_run, model_folder, run_recipe
from depthdial.api.recipes import load_recipe
from depthdial.config import CachePolicy, ModelConfig, Recipe

if TYPE_CHECKING:
    from depthdial.data.pointer_chains import PointerChains
    from depthdial.data.synthetic import PointerPrograms
    from depthdial.data.tokenizer import Tokenizer
    from depthdial.engine.generate import Generation
    from depthdial.eval.depth_sweep import DepthSweep
    from depthdial.model.looped_lm import LoopedLM
    from depthdial.model.stopping_rules import StoppingRule
    from depthdial.training.pretrain import TrainResult
    from depthdial.training.progress import TrainObserver

DEFAULT_NEW_TOKENS = 64


@dataclass(frozen=True)
class Completion:
    """One continuation.

    Fields:
        text: without the prompt, without the stop text.
        num_loops: passes of the core for every token; the most where an exit rule ends them.
        finish_reason: `stop` (a stop token of the model, or a stop text) or `length`.
        prompt_tokens: tokens read, those that open the prompt among them.
        completion_tokens: tokens generated, those of the stop text among them.
        mean_loops: passes per generated token; None without an exit rule.
        logprobs: log-probability of each generated token in nats, before temperature and filters;
            None unless asked for.
    """

    text: str
    num_loops: int
    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int
    mean_loops: float | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Model:
    """A looped language model with its tokenizer: text in, text out."""

    looped_lm: LoopedLM
    tokenizer: Tokenizer

    @property
    def config(self) -> ModelConfig:
        """Configuration of the model."""
        return self.looped_lm.config

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        num_loops: int | Sequence[int] | None = None,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        cache_policy: CachePolicy | None = None,
        exit_rule: str | None = None,
        exit_threshold: float | None = None,
        step_sizes: Sequence[float] | None = None,
        logprobs: bool = False,
    ) -> list[Completion]:
        """Continue every prompt as the beginning of a document.

        As in training and in sweeps, a document of a model of ours follows an end-of-text token:
        where the tokenizer has one (that of pointer programs has none), it is put before every
        prompt and counts as a token of it. An imported model keeps its publisher's rule.

        Args:
            prompts: one text or several, none empty; several run as one batch.
            num_loops: for all prompts, or one per prompt, each >= 1; None for the config's.
            max_new_tokens: most tokens per prompt, >= 1; None for 64, or for what is left of the
                context after the longest prompt if that is less.
            temperature: 0 is greedy, and then goes without the next three; else at least 1e-6,
                larger is flatter.
            top_k: keep this many most likely tokens; 0 keeps all.
            top_p: keep the most likely tokens up to this probability, in (0, 1].
            min_p: drop tokens below this fraction of the most likely one, in [0, 1].
            seed: equal seeds give equal text; prompt i draws from (seed, i), so equal prompts of
                one call differ. No effect at temperature 0.
            stop: texts that end a continuation as soon as one stands in it; they are cut off.
            cache_policy: None for the config's.
            exit_rule: name of a rule of `model/stopping_rules.py` that ends the loops of each new
                token, such as `kl` or `q_exit`; `num_loops` is then the most. None runs all.
            exit_threshold: of that rule; None for the published one.
            step_sizes: one per loop, adding up to 1, for a model conditioned on time (LoopFormer);
                without `num_loops` they say how many run. None for equal steps.
            logprobs: also return the log-probability of each generated token. In bf16 they move
                with the batch by up to 1.6e-2, more where logits are large (docs/exactness.md).

        Returns: one `Completion` per prompt, in order; a list also for a single prompt.
        Raises: ValueError for an empty prompt, a loop count the model refuses, a number out of
            range or without effect, more tokens than the model's context, or weights that give
            no numbers.
        """
        import torch

        from depthdial.engine.generate import generate
        from depthdial.engine.sampling import Sampling

        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        stop_texts = [stop] if isinstance(stop, str) else list(stop)
        if "" in stop_texts:
            raise ValueError("a stop text is empty, which would end every text at once; remove it.")
        prompt_ids = self._prompt_ids(texts)
        if num_loops is None:
            num_loops = self.config.num_loops if step_sizes is None else len(step_sizes)
        if max_new_tokens is None:
            room = self.config.max_context - max(map(len, prompt_ids), default=0)
            max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))

        def has_stop_text(new_ids: Sequence[int]) -> bool:
            text = _text_of(self.tokenizer, new_ids)
            return any(stop_text in text for stop_text in stop_texts)

        results = generate(
            self.looped_lm,
            prompt_ids,
            num_loops=num_loops,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(
                temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
            ),
            stop_ids=self.tokenizer.stop_ids,
            is_complete=has_stop_text if stop_texts else None,
            cache_policy=cache_policy,
            stop_rule=_stop_rule(exit_rule, exit_threshold),
            step_sizes=None if step_sizes is None else torch.tensor(step_sizes),
            logprobs=logprobs,
        )
        return [_completion(self.tokenizer, result, stop_texts) for result in results]

    def _prompt_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each prompt as the beginning of a document."""
        for number, text in enumerate(texts):
            if not text:
                raise ValueError(f"prompt {number} is empty; give at least one character.")
        opening_ids = self.tokenizer.opening_ids
        return [[*opening_ids, *ids] for ids in self.tokenizer.encode_batch(texts)]


def load(path_or_id: str | Path, *, device: str = "cpu") -> Model:
    """Open a model with its tokenizer.

    Args:
        path_or_id: a model directory; a checkpoint folder; a run folder, which means its newest
            intact checkpoint; or, if there is nothing at that path, a hub id `org/name`.
        device: torch device name.

    Raises: FileNotFoundError or ValueError saying what is missing or damaged; ValueError for a
        device that this machine does not have.
    """
    from depthdial.data.tokenizer import Tokenizer
    from depthdial.model.checkpoint import load_model
    from depthdial.model.device import check_device

    check_device(device)
    folder = model_folder(path_or_id)
    return Model(load_model(folder, device=device), Tokenizer.from_dir(folder))


def train(
    recipe: str | Path | Recipe,
    *,
    root: str | Path = "runs",
    observer: TrainObserver | None = None,
    **overrides: Any,
) -> TrainResult:
    """Train a recipe into a new folder root/name.

        depthdial.train("tiny-text", train__steps=200, model__loop__update="delta")
        depthdial.train("heal-text", train__init="models/elastic")

    Args:
        recipe: name of a shipped recipe, a YAML or JSON file, or a `Recipe`.
        root: folder that holds the runs.
        observer: is told about every metrics record; None is silent.
        overrides: recipe keys with `__` in place of each dot. Naming one of data.path,
            data.corpus and data.task replaces the recipe's source of data; train__init, a model
            directory, checkpoint or run to start from, replaces its model.

    Returns: folder of the run and whether it finished, or was stopped and saved.
    Raises: ValueError for an unknown key (with the nearest name), a value out of range, or a run
        that exists; FloatingPointError if the gradient is no longer a number.
    """
    from depthdial.training import pretrain

    return pretrain.train(load_recipe(recipe, _dotted(overrides)), root=root, observer=observer)


def resume(
    run: str | Path, *, observer: TrainObserver | None = None, **overrides: Any
) -> TrainResult:
    """Continue a run from its newest intact checkpoint, as if it had never stopped.

        depthdial.resume("runs/tiny-text", optim__lr=2e-3)

    Args:
        run: folder of the run.
        observer: is told about every metrics record; None is silent.
        overrides: recipe keys with `__` in place of each dot, in force from here on and written to
            the run's config.json. Only keys that leave it the same run: of the optimizer and the
            schedule, of precision and device, of what is written when.

    Returns: as `train`.
    Raises: FileNotFoundError if there is no run; ValueError for a key that cannot change (the
        text lists those that can) or a value out of range; FloatingPointError as in `train`.
    """
    from depthdial.training import pretrain

    check_is_run(run)
    return pretrain.resume(run, overrides=_dotted(overrides), observer=observer)


def sweep(
    model: Model | str | Path,
    data: str | Path | Sequence[str] | Sequence[Path] | PointerPrograms | PointerChains,
    *,
    loops: Sequence[int] | None = None,
    context: int | None = None,
    stride: int | None = None,
    rows_per_forward: int = 16,
    precision: Literal["fp32", "bf16"] = "fp32",
    trained_loops: Sequence[int] | None = None,
) -> DepthSweep:
    """Loss of every document at every loop count.

    Args:
        model: a `Model`, or what `load` takes.
        data: a prepared folder (its validation split); a text file or a folder of them; a list of
            such paths as `Path`; a list of texts; or rows of a task that the model was trained on.
        loops: loop counts; None for 1 .. max_loops + 2. Those that training never ran are marked.
        context: tokens that predict one another, up to the model's max_context. None for the
            context of the run if `model` is the path of one, else for max_context. Text only.
        stride: new tokens per window after a document's first; None for no overlap. Text only.
        rows_per_forward: rows computed at once; changes memory, and rounding.
        precision: of the matrix products. In bf16 log-probabilities move with the batch by up to
            1.6e-2, more where logits are large (docs/exactness.md).
        trained_loops: loop counts that training ran; None for those of the model's config.

    Raises: ValueError or FileNotFoundError, also for text without any token, for a folder
        prepared with another tokenizer, and for an option that has no effect on the data.
    """
    from depthdial.data.pointer_chains import PointerChains
    from depthdial.data.synthetic import PointerPrograms
    from depthdial.eval.depth_sweep import default_loops, sweep_documents, sweep_questions
    from depthdial.training.sources import start_id

    trained_context = None
    if not isinstance(model, Model):
        folder = model_folder(model)
        recipe = run_recipe(folder)
        trained_context = None if recipe is None else recipe.data.context
        model = load(folder)
    loops = default_loops(model.config.max_loops) if loops is None else loops
    if isinstance(data, PointerPrograms | PointerChains):
        _check_task(data, model, context=context, stride=stride)
        return sweep_questions(
            model.looped_lm,
            data,
            loops=loops,
            rows_per_forward=rows_per_forward,
            precision=precision,
            trained_loops=trained_loops,
        )
    opened_by = start_id(model.tokenizer)
    limit = model.config.max_context
    context = (trained_context or limit) if context is None else context
    if not 1 <= context <= limit:
        raise ValueError(
            f"context={context} is no length of row for this model; give 1 to {limit}, its "
            "max_context."
        )
    return sweep_documents(
        model.looped_lm,
        token_documents(data, model.tokenizer),
        loops=loops,
        context=context,
        stride=stride,
        rows_per_forward=rows_per_forward,
        precision=precision,
        trained_loops=trained_loops,
        start_id=opened_by,
    )


def _check_task(
    data: PointerPrograms | PointerChains, model: Model, *, context: int | None, stride: int | None
) -> None:
    """Rows of a task fit the model, and no option is given that only text has.

    Raises: ValueError.
    """
    for name, value in (("context", context), ("stride", stride)):
        if value is not None:
            raise ValueError(
                f"{name}={value} has no effect on {data.title}: a row is {data.row_words}. Leave "
                "it out."
            )
    if data.vocab_size != model.tokenizer.vocab_size:
        raise ValueError(
            f"these {data.title} are written in {data.vocab_size} tokens, this model's tokenizer "
            f"has {model.tokenizer.vocab_size}. Give rows written with the model's tokenizer."
        )
    if data.context > model.config.max_context:
        raise ValueError(
            f"rows of {data.context} tokens do not fit this model, whose max_context is "
            f"{model.config.max_context}. Give shorter ones."
        )


def _stop_rule(name: str | None, threshold: float | None) -> StoppingRule | None:
    """The named rule. Raises: ValueError for an unknown name or a threshold without a rule."""
    from depthdial.model.stopping_rules import stopping_rule

    if name is not None:
        return stopping_rule(name, threshold)
    if threshold is not None:
        raise ValueError(
            f"exit_threshold={threshold} has no effect without an exit_rule; name a rule, or leave "
            "it out."
        )
    return None


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of generated tokens; published models embed more ids than their tokenizers spell."""
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size])


def _completion(tokenizer: Tokenizer, result: Generation, stop_texts: Sequence[str]) -> Completion:
    """Text of the new tokens, up to the earliest stop text."""
    text = _text_of(tokenizer, result.token_ids)
    places = [place for stop in stop_texts if (place := text.find(stop)) >= 0]
    return Completion(
        text=text[: min(places)] if places else text,
        num_loops=result.num_loops,
        finish_reason="stop" if places else result.finish_reason,
        prompt_tokens=result.prompt_tokens,
        completion_tokens=len(result.token_ids),
        mean_loops=result.mean_loops,
        logprobs=None if result.logprobs is None else tuple(result.logprobs),
    )


def _dotted(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword names as recipe keys: `train__steps` is `train.steps`."""
    return {name.replace("__", "."): value for name, value in overrides.items()}
