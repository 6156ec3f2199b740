"""`vitrail finetune`: from a trained network and other images to a network for those images."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.errors import UsageError
from vitrail.recipes.registry import recipe as named
from vitrail.training.run import Run
from vitrail.transfer.finetune import finetune_run
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
    """Fine-tune a trained network on a folder of images.

    The classifier is replaced by a zero linear layer and the positions are resampled to --image-size (paper,
    section 3.2). Length and warmup follow the paper for so many images; recipe finetune holds the rest.
    --tune attention, ffn or head leaves the rest of the network as it is (follow-up, section 4): less memory and time,
    and the run holds only what learned, with a reference to --from, which must stay where it is.

    Args:
        path: The images, as for `vitrail train`.
        weights: What to start from: a run, a model folder, a weight file of another library, or a name on the hub.
        recipe: Where the settings start from, in place of `finetune` and its length for so many images.
        config: A YAML file of settings, such as the config.yaml of a run; may be repeated.
        epochs: Passes over the images: short for --duration 'N epochs'.
        lr: Peak learning rate: short for --optim.lr. The paper tries 0.003, 0.01, 0.03 and 0.06.
        resume: Go on in this run folder, from its newest valid checkpoint; without a value, in the newest run below
            --out; auto: the same, or begin where there is none.
        nproc: Train with so many processes on this machine, one a device.
        print_config: Print every resolved setting as YAML, and stop.
        dry_run: Try data, model, memory and one batch, and stop.
        settings: Any field of `Run`; a section as a dict, `optim={"momentum": 0.8}`.
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
