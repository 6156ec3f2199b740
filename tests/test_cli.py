from __future__ import annotations

import inspect
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import docstring_parser
import pytest
from gathered import failures
from random_inputs import MANY

from vitrail import cli
from vitrail.data.settings import Data
from vitrail.durations import Duration, Epochs, Percent, Steps
from vitrail.errors import DataError, UsageError, WeightsError
from vitrail.objective.settings import DINO
from vitrail.recipes.registry import recipe
from vitrail.training.run import Optim, Run
from vitrail.verbs import doctor as doctor_module
from vitrail.verbs.flags.declared import flags_of
from vitrail.verbs.flags.parse import parse
from vitrail.verbs.inspect import inspect as inspect_images
from vitrail.verbs.train.train import train

ROOT = Path(__file__).resolve().parents[1]


def failing_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `vitrail doctor` raise."""

    def fail() -> None:
        """Fail."""
        raise error

    monkeypatch.setattr(doctor_module, "doctor", fail)


@pytest.mark.parametrize("argv", [["--help"], [], ["-h"], ["data", "--help"], ["--help", "data"]])
def test_help_lists_the_verbs(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for verb, about in cli.VERBS.items():
        assert (verb in out and about.summary in out) == (verb.startswith("data ") or "data" not in argv)


HARD_TO_READ = re.compile(
    r"left out:|so many|what is\b|of which|goes on\b|\bkept\b|\btold\b|side by side|in a row|\bis no\b|\banew\b", re.I
)
"""Phrases that help must not have: each has a plainer form."""


def test_every_verb_has_help_of_plain_full_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    def helps(verb: str) -> None:
        text = help_of(verb.split(), capsys)
        assert text.startswith(f"usage: vitrail {verb}")
        _, function = cli.VERBS[verb].load()
        assert " ".join((function.__doc__ or "").split("\n")[0].split()) in text
        assert "--traceback" in text
        texts = {flag.name: flag.text for flag in flags_of(function)}
        assert {name: text for name, text in texts.items() if not re.match(r"[A-Z].*\.$", text)} == {}
        assert HARD_TO_READ.findall(text) == [] and HARD_TO_READ.findall(cli.VERBS[verb].summary) == []
        assert not re.search(r"\(default: (True|False)\)", text)  # of a switch

    assert failures(cli.VERBS, helps) == []


SHORT = """
--model --from --weights --tune --image-size --recipe --config --epochs --time-limit --batch-size --lr
--optim.weight-decay --early-stop --seed --augment.mixup --objective.kind --label-from --data.label-from --holdout
--data.holdout --preprocess.resize --device --precision --nproc --out --resume --dry-run --print-config
"""
"""The 25 flags that `vitrail train --help` shows, by all their names."""


def test_help_shows_what_people_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    shown = re.findall(r"^  (--\S.*?)(?:  |$)", out, re.MULTILINE)
    assert len(shown) == 25 and re.findall(r"--[\w.-]+", " ".join(shown)) == SHORT.split()
    assert len(out.splitlines()) <= 90  # one and a half screens of 60 lines
    assert cli.main(["train", "--help", "optim"]) == 0
    names = [f"--optim.{field.name.replace('_', '-')}" for field in fields(Optim)]
    assert [word for word in re.findall(r"^  .*?(--optim\.[\w-]+)", capsys.readouterr().out, re.MULTILINE)] == [
        "--optim.class",
        *names,
    ]
    assert cli.main(["train", "--help", "optimm"]) == 2
    assert "Did you mean 'optim'?" in capsys.readouterr().err


HELP = f"""
import sys
from vitrail.cli import main
for verb in {["", *cli.VERBS]}:
    assert main([*verb.split(), "--help"]) == 0, verb
    if found := sys.modules.keys() & {{"torch", "matplotlib", "sklearn", "datasets", "pyarrow"}}:
        sys.exit(f"vitrail {{verb}} --help imports {{sorted(found)}}")
