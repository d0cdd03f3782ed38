"""Reading and writing tensors one at a time."""

import pytest
import safetensors.torch
import torch
from published import cut_into_shards, edit_tensors

from depthdial.formats.tensors.files import TensorFiles, TensorSpec, TensorWriter, write_index
from depthdial.model.tensor_header import TORCH_DTYPES, read_header

WEIGHTS = "model.safetensors"


def sample(dtype):
    if dtype.is_floating_point:
        return torch.randn(3, 5).to(dtype)
    return torch.tensor([[1, 0, 1], [0, 0, 1]]).to(dtype)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    named = {name: sample(dtype) for name, dtype in TORCH_DTYPES.items()}
    return named | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}


def write(path, tensors, order=None):
    specs = {name: TensorSpec.of(t) for name, t in tensors.items()}
    with TensorWriter(path, specs) as writer:
        for name in order or tensors:
            writer.write(name, tensors[name])


def same(a, b):
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and a[n].shape == b[n].shape and torch.equal(a[n], b[n]) for n in a
    )


def test_every_number_format_is_written_as_the_library_reads_it(tensors, tmp_path):
    write(tmp_path / WEIGHTS, tensors)
    assert same(safetensors.torch.load_file(tmp_path / WEIGHTS), tensors)


def test_every_number_format_is_read_as_the_library_writes_it(tensors, tmp_path):
    safetensors.torch.save_file(tensors, tmp_path / WEIGHTS)
    files = TensorFiles(tmp_path)
    assert same({name: files.get(name) for name in files.entries}, tensors)


def test_the_order_of_writing_changes_no_byte(tensors, tmp_path):
    write(tmp_path / "a", tensors)
    write(tmp_path / "b", tensors, order=list(tensors)[::-1])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_file_is_byte_equal_to_that_of_the_library(tensors, tmp_path):
    write(tmp_path / "a", tensors)
    safetensors.torch.save_file(tensors, tmp_path / "b", metadata={"format": "pt"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_transposed_tensor_is_written_in_its_own_order(tmp_path):
    tensor = torch.arange(6.0).view(2, 3).T
    write(tmp_path / WEIGHTS, {"t": tensor})
    assert torch.equal(safetensors.torch.load_file(tmp_path / WEIGHTS)["t"], tensor)


def test_a_tensor_that_was_never_written_is_an_error(tmp_path):
    with (
        pytest.raises(AssertionError, match="lacks"),
        TensorWriter(tmp_path / WEIGHTS, {"t": TensorSpec(torch.float32, (2,))}),
    ):
        pass


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(2).half()])
def test_a_tensor_of_another_kind_than_announced_is_an_error(tmp_path, tensor):
    with (
        pytest.raises(AssertionError, match="instead of"),
        TensorWriter(tmp_path / WEIGHTS, {"t": TensorSpec(torch.float32, (2,))}) as writer,
    ):
        writer.write("t", tensor)


def test_shapes_are_known_without_data(tensors, tmp_path):
    write(tmp_path / WEIGHTS, tensors)
    files = TensorFiles(tmp_path)
    shape = files.shape_only("BF16")
    assert (shape.device.type, shape.dtype, shape.shape) == ("meta", torch.bfloat16, (3, 5))
    assert files.num_values == sum(t.numel() for t in tensors.values())


def test_shards_read_like_one_file(tensors, tmp_path):
    write(tmp_path / WEIGHTS, tensors)
    cut_into_shards(tmp_path, 3)
    files = TensorFiles(tmp_path)
    assert len(files.file_names) == 3 and files.has_index
    assert same({name: files.get(name) for name in files.entries}, tensors)


def test_a_written_index_is_read_again(tmp_path):
    write(tmp_path / "a.safetensors", {"x": torch.ones(2)})
    write(tmp_path / "b.safetensors", {"y": torch.ones(3)})
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"}, 20)
    assert torch.equal(TensorFiles(tmp_path).get("y"), torch.ones(3))


def test_a_single_file_of_any_name_is_the_model(tmp_path):
    write(tmp_path / "weights.safetensors", {"x": torch.ones(2)})
    assert TensorFiles(tmp_path).file_of == {"x": "weights.safetensors"}


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", {"x": torch.ones(2)})
    write_index(tmp_path, {"x": "a.safetensors", "z": "b.safetensors"}, 16)
    with pytest.raises(ValueError, match=r"'x' is both in a.safetensors and in b.safetensors"):
        TensorFiles(tmp_path)


def test_several_files_without_an_index_are_refused(tmp_path):
    for name in "ab":
        write(tmp_path / f"{name}.safetensors", {name: torch.ones(2)})
    with pytest.raises(ValueError, match="it is open which of them are the model"):
        TensorFiles(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    write(tmp_path / WEIGHTS, {"x": torch.ones(100)})
    files = TensorFiles(tmp_path)
    with (tmp_path / WEIGHTS).open("r+b") as file:
        file.truncate(200)
    with pytest.raises(ValueError, match="became shorter while it was read"):
        files.get("x")


def test_headers_of_the_library_are_accepted(tmp_path):
    safetensors.torch.save_file({"x": torch.ones(2, 3)}, tmp_path / WEIGHTS, {"format": "pt"})
    edit_tensors(tmp_path, y=torch.zeros(4))
    entries = read_header(tmp_path / WEIGHTS)
    assert {name: entry.shape for name, entry in entries.items()} == {"x": (2, 3), "y": (4,)}
