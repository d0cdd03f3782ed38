"""What tools/check_package.py takes for a check; building and installing is `make check-package`.

B60: a published package whose wheel held only metadata, and examples that nobody had run.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    """tools/check_package.py as a module; tools/ is no package."""
    path = ROOT / "tools" / "check_package.py"
    spec = importlib.util.spec_from_file_location("check_package_tool", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_b60_every_program_block_is_found(tool):
    text = "# Title\n```python\nx = 1\n```\ntext\n\n```console\n$ ls\nout\n```\n```\nplain\n```\n"
    blocks = tool.code_blocks(text)
    assert [(b.language, b.text, b.line) for b in blocks] == [
        ("python", "x = 1\n", 2),
        ("console", "$ ls\nout\n", 7),
    ]


def test_b60_a_block_is_left_out_only_with_a_reason(tool):
    [block] = tool.code_blocks("<!-- not run: takes 12 minutes -->\n```bash\nmake demo\n```\n")
    assert block.reason == "takes 12 minutes"
    with pytest.raises(tool.CheckFailed, match="needs a reason"):
        tool.code_blocks("<!-- not run: -->\n```bash\nmake demo\n```\n")


def test_an_opt_out_concerns_only_the_block_right_below_it(tool):
    text = "<!-- not run: slow -->\nwords\n```bash\nls\n```\n"
    assert [block.reason for block in tool.code_blocks(text)] == [None]


def test_a_console_block_runs_its_dollar_lines(tool):
    block = tool.Block(1, "console", "$ echo a\na\n$ echo b\nb\n", None)
    assert tool.command_of(block, Path("python"))[-1] == "echo a\necho b"


def test_a_console_block_without_a_command_is_refused(tool):
    with pytest.raises(tool.CheckFailed, match="begins with"):
        tool.command_of(tool.Block(1, "console", "only output\n", None), Path("python"))


def test_data_blocks_are_not_programs(tool):
    assert tool.command_of(tool.Block(1, "yaml", "a: 1\n", None), Path("python")) is None


def test_subcommands_are_read_from_the_explained_words(tool):
    text = (
        "usage: depthdial COMMAND ...\n\nElastic depth.\n\n"
        "  train      train a recipe\n  sweep      loss at every loop count\n\n"
        "  --version  print the version\n\nStart with: depthdial train\n"
    )
    assert tool.subcommands(text) == ["train", "sweep"]
    assert tool.subcommands("usage: depthdial [-h] FILE\n") == []


def test_b60_documented_names_are_collected(tool, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("Use `depthdial.load`, see depthdial/model/count/costs.py.")
    (tmp_path / "docs" / "a.md").write_text("`depthdial.model.count.plan(config)`")
    assert tool.documented_names(tmp_path) == ["depthdial.load", "depthdial.model.count.plan"]


def test_b60_an_archive_that_lacks_a_file_of_the_package_fails(tool):
    with pytest.raises(tool.CheckFailed, match="files are missing"):
        tool.check_archive({"depthdial/__init__.py"})
    assert tool.check_archive(tool.package_files())


def test_b60_a_failing_command_fails_its_check(tool, tmp_path, capsys):
    report = tool.Report()
    command = [sys.executable, "-c", "import sys; print('last words'); sys.exit(3)"]
    report.check("broken", lambda: tool.run(command, cwd=tmp_path, env={}))
    report.check("sound", lambda: "fine")
    assert (report.passed, report.failed) == (1, ["broken"])
    assert "last words" in capsys.readouterr().out


def test_b60_a_module_that_cannot_be_imported_fails(tool, tmp_path):
    package = tmp_path / "depthdial"
    package.mkdir()
    (package / "__init__.py").write_text("__all__ = ['missing']\n")
    (package / "broken.py").write_text("import a_module_that_does_not_exist\n")
    command = [sys.executable, "-c", tool.IMPORT_EVERYTHING, "depthdial.nowhere"]
    with pytest.raises(tool.CheckFailed) as caught:
        tool.run(command, cwd=tmp_path, env={})
    for failure in ("depthdial.missing", "depthdial.broken", "documented name depthdial.nowhere"):
        assert failure in str(caught.value)


def test_b60_a_sound_package_passes_the_import_check(tool, tmp_path):
    package = tmp_path / "depthdial"
    package.mkdir()
    (package / "__init__.py").write_text(
        "__all__ = ['part', 'late']\ndef __getattr__(name):\n"
        "    if name == 'late':\n        return 1\n    raise AttributeError(name)\n"
    )
    (package / "part.py").write_text("__all__ = ['x']\nx = 1\n")
    command = [sys.executable, "-c", tool.IMPORT_EVERYTHING, "depthdial.part.x"]
    output = tool.run(command, cwd=tmp_path, env={})
    assert "2 modules, 1 documented names" in output