"""


@pytest.mark.processes
def test_help_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from vitrail import __version__

    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vitrail {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["data"], "Valid: check, stats, pack"),
        (["data", "chekc", "x"], "Did you mean 'check'?"),
        (["--jsn"], "Did you mean '--json'?"),
        (["--jsn", "doctor"], "Did you mean '--json'?"),
        (["train"], "vitrail train DIR"),
        (["train", "x", "--optim.lrr", "1"], "Did you mean '--optim.lr'?"),
        (["train", "x", "--optim.momentun=1"], "Did you mean '--optim.momentum'?"),
        (["train", "x", "--wieght_decay", "1"], "Did you mean '--optim.weight-decay'?"),
        (["train", "x", "--epoch", "1"], "Did you mean '--epochs'?"),
        (["train", "--lrr", "3", "x"], "Did you mean '--lr'?"),
        (["finetune", "x", "--form", "y"], "Did you mean '--from'?"),
        (["train", "x", "--minutes", "3"], "no flag '--minutes'. About minutes: --time-limit. vitrail train --help"),
        (["demo", "--time-limit", "3"], "no flag '--time-limit'. vitrail demo --help"),
        (["train", "x", "y"], "'y'"),
        (["train", "x", "--seed", "one"], "--seed: expected a whole number, got 'one'"),
        (["train", "x", "--time-limit", "1x"], "--time-limit: '1x' is not a time: write a number of minutes"),
        (["train", "x", "--time-limit", "20", "s"], "'s'"),
        (["plan", "x", "--time-limit", "soon"], "such as '20 s', '10 min' or '1.5 h'"),
        (["study", "figure4", "--minutes", "0 s"], "--minutes is 0.0; it must be greater than 0"),
        (["train", "x", "--optim.name", "adam"], "adamw"),
        (["train", "x", "--duration", "5 years"], "30 epochs"),
        (["train", "x", "--recipe", "digit"], "Did you mean 'digits'?"),
        (["train", "x", "--recipe", "digits", "--epochs", "3", "--duration", "3"], "give one of them"),
        (["train", "x", "--config", "/nowhere.yaml"], "/nowhere.yaml"),
        (["finetune"], "vitrail finetune DIR"),
        (["predict", "runs/x"], "FILE"),
        (["evaluate"], "MODEL"),
        (["recipes", "show"], "NAME"),
    ],
)
def test_wrong_commands_end_with_2_and_say_what_is_right(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in " ".join(err.split())
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no such thing"), 2),
        (DataError("no such data"), 1),
        (WeightsError("no such weights"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_message(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(error, monkeypatch)
    assert cli.main(["doctor"]) == code
    assert capsys.readouterr() == ("", f"vitrail: {str(error) or 'interrupted'}\n")


def test_a_signal_during_training_decides_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vitrail.training.guard import Interrupted

    failing_with(Interrupted("saved at step 5", 15), monkeypatch)
    assert cli.main(["doctor"]) == 143
    assert capsys.readouterr().err == "vitrail: saved at step 5\n"


@pytest.mark.parametrize("by", ["flag", "flag in front", "variable"])
def test_a_traceback_where_it_is_asked_for(
    by: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing_with(DataError("no such data"), monkeypatch)
    if by == "variable":
        monkeypatch.setenv("VITRAIL_TRACEBACK", "1")
    argv = {"flag": ["doctor", "--traceback"], "flag in front": ["--traceback", "doctor"]}.get(by, ["doctor"])
    assert cli.main(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.endswith("vitrail: no such data\n")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_with(ZeroDivisionError(), monkeypatch)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


@pytest.mark.parametrize("argv", [["recipes", "list", "--json"], ["--json", "recipes", "list"], ["recipes", "--json"]])
def test_json_is_all_there_is_on_stdout(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 0
    out, err = capsys.readouterr()
    assert "digits" in json.loads(out)
    assert err == ""


def test_json_knows_no_nan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def odd() -> dict[str, object]:
        """Odd values."""
        return {"loss": float("nan"), "path": Path("a")}

    monkeypatch.setattr(doctor_module, "doctor", odd)
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"loss": None, "path": "a"}


@pytest.mark.parametrize(
    ("flags", "shown"), [([], ["warning", "info"]), (["-q"], ["warning"]), (["-v"], ["debug", "warning", "info"])]
)
def test_quiet_and_verbose(
    flags: list[str], shown: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak() -> dict[str, object]:
        """Say something at every level."""
        for level in ("debug", "info", "warning"):
            getattr(logging.getLogger("vitrail"), level)(level)
        return {}

    monkeypatch.setattr(doctor_module, "doctor", speak)
    assert cli.main(["doctor", *flags]) == 0
    assert sorted(capsys.readouterr().err.split()) == sorted(shown)


def test_only_what_was_given_is_passed_on() -> None:
    assert parse(train, [], "train") == ([], {})
    argv = (
        "photos --optim.lr 1e-3 --optim.betas .9 .95 --augment.no-flip --augment.randaugment 2 9 --compile "
        "--schedule.warmup 5% --duration 1e6ex --optim.clip None --preprocess.resize squash --config a --config b "
        "--from runs/x --epochs 3 --vit.positions none --dry-run -q"
    )
    arguments, given = parse(train, argv.split(), "train")
    assert arguments == []
    assert given == {
        "path": "photos",
        "optim": {"lr": 1e-3, "betas": (0.9, 0.95), "clip": None},
        "augment": {"flip": False, "randaugment": (2, 9.0)},
        "compile": True,
        "schedule": {"warmup": Percent(5)},
        "duration": given["duration"],
        "preprocess": {"resize": "squash"},
        "config": ("a", "b"),
        "weights": "runs/x",
        "epochs": 3.0,
        "vit": {"positions": "none"},
        "dry_run": True,
        "quiet": True,
    }
    assert str(given["duration"]) == "1000000 examples"


@pytest.mark.parametrize(("word", "value"), [("500", Steps(500)), ("1.5 epochs", Epochs(1.5))])
def test_durations_on_the_command_line(word: str, value: object) -> None:
    assert parse(train, ["--duration", word], "train")[1] == {"duration": value}


@pytest.mark.parametrize(
    ("argv", "resume"),
    [
        (["--resume"], "latest"),
        (["--resume", "runs/x"], "runs/x"),
        (["--resume", "--out", "o"], "latest"),
        (["photos", "--resume"], "latest"),
    ],
)
def test_resume_with_and_without_a_run(argv: list[str], resume: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}

    def stub(path: str | None = None, *, out: str = "runs", resume: str | None = None) -> dict[str, object]:
        """Remember what it is called with."""
        seen.update(resume=resume)
        return seen

    monkeypatch.setattr(doctor_module, "doctor", stub)
    assert cli.main(["doctor", *argv, "--json"]) == 0
    assert seen["resume"] == resume


def flags_that_may_be_null(function: Callable[..., Any]) -> dict[str, set[str]]:
    """Each flag of a verb that may be None, and the words that it knows."""
    found: dict[str, set[str]] = {}

    def look(name: str, hint: Any) -> None:
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        if type(None) in options:
            words = {word for option in options if get_origin(option) is Literal for word in get_args(option)}
            found[name] = found.get(name, set()) | words

    def walk(section: type, prefix: str = "") -> None:
        hints = get_type_hints(section)
        for field in fields(section):
            inner = [
                t for t in (hints[field.name], *get_args(hints[field.name])) if is_dataclass(t) and t is not Duration
            ]
            look(prefix + field.name, hints[field.name] if not inner else None)
            for each in inner:
                walk(each, f"{prefix}{field.name}.")

    annotations = {name: hint for name, hint in function.__annotations__.items() if name != "return"}
    hints = get_type_hints(SimpleNamespace(__annotations__=annotations), inspect.unwrap(function).__globals__)
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            look(name, hints[name])
        elif parameter.kind is parameter.VAR_KEYWORD:
            walk(Data, "data.") if name == "reading" else walk(Run)
    return found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as {"optim.lr": ...}."""
    found = {}
    for name, value in values.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


