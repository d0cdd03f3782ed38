"""Provenance: code state, versions, seed, hardware, and nothing private."""

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
import torch

from depthdial.training.provenance import collect_provenance

GIT_IDENTITY = {
    "GIT_AUTHOR_NAME": "test", "GIT_AUTHOR_EMAIL": "test@invalid",
    "GIT_COMMITTER_NAME": "test", "GIT_COMMITTER_EMAIL": "test@invalid",
}  # fmt: skip


@pytest.fixture
def checkout(tmp_path):
    """A repository with one committed file in `code/`."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("x = 1\n")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "start"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True, env=os.environ | GIT_IDENTITY)
    return tmp_path / "code"


def git_state(source_dir):
    return collect_provenance(seed=0, device="cpu", source_dir=source_dir)["git"]


def test_clean_checkout_gives_its_commit_and_an_empty_patch(checkout):
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert git_state(checkout) == {"commit": head, "dirty_patch": "", "untracked_files": []}


def test_changes_and_new_files_are_recorded(checkout):
    (checkout / "a.py").write_text("x = 2\n")
    (checkout / "b.py").write_text("y = 1\n")
    state = git_state(checkout)
    assert "-x = 1\n+x = 2\n" in state["dirty_patch"]
    assert state["untracked_files"] == ["b.py"]


def test_code_outside_a_checkout_has_no_git_state(tmp_path):
    assert git_state(tmp_path) is None


def test_copy_installed_inside_an_unrelated_repository_is_not_taken_for_it(checkout):
    installed = checkout / "venv"
    installed.mkdir()
    (installed / "c.py").write_text("z = 1\n")
    assert git_state(installed) is None


def test_machine_without_git_has_no_git_state(checkout, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert git_state(checkout) is None


def test_versions_seed_and_hardware_are_recorded(tmp_path):
    facts = collect_provenance(seed=17, device="cpu", source_dir=tmp_path)
    assert facts["seed"] == 17
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"] == platform.python_version()
    assert {"depthdial", "transformers", "tokenizers"} <= set(facts["versions"])
    assert facts["hardware"]["cores"] == os.cpu_count()
    assert facts["hardware"]["memory_bytes"] > 2**28
    assert facts["hardware"]["torch_threads"] == torch.get_num_threads()
    assert facts["hardware"]["device"] == "cpu"


def test_no_user_host_or_path_is_recorded(checkout):
    text = json.dumps(collect_provenance(seed=0, device="cpu", source_dir=checkout))
    assert str(checkout) not in text and str(Path.home()) + "/" not in text
    words = set(json.loads(text)["hardware"].values())
    assert not words & {platform.node(), Path.home().name} - {""}
