"""Every flag that a text names exists for the verbs that can print the text.

A verb can print the texts of the functions, classes and constants that its function names, and of those that these
name, and so on. An object's methods count as reached with its class. A flag after `vitrail VERB` belongs to that verb.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from trees import tree

from vitrail.data.settings import Data
from vitrail.verbs.flags import declared
from vitrail.verbs.table import VERBS

ROOT = Path(__file__).resolve().parents[2]
FLAG = re.compile(r"(?<![\w-])--(?:no-)?[a-z][a-z0-9-]*(?:\.[a-z0-9-]+)*")
COMMAND = re.compile(rf"vitrail ({'|'.join(sorted(VERBS, key=len, reverse=True))})\b[^;`)]*?(?=[;`),]|\. |$)")
FOREIGN = re.compile(r"`?(?:sips|hf download|sbatch|torchrun)\b[^`]*")
"""A command of another program."""
TARGET = re.compile(r"vitrail[\w.]+:\w+")
SETTING = re.compile(r"(?<![\w./-])data\.([a-z_]+)\b(?![.:/(-])")
ALWAYS = {"--help", "--version"}

NOT_TESTED = {
    "completion": "loads every verb and calls none",
    "launch slurm": "reports the errors of the command that it wraps, as that command does",
    "demo": "trains by a recipe that cannot fail on a setting",
    "study": "trains by the papers' recipes; what it says about settings is about those of `vitrail train`",
    "vtab": "takes the settings of `vitrail train` by --config",
    "report": "opens the data of a run as the run did, and writes commands of `vitrail train`",
    **dict.fromkeys(("recipes list", "recipes show", "recipes cp"), "shows texts about `vitrail train`"),
}
"""Verb -> why its texts are not tested."""
NO_NETWORK = {"data check", "data stats", "data pack"}
TRAINING = {"train", "finetune", "sweep", "plan"}
OTHERS = {*VERBS} - TRAINING
UNREACHED = {
    "vitrail.exports.int8": ({*VERBS} - {"export"}, "int8 is asked for by export alone"),
    "vitrail.exports.write:check_export": ({*VERBS} - {"export"}, "the other verbs write into a cache of their own"),
    "vitrail.exports.write:check_calibration": ({*VERBS} - {"export"}, "int8 is asked for by export alone"),
    "vitrail.exports.web": ({*VERBS} - {"export"}, "a web page is asked for by export alone"),
    "vitrail.objective.beit": (OTHERS, "the objective of a run is built to train it"),
    "vitrail.objective.masks": (OTHERS, "the objective of a run is built to train it"),
    "vitrail.verbs.features:_as_arrays": ({*VERBS} - {"embed"}, "float16 is asked for by embed alone"),
    "vitrail.verbs.features:_refuse_bands": ({*VERBS} - {"embed", "probe fewshot"}, "plan takes the other preparation"),
    "vitrail.exports.engines": (NO_NETWORK | {"inspect"}, "no network computes, or always by torch in float32"),
    "vitrail.verbs.probe:_linear_warnings": ({"probe fewshot", "probe knn"}, "only a linear probe has such a result"),
    "vitrail.data.sources.open": ({"bench", "serve", "probe segment"}, "they know the settings of data and open none"),
    "vitrail.training.classes": (
        {*VERBS} - {"train", "finetune", "sweep"},
        "the classes of a run that is opened again went together when it was trained",
    ),
    "vitrail.data.loading.processes": (OTHERS, "processes decode for training alone"),
    "vitrail.data.images.device_crop": (OTHERS, "devices decode for training alone"),
    "vitrail.errors:not_finite": (NO_NETWORK | {"inspect"}, "no network computes, or always in float32"),
}
"""Module or module:symbol -> verbs that do not come to it though the names in the source say so, and why."""
PART = {
    ("vitrail.data.check:FAIR", "--metric.name"): "of a command of `vitrail train`",
    ("vitrail.data.check:ADJUSTED", "--objective.logit-adjustment"): "of a command of `vitrail train`",
    ("vitrail.weights.download:_cached", "--revision"): "of a command of hf",
    ("vitrail.weights.save:check_place", "--overwrite"): "push and verify write into a new folder",
}
"""(Module:symbol, flag) -> why the flag is right although the verb lacks it."""

Symbol = tuple[str, str]
"""Module and name of a function, a class or a constant."""


@dataclass
class Node:
    """What a symbol names, and its texts."""

    names: set[Symbol] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)


@cache
def graph() -> dict[Symbol, Node]:
    """Every symbol at the top of a module of vitrail."""
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "vitrail").rglob("*.py")
    }
    found: dict[Symbol, Node] = {}
    for module, path in files.items():
        imported = dict(_imports(tree(path), files.keys()))
        for statement in tree(path).body:
            for name in _defined(statement):
                node = found.setdefault((module, name), Node())
                local = imported | dict(_imports(statement, files.keys()))
                node.names |= {local.get(used, (module, used)) for used in _used(statement, local)}
                node.texts += _texts(statement)
    return found


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)]


def _imports(code: ast.AST, modules: object) -> Iterator[tuple[str, Symbol]]:
    """(Name in the file, symbol) of what is imported; of a module, the symbol's name is ""."""
    for node in ast.walk(code):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail"):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield alias.asname or alias.name, (whole, "") if whole in modules else (str(node.module), alias.name)


