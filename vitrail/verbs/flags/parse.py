"""A verb's signature as command line flags, so that a flag and a keyword can never differ.

Positional parameters are the subject and need no prefix, keyword-only ones become flags, `**settings` becomes
one flag for every field of `Run` (`--optim.lr`). What was not given is absent from the result, so that the
defaults of the function, or of a recipe, apply.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, Required, TypedDict, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from vitrail.config import Duration, parse_duration, sections_of
from vitrail.errors import UsageError, did_you_mean
from vitrail.training.run import Run

ALIASES = {
    "weights": ("--from",),
    "class_name": ("--class",),
    "objective.mask_after_stem": ("--mask-after-stem",),
    "show_list": ("--list",),
    "verbose": ("-v",),
    "quiet": ("-q",),
}
"""Second names: `from` and `class` would be the better keywords, and are reserved words of Python."""
SUBJECT = "data.path"
"""The one field of `Run` that is no flag, because it is the subject."""


def everywhere(*, json: bool = False, quiet: bool = False, verbose: bool = False, traceback: bool = False) -> None:
    """Flags of every verb.

    Args:
        json: Print the result as JSON on stdout; everything else goes to stderr.
        quiet: Say only warnings and errors.
        verbose: Say more.
        traceback: Show where in the code an error came from (or set VITRAIL_TRACEBACK=1).
    """


GLOBAL = tuple(inspect.signature(everywhere).parameters)


def parse(function: Callable[..., Any], argv: Sequence[str], prog: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keywords to call `function` with; settings of a section come as a dict.

    The keywords of `everywhere` are among them where given. Where a verb takes any number of subjects, all that follows
    "--" are subjects, whatever they look like. Prints help and exits 0 for --help, prints what is wrong with a value
    and exits 2; raises UsageError, with the nearest flag, for one that is not there.
    """
    absent = _absent(everywhere) | _absent(function)
    parameters = inspect.signature(function).parameters.values()
    many = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    argv, after = list(argv), []
    if many is not None and "--" in argv:
        argv, after = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    given, unknown = tyro.cli(
        _schema(function),  # type: ignore[arg-type]
        prog=prog,
        args=_spread(function, argv),
        description=_summary(function),
        default=absent,
        return_unknown_args=True,
        config=(),
    )
    if unknown:
        raise UsageError(_unknown(unknown, function, prog))
    given = {k: v for k, v in given.items() if v != {} and not (k in absent and v == absent[k])}
    if many is None:
        return [], given
    first = [given.pop(p.name) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [*first, *given.pop(many, ()), *after], given


def _spread(function: Callable[..., Any], argv: Sequence[str]) -> list[str]:
    """Give each value of a list a flag of its own: "--shots 1 5" becomes "--shots 1 --shots 5", as does "--shots 1,5".

    Lists of numbers and of known words. A list ends where no such value follows, so it takes no subject away that
    stands behind it.
    """
    valid = {f"--{name.replace('_', '-')}": hint for name, hint in _hints(function).items() if _is_list(hint)}
    words: list[str] = []
    flag = ""
    for word, following in zip(argv, [*argv, ""][1:], strict=True):
        hint = valid.get(word.replace("_", "-"))
        if hint is not None and _all_of(hint, following):
            flag = word  # comes with each of its values
        elif flag and _all_of(valid[flag.replace("_", "-")], word):
            for value in word.split(","):
                words += [flag, value]
        else:
            flag = ""
            words.append(word)
    return words


def _is_list(hint: Any) -> bool:
    """Are these numbers, or known words?"""
    each, *rest = get_args(hint) or (None,)
    return rest == [Ellipsis] and (each in (int, float) or get_origin(each) is Literal)


def _all_of(hint: Any, word: str) -> bool:
    """Is the word a value of such a list, or several with commas?"""
    each = get_args(hint)[0]
    return all(bool(_NUMBER.fullmatch(v)) if each in (int, float) else v in get_args(each) for v in word.split(","))


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


def _unknown(words: list[str], function: Callable[..., Any], prog: str) -> str:
    """Say which words mean nothing, and which flag is near; "--weight-decay" is near "--optim.weight-decay"."""
    flags = {f"--{name.replace('_', '-')}" for name in flag_names(function)}
    flags |= {alias for name in flag_names(function) for alias in ALIASES.get(name, ())}
    wrong = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    if wrong is None:
        return f"{prog} does not know what to do with {' '.join(words)!r}: see {prog} --help"
    last = {f"--{flag.rpartition('.')[2].lstrip('-')}": flag for flag in sorted(flags)}
    near = did_you_mean(wrong.replace("_", "-"), flags | last.keys())
    for short, flag in last.items():
        near = near.replace(f"'{short}'", f"'{flag}'") if short not in flags else near
    return f"{prog} has no flag {wrong!r}.{near} All are in {prog} --help"


def flag_names(function: Callable[..., Any]) -> list[str]:
    """Return every flag and subject of a verb, sorted: what a user's scripts rely on."""
    names: list[str] = []

    def walk(schema: Any, prefix: str) -> None:
        for name, hint in get_type_hints(schema).items():
            if isinstance(hint, type) and hasattr(hint, "__total__"):
                walk(hint, f"{prefix}{name}.")
            else:
                names.append(prefix + name)

    walk(_schema(function), "")
    return sorted(names)


def _schema(function: Callable[..., Any]) -> type:
    parameters = inspect.signature(function).parameters.values()
    keys = _parameters(function)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        keys |= {name: hint for name, hint in _settings(Run).items() if name not in keys}
    return TypedDict("Flags", keys | _parameters(everywhere), total=False)  # type: ignore


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """One entry for each parameter.

    None is what leaving it out means, so it is no value to type; and a path is typed as text.
    """
    hints, docs = _hints(function), _argument_docs(function)
    keys: dict[str, Any] = {}
    for name, p in inspect.signature(function).parameters.items():
        hint = _typed(hints[name])
        text = docs.get(name, "")
        if p.kind is p.VAR_POSITIONAL:
            many = _described(tuple[hint, ...], text, None, metavar=f"[{name.upper()} ...]")  # type: ignore
            keys[name] = Required[Positional[many]]  # type: ignore
        elif p.kind is p.POSITIONAL_OR_KEYWORD:
            required = p.default is p.empty
            metavar = name.upper() if required else f"[{name.upper()}]"
            subject = Positional[_described(hint, text, p.default, metavar=metavar)]  # type: ignore
            keys[name] = Required[subject] if required else subject
        elif p.kind is p.KEYWORD_ONLY:
            flag = _described(hint, text, p.default, aliases=ALIASES.get(name))
            repeatable = get_args(hint)[1:] == (Ellipsis,)
            keys[name] = UseAppendAction[flag] if repeatable else FlagCreatePairsOff[flag]  # type: ignore
    return keys


def _typed(hint: Any) -> Any:
    if get_args(hint)[1:] == (Ellipsis,):
        return tuple[_typed(get_args(hint)[0]), ...]  # type: ignore
    return Union[tuple(arm for arm in _arms(hint) if arm not in (NoneType, Path))]  # noqa: UP007


def _settings(section: type, prefix: str = "") -> dict[str, Any]:
    """One entry for each field of a dataclass, nested ones as a schema of their own."""
    hints, docs = get_type_hints(section), field_docs(section)
    keys: dict[str, Any] = {}
    for field in fields(section):
        name, hint = field.name, hints[field.name]
        inner = sections_of(hint)
        if inner:
            nested = TypedDict(name, _nested(inner, f"{prefix}{name}."), total=False)  # type: ignore
            nested.__doc__ = inspect.getdoc(inner[0]) if len(inner) == 1 else docs.get(name)
            keys[name] = nested
        elif prefix + name != SUBJECT:
            keys[name] = _described(hint, docs.get(name, ""), _default(field), aliases=ALIASES.get(name))
    return keys


def _nested(sections: list[Any], prefix: str) -> dict[str, Any]:
    """The flags of a section; of several, of which `kind` chooses one, those of all, and each says whose it is."""
    if len(sections) == 1:
        return _settings(sections[0], prefix)
    keys: dict[str, Any] = {"kind": _described(Literal[tuple(s.kind for s in sections)], "", sections[0].kind)}
    owners: dict[str, list[tuple[Any, Field[Any]]]] = {}
    for section in sections:
        for field in fields(section):
            owners.setdefault(field.name, []).append((section, field))
    del owners["kind"]
    for name, those in owners.items():
        hint: Any = Union[tuple(get_type_hints(section)[name] for section, _ in those)]  # type: ignore # noqa: UP007
        text = f"({', '.join(section.kind for section, _ in those)}) {field_docs(those[0][0]).get(name, '')}"
        defaults = {_default(field) for _, field in those}
        default = defaults.pop() if len(defaults) == 1 else None
        keys[name] = _described(hint, text, default, aliases=ALIASES.get(prefix + name))
    return keys


def _described(hint: Any, text: str, default: Any, **more: Any) -> Any:
    """An annotation as tyro wants it, with help that ends in the default."""
    if default is inspect.Parameter.empty:
        shown = "(required)"
    else:
        shown = "" if default is None or default is False or default == () else f"(default: {_show(default)})"
    return Annotated[_readable(hint), arg(help=text, help_behavior_hint=shown, **more)]


def _readable(hint: Any) -> Any:
    """The annotation with durations replaced by something tyro can read from text."""
    if get_origin(hint) in (Union, UnionType):
        return Union[tuple(_readable(arm) for arm in get_args(hint))]  # noqa: UP007
    return _DURATION if hint is Duration else hint


def _read_duration(words: list[str]) -> Duration:
    try:
        return parse_duration(words[0])
    except UsageError as error:
        raise ValueError(str(error)) from None  # what tyro reports with the flag's name


_DURATION = Annotated[
    Duration,
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="DURATION",
        instance_from_str=_read_duration,
        is_instance=lambda value: isinstance(value, Duration),
        str_from_instance=lambda duration: [str(duration)],
    ),
]


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _arms(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Types of the parameters; the result's may name what only a type checker imports."""
    parameters = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    return get_type_hints(SimpleNamespace(__annotations__=parameters), function.__globals__)


def _absent(function: Callable[..., Any]) -> dict[str, Any]:
    """What tyro cannot leave out of its result, as it is where not given: repeatable flags and switches."""
    hints = _hints(function)
    keywords = [p for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    return {p.name: p.default for p in keywords if hints[p.name] is bool or get_args(hints[p.name])[1:] == (...,)}


def field_docs(section: type) -> dict[str, str]:
    """Return the text under each field of a dataclass, as written in its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = following.value if isinstance(following, ast.Expr) else None
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                docs[node.target.id] = " ".join(text.value.split())
    return docs


def _argument_docs(function: Callable[..., Any]) -> dict[str, str]:
    """The lines "name: text" of a docstring's "Args:"."""
    _, _, section = (inspect.getdoc(function) or "").partition("Args:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _summary(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n\nArgs:\n")[0]
