"""The house plan: imports go downward only, without circles; files of a size that can be read.

Every import in `depthdial/` is read from the syntax tree: at the top of a file, inside a
function, under TYPE_CHECKING, and `import_module("depthdial...")` with a literal name.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = "depthdial"
ROOT = Path(__file__).parents[1] / PACKAGE
ORDER = (
    "locks",
    "disk",
    "config",
    "recipes",
    "report",
    "layers",
    "data",
    "cache",
    "model",
    "formats",
    "convert",
    "hf",
    "engine",
    "eval",
    "training",
    "posttraining",
    "studies",
    "api",
    "serve",
    "vllm_plugin",
    "cli",
    "__main__",
)
"""Top-level parts of the package, lowest first; a part imports itself and lower ones."""
FRONT_DOOR_CONSTANTS = {"__version__"}
"""Names that any file may take from `depthdial` itself: they need no other module."""


def modules_below(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module of the package at `root`."""
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imported_names(tree: ast.AST, package: str) -> set[tuple[str, str | None]]:
    """(module, name taken from it or None) of all imports; `package` resolves relative ones."""
    found: set[tuple[str, str | None]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            found |= {(base, alias.name) for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                found.add((node.args[0].value, None))
    return found


def reexports(module: str, modules: dict[str, Path]) -> dict[str, str]:
    """Name -> module that defines it, for the names that a package's `__init__` passes on."""
    if modules[module].name != "__init__.py":
        return {}
    tree = ast.parse(modules[module].read_text(encoding="utf-8"))
    return {name: base for base, name in imported_names(tree, module) if name and base in modules}


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> modules of the same package that it imports.

    A name that a package only passes on counts as imported from the module that defines it.
    """
    modules = modules_below(root)
    passed_on = {module: reexports(module, modules) for module in modules}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        graph[module] = set()
        for base, name in imported_names(ast.parse(path.read_text(encoding="utf-8")), package):
            if base.split(".")[0] != root.name:
                continue
            if name and f"{base}.{name}" in modules:
                graph[module].add(f"{base}.{name}")
            elif name in passed_on.get(base, {}) and base != root.name:
                graph[module].add(passed_on[base][name])
            elif base != root.name or name not in FRONT_DOOR_CONSTANTS:
                graph[module].add(base)
    return graph


def rank(module: str) -> int:
    """Place in ORDER; the package's own `__init__` is the front door, above everything."""
    parts = module.split(".")
    if len(parts) == 1:
        return len(ORDER)
    if parts[1] not in ORDER:
        raise ValueError(f"{module} is not in the house plan; place '{parts[1]}' in ORDER.")
    return ORDER.index(parts[1])


def forbidden_edges(graph: dict[str, set[str]]) -> list[str]:
    """Imports that go up in the order."""
    return [
        f"{module} imports {target}"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if rank(target) > rank(module)
    ]


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One circle of modules, first and last the same, or an empty list."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    for module in sorted(graph):
        if found := visit(module, []):
            return found
    return []


def folder_graph(graph: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """The files and folders that stand directly in a package -> those of them that each uses."""
    inside: dict[str, set[str]] = {}
    for module, targets in graph.items():
        for target in targets:
            if module.startswith(f"{package}.") and target.startswith(f"{package}."):
                child, used = (
                    name.removeprefix(f"{package}.").split(".")[0] for name in (module, target)
                )
                if child != used:
                    inside.setdefault(child, set()).add(used)
    return inside


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Modules of the longest chain of imports, the one on top first; the graph has no circle."""
    chains: dict[str, list[str]] = {}

    def chain(module: str) -> list[str]:
        if module not in chains:
            below = (chain(target) for target in sorted(graph.get(module, ())) if target != module)
            chains[module] = [module, *max(below, key=len, default=[])]
        return chains[module]

    return max((chain(module) for module in sorted(graph)), key=len)


@pytest.fixture
def package(tmp_path):
    """Writes a package from {relative file: source} and returns its import graph."""

    def write(**sources: str) -> dict[str, set[str]]:
        root = tmp_path / PACKAGE
        for name, source in {"__init__": "", **sources}.items():
            path = root / (name.replace("__in__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source)
        return import_graph(root)

    return write


def test_no_import_goes_against_the_order():
    assert forbidden_edges(import_graph(ROOT)) == []


def test_no_modules_import_each_other_in_a_circle():
    assert circle(import_graph(ROOT)) == []


def test_no_folders_import_each_other_in_a_circle():
    graph = import_graph(ROOT)
    packages = [".".join(path.relative_to(ROOT.parent).parts) for path in ROOT.rglob("*/")]
    packages = [name for name in packages if name in graph and name != PACKAGE]
    assert len(packages) > 15
    assert {name: found for name in packages if (found := circle(folder_graph(graph, name)))} == {}


def test_the_longest_chain_of_imports_has_at_most_20_modules():
    chain = longest_chain(import_graph(ROOT))
    assert len(chain) <= 20, " -> ".join(chain)


def test_the_root_holds_few_modules_and_the_packages_of_the_plan():
    modules = sorted(path.name for path in ROOT.glob("*.py"))
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert len(modules) <= 4, modules
    assert folders <= set(ORDER)


ONE_PLACE = "model/looped_lm.py"
"""The method, which belongs in one place and may be longer than other files."""


def test_files_are_neither_too_long_nor_too_short_to_stand_alone():
    graph, modules = import_graph(ROOT), modules_below(ROOT)
    lines = {m: len(path.read_text(encoding="utf-8").splitlines()) for m, path in modules.items()}
    long = [m for m, n in lines.items() if n > 450 and modules[m] != ROOT / ONE_PLACE]
    assert long == []
    assert lines[f"{PACKAGE}.model.looped_lm"] <= 550
    users = {m: [u for u, targets in graph.items() if m in targets and u != m] for m in modules}
    is_file = {m for m, path in modules.items() if path.name not in ("__init__.py", "__main__.py")}
    assert [m for m in sorted(is_file) if lines[m] < 40 and len(users[m]) == 1] == []


def test_the_package_is_seen_at_all():
    """An empty graph would pass every check."""
    graph = import_graph(ROOT)
    assert f"{PACKAGE}.config.model" in graph[f"{PACKAGE}.model.count.costs"]


def test_self_an_upward_import_is_detected(package):
    graph = package(layers__in__a="from depthdial.model.b import x", model__in__b="x = 1")
    assert forbidden_edges(graph) == ["depthdial.layers.a imports depthdial.model.b"]


def test_self_a_downward_import_is_allowed(package):
    graph = package(model__in__b="from depthdial.layers.a import x", layers__in__a="x = 1")
    assert graph["depthdial.model.b"] == {"depthdial.layers.a"}
    assert forbidden_edges(graph) == []


@pytest.mark.parametrize(
    "source",
    [
        "def f():\n    from depthdial.training import step",
        "def f():\n    import depthdial.training.step",
        "def f():\n    from ..training.step import x",
        "import importlib\nm = importlib.import_module('depthdial.training.step')",
        "from typing import TYPE_CHECKING as T\nif T:\n    from depthdial.training import step",
    ],
)
def test_self_a_hidden_upward_import_is_detected(package, source):
    graph = package(eval__in__a=source, training__in__step="x = 1")
    assert forbidden_edges(graph) == ["depthdial.eval.a imports depthdial.training.step"]


@pytest.mark.parametrize("source", ["import depthdial", "from depthdial import load"])
def test_self_importing_the_front_door_from_inside_is_detected(package, source):
    assert forbidden_edges(package(cli=source)) == ["depthdial.cli imports depthdial"]


def test_self_the_version_may_be_imported_from_anywhere(package):
    assert forbidden_edges(package(config="from depthdial import __version__")) == []


def test_self_a_circle_between_siblings_is_detected(package):
    graph = package(
        model__in__a="from depthdial.model import b",
        model__in__b="def f():\n    from .c import x",
        model__in__c="import depthdial.model.a\nx = 1",
    )
    assert forbidden_edges(graph) == []
    names = [f"depthdial.model.{letter}" for letter in "abca"]
    assert circle(graph) == names


def test_self_a_part_outside_the_plan_is_refused(package):
    graph = package(utils="import depthdial.config", config="")
    with pytest.raises(ValueError, match="depthdial.utils is not in the house plan"):
        forbidden_edges(graph)


def test_self_a_name_that_a_package_passes_on_counts_for_the_module_that_defines_it(package):
    graph = package(
        config__in____init__="from depthdial.config.a import x\n",
        config__in__a="x = 1",
        model__in__b="from depthdial.config import x\nfrom depthdial import config\n",
    )
    assert graph["depthdial.model.b"] == {"depthdial.config.a", "depthdial.config"}


def test_self_a_circle_of_folders_without_a_circle_of_files_is_detected(package):
    graph = package(
        data__in__x__in__a="from depthdial.data.y.b import v\n",
        data__in__x__in__c="w = 1",
        data__in__y__in__b="v = 1",
        data__in__y__in__d="from depthdial.data.x.c import w\n",
    )
    assert circle(graph) == []
    assert circle(folder_graph(graph, "depthdial.data")) == ["x", "y", "x"]


def test_self_the_longest_chain_is_found(package):
    graph = package(
        data__in__a="import depthdial.data.b\nimport depthdial.data.c\n",
        data__in__b="import depthdial.data.c\n",
        data__in__c="x = 1",
    )
    assert longest_chain(graph) == [f"depthdial.data.{letter}" for letter in "abc"]
