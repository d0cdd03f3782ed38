"""What travels with a model is its own: a link out of the folder picks no other file for it."""

import os

import pytest
from published import TEMPLATE, add_tokenizer, copy_golden, edit_json

from depthdial.convert.convert import convert
from depthdial.formats.hf_export import export_hf
from depthdial.formats.import_export import export_checkpoint, import_checkpoint
from depthdial.formats.inspection import inspect_source
from depthdial.model.folder import copy_companions

NAMES = (
    "LICENSE",
    "NOTICE.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "additional_chat_templates/rag.jinja",
)


@pytest.fixture
def source(tmp_path):
    folder = copy_golden("llama", tmp_path / "source")
    add_tokenizer(folder)
    return folder


@pytest.fixture
def secret(tmp_path):
    """A file of this computer that is no part of any model."""
    path = tmp_path / "home" / "key"
    path.parent.mkdir()
    path.write_text("{}")
    return path


def link(folder, name, target):
    place = folder / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target)


def refused(run, folder, name, target):
    with pytest.raises(ValueError) as caught:
        run()
    message = str(caught.value)
    assert f"{folder / name} is a link that leads out of its folder, to {target}" in message
    assert "Put the file itself there" in message


@pytest.mark.parametrize("name", NAMES)
def test_f31_an_import_copies_no_file_from_elsewhere(source, secret, tmp_path, name):
    """A linked LICENSE was followed, and its contents came into every export of the model."""
    link(source, name, secret)
    refused(lambda: import_checkpoint(source, tmp_path / "out"), source, name, secret)
    assert not (tmp_path / "out").exists()
    [problem] = inspect_source(source).problems
    assert f"{source / name} is a link" in problem


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("relative", ["../home/key", "../source/../home/key"])
def test_f31_neither_does_a_link_by_another_path(source, secret, tmp_path, name, relative):
    depth = name.count("/")
    link(source, name, "../" * depth + relative)
    refused(lambda: import_checkpoint(source, tmp_path / "out"), source, name, secret)


def test_f31_a_folder_of_templates_that_is_a_link_is_no_way_around(source, secret, tmp_path):
    secret.rename(secret.parent / "a.jinja")
    (source / "additional_chat_templates").symlink_to(secret.parent)
    with pytest.raises(ValueError, match=r"a\.jinja is a link that leads out of its folder"):
        import_checkpoint(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.model"])
def test_f31_export_conversion_and_training_copy_none_either(source, secret, tmp_path, name):
    model = tmp_path / "model"
    import_checkpoint(source, model)
    link(model, name, secret)
    (tmp_path / "run").mkdir()
    for run in (
        lambda: export_checkpoint(model, tmp_path / "x", family="llama"),
        lambda: export_hf(model, tmp_path / "x"),
        lambda: convert(model, tmp_path / "x", method="loop-window", core="2:4"),
        lambda: copy_companions(model, tmp_path / "run"),
    ):
        refused(run, model, name, secret)
    assert not (tmp_path / "x").exists() and not (tmp_path / "run" / name).exists()


def test_f31_links_inside_a_folder_are_followed(source, tmp_path):
    (source / "licences").mkdir()
    (source / "licences" / "text").write_text("Apache")
    link(source, "LICENSE", "licences/text")
    import_checkpoint(source, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache"
    assert not (tmp_path / "out" / "LICENSE").is_symlink()


@pytest.mark.parametrize("by_link", [False, True])
def test_f31_a_snapshot_of_the_hub_cache_consists_of_links_and_opens(source, tmp_path, by_link):
    edit_json(source / "tokenizer_config.json", chat_template=TEMPLATE)
    (source / "LICENSE").write_text("Apache")
    blobs = tmp_path / "models--org--name" / "blobs"
    snapshot = blobs.parent / "snapshots" / "1f0a"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in source.iterdir():
        os.replace(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    folder = snapshot
    if by_link:
        folder = tmp_path / "name"
        folder.symlink_to(snapshot)
    assert inspect_source(folder).problems == ()
    import_checkpoint(folder, tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE").read_text() == "Apache"


def test_f31_a_folder_called_snapshots_opens_no_other_place(source, secret, tmp_path):
    """Only `blobs` beside it holds the contents of links."""
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1f0a"
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    link(snapshot, "LICENSE", secret)
    refused(lambda: import_checkpoint(snapshot, tmp_path / "out"), snapshot, "LICENSE", secret)


def test_f31_a_gguf_file_takes_no_licence_from_elsewhere(secret, tmp_path):
    pytest.importorskip("gguf")
    from test_gguf import write_gguf

    (tmp_path / "folder").mkdir()
    write_gguf(tmp_path / "folder" / "model.gguf")
    link(tmp_path / "folder", "LICENSE", secret)
    refused(
        lambda: import_checkpoint(tmp_path / "folder" / "model.gguf", tmp_path / "out"),
        tmp_path / "folder",
        "LICENSE",
        secret,
    )