@pytest.mark.parametrize(("number", "word"), enumerate(["null", "none", "None"]))
def test_what_may_be_null_can_be_typed(number: int, word: str) -> None:
    """`vitrail train` takes each of the words; the other verbs, which are parsed in the same way, have one by turns."""
    verbs = dict.fromkeys(["train", *list(cli.VERBS)[number::3]])
    assert failures(cli.VERBS if MANY else verbs, lambda verb: typed_null(verb, word)) == []


def typed_null(verb: str, word: str) -> None:
    _, function = cli.VERBS[verb].load()
    words = flags_that_may_be_null(function)
    null = [name for name in words if word not in words[name] and name not in ("recipe", "config")]
    parameters = inspect.signature(function).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    subjects = ["bash" if name == "shell" else "x" for name in needed]
    argv = [part for name in null for part in (f"--{name.replace('_', '-')}", word)]
    _, given = parse(function, [*subjects, *argv], f"vitrail {verb}")
    given = flat(given)
    given |= {f"data.{name}": value for name, value in given.items()}  # `**reading` takes names without the section
    assert {name: given[name] for name in null} == dict.fromkeys(null)


def test_there_are_settings_that_may_be_null() -> None:
    names = flags_that_may_be_null(train)
    assert {"image_size", "optim.clip", "vit.positions", "data.test", "objective.bce_threshold", "lr"} <= names.keys()
    assert all("none" in names[name] for name in ("vit.positions", "data.test", "data.validation"))


def test_none_is_a_word_where_it_means_something() -> None:
    argv = ["--vit.positions", "none", "--data.validation", "none", "--data.test", "none", "--average.kind", "none"]
    _, given = parse(train, argv, "train")
    assert flat(given) == {
        "vit.positions": "none",
        "data.validation": "none",
        "data.test": "none",
        "average.kind": "none",
    }


