"""The tokenizer inside a GGUF file, written as the files that published checkpoints have.

GGUF names how text is cut before merging (`tokenizer.ggml.pre`) without saying it; only names whose
rule is known here become a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from depthdial.config.text_files import dump_json
from depthdial.data.tokenizer import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from depthdial.formats.text.tokens import ROLES

PREFIX = "tokenizer."
MERGED_KIND = "gpt2"
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
"""Name of a rule -> whether each digit is a word of its own before byte-level merging."""
CONTROL, USER_DEFINED = 3, 4
GGUF_ROLES = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Our name of a role -> GGUF's."""
READ_KEYS = frozenset(
    {f"tokenizer.ggml.{role}_token_id" for role in (*GGUF_ROLES.values(), "unknown")}
    | {"tokenizer.ggml." + key for key in ("model", "pre", "tokens", "token_type", "merges")}
    | {"tokenizer.ggml." + key for key in ("add_bos_token", "add_eos_token", "add_space_prefix")}
    | {"tokenizer.chat_template"}
)
WITHOUT_EFFECT = frozenset({"tokenizer.ggml.scores"})
"""Keys that byte-level merging does not use."""


def special_ids(values: Mapping[str, Any]) -> dict[str, int]:
    """The special ids as a config.json states them."""
    keys = {
        f"{role}_token_id": f"tokenizer.ggml.{name}_token_id" for role, name in GGUF_ROLES.items()
    }
    return {ours: values[key] for ours, key in keys.items() if key in values}


def write_tokenizer(values: Mapping[str, Any], folder: Path) -> tuple[str, ...]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    Returns: sentences for people, where the header has a tokenizer that is not known here.
    Raises: ValueError for unknown keys, or lists that contradict each other.
    """
    unknown = sorted(
        key
        for key in values
        if key.startswith(PREFIX) and key not in READ_KEYS and key not in WITHOUT_EFFECT
    )
    if unknown:
        raise ValueError(
            f"{len(unknown)} keys of the GGUF tokenizer have no known meaning: "
            f"{', '.join(unknown)}."
        )
    ids = special_ids(values)
    if ids:
        (folder / GENERATION_CONFIG_FILE).write_text(dump_json(ids), encoding="utf-8")
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if (
        kind != MERGED_KIND
        or pre not in SPLITS_DIGITS
        or values.get("tokenizer.ggml.add_space_prefix")
    ):
        return (
            f"the tokenizer of this GGUF file (model {kind!r}, pre {pre!r}) is not known here; "
            f"known: {MERGED_KIND!r} with {', '.join(map(repr, SPLITS_DIGITS))}. Add the model's "
            f"{TOKENIZER_FILE} to the folder for text.",
        )
    backend = _merged_tokenizer(values, splits_digits=SPLITS_DIGITS[pre])
    tokens = values["tokenizer.ggml.tokens"]
    if values.get("tokenizer.ggml.add_bos_token") and "bos_token_id" in ids:
        bos = _token(tokens, ids["bos_token_id"], "bos")
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], special_tokens=[(bos, ids["bos_token_id"])]
        )
    backend.save(str(folder / TOKENIZER_FILE))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role in ROLES:
        token_id = ids.get(f"{role}_token_id")
        if token_id is not None:
            config[f"{role}_token"] = _token(tokens, token_id, role)
    config["clean_up_tokenization_spaces"] = False
    if "tokenizer.chat_template" in values:
        config["chat_template"] = values["tokenizer.chat_template"]
    (folder / TOKENIZER_CONFIG_FILE).write_text(dump_json(config), encoding="utf-8")
    return ()


def _merged_tokenizer(values: Mapping[str, Any], *, splits_digits: bool) -> Tokenizer:
    """Byte-level BPE of the header's tokens and merges; control tokens are special."""
    tokens = _texts(values, "tokenizer.ggml.tokens")
    kinds = values.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ", 1)) for merge in _texts(values, "tokenizer.ggml.merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    known = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys() for pair in merges)
    if len(vocab) != len(tokens) or len(kinds) != len(tokens) or not known:
        raise ValueError(
            "the tokenizer in the GGUF header contradicts itself: "
            f"{len(tokens)} tokens, {len(vocab)} of them different, {len(kinds)} token types, "
            f"{len(merges)} merges of which {'all' if known else 'not all'} make known tokens."
        )
    backend = Tokenizer(models.BPE(vocab, merges))
    # Digits first: whitespace before a digit is then a word of its own.
    words = [pre_tokenizers.Digits(individual_digits=True)] if splits_digits else []
    words.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.pre_tokenizer = pre_tokenizers.Sequence(words)
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, kinds, strict=True))
    backend.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True)
            for token, kind in typed
            if kind == CONTROL
        ]
    )
    backend.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in typed if kind == USER_DEFINED]
    )
    return backend


def _texts(values: Mapping[str, Any], key: str) -> list[str]:
    texts = values.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"the GGUF header has no list of texts '{key}'; the file is damaged.")
    return texts


def _token(tokens: Sequence[str], token_id: Any, role: str) -> str:
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ValueError(
            f"the GGUF header gives the {role} token the id {token_id!r}; there are "
            f"{len(tokens)} tokens."
        )
    return tokens[token_id]
