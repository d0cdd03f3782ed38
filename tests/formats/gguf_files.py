"""The golden llama as GGUF files, by the format's own writer."""

import pytest
from goldens import GOLDEN

from depthdial.model.checkpoint import read_tensors

gguf = pytest.importorskip("gguf", reason="pip install 'depthdial[gguf]'")
WEIGHTS = "model.safetensors"
HEADER = {
    "block_count": 6,
    "context_length": 512,
    "embedding_length": 32,
    "feed_forward_length": 80,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
}
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
TOKENS = [*(f"<{i}>" for i in range(4)), "a", "b", "ab", *(f"w{i}" for i in range(89))]


def stated(writer, key, value):
    """Put another value in the place of one that the writer has."""
    writer.kv_data[0][key].value = value


def interleaved(tensor, heads):
    """Rows of a projection as GGUF stores them: pairs that turn together stand together."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, -1)
    return halves.transpose(1, 2).reshape(tensor.shape)


def write_gguf(path, *, quantise=None, changes=None, edit=None):
    """The golden llama as a GGUF file, by the format's own writer."""
    tensors = read_tensors(GOLDEN / "llama" / WEIGHTS)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (HEADER | (changes or {})).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.rope.freq_base", 500_000.0)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 4] + [1] * (len(TOKENS) - 4))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if edit is not None:
        edit(writer)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in OUTSIDE:
            stored = OUTSIDE[stem]
        else:
            _, _, number, rest = stem.split(".", 3)
            stored = f"blk.{number}.{NAMES[rest]}"
            heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(rest)
            tensor = tensor if heads is None else interleaved(tensor, heads)
        values = tensor.numpy()
        if quantise is not None and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            raw = gguf.quants.quantize(values, quantise)
            writer.add_tensor(f"{stored}.weight", raw, raw_dtype=quantise)
        else:
            writer.add_tensor(f"{stored}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
