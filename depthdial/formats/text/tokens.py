"""Tokenizer files, special tokens, chat template and generation config of a checkpoint.

They are carried over unchanged, except that a model folder of ours always states which tokens end
a text (`generation_config.json`) and which open one (`tokenizer_config.json`); what an import
changes for that, an export gives back. All statements about special tokens are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from depthdial.config.text_files import dump_json
from depthdial.data.tokenizer import (
    GENERATION_CONFIG_FILE,
    OPENING_KEY,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    Tokenizer,
    id_list,
)
from depthdial.disk import named_in_errors
from depthdial.formats.reasons import MOST_SHOWN
from depthdial.formats.text.files import (
    chat_templates,
    object_or_none,
    other_templates,
)
from depthdial.formats.text.turns import named_tokens, turn_end
from depthdial.formats.text.vocabulary import check_template, check_vocabulary, wrong_ids
from depthdial.model.folder import (
    Origin,
    carried_files,
    copy_files,
    is_other_tokenizer,
)

MAX_TOKENIZER_BYTES = 256 * 2**20
ROLES = ("bos", "eos", "pad")
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
NO_ID = -1
"""How some old configs spell that there is no padding or opening token."""
SPECIAL_ROLES = (*ROLES, "unk", "sep", "cls", "mask")


class Statement(NamedTuple):
    """One file's word on the ids of one role: `eos`, `bos` or `pad`."""

    where: str
    role: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenReport:
    """What an import found out about text.

    Fields:
        has_tokenizer: text works, not only ids.
        stop_ids, opening_ids: as in `Tokenizer`.
        added_stop: the token of `stop_ids` that ends a turn of the chat template and that no file
            names as a stop, by its spelling; None for none.
        template_in: file that holds the chat template; None for none.
        notes, warnings: sentences for people.
        changed_files: file -> the source's content, null where the source had none.
    """

    has_tokenizer: bool
    stop_ids: tuple[int, ...]
    opening_ids: tuple[int, ...]
    added_stop: str | None
    template_in: str | None
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    changed_files: Mapping[str, dict[str, Any] | None]


def import_tokens(
    source: Path, destination: Path, *, config: Mapping[str, Any], facts: TokenReport
) -> TokenReport:
    """Carry the files over and make the folder state its stop and opening tokens.

    Args: config: the source's config.json; facts: what `read_tokens` found in the source.
    Raises: ValueError for a damaged file.
    """
    copy_files(source, destination)
    changed: dict[str, dict[str, Any] | None] = {}
    generation = object_or_none(source / GENERATION_CONFIG_FILE)
    if set(id_list((generation or {}).get("eos_token_id"), "")) != set(facts.stop_ids):
        changed[GENERATION_CONFIG_FILE] = generation
        stated = generation or _token_ids(config)
        only_one = len(facts.stop_ids) == 1
        ids = facts.stop_ids[0] if only_one else list(facts.stop_ids)
        text = dump_json({**stated, "eos_token_id": ids})
        (destination / GENERATION_CONFIG_FILE).write_text(text, encoding="utf-8")
    if facts.has_tokenizer:
        tokenizer = Tokenizer.from_file(source / TOKENIZER_FILE)
        original = object_or_none(source / TOKENIZER_CONFIG_FILE)
        changed[TOKENIZER_CONFIG_FILE] = original
        values = dict(original or {"tokenizer_class": "PreTrainedTokenizerFast"})
        if values.get("eos_token") is None and facts.stop_ids:
            values["eos_token"] = tokenizer.token_of(facts.stop_ids[0])
        values[OPENING_KEY] = [tokenizer.token_of(token_id) for token_id in facts.opening_ids]
        (destination / TOKENIZER_CONFIG_FILE).write_text(dump_json(values), encoding="utf-8")
        # The folder must open again with the tokenizer that every tool uses.
        with named_in_errors(destination, source):
            Tokenizer.from_dir(destination)
    return TokenReport(**{**vars(facts), "changed_files": changed})


