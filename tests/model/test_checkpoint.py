"""A model directory: written whole, read strictly, nothing unpickled."""

import json
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from depthdial.config import ModelConfig, ModulationConfig
from depthdial.model import checkpoint
from depthdial.model.checkpoint import (
    empty_model,
    load_model,
    read_config,
    read_tensors,
    save_model,
)
from depthdial.model.looped_lm import LoopedLM
from depthdial.model.tensor_header import read_header

ROOT = Path(__file__).parents[2]
VOCAB = 23
WEIGHTS, CONFIG = "model.safetensors", "config.json"


def config(**changes):
    base = ModelConfig(
        vocab_size=VOCAB, d_model=16, split=(2, 2, 2), num_heads=2, num_kv_heads=1, head_dim=8,
        d_ff=24, max_context=32, max_loops=4, init_std=0.2,
        modulation=ModulationConfig(d_cond=8, rank=2, embed_dim=8),
    )  # fmt: skip
    return base.replace(**changes) if changes else base


@pytest.fixture
def folder(tmp_path):
    save_model(LoopedLM(config(), seed=1), tmp_path / "model")
    return tmp_path / "model"


def edit_tensors(folder, edit):
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    edit(tensors)
    safetensors.torch.save_file(tensors, folder / WEIGHTS)


def edit_config(folder, **changes):
    values = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(values | changes))


def file_bytes(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def fail_as_full(*args, **kwargs):
    raise OSError(28, "No space left on device")


# ---- round trip


@pytest.mark.parametrize("tied", [True, False])
def test_b34_each_unique_tensor_is_stored_once(tmp_path, tied):
    model = LoopedLM(config(tie_embeddings=tied))
    save_model(model, tmp_path)
    stored = safetensors.torch.load_file(tmp_path / WEIGHTS)
    assert set(stored) == {name for name, _ in model.named_parameters()}
    assert sum(t.numel() for t in stored.values()) == sum(p.numel() for p in model.parameters())
    assert ("lm_head.weight" in stored) is not tied


def test_b34_file_size_does_not_depend_on_the_loop_count(tmp_path):
    sizes = set()
    for max_loops in (1, 4, 64):
        save_model(LoopedLM(config(max_loops=max_loops)), tmp_path / str(max_loops))
        sizes.add((tmp_path / str(max_loops) / WEIGHTS).stat().st_size)
    assert len(sizes) == 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("update", ["replace", "delta", "adaptive_delta"])
def test_b34_loaded_model_gives_bit_equal_logits(tmp_path, tied, update):
    model = LoopedLM(config(tie_embeddings=tied, **{"loop.update": update}), seed=2)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    tokens = torch.arange(10).view(2, 5)
    assert loaded.config == model.config
    for num_loops in (1, 4):
        assert torch.equal(loaded(tokens, num_loops=num_loops), model(tokens, num_loops=num_loops))


def test_b34_second_save_is_byte_equal(folder, tmp_path):
    save_model(load_model(folder), tmp_path / "again")
    assert file_bytes(tmp_path / "again") == file_bytes(folder)


def test_loaded_tied_embedding_is_one_parameter_that_trains(tmp_path):
    save_model(LoopedLM(config(tie_embeddings=True)), tmp_path)
    loaded = load_model(tmp_path)
    loaded(torch.arange(4)[None], num_loops=2).sum().backward()
    assert loaded.embedding.weight.grad is not None
    assert all(p.requires_grad and p.device.type == "cpu" for p in loaded.parameters())


def test_weights_keep_their_dtype(tmp_path):
    save_model(LoopedLM(config()).to(torch.bfloat16), tmp_path)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.bfloat16}


def mixed(model, *wide):
    """A bf16 model with some parameters in float32, of the same values."""
    model = model.to(torch.bfloat16)
    for name in wide:
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        module.register_parameter(last, torch.nn.Parameter(getattr(module, last).float()))
    return model


@pytest.mark.parametrize(
    "name",
    ["embedding.weight", "core_stack.0.mixer.q_proj.weight", "lm_head.weight",
     "modulation.mlp_in.bias", "modulation.core.0.down", "state_update.gate.weight"],
)  # fmt: skip
def test_matrices_in_two_formats_are_opened_in_the_wider_one(tmp_path, name):
    """Such a checkpoint was imported, and its first forward failed in a product."""
    save_model(mixed(LoopedLM(config(), seed=1), name), tmp_path)
    before, loaded = file_bytes(tmp_path), load_model(tmp_path)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    wide = LoopedLM(config(), seed=1).to(torch.bfloat16).float()
    tokens = torch.arange(5)[None]
    assert torch.equal(loaded(tokens, num_loops=3), wide(tokens, num_loops=3))
    assert file_bytes(tmp_path) == before