def _used(statement: ast.stmt, imported: dict[str, Symbol]) -> Iterator[str]:
    """Names that a statement uses; of "module.name", it adds the symbol to `imported`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module, name = imported.get(node.value.id, ("", "x"))
            if not name:
                imported[f"{node.value.id}.{node.attr}"] = (module, node.attr)
                yield f"{node.value.id}.{node.attr}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and re.fullmatch(r"vitrail[\w.]+:\w+", node.value)
        ):
            module, _, name = node.value.partition(":")  # settings name what they build
            imported[node.value] = (module, name)
            yield node.value


def _texts(statement: ast.stmt) -> list[str]:
    """Text of every string, with {} for its values; docstrings, which are help, are not among them."""
    said: list[str] = []
    parts: set[ast.AST] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            parts |= {*node.values}
            said.append("".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            said.append(node.value)
    return said


@cache
def flags_of(verb: str) -> frozenset[str]:
    """Every flag of a verb, by all its names; for plan those of train, too, whose commands it prints."""
    every = set(flags_of("train")) if verb == "plan" else set[str]()
    every |= {word for flag in declared.flags_of(VERBS[verb].load()[1]) if not flag.subject for word in flag.words}
    return frozenset(every | {re.sub(r"^--(.*\.)?", r"--\1no-", flag) for flag in every})


def reached(verb: str) -> set[Symbol]:
    """The symbols that a verb's function names, directly or not."""
    module, function = (found.__name__ for found in VERBS[verb].load())
    pending, seen = [(module, function), (module, "show"), (module, "as_json")], set[Symbol]()
    while pending:
        symbol = pending.pop()
        if symbol in graph() and symbol not in seen and not _barred(verb, symbol):
            seen.add(symbol)
            pending += graph()[symbol].names
    return seen


def _barred(verb: str, symbol: Symbol) -> bool:
    places = (symbol[0], ":".join(symbol))
    return symbol[0] == "vitrail.verbs.table" or any(verb in UNREACHED[at][0] for at in places if at in UNREACHED)


def named(text: str) -> Iterator[tuple[str | None, str]]:
    """(Verb or None, flag) for each flag in a sentence. The verb is the one whose command contains the flag."""
    commands = [(match.span(), match[1]) for match in COMMAND.finditer(text)]
    foreign = [match.span() for match in FOREIGN.finditer(text)]
    for match in FLAG.finditer(text) if " " in text.strip() else ():
        if not any(start < match.start() < end for start, end in foreign):
            yield next((verb for (start, end), verb in commands if start < match.start() < end), None), match[0]


def wrong_flags(verb: str) -> set[tuple[str, str]]:
    """(Module:symbol, flag) for each flag that a text reached from a verb names, and that the verb lacks."""
    return {
        (f"{module}:{name}", flag)
        for module, name in reached(verb)
        for text in graph()[module, name].texts
        for of, flag in named(text)
        if flag not in flags_of(of or verb) | ALWAYS and (f"{module}:{name}", flag) not in PART
    }


def test_every_flag_that_a_text_names_exists() -> None:
    assert {verb: wrong for verb in VERBS if verb not in NOT_TESTED and (wrong := wrong_flags(verb))} == {}


def test_the_exceptions_are_about_what_there_is() -> None:
    symbols = {*graph()}
    there = {module for module, _ in symbols} | {":".join(symbol) for symbol in symbols}
    assert {*UNREACHED} <= there and {symbol for symbol, _ in PART} <= there
    for symbol, flag in PART:
        module, _, name = symbol.partition(":")
        assert flag in " ".join(graph()[module, name].texts)


def test_the_search_sees_texts_that_functions_reach() -> None:
    """`data audit` told to add --data.label-from, a text four calls away, when it had no such flag."""
    assert ("vitrail.data.labels.label_from", "advice") in reached("data audit")
    (text,) = [text for text in graph()["vitrail.data.labels.label_from", "advice"].texts if "say so with" in text]
    assert list(named(text)) == [(None, "--data.label-from")]
    assert list(named("Run `vitrail data audit X --from Y`, or add --seed")) == [
        ("data audit", "--from"),
        (None, "--seed"),
    ]
    assert "--data.label-from" in flags_of("data audit") and "--no-such-flag" not in flags_of("data audit")


READS = "in any form that `vitrail train` takes"


def test_a_verb_that_opens_data_has_all_settings_of_data() -> None:
    fields = {f"--data.{field.name.replace('_', '-')}" for field in dataclasses.fields(Data) if field.name != "path"}
    for verb in VERBS:
        texts = [flag.text for flag in declared.flags_of(VERBS[verb].load()[1])]
        if any(READS in text for text in texts) or verb in ("predict", "embed", "search", "train"):
            assert fields <= flags_of(verb), verb
        else:
            assert not any(flag.startswith("--data.l") for flag in flags_of(verb)), verb


def test_settings_of_data_that_a_text_names_exist() -> None:
    """Texts name settings as Python and YAML do, too: data.label_column."""
    fields = {field.name for field in dataclasses.fields(Data)}
    named = {name for node in graph().values() for text in node.texts for name in SETTING.findall(text)}
    assert len(named) > 10 and named <= fields