def read_tokens(
    folder: Path,
    *,
    config: Mapping[str, Any],
    vocab_size: int | None,
    changed_files: Mapping[str, dict[str, Any] | None] | None = None,
) -> TokenReport:
    """Everything that a folder states about special tokens, compared.

    Args:
        config: the source's config.json. vocab_size: of the model, None where it is not known.
        changed_files: what stands in the place of files of the folder, as in `TokenReport`: with
            those of an import, the folder that it made says what the source said.

    Raises: ValueError for a damaged file, or a token whose id the model does not have.
    """
    tokenizer, notes = _tokenizer_of(folder)
    files = {
        name: object_or_none(folder / name)
        for name in (GENERATION_CONFIG_FILE, TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE)
    }
    files |= changed_files or {}
    tokenizer_config = files[TOKENIZER_CONFIG_FILE] or {}
    statements = list(_id_statements(files[GENERATION_CONFIG_FILE], config, notes))
    warnings: list[str] = []
    opening_ids: tuple[int, ...] = ()
    if tokenizer is not None:
        check_vocabulary(folder / TOKENIZER_FILE, tokenizer, vocab_size)
        check_template(folder / TOKENIZER_FILE, tokenizer)
        statements += _token_statements(folder, files, tokenizer, warnings)
        contradictions = list(wrong_ids(folder, tokenizer))
        warnings += contradictions[:MOST_SHOWN]
        if len(contradictions) > MOST_SHOWN:
            warnings.append(f"{len(contradictions) - MOST_SHOWN:,} more such ids contradict.")
        warnings += _opening_contradiction(tokenizer, tokenizer_config)
        opening_ids = tokenizer.template_ids
    for statement in statements:
        _check_range(statement, vocab_size)
    for role in ROLES:
        warnings += _contradictions([s for s in statements if s.role == role])
    stop_ids = tuple(dict.fromkeys(i for s in statements if s.role == "eos" for i in s.ids))
    templates = chat_templates(folder)
    warnings += other_templates(templates)
    added_stop = None
    if templates and tokenizer is not None:
        added_stop, problem = _unnamed_turn_end(
            templates[0].text, tokenizer, tokenizer_config, stop_ids
        )
        warnings += problem
    if added_stop is not None:
        stop_ids += (tokenizer.token_id(added_stop),)
        notes.append(
            f"{templates[0].where} ends a turn with '{added_stop}', which no file names as a stop: "
            "generation stops there, too."
        )
    if not stop_ids:
        warnings.append("no file names an end-of-text token, so generation runs to its limit.")
    return TokenReport(
        has_tokenizer=tokenizer is not None,
        stop_ids=stop_ids,
        opening_ids=opening_ids,
        added_stop=added_stop,
        template_in=templates[0].where if templates else None,
        notes=tuple(notes),
        warnings=tuple(warnings),
        changed_files={},
    )


def published_tokens(folder: Path, origin: Origin | None) -> TokenReport:
    """What the files that a model folder came from say of tokens: its own files, and for an
    imported model those of its source in place of the ones that the import changed.

    Raises: ValueError for a damaged file.
    """
    return read_tokens(
        folder,
        config={} if origin is None else origin.config,
        vocab_size=None,
        changed_files=None if origin is None else origin.changed_files,
    )


def export_tokens(
    folder: Path, destination: Path, *, changed_files: Mapping[str, dict[str, Any] | None] | None
) -> None:
    """Carry the files over as other tools expect them.

    Args: changed_files: of the import that the model came from, given back; None for a model that
        was not imported, whose opening token is then stated in transformers' words.
    """
    copy_files(folder, destination)
    for name, values in (changed_files or {}).items():
        if values is None:
            (destination / name).unlink(missing_ok=True)
        else:
            (destination / name).write_text(dump_json(values), encoding="utf-8")
    config = object_or_none(destination / TOKENIZER_CONFIG_FILE)
    if changed_files is not None or config is None:
        return
    if OPENING_KEY in config:
        # Of an imported model: the publisher's own keys still say it.
        del config[OPENING_KEY]
    elif config.get("eos_token") is not None:
        token = config["eos_token"]
        config["bos_token"] = token
        Tokenizer.from_dir(destination).save_opened_by(
            token["content"] if isinstance(token, dict) else token, destination / TOKENIZER_FILE
        )
    (destination / TOKENIZER_CONFIG_FILE).write_text(dump_json(config), encoding="utf-8")


def _tokenizer_of(folder: Path) -> tuple[Tokenizer | None, list[str]]:
    path = folder / TOKENIZER_FILE
    if path.is_file():
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(
                f"{path} has {path.stat().st_size:,} bytes; a tokenizer has at most "
                f"{MAX_TOKENIZER_BYTES:,}. It is damaged."
            )
        return Tokenizer.from_file(path), []
    others = [name for name in carried_files(folder) if is_other_tokenizer(name)]
    why = f"only {', '.join(others)}" if others else "no tokenizer files"
    todo = (
        f"Make a {TOKENIZER_FILE} with transformers (AutoTokenizer.from_pretrained(...), then "
        "save_pretrained) and import again."
        if others
        else "Add them to the source and import again for text."
    )
    return None, [f"{folder.name} has {why}: token ids work, text does not. {todo}"]


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    """The special ids that a config.json states, as a generation config states them."""
    keys = [f"{role}_token_id" for role in ROLES]
    return {key: config[key] for key in keys if config.get(key) not in (None, NO_ID)}


