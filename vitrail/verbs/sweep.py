"""`vitrail sweep`: find the best learning rate for a data set, and the accuracy it reaches over several seeds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack, overload

import yaml

from vitrail.config import from_yaml, plain
from vitrail.errors import UsageError
from vitrail.evaluation.metric import TITLES, headline
from vitrail.files import check_writable
from vitrail.model.variants import ResNetConfig, ViTConfig, variant
from vitrail.ranges import EpochCount, Fraction, Positive, Range, checked
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import from_recipe
from vitrail.recipes.paper import REGULARISATION_GRID, REGULARISED
from vitrail.recipes.paper_finetune import CONVOLUTIONAL_RATE, FINETUNE, GRID, GRID_IMAGENET, ROW_OF, VTAB
from vitrail.recipes.registry import recipe as named
from vitrail.terminal import page, table
from vitrail.training.run import Run
from vitrail.verbs.flags.keywords import TrialKeywords
from vitrail.words import duration, one_line

if TYPE_CHECKING:
    from vitrail.costs.estimate import Cost
    from vitrail.recipes.known import Known
    from vitrail.transfer.grid import Trials
    from vitrail.transfer.sweep import Executor, SweepResult, TrialResult

log = logging.getLogger("vitrail")
LR = "optim.lr"
HYPERRULE = "bit/hyperrule"
"""The setup of Kolesnikov et al., which the paper also tries for ResNets, to keep the better one (appendix B.1.1)."""
IMAGENET = 500_000
"""A data set with at least this number of training images gets ImageNet's learning rates, and its number of steps."""


@one_line
@dataclass(frozen=True)
class SweepPreview:
    """The trials of a sweep before they are trained, as `dry_run` shows them."""

    trials: Trials
    finished: int
    """Number of trials of the search that are finished already."""
    checked: dict[str, str]
    """Check of the first trial -> its result."""
    cost: Cost
    """Cost of the first trial."""

    @property
    def count(self) -> int:
        """Number of trials that will be trained."""
        searched = len({trial.key for trial in self.trials.search})
        return (searched if searched > 1 else 0) - self.finished + len(self.trials.sweep.seeds)

    @property
    def days(self) -> float | None:
        """Days on one device for all trials, if each costs as much as the first one."""
        return None if self.cost.device_days is None else self.count * self.cost.device_days


@overload
def sweep(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    lr: tuple[Positive, ...] = (),
    vary: tuple[str, ...] = (),
    seeds: Annotated[int, Range(1, 1000)] = 3,
    dev: Fraction | None = None,
    epochs: EpochCount | None = None,
    out: str | Path = "runs/sweep",
    parallel: Annotated[int, Range(0, 1024, note="0: train in this process")] | None = None,
    devices: list[str] | None = None,
    ray: str | None = None,
    dry_run: Literal[False] = False,
    **settings: Unpack[TrialKeywords],
) -> SweepResult: ...
@overload
def sweep(path: str | Path | None = None, *, dry_run: Literal[True], **settings: Any) -> SweepPreview: ...
@overload
def sweep(path: str | Path | None = None, *, dry_run: bool, **settings: Any) -> SweepResult | SweepPreview: ...
@checked  # type: ignore[misc]  # any setting of a preview
def sweep(
    path: str | Path | None = None,
    *,
    weights: str | Path | None = None,
    recipe: str | None = None,
    config: tuple[str | Path, ...] = (),
    lr: tuple[Positive, ...] = (),
    vary: tuple[str, ...] = (),
    seeds: Annotated[int, Range(1, 1000)] = 3,
    dev: Fraction | None = None,
    epochs: EpochCount | None = None,
    out: str | Path = "runs/sweep",
    parallel: Annotated[int, Range(0, 1024, note="0: train in this process")] | None = None,
    devices: list[str] | None = None,
    ray: str | None = None,
    dry_run: bool = False,
    **settings: Unpack[TrialKeywords],
) -> SweepResult | SweepPreview:
    """Find the learning rate on a part of the training images, then retrain on all of them with several seeds.

    The procedure is the paper's (appendix B.1.1). Each learning rate of the grid is trained without a small part of the
    training images and judged by --metric.name on that part. The best one is trained on all training images, once for
    each seed, and measured on the test images, which nothing has used before. Finished trials are never repeated: the
    same command continues an interrupted sweep.

    Args:
        path: The images, in any form that `vitrail train` takes.
        weights: Weights to start from: a run, a model folder, a weight file of any known library, or a name on the
            hub.
        recipe: Recipe to start from, such as paper/finetune-cifar100 (default: finetune, the paper's protocol,
            with a length and a tuned part that depend on the number of images).
        config: A YAML file of settings, such as the config.yaml of a run. May be repeated.
        lr: Learning rates to try (default: those of the paper for the recipe, or for this number of images; for a
            ResNet BiT's HyperRule, too; for paper/vit-...-imagenet the regularisation of section 4.3).
        vary: Another setting and its values to try, such as 'optim.momentum=0.8,0.9'. May be repeated to try all
            combinations.
        seeds: Number of final runs. Their seeds count up from --seed.
        dev: Share of the training images to choose by (default: the recipe's, or the validation split, or 1, 2, 10
            or 20 % depending on the number of images, as in the paper).
        epochs: Length of the training in epochs: short for --duration 'N epochs'.
        out: Folder of the trials and of the table sweep.json. Sweeps in the same folder share their trials.
        parallel: Number of trials at the same time, each a process with its share of the cores; 0 trains in this
            process (default: one for each device; without devices one on a GPU, and on a CPU one for each core if
            memory allows).
        devices: Devices to train on, such as cuda:0 cuda:1, with one trial at a time on each.
        ray: Train on this Ray cluster: 'auto' or ray://HOST:10001. Without a value, a cluster is started on this
            machine.
        dry_run: List the trials, check data, model, memory and one batch of the first one, estimate the cost, and
            exit.
        settings: Any other field of `Run`; a section is a dict, such as `optim={"momentum": 0.8}`.
    """
    asked = Asked(path, recipe, config, epochs, None, weights, settings)
    execute = executor(parallel, devices or [], ray)
    trials = _trials(asked, lr, vary, seeds, dev, Path(out))
    if dry_run:
        return _preview(trials)
    check_writable(Path(out), UsageError, folder=True)
    from vitrail.transfer.sweep import sweep as run_sweep

    return run_sweep(trials, execute)


