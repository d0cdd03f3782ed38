"""Build sdist and wheel, install them in a clean environment, use them as a stranger would.

    python tools/check_package.py [--constraints FILE] [--pip-args "..."]

1. Build the sdist, and the wheel from the sdist; both must hold every file of the package.
2. Install the wheel alone in a new virtual environment, and from another folder import every
   module, every name in an `__all__`, and every dotted name that README.md and docs/ mention.
3. Run `--help` of every declared command and of each of its subcommands.
4. Add the extras `train` and `report`, and run the code blocks of README.md in their order, in
   one empty folder: ```python blocks as one program each, ```bash and ```sh blocks as scripts,
   and the lines of ```console blocks that begin with `$ `. A block is left out only by a line
   `<!-- not run: REASON -->` right above it.

The exit status is 0 if every check passes.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "depthdial"
EXTRAS = "train,report"
BLOCK_SECONDS = 900
TOOL_SECONDS = 3600

FENCE = re.compile(
    r"^(?:<!--[ ]*not run:(?P<reason>.*?)-->[ ]*\n\s*)?```(?P<language>\w+)[ ]*\n(?P<text>.*?)^```",
    re.MULTILINE | re.DOTALL,
)
DOTTED = re.compile(rf"(?<![\w./-]){PACKAGE}(?:\.[A-Za-z_]\w*)+(?![\w/-])")

IMPORT_EVERYTHING = f"""
import importlib, pkgutil, sys, {PACKAGE} as package
failures = []
def attempt(name, action):
    try:
        action()
    except Exception as error:
        failures.append(f"{{name}}: {{type(error).__name__}}: {{error}}")
def resolve(dotted):
    parts, found = dotted.split("."), package
    for depth, part in enumerate(parts[1:], 2):
        if part not in vars(found):
            try:
                importlib.import_module(".".join(parts[:depth]))
            except ModuleNotFoundError:
                pass  # a lazy name of the module; the next line fails if it is none either
        found = getattr(found, part)
    return found
walked = pkgutil.walk_packages(
    package.__path__, "{PACKAGE}.", onerror=lambda name: attempt(name, lambda: resolve(name))
)
modules = ["{PACKAGE}"]
modules += [m.name for m in walked if not m.name.endswith("__main__")]
for name in modules:
    attempt(name, lambda: importlib.import_module(name))
    for public in vars(sys.modules[name]).get("__all__", ()) if name in sys.modules else ():
        attempt(f"{{name}}.{{public}}", lambda: resolve(f"{{name}}.{{public}}"))
for name in sys.argv[1:]:
    attempt(f"documented name {{name}}", lambda: resolve(name))
print(package.__file__)
print(len(modules), "modules,", len(sys.argv) - 1, "documented names")
sys.exit("\\n".join(failures) or 0)
"""


class CheckFailed(Exception):
    """One check did not hold; the text says how."""


@dataclass(frozen=True)
class Block:
    """One code block of a Markdown file."""

    line: int
    language: str
    text: str
    reason: str | None
    """Why it is not run; None for a block that is."""


@dataclass
class Report:
    """Runs checks one after another and keeps the count."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)

    def check(self, name: str, action: Callable[[], str]) -> None:
        """Run one check; `action` returns what to print behind its name."""
        try:
            print(f"ok      {name}: {action()}", flush=True)
            self.passed += 1
        except (CheckFailed, OSError, subprocess.TimeoutExpired) as error:
            print(f"FAILED  {name}: {error}", flush=True)
            self.failed.append(name)


def code_blocks(markdown: str) -> list[Block]:
    """All fenced blocks that name a language. An opt-out without a reason is an error."""
    blocks = []
    for match in FENCE.finditer(markdown):
        reason = match["reason"]
        line = markdown[: match.start("language")].count("\n") + 1
        if reason is not None and not reason.strip():
            raise CheckFailed(f"line {line}: 'not run:' needs a reason.")
        blocks.append(Block(line, match["language"], match["text"], reason and reason.strip()))
    return blocks


def command_of(block: Block, python: Path) -> list[str] | None:
    """How to run a block; None for languages that are not programs (yaml, text, ...)."""
    if block.language == "python":
        return [str(python), "-c", block.text]
    if block.language in ("bash", "sh"):
        return ["bash", "-euo", "pipefail", "-c", block.text]
    if block.language == "console":
        commands = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
        if not commands:
            raise CheckFailed("a console block without a line that begins with '$ '.")
        return ["bash", "-euo", "pipefail", "-c", "\n".join(commands)]
    return None


def subcommands(help_text: str) -> list[str]:
    """Commands of a help text: words that an indented line explains, two spaces or more between."""
    return re.findall(r"^  ([a-z][a-z-]*)  +\S", help_text, flags=re.MULTILINE)


def documented_names(root: Path) -> list[str]:
    """Dotted names of the package in README.md and docs/."""
    texts = [*root.glob("README.md"), *sorted((root / "docs").rglob("*.md"))]
    return sorted({name for path in texts for name in DOTTED.findall(path.read_text("utf-8"))})


