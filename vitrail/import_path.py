"""Classes of the user's own, named by import path: `my_package.losses:Focal` (or `my_package.losses.Focal`).

A section of settings that derives from `Extensible` may be a subclass that stands in the user's own file. Modules are
found as Python finds them, and in the current folder. Only a name on the command line imports code: that of --import,
or the class that a flag such as --objective names. A name in a file never does, neither in a configuration nor in a run
folder or a model card, because the file may be somebody else's, and so may a module beside it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import MISSING, fields, is_dataclass
from inspect import get_annotations
from pathlib import Path
from typing import Any, TypeVar

from vitrail.errors import UsageError, VitrailError, did_you_mean
from vitrail.ranges import Settings
from vitrail.words import listing, shown

T = TypeVar("T")
SCRIPT = "__main__"
"""The module of a class that stands in the script that Python runs."""


class Extensible(Settings):
    """Settings whose class may be the user's own: a frozen dataclass, named by import path.

    Its fields become flags and lines of config.yaml. What it does is a method, which the built-in classes have too.
    """

    def import_code(self, typed: Collection[str]) -> None:
        """Import the modules that the values of the settings `typed` name, which the user has typed."""


def import_path(kind: type) -> str:
    """Return the name by which `own_class` finds a class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_own(kind: type) -> bool:
    """Return whether a class of settings is the user's own, not one of vitrail."""
    return issubclass(kind, Extensible) and kind.__module__.partition(".")[0] != "vitrail"


def own_class(path: str, bases: tuple[type[T], ...], *, imports: bool) -> type[T]:
    """Return the class that `path` names, a dataclass that derives from one of `bases`.

    imports: Import the module if that has not happened yet: only for a name that the user has typed, or that this
    program has checked. Without it, only modules that are imported already are searched. Raises UsageError that says
    what is wrong and where the module was looked for.
    """
    found = own_object(path, imports=imports)
    _check_class(found, path, bases)
    return found  # type: ignore[no-any-return]


def own_object(path: str, *, imports: bool, what: str = "class") -> Any:
    """Return what `path` names. See `own_class`; `what` it may be is for errors: a class, or also a function."""
    module, name = _parts(path)
    found: Any = _module(module, path, imports=imports)
    for part in name.split("."):
        inside = getattr(found, "__dict__", {})
        if part not in inside:
            kinds: Any = type if what == "class" else Callable
            near = did_you_mean(part, [each for each, value in inside.items() if isinstance(value, kinds)])
            file = getattr(sys.modules[module], "__file__", None) or "without a file"
            raise UsageError(f"the module {module} ({file}) has no {what} {part!r}.{near}")
        found = inside[part]
    return found


def inheriting(kind: Any, base: Any) -> Any:
    """Return the settings `kind` with the values of `base` in the fields that both have from one class."""
    lineage: list[Any] = [each for each in kind.__mro__ if is_dataclass(each)]
    shared = next((each for each in lineage if isinstance(base, each)), None)
    if shared is None:
        return kind()
    declared = [get_annotations(each) for each in lineage[: lineage.index(shared)]]
    names = {field.name for field in fields(shared)}.difference(*declared)
    return kind(**{name: getattr(base, name) for name in names})


def find(path: str) -> Any:
    """Return the object of vitrail that `path` names. Settings name what they build without importing it."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def import_module(module: str) -> None:
    """Import a module, which may stand in the current folder. Raises UsageError if that fails."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:  # the command `vitrail` does not search the current folder
        sys.path.append(here)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise UsageError(
                f"the module {module} cannot be imported: it needs {error.name}, which is absent"
            ) from error
        raise UsageError(_absent(module, error.name)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may end itself
        raise UsageError(f"the module {module} cannot be imported: {type(error).__name__}: {error}") from error


def _parts(path: str) -> tuple[str, str]:
    """Return module and class of an import path."""
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        raise UsageError(
            f"{shown(path)} names no class. Write module:Class, such as my_package.losses:Focal for the class Focal in "
            "my_package/losses.py"
        )
    return module, name


def _module(module: str, path: str, *, imports: bool) -> Any:
    if (
        module == SCRIPT
        and "." not in path.partition(":")[2]
        and not hasattr(sys.modules[SCRIPT], path.partition(":")[2])
    ):
        raise UsageError(
            f"{path} stood in the script that started this run, where no other command finds it. Resume the run with "
            "that script, or move the class into a module"
        )
    if module not in sys.modules and not imports:
        raise UsageError(
            f"{path} is code of a module that is not imported, and a file imports none by itself. If you trust "
            f"{module}, add --import {module} to the command (in Python: import {module} first)"
        )
    if module not in sys.modules:
        import_module(module)
    return sys.modules[module]


def _absent(module: str, missing: str) -> str:
    """Return the error for a module that does not exist: where it was looked for, and what to do."""
    others = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    looked = f"the current folder {Path.cwd()}" + f", PYTHONPATH ({listing(others, len(others))})" * bool(others)
    here = Path.cwd()
    name = module.removesuffix(".py")  # of a file, in place of the module
    file = Path(*name.split(".")).with_suffix(".py")
    below = next((found for found in [here / file, *sorted(here.glob(f"*/{file}"))] if found.is_file()), None)
    advice = f"Run the command in the folder that holds {file}, or add that folder to PYTHONPATH"
    if below is not None:
        found = below.relative_to(here)
        advice = f"{found} is the module {'.'.join(found.with_suffix('').parts)}"
        if found != file:  # a run that stores the name has to find it under that name
            advice += f"; with PYTHONPATH={found.parent} it is {name}"
    return f"no module is named {missing!r}. Looked in {looked} and among the installed packages. {advice}"


def _check_class(found: Any, path: str, bases: tuple[type, ...]) -> None:
    """Raise UsageError unless `found` is a dataclass of settings with defaults that derives from one of `bases`."""
    valid = " or ".join(base.__name__ for base in bases)
    if not isinstance(found, type) or not issubclass(found, bases):
        example = f"@dataclass(frozen=True) class Mine({bases[0].__name__})"
        raise UsageError(f"{path} is not a subclass of {valid}. Write: {example}")
    if "__dataclass_fields__" not in vars(found):
        raise UsageError(f"{path} is not a dataclass of its own: write @dataclass(frozen=True) above the class")
    kind: Any = found
    for field in fields(kind):
        if field.default is MISSING and field.default_factory is MISSING:
            raise UsageError(f"{path} has no default for {field.name!r}: give each setting a default")
    try:
        kind()
    except VitrailError:
        raise
    except Exception as error:
        raise UsageError(f"{path} cannot be made with its defaults: {type(error).__name__}: {error}") from error
