"""A device that is not there is one clear line."""

import pytest
import torch

from depthdial.model.device import available_devices, check_device


def test_the_cpu_is_always_there():
    assert check_device("cpu") == "cpu"
    assert available_devices()[0] == "cpu"


@pytest.mark.parametrize("name", ["nonsense", "meta", "hpu", "cuda:77"])
def test_an_unusable_device_is_named_with_the_usable_ones(name):
    with pytest.raises(ValueError, match=f"device '{name}' cannot be used here.*Available: cpu"):
        check_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(ValueError, match="device 'cuda' cannot be used here"):
        check_device("cuda")
