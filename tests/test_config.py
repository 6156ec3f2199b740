from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from vitrail.config import from_yaml, merge, to_yaml
from vitrail.data.settings import Preparation, Preprocess
from vitrail.data.wording import vocabulary
from vitrail.durations import Duration, Epochs, Examples, Percent, Steps, parse_duration, parse_minutes
from vitrail.errors import UsageError
from vitrail.import_path import Extensible
from vitrail.ranges import FolderName, FoldNumber, Limit
from vitrail.training.run import Optim, Run

KINDS = (Steps, Epochs, Examples, Percent)
durations = st.builds(
    lambda kind, value: kind(value),
    st.sampled_from(KINDS),
    st.floats(0, allow_nan=False, allow_infinity=False) | st.integers(0, 10**9),
)


def valid(kind: Any, limit: Limit) -> st.SearchStrategy[Any]:
    """Any value of a type within its range."""
    if isinstance(limit, FolderName):
        return st.text(min_size=1).filter(limit.holds)
    if isinstance(limit, FoldNumber):
        folds = st.integers(2, 999).flatmap(lambda count: st.tuples(st.integers(1, count), st.just(count)))
        return folds.map("{0[0]}/{0[1]}".format)
    if kind is Duration:
        return durations.filter(limit.holds)
    if kind is int:
        inside: st.SearchStrategy[Any] = st.integers(int(limit.least), int(limit.most))
    else:
        least, most = max(limit.least, -1e300), min(limit.most, 1e300)
        inside = st.floats(least, most, exclude_min=limit.above, exclude_max=limit.below)
    return inside if limit.extra is None else inside | st.just(kind(limit.extra))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Any value an annotation allows."""
    if hint is Duration:
        return durations
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        parts = {field.name: values_of(hints[field.name]) for field in fields(hint)}
        if hint in (Preparation, Preprocess):  # the resized image is bounded too: size / crop
            parts["crop"] = st.floats(0.5, 1)
        if hint is Run:
            parts["classes"] = st.sampled_from([("replace",), ("add",), ("merge", "a=b"), ("remove",), ("remove", "a")])
        if "also" in parts:
            words = [*vocabulary(), "vflip@0.25", "my_module:darker('a @ b', by=[0.5])@1"]
            parts["also"] = st.lists(st.sampled_from(words), max_size=3).map(tuple)
        for pair in parts.keys() & {"scale", "ratio", "global_scale", "local_scale"}:
            if get_origin(hints[pair]) is tuple:  # (low, high)
                parts[pair] = parts[pair].map(lambda ends: tuple(sorted(ends)))
        kind: Any = hint
        return st.builds(kind, **parts)
    if get_origin(hint) is Literal:
        return st.sampled_from(get_args(hint))
    if get_origin(hint) is Annotated:
        return valid(*get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        own = [
            part
            for part in get_args(hint)
            if isinstance(part, type) and issubclass(part, Extensible) and not is_dataclass(part)
        ]
        return st.one_of([values_of(part) for part in get_args(hint) if part not in own])  # not the base of own classes
    if get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        return st.lists(values_of(get_args(hint)[0]), max_size=4).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*map(values_of, get_args(hint)))
    return {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(allow_nan=False),
        str: st.text(),
        type(None): st.none(),
    }[hint]


@given(values_of(Run))
def test_every_run_survives_being_written_and_read(run: Run) -> None:
    text = to_yaml(run)
    assert from_yaml(text, Run()) == run
    assert to_yaml(from_yaml(text, Run())) == text


@given(durations)
def test_a_duration_reads_back_as_itself(duration: Duration) -> None:
    assert parse_duration(str(duration)) == duration


@given(st.fractions(0, 1000, max_denominator=100), st.integers(1, 5000), st.integers(1, 100_000))
def test_durations_in_steps_are_exact_fractions_rounded_up(value: Fraction, per_epoch: int, total: int) -> None:
    lengths = dict(per_epoch=per_epoch, batch_size=per_epoch, total=total)
    number = float(value)
    assert Steps(number).steps(**lengths) == math.ceil(value)
    assert Epochs(number).steps(**lengths) == math.ceil(value * per_epoch)
    assert Examples(number).steps(**lengths) == pytest.approx(math.ceil(value / per_epoch), abs=1e-9)
    assert Percent(number).steps(**lengths) == math.ceil(value * total / 100)


@pytest.mark.parametrize(
    ("text", "duration"),
    [
        ("500", Steps(500)),
        (500, Steps(500)),
        ("30 epochs", Epochs(30)),
        ("1e6 examples", Examples(1e6)),
        (" .5ep ", Epochs(0.5)),
        ("5%", Percent(5)),
        ("5 %", Percent(5)),
    ],
)
def test_durations_as_people_write_them(text: str | int, duration: Duration) -> None:
    assert parse_duration(text) == duration


@pytest.mark.parametrize("text", ["", "epochs", "1.2.3 epochs", "-5 steps", "5 lightyears", "1e999 steps", "٣"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20s", 20), ("90 s", 90), ("10 min", 600), ("1.5h", 5400), ("2 hours", 7200), (" 1 minute ", 60), ("3e1s", 30)],
)
def test_times_as_people_write_them(text: str, seconds: float) -> None:
    assert 60 * parse_minutes(text) == pytest.approx(seconds, rel=1e-12)
    for source in (f"time_limit: {text}", f"time_limit: '{text}'"):
        assert from_yaml(source, Run()).time_limit == parse_minutes(text)


def test_a_time_without_a_unit_counts_minutes() -> None:
    assert [parse_minutes(time) for time in (7, 7.5, "7", " 7.5 ")] == [7.0, 7.5, 7.0, 7.5]
    assert from_yaml("time_limit: null", replace(Run(), time_limit=1.0)).time_limit is None


@pytest.mark.parametrize("text", ["20 parsecs", "s", "", "1:30", "10 min 5 s", "20S", "twenty s", "1,5 h"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a time: write a number of minutes, .*'1.5 h'"):
        parse_minutes(text)


def test_a_time_that_is_not_valid_is_told_with_its_line() -> None:
    with pytest.raises(UsageError, match="<yaml>:2: time_limit: '20 parsecs' is not a time"):
        from_yaml("seed: 1\ntime_limit: 20 parsecs", Run())
    with pytest.raises(UsageError, match=r"<yaml>:1: time_limit is -0\.5; it must be greater than 0"):
        from_yaml("time_limit: -30 s", Run())
    with pytest.raises(UsageError, match=r"<yaml>:1: time_limit is -inf; it must be greater than 0"):
        from_yaml("time_limit: -.inf", Run())
    for zero in (0.0, -0.0):  # equal, and shown as they were given
        with pytest.raises(UsageError, match=rf"^time_limit is {zero}; it must be greater than 0"):
            Run(time_limit=zero)
    with pytest.raises(UsageError, match="time_limit: expected a number or null, got True"):
        merge(Run(), {"time_limit": True})


def test_a_run_cannot_last_a_percentage() -> None:
    with pytest.raises(UsageError, match="percentage"):
        Percent(5).steps(per_epoch=1, batch_size=1)


@pytest.mark.full_size
@given(st.text() | st.text("\n\r\t\x85\u2028\ufeff '\":#-?", min_size=1))
def test_any_text_survives(text: str) -> None:
    assert from_yaml(to_yaml(Run(out=text)), Run()).out == text


def test_to_yaml_is_yaml_that_any_reader_understands() -> None:
    run = Run(optim=Optim(lr=1e-5), cache="yes", augment=replace(Run().augment, randaugment=(2, 9.0)))
    read = yaml.safe_load(to_yaml(run))
    assert list(read) == [field.name for field in fields(Run)]
    assert read["optim"]["lr"] == 1e-5
    assert read["cache"] == "yes"
    assert read["augment"]["randaugment"] == [2, 9.0]
    assert read["duration"] == "30 epochs"


def test_numbers_as_people_write_them() -> None:
    # YAML 1.1 reads 1e-3 as text and yes as a boolean; the field says what is meant
    run = from_yaml("optim: {lr: 1e-3, clip: null, weight_decay: 0}\ncache: yes\ncompile: on", Run())
    assert (run.optim.lr, run.optim.clip, run.optim.weight_decay) == (1e-3, None, 0.0)
    assert (run.cache, run.compile) == ("yes", True)
    assert from_yaml("vit: {positions: none}\naverage: {kind: none}", Run()).vit.positions == "none"


def test_only_what_is_named_changes() -> None:
    base = Run(batch_size=7, optim=Optim(lr=3.0))
    assert from_yaml("", base) == base
    assert from_yaml("optim: {momentum: 0.5}", base) == replace(base, optim=Optim(lr=3.0, momentum=0.5))


def test_an_optional_section_starts_from_its_own_defaults() -> None:
    run = from_yaml("preprocess: {resize: squash}", Run())
    assert run.preprocess == Preparation(resize="squash")
    whole = from_yaml("preprocess: {resize: squash, image_size: [32, 32]}", Run())
    assert whole.preprocess == Preprocess((32, 32), resize="squash")
    assert from_yaml("preprocess: null", run).preprocess is None


def problems(text: str, path: Path) -> list[str]:
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        from_yaml(path, Run())
    assert error.value.exit_code == 2
    return [line.strip() for line in str(error.value).splitlines()]


def test_all_problems_at_once_with_file_line_and_suggestion(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    lines = problems(
        "nmae: x\n"
        "optim:\n"
        "  lrr: 0.1\n"
        "  name: adamq\n"
        "  betas: [0.9]\n"
        "lr: 0.1\n"
        "seed: 1.5\n"
        "batch_size: '5'\n"
        "compile: 1\n"
        "duration: 5 lightyears\n"
        "augment: light\n"
        "keep: 1\n"
        "keep: 2\n",
        path,
    )
    assert lines[0] == "11 problems in the configuration:"
    where = [line.removeprefix(f"{path}:") for line in lines[1:]]
    assert {line.split(": ")[0] for line in where} == {str(n) for n in range(1, 14)} - {"2", "12"}
    text = "\n".join(where)
    for part in (
        "1: nmae: unknown setting. Did you mean 'name'?",
        "3: optim.lrr: unknown setting. Did you mean 'lr'?",
        "4: optim.name: expected one of adamw, sgd, lamb, muon, got 'adamq'. Did you mean 'adamw'?",
        "5: optim.betas: expected [a number, a number], got ['0.9']",
        "6: lr: unknown setting. Did you mean 'optim.lr'?",
        "7: seed: expected a whole number, got '1.5'",
        "8: batch_size: expected a whole number or null, got '5'",
        "13: keep: given twice, first on line 12",
    ):
        assert part in text


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("optim: [", ":1: not YAML"),
        ("a: b: c", ":1: not YAML"),
        ("\n- 1\n", "expected settings by name"),
        ("just text", "expected settings by name"),
        ("optim: &a {lr: 1}\nvit: *a\n", "aliases"),
        ("optim: &a [*a]\n", "aliases"),
        ("\x00", "not YAML"),
        ("[" * 5000, "nested too deeply"),
        ("optim: !!python/object/apply:os.system [echo]", "expected settings by name"),
    ],
)
def test_broken_files_are_usage_errors(text: str, part: str, tmp_path: Path) -> None:
    assert part in "\n".join(problems(text, tmp_path / "r.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        *("a: [1", "a: &x 1\nb: *x", "- " * 5000, "a: \ud800", "x: \x00", "a: b: c", "\tseed: 1", "- 1\n---\n- 2"),
        *("seed: '3'", "seed: 0x10", "seed: 1 # one", "seed: null", "name: 'it''s'", 'name: "a\\tb"', "name: a#b"),
        *(
            "optim: {lr: 1e-3}",
            "optim: {lr: 1, lr: 2}",
            "name: |\n  a\n  b\nseed: 3",
            "name: >-\n  a\n  b",
            "? seed\n: 3",
        ),
    ],
)
def test_both_readers_of_yaml_say_the_same(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """libyaml, where PyYAML has it, and PyYAML's own."""
    found: list[object] = []
    for _ in range(2):
        try:
            found.append(from_yaml(text + "\n", Run()))
        except UsageError as error:
            found.append(str(error))
        monkeypatch.delattr(yaml, "CSafeLoader", raising=False)
    assert found[0] == found[1]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.yaml", tmp_path, tmp_path / "binary.yaml"):
        with pytest.raises(UsageError, match="cannot read"):
            from_yaml(path, Run())