def test_two_16_bit_formats_are_opened_in_float32(tmp_path):
    model = LoopedLM(config(), seed=1).to(torch.bfloat16)
    model.embedding.half()
    save_model(model, tmp_path)
    assert {p.dtype for p in load_model(tmp_path).parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["state_update.gamma", "final_norm.weight"])
def test_what_is_no_matrix_keeps_its_format_and_changes_no_other(tmp_path, name):
    save_model(mixed(LoopedLM(config()), name), tmp_path)
    wide = [n for n, p in load_model(tmp_path).named_parameters() if p.dtype == torch.float32]
    assert wide == [name]


def test_a_grafted_model_comes_back_with_its_modulation(tmp_path):
    model = LoopedLM(config(modulation=None))
    model.graft_modulation(ModulationConfig(d_cond=8, rank=2, embed_dim=8), seed=3)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], t) for name, t in model.state_dict().items())


# ---- cost


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is a number of Linux")
def test_reading_every_byte_of_an_opened_model_takes_no_memory_of_its_own(tmp_path):
    """Weights are pages of the file; a copy would need their size."""
    save_model(LoopedLM(config(vocab_size=500_000)), tmp_path)
    load_model(tmp_path)
    before = anonymous_bytes()
    model = load_model(tmp_path)
    assert sum(float(p.detach().sum()) for p in model.parameters()) != 0
    size = (tmp_path / WEIGHTS).stat().st_size
    assert size > 60e6 and anonymous_bytes() - before < size / 10


def test_opening_a_model_imports_no_compiler(folder):
    """Random initial values on the meta device imported one, which took two seconds."""
    code = (
        "import sys; from depthdial.model.checkpoint import load_model; "
        f"load_model({str(folder)!r}); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_an_empty_model_has_the_shapes_of_a_real_one_and_no_values():
    real, empty = LoopedLM(config()), empty_model(config())
    assert {n: t.shape for n, t in empty.state_dict().items()} == {
        n: t.shape for n, t in real.state_dict().items()
    }
    assert {t.device.type for t in empty.state_dict().values()} == {"meta"}


# ---- strict reading


def test_unknown_tensor_is_named_with_the_nearest(folder):
    edit_tensors(folder, lambda t: t.update({"embeddings.weight": t["embedding.weight"].clone()}))
    with pytest.raises(
        ValueError, match=r"unknown tensor 'embeddings.weight' \(nearest: 'embedding.weight'\)"
    ):
        load_model(folder)


def test_missing_tensor_is_named(folder):
    edit_tensors(folder, lambda t: t.pop("state_update.gamma"))
    with pytest.raises(ValueError, match="missing tensor 'state_update.gamma'"):
        load_model(folder)


def test_tensor_of_another_shape_is_named_with_both_shapes(folder):
    edit_tensors(folder, lambda t: t.update({"final_norm.weight": torch.ones(15)}))
    with pytest.raises(
        ValueError, match=r"'final_norm.weight' has shape \(15,\), the config asks for \(16,\)"
    ):
        load_model(folder)


def test_many_misfits_are_counted_and_the_first_shown(folder):
    edit_config(folder, modulation=None)
    with pytest.raises(ValueError, match=r"24 tensors do not fit the config") as error:
        load_model(folder)
    assert str(error.value).count("unknown tensor") == 5


def test_integer_weights_are_refused_by_name(folder):
    edit_tensors(folder, lambda t: t.update({"final_norm.weight": torch.ones(16).long()}))
    with pytest.raises(ValueError, match=r"'final_norm.weight' is torch.int64"):
        load_model(folder)


def test_unknown_config_key_is_named_with_the_nearest(folder):
    edit_config(folder, max_loop=4)
    with pytest.raises(ValueError, match=r"unknown key 'max_loop'. Did you mean 'max_loops'\?"):
        load_model(folder)


def test_config_that_is_no_json_is_refused(folder):
    (folder / CONFIG).write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_model(folder)


# ---- damage


@pytest.mark.parametrize("keep_frac", [0.0, 0.001, 0.1, 0.5, 0.999])
def test_truncated_weights_are_refused(folder, keep_frac):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: int(len(data) * keep_frac)])
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_model(folder)


