"""pyproject.toml, constraints.txt and the variants of `make test-compat` fit together."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
CONSTRAINTS = (ROOT / "constraints.txt").read_text("utf-8")


@pytest.fixture(scope="module")
def compat():
    """tools/compat.py as a module; tools/ is no package."""
    spec = importlib.util.spec_from_file_location("compat_tool", ROOT / "tools" / "compat.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def declared() -> list[Requirement]:
    extras = PYPROJECT["project"]["optional-dependencies"].values()
    texts = [*PYPROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]
    return [Requirement(text) for text in texts]


def test_constraints_begin_with_torch():
    """pip on a machine with a CPU build at hand takes it only for this exact version."""
    assert CONSTRAINTS.splitlines()[0] == "torch==2.13.0"


def test_every_declared_dependency_is_tested_at_a_version_it_allows(compat):
    tested = compat.tested_versions(CONSTRAINTS)
    for requirement in declared():
        version = tested[compat.canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} excludes {version}"


def test_constraints_hold_nothing_undeclared(compat):
    names = {compat.canonicalize_name(requirement.name) for requirement in declared()}
    assert set(compat.tested_versions(CONSTRAINTS)) <= names


def test_the_lowest_variant_pins_every_runtime_dependency_to_its_lower_bound(compat):
    tested = compat.tested_versions(CONSTRAINTS)
    text = compat.constraints("lowest", pyproject=PYPROJECT, tested=tested, torch="2.13.0")
    assert "transformers==5.18\n" in text
    assert "torch==2.13.0\n" in text
    assert f"pytest=={tested['pytest']}\n" in text


def test_the_highest_variant_leaves_runtime_dependencies_free(compat):
    tested = compat.tested_versions(CONSTRAINTS)
    text = compat.constraints("highest", pyproject=PYPROJECT, tested=tested, torch="2.13.0")
    assert "transformers" not in text
    assert "torch==2.13.0\n" in text


def test_a_dependency_without_a_lower_bound_is_refused(compat):
    with pytest.raises(ValueError, match="needs exactly one lower bound"):
        compat.lower_bound(Requirement("numpy<3"))
