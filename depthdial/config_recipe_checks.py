"""Rules between the fields of a recipe; each raises ValueError with what to do.

Fields and their meaning are in `config_recipe.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from depthdial.config_recipe import DepthConfig, Recipe

POISSON_SAMPLERS = ("poisson_lognormal", "poisson_truncated")
"""Samplers whose draws have a mean instead of a largest value."""
SHARED_DRAW_SAMPLERS = ("sync_uniform", "sync_weighted", "override", "poisson_lognormal")
"""Samplers with one draw for several slices."""
FRACTION_SAMPLERS = ("sync_weighted", "independent_weighted", "override")
"""Samplers that use override_frac."""


def check_depth(depth: DepthConfig) -> None:
    """Every option of the draws has an effect, and what it needs."""
    sampler = depth.sampler
    if (sampler == "fixed") != (depth.fixed_loops is not None):
        raise ValueError("fixed_loops goes with sampler='fixed', and that sampler needs it.")
    if (sampler in POISSON_SAMPLERS) != (depth.mean_loops is not None):
        raise ValueError(
            f"mean_loops goes with the samplers {' and '.join(POISSON_SAMPLERS)}, and they need it."
        )
    if depth.override_frac and sampler not in FRACTION_SAMPLERS:
        raise ValueError(
            f"override_frac={depth.override_frac} has no effect with sampler='{sampler}'."
        )
    if (depth.depth_scope == "slice_group") != (depth.slices_per_draw is not None):
        raise ValueError("slices_per_draw goes with depth_scope='slice_group', which needs it.")
    if depth.depth_scope == "slice_group" and sampler not in SHARED_DRAW_SAMPLERS:
        raise ValueError(
            f"depth_scope='slice_group' has no effect with sampler='{sampler}'; it goes "
            f"with {', '.join(SHARED_DRAW_SAMPLERS)}."
        )
    if depth.slices_per_draw and depth.num_depth_slices % depth.slices_per_draw:
        raise ValueError(
            f"num_depth_slices={depth.num_depth_slices} is not a multiple of "
            f"slices_per_draw={depth.slices_per_draw}."
        )
    if (depth.curriculum == "none") != (depth.curriculum_frac == 0.0):
        raise ValueError(
            f"curriculum='{depth.curriculum}' with curriculum_frac={depth.curriculum_frac}: a "
            "curriculum needs a positive fraction of the steps, and only a curriculum has one."
        )
    if depth.switch_frac + depth.curriculum_frac > 1:
        raise ValueError(
            f"switch_frac={depth.switch_frac} and curriculum_frac={depth.curriculum_frac} add up "
            "to more than 1; the rise starts at the switch and must end within the run."
        )


def check_recipe(recipe: Recipe) -> None:
    """The parts of a recipe fit each other."""
    _check_batch(recipe)
    _check_depth_of_model(recipe)
    _check_init(recipe)


def _check_batch(recipe: Recipe) -> None:
    slices, batch = recipe.depth.num_depth_slices, recipe.train.batch_size
    if batch % slices:
        raise ValueError(
            f"train.batch_size={batch} is not a multiple of depth.num_depth_slices={slices}."
        )
    micro, rows_per_slice = recipe.train.micro_batch_size or batch, batch // slices
    if micro % rows_per_slice or batch % micro:
        raise ValueError(
            f"train.micro_batch_size={micro} must hold whole slices of {rows_per_slice} rows "
            f"and divide train.batch_size={batch}."
        )
    if recipe.data.context > recipe.model.max_context:
        raise ValueError(
            f"data.context={recipe.data.context} exceeds model.max_context="
            f"{recipe.model.max_context}."
        )


def _check_depth_of_model(recipe: Recipe) -> None:
    depth, max_loops = recipe.depth, recipe.model.max_loops
    if max_loops == 1:
        for name, given, unused in (
            ("depth.override_frac", depth.override_frac, 0.0),
            ("depth.backprop_loops", depth.backprop_loops, None),
            ("depth.curriculum", depth.curriculum, "none"),
            ("objective.trajectory", recipe.objective.trajectory, None),
        ):
            if given != unused:
                raise ValueError(
                    f"{name}={given} has no effect with model.max_loops=1: every slice runs one "
                    "loop."
                )
    for name, given in (("fixed_loops", depth.fixed_loops), ("mean_loops", depth.mean_loops)):
        if given is not None and given > max_loops:
            raise ValueError(f"depth.{name}={given} exceeds model.max_loops={max_loops}.")
    if depth.backprop_loops is not None and depth.backprop_loops >= max_loops > 1:
        raise ValueError(
            f"depth.backprop_loops={depth.backprop_loops} has no effect with model.max_loops="
            f"{max_loops}: no row runs more loops. Set it to null."
        )


def _check_init(recipe: Recipe) -> None:
    init, data, distill = recipe.train.init, recipe.data, recipe.objective.distill
    if data.corpus is not None and (init is None) != (data.tokenizer_vocab is not None):
        raise ValueError(
            "data.tokenizer_vocab goes with data.corpus, and corpus needs it."
            if init is None
            else f"data.tokenizer_vocab={data.tokenizer_vocab} has no effect with train.init: text "
            "is prepared with the tokenizer of that folder."
        )
    if distill is not None and distill.teacher is None and init is None:
        raise ValueError(
            "objective.distill needs a teacher: give objective.distill.teacher, or train.init, "
            "whose model then is the teacher."
        )
