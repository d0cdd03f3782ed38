"""Whether the device that a person named can be used, said in one line."""

from __future__ import annotations

import torch


def check_device(name: str) -> str:
    """The name itself, if tensors can be made there.

    Raises: ValueError naming the device, why not, and what this machine offers.
    """
    try:
        torch.zeros(1, device=name).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"device '{name}' cannot be used here ({reason}). Available: "
            f"{', '.join(available_devices())}."
        ) from None
    return name


def available_devices() -> list[str]:
    """Device names that this machine and this build of torch offer."""
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices
