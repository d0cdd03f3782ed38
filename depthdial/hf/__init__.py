"""The transformers face: importing this module makes transformers know our models.

    import depthdial.hf
    model = AutoModelForCausalLM.from_pretrained("runs/tiny-text/checkpoints/step_500")
    model.generate(**tokenizer("Fellow citizens", return_tensors="pt"), num_loops=2)

This is the one module of the package whose import has an effect. The classes are in `hf/config.py`
(config), `hf/model.py` (model), `hf/backbone.py` (model without its head) and `hf/cache.py`
(cache); the arguments of a call are in `hf/call.py`, those of generation in `hf/generation.py`.
Written for transformers 5.18 to 5.29; what differs inside that range: a cache is called `cache`
since 5.24 and `past_key_values` before, in outputs and arguments. What we rely on beyond the
public interface: generation calls `_prepare_generation_config`,
`_prepare_cache_for_generation` and `_get_candidate_generator` once and
`_update_model_kwargs_for_generation` after every call of the model, and slices inputs by
`Cache.get_seq_length()`; loading puts `base_model_prefix` before names that lack it.
"""

from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from depthdial.hf.cache import DepthdialCache
from depthdial.hf.config import DepthdialConfig
from depthdial.hf.model import CACHE_FIELD, DepthdialForCausalLM

__all__ = ["CACHE_FIELD", "DepthdialCache", "DepthdialConfig", "DepthdialForCausalLM", "register"]


def register() -> None:
    """Tell transformers about model_type "depthdial"; again is no harm."""
    AutoConfig.register(DepthdialConfig.model_type, DepthdialConfig, exist_ok=True)
    AutoModelForCausalLM.register(DepthdialConfig, DepthdialForCausalLM, exist_ok=True)
    # What is missing there is no next-token model to trainers, which then smooth the labels of
    # the tokens that a position has read, not of the one behind it.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DepthdialConfig.model_type] = DepthdialForCausalLM.__name__


register()
