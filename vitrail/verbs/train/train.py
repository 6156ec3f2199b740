"""`vitrail train | finetune | demo`: from images to a trained network and a report."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from vitrail.config import from_yaml, to_yaml
from vitrail.device import command_seconds
from vitrail.errors import VitrailError
from vitrail.evaluation.metric import headline, metric_in_words, on_images
from vitrail.ranges import Count, EpochCount, Positive, Seed, checked
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide
from vitrail.training.run import Run
from vitrail.verbs.flags.keywords import FinetuneKeywords, RunKeywords
from vitrail.verbs.train.resume import resumed
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.costs.estimate import Cost
    from vitrail.training.result import Result

log = logging.getLogger("vitrail")


@one_line
@dataclass(frozen=True)
class Preview:
    """The run that would be trained, for `print_config` and `dry_run`."""

    run: Run
    checked: dict[str, str] = field(default_factory=dict)
    """`dry_run` only: check -> its result."""
    cost: Cost | None = None
    """`dry_run` only: the cost of the run on this machine."""


@overload
def train(
    path: str | Path | None = None,
    *,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: EpochCount | None = None,
    lr: Positive | None = None,
    resume: str | Path | None = None,
    nproc: Count | None = None,
    print_config: Literal[False] = False,
    dry_run: Literal[False] = False,
    **settings: Unpack[RunKeywords],
) -> Result: ...
@overload
def train(path: str | Path | None = None, *, dry_run: Literal[True], **settings: Any) -> Preview: ...
@overload
def train(path: str | Path | None = None, *, print_config: Literal[True], **settings: Any) -> Preview: ...
@overload
def train(path: str | Path | None = None, *, dry_run: bool, **settings: Any) -> Result | Preview: ...
@checked  # type: ignore[misc]  # any setting of a preview
def train(
    path: str | Path | None = None,
    *,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: EpochCount | None = None,
    lr: Positive | None = None,
    resume: str | Path | None = None,
    nproc: Count | None = None,
    print_config: bool = False,
    dry_run: bool = False,
    **settings: Unpack[RunKeywords],
) -> Result | Preview:
    """Train a Vision Transformer on a folder of images.

    Without --recipe and --config, a recipe is chosen by the number and the size of the images. Values of --config
    replace those of the recipe, and flags replace both. Defaults shown below are those of the recipe and the files on
    the same command line. The run folder OUT/NAME-N/ holds everything about the run; open its report.html.

    Args:
        path: A folder with one folder per class (with or without split folders), a CSV or Parquet file, tar shards,
            an .npz file, a data set of the hub, or 'digits'.
        recipe: Recipe to start from (`vitrail recipes` lists them).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated. If it, or a run to
            resume, names classes of your own, name their modules with --import.
        epochs: Length of the training in epochs: short for --duration 'N epochs'.
        lr: Peak learning rate: short for --optim.lr.
        resume: Resume this run from its newest valid checkpoint. Without a value or with 'latest', the newest run
            in --out is resumed; with 'auto', the newest of this command's name, or a new run starts if there is none.
        nproc: Number of training processes on this machine, one per device. The total batch size does not change.
            For several hosts, use torchrun ... -m vitrail train.
        print_config: Print the settings of the run as YAML and exit. Those that are null or auto are decided by the
            images and the machine when it starts.
        dry_run: Check data, model, memory and one batch, estimate the cost, and exit.
        settings: Any field of `Run`; a section is a dict, such as `optim={"momentum": 0.8}`.
    """
    began = time.monotonic() - command_seconds()
    asked = Asked(path, recipe, config, epochs, lr, settings.pop("weights", None), settings)
    return _run(asked, resume, nproc, print_config, dry_run, tunes=False, began=began)


@checked
def demo(*, out: str | Path = "runs", seed: Seed = 0) -> Result:
    """Train a small Vision Transformer on the embedded handwritten digits, in about a minute.

    The result is the accuracy on digits that the network has never seen, and the path of report.html.

    Args:
        out: Folder in which the run folder is created.
        seed: Seed of the run.
    """
    return train(recipe="digits", name="demo", out=out, seed=seed)


@overload
def finetune(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: EpochCount | None = None,
    lr: Positive | None = None,
    resume: str | Path | None = None,
    nproc: Count | None = None,
    print_config: Literal[False] = False,
    dry_run: Literal[False] = False,
    **settings: Unpack[FinetuneKeywords],
) -> Result: ...
@overload
def finetune(path: str | Path | None = None, *, dry_run: Literal[True], **settings: Any) -> Preview: ...
@overload
def finetune(path: str | Path | None = None, *, print_config: Literal[True], **settings: Any) -> Preview: ...
@overload
def finetune(path: str | Path | None = None, *, dry_run: bool, **settings: Any) -> Result | Preview: ...
@checked  # type: ignore[misc]  # any setting of a preview
def finetune(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    epochs: EpochCount | None = None,
    lr: Positive | None = None,
    resume: str | Path | None = None,
    nproc: Count | None = None,
    print_config: bool = False,
    dry_run: bool = False,
    **settings: Unpack[FinetuneKeywords],
) -> Result | Preview:
    """Fine-tune a pretrained network on a folder of images.

    A new linear layer replaces the classifier, and position embeddings are resampled to --image-size (paper, section
    3.2). Without --recipe, the layer begins as a linear probe of the frozen network, in seconds, and the images, the
    network and the time decide on optimiser, batch, learning rate, augmentation, length and the trained part; each
    decision is printed with its reason. --recipe finetune is the paper's protocol. With --tune attention, ffn or head,
    only this part of the network is trained (follow-up, section 4), and with --tune lora only updates of low rank. This
    takes less memory and time. The run then stores only the trained part and refers to --from, which must stay in its
    place.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: Weights to start from: a run, a model folder, a weight file of any known library, or a name on the
            hub (default: vitrail/tiny, a small network that vitrail ships).
        recipe: Recipe to start from, such as finetune, the paper's protocol (default: finetune-by-data, whose settings
            depend on the images, the network and the time).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated. If it, or a run to
            resume, names classes of your own, name their modules with --import.
        epochs: Length of the training in epochs: short for --duration 'N epochs'.
        lr: Peak learning rate: short for --optim.lr. With --recipe finetune the paper tries 0.003, 0.01, 0.03 and 0.06.
        resume: Resume this run from its newest valid checkpoint. Without a value or with 'latest', the newest run
            in --out is resumed; with 'auto', the newest of this command's name, or a new run starts if there is none.
        nproc: Number of training processes on this machine, one per device. The total batch size does not change.
        print_config: Print the settings of the run as YAML and exit. Those that are null or auto are decided by the
            images and the machine when it starts.
        dry_run: Check data, model, memory and one batch, estimate the cost, and exit.
        settings: Any field of `Run`; a section is a dict, such as `optim={"momentum": 0.8}`.
    """
    began = time.monotonic() - command_seconds()
    asked = Asked(path, recipe, config, epochs, lr, weights, settings)
    return _run(asked, resume, nproc, print_config, dry_run, tunes=True, began=began)


def _run(
    asked: Asked,
    resume: str | Path | None,
    nproc: int | None,
    print_config: bool,
    dry_run: bool,
    *,
    tunes: bool,
    began: float,
) -> Result | Preview:
    """Train what is asked for, or show it. The arguments are those of `train` and `finetune`, and of `fit`."""
    from vitrail.recipes.known import Known

    known, folder = Known(), None
    if resume is not None and (found := resumed(asked, resume, known, tunes=tunes)):
        run, folder = found
        log.info("resuming %s", folder)
    else:
        choice = decide(asked, known, tunes=tunes)
        for warning in choice.warnings:  # so that --quiet does not hide it
            log.warning("%s", warning)
        log.info("%s", choice)
        run = choice.run
    if dry_run:
        from vitrail.training.processes import check_processes
        from vitrail.verbs.train.dry_run import rehearse

        if nproc is not None:
            check_processes(nproc, run)
        return Preview(run, *rehearse(run, known.splits_of(run), asked.origins))
    if print_config:
        return Preview(run)
    from vitrail.training.loop import training
    from vitrail.training.processes import in_process_group, launch
    from vitrail.training.python_objects import PythonObjects

    if nproc is not None:
        return launch(run, folder, nproc, module="vitrail.verbs.train.child", asked=asked.origins)
    objects, splits = PythonObjects(asked=asked.origins), known.splits_of(run)
    with (
        in_process_group(run.timeout, run.device),
        training(run, objects, resume=folder, splits=splits, began=began, reported=True) as result,
    ):
        return reported(result)


def reported(result: Result) -> Result:
    """Write the report and return the result. All processes of a run call this; the main process writes."""
    from vitrail import world
    from vitrail.reports.page import write_report

    with world.main_alone("writing the report"):
        if world.is_main():
            try:
                write_report(result.folder)
            except (VitrailError, OSError) as error:  # a page that cannot be written must not cost a trained network
                log.warning("the report could not be written: %s", error)
                return result.without({"report.html": str(error)})
    return result


def show(result: Result | Preview) -> str:
    """Return the result as text for a terminal."""
    if isinstance(result, Preview):
        lines = [f"{name}: {what}" for name, what in result.checked.items()]
        return "\n".join(lines) if lines else to_yaml(result.run).rstrip()
    lines = [*([result.verdict] if result.verdict else []), result.summary]
    if result.test and not result.verdict and (name := headline(result.test)):
        measured = f"{metric_in_words(name, result.test[name])}{on_images(name, result.test, 'test images')}"
        lines.append(f"{measured}, which had no part in training or in choosing the model")
    if result.steps and result.best.get("step") == 0:  # only a linear probe is measured before the first step
        lines.append("No step of the training was better than the classifier that it began with, which is kept.")
    lines += [line for line in (result.of_classes, result.gap) if line]
    report = result.folder / "report.html"
    lines += [f"report: {report}"] if report.is_file() else []
    if result.shortfall:
        next_step = " The report says what to do next." if _advises(report) else ""
        lines.append(f"This network {result.shortfall} (see the first line).{next_step}")
    return "\n".join([*lines, *_own_stem(result.folder)])


def _advises(report: Path) -> bool:
    """Return whether a report says how the network may become better."""
    from vitrail.reports.run_record import read_run
    from vitrail.reports.suggestions import advises

    return report.is_file() and advises(read_run(report.parent))


def _own_stem(folder: Path) -> list[str]:
    """Return a line if a network that was trained from scratch has a stem that no other library has."""
    from vitrail.model.variants import ViTConfig, variant

    try:
        run = from_yaml(folder / "config.yaml", Run())
        network = variant(run.network, **run.vit.changes())
    except VitrailError:  # a network or settings of the user's own
        return []
    if run.weights is not None or not isinstance(network, ViTConfig) or network.stem in ("linear", "resnet"):
        return []
    return [
        "note: vitrail can do everything with this network (predict, serve, export). Only the libraries timm and "
        f"transformers do not know its first layers, the stem {network.stem!r}, so it cannot be converted for them. If "
        "you need one of them, train again with --vit.stem linear."
    ]


def as_json(result: Result | Preview) -> Any:
    """Return the result as JSON values."""
    from vitrail.config import plain

    if isinstance(result, Preview):
        cost = None if result.cost is None else result.cost.as_json()
        return {"run": plain(result.run), "checked": result.checked, "cost": cost}
    return {**plain(result), "report": str(result.folder / "report.html")}
