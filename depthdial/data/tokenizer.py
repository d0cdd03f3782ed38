"""Text to token ids and back: a thin wrapper over `tokenizers`, and byte-level BPE training.

Here live loading, saving and training of tokenizers. Documents and files of
text are in `text.py`; chat templates are not known here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import Encoding, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from depthdial.config.text import parse_json
from depthdial.data.long_text import WINDOW_CHARS, encode_parts
from depthdial.data.tokenizer_limits import (
    check_growth,
    has_patterns,
    panics_as_errors,
    part_values,
    within_time,
)

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
OPENING_KEY = "opening_tokens"
"""Key of tokenizer_config.json: the tokens that open every text, for a model that was trained by
others. Without it a document opens and closes with the end-of-text token: our own convention."""
MIN_BPE_VOCAB = 257
"""256 bytes and the end-of-text token: the smallest vocabulary that can spell any text."""
CUT_CHARACTER = "\ufffd"
"""What decoding shows for bytes that are no whole character."""
PIECE_CHARS = 2048
"""Longest word that BPE training sees: its cost grows with the square of a word's length."""


class Tokenizer:
    """One tokenizer.json with the name of its end-of-text token.

    Attributes:
        eos_token, eos_id: the end-of-text token; None where there is none.
        stop_ids: tokens that end a generated text: `eos_id` and those of generation_config.json.
        opening_ids: what the model expects before every document, wherever one begins: in training
            rows, sweeps, scoring and generation. This is the one rule; all of them read it here.
        closing_ids: what follows a whole document where its loss is measured.

    `encode` reads text literally: a special token spelled out in a document does
    not become that token, so no document can forge the end of another.
    """

    def __init__(self, backend: Backend, *, eos_token: str | None = END_OF_TEXT) -> None:
        """Take over `backend` (its truncation and padding are switched off).

        Raises: ValueError if `eos_token` is given and not in the vocabulary.
        """
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        self._has_patterns = has_patterns(backend)
        self._config: dict[str, Any] = {}
        self.eos_token = eos_token
        # Some published vocabularies have gaps, so the largest id decides, not the count.
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_id: int | None = None
        if eos_token is not None:
            self.eos_id = self.token_id(eos_token)
        own_convention = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids = self.opening_ids = self.closing_ids = own_convention
        self._generation: dict[str, Any] | None = None

    @property
    def opening_id(self) -> int | None:
        """The one token that opens a document; None for a model that expects none.

        Raises: ValueError for a model that opens documents with several tokens.
        """
        if len(self.opening_ids) > 1:
            raise ValueError(
                f"this model opens documents with {len(self.opening_ids)} tokens; training rows "
                "and sweeps are made for models that open them with one or none."
            )
        return self.opening_ids[0] if self.opening_ids else None

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read a tokenizer.json; without `<|endoftext|>` in it, `eos_id` is None.

        Raises: FileNotFoundError, or ValueError if the file is not a tokenizer.
        """
        backend = _read_backend(Path(path))
        known = backend.token_to_id(END_OF_TEXT) is not None
        return cls(backend, eos_token=END_OF_TEXT if known else None)

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """Read tokenizer.json and what tokenizer_config.json and generation_config.json, where
        present, say of the tokens that open and end a text.

        Raises: FileNotFoundError, or ValueError if a file is damaged or names a token that the
        vocabulary lacks.
        """
        directory = Path(directory)
        config_path = directory / TOKENIZER_CONFIG_FILE
        if config_path.is_file():
            tokenizer = cls._from_config(directory / TOKENIZER_FILE, config_path)
        else:
            tokenizer = cls.from_file(directory / TOKENIZER_FILE)
        generation_path = directory / GENERATION_CONFIG_FILE
        if generation_path.is_file():
            tokenizer._generation = _read_config(generation_path)
            stated = id_list(tokenizer._generation.get("eos_token_id"), str(generation_path))
            tokenizer.stop_ids = tuple(dict.fromkeys((*tokenizer.stop_ids, *stated)))
        return tokenizer

    @classmethod
    def _from_config(cls, path: Path, config_path: Path) -> Tokenizer:
        """A tokenizer.json with the tokens that its tokenizer_config.json names."""
        config = _read_config(config_path)
        eos_token = config.get("eos_token")
        if isinstance(eos_token, dict):
            eos_token = eos_token.get("content")
        if not isinstance(eos_token, str | None):
            raise ValueError(f"{config_path}: eos_token is {eos_token!r}; expected a token's text.")
        backend = _read_backend(path)
        try:
            tokenizer = cls(backend, eos_token=eos_token)
        except ValueError as error:
            raise ValueError(f"{config_path}, eos_token: {error}") from None
        tokenizer._config = config
        if OPENING_KEY in config:
            opening = config[OPENING_KEY]
            if not isinstance(opening, list) or not all(isinstance(x, str) for x in opening):
                raise ValueError(f"{config_path}: {OPENING_KEY} is {opening!r}; expected a list.")
            try:
                tokenizer.opening_ids = tuple(map(tokenizer.token_id, opening))
            except ValueError as error:
                raise ValueError(f"{config_path}, {OPENING_KEY}: {error}") from None
            tokenizer.closing_ids = ()
        return tokenizer

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and a tokenizer_config.json that AutoTokenizer can load.

        Keys of a tokenizer_config.json this tokenizer was loaded with are kept, and so is its
        generation_config.json.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        config.setdefault("clean_up_tokenization_spaces", False)
        if self.eos_token is not None:
            config.setdefault("eos_token", self.eos_token)
        (directory / TOKENIZER_FILE).write_text(self.to_json(), encoding="utf-8")
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        (directory / TOKENIZER_CONFIG_FILE).write_text(text, encoding="utf-8")
        if self._generation is not None:
            text = json.dumps(self._generation, indent=2, ensure_ascii=False) + "\n"
            (directory / GENERATION_CONFIG_FILE).write_text(text, encoding="utf-8")

    def save_opened_by(self, token: str, path: Path) -> None:
        """Write a tokenizer.json for tools that open every text by its template, with `token`."""
        backend = Backend.from_str(self.to_json())
        backend.post_processor = processors.TemplateProcessing(
            single=[token, "$A"],
            pair=[token, "$A", "$B:1"],
            special_tokens=[(token, self.token_id(token))],
        )
        path.write_text(backend.to_str(pretty=True), encoding="utf-8")

    def to_json(self) -> str:
        """The text of tokenizer.json."""
        return self._backend.to_str(pretty=True)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; adds nothing before or after.

        Raises: ValueError if the vocabulary cannot spell the text.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, in order; see `encode`. Long texts take no more memory."""
        whole = iter(self._encode([text for text in texts if len(text) <= WINDOW_CHARS]))
        return [
            next(whole) if len(text) <= WINDOW_CHARS else [*chain(*self.encode_parts([text]))]
            for text in texts
        ]

    def encode_parts(self, parts: Iterable[str]) -> Iterator[Sequence[int]]:
        """Token ids of one text that comes in parts; the same as of the whole, some at a time."""
        return encode_parts(lambda text: self._encode([text])[0], parts)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        def run() -> list[Encoding]:
            return self._backend.encode_batch_fast(texts, add_special_tokens=False)

        try:
            with panics_as_errors():
                # A thread for each call would cost our own tokenizers more than the call.
                is_limited = self._has_patterns
                encodings = within_time(run, sum(map(len, texts))) if is_limited else run()
        # `tokenizers` has one error type for everything, and it is Exception itself.
        except Exception as error:
            shown = [text[:60] for text in texts[:3]]
            raise ValueError(
                f"this tokenizer of {self.vocab_size} tokens cannot encode {shown}: {error}. "
                "Use only words of its vocabulary and valid Unicode."
            ) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out.

        Raises: ValueError for an id outside the vocabulary.
        """
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"token id {token} is outside the {self.vocab_size} known ids.")
        with panics_as_errors():
            return self._backend.decode(list(ids), skip_special_tokens=True)

    def num_bytes(self, token_id: int) -> int:
        """UTF-8 bytes of the text that this token alone spells; 0 for one that is no text."""
        text = self._backend.decode([token_id], skip_special_tokens=True)
        if CUT_CHARACTER not in text:
            return len(text.encode("utf-8"))
        # A part of a character: spelled <0xNN> as one byte, or with one character for each byte.
        spelling = self._backend.id_to_token(token_id)
        return 1 if spelling.startswith("<0x") else len(spelling)

    @property
    def template_ids(self) -> tuple[int, ...]:
        """Tokens that the file's own template puts before a text; `encode` leaves them out.

        Raises: as `template_tokens`.
        """
        template = part_values(self._backend.post_processor)
        # A token that is used is defined.
        list(_stated_tokens(template))
        return _opening_ids(template, ())

    @property
    def template_tokens(self) -> tuple[tuple[str, int], ...]:
        """Spelling and id of each token that the file's own template adds, as the template states
        them; the vocabulary may contradict it.

        Raises: ValueError for a token that the template uses and does not define.
        """
        return tuple(_stated_tokens(part_values(self._backend.post_processor)))

    @property
    def special_tokens(self) -> tuple[str, ...]:
        """Spellings of the tokens that are no text, by id."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(added[i].content for i in sorted(added) if added[i].special)

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Spellings of the tokens that are one piece wherever they stand, by id: `special_tokens`
        and others."""
        added = self._backend.get_added_tokens_decoder()
        return tuple(added[i].content for i in sorted(added))

    def tokens_from(self, token_id: int) -> list[tuple[int, str]]:
        """Id and spelling of every token from an id on, by id; vocabularies have gaps."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return sorted((i, token) for token, i in vocabulary.items() if i >= token_id)

    def token_of(self, token_id: int) -> str | None:
        """Spelling of one id; None for an id without token."""
        return self._backend.id_to_token(token_id)

    def token_id(self, token: str) -> int:
        """Id of one token by its exact spelling. Raises ValueError if there is none."""
        token_id = self._backend.token_to_id(token)
        if token_id is None:
            raise ValueError(f"token '{token}' is not among the {self.vocab_size} known tokens.")
        return token_id


