"""Values outside of the range of any flag, and whole command lines that no one would write."""

from __future__ import annotations

import contextlib
import inspect
import io
import math
import re
from collections.abc import Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import yaml
from command_lines import Grammar, World, attempt, world_in
from grammar import Flag, at_the_ends, flags_of, function_of, invalid, ranged, words
from hypothesis import given
from hypothesis import strategies as st
from random_inputs import EXAMPLES, QUIETLY

from vitrail import cli
from vitrail.config import from_yaml, merge
from vitrail.data.settings import Data
from vitrail.errors import UsageError
from vitrail.ranges import Range
from vitrail.training.run import Run
from vitrail.verbs.flags import declared
from vitrail.verbs.flags.declared import READING
from vitrail.verbs.flags.parse import parse

EVERY = [flag for verb in cli.VERBS for flag in flags_of(verb)]
RANGED = [flag for flag in EVERY if any(ranged(flag.hint))]
SETTINGS = [flag for flag in flags_of("train") if flag.owner is not None]
NOWHERE = {"train": [], "finetune": ["--from", "nowhere"], "sweep": ["--from", "nowhere"]}
"""What a verb with settings needs beside them, and beside its subject."""


def command(flag: Flag, value: Any) -> list[str]:
    """A command line with one flag, whose subjects do not exist."""
    parameters = inspect.signature(function_of(flag.verb)).parameters.values()
    needed = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty]
    argv = [*flag.verb.split()]
    if flag.kind is inspect.Parameter.KEYWORD_ONLY:
        argv += ["nowhere"] * len(needed) if flag.verb not in NOWHERE else ["nowhere", *NOWHERE[flag.verb]]
        kind = getattr(flag.owner, "kind", None) if flag.name.startswith("objective.") else None
        return [*argv, *(["--objective.kind", kind] if kind else []), flag.word, *words(value)]
    return [*argv, *("nowhere" for p in needed if p.name != flag.name), "--", *words(value)]


