"""From a data config to training rows, validation rows, held-out documents and the tokenizer.

The tokenizer is that of the data, unless training starts from a model: then text is prepared with
the model's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from depthdial.config import Recipe
from depthdial.data.corpora import prepare_corpus
from depthdial.data.packing import PackedText, RowSource
from depthdial.data.pointer_chains import PointerChains
from depthdial.data.shards import TokenDocument, TokenShards
from depthdial.data.synthetic import PointerPrograms, pointer_tokenizer
from depthdial.data.tokenizer import Tokenizer

# Validation rows are the same for every run and seed, so that runs can be compared.
VALIDATION_SEED = 0
TaskRows = PointerPrograms | PointerChains
"""Rows of a synthetic task."""


@dataclass(frozen=True)
class TrainData:
    """Rows to train on, rows to validate on, and the tokenizer that made them.

    folder: of the prepared text; None for a synthetic task.
    """

    train: RowSource
    valid: RowSource
    tokenizer: Tokenizer
    folder: Path | None


def open_data(recipe: Recipe, *, tokenizer: Tokenizer | None = None) -> TrainData:
    """Open (and, for a named corpus, prepare once) the data of a recipe.

    Args: tokenizer: of the model that the run starts from; None for that of train.init, if any.
    Raises: ValueError if the token ids are not the model's, or the text is too short to train or
    to validate on.
    """
    config, seed = recipe.data, recipe.train.seed
    if tokenizer is None:
        tokenizer = init_tokenizer(recipe)
    if config.task is not None:
        words = pointer_tokenizer() if config.task == "pointer_program" else tokenizer
        if words is None:
            raise ValueError(
                f"data.task='{config.task}' is written in a model's letters, so it needs train."
                "init: the model directory to start from."
            )
        rows = (task_rows(recipe, split=split, tokenizer=words) for split in ("train", "valid"))
        data = TrainData(*rows, words, None)
        prepared_with, closed_by = tokenizer_sha256(words), None
    else:
        folder = prepared_folder(recipe, tokenizer=tokenizer)
        shards = {split: TokenShards.open(folder, split) for split in ("train", "valid")}
        opener = tokenizer or Tokenizer.from_dir(folder)
        for split in shards.values():
            split.check_tokens()
        train, valid = (
            PackedText(
                shards[split],
                context=config.context,
                seed=seed if split == "train" else VALIDATION_SEED,
                isolate_documents=config.isolate_documents,
                opening_id=opener.opening_id,
            )
            for split in ("train", "valid")
        )
        data = TrainData(train, valid, opener, folder)
        prepared_with = shards["train"].meta["tokenizer_sha256"]
        closed_by = shards["train"].eos_id
        if tokenizer is None and prepared_with != tokenizer_sha256(data.tokenizer):
            raise ValueError(
                f"{folder}: its tokenizer.json is not the one that the token files were made with. "
                "Prepare the folder again."
            )
    _check_val_rows(recipe, data.valid)
    _check_ids(recipe, data, tokenizer, prepared_with=prepared_with, closed_by=closed_by)
    return data


def task_rows(
    recipe: Recipe, *, split: Literal["train", "valid"], tokenizer: Tokenizer
) -> TaskRows:
    """Rows of a recipe's synthetic task; those to validate on are the same for every run.

    Raises: ValueError if data.context is not the length of a row of chains, or `tokenizer` cannot
        spell them.
    """
    config = recipe.data
    seed = recipe.train.seed if split == "train" else VALIDATION_SEED
    if config.task == "pointer_program":
        return PointerPrograms(seed, context=config.context, split=split)
    assert config.num_chains is not None and config.chain_length is not None, "config checked this"
    chains = PointerChains(
        tokenizer,
        seed,
        num_chains=config.num_chains,
        chain_length=config.chain_length,
        split=split,
    )
    if config.context != chains.context:
        raise ValueError(
            f"data.context={config.context}, but {chains.row_words} are rows of {chains.context} "
            "tokens; set it to that."
        )
    return chains


def init_tokenizer(recipe: Recipe) -> Tokenizer | None:
    """The tokenizer of the model that a recipe starts from; None for new weights."""
    return None if recipe.train.init is None else Tokenizer.from_dir(recipe.train.init)


def prepared_folder(recipe: Recipe, *, tokenizer: Tokenizer | None) -> Path:
    """The prepared text that a recipe trains on.

    Args: tokenizer: of the model that the run starts from; None for new weights.
    """
    config = recipe.data
    if config.path is not None:
        return Path(config.path)
    assert config.corpus is not None, "config checked this"
    return prepare_corpus(
        config.corpus, config.cache_dir, vocab_size=config.tokenizer_vocab, tokenizer=tokenizer
    )


def held_out_documents(folder: Path, tokenizer: Tokenizer) -> list[TokenDocument]:
    """Validation documents of a prepared folder, closed as the model of `tokenizer` expects.

    What the publisher of an imported model trained at the end of a text is not known, so its
    documents are not closed.
    Raises: ValueError if the folder was prepared with another tokenizer.
    """
    shards = TokenShards.open(folder, "valid")
    if shards.meta["tokenizer_sha256"] != tokenizer_sha256(tokenizer):
        raise ValueError(
            f"{folder} was prepared with another tokenizer than this model's, so its token ids "
            "mean other text. Measure on the text files themselves."
        )
    documents = [
        document._replace(first_bytes=tokenizer.num_bytes(int(document.tokens_T[0])))
        for document in shards.documents()
    ]
    if tokenizer.closing_ids:
        return documents
    return [document._replace(tokens_T=document.tokens_T[:-1]) for document in documents]


def start_id(tokenizer: Tokenizer) -> int | None:
    """The token that every document is scored after; None where the model expects none.

    Raises: ValueError for a model that is none of documents, or opens them with several tokens.
    """
    if tokenizer.eos_id is None:
        raise ValueError(
            "this model's tokenizer has no end-of-text token, so it is not a model of documents. "
            "Text can be measured with a model that was trained on text."
        )
    return tokenizer.opening_id


def tokenizer_sha256(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that give equal ids."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def _check_val_rows(recipe: Recipe, rows: RowSource) -> None:
    """Raises ValueError for more rows than the validation split has: some would count twice."""
    wanted = recipe.train.val_rows
    if rows.epoch_tokens is None:
        return
    held_out = rows.epoch_tokens // rows.context
    if wanted > held_out:
        raise ValueError(
            f"train.val_rows={wanted}, but the validation split has {held_out} rows of "
            f"{rows.context} tokens ({rows.epoch_tokens:,} tokens). Set train.val_rows to at most "
            f"{held_out}, or prepare more text or a larger valid_frac."
        )


def _check_ids(
    recipe: Recipe,
    data: TrainData,
    tokenizer: Tokenizer | None,
    *,
    prepared_with: str,
    closed_by: int | None,
) -> None:
    """The ids of the data are ids of the model.

    Args: prepared_with: hash of the tokenizer; closed_by: token after each document, if any.
    """
    vocab_size, limit = data.tokenizer.vocab_size, recipe.model.vocab_size
    if tokenizer is None:
        if vocab_size != limit:
            raise ValueError(
                f"the tokenizer has {vocab_size} tokens, model.vocab_size is {limit}. Set "
                f"model.vocab_size to {vocab_size}."
            )
        return
    # Published models often have more rows than tokens, up to a round number.
    if vocab_size > limit:
        raise ValueError(
            f"the tokenizer of train.init={recipe.train.init} has {vocab_size} tokens, its model "
            f"{limit}; the folder is damaged."
        )
    if prepared_with != tokenizer_sha256(tokenizer):
        source = data.folder or f"task '{recipe.data.task}'"
        raise ValueError(
            f"{source} was made with another tokenizer than train.init={recipe.train.init}, so "
            f"its token ids mean other text. {_prepare_hint(recipe)}"
        )
    if closed_by is not None and closed_by != tokenizer.eos_id:
        raise ValueError(
            f"{data.folder} closes documents with token {closed_by}, the model in train.init="
            f"{recipe.train.init} with {tokenizer.eos_id}. {_prepare_hint(recipe)}"
        )


def _prepare_hint(recipe: Recipe) -> str:
    return f"Prepare the text with `depthdial prepare ... --tokenizer {recipe.train.init}`."
