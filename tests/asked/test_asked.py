"""What is asked for is done, or refused with both sides named: every setting, from flags, files and Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import yaml
from given_values import every_setting, nested
from random_inputs import MANY

import vitrail
from vitrail.config import plain, to_yaml
from vitrail.data.settings import Preparation
from vitrail.errors import VitrailError
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide as choose_run
from vitrail.recipes.known import Known
from vitrail.recipes.registry import RECIPES, find_recipe, recipe
from vitrail.training.assemble import set_up
from vitrail.training.python_objects import PythonObjects
from vitrail.training.run import Run
from vitrail.verbs.flags.parse import parse
from vitrail.verbs.train.resume import resumed
from vitrail.verbs.train.train import finetune, train

TINY = dict(model="smoke/4", image_size=8, duration="2 steps", batch_size=8, device="cpu", workers=0)


@pytest.fixture(scope="module")
def run_folder(arrays: Path, tmp_path_factory: pytest.TempPathFactory, no_page: None) -> Path:
    """A finished run."""
    result = vitrail.train(arrays, out=str(tmp_path_factory.mktemp("runs")), **TINY)
    return result.folder


def family(name: str) -> str:
    """The family of a recipe: "paper" of "paper/vit-b16-jft", and its own name where there is no family."""
    return f"{name.partition('/')[0]}, {find_recipe(name).verb}" if "/" in name else name


FAMILIES = {family(name): name for name in RECIPES}.values()
PLAIN = ("train DIR", "finetune DIR", "train --resume")
SITUATIONS = [
    pytest.param(number, name, id=name, marks=() if name in PLAIN else pytest.mark.train)
    for number, name in enumerate(dict.fromkeys((*PLAIN, *FAMILIES)))
]


@pytest.fixture(scope="module")
def opened() -> Known:
    """Data that are read once for all situations."""
    return Known()


@pytest.fixture
def decide(arrays: Path, run_folder: Path, opened: Known) -> Callable[..., Run]:
    """Decide a run in a situation as the verbs do: `decide("finetune DIR", settings, files)`."""

    def decided(situation: str, settings: dict[str, Any], files: tuple[Path, ...] = ()) -> Run:
        named = None if situation in PLAIN else situation
        tuned = situation == "finetune DIR" or (named is not None and find_recipe(named).verb == "finetune")
        given = Asked(arrays, named, files, weights=run_folder if tuned else None, settings=settings)
        if situation == "train --resume":
            found = resumed(given, run_folder, opened)
            assert found is not None
            return found[0]
        return choose_run(given, opened, tunes=tuned).run

    return decided


def refusal(error: VitrailError, name: str, value: Any) -> bool:
    """Whether an error names the setting or its value, and something else, in words."""
    words = str(error)
    named = (name, name.replace("_", "-"), name.rpartition(".")[2], f"{name.partition('.')[0]} ", str(value))
    return any(word in words for word in named) and len(words.split()) > 4


@pytest.mark.parametrize(("number", "situation"), SITUATIONS)
def test_every_setting_is_used_as_given_or_refused(
    number: int, situation: str, decide: Callable[..., Run], tmp_path: Path
) -> None:
    """A command that trains has each setting from Python and from a file; all others have it by turns."""
    file, wrong = tmp_path / "given.yaml", []
    start = decide(situation, {})
    for place, (name, value) in enumerate(every_setting(start)):
        if name == "weights" and start.weights is not None:  # the command gives them already
            continue
        both = situation == PLAIN[0] or (situation in PLAIN and MANY)
        for where in ("Python", "YAML") if both else (("Python", "YAML")[(number + place) % 2],):
            settings = nested(name, value)
            file.write_text(yaml.safe_dump(as_yaml(settings)))
            try:
                run = decide(situation, settings) if where == "Python" else decide(situation, {}, (file,))
            except VitrailError as error:
                wrong += [] if refusal(error, name, value) else [f"{where} {name}: {value}: {error}"]
                continue
            if attrgetter(name)(run) != value:
                wrong.append(f"{where} {name}: {value} became {attrgetter(name)(run)}")
    assert wrong == []


def as_yaml(value: Any) -> Any:
    """Nested settings without tuples, which YAML's safe writer does not know."""
    if isinstance(value, dict):
        return {name: as_yaml(inner) for name, inner in value.items()}
    return [as_yaml(item) for item in value] if isinstance(value, tuple) else plain(value)


@pytest.mark.parametrize("verb", [train, finetune])
def test_flags_are_read_as_python_reads_keywords(verb: Any) -> None:
    for run in (recipe("scratch-small"), recipe("dino-small")):
        run = replace(run, preprocess=Preparation())
        asked = [(name, value) for name, value in every_setting(run) if name != "weights"]
        words = [word for name, value in asked for word in flags(name, value, attrgetter(name)(run))]
        kind = ["--objective.kind", run.objective.kind]
        _, given = parse(verb, ["photos", *kind, *words], "vitrail")
        wrong = [
            f"{name}: {value} became {found}"
            for name, value in asked
            if (found := step_into(given, name)) != value and list(found if isinstance(found, tuple) else ()) != value
        ]
        assert wrong == []


def flags(name: str, value: Any, before: Any) -> list[str]:
    """The words of a command line that set a value; of a switch that may be left open, the value is a word."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool) and before is not None:
        section, dot, last = name.replace("_", "-").rpartition(".")
        return [flag if value else f"--{section}{dot}no-{last}"]
    return [flag, *(map(str, value) if isinstance(value, tuple) else [str(value)])]


def step_into(given: Any, name: str) -> Any:
    for part in name.split("."):
        given = given[part]
    return given


@pytest.mark.parametrize("situation", [name for name in (*PLAIN, *FAMILIES) if name != "train --resume"])
def test_what_was_decided_is_decided_again(
    situation: str, arrays: Path, run_folder: Path, opened: Known, tmp_path: Path
) -> None:
    """The settings of a decided run, asked for in a file, are that run again."""
    named = None if situation in PLAIN else situation
    tunes = situation == "finetune DIR" or (named is not None and find_recipe(named).verb == "finetune")
    asked = Asked(arrays, named, weights=run_folder if tunes else None, settings=TINY if not tunes else {})
    found = choose_run(asked, opened, tunes=tunes).run
    (tmp_path / "config.yaml").write_text(to_yaml(found))
    assert choose_run(Asked(config=tmp_path / "config.yaml"), opened, tunes=tunes).run == found


# the run with every decision made, and the network


@pytest.mark.export
def test_every_setting_is_what_the_run_begins_with_or_refused(arrays: Path, opened: Known) -> None:
    wrong = []
    start = choose_run(Asked(arrays, settings=TINY), opened).run
    for name, value in every_setting(start):
        given = Asked(arrays, settings={**TINY, **nested(name, value)})
        try:
            run = choose_run(given, opened).run
            with set_up(run, opened.splits_of(run), objects=PythonObjects(asked=given.origins)) as setup:
                found = attrgetter(name)(setup.run)
                own = getattr(setup.decision.config, name.removeprefix("vit."), value)
                built = value in (found, "width") and (not name.startswith("vit.") or own in (value, 32))
        except VitrailError as error:
            wrong += [] if refusal(error, name, value) else [f"{name}: {value}: {error}"]
            continue
        if not built:
            wrong.append(f"{name}: {value} became {found}, and in the network {own}")
    assert wrong == []