def test_merge_takes_python_values() -> None:
    run = merge(Run(), {"optim": {"lr": 1}, "duration": "5 epochs", "preprocess": Preprocess(crop=1.0)})
    assert (run.optim.lr, run.duration, run.preprocess) == (1.0, Epochs(5), Preprocess(crop=1.0))
    assert merge(run, {"optim": Optim(lr=2.0), "preprocess": None}).preprocess is None


@pytest.mark.parametrize("values", [{"seed": True}, {"seed": "5"}, {"compile": 1}, {"optim": 3}, {"name": 5}])
def test_merge_does_not_guess(values: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected"):
        merge(Run(), values)


@dataclass(frozen=True)
class Even:
    number: int = 0

    def __post_init__(self) -> None:
        if self.number % 2:
            raise UsageError(f"{self.number} is odd")


@dataclass(frozen=True)
class Outer:
    even: Even = Even()
    names: tuple[str, ...] = ()


def test_what_a_section_itself_refuses_is_told_with_its_line() -> None:
    with pytest.raises(UsageError, match=r"<yaml>:2: even: 3 is odd"):
        from_yaml("names: [a, b]\neven: {number: 3}", Outer())


def test_other_dataclasses_round_trip_too() -> None:
    outer = Outer(Even(4), ("a", "null", "5", ""))
    assert from_yaml(to_yaml(outer), Outer()) == outer


@pytest.mark.processes
def test_reading_configuration_needs_no_torch() -> None:
    code = "import sys, vitrail.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
