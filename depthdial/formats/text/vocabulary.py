"""A tokenizer.json against itself, against the lists of tokens beside it, and against the model.

Which tokens open and end a text is read in `tokens.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from depthdial.data.tokenizer import TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer
from depthdial.formats.text.files import object_or_none

MOST_SHOWN = 5
"""Tokens that a message lists."""
ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
"""Before the list of a tokenizer.json; in a spelling, quotes would be escaped."""


def wrong_ids(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """Tokens listed with an id that tokenizer.json contradicts."""
    decoder = (object_or_none(folder / TOKENIZER_CONFIG_FILE) or {}).get("added_tokens_decoder")
    listed = [
        (TOKENIZER_CONFIG_FILE, value.get("content"), key)
        for key, value in (decoder if isinstance(decoder, dict) else {}).items()
        if isinstance(value, dict)
    ]
    added = object_or_none(folder / "added_tokens.json") or {}
    listed += [("added_tokens.json", token, str(token_id)) for token, token_id in added.items()]
    for where, token, stated in listed:
        # Compared by length first: the vocabulary's own ids have 32 bits.
        is_id = stated.isdecimal() and len(stated) < 10 and int(stated) < tokenizer.vocab_size
        own = tokenizer.token_of(int(stated)) if is_id else None
        if own != token:
            yield f"{where}: id {stated} is '{token}', but {TOKENIZER_FILE} has '{own}' there."
    for token, stated_id in _stated_added_tokens(folder / TOKENIZER_FILE):
        # The library gives an added token its id in the vocabulary, or else the next free one.
        if (used := tokenizer.token_id(token)) != stated_id:
            yield (
                f"{TOKENIZER_FILE}: 'added_tokens' states id {stated_id} for '{token}', but the "
                f"library that reads the file gives it {used}: the id in the vocabulary, or else "
                "the next free one."
            )


def _stated_added_tokens(path: Path) -> Iterator[tuple[str, int]]:
    """Spelling and id of each token in the file's 'added_tokens', as the file states them.

    The list alone is decoded: a vocabulary has millions of characters.
    """
    text = path.read_text(encoding="utf-8")
    found = ADDED_TOKENS.search(text)
    if found is not None:
        # The library has read the file, so that it is JSON and the list has its form.
        for token in json.JSONDecoder().raw_decode(text, found.end())[0]:
            yield token["content"], token["id"]


def check_vocabulary(path: Path, tokenizer: Tokenizer, vocab_size: int | None) -> None:
    """Every token has a row in the embedding. Raises: ValueError naming those that have none."""
    if vocab_size is None or tokenizer.vocab_size <= vocab_size:
        return
    beyond = tokenizer.tokens_from(vocab_size)
    shown = ", ".join(f"'{spelling}' ({token_id})" for token_id, spelling in beyond[:MOST_SHOWN])
    if len(beyond) > MOST_SHOWN:
        shown += f" and {len(beyond) - MOST_SHOWN:,} more"
    raise ValueError(
        f"{path} has tokens that the model does not embed: {shown}; it embeds {vocab_size:,} ids, "
        f"0 to {vocab_size - 1}. Take them out of the file (those that were added stand in "
        "'added_tokens'), give the model rows for them (transformers: "
        f"resize_token_embeddings({tokenizer.vocab_size}), then save_pretrained), or take "
        "tokenizer and weights from the same checkpoint."
    )


def check_template(path: Path, tokenizer: Tokenizer) -> None:
    """The template names each token by its own id: which of the two a model was trained with, no
    file says. Raises: ValueError."""
    where = "in 'post_processor' there"
    try:
        stated = tokenizer.template_tokens
    except ValueError as error:
        raise ValueError(f"{path}: {error} Define it {where}, or remove it.") from None
    for spelling, token_id in stated:
        own = tokenizer.token_of(token_id)
        if own == spelling:
            continue
        problem = "the vocabulary has no such id" if own is None else f"that id is '{own}'"
        try:
            known = f"'{spelling}' has id {tokenizer.token_id(spelling)}: write that {where}"
        except ValueError:
            known = f"The vocabulary has no '{spelling}': add it"
        raise ValueError(
            f"{path}: its template puts '{spelling}' with id {token_id} into every text, but "
            f"{problem}. {known}, or remove the token from 'post_processor'."
        )
