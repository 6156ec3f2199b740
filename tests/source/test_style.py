"""The bar for how the source reads: docstrings, annotations, lengths, names. Counted from the syntax tree."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from trees import tree

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = sorted((ROOT / "vitrail").rglob("*.py"))
EVERYTHING = sorted([*PRODUCT, *(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])

FUNCTION_LINES = 80
FUNCTION_LINES_OF = {("vitrail/training/loop.py", "training"): 120}  # the loop is one function read top to bottom
EMPTY_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "tools", "stuff"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """A function or class, where it stands, and whether a stranger may use it."""

    path: str
    name: str
    node: Function | ast.ClassDef
    public: bool

    def __str__(self) -> str:
        return f"{self.path}:{self.node.lineno} {self.name}"


def definitions(path: Path, root: Path = ROOT) -> Iterator[Definition]:
    """Functions and classes of a module with their methods; what stands inside a function is private."""
    pending: list[tuple[ast.AST, str, bool]] = [(tree(path), "", True)]
    while pending:
        parent, prefix, public = pending.pop()
        for node in ast.iter_child_nodes(parent):
            if not isinstance(node, Function | ast.ClassDef):
                continue
            seen = public and not node.name.startswith("_") and not isinstance(parent, Function)
            name = prefix + node.name
            yield Definition(path.relative_to(root).as_posix(), name, node, seen)
            pending.append((node, f"{name}.", seen))


@cache
def everything() -> list[Definition]:
    """The definitions of all files."""
    return [definition for path in EVERYTHING for definition in definitions(path)]


def public() -> list[Definition]:
    """The public definitions of the product."""
    return [d for d in everything() if d.public and d.path.startswith("vitrail/")]


def _decorators(node: Function | ast.ClassDef) -> set[str]:
    return {ast.unparse(d).rpartition(".")[2] for d in node.decorator_list}


def undocumented(found: list[Definition]) -> list[str]:
    """Public definitions without a docstring; an @overload has its documentation on the implementation."""
    exempt = {"overload", "setter", "override"}
    return [str(d) for d in found if not ast.get_docstring(d.node) and not _decorators(d.node) & exempt]


def unannotated(found: list[Definition]) -> list[str]:
    """Arguments and results of public functions, and of public classes' __init__, that have no type."""
    wrong = []
    for d in found:
        functions = [d.node] if isinstance(d.node, Function) else _constructors(d.node)
        for function in functions:
            a = function.args
            arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
            bare = [x.arg for x in arguments if x.annotation is None and x.arg not in ("self", "cls")]
            if bare or function.returns is None:
                wrong.append(f"{d}: {', '.join(bare) or 'result'}")
    return wrong


def _constructors(node: ast.ClassDef) -> list[Function]:
    return [x for x in node.body if isinstance(x, Function) and x.name in ("__init__", "__call__")]


def lines(d: Definition) -> int:
    """Lines of a definition without its decorators and its docstring (a table there is documentation)."""
    assert d.node.end_lineno
    total = d.node.end_lineno - d.node.lineno + 1
    first = d.node.body[0]
    if ast.get_docstring(d.node) and first.end_lineno:
        total -= first.end_lineno - first.lineno + 1
    return total


def test_every_public_name_has_a_docstring() -> None:
    assert undocumented(public()) == []


def test_every_public_argument_has_a_type() -> None:
    assert unannotated(public()) == []


def test_functions_fit_on_a_screen() -> None:
    functions = [d for d in everything() if isinstance(d.node, Function)]
    long = {str(d): n for d in functions if (n := lines(d)) > FUNCTION_LINES_OF.get((d.path, d.name), FUNCTION_LINES)}
    assert long == {}


def test_functions_are_short_on_the_whole() -> None:
    lengths = [lines(d) for d in everything() if isinstance(d.node, Function) and d.path.startswith("vitrail/")]
    assert statistics.median(lengths) <= 10
    assert statistics.quantiles(lengths, n=10)[-1] <= 25


def test_every_file_is_named_after_its_job() -> None:
    names = [path.relative_to(ROOT) for path in EVERYTHING]
    assert [str(name) for name in names if EMPTY_NAMES & set(name.with_suffix("").parts)] == []


def test_package_inits_are_empty() -> None:
    inits = [p for p in PRODUCT if p.name == "__init__.py" and p.parent != ROOT / "vitrail"]
    assert [str(p) for p in inits if any(not isinstance(n, ast.Expr) for n in tree(p).body)] == []


@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("def f(x: int) -> int:\n    return x", undocumented),
        ("class A:\n    '''Doc.'''\n    def f(self) -> None:\n        pass", undocumented),
        ("def f(x) -> None:\n    '''Doc.'''", unannotated),
        ("def f(*x: int):\n    '''Doc.'''", unannotated),
        ("class A:\n    '''Doc.'''\n    def __init__(self, x) -> None:\n        pass", unannotated),
    ],
)
def test_the_style_test_sees(source: str, check, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(source)
    found = [d for d in definitions(tmp_path / "a.py", tmp_path) if d.public]
    assert len(check(found)) == 1


FOLDER_FILES = 30


def test_folders_fit_in_a_head() -> None:
    """Folders of the product and of the tests, data included; `py.typed` is an empty mark."""
    files = [path for top in ("vitrail", "tests") for path in (ROOT / top).rglob("*") if path.is_file()]
    counted = Counter(
        path.parent for path in files if path.name not in ("__init__.py", "py.typed") and path.suffix != ".pyc"
    )
    assert {str(folder): count for folder, count in counted.items() if count > FOLDER_FILES} == {}


@pytest.mark.full_size
def test_a_type_has_a_name_of_its_own() -> None:
    """Public classes and types that other files of the product import: no two share a name."""
    imported = {
        (node.module, alias.name)
        for path in PRODUCT
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail.")
        for alias in node.names
    }
    homes: dict[str, set[str]] = {}
    for module, name in imported:
        if name[0].isupper() and not name.isupper():
            homes.setdefault(name, set()).add(str(module))
    assert {name: sorted(found) for name, found in homes.items() if len(found) > 1} == SHARED_NAMES


SHARED_NAMES = {
    # in server.responses they are names of the HTTP interface
    "Attention": ["vitrail.model.attention", "vitrail.server.responses"],
    "Prediction": ["vitrail.server.responses", "vitrail.tasks.prediction"],
}


def test_what_guards_by_day_is_there() -> None:
    """A test marked `nightly` names tests; one that is renamed is renamed there, too."""
    files = {path: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    there = {path.stem for path in files}.union(*(re.findall(r"def (test_\w+)", text) for text in files.values()))
    texts = [
        text.value
        for path in files
        if "pytest.mark.nightly(" in files[path]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.nightly"
        for text in ast.walk(node)
        if isinstance(text, ast.Constant)
    ]
    named = {name for text in texts for name in re.findall(r"test_\w+", text)}
    assert len(texts) > 15 and named - there == set()