def _id_statements(
    generation: Mapping[str, Any] | None, config: Mapping[str, Any], notes: list[str]
) -> Iterator[Statement]:
    """Ids stated as numbers: config.json, its groups, generation_config.json."""
    groups = [("config.json", config)]
    groups += [
        (f"config.json, {key}", value) for key, value in config.items() if isinstance(value, dict)
    ]
    if generation is not None:
        groups.append((GENERATION_CONFIG_FILE, generation))
    for where, values in groups:
        for role in ROLES:
            value = values.get(f"{role}_token_id")
            if value == NO_ID and role != "eos":
                notes.append(f"{where}: {role}_token_id {NO_ID} is read as no {role} token.")
                continue
            ids = id_list(value, f"{where}: {role}_token_id")
            if ids:
                yield Statement(where, role, ids)


def _token_statements(
    folder: Path,
    files: Mapping[str, dict[str, Any] | None],
    tokenizer: Tokenizer,
    warnings: list[str],
) -> Iterator[Statement]:
    """Tokens stated by their spelling: tokenizer_config.json, special_tokens_map.json.

    Raises: ValueError for an end-of-text token that the vocabulary lacks.
    """
    for name in (TOKENIZER_CONFIG_FILE, SPECIAL_TOKENS_FILE):
        values = files[name] or {}
        for role in SPECIAL_ROLES:
            token = values.get(f"{role}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if not isinstance(token, str):
                continue
            try:
                token_id = tokenizer.token_id(token)
            except ValueError as error:
                if role == "eos":
                    raise ValueError(f"{folder / name}, eos_token: {error}") from None
                warnings.append(f"{name}: {role}_token '{token}' is not in {TOKENIZER_FILE}.")
                continue
            yield Statement(name, role, (token_id,))


def _opening_contradiction(
    tokenizer: Tokenizer, tokenizer_config: Mapping[str, Any]
) -> Iterator[str]:
    """An add_bos_token that the template in tokenizer.json contradicts.

    The template decides, as in transformers.
    """
    stated, opens = tokenizer_config.get("add_bos_token"), bool(tokenizer.template_ids)
    if isinstance(stated, bool) and stated != opens:
        yield (
            f"{TOKENIZER_CONFIG_FILE} has add_bos_token={str(stated).lower()}, but the template in "
            f"{TOKENIZER_FILE} puts {'a token' if opens else 'nothing'} before a text, and decides."
        )


def _check_range(statement: Statement, vocab_size: int | None) -> None:
    if vocab_size is None:
        return
    beyond = [token_id for token_id in statement.ids if token_id >= vocab_size]
    if beyond:
        raise ValueError(
            f"{statement.where}: the {statement.role} token has id {beyond[0]}, but the model has "
            f"{vocab_size} ids, 0 to {vocab_size - 1}. Correct the id, or take all files from "
            "the same checkpoint."
        )


def _contradictions(statements: list[Statement]) -> Iterator[str]:
    """Statements on one role that share no id with the first one."""
    for other in statements[1:]:
        first = statements[0]
        if not set(first.ids) & set(other.ids):
            yield (
                f"the {first.role} token is {_shown(first.ids)} in {first.where} and "
                f"{_shown(other.ids)} in {other.where}."
            )


def _shown(ids: tuple[int, ...]) -> str:
    return " or ".join(map(str, ids))


def _unnamed_turn_end(
    template: str,
    tokenizer: Tokenizer,
    tokenizer_config: Mapping[str, Any],
    stop_ids: tuple[int, ...],
) -> tuple[str | None, list[str]]:
    """The token that ends a turn where it is no stop, and a warning where nobody knows whether a
    turn ends: replies would then run on."""
    named = named_tokens(tokenizer_config).items()
    spelled = [token for token in tokenizer.added_tokens if token in template]
    spelled += [token for name, token in named if name in template and name != "bos_token"]
    stops = {tokenizer.token_of(token_id) for token_id in stop_ids}
    if stops.issuperset(spelled):
        return None, []
    found = turn_end(template, tokenizer, tokenizer_config)
    if found.token_id is not None:
        is_named = found.token_id in stop_ids
        return None if is_named else tokenizer.token_of(found.token_id), []
    if stops & set(spelled) or "eos_token" in template:
        return None, []
    why = f" (it cannot be run: {found.problem})" if found.problem else ""
    return None, [
        f"the chat template writes {', '.join(spelled[:5])}, but generation stops at "
        f"{', '.join(sorted(map(str, stops))) or 'nothing'}, and which token ends a turn is not "
        f"known{why}: replies may not end."
    ]
