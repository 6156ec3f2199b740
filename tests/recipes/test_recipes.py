from __future__ import annotations

import functools
import inspect
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gathered import failures

from vitrail import cli
from vitrail.config import from_yaml, to_yaml
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.errors import UsageError
from vitrail.model.variants import variant
from vitrail.recipes.by_data import TrainingSet, choose_recipe
from vitrail.recipes.registry import RECIPES, find_recipe, recipe
from vitrail.training.run import Run
from vitrail.verbs.flags.parse import parse

ROOT = Path(__file__).resolve().parents[2]


def test_a_recipe_says_its_command_and_its_cost() -> None:
    def said(name: str) -> None:
        text = find_recipe(name).description
        assert re.search(rf"^Command: `vitrail {RECIPES[name].verb} ", text, re.MULTILINE)
        assert re.search(r"^Cost: \w", text, re.MULTILINE)
        assert not inspect.signature(RECIPES[name]).parameters

    assert failures(RECIPES, said) == []


@functools.cache
def accepted(verb: str, *flags: str) -> None:
    """Parse a command as the program does, once for all recipes that have the same."""
    _, function = cli.VERBS[verb].load()
    parse(function, flags, verb)


def test_the_commands_of_a_recipe_are_accepted() -> None:
    def parsed(name: str) -> None:
        commands = re.findall(r"`(vitrail [^`]+)`", find_recipe(name).description)
        assert commands
        for command in commands:
            verb, *flags = shlex.split(command)[1:]
            accepted(verb, *("NAME" if flag == name else flag for flag in flags))
            if "--recipe" in flags:
                assert flags[flags.index("--recipe") + 1] == name

    assert failures(RECIPES, parsed) == []


def test_a_recipe_is_a_run_that_can_be_written_and_built() -> None:
    assert failures(RECIPES, written_and_built) == []


def written_and_built(name: str) -> None:
    run = recipe(name)
    assert from_yaml(to_yaml(run), Run()) == run
    assert run.name == name.replace("/", "-")  # it becomes the name of a folder
    overrides = {key: value for key, value in vars(run.vit).items() if value is not None}
    config = variant(run.network, **overrides)
    assert config.classes == 1000
    if (
        run.image_size is not None and "finetune" not in name and find_recipe(name).by_data is None
    ):  # those take any network
        assert replace(config, image_size=run.image_size).image_size == (run.image_size, run.image_size)
    if run.preprocess is not None:
        assert run.preprocess.image_size == (run.image_size, run.image_size)
    assert run.data == replace(Data(), holdout=run.data.holdout)  # the embedded data, or what the command line names


@pytest.mark.parametrize("document", ["PAPER.md", "docs/tasks/from-scratch.md", "docs/cookbook/published-number.md"])
def test_recipes_that_the_documents_name_are_there(document: str) -> None:
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    named = [name for line in lines for name in re.findall(r"--recipe ([\w/-]+)", line)]
    assert named != []
    assert [name for name in named if name not in RECIPES] == []


def test_recipes_are_made_anew_each_time() -> None:
    assert recipe("digits") == recipe("digits")
    assert recipe("digits") is not recipe("digits")


def test_an_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"'scratch-smal'\. Did you mean 'scratch-small'\?"):
        recipe("scratch-smal")


@pytest.mark.parametrize(
    ("side", "name"), [(8, "digits"), (28, "scratch-small"), (32, "scratch-small"), (64, "scratch-small")]
)
def test_the_choice_for_small_images(side: int, name: str) -> None:
    assert choose_recipe(TrainingSet(images=10_000, side=side))[0] == name


def test_the_choice_for_photographs_says_what_would_be_better() -> None:
    name, why = choose_recipe(TrainingSet(images=1_234, side=500))
    assert name == "scratch-photos"
    assert "1,234 training images of about 500 pixels" in why and "finetune" in why


def test_a_look_at_the_digits() -> None:
    facts = TrainingSet.of(open_data(Data(path="digits")).train)
    assert facts.side == 8
    assert 1000 < facts.images < 1797


@pytest.mark.processes
def test_recipes_need_no_torch() -> None:
    code = "import sys, vitrail.recipes.registry, vitrail.recipes.by_data; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_fine_tuning_is_the_papers() -> None:
    # section 4.1 and appendix B.1.1: SGD with momentum 0.9, batch 512, cosine, clip 1, no weight decay
    run = recipe("finetune")
    assert (run.optim.name, run.optim.momentum, run.optim.clip, run.optim.weight_decay) == ("sgd", 0.9, 1.0, 0.0)
    assert (run.batch_size, run.schedule.shape, run.optim.lr) == (512, "cosine", 0.03)
