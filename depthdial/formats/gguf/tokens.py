"""The tokenizer inside a GGUF file, written as the files that published checkpoints have.

GGUF names how text is cut before merging (`tokenizer.ggml.pre`) without saying it; only names whose
rule is known here become a tokenizer. A tokenizer that cannot be read never stops the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from depthdial.config.text_files import dump_json
from depthdial.data.tokenizer import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from depthdial.formats.gguf.header import TOKENIZER_PREFIX
from depthdial.formats.text.tokens import ROLES, read_tokens
from depthdial.model.folder import TEMPLATE_KEY

MERGED_KIND = "gpt2"
SPLITS_DIGITS = {"gpt-2": False, "smollm": True}
"""Name of a rule -> whether each digit is a word of its own before byte-level merging."""
CONTROL, USER_DEFINED = 3, 4
GGML = TOKENIZER_PREFIX + "ggml."
STOP_ROLES = ("eos", "eot", "eom")
"""End of text, of a turn, of a message: each ends a generation, as in llama.cpp."""
ID_KEYS = {role: f"{GGML}{role}_token_id" for role in ("bos", *STOP_ROLES)} | {
    "pad": f"{GGML}padding_token_id"
}
"""Our name of a role -> the key of its id."""
NO_IDS = (-1, 2**32 - 1)
"""How a header spells that there is no such token: -1, also as a number without sign."""
TEMPLATE, TEMPLATE_NAMES = TOKENIZER_PREFIX + "chat_template", TOKENIZER_PREFIX + "chat_templates"
READ_KEYS = frozenset(
    {*ID_KEYS.values(), TEMPLATE}
    | {GGML + key for key in ("model", "pre", "tokens", "token_type", "merges")}
    | {GGML + key for key in ("add_bos_token", "add_eos_token", "add_space_prefix")}
)
"""Beside the further templates, `tokenizer.chat_template.NAME`."""
WITHOUT_EFFECT = frozenset(
    # Roles that no text of one piece meets: pairs of texts, gaps that are filled in, classes.
    {f"{GGML}{role}_token_id" for role in ("unknown", "seperator", "separator", "cls", "mask")}
    | {f"{GGML}fim_{role}_token_id" for role in ("pre", "suf", "mid", "pad", "rep", "sep")}
    | {f"{GGML}{role}_token_id" for role in ("prefix", "suffix", "middle")}
    | {GGML + "add_sep_token"}
    # Of other kinds of tokenizers; merging bytes uses neither.
    | {GGML + key for key in ("scores", "token_type_count", "remove_extra_whitespaces")}
    # The names of the further templates, whose keys have them, too.
    | {TEMPLATE_NAMES}
)
"""Keys that change nothing for one text that is cut by byte-level merging."""
MOST_SHOWN = 5
"""Keys that a sentence lists."""


def special_ids(values: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """The special ids as a config.json states them; a list where several tokens end a text.

    Ids that the model does not embed are left out; `write_tokenizer` names them.
    """
    ids = {
        role: values[key]
        for role, key in ID_KEYS.items()
        if key in values and _is_id(values[key], vocab_size)
    }
    stops = list(dict.fromkeys(ids[role] for role in STOP_ROLES if role in ids))
    stated = {f"{role}_token_id": ids[role] for role in ("bos", "pad") if role in ids}
    if stops:
        stated["eos_token_id"] = stops[0] if len(stops) == 1 else stops
    return stated


def write_tokenizer(values: Mapping[str, Any], folder: Path, *, vocab_size: int) -> tuple[str, ...]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json.

    A tokenizer that cannot be read, for whatever reason, is left out: the weights do not need it.

    Args: vocab_size: ids that the model embeds.
    Returns: sentences for people on what is left out.
    """
    notes = tuple(_strange_ids(values, vocab_size))
    ids = special_ids(values, vocab_size)
    if ids:
        (folder / GENERATION_CONFIG_FILE).write_text(dump_json(ids), encoding="utf-8")
    try:
        _write_text_files(values, folder, vocab_size=vocab_size)
        # What these files say is compared as that of any checkpoint; here nothing may stop it.
        read_tokens(folder, config={}, vocab_size=vocab_size)
    except ValueError as error:
        for name in (TOKENIZER_FILE, TOKENIZER_CONFIG_FILE):
            (folder / name).unlink(missing_ok=True)
        reason = str(error).replace(f"{folder}/", "")
        return (
            *notes,
            f"the tokenizer of this GGUF file is not read, so token ids work and text does not: "
            f"{reason} For text, add the model's {TOKENIZER_FILE} to the model folder.",
        )
    return notes


def _is_id(value: Any, vocab_size: int) -> bool:
    return type(value) is int and 0 <= value < vocab_size


def _strange_ids(values: Mapping[str, Any], vocab_size: int) -> Iterator[str]:
    for role, key in ID_KEYS.items():
        value = values.get(key)
        if value is not None and value not in NO_IDS and not _is_id(value, vocab_size):
            yield (
                f"the GGUF header gives the {role} token the id {value!r}, which is left out: the "
                f"model has {vocab_size} ids, 0 to {vocab_size - 1}."
            )


