"""Which token ends a turn of a chat: the template is run on a short conversation.

Where no file names that token as a stop, replies would run on; `tokens.py` adds it. The template
runs in a process of its own, see `render_template.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from depthdial.data.tokenizer import Tokenizer

RENDERER = Path(__file__).with_name("render_template.py")
CPU_SECONDS, MAX_SECONDS = 5, 60
"""Of the processor and of the clock: a published template takes a tenth of a second, and the
machine may be busy."""
MAX_TEMPLATE = 2**20
"""Characters of the longest template that is run; published ones have under 30,000."""
QUESTION, ANSWER = "zqQuestion", "zqAnswer"
"""Contents of the two turns, spelled like nothing else in a template."""
ENDING = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
CONTINUED = [*ENDING, {"role": "user", "content": QUESTION}]
TOKEN_ROLES = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")


class TurnEnd(NamedTuple):
    """What a chat template says of the end of a turn.

    Fields: token_id: that ends it; None for none, or where the template cannot be run. problem: why
        it cannot, a part of a sentence; empty where it can.
    """

    token_id: int | None
    problem: str = ""


def turn_end(template: str, tokenizer: Tokenizer, config: Mapping[str, Any]) -> TurnEnd:
    """The token that follows the assistant's words in a conversation.

    It is the first special token after the last turn; where nothing follows that one, the token
    that opens the next turn, if it stands at once behind the words.

    Args: template: of the chat; config: the keys of tokenizer_config.json.
    """
    spellings = tokenizer.added_tokens
    if not any(token in template for token in spellings) and "_token" not in template:
        return TurnEnd(None)
    tokens = tuple(sorted(named_tokens(config).items()))
    rest, problem = _rendered(template, tokens)
    if problem:
        return TurnEnd(None, problem)
    ending, continued = rest
    found = _first(ending or "", spellings)
    if found is None:
        found = _first(continued or "", spellings)
        if found is not None and (continued or "").partition(found)[0].strip():
            found = None
    return TurnEnd(None if found is None else tokenizer.token_id(found))


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """What a template may call by name: `bos_token` and the like."""
    named = {}
    for role in TOKEN_ROLES:
        token = config.get(f"{role}_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            named[f"{role}_token"] = token
    return named


def _first(text: str, spellings: Sequence[str]) -> str | None:
    """The spelling that comes first in a text; the longest of those at one place."""
    places = [(text.find(token), -len(token), token) for token in spellings if token in text]
    return min(places)[2] if places else None


@lru_cache(maxsize=64)
def _rendered(
    template: str, tokens: tuple[tuple[str, str], ...]
) -> tuple[tuple[str | None, str | None], str]:
    """What follows the assistant's words in ENDING and in CONTINUED, or why nobody knows."""
    nothing = (None, None)
    if len(template) > MAX_TEMPLATE:
        return nothing, f"it has {len(template):,} characters, over {MAX_TEMPLATE:,}"
    request = {
        "template": template,
        "tokens": dict(tokens),
        "conversations": [ENDING, CONTINUED],
        "marker": ANSWER,
        "cpu_seconds": CPU_SECONDS,
    }
    try:
        done = subprocess.run(
            # -P: nothing beside the script can stand for a module of the library.
            [sys.executable, "-P", str(RENDERER)],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            encoding="utf-8",
            errors="replace",
            timeout=MAX_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            ending, continued = json.loads(done.stdout)
            return (ending, continued), ""
    except subprocess.TimeoutExpired:
        return nothing, f"it ran for {MAX_SECONDS} seconds"
    except (OSError, ValueError) as error:
        return nothing, f"Python could not be started for it ({error})"
    said = done.stderr.strip().splitlines()
    return nothing, (said[-1] if said else "it needed too much time or memory")[:200]
