"""Hub ids: what is fetched, and what is said where that does not work."""

from fnmatch import fnmatch
from unittest.mock import MagicMock

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from published import add_tokenizer, copy_golden

import depthdial
from depthdial.formats.import_export import import_checkpoint
from depthdial.model.folder import CARRIED_FILES

HINT = "Cannot find a snapshot. Set 'HF_HUB_OFFLINE=0' as environment variable."


def answer(error):
    return lambda *args, **kwargs: (_ for _ in ()).throw(error)


ERRORS = [
    (LocalEntryNotFoundError(HINT), "the hub cannot be reached, and no earlier download is kept"),
    (GatedRepoError(HINT, response=MagicMock()), "only to those who asked for access"),
    (RepositoryNotFoundError(HINT, response=MagicMock()), "nothing of that name, or keeps it priv"),
    (HfHubHTTPError("500: on fire\nmore", response=MagicMock()), r"\(500: on fire\)"),
    (OSError(28, "No space left on device"), "No space left on device"),
]


@pytest.mark.parametrize(("error", "match"), ERRORS)
def test_a_failed_download_is_told_in_our_words(tmp_path, monkeypatch, error, match):
    """The library's hint on its own settings stood in the middle of our message."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer(error))
    for attempt in (
        lambda: import_checkpoint("org/name", tmp_path / "a"),
        lambda: depthdial.load("org/name"),
    ):
        with pytest.raises(FileNotFoundError, match=match) as found:
            attempt()
        assert "HF_HUB_OFFLINE" not in str(found.value) and "more" not in str(found.value)


def test_without_a_network_there_is_no_hint_on_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="the hub cannot be reached") as found:
        import_checkpoint("nobody-depthdial/no-such-model", tmp_path / "a")
    assert "HF_HUB_OFFLINE" not in str(found.value)


def test_models_and_checkpoints_are_fetched_whole_and_never_code(tmp_path, monkeypatch):
    """A model of ours came without its generation config, chat template and licence."""
    source, asked = copy_golden("llama", tmp_path / "source"), []
    add_tokenizer(source)

    def download(name, *, allow_patterns):
        asked.append(allow_patterns)
        return str(source if len(asked) == 1 else tmp_path / "a")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    import_checkpoint("org/name", tmp_path / "a")
    depthdial.load("org/name")
    wanted = (
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "origin.json",
        "additional_chat_templates/rag.jinja",
        "LICENCE.md",
        "LICENSE",
        "NOTICE.txt",
        "USE_POLICY.md",
        *CARRIED_FILES,
    )
    for patterns in asked:
        assert [name for name in wanted if not any(fnmatch(name, p) for p in patterns)] == []
        for name in ("modeling.py", "pytorch_model.bin", "x.pt", "x.pth", "x.pkl", "run.sh"):
            assert not any(fnmatch(name, pattern) for pattern in patterns), name
    assert len(asked) == 2