def test_bytes_after_the_weights_are_refused(folder):
    with (folder / WEIGHTS).open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(ValueError, match="damaged or cut short"):
        load_model(folder)


def test_any_flipped_byte_of_the_header_is_refused_or_harmless(folder):
    """A flip may rename a tensor, change a shape or an offset, or break the JSON."""
    original = (folder / WEIGHTS).read_bytes()
    expected = load_model(folder).state_dict()
    header_bytes = 8 + struct.unpack("<Q", original[:8])[0]
    refused = 0
    for position in [*range(8), *range(8, header_bytes, 41)]:
        for flip in (0xFF, 0x01):
            damaged = bytearray(original)
            damaged[position] ^= flip
            (folder / WEIGHTS).write_bytes(bytes(damaged))
            try:
                loaded = load_model(folder).state_dict()
            except ValueError:
                refused += 1
            else:
                assert all(torch.equal(loaded[name], t) for name, t in expected.items()), position
    assert refused > header_bytes // 41


@pytest.mark.parametrize(
    ("claim", "match"),
    [({"data_offsets": [0, 2**60]}, "needs"), ({"dtype": "F8_E4M3"}, "F8_E4M3")],
)
def test_a_false_header_is_refused_before_the_file_is_mapped(folder, monkeypatch, claim, match):
    def mapped(path):
        raise AssertionError("the file was mapped")

    data = (folder / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    header["final_norm.weight"] |= claim
    text = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    monkeypatch.setattr(safetensors.torch, "load_file", mapped)
    with pytest.raises(ValueError, match=match):
        load_model(folder)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a model directory: it has no config.json"):
        load_model(tmp_path / "nowhere")


def test_missing_weights_are_refused(folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="there is no file model.safetensors in"):
        load_model(folder)


def test_config_alone_can_be_read(folder):
    (folder / WEIGHTS).unlink()
    assert read_config(folder) == config()


# ---- pickles


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", WEIGHTS])
def test_a_pickle_is_never_opened_whatever_its_name(folder, tmp_path, name):
    mark = tmp_path / "unpickled"
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises((FileNotFoundError, ValueError)):
        load_model(folder)
    assert not mark.exists()


def test_a_folder_with_pickled_weights_only_says_that_they_are_not_opened(folder):
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin cannot replace it: pickle"):
        load_model(folder)


def test_f33_a_folder_with_weights_in_several_files_says_so_and_not_that_they_are_pickles(folder):
    for number in (1, 2):
        (folder / WEIGHTS).with_name(f"model-{number}-of-2.safetensors").write_bytes(b"")
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text("{}")
    for read in (load_model, lambda path: read_header(path / WEIGHTS)):
        with pytest.raises(FileNotFoundError) as caught:
            read(folder)
        assert "in several files, which model.safetensors.index.json lists" in str(caught.value)
        assert "pickle" not in str(caught.value)


# ---- failed saves


def failing_weights(monkeypatch):
    monkeypatch.setattr(safetensors.torch, "save_file", fail_as_full)


def failing_config(monkeypatch):
    original = Path.write_text

    def write_text(self, *args, **kwargs):
        return fail_as_full() if CONFIG in self.name else original(self, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", write_text)


@pytest.mark.parametrize("failing", [failing_weights, failing_config])
def test_a_failed_save_leaves_the_old_model_untouched(folder, monkeypatch, failing):
    before = file_bytes(folder)
    failing(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        save_model(LoopedLM(config(max_loops=8), seed=9), folder)
    assert file_bytes(folder) == before


def test_a_save_over_an_older_model_replaces_both_files(folder):
    other = LoopedLM(config(max_loops=8), seed=9)
    save_model(other, folder)
    assert sorted(file_bytes(folder)) == [CONFIG, WEIGHTS]
    loaded = load_model(folder)
    assert loaded.config.max_loops == 8
    assert torch.equal(loaded.embedding.weight, other.embedding.weight)


def test_tensors_are_written_beside_and_renamed(tmp_path, monkeypatch):
    """A reader never meets a half-written file under the final name."""
    seen = []
    original = safetensors.torch.save_file

    def watched(tensors, path, **kwargs):
        seen.append(Path(path).name)
        original(tensors, path, **kwargs)

    monkeypatch.setattr(safetensors.torch, "save_file", watched)
    checkpoint.write_tensors({"a": torch.ones(2)}, tmp_path / WEIGHTS)
    assert seen and WEIGHTS not in seen
    assert torch.equal(read_tensors(tmp_path / WEIGHTS)["a"], torch.ones(2))