def run(command: list[str], *, cwd: Path, env: dict[str, str], seconds: int = TOOL_SECONDS) -> str:
    """Standard output of a command. Raises CheckFailed with the end of its output."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=env,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
    )
    if done.returncode:
        # A program given as text would hide what it printed: its first line is enough.
        shown = " ".join(part.strip().partition("\n")[0] for part in command)
        raise CheckFailed(f"exit status {done.returncode} of {shown}\n{done.stdout[-4000:]}")
    return done.stdout


def package_files() -> set[str]:
    """Files of the package in the source tree, as paths from the repository root."""
    files = (path for path in (ROOT / PACKAGE).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


def check_archive(names: set[str]) -> str:
    """Every file of the package is in an archive."""
    missing = sorted(package_files() - names)
    if missing:
        raise CheckFailed(f"{len(missing)} files are missing, first: {missing[:5]}")
    return f"{len(names)} files"


def check_metadata(wheel: Path) -> str:
    """The command and the README are declared as soon as they exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    if (ROOT / PACKAGE / "cli").exists() and not project.get("scripts"):
        raise CheckFailed(
            f"{PACKAGE}/cli exists but pyproject.toml declares no command; add "
            f'[project.scripts] {PACKAGE} = "{PACKAGE}.cli.main:main".'
        )
    if (ROOT / "README.md").exists() and "readme" not in project:
        raise CheckFailed('README.md exists; add readme = "README.md" to pyproject.toml.')
    with zipfile.ZipFile(wheel) as archive:
        if not any(name.endswith("licenses/LICENSE") for name in archive.namelist()):
            raise CheckFailed("the wheel has no LICENSE.")
    return "command, README and licence as the tree has them"


class CleanEnvironment:
    """A new virtual environment and an empty working folder, away from the repository."""

    def __init__(self, folder: Path, *, constraints: Path, pip_args: list[str]) -> None:
        self.work = folder / "work"
        self.work.mkdir()
        self.bin = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        self.constraints = constraints
        self.pip_args = pip_args
        venv.create(folder / "venv", with_pip=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL")
        }
        self.env = inherited | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
        }

    def install(self, requirement: str) -> str:
        """pip install, then a check that the installed requirements fit together."""
        pip = [str(self.bin / "python"), "-m", "pip", "--disable-pip-version-check", "-q"]
        limits = ["-c", str(self.constraints)]
        self.run([*pip, "install", *self.pip_args, *limits, requirement])
        self.run([*pip, "check"])
        return "installed, no conflicts"

    def run(self, command: list[str], *, seconds: int = TOOL_SECONDS) -> str:
        """Run from the working folder."""
        return run(command, cwd=self.work, env=self.env, seconds=seconds)

    def import_everything(self) -> str:
        """Every module and public name; the copy imported must be the installed one."""
        names = documented_names(ROOT)
        # -I: neither the working folder nor user settings can lend a module.
        output = self.run([str(self.bin / "python"), "-I", "-c", IMPORT_EVERYTHING, *names])
        *_, location, summary = output.strip().splitlines()
        if not Path(location).resolve().is_relative_to(self.bin.parent.resolve()):
            raise CheckFailed(f"imported {location}, which is not the installed package.")
        return summary

    def help_of(self, command: str) -> str:
        """`--help` of a command and of each subcommand prints something."""
        program = str(self.bin / command)
        names = subcommands(self.run([program, "--help"]))
        if not names:
            raise CheckFailed(f"`{command} --help` lists no subcommand.")
        for name in names:
            if not self.run([program, name, "--help"]).strip():
                raise CheckFailed(f"`{command} {name} --help` prints nothing.")
        return ", ".join(names)

    def run_block(self, block: Block) -> str:
        """One README block, in the folder that all blocks share."""
        command = command_of(block, self.bin / "python")
        assert command is not None, "only blocks with a command are run"
        self.run(command, seconds=BLOCK_SECONDS)
        return block.language


def build(folder: Path) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the unpacked sdist."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    run(command, cwd=ROOT, env=dict(os.environ))
    [sdist], [wheel] = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def declared_commands() -> list[str]:
    """Console commands in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return list(project.get("scripts", {}))


def check_archives(report: Report, *, sdist: Path, wheel: Path) -> None:
    """What the two archives hold."""
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    report.check("sdist holds the package", lambda: check_archive(in_sdist))
    report.check("wheel from the sdist holds the package", lambda: check_archive(in_wheel))
    report.check("metadata", lambda: check_metadata(wheel))


def check_readme(report: Report, environment: CleanEnvironment) -> None:
    """Every block of README.md that is a program."""
    readme = ROOT / "README.md"
    if not readme.exists():
        print("skipped README.md: there is none yet")
        return
    for block in code_blocks(readme.read_text("utf-8")):
        name = f"README.md line {block.line} ({block.language})"
        if block.reason:
            print(f"skipped {name}: {block.reason}")
        elif block.language in ("python", "bash", "sh", "console"):
            report.check(name, lambda block=block: environment.run_block(block))


def main() -> int:
    """Run all checks; 0 if every one passed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--constraints", type=Path, default=ROOT / "constraints.txt", help="versions to install"
    )
    parser.add_argument("--pip-args", type=shlex.split, default=[], help="more arguments for pip")
    args = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory(prefix="depthdial-package-") as name:
        folder = Path(name)
        sdist, wheel = build(folder / "dist")
        check_archives(report, sdist=sdist, wheel=wheel)
        environment = CleanEnvironment(
            folder, constraints=args.constraints.resolve(), pip_args=args.pip_args
        )
        report.check("install without extras", lambda: environment.install(str(wheel)))
        report.check("import everything", environment.import_everything)
        for command in declared_commands():
            report.check(f"{command} --help", lambda c=command: environment.help_of(c))
        report.check("install extras", lambda: environment.install(f"{wheel}[{EXTRAS}]"))
        check_readme(report, environment)
    print(f"package: {report.passed} passed, {len(report.failed)} failed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