def test_a_pattern_that_the_shell_has_replaced_should_be_quoted(tmp_path: Path) -> None:
    files = [tmp_path / "d" / kind / f"{number}.jpg" for kind in ("cat", "dog") for number in range(2)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for verb in ("data check", "train"):
        _, function = cli.VERBS[verb].load()
        with pytest.raises(UsageError) as error:
            parse(function, list(map(str, files)), f"vitrail {verb}")
        folder = tmp_path / "d"
        assert f"got 3 more names of files, such as {files[1]}" in str(error.value)
        assert f"vitrail {verb} {folder} --data.include '*.jpg'" in str(error.value)
        assert str(error.value).endswith(f"quote the pattern: '{folder}/**/*.jpg'")
    with pytest.raises(UsageError, match="takes no more words, but got 'y z'"):
        parse(train, ["x", "y", "z"], "vitrail train")
    with pytest.raises(UsageError, match="takes no more words"):  # no pattern becomes such paths
        parse(train, ["x", os.curdir, str(files[0])], "vitrail train")


def test_a_class_may_be_called_none() -> None:
    assert parse(inspect_images, ["model", "--class", "none"], "inspect") == (["model"], {"class_name": "none"})
    assert parse(inspect_images, ["model", "--class", "null"], "inspect") == (["model"], {"class_name": None})


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--mask-after-stem", True),
        ("--no-mask-after-stem", False),
        ("--objective.mask-after-stem", True),
        ("--objective.no-mask-after-stem", False),
    ],
)
def test_a_switch_by_any_of_its_names(flag: str, value: bool) -> None:
    assert parse(train, [flag], "train")[1] == {"objective": {"mask_after_stem": value}}


def help_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What `vitrail ARGV --help all` prints, as one line."""
    assert cli.main([*argv, "--help", "all"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_is_the_text_under_each_field(capsys: pytest.CaptureFixture[str]) -> None:
    shown = help_of(["train"], capsys)
    sections = {"preprocess", *(name for name, value in vars(Run()).items() if is_dataclass(value))}
    sections -= {"objective", "duration", "evaluate_every", "checkpoint_every"}
    for section in (Run, Optim, Data, DINO):
        for parameter in docstring_parser.parse_from_object(section).params:
            if parameter.arg_name not in ("path", "kind", "pairs", *sections):  # pairs is no setting
                assert " ".join((parameter.description or "").split()) in shown


def test_help_shows_the_defaults_of_the_recipe_and_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("optim: {lr: 0.0123}\nobjective: {kind: mae, ratio: 0.6}\n")
    digits = recipe("digits")
    for argv in (["--recipe", "digits"], ["--recipe=digits"]):
        shown = help_of(["train", *argv], capsys)
        assert f"(default: {digits.optim.lr})" in shown and f"(default: {digits.duration})" in shown
        assert f"(default: {digits.model})" in shown
    shown = help_of(["train", "--recipe", "digits", "--config", str(tmp_path / "mine.yaml")], capsys)
    assert "(default: 0.0123)" in shown and "(default: mae)" in shown and "(default: 0.6)" in shown
    assert f"(default: {digits.duration})" in shown
    for verb, name in (("finetune", "finetune-by-data"), ("sweep", "finetune")):
        assert f"(default: {recipe(name).optim.name})" in help_of([verb], capsys)


def test_a_flag_that_equals_its_default_was_given() -> None:
    lr = str(recipe("digits").optim.lr)
    _, given = parse(train, ["x", "--recipe", "digits", "--optim.lr", lr, "--batch_size=64"], "train")
    assert given == {"path": "x", "recipe": "digits", "optim": {"lr": float(lr)}, "batch_size": 64}


@pytest.mark.processes
def test_module_and_pipe(tmp_path: Path) -> None:
    # `vitrail doctor | head`: the reader that goes away is no error
    command = [sys.executable, "-m", "vitrail", "recipes", "show", "digits", "--yaml"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


@pytest.mark.processes
def test_names_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    (tmp_path / "data" / "train").mkdir(parents=True)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "vitrail", "recipes", "show", "ziffern-ü"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "\\xfc" in done.stderr and "Traceback" not in done.stderr


def test_the_home_of_nobody_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "~nobody-of-this-name/run", "digits"]) == 1
    said = capsys.readouterr().err
    assert "~nobody-of-this-name/run: no such user" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["predict", "vitrail/tiny", ""], "images"),
        (["predict", "vitrail/tiny", "x", "--out", ""], "--out"),
        (["train", "x", "--out="], "--out"),
        (["finetune", "x", "--from", ""], "--weights"),
        (["data", "check", ""], "path"),
        (["search", "vitrail/tiny", "x", "--like", "a", "--like", ""], "--like"),
    ],
)
def test_an_empty_path_is_refused(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert f"{named} is empty. Give the path" in capsys.readouterr().err


def test_a_link_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["data", "check", str(tmp_path / "loop")]) == 1
    assert "it is a link to loop, where nothing is" in capsys.readouterr().err
    assert cli.main(["embed", "vitrail/tiny", str(tmp_path), "--out", str(tmp_path / "loop" / "x.npz")]) != 0
    assert "Traceback" not in capsys.readouterr().err
