"""Run the suite and the package check with the lowest and the highest allowed dependencies.

    python tools/compat.py [--torch VERSION] [--pip-args "..."]

lowest: every run-time dependency at the lower bound that pyproject.toml states.
highest: every run-time dependency at the newest version that pyproject.toml allows.
Both keep the tested torch (constraints.txt) unless --torch says otherwise, because its
builds differ by machine, and the tested versions of the development tools. The
environments stay in build/compat/ and are made anew by each run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "compat"
RUNTIME_EXTRAS = ("train", "report")


def runtime_requirements(pyproject: dict) -> list[Requirement]:
    """Requirements of the package and of the extras that the tests use."""
    project = pyproject["project"]
    extras = [text for name in RUNTIME_EXTRAS for text in project["optional-dependencies"][name]]
    return [Requirement(text) for text in [*project["dependencies"], *extras]]


def lower_bound(requirement: Requirement) -> str:
    """Version behind `>=`. Raises ValueError if there is none."""
    bounds = [part.version for part in requirement.specifier if part.operator == ">="]
    if len(bounds) != 1:
        raise ValueError(f"'{requirement}' needs exactly one lower bound, e.g. >=1.0.")
    return bounds[0]


def tested_versions(text: str) -> dict[str, str]:
    """Name -> version of a constraints file."""
    pairs = (line.split("==") for line in text.splitlines() if line.strip())
    return {canonicalize_name(name): version for name, version in pairs}


def constraints(variant: str, *, pyproject: dict, tested: dict[str, str], torch: str) -> str:
    """Text of the constraints file of one variant."""
    runtime = {canonicalize_name(r.name): r for r in runtime_requirements(pyproject)}
    pins = {name: version for name, version in tested.items() if name not in runtime}
    if variant == "lowest":
        pins |= {name: lower_bound(requirement) for name, requirement in runtime.items()}
    return "".join(f"{name}=={version}\n" for name, version in (pins | {"torch": torch}).items())


def check(variant: str, *, text: str, pip_args: str) -> bool:
    """Install, run the suite, check the package; True if all of it passed."""
    place = FOLDER / variant
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    limits = place / "constraints.txt"
    limits.write_text(text, encoding="utf-8")
    venv.create(place / "venv", with_pip=True)
    python = str(place / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    target = f"{ROOT}[{','.join(RUNTIME_EXTRAS)},dev]"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    commands = [
        [*pip, "install", "-q", *shlex.split(pip_args), "-c", str(limits), "-e", target],
        [*pip, "check"],
        [*pip, "list"],
        [python, "-m", "pytest", "-n", "2", "-m", "not slow and not gpu"],
        [
            python,
            "tools/check_package.py",
            *("--constraints", str(limits)),
            f"--pip-args={pip_args}",
        ],
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    for command in commands:
        print(f"{variant}: {shlex.join(command)}", flush=True)
        if subprocess.run(command, cwd=ROOT, env=env).returncode:
            return False
    return True


def main() -> int:
    """Both variants; 0 if both passed."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    tested = tested_versions((ROOT / "constraints.txt").read_text("utf-8"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", default=tested["torch"], help="version of torch in both")
    parser.add_argument("--pip-args", default="", help="more arguments for pip")
    args = parser.parse_args()
    results = {}
    for variant in ("lowest", "highest"):
        text = constraints(variant, pyproject=pyproject, tested=tested, torch=args.torch)
        results[variant] = check(variant, text=text, pip_args=args.pip_args)
    for variant, passed in results.items():
        print(f"{variant}: {'passed' if passed else 'FAILED'}")
    print(f"compat: {sum(results.values())} passed, {2 - sum(results.values())} failed")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