def _opening_ids(template: dict[str, Any], after: tuple[int, ...]) -> tuple[int, ...]:
    """Ids before a text in one post-processor of a tokenizer.json, and those that earlier ones put
    there. No text is cut for it: the patterns of a file from elsewhere may be slow.
    """
    for inner in template.get("processors", ()):
        after = _opening_ids(inner, after)
    if "cls" in template:
        return (template["cls"][1], *after)
    before: list[int] = []
    for piece in template.get("single", ()):
        if "Sequence" in piece:
            return (*before, *after)
        before += template["special_tokens"][piece["SpecialToken"]["id"]]["ids"]
    return after


def _stated_tokens(template: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Spellings and ids in one post-processor of a tokenizer.json, by the format's kinds."""
    for inner in template.get("processors", ()):
        yield from _stated_tokens(inner)
    for role in ("cls", "sep"):
        if role in template:
            spelling, token_id = template[role]
            yield spelling, token_id
    defined = template.get("special_tokens", {})
    for piece in (*template.get("single", ()), *template.get("pair", ())):
        name = piece.get("SpecialToken", {}).get("id")
        if name is not None and name not in defined:
            raise ValueError(f"the template uses '{name}' and does not define it.")
    for token in defined.values():
        yield from zip(token["tokens"], token["ids"], strict=True)


def id_list(value: Any, where: str) -> tuple[int, ...]:
    """Token ids that a config states as one number, a list or null.

    Raises: ValueError naming `where` for anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"{where} states {value!r}; a token id is a whole number of at least 0.")
    return tuple(ids)


def train_bpe(
    texts: Iterable[str | Iterable[str]], vocab_size: int, *, allow_fewer: bool = False
) -> Tokenizer:
    """Train byte-level BPE; equal texts give an equal tokenizer.

    Args:
        texts: training text, read once; each a string, or the parts of one in order. Runs of over
            PIECE_CHARS characters without a space or line break are learned from in parts.
        vocab_size: number of tokens with the 256 bytes and `<|endoftext|>` (id 0); >= 257.
        allow_fewer: accept a smaller vocabulary when the text has too few pairs to merge.

    Raises: ValueError for vocab_size < 257, or if the text supports fewer tokens
        than asked and `allow_fewer` is false.
    """
    if vocab_size < MIN_BPE_VOCAB:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: byte-level BPE needs at least "
            f"{MIN_BPE_VOCAB} tokens (256 bytes and '{END_OF_TEXT}')."
        )
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((part for text in texts for part in _in_pieces(text)), trainer)
    tokenizer = Tokenizer(backend)
    if tokenizer.vocab_size < vocab_size and not allow_fewer:
        raise ValueError(
            f"vocab_size={vocab_size} was asked for, but the text supports only "
            f"{tokenizer.vocab_size} tokens. Give more text or ask for at most that many."
        )
    return tokenizer


def _read_backend(path: Path) -> Backend:
    """The `tokenizers` object in a tokenizer.json."""
    if not path.is_file():
        raise FileNotFoundError(
            f"no tokenizer at {path}; expected a {TOKENIZER_FILE}. A model without one works on "
            "token ids only: `load_model` and `engine.generate`."
        )
    text = _read_utf8(path)
    try:
        with panics_as_errors():
            backend = Backend.from_str(text)
    except Exception as error:
        raise ValueError(f"{path} is not a tokenizer that `tokenizers` can read: {error}") from None
    try:
        check_growth(backend)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if backend.get_vocab_size(with_added_tokens=True) == 0:
        raise ValueError(f"{path} has no token at all. Take the tokenizer of a whole checkpoint.")
    return backend


def _read_config(path: Path) -> dict[str, Any]:
    """The keys of a tokenizer_config.json."""
    text = _read_utf8(path)
    try:
        config = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(config).__name__}.")
    return config


def _read_utf8(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is damaged: no UTF-8 text (byte {error.object[error.start]:#x} at "
            f"{error.start}). Copy it again."
        ) from None


def _in_pieces(text: str | Iterable[str]) -> Iterator[str]:
    """The text, or the parts of one, in pieces of at most PIECE_CHARS, each but the first opened by
    a word and the space or line break before it: the words are those of the whole text.

    Where so many characters hold no such place, they are cut anywhere.
    """
    rest = ""
    for part in [text] if isinstance(text, str) else text:
        rest += part
        start = 0
        while len(rest) - start > PIECE_CHARS:
            end = start + PIECE_CHARS
            places = (
                place
                for place in range(end - 1, start, -1)
                if rest[place] in " \n" and not rest[place + 1].isspace()
            )
            end = next(places, end)
            yield rest[start:end]
            start = end
        rest = rest[start:]
    yield rest