def through_flag(flag: Flag, value: Any) -> tuple[int, str]:
    """Exit code and message of a command with a value for a flag."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = cli.main(command(flag, value))
    return code, said.getvalue()


def through_python(flag: Flag, value: Any) -> str:
    """Message of a call of the verb with a value for a parameter, or of `merge` with one for a setting."""
    if flag.owner is not None:
        name = flag.name.rpartition(".")[2]
        with pytest.raises(UsageError) as built:
            flag.owner(**{name: value})
        with pytest.raises(UsageError) as merged:
            merge(Run(), nested(flag, value))
        # these two classes are parts of networks' cards, too, and do not name their section
        assert str(built.value).endswith(str(merged.value).removeprefix("preprocess.").removeprefix("bands."))
        return str(merged.value)
    function = function_of(flag.verb)
    parameters = inspect.signature(function).parameters.values()
    needed = {p.name: "nowhere" for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.default is p.empty}
    with pytest.raises(UsageError) as error:
        if flag.kind is inspect.Parameter.VAR_POSITIONAL:
            function(*needed.values(), value)
        function(**{**needed, flag.name: value})
    return str(error.value)


def nested(flag: Flag, value: Any) -> dict[str, Any]:
    """The setting as a configuration file has it."""
    *outer, name = flag.name.split(".")
    values: dict[str, Any] = {name: list(value) if isinstance(value, tuple) else value}
    if outer == ["objective"]:
        values["kind"] = flag.owner.kind
    for section in reversed(outer):
        values = {section: values}
    return values


def test_the_grammar_has_the_flags_of_the_parser() -> None:
    for verb in cli.VERBS:
        named = {
            flag.name for flag in declared.flags_of(function_of(verb)) if not flag.name.endswith(".class")
        }  # of the user's own code
        assert {flag.name for flag in flags_of(verb)} == named


@pytest.mark.fuzz
@QUIETLY
@given(flag=st.sampled_from(RANGED), data=st.data())
def test_61_a_value_outside_of_its_range(tmp_path_factory: pytest.TempPathFactory, flag: Flag, data: Any) -> None:
    value = data.draw(invalid(flag.hint))
    code, said = through_flag(flag, value)
    assert code == 2 and "Traceback" not in said, said
    told = through_python(flag, value)
    valid = told.partition("; it must be ")[2]
    assert valid and said.splitlines()[-1].endswith(f"; it must be {valid}"), (said, told)
    assert re.match(rf"vitrail: (--)?{re.escape(flag.name).replace('_', '[-_]')} is ", said), said
    assert names_a_limit(flag, valid), valid
    if flag.owner is not None:
        file = tmp_path_factory.getbasetemp() / "outside.yaml"
        file.write_text(yaml.safe_dump(plain(nested(flag, value))))
        with pytest.raises(UsageError) as error:
            from_yaml(file, Run())
        assert re.fullmatch(rf"{re.escape(str(file))}:\d+: {re.escape(told)}", str(error.value))


def names_a_limit(flag: Flag, valid: str) -> bool:
    """Whether a message has an end of the range in it, as a person writes it."""
    for _, limit in ranged(flag.hint):
        if not isinstance(limit, Range):
            return limit.words().partition(",")[0] in valid
        ends = [end for end in (limit.least, limit.most) if math.isfinite(end)]
        if not ends and "a finite number" in valid:
            return True
        forms = [re.escape(form) for end in ends for form in (f"{end:,}", f"{end:g}")]
        if any(re.search(rf"(?<![\d.,]){form}(?![\d,])", valid) for form in forms):
            return True
    return False


def plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if isinstance(value, int | float) else str(value)


def choices(hint: Any) -> Iterator[Any]:
    """The words of a Literal, which may be one of several types."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    elif get_origin(hint) in (Union, UnionType):
        yield from (word for part in get_args(hint) for word in choices(part))


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if any(flag.verb == verb for flag in RANGED)])
@pytest.mark.parametrize("end", [0, -1], ids=["least", "most"])
def test_61_the_ends_of_a_range_are_valid(verb: str, end: int) -> None:
    function, own = function_of(verb), {flag.name: flag for flag in RANGED if flag.verb == verb}
    ends = {name: (at_the_ends(flag.hint) or [1.0])[end] for name, flag in own.items()}
    subjects = [flag for flag in flags_of(verb) if flag.kind is not inspect.Parameter.KEYWORD_ONLY]
    argv = [word for flag in subjects for word in words(ends.pop(flag.name, next(choices(flag.hint), "nowhere")))]
    for name, value in ends.items():
        argv += [own[name].word, *words(value)]
    positional, named = parse(function, argv, verb)
    assert [*positional, *named]
    reads = READING in inspect.signature(function).parameters  # such a verb gets the fields of `Data` themselves
    for name, value in ends.items():
        found: Any = named
        for part in (name.removeprefix(f"{Data.section}.") if reads else name).split("."):
            found = found[part]
        assert found == value, name


@pytest.mark.parametrize("flag", [flag for flag in SETTINGS if flag in RANGED], ids=lambda flag: flag.name)
def test_61_the_ends_of_a_range_are_valid_in_files_and_python(flag: Flag) -> None:
    *_, name = flag.name.split(".")
    for value in at_the_ends(flag.hint):
        if (name, value) == ("crop", 5e-324):
            continue  # valid for no image: its pixels are cut from a larger one
        square = name == "image_size" and isinstance(value, tuple)  # a height and an equal width are one number
        assert getattr(flag.owner(**{name: value}), name) in ((value, value[0]) if square else (value,))
        values = nested(flag, value)
        assert from_yaml(yaml.safe_dump(plain(values)), Run()) == merge(Run(), values)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_61_help_shows_every_range(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*verb.split(), "--help", "all"]) == 0
    texts: dict[str, str] = {}
    names = [""]
    for line in capsys.readouterr().out.splitlines():
        if re.match(r"  (?:-\w, )?(--[\w.-]+|\[?[A-Z]+)", line):
            named = line[2:].strip().partition("  ")[0]  # a flag and its other names, then perhaps its text
            names = re.findall(r"(?:^|, )(--[\w.-]+|\[?[A-Z]+)", named)
        for name in names:
            texts[name] = f"{texts.get(name, '')} {line.strip()}"
    for flag in (flag for flag in RANGED if flag.verb == verb):
        keyword = flag.kind is inspect.Parameter.KEYWORD_ONLY
        shown = texts[flag.word if keyword else f"[{flag.name.upper()}"]
        assert names_a_limit(flag, shown), (flag.word, shown)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return world_in(tmp_path_factory.mktemp("world"))


@pytest.mark.fuzz
@pytest.mark.parametrize("number", range(EXAMPLES))
def test_57_any_command_line(world: World, number: int) -> None:
    attempt(world, Grammar(number).command_line())
