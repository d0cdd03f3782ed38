"""From a data config to training rows, validation rows and the tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from depthdial.config import Recipe
from depthdial.data.corpora import prepare_corpus
from depthdial.data.packing import PackedText, RowSource
from depthdial.data.shards import TokenShards
from depthdial.data.synthetic import PointerPrograms, pointer_tokenizer
from depthdial.data.tokenizer import Tokenizer

# Validation rows are the same for every run and seed, so that runs can be compared.
VALIDATION_SEED = 0


@dataclass(frozen=True)
class TrainData:
    """Rows to train on, rows to validate on, and the tokenizer that made them.

    folder: of the prepared text; None for a synthetic task.
    """

    train: RowSource
    valid: RowSource
    tokenizer: Tokenizer
    folder: Path | None


def open_data(recipe: Recipe) -> TrainData:
    """Open (and, for a named corpus, prepare once) the data of a recipe.

    Raises: ValueError if the tokenizer's vocabulary is not the model's, or the text is too short.
    """
    config, seed = recipe.data, recipe.train.seed
    if config.task is not None:
        train = PointerPrograms(seed, context=config.context, split="train")
        valid = PointerPrograms(VALIDATION_SEED, context=config.context, split="valid")
        data = TrainData(train, valid, pointer_tokenizer(), None)
    else:
        folder = prepared_folder(recipe)
        train, valid = (
            PackedText(
                TokenShards.open(folder, split),
                context=config.context,
                seed=seed if split == "train" else VALIDATION_SEED,
                isolate_documents=config.isolate_documents,
            )
            for split in ("train", "valid")
        )
        data = TrainData(train, valid, Tokenizer.from_dir(folder), folder)
        if train.vocab_size != data.tokenizer.vocab_size:
            raise ValueError(
                f"{folder}: the token files were made with {train.vocab_size} tokens, its "
                f"tokenizer.json has {data.tokenizer.vocab_size}. Prepare the folder again."
            )
    vocab_size = data.tokenizer.vocab_size
    if vocab_size != recipe.model.vocab_size:
        raise ValueError(
            f"the tokenizer has {vocab_size} tokens, model.vocab_size is "
            f"{recipe.model.vocab_size}. Set model.vocab_size to {vocab_size}."
        )
    return data


def prepared_folder(recipe: Recipe) -> Path:
    """The prepared text that a recipe trains on."""
    config = recipe.data
    if config.path is not None:
        return Path(config.path)
    assert config.corpus is not None and config.tokenizer_vocab is not None, "config checked this"
    return prepare_corpus(config.corpus, config.cache_dir, vocab_size=config.tokenizer_vocab)
