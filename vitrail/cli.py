"""`vitrail VERB ...`: find the verb, parse its flags, call it, and print its result.

Results go to stdout, everything else to stderr. The exit code is 0 if everything that was asked for has been written, 1
for an error in the input or an output that cannot be written, 2 for an error in the command, 130 after an interrupt and
143 after a termination. A verb's module is imported when the verb is called, so that help does not wait for torch.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vitrail.device import first_line, keep_freed_memory, out_of_memory
from vitrail.errors import UsageError, VitrailError, did_you_mean
from vitrail.server.logs import is_json
from vitrail.verbs.streams import Terminated, prepare_streams, settle_output, terminating
from vitrail.verbs.table import GROUPS, VERBS, Verb
from vitrail.version import __version__, extras_named
from vitrail.words import printable

GLOBAL = ("--json", "--quiet", "-q", "--verbose", "-v", "--traceback", "--version")

HELP = ("-h", "--help")
ALONE = {"--resume": "latest", "--ray": "local"}
"""Flags that may stand without a value, and the value that they then have."""

SERVER_KEEPS = 32 * 2**20
"""A server reuses freed buffers of up to this size in bytes. It returns the larger buffers of large pictures."""

ONE_RUN = ("train", "finetune")
"""Verbs whose processes under torchrun are one run. Only the first process prints."""

SETTING = re.compile(r"(?<![\w./'\"-])[a-z]+(?:\.[a-z_]+)+\b(?!\.?[\w/(-])")
"""What may be the name of a setting in Python and in YAML, such as data.label_column."""
LINE_OF_FILE = re.compile(r".*\.ya?ml:\d+: ")
"""Begin of an error in a config file, which names settings as the file does."""

LOOP = "Symlink loop from "
"""Begin of what pathlib says of a link that leads to itself, before Python 3.13."""
NO_HOME = "Could not determine home directory."
"""What pathlib says of ~name if the machine has no user of that name."""
SMALLER = "Choose a smaller batch, image size or network, or close other programs."


EXAMPLES = """\
vitrail demo
vitrail train photos/
vitrail finetune photos/ --from runs/finetune-1 --image-size 384
vitrail evaluate runs/finetune-1 photos-test/
vitrail finetune photos/ --from google/vit-base-patch16-224-in21k
vitrail predict runs/finetune-1 holiday/ 'scans/*.png' --out classes.csv
vitrail inspect runs/finetune-1 cat.jpg dog.jpg
vitrail report runs/finetune-1 runs/finetune-2
vitrail search runs/finetune-1 photos/ --like cat.jpg
vitrail serve runs/finetune-1
vitrail export runs/finetune-1 --to onnx
vitrail probe fewshot runs/finetune-1 flowers/ --shots 1 5 10
vitrail cost B/16 --images 1.28e6 --epochs 300 --device a100
vitrail weights convert vit.npz my-model/
vitrail train photos/ --recipe scratch-small --epochs 50 --optim.lr 4e-3
vitrail train --resume"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (without the program's name) and return the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    tell_all = "--traceback" in argv or os.environ.get("VITRAIL_TRACEBACK", "0") != "0"
    # Waiting threads release their core soon. This costs nothing on an idle machine, and training next to another
    # busy program is 1.5 times as fast. torch reads the variable when it is first imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    warnings.filterwarnings("ignore", module=r"PIL\.")  # it writes a line for each odd tag; errors become reasons
    prepare_streams()
    try:
        with extras_named(), terminating():
            call = _read(argv)
            code = 0 if call is None else call.finish(call.function(*call.arguments, **call.keywords))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        settle_output()
        return 0
    except (VitrailError, KeyboardInterrupt, Terminated, OSError) as error:
        if tell_all:
            traceback.print_exc()
        settle_output()
        if isinstance(error, Terminated):
            signal.raise_signal(error.number)  # the process ends by the signal, as its parent expects
            return error.exit_code
        if isinstance(error, VitrailError | KeyboardInterrupt):
            _tell(printable(_with_flags(str(error))) or "interrupted")
            return error.exit_code if isinstance(error, VitrailError) else 130
        if error.filename is None:  # not about a file
            raise
        _tell(f"{printable(os.fsdecode(error.filename))}: {error.strerror}")
        return 1
    except (RuntimeError, MemoryError) as error:
        if str(error) == NO_HOME and not tell_all:
            names = [word for word in argv if word.startswith("~")]
            print(f"vitrail: {printable(' '.join(names))}: no such user. Write the whole path.", file=sys.stderr)
            return 1
        if str(error).startswith(LOOP) and not tell_all:
            print(f"vitrail: {printable(str(error).removeprefix(LOOP))} is a link to itself", file=sys.stderr)
            return 1
        if tell_all or not out_of_memory(error):
            raise
        _tell(f"out of memory ({first_line(error)}). {SMALLER}")
        return 1


def _tell(error: str) -> None:
    """Write an error to standard error; as a line of the log if that is JSON (`serve --log json`)."""
    if is_json():
        logging.getLogger("vitrail").error("%s", error)
    else:
        print(f"vitrail: {error}", file=sys.stderr)


def _with_flags(text: str) -> str:
    """Return an error in which settings have the names of their flags: data.label_column is --data.label-column."""
    if not SETTING.search(text) or LINE_OF_FILE.match(text):
        return text
    from vitrail.verbs.flags.declared import flag_of, flags_of

    known = {flag.name for flag in flags_of(VERBS["train"].load()[1])}
    return SETTING.sub(lambda found: flag_of(found[0]) if found[0] in known else found[0], text)