def _write_text_files(values: Mapping[str, Any], folder: Path, *, vocab_size: int) -> None:
    """tokenizer.json and tokenizer_config.json of a header.

    Raises: ValueError for keys or a kind that is not known here, or lists that contradict each
        other.
    """
    templates = _templates(values)
    known = READ_KEYS | WITHOUT_EFFECT | templates.keys()
    unknown = sorted(key for key in values if key.startswith(TOKENIZER_PREFIX) and key not in known)
    if unknown:
        more = f" and {len(unknown) - MOST_SHOWN} more" if len(unknown) > MOST_SHOWN else ""
        raise ValueError(
            f"{len(unknown)} of its keys have no known meaning: "
            f"{', '.join(unknown[:MOST_SHOWN])}{more}."
        )
    kind, pre = values.get(GGML + "model"), values.get(GGML + "pre")
    if kind != MERGED_KIND or pre not in SPLITS_DIGITS:
        raise ValueError(
            f"its kind (model {kind!r}, pre {pre!r}) is not known here; known: {MERGED_KIND!r} "
            f"with {', '.join(map(repr, SPLITS_DIGITS))}."
        )
    if _flag(values, "add_space_prefix"):
        raise ValueError("it puts a space before every text (add_space_prefix).")
    tokens = _texts(values, GGML + "tokens")
    spelled = {
        role: _token(tokens, values[key], role)
        for role, key in ID_KEYS.items()
        if key in values and _is_id(values[key], vocab_size)
    }
    opening, closing = (
        [_added(values, spelled, role)] if _flag(values, f"add_{role}_token") else []
        for role in ("bos", "eos")
    )
    backend = _merged_tokenizer(values, tokens, splits_digits=SPLITS_DIGITS[pre])
    if opening or closing:
        backend.post_processor = processors.TemplateProcessing(
            single=[*opening, "$A", *closing],
            special_tokens=[(token, tokens.index(token)) for token in {*opening, *closing}],
        )
    backend.save(str(folder / TOKENIZER_FILE))
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= {f"{role}_token": spelled[role] for role in ROLES if role in spelled}
    config["clean_up_tokenization_spaces"] = False
    if templates:
        named = [{"name": _template_name(key), "template": templates[key]} for key in templates]
        config[TEMPLATE_KEY] = templates[TEMPLATE] if templates.keys() == {TEMPLATE} else named
    (folder / TOKENIZER_CONFIG_FILE).write_text(dump_json(config), encoding="utf-8")


def _templates(values: Mapping[str, Any]) -> dict[str, str]:
    """Key -> chat template: the one for every talk, and those for a use such as `tool_use`.

    Raises: ValueError for one that is no text.
    """
    found = {
        key: value
        for key, value in values.items()
        if key == TEMPLATE or key.startswith(TEMPLATE + ".")
    }
    for key, value in found.items():
        if not isinstance(value, str):
            raise ValueError(f"{key} is no UTF-8 text.")
    return found


def _template_name(key: str) -> str:
    return key.removeprefix(TEMPLATE).removeprefix(".") or "default"


def _flag(values: Mapping[str, Any], name: str) -> bool:
    """A switch of the header, off where it is not there. Raises: ValueError for another value."""
    value = values.get(GGML + name, False)
    if type(value) is not bool:
        raise ValueError(f"{GGML}{name} is {value!r}; true or false are possible.")
    return value


def _added(values: Mapping[str, Any], spelled: Mapping[str, str], role: str) -> str:
    """The token that is put before or after every text."""
    if role not in spelled:
        raise ValueError(f"{GGML}add_{role}_token is true, and the header names no {role} token.")
    return spelled[role]


def _merged_tokenizer(
    values: Mapping[str, Any], tokens: Sequence[str], *, splits_digits: bool
) -> Tokenizer:
    """Byte-level BPE of the header's tokens and merges; control tokens are special."""
    kinds = values.get(GGML + "token_type")
    if not isinstance(kinds, list):
        raise ValueError(f"the header has no list '{GGML}token_type'.")
    merges = [tuple(merge.split(" ", 1)) for merge in _texts(values, GGML + "merges")]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    known = all(len(pair) == 2 and {*pair, "".join(pair)} <= vocab.keys() for pair in merges)
    if len(vocab) != len(tokens) or len(kinds) != len(tokens) or not known:
        raise ValueError(
            "it contradicts itself: "
            f"{len(tokens)} tokens, {len(vocab)} of them different, {len(kinds)} token types, "
            f"{len(merges)} merges of which {'all' if known else 'not all'} make known tokens."
        )
    try:
        backend = Tokenizer(models.BPE(vocab, merges))
    # `tokenizers` has one error type for everything, and it is Exception itself.
    except Exception as error:
        raise ValueError(f"`tokenizers` does not take its merges: {error}.") from None
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
        raise ValueError(f"the header has no list of UTF-8 texts '{key}'.")
    return texts


def _token(tokens: Sequence[str], token_id: Any, role: str) -> str:
    if not _is_id(token_id, len(tokens)):
        raise ValueError(
            f"the {role} token has the id {token_id!r}, and there are {len(tokens)} tokens."
        )
    return tokens[token_id]
