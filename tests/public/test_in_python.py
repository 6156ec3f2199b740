"""What verbs do in Python beyond their flags: `quiet`, a `repr` of one line, and tables of pandas."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from inspect import signature
from types import NoneType
from typing import Any, Literal, get_origin, get_type_hints

import pytest
from gathered import failures

import vitrail
from vitrail.config import sections_of, union_members
from vitrail.data.settings import Data
from vitrail.durations import Duration
from vitrail.errors import UsageError
from vitrail.ranges import checked
from vitrail.tasks.prediction import Prediction
from vitrail.training.run import Run
from vitrail.verbs.data.dedup import Duplicates
from vitrail.verbs.flags.keywords import DataKeywords, RunKeywords
from vitrail.verbs.predict import Predictions
from vitrail.verbs.table import VERBS


def test_quiet_lets_only_warnings_pass_and_ends_with_the_call() -> None:
    log = logging.getLogger("vitrail")

    @checked
    def level(fail: bool = False) -> int:
        if fail:
            raise UsageError("no")
        return log.level

    before = log.level
    assert level() == before and level(quiet=True) == logging.WARNING and log.level == before  # type: ignore[call-arg]
    with pytest.raises(UsageError):
        level(fail=True, quiet=True)  # type: ignore[call-arg]
    assert log.level == before
    assert isinstance(vitrail.doctor(quiet=True), dict)  # type: ignore[call-arg]


def test_a_wrong_keyword_is_an_error_with_the_nearest_one() -> None:
    assert failures([*VERBS, "load", "save"], refuses_a_wrong_keyword) == []


def refuses_a_wrong_keyword(name: str) -> None:
    function = VERBS[name].load()[1] if name in VERBS else getattr(vitrail, name)
    own = [one for one in signature(function).parameters.values() if one.kind is one.KEYWORD_ONLY]
    if not own:
        return
    right = own[0].name
    with pytest.raises(UsageError, match=rf"{function.__name__} has no argument '{right}s'\. Did you mean '{right}'\?"):
        function(**{f"{right}s": 1})


def test_keywords_for_type_checkers_are_the_settings() -> None:
    plain = {int, float, str, bool, NoneType, Duration}
    for keywords, settings in ((RunKeywords, Run), (DataKeywords, Data)):
        written, real = get_type_hints(keywords), get_type_hints(settings)
        assert written.keys() | {"path"} == {field.name for field in fields(settings)} | {"path"}
        for name, hint in written.items():
            wanted = {one for one in union_members(real[name]) if one in plain or get_origin(one) is Literal}
            assert wanted <= {*union_members(hint)}, name
            assert bool(sections_of(real[name])) == (Mapping[str, Any] in union_members(hint)), name


def test_the_result_of_every_verb_has_a_repr_of_one_line() -> None:
    seen = 0
    for name, verb in VERBS.items():
        module, function = verb.load()
        for word in str(function.__annotations__["return"]).replace("[", " ").replace("]", " ").split(" | "):
            kind = getattr(module, word, None)
            if is_dataclass(kind):
                seen += 1
                own = word in ("Evaluation",)  # which has its main numbers in place of the whole result
                assert kind.__repr__.__name__ == ("__repr__" if own else "_one_line"), (name, word)
    assert seen > 15


def test_long_values_are_counted_and_empty_ones_left_out() -> None:
    found = Duplicates("photos", 720, [], [("a",)] * 36, 36, 0, 684, [], [])
    assert repr(found) == "Duplicates(path='photos', images=720, pairs=<36 rows>, found=36, alike=0, remaining=684)"


def test_predictions_are_a_table_of_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Prediction("a.jpg", ["cat", "dog"], [0.9, 0.1]), Prediction("b.jpg", ["dog", "cat"], [0.75, 0.25])]
    frame = Predictions(rows, [], "2 images").to_frame()
    assert list(frame.columns) == ["path", "class", "probability", "class_2", "probability_2"]
    assert frame["class"].tolist() == ["cat", "dog"] and frame["probability"].tolist() == [0.9, 0.75]
    assert len(Predictions([], [], "0 images").to_frame()) == 0
    with pytest.raises(UsageError, match=r"pandas\.read_csv\('x\.csv'\)"):
        Predictions([], [], "2 images", out="x.csv").to_frame()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match="pip install pandas"):
        Predictions(rows, [], "2 images").to_frame()
