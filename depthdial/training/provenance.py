"""Where a result comes from: code, versions, seed, hardware.

Nothing here names a person, a host or a path of the machine.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("depthdial", "torch", "transformers", "tokenizers", "safetensors", "numpy")
GIT_TIMEOUT_SECONDS = 20


def collect_provenance(*, seed: int, device: str, source_dir: Path | None = None) -> dict[str, Any]:
    """Facts that tell one run from another, as plain JSON types.

    Args:
        device: torch device name the run computes on.
        source_dir: folder of the code; None for the installed `depthdial` package.

    Returns: keys seed, git (commit, dirty_patch, untracked_files; null outside a git checkout),
        versions (null for a package that is not installed), hardware.
    """
    return {
        "seed": seed,
        "git": _git_state(source_dir or Path(__file__).resolve().parents[1]),
        "versions": {"python": platform.python_version()}
        | {package: _installed_version(package) for package in PACKAGES},
        "hardware": _hardware(device),
    }


def _git_state(source_dir: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the code, or None if git does not track it.

    An installed copy may lie inside somebody's unrelated repository, which then ignores it or
    at least does not track it.
    """
    if not _git(source_dir, "ls-files", "--", "."):
        return None
    commit = _git(source_dir, "rev-parse", "HEAD")
    if commit is None:
        return None
    untracked = _git(source_dir, "ls-files", "--others", "--exclude-standard", "--", ".") or ""
    return {
        "commit": commit.strip(),
        "dirty_patch": _git(source_dir, "diff", "--no-ext-diff", "HEAD", "--", "."),
        "untracked_files": untracked.splitlines(),
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """Output of a git command; None if git is absent, too slow, or says no."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=GIT_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _hardware(device: str) -> dict[str, Any]:
    """Processor, cores, memory and the device of the run."""
    hardware = {
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": _memory_bytes(),
        "device": device,
        "device_name": None,
    }
    if torch.device(device).type == "cuda":
        hardware["device_name"] = torch.cuda.get_device_name(device)
    return hardware


def _memory_bytes() -> int | None:
    """Memory of the machine, None if the system does not tell (Windows has no sysconf)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _cpu_model() -> str | None:
    """Marketing name of the processor, None if the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), flags=re.MULTILINE)
        return match[1] if match else None
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8")
        return done.stdout.strip() or None
    return platform.processor() or None
