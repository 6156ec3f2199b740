"""What is written to a run folder: at the start, for each step, at each resume and at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from vitrail import world
from vitrail.config import from_yaml, to_yaml
from vitrail.data.copies.leaks import leaked
from vitrail.data.sources.open import Splits
from vitrail.errors import CheckpointError
from vitrail.objective.base import Prepared
from vitrail.training.checkpoints.state import Result, RunStatus
from vitrail.training.folder import RunFolder
from vitrail.training.guard import FiniteGuard, Signals, shorten
from vitrail.training.optim.tune import Tuned
from vitrail.training.progress import Progress
from vitrail.training.provenance import provenance
from vitrail.training.run import Run
from vitrail.training.setup import Setup
from vitrail.training.spikes import Spikes
from vitrail.training.step import Done
from vitrail.training.validation.pictures import batch_picture


@world.main_alone("looking at data and machine")
@world.on_main
def record_start(folder: RunFolder, run: Run, decisions: dict[str, str], splits: Splits, tuned: Tuned) -> list[str]:
    """Write config.yaml, run.json, classes.json and split.json. Return the notes about the data."""
    warned = set(splits.report.warnings)
    notes = [f"warning: {line}" if line in warned else line for line in splits.report.lines()]
    notes += [f"warning: {line}" for line in _leaks(splits)]
    folder.write_text("config.yaml", to_yaml(run))
    folder.write_json("classes.json", splits.class_names)
    folder.write_json("split.json", splits.held_out)
    data = {
        "path": run.data.path,
        "fingerprint": splits.fingerprint,
        "classes": len(splits.class_names),
        "images": {
            name: len(source)
            for name in ("train", "validation", "test")
            if (source := getattr(splits, name)) is not None
        },
        "notes": notes,
    }
    folder.write_json(
        "run.json",
        {
            "name": folder.path.name,
            "started": _now(),
            **provenance(),
            "seed": run.seed,
            "data": data,
            "decisions": decisions,
            **_partial(folder, tuned),
        },
    )
    return notes


def _leaks(splits: Splits) -> Iterator[str]:
    """Yield a warning for each held-out split that has training images in it; nothing where that is not known."""
    for name, source in (("validation", splits.validation), ("test", splits.test)):
        found = None if source is None else leaked(splits.train, source)
        if found:
            yield (
                f"{len(found)} {name} images are training images, too, the first is {found[0]}: results on "
                "them are not to be trusted (vitrail data check lists them)"
            )


@world.main_alone("looking at data and machine")
@world.on_main
def record_resume(folder: RunFolder, run: Run, step: int, tuned: Tuned) -> list[str]:
    """Note the resume in run.json, drop what was logged after `step`, and write the new config.yaml.

    Returns a note with the number of micro-batches, and the number before if it has changed.
    """
    before = from_yaml(folder.path / "config.yaml", run).accumulate
    facts = folder.read_json("run.json")
    facts.pop("ended", None)
    facts.pop("result", None)
    folder.rewind(step)
    facts.setdefault("resumed", []).append({"at": _now(), "step": step, **provenance()})
    facts |= _partial(folder, tuned)  # the base may have moved
    folder.write_json("run.json", facts)
    folder.write_text("config.yaml", to_yaml(run))
    why = f", before it {before}" if before != run.accumulate else ""
    if not why and facts.get("out_of_memory"):
        why = f", since memory ran out at step {facts['out_of_memory'][-1]['step']}"
    return [f"batch: {run.batch_size} images, as before; accumulate: {run.accumulate}{why}"]


@world.on_main
def record_memory(folder: RunFolder, run: Run, say: Callable[[str], None], step: int, parts: int) -> None:
    """Report and record that batches are cut into `parts` from `step` on, because memory ran out."""
    say(
        f"warning: out of memory at step {step}: going on with accumulate: {parts}, the same batch of "
        f"{run.batch_size} images in smaller pieces"
    )
    folder.log("out of memory", step, accumulate=parts)
    facts = folder.read_json("run.json")
    facts.setdefault("out_of_memory", []).append({"step": step, "accumulate": parts})
    folder.write_json("run.json", facts)
    folder.write_text("config.yaml", to_yaml(replace(run, accumulate=parts)))


class StepRecord:
    """Takes in finished steps: their numbers go to the log and the progress line, their problems become warnings."""

    def __init__(
        self, folder: RunFolder, setup: Setup, progress: Progress, guard: FiniteGuard, signals: Signals
    ) -> None:
        self._folder, self._setup, self._progress = folder, setup, progress
        self._guard, self._signals, self._spikes = guard, signals, Spikes()

    def __call__(self, done: Done) -> None:
        """Take in one step. Raises Diverged where too many consecutive steps were not finite."""
        setup, outcome, own = self._setup, done.outcome, done.outcome.own()
        self._signals.agree(own)
        status, plan = setup.state.status, setup.plan
        status.elapsed = own["elapsed"]
        if not self._guard.finite(outcome.loss, outcome.norm):
            images = self._names(done)
            self._folder.log("skipped", done.step, loss=outcome.loss, norm=outcome.norm, images=images)
            self._progress.say(self._guard.skip(done.step, outcome.loss, outcome.norm, images))
        if times := self._spikes.times(outcome.loss):
            self._spike(done, times)
        steps = done.step + 1
        self._progress.update(steps, outcome, done.rate, setup.loader.wait_seconds, plan.left(status.elapsed))
        if plan.logs(steps):
            self._folder.log("train", steps, epoch=steps / plan.per_epoch, **self._progress.numbers())

    def _spike(self, done: Done, times: float) -> None:
        loss, images = done.outcome.loss, self._names(done)
        self._folder.log("spike", done.step, loss=loss, times=times, images=images)
        self._progress.say(
            f"warning: step {done.step} has loss {loss:g}, {times:.0f} times the median before it; its images: "
            f"{shorten(images)}"
        )

    def _names(self, done: Done) -> list[str]:
        return [self._setup.splits.train.id(index) for index in done.index.tolist()]


@world.main_alone("writing the result")
@world.on_main
def record_end(folder: RunFolder, result: Result) -> None:
    """Add the result to run.json."""
    values = {name: value for name, value in asdict(result).items() if name not in ("folder", "message")}
    folder.write_json("run.json", {**folder.read_json("run.json"), "ended": _now(), "result": values})


@world.main_alone("drawing the first batch")
@world.on_main
def record_batch(folder: RunFolder, batch: Prepared, class_names: list[str]) -> None:
    """Write batch.png."""
    captions = [class_names[label] if label >= 0 else "" for label in batch.labels.tolist()]
    folder.write_bytes("batch.png", batch_picture(batch.images, captions))


def record_unreadable(
    folder: RunFolder, status: RunStatus, say: Callable[[str], None], image: str, reason: str
) -> None:
    """Report and log an unreadable training image, which another image replaces."""
    say(f"unreadable image, skipped: {image} ({reason})")
    folder.log("unreadable", status.step, image=image, reason=reason)


def recorded_result(folder: RunFolder) -> Result | None:
    """Return the result of a finished run; None if it is not finished."""
    values: dict[str, Any] | None = folder.read_json("run.json").get("result")
    if not values:
        return None
    try:
        result = Result(folder=folder.path, **values)
    except TypeError as error:
        raise CheckpointError(f"{folder.path / 'run.json'} holds a result of another format: {error}") from error
    message = (
        f"{folder.path} is finished ({result.ended} after {result.steps} steps): nothing to do. To go on, resume it "
        "with a longer duration, time_limit or early_stop; the learning rate then follows the longer schedule"
    )
    return replace(result, message=message)


def _partial(folder: RunFolder, tuned: Tuned) -> dict[str, Any]:
    """Return what is tuned and where the frozen part is; {} if everything is tuned."""
    if tuned.base is None:
        return {}
    what = {"what": tuned.tune, "parameters": tuned.parameters, "of": tuned.of}
    return {"tuned": what, "base": tuned.base.written_in(folder.path)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
