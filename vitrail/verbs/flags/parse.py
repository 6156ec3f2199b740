"""The words of a command line as the arguments of a verb.

Words are read like the values of a configuration file, by the types of the arguments and settings (`vitrail.config`).
The result holds only what stands on the command line, because everything else may still follow from the data.
"""

from __future__ import annotations

import inspect
import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

from vitrail.config import from_words, merge, union_members
from vitrail.errors import UsageError, did_you_mean
from vitrail.ranges import refuse_empty
from vitrail.training.run import Run
from vitrail.verbs.flags.declared import READING, REQUIRED, Flag, flag_of, flags_of, is_list, is_size, listed_words
from vitrail.verbs.flags.help import placeholder
from vitrail.verbs.flags.keywords import NetworksLike
from vitrail.verbs.network import is_network


def parse(function: Callable[..., Any], argv: Sequence[str], prog: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments and keywords for a call of `function`; the settings of a section are a dict.

    They hold only what stands in `argv`, the flags of every verb included. Everything after "--" is a subject. Raises
    UsageError with the nearest flag for an unknown flag, and for a value that is not valid.
    """
    flags = flags_of(function, argv)
    typed, subjects = _divided(flags, argv, prog)
    arguments = {flag.name: _value(flag, words, said) for flag, words, said in typed}
    many, rest = None, list(subjects)
    for flag in (flag for flag in flags if flag.subject):
        if flag.repeated:
            many, arguments[flag.name], rest = flag.name, tuple(_subject(flag, word) for word in rest), []
        elif rest and flag.hint == NetworksLike:
            alone = not any(other.subject and other.repeated for other in flags)
            arguments[flag.name], rest = _networks(rest, alone=alone)
        elif rest:
            arguments[flag.name] = _subject(flag, rest.pop(0))
        elif flag.default is REQUIRED:
            raise UsageError(f"{prog} needs {placeholder(flag)}: see {prog} --help")
    if rest:
        raise UsageError(_unknown(rest, flags, prog))
    named = {flag.name: flag.name if flag.subject else flag.words[0] for flag in flags}
    refuse_empty(function, arguments, named.__getitem__)
    parameters = inspect.signature(function).parameters
    if READING in parameters:  # takes the names of the fields, without "data."
        # a wrong value is told before a network is loaded or images are looked for, as for all other flags
        merge(Run(), _nested({name: value for name, value in arguments.items() if name.startswith("data.")}))
        arguments = {name.removeprefix("data."): value for name, value in arguments.items()}
    if many is None:
        return [], _nested(arguments)
    first = [arguments.pop(p.name, p.default) for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [*first, *arguments.pop(many)], _nested(arguments)


def _nested(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return {"optim.lr": 1} as {"optim": {"lr": 1}}."""
    nested: dict[str, Any] = {}
    for name, value in arguments.items():
        *sections, last = name.split(".")
        inside = nested
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[last] = value
    return nested


Typed = tuple[Flag, list[str] | bool, str]
"""A flag that stands on a command line, its words (of a switch: whether it is on), and how it was spelled."""


def _divided(flags: Sequence[Flag], argv: Sequence[str], prog: str) -> tuple[list[Typed], list[str]]:
    """Return the flags that stand on the command line with their words, and the subjects. Raises UsageError."""
    on = {word: flag for flag in flags if not flag.subject for word in flag.words}
    off = {word: flag for flag in flags if not flag.subject for word in flag.opposites}
    typed: dict[str, Typed] = {}
    subjects: list[str] = []
    waiting = list(argv)
    while waiting:
        word = waiting.pop(0)
        if word == "--":
            return [*typed.values()], [*subjects, *waiting]
        if not _is_flag(word):
            subjects.append(word)
            continue
        said, equals, value = word.partition("=")
        flag = on.get(flag_of(said)) or off.get(flag_of(said))
        if flag is None:
            raise UsageError(_unknown([word], flags, prog))
        is_off = flag_of(said) in off
        if equals and (flag.hint is bool or is_off):
            raise UsageError(f"{said} takes no value. Write {flag.words[0]}, or {flag.opposites[0]}")
        valued = equals or (not is_off and _has_value(flag, waiting))
        if (flag.is_switch or flag.is_optional) and not valued:
            typed[flag.name] = flag, not is_off, said
            continue
        words = [value] if equals else _taken(flag, waiting, said)
        before = typed.get(flag.name)
        if flag.repeated and before is not None and isinstance(before[1], list):
            words = [*before[1], *words]
        typed[flag.name] = flag, words, said
    return [*typed.values()], subjects


def _has_value(flag: Flag, waiting: list[str]) -> bool:
    """Return whether a value follows a switch, as it may if the setting can be null or a number, too."""
    words = ("true", "false") if flag.is_optional else ("true", "false", "null", "none")
    word = waiting[0].lower() if waiting and flag.hint is not bool else ""
    return word in words or (flag.is_optional and _is_number(word))


def _is_flag(word: str) -> bool:
    """Return whether a word is a flag; -1 and -inf are values."""
    return word.startswith("-") and word != "-" and not _is_number(word)


def _taken(flag: Flag, waiting: list[str], said: str) -> list[str]:
    """Take the words of a flag from those that follow it, as many as can be its values. Raises UsageError for none."""
    most = max([1, *(math.inf if is_list(part) else len(get_args(part)) for part in flag.several)])
    taken: list[str] = []
    while waiting and len(taken) < most and not _is_flag(waiting[0]):
        if taken and not _may_follow(flag, taken, waiting[0]):
            break
        taken.append(waiting.pop(0))
    if not taken and (flag.repeated or not any(map(is_list, flag.several))):
        raise UsageError(f"{said} needs a value: {said} {placeholder(flag)}")
    if is_size(flag.hint) and len(taken) == 2 and os.path.lexists(taken[1]):
        raise UsageError(
            f"{said} {taken[0]} {taken[1]}: {taken[1]} may be a width, and something here has this name. For a width "
            f"write {said} {taken[0]}x{taken[1]}; for the file or folder write ./{taken[1]}"
        )
    return taken


def _may_follow(flag: Flag, taken: Sequence[str], word: str) -> bool:
    """Return whether a word is one more value of a flag, and not a subject, after those that were taken."""
    items = _items(flag)
    if str in items:
        return not flag.repeated
    if listed := [word for item in items for word in listed_words(item)]:
        return all(part in listed for part in word.split(","))
    if not is_size(flag.hint):
        return all(map(_is_number, word.split(",")))
    return _is_whole(taken[-1]) and _is_whole(word)


def _items(flag: Flag) -> set[Any]:
    """Return the types of one of several values."""
    return {
        part for each in flag.several for item in get_args(each) if item is not Ellipsis for part in union_members(item)
    }


def _is_whole(word: str) -> bool:
    """Return whether this is a whole number. One below 0 is no size, but read as one, so that this is what is told."""
    return word.removeprefix("-").isdecimal()


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _value(flag: Flag, words: list[str] | bool, said: str) -> Any:
    """Return the value of a flag. Raises UsageError."""
    if isinstance(words, bool):
        return words
    if is_size(flag.hint) and all(map(_is_whole, words[0].split("x"))):
        words = [side for word in words for side in word.split("x")]
    elif flag.several and str not in _items(flag):
        words = [part for word in words for part in word.split(",")]
    null = words in (["null"], ["none"], ["None"])
    one = len(words) == 1 and not flag.repeated and (null or not any(map(is_list, flag.several)))
    return from_words(flag.hint, words[0] if one else words, flag_of(said))


def _subject(flag: Flag, word: str) -> Any:
    hint = get_args(flag.hint)[0] if flag.repeated else flag.hint
    return from_words(hint, word, flag.name, subject=True)


def _networks(words: list[str], *, alone: bool) -> tuple[str | tuple[str, ...], list[str]]:
    """Return the networks with which a command line begins, and the other words. The first word is always one.

    alone: Whether at most one word follows them, so that all words before the last one mean networks.
    """
    count = 1 + next((at for at, word in enumerate(words[1:]) if not is_network(word)), len(words) - 1)
    count = max(count, len(words) - 1) if alone and len(words) > 1 else count
    rest = words[count:]
    if late := list(filter(is_network, rest)):
        raise UsageError(
            f"{late[0]} is a network, but it stands after {rest[0]}. Name all networks first, then the images; name "
            f"images in its folder by a pattern: '{late[0]}/*.jpg'"
        )
    return words[0] if count == 1 else tuple(words[:count]), rest


def _unknown(words: Sequence[str], known: Iterable[Flag], prog: str) -> str:
    """Return the error for an unknown word, with the nearest flag: "--optim.weight-decay" for "--weight-decay"."""
    flags = [flag for flag in known if not flag.subject]
    wrong = next((word.partition("=")[0] for word in words if word.startswith("-")), None)
    files = [word for word in words if os.path.exists(word)]
    # a pattern becomes paths that are all absolute, or all relative
    if wrong is None and len(files) == len(words) > 1 and len({*map(os.path.isabs, files)}) == 1:
        return _unquoted(files, prog, any(flag.name == "data.include" for flag in flags))
    if wrong is None:
        return f"{prog} takes no more words, but got {' '.join(words)!r}: see {prog} --help"
    named = {flag_of(flag.name.rpartition(".")[2]).lstrip("-"): flag.words[0] for flag in flags}
    named |= {word.lstrip("-"): word for flag in flags for word in flag.words}
    word = flag_of(wrong).strip("-")  # the dashes would make any two flags similar
    begun = [name for name in named if name.startswith(word)]
    near = did_you_mean(word, begun, similarity=0) or did_you_mean(word, named, similarity=0.7)
    for short, flag_word in named.items():
        near = near.replace(f"'{short}'", f"'{flag_word}'")
    return f"{prog} has no flag {wrong!r}.{near or _about(word, flags)} {prog} --help all lists all flags."


def _unquoted(files: list[str], prog: str, include: bool) -> str:
    """Return the error for names that a shell has put in the place of a pattern. include: Has the verb this flag?"""
    folder = os.path.commonpath([os.path.dirname(file) for file in files]) or "."
    endings = {os.path.splitext(file)[1] for file in files}
    name = f"*{endings.pop()}" if len(endings) == 1 else "*"
    return (
        f"{prog} takes one path, but got {len(files)} more names of files, such as {files[0]}. The shell puts them in "
        f"the place of a pattern that is not quoted. Give the folder: {prog} {shlex.quote(folder)}"
        + f" --data.include '{name}'" * (include and name != "*")
        + f", or quote the pattern: '{folder}/**/{name}'"
    )


def _about(word: str, flags: Iterable[Flag]) -> str:
    """Return the flags in whose description the word stands, the shortest first: --time-limit for "minutes"."""
    phrase = f" {word.replace('-', ' ')} "
    sentences = {flag.words[0]: flag.text.partition(".")[0] for flag in flags}
    found = [name for name, text in sentences.items() if phrase in f" {text.lower()} "]
    found = sorted(found, key=lambda name: len(sentences[name]))[:3]
    return f" About {phrase.strip()}: {', '.join(found)}." if found else ""
