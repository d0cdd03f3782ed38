"""Dory against its public runtime, and two different rotary profiles against plain loops.

The golden case has equal profiles for full and sliding attention, so the second reference is
written here: numbers one by one, in float64, from the published formulas and stored tensors.
"""

import json
import math

import pytest
import torch
from goldens import GOLDEN, close, open_golden, states_of

from depthdial.formats.families.registry import map_config
from depthdial.model.call import Call
from depthdial.model.looped_lm import LoopedLM

LOGITS, STATES = 5e-5, 1e-5


@pytest.fixture(scope="module")
def case():
    return open_golden("dory")


@pytest.fixture(scope="module")
def model(case):
    return case.model()


def test_the_one_model_class_runs_it(model):
    assert type(model) is LoopedLM


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_logits_at_every_loop_count(case, model, k):
    logits = model(case.vectors["input_ids"], num_loops=k)
    close(logits, case.vectors[f"logits_k{k}"], LOGITS)


def test_states_of_every_loop_have_unit_length(case, model):
    for k, state in enumerate(states_of(model, case.vectors["input_ids"], 4), start=1):
        close(state, case.vectors[f"state_k{k}"], STATES)


def test_the_loop_starts_from_the_prelude_output(case, model):
    begun = model.begin(Call(case.vectors["input_ids"], num_loops=1))
    close(begun.h_in_BTD, case.vectors["input_h"], STATES)
    close(begun.initial_state_BTD, case.vectors["input_h"], STATES)


def test_both_config_formats_mean_the_same_model():
    older = json.loads((GOLDEN / "dory" / "config_format1.json").read_text())
    newer = json.loads((GOLDEN / "dory" / "config.json").read_text())
    assert map_config(older)[1] == map_config(newer)[1]


# ---- two different rotary profiles

PROFILES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.4},
    "sliding_attention": {
        "rope_type": "default",
        "rope_theta": 37.0,
        "partial_rotary_factor": 0.8,
    },
}
FORMAT_1 = {
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.4,
    "rope_theta_2": 37.0,
    "partial_rotary_factor_2": 0.8,
    "rope_profile_layers": [2, 1, 2, 1, 2, 1, 1, 1, 2, 1, 1, 1],
}


def unit(x):
    """x / sqrt(sum x^2 + 1e-6)."""
    length = math.sqrt(sum(v * v for v in x) + 1e-6)
    return [v / length for v in x]


def product(x, y):
    return [a * b for a, b in zip(x, y, strict=True)]


def times(matrix, x):
    return [sum(product(row, x)) for row in matrix]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def turn(head, position, profile):
    """Rotate channel j with j + n / 2, of the n rotating channels of a head."""
    rotating = round(len(head) * profile["partial_rotary_factor"])
    half, turned = rotating // 2, list(head)
    for j in range(half):
        angle = position * profile["rope_theta"] ** (-2 * j / rotating)
        a, b = head[j], head[j + half]
        turned[j] = a * math.cos(angle) - b * math.sin(angle)
        turned[j + half] = b * math.cos(angle) + a * math.sin(angle)
    return turned