def executor(parallel: int | None, devices: Sequence[str], ray: str | None) -> Executor:
    """Return the function that trains the trials. Raises UsageError if the flags contradict each other."""
    if ray is not None:
        if devices or parallel == 0:
            raise UsageError("A Ray cluster decides where trials run. Remove --devices, and give --parallel 1 or more.")
        from vitrail.transfer.on_ray import OnRay

        return OnRay(ray, parallel)
    if parallel == 0:
        if len(devices) > 0:
            raise UsageError("--parallel 0 trains in this process, on one device: replace --devices by --device")
        from vitrail.transfer.trial import here

        return here
    from vitrail.device import choose_device
    from vitrail.transfer.processes import Processes, automatic

    if parallel is None and not devices:
        return automatic
    for device in devices:
        choose_device(device)  # raises if there is no such device
    count = parallel or max(len(devices), 1)
    return Processes([devices[i % len(devices)] if devices else None for i in range(count)])


def _trials(asked: Asked, lr: Sequence[float], vary: Sequence[str], seeds: int, dev: float | None, out: Path) -> Trials:
    """Return the trials of the sweep asked for. Raises UsageError and DataError."""
    from vitrail.recipes.known import Known
    from vitrail.transfer.grid import Sweep, Trials
    from vitrail.transfer.protocol import arrange, finetune_run
    from vitrail.transfer.recommend import best_tuned
    from vitrail.weights.load import read_card

    if asked.path is None and not asked.files:
        raise UsageError("no images are given. Name their folder: vitrail sweep DIR --from RUN")
    row = ROW_OF.get(asked.recipe or "")
    run, _ = asked.applied_to(named(asked.recipe or "finetune"))
    if run.weights is None and asked.recipe is None:
        raise UsageError(
            "no weights are given. Name them: vitrail sweep DIR --from RUN (or train from scratch: --recipe NAME)"
        )
    if "evaluate_every" in asked.settings:
        raise UsageError("a sweep evaluates each trial once, at its end. Remove --evaluate-every")
    if run.data.answers is not None:
        raise UsageError("sweep compares one number of one answer: name a single column, --data.label-column COLUMN")
    if dev is None:
        data = asked.settings.get("data")
        same = data.get("holdout") if isinstance(data, Mapping) else None  # in a sweep, --data.holdout means --dev
        dev = same or (row.holdout if row is not None and row is not VTAB else None)
    known = Known()
    split = arrange(run.data, dev, run.seed, known)

    def of_recipe(values: Mapping[str, Any]) -> Run:
        return from_recipe(with_values(asked, values), known).run

    def as_advised(values: Mapping[str, Any]) -> Run:
        return with_values(asked, values).applied_to(advised)[0]

    if asked.recipe is not None:
        choice = from_recipe(asked, known)
        log.info("%s", choice)
        run = choice.run
    else:
        assert run.weights is not None
        advised = finetune_run(named("finetune"), run.weights, split.images)
        if not isinstance(read_card(run.weights).config, ResNetConfig):
            advised = replace(advised, tune=best_tuned(split.images / split.classes))
        run, _ = asked.applied_to(advised)
        log.info("recipe finetune for %s images: %s", f"{split.images:,}", run.duration or "up to the time limit")
    rates, by = _rates(asked, run, lr, vary)
    grid, others = _tried(asked, known, run, rates, vary, split.images)
    origins = {**asked.origins, **{name: by if rates and name == LR else "--vary" for name in grid if rates or vary}}
    make = as_advised if asked.recipe is None else of_recipe
    return Trials(Sweep(run, grid, [run.seed + i for i in range(seeds)], others, dev, origins, make), out, split)


