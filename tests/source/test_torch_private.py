"""Private names of torch: all in one file, and all still there."""

from __future__ import annotations

import ast
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from gathered import failures
from torch import nn
from trees import tree

from vitrail.device import has_onednn

ROOT = Path(__file__).resolve().parents[2]
HOME = "vitrail/torch_private.py"
HOOKS = {name for name in vars(nn.Module()) if "_hooks" in name}
"""Private attributes of every module that hold its hooks, such as `_forward_hooks`."""
ATTRIBUTES = HOOKS | {"_cdata"}  # the latter of memory


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_names(source: ast.AST) -> set[str]:
    """Private names below torch that a source uses, in full: "torch._foreach_add_", and hooks: "_forward_hooks"."""
    found = set()
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            module = str(node.module)
            found |= {module} if is_private(module) else {f"{module}.{x.name}" for x in node.names}
        elif isinstance(node, ast.Import):
            found |= {x.name for x in node.names if x.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute):
            full = ast.unparse(node)
            head = full.split(".")[0]
            if node.attr in ATTRIBUTES:
                found.add(node.attr)
            elif head in ("torch", "nn") and node.attr.startswith("_"):
                found.add(full if head == "torch" else f"torch.{full}")
    return {name for name in found if is_private(name)}


def test_private_names_are_found() -> None:
    source = (
        "import torch\nfrom torch import nn, _C\nfrom torch._dynamo import a\ntorch._x_(1)\nnn.m._N\np._forward_hooks"
    )
    expected = {"torch._C", "torch._dynamo", "torch._x_", "torch.nn.m._N", "_forward_hooks"}
    assert private_names(ast.parse(source)) == expected
    assert private_names(ast.parse("import torch\nself._x\ntorch.relu(torch.__version__)\nother._y")) == set()


@pytest.mark.full_size
def test_private_names_of_torch_are_in_one_file() -> None:
    files = [(path.relative_to(ROOT).as_posix(), path) for path in sorted((ROOT / "vitrail").rglob("*.py"))]
    found = {(name, used) for name, path in files if name != HOME for used in private_names(tree(path))}
    assert found == set()


def test_this_torch_has_the_private_name() -> None:
    assert failures(sorted(private_names(tree(ROOT / HOME))), is_in_this_torch) == []


def is_in_this_torch(name: str) -> None:
    if ".mkldnn." in name and not has_onednn():
        return  # this torch was built without it
    if not name.startswith("torch."):
        owner = torch.empty(0).untyped_storage() if name == "_cdata" else nn.Linear(1, 1)
        assert hasattr(owner, name), f"{type(owner)} of torch {torch.__version__} has no {name}: see {HOME}"
        return
    try:
        resolve_name(name)
    except AttributeError:
        pytest.fail(f"torch {torch.__version__} has no {name}: replace it in {HOME}")