class ScalarDory:
    """One row of tokens, number by number; `values` is a config with `layer_types`."""

    def __init__(self, values, source):
        self.values = values
        self.source = {name: tensor.double().tolist() for name, tensor in source.items()}
        self.std = values["initializer_range"]

    def logits(self, tokens, num_loops):
        embeddings = self.source["backbone.embeddings.weight"]
        bounds = [0, self.values["n_input_layers"]]
        bounds.append(bounds[-1] + self.values["n_recurrent_layers"])
        h_in = self.layers([embeddings[t] for t in tokens], 0, bounds[1])
        state = h_in
        for _ in range(num_loops):
            entered = [
                unit([a + b for a, b in zip(s, e, strict=True)])
                for s, e in zip(state, h_in, strict=True)
            ]
            state = [unit(x) for x in self.layers(entered, bounds[1], bounds[2])]
        state = self.layers(state, bounds[2], len(self.values["layer_types"]))
        scale = self.source["lm_head.logit_scale"]
        return [
            [v / self.std for v in product(times(self.source["lm_head.weight"], x), scale)]
            for x in state
        ]

    def layers(self, stream, first, last):
        for idx in range(first, last):
            kind, name = self.values["layer_types"][idx], f"backbone.layers.{idx}"
            mixer = {k[len(name) + 7 :]: v for k, v in self.source.items() if name + ".mixer" in k}
            is_mlp = kind == "mlp"
            alpha = self.source[f"{name}.{'mlp' if is_mlp else 'attn'}_alpha"]
            branch = self.mlp(stream, mixer) if is_mlp else self.attention(stream, mixer, kind)
            stream = [self.step(x, y, alpha) for x, y in zip(stream, branch, strict=True)]
        return stream

    def step(self, x, branch, alpha):
        factor = self.values["ngpt_alpha_init"] / self.std
        x, y = unit(x), unit(branch)
        return unit([a + abs(s * factor) * (b - a) for a, b, s in zip(x, y, alpha, strict=True)])

    def mlp(self, stream, mixer):
        width = math.sqrt(self.values["hidden_size"])
        out = []
        for x in stream:
            gate = product(times(mixer["gate_proj.weight"], x), mixer["suv_gate"])
            up = product(times(mixer["up_proj.weight"], x), mixer["suv_up"])
            gate, up = [v * width for v in gate], [v * width for v in up]
            hidden = unit(product([g * sigmoid(g) for g in gate], up))
            out.append(times(mixer["down_proj.weight"], hidden))
        return out

    def attention(self, stream, mixer, kind):
        channels, profile = self.values["head_dim"], self.values["rope_parameters"][kind]
        heads = self.values["num_attention_heads"]
        group = heads // self.values["num_key_value_heads"]
        window = self.values["sliding_window"] if kind == "sliding_attention" else len(stream)
        gate_scale = math.sqrt(math.sqrt(self.values["hidden_size"])) / self.std

        def split(x):
            return [x[i : i + channels] for i in range(0, len(x), channels)]

        scale = split([(s * math.sqrt(channels) / self.std) ** 2 for s in mixer["sqk"]])
        queries, keys, values = [], [], []
        for position, x in enumerate(stream):
            q, k = split(times(mixer["q_proj.weight"], x)), split(times(mixer["k_proj.weight"], x))
            rows = [unit(turn(head, position, profile)) for head in q]
            queries.append([product(row, by) for row, by in zip(rows, scale, strict=True)])
            keys.append([unit(turn(head, position, profile)) for head in k])
            values.append(split(times(mixer["v_proj.weight"], x)))
        out = []
        for t, x in enumerate(stream):
            first, joined = max(0, t - window + 1), []
            for head in range(heads):
                scores = [
                    sum(product(queries[t][head], keys[s][head // group])) / math.sqrt(channels)
                    for s in range(first, t + 1)
                ]
                weights = [math.exp(score - max(scores)) for score in scores]
                total = sum(weights)
                joined += [
                    sum(w * values[first + i][head // group][c] for i, w in enumerate(weights))
                    / total
                    for c in range(channels)
                ]
            gates = times(mixer["g_proj.weight"], x)
            gated = [
                y * sigmoid(g * (s * gate_scale) ** 2)
                for y, g, s in zip(joined, gates, mixer["s_gate"], strict=True)
            ]
            out.append(times(mixer["o_proj.weight"], unit(gated)))
        return out


def test_two_different_rotary_profiles_follow_the_formulas():
    case = open_golden("dory", rope_parameters=PROFILES)
    tokens = case.vectors["input_ids"][:1, :9]
    expected = ScalarDory(case.values, case.source).logits(tokens[0].tolist(), num_loops=2)
    logits = case.model()(tokens, num_loops=2)
    close(logits[0], torch.tensor(expected), LOGITS)


def test_the_scalar_reference_agrees_with_the_public_runtime(case):
    """A reference of our own must first reproduce what it is not its own mirror of."""
    tokens = case.vectors["input_ids"][:1, :9]
    found = ScalarDory(case.values, case.source).logits(tokens[0].tolist(), num_loops=2)
    expected = case.vectors["logits_k2"][:1, :9]
    close(torch.tensor(found)[None], expected, LOGITS)


def test_different_profiles_change_the_logits(case, model):
    """Either profile alone matters, so that a swap of the two would be seen."""
    tokens = case.vectors["input_ids"]
    for kind in PROFILES:
        one = case.values["rope_parameters"] | {kind: PROFILES[kind]}
        changed = open_golden("dory", rope_parameters=one).model()(tokens, num_loops=2)
        assert (changed - model(tokens, num_loops=2)).abs().max() > 0.1


def test_profiles_of_format_1_are_those_of_the_layer_types():
    older = open_golden("dory", "config_format1.json", **FORMAT_1)
    newer = open_golden("dory", rope_parameters=PROFILES)
    assert older.config == newer.config
    assert older.config.sliding.rope_theta == 37.0
    assert older.config.rope_theta == 500.0