def _rates(asked: Asked, run: Run, lr: Sequence[float], vary: Sequence[str]) -> tuple[Sequence[float], str]:
    """Return the learning rates that are asked for and the flag that names them: --lr, else the one of --optim.lr.

    Raises UsageError if two flags name rates.
    """
    given, varied = asked.places.get(LR), any(text.partition("=")[0].strip() == LR for text in vary)
    if lr and varied:
        raise UsageError(f"--lr and --vary {LR} both set the learning rates to try; give one of them")
    if given is None or given.words != f"--{LR}":
        if given is not None and not (lr or varied or asked.recipe in REGULARISED):
            rate = run.optim.lr
            log.warning(
                "%s: the rate %g is not used: a sweep tries others. To use it: --lr %g", given.words, rate, rate
            )
        return lr, "--lr"
    if lr or varied:
        raise UsageError(f"--{LR} and {'--lr' if lr else f'--vary {LR}'} both set the learning rate; give one of them")
    return () if asked.recipe in REGULARISED else (run.optim.lr,), given.words


def with_values(asked: Asked, values: Mapping[str, Any]) -> Asked:
    """Return what is asked for with further settings, as if flags gave them too: dotted name -> value."""
    settings: dict[str, Any] = dict(plain(dict(asked.settings)))
    for name, value in values.items():
        *sections, last = name.split(".")
        place = settings
        for section in sections:
            place[section] = dict(place.get(section) or {})
            place = place[section]
        place[last] = value
    return replace(asked, settings=settings, epochs=None if "duration" in values else asked.epochs)


def _tried(
    asked: Asked, known: Known, run: Run, lr: Sequence[float], vary: Sequence[str], images: int
) -> tuple[Mapping[str, Sequence[Any]], dict[str, Run]]:
    """Return the settings to try as a grid, and complete runs to try as well. Without flags they are the paper's."""
    grid: dict[str, Sequence[Any]] = dict(values_to_try(text, run) for text in vary)
    if lr or grid:
        return {LR: tuple(lr), **grid} if lr else grid, {}
    from vitrail.weights.load import read_card

    network = read_card(run.weights).config if run.weights is not None else variant(run.network)
    fine_tuning = asked.recipe in (None, FINETUNE.name, *ROW_OF)
    rule = fine_tuning and isinstance(network, ResNetConfig)
    others = {HYPERRULE: from_recipe(replace(asked, recipe=HYPERRULE), known).run} if rule else {}
    return _published(asked.recipe, images, network), others


def _published(recipe: str | None, images: int, network: ViTConfig | ResNetConfig) -> Mapping[str, Sequence[Any]]:
    """Return the settings that the paper tries: the learning rates of Table 4, or the regularisation of section 4.3.

    The text has 0.06 for ResNets and hybrids only (appendix B.1.1).
    """
    rates: Sequence[float]
    if recipe in (None, FINETUNE.name):
        rates = GRID if images < IMAGENET else GRID_IMAGENET
    elif recipe in ROW_OF:
        rates = ROW_OF[recipe].grid
    elif recipe in REGULARISED:
        return REGULARISATION_GRID
    else:
        raise UsageError(
            f"no learning rates to try are published for recipe {recipe}. Give them: --lr 0.001 0.003 0.01"
        )
    convolutions = isinstance(network, ResNetConfig) or network.stem == "resnet"
    return {LR: tuple(rate for rate in rates if rate != CONVOLUTIONAL_RATE or convolutions)}


