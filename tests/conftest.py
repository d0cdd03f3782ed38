"""Settings shared by all tests: one thread, fixed examples, no network."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# Before any test module imports a hub client: a test that wants to download must fail at once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

# Fixed examples: a red run can be repeated; no deadline: CI machines are shared.
settings.register_profile("depthdial", deadline=None, derandomize=True)
settings.load_profile("depthdial")


def pytest_configure() -> None:
    """Bit-exact comparisons need a fixed thread count."""
    torch.set_num_threads(1)


def refuse_remote(address: object) -> None:
    """Raise for an internet address that is not this machine."""
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "::1", "localhost", ""):
        raise RuntimeError(f"a test tried to reach {address[0]}; tests use no network.")


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Connections to other machines fail; local servers and gloo processes work."""
    connect, connect_ex = socket.socket.connect, socket.socket.connect_ex

    def guarded(self: socket.socket, address: object) -> None:
        refuse_remote(address)
        return connect(self, address)

    def guarded_ex(self: socket.socket, address: object) -> int:
        refuse_remote(address)
        return connect_ex(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        patch.setattr(socket.socket, "connect_ex", guarded_ex)
        yield
