"""Parcae with a core of another width and with capped logits, against its formulas.

No reference output covers them, so the formulas are written out here, one token and one head at a
time, on the published names of the tensors. Source: arXiv 2604.12946.
"""

import json
import math

import pytest
import safetensors.torch
import torch
from goldens import GOLDEN, close, open_golden, published
from published import WEIGHTS, edit_json, hashes

from depthdial.config.text_files import dump_json
from depthdial.formats.families.registry import family_named, map_config
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.model.checkpoint import load_model

HEAD, VOCAB, BASE, EPS, QK_EPS = 8, 32, 50_000, 1e-5, torch.finfo(torch.float32).eps
NARROW = {
    "n_embd": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "recurrent_embedding_dimension": 32,
    "recurrent_num_attention_heads": 4,
}
WIDE = {
    **{f"n_layers_in_{part}": 1 for part in ("prelude", "recurrent_block", "coda")},
    "n_embd": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "recurrent_embedding_dimension": 48,
    "recurrent_num_attention_heads": 6,
    "logit_softcap": 1.5,
}
SOURCES = {"narrow": NARROW, "wide and capped": WIDE}
TOLERANCE = 2e-6
"""The library's rotary tables are float32."""
IDS = [3, 17, 8, 30, 3, 1]


def config_of(name):
    """The published config of one source."""
    small = {"vocab_size": VOCAB, "padded_vocab_size": VOCAB, "mean_recurrence": 3}
    widths = {"intermediate_size": 40, "recurrent_intermediation_embedding_dimension": 24}
    return published("parcae", **small, **widths, **SOURCES[name])


def layers_of(values):
    """(published name, width, query heads, key heads, MLP width, has a table) from the bottom."""
    outer = (
        values["n_embd"],
        values["num_attention_heads"],
        values["num_key_value_heads"],
        values["intermediate_size"],
    )
    heads = values["recurrent_num_attention_heads"]
    inner = (
        values["recurrent_embedding_dimension"],
        heads,
        heads,
        values["recurrent_intermediation_embedding_dimension"],
    )
    names = [
        (f"transformer.{name}.{i}", *(inner if name == "core_block" else outer))
        for name, key in (
            ("prelude", "prelude"), ("core_block", "recurrent_block"), ("coda", "coda"),
        )
        for i in range(values[f"n_layers_in_{key}"])
    ]  # fmt: skip
    return [(*layer, i % 2 == (len(names) - 1) % 2) for i, layer in enumerate(names)]