@dataclass(frozen=True)
class Call:
    """A verb with its arguments, and the way in which its result is printed."""

    module: Any
    function: Any
    arguments: list[Any]
    keywords: dict[str, Any]
    json: bool
    silent: bool

    def finish(self, result: Any) -> int:
        """Print the verb's result and return the exit code that it asks for."""
        if self.silent:
            return 0
        if self.json:
            from vitrail.config import plain
            from vitrail.files import result_json

            value = self.module.as_json(result) if hasattr(self.module, "as_json") else plain(result)
            print(result_json(value, indent=2))
        else:
            shown = self.module.show(result)
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            print(printable(shown) if isinstance(shown, str) else shown.text(width))
        return int(getattr(result, "exit_code", 0))


def _read(argv: list[str]) -> Call | None:
    """Return the call that the command line asks for; None if it only asks for help or the version."""
    first = next((at for at, word in enumerate(argv) if not word.startswith("-")), len(argv))
    before, words = argv[:first], argv[first:]  # flags may stand in front of the verb: vitrail --json doctor
    if not words:
        if "--version" in before:
            print(f"vitrail {__version__}")
            return None
        if unknown := [flag for flag in before if flag not in (*HELP, *GLOBAL)]:
            raise UsageError(f"no flag {unknown[0]!r} without a verb.{did_you_mean(unknown[0], GLOBAL)}")
        print(_help(VERBS))
        return None
    name, rest = _find(words, bool({*HELP} & {*before}))
    if name not in VERBS:
        print(_help({verb: about for verb, about in VERBS.items() if verb.startswith(f"{name} ")}))
        return None
    return _call(name, [*before, *rest])


def _find(words: list[str], help_wanted: bool) -> tuple[str, list[str]]:
    """Return the verb (or the group, if its help is wanted) at the start of `words`, and the words after it."""
    group = [verb for verb in VERBS if verb.startswith(f"{words[0]} ")]
    if " ".join(words[:2]) in group:
        return " ".join(words[:2]), words[2:]
    second = next(iter(words[1:]), "")
    if words[0] in VERBS:
        return words[0], words[1:]
    if not group:
        verbs = sorted({verb.partition(" ")[0] for verb in VERBS})
        raise UsageError(f"no verb {words[0]!r}.{did_you_mean(words[0], verbs)} Verbs: {', '.join(verbs)}")
    if help_wanted or second in ("-h", "--help"):
        return words[0], []
    after = [verb.partition(" ")[2] for verb in group]
    if "list" in after and (not second or second.startswith("-")):
        return f"{words[0]} list", words[1:]
    what = f"cannot {second!r}" if second else "needs one more word"
    raise UsageError(f"vitrail {words[0]} {what}.{did_you_mean(second, after)} Valid: {', '.join(after)}")


def _call(name: str, argv: list[str]) -> Call | None:
    """Parse the flags of a verb and set up its log; None if help is asked for, which is printed."""
    from vitrail.import_path import import_module
    from vitrail.verbs.flags.declared import before_dashes, named_modules
    from vitrail.verbs.flags.parse import parse

    module, function = VERBS[name].load()
    argv = _with_latest(argv)
    for imported in named_modules(argv):  # first, because a file that names their classes decides on flags and help
        import_module(imported)
    if (asked := next((at for at, word in enumerate(before_dashes(argv)) if word in HELP), None)) is not None:
        from vitrail.verbs.flags.help import help_of

        topic = next((word for word in argv[asked + 1 : asked + 2] if not word.startswith("-")), "")
        print(help_of(function, argv, f"vitrail {name}", topic))
        return None
    arguments, keywords = parse(function, argv, f"vitrail {name}")
    keywords.pop("modules", None)
    chosen = {flag: bool(keywords.pop(flag, False)) for flag in ("json", "quiet", "verbose", "traceback")}
    silent = name in ONE_RUN and os.environ.get("RANK", "0") != "0"
    _set_up_log(chosen["quiet"] or silent, chosen["verbose"])
    keep_freed_memory(SERVER_KEEPS if name == "serve" else None)
    unchecked = getattr(function, "__wrapped__", function)  # the flags are checked already
    return Call(module, unchecked, arguments, keywords, chosen["json"], silent)


def _with_latest(argv: list[str]) -> list[str]:
    """Return the words with a value after each flag of `ALONE` that has none."""
    words: list[str] = []
    for word, following in zip(argv, [*argv, "-"][1:], strict=True):
        words += [word, ALONE[word]] if word in ALONE and following.startswith("-") else [word]
    return words


def _set_up_log(quiet: bool, verbose: bool) -> None:
    log = logging.getLogger("vitrail")
    log.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    log.handlers = [logging.StreamHandler(sys.stderr)]
    log.handlers[0].setFormatter(_Printable())
    log.propagate = False


class _Printable(logging.Formatter):
    """The message alone, without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        return printable(super().format(record))


def _help(verbs: dict[str, Verb]) -> str:
    """Return the help of these verbs, or of all of them with their headings and examples."""
    width = max(map(len, verbs))
    groups = GROUPS if verbs is VERBS else {"": verbs}
    parts = ["usage: vitrail VERB ...", ""]
    for heading, members in groups.items():
        parts += [f"{heading}:"] if heading else []
        parts += [*(f"  {name:{width}}  {verb.summary}" for name, verb in members.items()), ""]
    if verbs is VERBS:
        parts += ["examples:", *(f"  {line}" for line in EXAMPLES.splitlines()), ""]
    return "\n".join(
        [*parts, "vitrail VERB --help describes a verb and its flags; vitrail --version prints the version."]
    )
