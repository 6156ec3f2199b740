"""`vitrail finetune`: from a trained network and other images to a network for those images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import UsageError
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run
from vitrail.transfer.protocol import finetune_run
from vitrail.verbs import train as training
from vitrail.verbs.flags.settings import Asked, from_recipe, resumed

if TYPE_CHECKING:
    from vitrail.training.checkpoints.state import Result

log = logging.getLogger("vitrail")
show, as_json = training.show, training.as_json


def finetune(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: float | None = None,
    lr: float | None = None,
    resume: str | Path | None = None,
    nproc: int | None = None,
    print_config: bool = False,
    dry_run: bool = False,
    **settings: Any,
) -> Result | training.Preview:
    """Fine-tune a pretrained network on a folder of images.

    A zero linear layer replaces the classifier, and position embeddings are resampled to --image-size (paper, section
    3.2). Length and warmup follow the paper's for a data set of this size; the recipe finetune gives the other
    settings. With --tune attention, ffn or head, only this part of the network is trained (follow-up, section 4). This
    takes less memory and time. The run then stores only the trained part and refers to --from, which must stay in its
    place.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: Weights to start from: a run, a model folder, a weight file of any known library, or a name on the
            hub.
        recipe: Recipe to start from (default: finetune, with a length that depends on the number of images).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated.
        epochs: Length of the training in epochs: short for --duration 'N epochs'.
        lr: Peak learning rate: short for --optim.lr. The paper tries 0.003, 0.01, 0.03 and 0.06.
        resume: Resume this run from its newest valid checkpoint. Without a value or with 'latest', the newest run
            in --out is resumed; with 'auto', a new run starts if there is none to resume.
        nproc: Number of training processes on this machine, one per device. The total batch size does not change.
        print_config: Print every resolved setting as YAML and exit.
        dry_run: Check data, model, memory and one batch, estimate the cost, and exit.
        settings: Any field of `Run`; a section is a dict, such as `optim={"momentum": 0.8}`.
    """
    asked = Asked(path, recipe, training.files(config), epochs, lr, weights, settings)
    how: dict[str, Any] = {"nproc": nproc, "print_config": print_config, "dry_run": dry_run}
    if resume is not None and (found := resumed(asked, resume)):
        run, folder = found
        log.info("going on with %s", folder)
        return training.start(run, asked.data, folder, **how)
    asking_for_weights(asked)
    if recipe is not None:
        run, why = from_recipe(asked)
        log.info("%s", why)
    else:
        run = finetuning_run(asked)
    return training.start(run, asked.data, **how)


def asking_for_weights(asked: Asked) -> None:
    """Raise UsageError where nothing says what to start from, or which images to learn."""
    if asked.weights is None and not asked.config:
        raise UsageError("fine-tune which network? vitrail finetune DIR --from RUN (to start from none: train)")
    if asked.path is None and not asked.config:
        raise UsageError("fine-tune on which images? vitrail finetune DIR --from RUN")


def finetuning_run(asked: Asked) -> Run:
    """Return the run of recipe finetune for the images asked for, with a length that follows their number."""
    run = asked.over(named("finetune"))
    if run.weights is None:
        raise UsageError(f"fine-tune which network? {', '.join(asked.config)} names no weights: add --from RUN")
    facts = asked.facts(run)
    base = finetune_run(named("finetune"), run.weights, facts.images)
    run = asked.over(base)
    log.info("recipe finetune for %s images: %s", f"{facts.images:,}", run.duration)
    return run