def values_to_try(text: str, base: Run) -> tuple[str, tuple[Any, ...]]:
    """Return the field of `Run` and the values in text such as "optim.momentum=0.8,0.9". Raises UsageError."""
    name, equals, listed = (part.strip() for part in text.partition("="))
    try:
        node = yaml.compose(f"[{listed}]", Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        node = None
    if not equals or not name or not isinstance(node, yaml.SequenceNode) or not node.value:
        raise UsageError(f"{text!r} contains no values to try. Write them as --vary optim.momentum=0.8,0.9")
    parts, values = name.split("."), []
    for item in node.value:
        written = f"[{listed}]"[item.start_mark.index : item.end_mark.index]
        value: Any = from_yaml(
            "".join(f"{{{part}: " for part in parts) + written + "}" * len(parts), base, imports=True
        )
        for part in parts:
            value = getattr(value, part)
        values.append(value)
    return name, tuple(values)


def _preview(trials: Trials) -> SweepPreview:
    from vitrail.transfer.trial import finished
    from vitrail.verbs.train.dry_run import rehearse

    search = {trial.key: trial for trial in trials.search}.values()
    done = sum(finished(trial.folder) is not None for trial in search) if len(trials.search) > 1 else 0
    first = trials.search[0]
    return SweepPreview(trials, done, *rehearse(replace(first.run, out=str(trials.folder)), asked=first.asked))


def show(result: SweepResult | SweepPreview) -> Any:
    """Return the table, or the list of trials that would be trained, for a terminal."""
    if isinstance(result, SweepPreview):
        return _shown_preview(result)
    from vitrail.transfer.sweep import chosen_by, title

    trials = [*result.search, *result.final]
    rows = []
    for row in trials:
        chosen = not row.trial.final and dict(row.trial.values) == result.chosen
        rows.append((*_cells(row), "chosen" if chosen else row.outcome.status))
    last = next(row for row in result.final if row.outcome.status == "done")
    measured = [chosen_by(row.trial.run.metric, row.outcome.dev) for row in result.search if row.outcome.dev]
    by = title(measured[0] if measured else result.metric)
    return page(
        table(("trial", f"dev {by}", "loss", f"test {TITLES[result.metric]}", "seconds", ""), rows),
        [f"{row.trial}: {row.outcome.reason}" for row in trials if row.outcome.reason],
        [f"chosen by {by} on {result.split.how} ({result.split.dev:,} images)"] if result.search else [],
        [_measured(result), f"model: {last.outcome.run}", f"table: {result.folder / 'sweep.json'}"],
    )


def _cells(row: TrialResult) -> tuple[str, ...]:
    from vitrail.transfer.sweep import chosen_by, in_words

    outcome = row.outcome
    dev, metric = ("", ""), row.trial.run.metric
    if outcome.dev is not None:
        dev = in_words(chosen_by(metric, outcome.dev), outcome.dev), f"{outcome.dev['nll']:.4f}"
    test = "" if outcome.test is None else in_words(headline(outcome.test) or "top1", outcome.test)
    return str(row.trial), *dev, test, f"{outcome.seconds:,.0f}"


def _measured(result: SweepResult) -> str:
    """Return the result on the test images in a sentence."""
    if result.top1 is None:
        return "The final runs are not measured, because there are no test images."
    mean, std, count = result.top1.mean, result.top1.std, result.top1.count
    spread = "" if std is None else f" ± {100 * std:.2f} (sample standard deviation)"
    lost = len(result.final) - count
    failed = f", without {lost} that failed" if lost else ""
    return f"test {TITLES[result.metric]} {100 * mean:.2f} %{spread} over {count} seed{'s' * (count > 1)}{failed}"


def _shown_preview(result: SweepPreview) -> str:
    trials, split = result.trials, result.trials.split
    lines = [str(trial) for trial in trials.search] if len(trials.search) > 1 else []
    lines += [f"the best values, seed {seed}, on all training images" for seed in trials.sweep.seeds]
    lines = [f"{number:>3}  {line}" for number, line in enumerate(lines, 1)]
    lines += ["", f"chosen by: {split.how} ({split.dev:,} images)", f"test images: {split.test:,}"]
    lines += ["", "first trial:", *(f"{name}: {what}" for name, what in result.checked.items()), ""]
    finished = f", {result.finished} already finished" if result.finished else ""
    if result.days is not None:
        time = duration(result.days)
        lines.append(f"all: {result.count} trials to train{finished}, about {time} on one such device")
    return "\n".join(lines)


def as_json(result: SweepResult | SweepPreview) -> Any:
    """Return the result as JSON values."""
    if not isinstance(result, SweepPreview):
        return result.as_json()
    split = result.trials.split
    return {
        "search": [{"values": plain(dict(trial.values)), "key": trial.key} for trial in result.trials.search],
        "seeds": list(result.trials.sweep.seeds),
        "dev": {"how": split.how, "images": split.dev},
        "test": {"images": split.test},
        "finished": result.finished,
        "trials": result.count,
        "checked": result.checked,
        "cost": result.cost.as_json(),
        "device_days": result.days,
    }
