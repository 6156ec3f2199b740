"""`vitrail completion bash | zsh | fish`: a script with which a shell completes verbs, flags and their values.

The script holds all words, so that completing does not start Python.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from vitrail.verbs.flags.declared import flags_of, listed_words
from vitrail.verbs.table import VERBS

Shell = Literal["bash", "zsh", "fish"]
SHORTEST = 60
"""Number of characters of a flag's text that are shown in fish."""


class Completed(NamedTuple):
    """A flag that can follow a verb."""

    text: str
    is_switch: bool = True
    """Whether it has no value."""
    values: tuple[str, ...] = ()
    """Its valid words, if it has a list of them."""


def completion(shell: Shell) -> str:
    """Print a script that completes verbs, flags and values in a shell.

    bash: `vitrail completion bash > ~/.local/share/bash-completion/completions/vitrail`
    zsh: `vitrail completion zsh > ~/.vitrail.zsh`, and `source ~/.vitrail.zsh` in ~/.zshrc
    fish: `vitrail completion fish > ~/.config/fish/completions/vitrail.fish`

    Args:
        shell: Shell of the script.
    """
    verbs = {name: completions_of(verb.load()[1]) for name, verb in VERBS.items()}
    if shell == "fish":
        return "\n".join(_fish(verbs, {name: verb.summary for name, verb in VERBS.items()}))
    header = ["autoload -U +X bashcompinit && bashcompinit"] if shell == "zsh" else []
    return "\n".join([*header, *_bash(verbs)])


def completions_of(function: Any) -> dict[str, Completed]:
    """Return the flags of a verb by their spellings."""
    found = {"--help": Completed("show this help message and exit")}
    for flag in flags_of(function, shown=True):
        if flag.subject:
            continue
        off = flag.opposites[:1] if flag.default is True else ()
        one = Completed(flag.text, flag.is_switch, listed_words(flag.hint))
        found |= dict.fromkeys([word for word in (*flag.words, *off) if word.startswith("--")], one)
    return found


BASH = """\
_vitrail() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    local verb="${{COMP_WORDS[1]}}" words=""
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "{first}" -- "$current"))
        return
    fi
    case "$verb" in
{groups}
    esac
    case "$verb $before" in
{values}
    *) case "$verb" in
{flags}
        esac
        case "$current" in
        -*) ;;
        *) words="" ;;  # a file
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _vitrail vitrail"""


def _bash(verbs: dict[str, dict[str, Completed]]) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    for name in verbs:
        group, _, second = name.partition(" ")
        groups.setdefault(group, []).extend([second] if second else [])
    two = [
        f'    {group}) [ "$COMP_CWORD" -eq 2 ] && COMPREPLY=($(compgen -W "{" ".join(seconds)}" -- "$current")) '
        f'&& return; verb="$verb ${{COMP_WORDS[2]}}" ;;'
        for group, seconds in groups.items()
        if seconds
    ]
    values = [
        f"    {shlex.quote(f'{name} {flag}')}) words={shlex.quote(' '.join(about.values))} ;;"
        for name, flags in verbs.items()
        for flag, about in flags.items()
        if about.values
    ]
    words = [f"        {shlex.quote(name)}) words={shlex.quote(' '.join(flags))} ;;" for name, flags in verbs.items()]
    yield BASH.format(first=" ".join(groups), groups="\n".join(two), values="\n".join(values), flags="\n".join(words))


FISH = """\
function __vitrail_at
    set -l words (commandline -opc)
    string match -q -- "vitrail $argv[1] *" "$words "
end
function __vitrail_words
    test (count (commandline -opc)) -eq $argv[1]
end"""


def _fish(verbs: dict[str, dict[str, Completed]], summaries: dict[str, str]) -> Iterator[str]:
    yield FISH
    for name, summary in summaries.items():
        group, _, second = name.partition(" ")
        text = f" -d {shlex.quote(summary)}" if not second else ""
        yield f"complete -c vitrail -n '__vitrail_words 1' -f -a {group}{text}"
        if second:
            at = shlex.quote(f"__vitrail_words 2; and __vitrail_at {group}")
            yield f"complete -c vitrail -n {at} -f -a {second} -d {shlex.quote(summary)}"
    for name, flags in verbs.items():
        at = shlex.quote(f"__vitrail_at '{name}'")
        for flag, (text, is_switch, words) in flags.items():
            value = "" if is_switch else f" -x -a {shlex.quote(' '.join(words))}" if words else " -r"
            short = text if len(text) <= SHORTEST else text[:SHORTEST].rpartition(" ")[0] + " ..."
            yield f"complete -c vitrail -n {at} -l {flag[2:]}{value} -d {shlex.quote(short)}"


def show(result: str) -> str:
    """Return the script."""
    return result
