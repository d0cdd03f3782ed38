"""A published config.json that counts which of its keys were read.

What the keys of a family mean is in `families/`; reading files is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthdial.config import nearest_name
from depthdial.config.limits import MAX_CONTEXT, MAX_LOOPS, MAX_SUBLAYERS, shortened
from depthdial.formats.reasons import MOST_SHOWN, Reasons

WITHOUT_EFFECT = (
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_attn_implementation_internal",
    "_commit_hash",
    "_flash_attn_2_enabled",
    "_from_model_config",
    "_name_or_path",
    "architectures",
    "attn_implementation",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "gradient_checkpointing",
    "initializer_range",
    "is_llama_config",
    "max_sequence_length",
    "model_type",
    "pad_token_id",
    "pretraining_tp",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "trust_remote_code",
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
)
"""Keys of published configs that do not change the function computed by the weights: names of
classes and versions, storage dtype, initial values, implementations of one product, ids of special
tokens (read with the tokenizer), the first Llama's `max_sequence_length`, which no code reads. A
family may read them all the same."""
LIBRARY_DEFAULTS = (
    "add_cross_attention",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "cross_attention_hidden_size",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "id2label",
    "is_decoder",
    "is_encoder_decoder",
    "label2id",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torchscript",
    "typical_p",
    "use_bfloat16",
)
"""Keys that transformers 4 and 5 write into every config that is dumped whole: outputs of a call,
defaults of its text generation (read with the generation config), labels of other tasks. A decoder
of the families here reads none of them."""
EMPTY_DEFAULTS = ("pruned_heads",)
"""Keys of such a dump that have no effect while they are empty."""

MAX_LAYERS = MAX_SUBLAYERS // 2
"""A published layer is two sublayers of ours."""


class SourceConfig:
    """A dictionary of plain JSON values; every key must be read, and reading is by name.

    WITHOUT_EFFECT, LIBRARY_DEFAULTS and empty EMPTY_DEFAULTS count as read.

    Args: values: the dictionary; where: dotted prefix of its keys in messages; called: what it is
        called there; reasons: notes refused values, and reading goes on as if they were allowed,
        so that one reading finds all of them. None: the first one raises.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "",
        *,
        called: str = "the source config",
        reasons: Reasons | None = None,
    ) -> None:
        self._values = values
        self._where = where
        self.called = called
        self._reasons = reasons
        self._read = {*WITHOUT_EFFECT, *LIBRARY_DEFAULTS}
        self._read.update(key for key in EMPTY_DEFAULTS if not values.get(key))
        self._sections: list[SourceConfig] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def is_empty(self) -> bool:
        """Whether it has no key at all."""
        return not self._values

    def refuse(self, message: str) -> None:
        """Note a refused value. Raises: ValueError where nobody collects them."""
        if self._reasons is None:
            raise ValueError(message)
        self._reasons.add(message)

    def take(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent."""
        self._read.add(key)
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        """The value. Raises: ValueError where the key is absent."""
        self._read.add(key)
        if key not in self._values:
            raise ValueError(
                f"{self.called} has no '{self._where}{key}'."
                f"{nearest_name(key, sorted(set(self._values) - self._read))}"
            )
        return self._values[key]

    def layers(self, key: str) -> int:
        """A number of layers. Raises: ValueError for one that no model has, before anything is
        built for each of them."""
        layers = self.count(key)
        if layers > MAX_LAYERS:
            raise ValueError(
                f"'{self._where}{key}' is {layers} in {self.called}; this runtime opens models "
                f"of at most {MAX_LAYERS:,} layers."
            )
        return layers

    def loops(self, key: str, default: int | None = None) -> int:
        """A number of loops. Raises: ValueError for more than are run anywhere."""
        loops = self.count(key, default)
        if loops > MAX_LOOPS:
            raise ValueError(
                f"'{self._where}{key}' is {loops:,} in {self.called}; this runtime opens models of "
                f"at most {MAX_LOOPS:,} loops."
            )
        return loops

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; null counts as absent. Raises: ValueError for all else."""
        value = self.need(key) if default is None else self.take(key)
        value = default if value is None else value
        # bool is an int in Python, and True would pass for one loop.
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            message = (
                f"'{self._where}{key}' is {value!r} in {self.called}; it must be a positive "
                "whole number."
            )
            if default is None:
                raise ValueError(message)
            self.refuse(message)
            return default
        return value

    def window(self, key: str, default: int | None = None) -> int:
        """Tokens of an attention window. Raises: ValueError for one longer than any context."""
        tokens = self.count(key, default)
        if tokens > MAX_CONTEXT:
            raise ValueError(
                f"'{self._where}{key}' is {tokens} in {self.called}; this runtime opens models "
                f"whose windows have at most {MAX_CONTEXT} tokens."
            )
        return tokens

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; null counts as absent. Raises: ValueError for all else."""
        value = self.need(key) if default is None else self.take(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            message = (
                f"'{self._where}{key}' is {value!r} in {self.called}; it must be a positive number."
            )
            if default is None:
                raise ValueError(message)
            self.refuse(message)
            return default
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false; null counts as absent. Raises: ValueError for all else."""
        value = self.take(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            message = f"'{self._where}{key}' is {value!r} in {self.called}, not a bool."
            self.refuse(message)
            return default
        return value

    def expect(self, key: str, *allowed: Any, default: Any = None) -> Any:
        """The value, which must be one of those that the runtime can do.

        Args: allowed: values; default: taken where the key is absent.
        Raises: ValueError naming the value and what can be done.
        """
        value = self.take(key, default)
        for candidate in allowed:
            # 1 == True and 0 == False in Python, but not in a config.
            if value == candidate and isinstance(value, bool) == isinstance(candidate, bool):
                return value
        shown = " or ".join(repr(candidate) for candidate in allowed)
        message = (
            f"{self.called} has '{self._where}{key}' = {value!r}, which this runtime cannot "
            f"do; it can do {shown}."
        )
        self.refuse(message)
        return allowed[0]

    def ignore(self, *keys: str) -> None:
        """Mark further keys without effect on the function as read."""
        self._read.update(keys)

    def section(self, key: str) -> SourceConfig | None:
        """A nested dictionary, its keys counted too; None where it is absent or null.

        Raises: ValueError where the value is no dictionary.
        """
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.refuse(f"'{self._where}{key}' is {value!r}, not a group of keys.")
            return None
        inner = SourceConfig(
            value, f"{self._where}{key}.", called=self.called, reasons=self._reasons
        )
        self._sections.append(inner)
        return inner

    def unused(self) -> list[str]:
        """Dotted names of the keys that nobody read."""
        own = [f"{self._where}{key}" for key in self._values if key not in self._read]
        return sorted(own + [key for inner in self._sections for key in inner.unused()])

    def check_all_read(self) -> None:
        """Raises: ValueError naming every key that nobody read, with the nearest known one."""
        known, unused = sorted(self._known()), self.unused()
        # Keys are compared with all known ones, which takes its time: a file may have thousands.
        unread = [f"'{shortened(key)}'.{_nearest(key, known)}" for key in unused[:MOST_SHOWN]]
        if len(unused) > MOST_SHOWN:
            unread.append(f"And {len(unused) - MOST_SHOWN:,} more.")
        if unread:
            raise ValueError(
                f"{self.called} has keys without a known meaning, so the model would not be the "
                "published one: " + " ".join(unread)
            )

    def _known(self) -> set[str]:
        own = {f"{self._where}{key}" for key in self._read}
        return own.union(*(inner._known() for inner in self._sections))


def _nearest(key: str, known: list[str]) -> str:
    """' Did you mean ...?' or nothing: the list of all known keys would hide the message."""
    hint = nearest_name(key, known)
    return hint if hint.startswith(" Did") else ""