def random_tensors(values):
    """Every tensor of the released code's state dict, its shape from the published config."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape, std=None):
        std = shape[-1] ** -0.5 if std is None else std
        return torch.randn(shape, generator=generator) * std

    width, state = values["n_embd"], values["recurrent_embedding_dimension"]
    tensors = {
        "transformer.wte.weight": normal(VOCAB, width, std=1.0),
        "transformer.ln_f.weight": 1 + normal(width, std=0.1),
        "transformer.ln_prelude.weight": 1 + normal(width, std=0.1),
        "transformer.adapter.A_log": normal(state, std=0.3),
        "transformer.adapter.dt_bias": normal(state, std=0.3),
        "transformer.adapter.B": normal(state, width),
        "transformer.C.weight": normal(width, state),
    }
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    for i, (name, d, heads, keys, hidden, has_table) in enumerate(layers_of(values)):
        tensors |= {
            f"{name}.norm_1.weight": 1 + normal(d, std=0.1),
            f"{name}.norm_2.weight": 1 + normal(d, std=0.1),
            f"{name}.attn.c_q.weight": normal(heads * HEAD, d),
            f"{name}.attn.c_k.weight": normal(keys * HEAD, d),
            f"{name}.attn.c_v.weight": normal(keys * HEAD, d),
            f"{name}.attn.c_proj.weight": normal(d, heads * HEAD),
            f"{name}.mlp.fc.weight": normal(hidden, d),
            f"{name}.mlp.proj.weight": normal(d, hidden),
        }
        if has_table:
            tensors[f"value_embeds.{i}.weight"] = normal(VOCAB, keys * HEAD, std=1.0)
            tensors[f"{name}.attn.ve_gate.weight"] = normal(keys, 32)
    frequencies = BASE ** (-torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(values["block_size"]).float(), frequencies)
    tensors["freqs_cis"] = torch.stack([angles.cos(), angles.sin()], dim=-1)[None, :, None]
    return tensors


# ---- the formulas, slowly


def rms(x, weight=None, eps=EPS):
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * weight


def turned(x, position):
    """Channels 2j and 2j + 1 turn by position * base^(-2j / C); then a norm without gain."""
    out = x.clone()
    for j in range(0, len(x), 2):
        angle = position * BASE ** (-j / len(x))
        cos, sin = math.cos(angle), math.sin(angle)
        out[j], out[j + 1] = x[j] * cos - x[j + 1] * sin, x[j + 1] * cos + x[j] * sin
    return rms(out, eps=QK_EPS)


def attention(t, x, layer, table):
    name, _, heads, keys, *_ = layer
    q, k, v = (x @ t[f"{name}.attn.c_{letter}.weight"].T for letter in "qkv")
    if table is not None:
        gate = 2 * torch.sigmoid(x[:, :32] @ t[f"{name}.attn.ve_gate.weight"].T)
        v = v + gate.repeat_interleave(HEAD, dim=-1) * t[table][IDS]
    out = torch.zeros(len(x), heads * HEAD, dtype=x.dtype)
    for head in range(heads):
        own, shared = slice(head * HEAD, (head + 1) * HEAD), head // (heads // keys)
        theirs = slice(shared * HEAD, (shared + 1) * HEAD)
        for now in range(len(x)):
            query = turned(q[now, own], now)
            scores = [query @ turned(k[past, theirs], past) / HEAD**0.5 for past in range(now + 1)]
            weights = torch.softmax(torch.stack(scores), dim=0)
            out[now, own] = weights @ v[: now + 1, theirs]
    return out @ t[f"{name}.attn.c_proj.weight"].T


def block(t, x, number, layer):
    name, has_table = layer[0], layer[-1]
    table = f"value_embeds.{number}.weight" if has_table else None
    x = x + attention(t, rms(x, t[f"{name}.norm_1.weight"]), layer, table)
    hidden = torch.relu(rms(x, t[f"{name}.norm_2.weight"]) @ t[f"{name}.mlp.fc.weight"].T)
    return x + (hidden * hidden / 2) @ t[f"{name}.mlp.proj.weight"].T


def reference_logits(tensors, values, state, num_loops):
    """Logits [T, V] after some loops from a given state [T, state width]."""
    t = {name: tensor.double() for name, tensor in tensors.items()}
    layers = list(enumerate(layers_of(values)))
    x = t["transformer.wte.weight"][IDS]
    for number, layer in layers:
        if layer[0].startswith("transformer.prelude"):
            x = block(t, x, number, layer)
    e = rms(x, t["transformer.ln_prelude.weight"])
    dt = torch.log1p(torch.exp(t["transformer.adapter.dt_bias"]))
    decay = torch.exp(-dt * torch.exp(t["transformer.adapter.A_log"]))
    for _ in range(num_loops):
        state = decay * state + dt * (e @ t["transformer.adapter.B"].T)
        for number, layer in layers:
            if layer[0].startswith("transformer.core_block"):
                state = block(t, state, number, layer)
    x = state @ t["transformer.C.weight"].T
    for number, layer in layers:
        if layer[0].startswith("transformer.coda"):
            x = block(t, x, number, layer)
    logits = rms(x, t["transformer.ln_f.weight"]) @ t["lm_head.weight"].T
    cap = values["logit_softcap"]
    return logits if cap is None else cap * torch.tanh(logits / cap)


# ---- import, forward, export


@pytest.fixture(scope="module", params=SOURCES)
def opened(request, tmp_path_factory):
    """(published config, its tensors, source folder, model folder)."""
    place, values = tmp_path_factory.mktemp("parcae"), config_of(request.param)
    tensors = random_tensors(values)
    (place / "source").mkdir()
    (place / "source" / "config.json").write_text(dump_json(values))
    safetensors.torch.save_file(tensors, place / "source" / WEIGHTS, metadata={"format": "pt"})
    import_checkpoint(place / "source", place / "ours")
    return values, tensors, place / "source", place / "ours"


@pytest.mark.parametrize("num_loops", [1, 3])
def test_f02_a_core_of_another_width_computes_the_published_formulas(opened, num_loops):
    """B maps the prelude output into the state's width, C the last state out of it."""
    values, tensors, _, ours = opened
    model = load_model(ours).double()
    generator = torch.Generator().manual_seed(2)
    width = values["recurrent_embedding_dimension"]
    state = torch.randn(len(IDS), width, generator=generator, dtype=torch.float64)
    logits = model(torch.tensor([IDS]), num_loops=num_loops, initial_state_BTD=state[None])
    close(logits[0], reference_logits(tensors, values, state, num_loops), TOLERANCE)


