"""Imports go only to a lower layer, never sideways between packages, and never in a circle.

Read from the source, so that imports inside functions, under TYPE_CHECKING, and written as
`from vitrail import x` or `importlib.import_module("vitrail.x")` count too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest
from trees import tree

ROOT = Path(__file__).resolve().parents[2]

LAYER = {
    **dict.fromkeys(
        ("errors", "version", "device", "disk", "files", "words", "terminal", "world", "config", "durations", "strip"),
        0,
    ),
    **dict.fromkeys(("ranges", "durations", "import_path", "run_log", "plots", "terminal", "torch_private"), 0),
    **dict.fromkeys(("model", "data"), 1),
    **dict.fromkeys(("weights", "objective", "evaluation", "inspection", "costs"), 2),
    "tasks": 3,
    **dict.fromkeys(("exports", "training"), 4),
    "transfer": 5,
    "recipes": 6,
    **dict.fromkeys(("studies", "server", "reports"), 7),
    "verbs": 8,
    **dict.fromkeys(("cli", "sklearn", "results"), 9),
    # the public face and `python -m vitrail`: they may reach everything, nothing reaches them
    **dict.fromkeys(("__init__", "__main__"), 10),
}

# what the command line reads for its flags: `--help` must not wait for torch
TORCH_FREE = (
    "vitrail",
    "vitrail.errors",
    "vitrail.config",
    "vitrail.durations",
    "vitrail.ranges",
    "vitrail.model.variants",
    "vitrail.data.settings",
    "vitrail.training.run",
    "vitrail.cli",
)

THIRD_PARTY = {  # packages with a promise about what they need: the model runs without files or network
    "model": {"torch", "einops", "numpy"},
}


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file, for every module below root/vitrail; a package is its __init__.py."""
    found = {}
    for path in sorted((root / "vitrail").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Dotted names of all modules that `path` imports, wherever in the file it does."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                dotted = f"{base}.{alias.name}"
                found.add(dotted if dotted in known else base)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            found |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    return found


@functools.cache
def imports_of_vitrail() -> dict[str, set[str]]:
    return imports_of_all(ROOT)


def imports_of_all(root: Path) -> dict[str, set[str]]:
    """Dotted name of each module below root/vitrail -> names of the modules that it imports."""
    known = modules(root)
    return {name: imports(name, path, known) for name, path in known.items()}


def _called(function: ast.expr) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")


def part(name: str) -> str:
    """The layered part of the house that a module belongs to: "vitrail.model.vit" -> "model"."""
    return name.split(".")[1] if "." in name else "__init__"


def violations(every: dict[str, set[str]]) -> list[str]:
    """Every import that breaks the order, as a sentence."""
    wrong = []
    for name, targets in every.items():
        if part(name) not in LAYER:
            wrong.append(f"{name} belongs to no layer: put {part(name)!r} into LAYER, and into DESIGN's order")
            continue
        for target in sorted(targets):
            if target.split(".")[0] != "vitrail" or part(target) == part(name):
                continue
            here, there = LAYER[part(name)], LAYER.get(part(target), 99)
            leaf = here == there == 0  # errors, world, config and their kin are one layer of plain files
            if there >= here and not leaf:
                wrong.append(f"{name} (layer {here}) imports {target} (layer {there})")
    return wrong


def circles(every: dict[str, set[str]]) -> list[str]:
    """A circle of modules, if there is one."""
    graph = {name: (targets & every.keys()) - {name} for name, targets in every.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_down_only() -> None:
    assert violations(imports_of_vitrail()) == []


def test_no_import_circle() -> None:
    assert circles(imports_of_vitrail()) == []


FAST = "vitrail.model.fast"
"""The folder that can be deleted (tests/model/fast/test_deleted.py)."""


def importing(source: ast.Module, name: str) -> set[ast.AST]:
    """The statements that import a package or something in it."""
    nodes = (node for node in ast.walk(source) if isinstance(node, ast.Import | ast.ImportFrom))
    return {node for node in nodes if name in ast.unparse(node)}


def asking(source: ast.Module) -> set[ast.AST]:
    """The statements under `if HAS_FAST:` at the top of a file."""
    tests = (node for node in source.body if isinstance(node, ast.If) and ast.unparse(node.test) == "HAS_FAST")
    return {statement for test in tests for statement in test.body}


def test_what_is_there_for_speed_is_imported_only_if_it_is_there() -> None:
    using = {
        name: (importing(tree(path), FAST), asking(tree(path)))
        for name, path in modules(ROOT).items()
        if not name.startswith(FAST) and importing(tree(path), FAST)
    }
    assert {name for name, (found, allowed) in using.items() if not found <= allowed} == set()
    assert {*using} == {f"vitrail.model.{name}" for name in ("attention", "block", "build", "layers", "vit")}


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_a_package_needs_only_what_it_promises(package: str) -> None:
    allowed = THIRD_PARTY[package] | set(sys.stdlib_module_names) | {"vitrail"}
    foreign = {
        f"{name}: {target}"
        for name, targets in imports_of_vitrail().items()
        if part(name) == package
        for target in targets
        if target.split(".")[0] not in allowed
    }
    assert foreign == set()


@pytest.mark.processes
def test_flags_are_read_without_numpy_and_all_verbs_without_torch() -> None:
    """`--help` must not wait for them. One new interpreter imports the modules one after the other."""
    first = ["vitrail.verbs.train.train", "vitrail.verbs.flags.parse"]
    every = modules(ROOT)
    assert {*TORCH_FREE} <= every.keys(), "the command line reads its flags from a module that is gone"
    verbs = sorted(name for name in every if name.startswith("vitrail.verbs") and name not in first)
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch: every --help would wait for it')\n"
        f"    if name in {first} and 'numpy' in sys.modules: sys.exit(f'{{name}} imports numpy')"
    )
    words = [sys.executable, "-c", code, *first, *TORCH_FREE, *verbs]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("model/vit.py", "from vitrail.data.settings import Data"),  # sideways
        ("model/vit.py", "def f():\n    import vitrail.training.loop"),  # up, inside a function
        ("data/ops.py", "def f():\n    from vitrail import server"),  # up, through the public face
        ("data/ops.py", "from .. import training"),  # up, relative
        ("data/ops.py", "from importlib import import_module\nimport_module('vitrail.cli')"),
        ("errors.py", "from vitrail.model import vit"),
        ("misc.py", "import os"),  # belongs nowhere
        ("model/vit.py", "from vitrail import fit"),  # not a module: a name of the public face
    ],
)
def test_the_order_test_sees(file: str, source: str, tmp_path: Path) -> None:
    for package in ("model", "data", "training", "server", ""):
        (tmp_path / "vitrail" / package).mkdir(parents=True, exist_ok=True)
        (tmp_path / "vitrail" / package / "__init__.py").touch()
    for module in ("training/loop.py", "data/settings.py", "model/vit.py", "cli.py"):
        (tmp_path / "vitrail" / module).touch()
    assert violations(imports_of_all(tmp_path)) == []
    (tmp_path / "vitrail" / file).write_text(source)
    assert len(violations(imports_of_all(tmp_path))) == 1


def test_the_circle_test_sees(tmp_path: Path) -> None:
    folder = tmp_path / "vitrail" / "model"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("def f():\n    from vitrail.model.b import g")
    (folder / "b.py").write_text("from vitrail.model import a")
    assert set(circles(imports_of_all(tmp_path))) == {"vitrail.model.a", "vitrail.model.b"}
