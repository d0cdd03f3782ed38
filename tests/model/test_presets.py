"""Presets: published numbers they must meet, and what is a guess."""

from __future__ import annotations

import pytest

from depthdial.config import ModelConfig
from depthdial.model.count import count_parameters, executed_sublayers
from depthdial.model.presets import GUESSED_FIELDS, preset, preset_names


@pytest.mark.parametrize("name", ["gpt-0.5b", "tiny-text", "tiny-pointer", "toy"])
def test_the_named_presets_exist(name):
    assert name in preset_names()


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_survives_its_json_form(name):
    assert ModelConfig.from_dict(preset(name).to_dict()) == preset(name)


def test_gpt_05b_has_the_published_backbone_size():
    """31.6M conditioning parameters are 6.34 % of the backbone, so it has 498.4M, +-0.1 %."""
    total = count_parameters(preset("gpt-0.5b")).total
    assert total == pytest.approx(498.4e6, rel=1e-3)


def test_gpt_05b_alternates_15_attention_and_15_swiglu_sublayers():
    config = preset("gpt-0.5b")
    assert config.sublayers == "AF" * 15
    assert config.split == (8, 14, 8)
    assert [executed_sublayers(config, k) for k in range(1, 6)] == [30, 44, 58, 72, 86]


def test_the_modulated_variant_differs_only_in_its_modulation():
    plain, modulated = preset("gpt-0.5b"), preset("gpt-0.5b-modulated")
    assert modulated.modulation is not None
    assert modulated.replace(modulation=None) == plain


def test_guessed_fields_are_fields_of_presets_with_a_reason():
    for name, reasons in GUESSED_FIELDS.items():
        assert name in preset_names()
        assert set(reasons) <= set(ModelConfig.model_fields)
        assert all(reasons.values())


def test_published_fields_are_not_called_guesses():
    published = {"vocab_size", "d_model", "layout", "split", "max_loops", "tie_embeddings"}
    assert not published & set(GUESSED_FIELDS["gpt-0.5b"])


def test_the_fault_toy_has_two_layers_per_block():
    config = preset("toy")
    assert config.split == (4, 4, 4)
    assert (config.d_model, config.vocab_size, config.max_loops) == (64, 128, 4)


def test_the_pointer_model_has_the_measured_size():
    assert count_parameters(preset("tiny-pointer")).total == pytest.approx(0.46e6, rel=0.01)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match="unknown preset 'gpt-05b'. Did you mean 'gpt-0.5b'"):
        preset("gpt-05b")