def test_f02_the_noise_that_a_loop_starts_from_has_the_core_s_width(opened):
    values, tensors, _, ours = opened
    model, states = load_model(ours).double(), []
    model.loop = lambda state, h_in, **rest: (states.append(state), (state, rest["carry"]))[1]
    model(torch.tensor([IDS]), num_loops=1)
    assert states[0].shape == (1, len(IDS), values["recurrent_embedding_dimension"])
    assert 0.5 < states[0].std() / math.sqrt(2 / (5 * values["n_embd"])) < 1.5
    expected = reference_logits(tensors, values, states[0][0], 0)
    close(model(torch.tensor([IDS]), num_loops=1)[0], expected, TOLERANCE)


def test_f02_there_and_back_is_byte_identical(opened, tmp_path):
    _, _, source, ours = opened
    export_checkpoint(ours, tmp_path / "x", family="parcae")
    theirs, back = hashes(source), hashes(tmp_path / "x")
    assert {name: back[name] for name in theirs} == theirs


def test_f02_the_config_written_without_an_origin_means_the_same_model(opened):
    family, config = map_config(opened[0])
    written = family.write(config, None)
    assert map_config(written)[1] == config
    for key in SOURCES["narrow"] | {"logit_softcap": None}:
        assert written[key] == opened[0][key]


def test_f02_inspect_names_the_core_s_width(opened):
    inspected = inspect_source(opened[2])
    assert inspected.problems == ()
    assert inspected.config.core_config.d_model == opened[0]["recurrent_embedding_dimension"]


def test_f02_capped_logits_are_c_tanh_of_the_published_ones():
    case = open_golden("parcae", logit_softcap=2.0)
    start, ids = case.vectors["initial_state"], case.vectors["input_ids"]
    logits = case.model()(ids, num_loops=4, initial_state_BTD=start)
    close(logits, 2.0 * torch.tanh(case.vectors["logits_k4"] / 2.0), 2e-4)


def test_f02_a_head_count_that_changes_the_channels_of_a_head_is_refused_by_name():
    """The released code turns all heads by one table."""
    with pytest.raises(ValueError, match="recurrent_embedding_dimension=48 with 8 heads .* equal"):
        map_config(published("parcae", recurrent_num_attention_heads=8))


def test_f02_a_core_has_as_many_keys_as_queries_where_the_others_share_them():
    config = map_config(published("parcae", num_key_value_heads=2))[1]
    assert (config.num_kv_heads, config.core_config.num_kv_heads) == (2, 4)


def test_f02_tensors_of_another_width_than_the_config_s_are_refused(opened, tmp_path):
    _, tensors, source, _ = opened
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "config.json").write_bytes((source / "config.json").read_bytes())
    other = tensors | {"transformer.adapter.B": tensors["transformer.C.weight"].T[1:].contiguous()}
    safetensors.torch.save_file(other, tmp_path / "s" / WEIGHTS)
    with pytest.raises(ValueError, match="'injection.input.weight' has shape"):
        import_checkpoint(tmp_path / "s", tmp_path / "x")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("huginn", {"core_d_model": 64, "loop.state_projection": True, "final_norm": "head"}),
        ("huginn", {"core_num_heads": 10}),
        ("huginn", {"core_num_kv_heads": 1}),
        ("llama", {"logit_soft_cap": 9.0}),
    ],
)
def test_f02_a_format_that_cannot_say_it_names_the_field(family, changes):
    config = map_config(published(family))[1].replace(**changes)
    key, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{key}={value} would be read as None"):
        family_named(family).write(config, None)


def test_f02_a_capped_model_that_only_the_config_changes_is_written_back(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", WEIGHTS):
        (source / name).write_bytes((GOLDEN / "parcae" / name).read_bytes())
    edit_json(source / "config.json", logit_softcap=30)
    assert import_checkpoint(source, tmp_path / "a").config.logit_soft_cap == 30
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="parcae")
    written = json.loads((tmp_path / "x" / "config.json").read_text())
    assert written == json.loads((source / "config.json").read_text())
