"""What a run writes and reports: at its start, for each step, at a resume and at its end."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from vitrail import world
from vitrail.config import from_yaml, to_yaml
from vitrail.data.check import EVERY_CLASS, FAIR, IMBALANCED, fairness_flags, imbalance, imbalance_text, leaked
from vitrail.data.labels.sets import class_counts, label_names
from vitrail.data.roles import Splits
from vitrail.objective.base import Prepared
from vitrail.objective.settings import Supervised
from vitrail.run_log import fitting
from vitrail.training.assemble import Setup
from vitrail.training.batches import batch_picture
from vitrail.training.ending import ending_of
from vitrail.training.folder import RunFolder
from vitrail.training.guard import NAMED, FiniteGuard, LossSpikes, Signals
from vitrail.training.progress import Progress
from vitrail.training.provenance import provenance
from vitrail.training.result import Result
from vitrail.training.run import Run
from vitrail.training.step import FinishedStep
from vitrail.words import listing, time_span

LEAST = 0.2
"""Share of the time limit that should be left for training."""
SHORTEST = 1e-3
"""Seconds that a run trains at least: one step."""


class RunRecorder:
    """Writes the events of a run into its folder and reports them: called with each finished step, in order."""

    def __init__(
        self,
        folder: RunFolder,
        setup: Setup,
        progress: Progress,
        guard: FiniteGuard,
        signals: Signals,
        *,
        began: float,
        reported: bool,
    ) -> None:
        self._folder, self._setup, self._progress = folder, setup, progress
        self._guard, self._signals, self._spikes = guard, signals, LossSpikes()
        self._command_began = self._began = self._started = began
        self._ending = ending_of(setup, reported)
        self._end = 0.0
        self._unreadable = 0

    @world.main_alone("looking at data and machine")
    @world.on_main
    def start(self) -> None:
        """Write config.yaml, run.json, classes.json and split.json, and report the notes about the data."""
        run, splits = self._setup.run, self._setup.splits
        warned = set(splits.report.warnings)
        notes = [f"warning: {line}" if line in warned else line for line in splits.report.lines()]
        timetable = self._setup.timetable
        steps = 0 if timetable.open else timetable.total  # with a time limit alone nobody knows how many there will be
        cut = [self._setup.decision.cut] if self._setup.decision.cut else []
        notes += [f"warning: {line}" for line in (*_leaks(splits), *_rare_classes(run, splits, steps), *cut)]
        sources = {"train": splits.train, "validation": splits.validation, "test": splits.test}
        self._write_config(run)
        self._folder.write_json("classes.json", splits.class_names)
        self._folder.write_json("split.json", splits.held_out)
        data = {
            "path": run.data.path,
            "fingerprint": splits.fingerprint,
            "classes": len(splits.class_names),
            "images": {name: len(source) for name, source in sources.items() if source is not None},
            "notes": notes,
        }
        facts = {"name": self._folder.path.name, "started": _now(), **provenance(), "seed": run.seed, "data": data}
        decisions = self._setup.why
        given = {"given": self._setup.given.names} if self._setup.given.names else {}
        self._folder.write_json("run.json", {**facts, "decisions": decisions, **given, **self._tuned_part()})
        self._progress.announce(self._folder.path, decisions, notes)

    @world.main_alone("looking at data and machine")
    @world.on_main
    def resume(self) -> None:
        """Note the resume in run.json, drop what was logged after its step, and write the new config.yaml."""
        run, step = self._setup.run, self._setup.state.status.step
        before = from_yaml(self._folder.path / "config.yaml", run).accumulate
        facts, wrong = fitting(self._folder.read_json("run.json"))
        notes = [f"warning: {note}" for note in (self._folder.rewind(step), _left_out(facts, wrong)) if note]
        facts.pop("ended", None)
        facts.pop("result", None)
        facts.setdefault("resumed", []).append({"at": _now(), "step": step, **provenance()})
        tuned = self._tuned_part()
        if tuned.get("base") != facts.get("base"):  # it has moved
            self._setup.validation.follow_base(self._folder)
        facts |= tuned
        self._folder.write_json("run.json", facts)
        self._write_config(run)
        why = f", before it {before}" if before != run.accumulate else ""
        if not why and facts.get("out_of_memory"):
            why = f", since memory ran out at step {facts['out_of_memory'][-1].get('step', 'unknown')}"
        note = f"batch: {run.batch_size} images, as before; accumulate: {run.accumulate}{why}"
        self._progress.announce(self._folder.path, self._setup.why, [*notes, note])

    @world.main_alone("starting the trackers")
    @world.on_main
    def track(self) -> None:
        """Start the trackers, and say how a person sees the run there."""
        for where in self._folder.track(self._setup.run, self._setup.state.status.step) or ():
            self._progress.say(where)

    def start_clock(self, *, again: bool = False) -> None:
        """Count the seconds of training from now on, and set the time that the limit leaves for it.

        again: Whether it was started before, so that the person has been warned of a short time.
        """
        timetable, before = self._setup.timetable, self._setup.state.status.elapsed
        self._started = time.monotonic()
        self._began = self._started - before
        if timetable.limit is None:
            return
        limit = 60 * (self._setup.run.time_limit or 0.0)
        timetable.limit = world.gather(self._time_for_training())[0]
        if timetable.limit - before < LEAST * limit and not again:
            left, start = max(timetable.limit - before, 0.0), self._started - self._command_began
            self._progress.say(
                f"warning: of the time limit, {time_span(limit)}, only {time_span(left)} are left for training: the "
                f"start took {time_span(start)}, and the end will take about {time_span(self._end)}"
            )

    def left(self) -> float:
        """Return the seconds that are left of the time limit; infinity without one."""
        limit = self._setup.run.time_limit
        return math.inf if limit is None else 60 * limit - (time.monotonic() - self._command_began)

    def _time_for_training(self) -> float:
        """Return the seconds of training that the time limit leaves: all but the start and the end of the command.

        Those before a resume are part of them, without the start and the end of the earlier command.
        """
        status, run = self._setup.state.status, self._setup.run
        self._ending.step(self._setup.loader.wait_seconds)
        image = status.elapsed / max(status.step, 1) / (run.batch_size or 1)
        left = 60 * (run.time_limit or 0.0) - (self._started - self._command_began)
        self._end = self._ending.seconds(image, left - self._end)
        return max(left - self._end, SHORTEST)

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Time an evaluation, by which the seconds at the end are predicted."""
        began = time.monotonic()
        yield
        self._ending.evaluation(time.monotonic() - began)

    def own_numbers(self) -> dict[str, float]:
        """Return what this process adds to the sums of a step: the main process's time, signals, unreadable images."""
        own = {"unreadable": float(len(self._setup.loader.bad)), **self._signals.flags()}
        if self._setup.timetable.limit is not None:
            own["limit"] = self._time_for_training() if world.is_main() else 0.0
        return {"elapsed": world.is_main() * (time.monotonic() - self._began), **own}

    def __call__(self, done: FinishedStep) -> None:
        """Take in one step. Raises Diverged after too many consecutive steps that were not finite."""
        status, timetable, own = self._setup.state.status, self._setup.timetable, done.sums.own()
        self._signals.agree(own)
        status.elapsed = own["elapsed"]
        if timetable.limit is not None:
            timetable.limit = own["limit"]
        loss, norm = done.sums.loss, done.sums.norm
        if not done.finite:
            images = self._images(done)
            self._folder.log("skipped", done.step, loss=loss, norm=norm, images=images)
            status.skipped += 1
            self._progress.say(self._guard.skip(done.step, loss, norm, images))
        if times := self._spikes.times(loss):
            images = self._images(done)
            self._folder.log("spike", done.step, loss=loss, times=times, images=images)
            self._progress.say(
                f"warning: step {done.step} has loss {loss:g}, {times:.0f} times the median before it; its images: "
                f"{listing(images, NAMED, quoted=False)}"
            )
        if world.size() > 1 and own["unreadable"] > self._unreadable:
            self._unreadable = int(own["unreadable"])
            self._progress.say(
                f"unreadable images so far: {self._unreadable}, summed over the {world.size()} processes (an image "
                "counts once for each process that has read it)"
            )
            self._folder.log("unreadable", done.step, count=self._unreadable)
        steps, left = done.step + 1, timetable.left(done.step + 1, status.elapsed)
        left = None if left is None else left + self._end
        expected = timetable.expected(steps, status.elapsed)
        self._progress.update(done, status, self._setup.loader.wait_seconds, left, expected)
        if timetable.logs(steps):
            self._folder.log("train", steps, epoch=steps / timetable.per_epoch, **self._progress.numbers())

    @world.on_main
    def out_of_memory(self, step: int, parts: int) -> None:
        """Report and record that batches are cut into `parts` from `step` on, because memory ran out."""
        run = self._setup.run
        self._progress.say(
            f"warning: out of memory at step {step}: continuing with accumulate: {parts}, the same batch of "
            f"{run.batch_size} images in smaller pieces"
        )
        self._folder.log("out of memory", step, accumulate=parts)
        facts = self._folder.facts()
        facts.setdefault("out_of_memory", []).append({"step": step, "accumulate": parts})
        self._folder.write_json("run.json", facts)
        self._write_config(replace(run, accumulate=parts))

    @world.main_alone("drawing the first batch")
    @world.on_main
    def first_batch(self, batch: Prepared) -> None:
        """Write batch.png."""
        names, source = self._setup.splits.class_names, self._setup.splits.train
        captions = [", ".join(label_names(source.labels, index, names)) for index in batch.index.tolist()]
        self._folder.write_bytes("batch.png", batch_picture(batch.images, captions, self._setup.loader.pixels))

    def unreadable(self, image: str, reason: str) -> None:
        """Report and log a training image that this process cannot read; another image replaces it."""
        self._progress.say(f"unreadable image, skipped: {image} ({reason})")
        self._folder.log("unreadable", self._setup.state.status.step, image=image, reason=reason)

    @world.main_alone("writing the result")
    @world.on_main
    def end(self, result: Result) -> None:
        """Add the result to run.json."""
        values = {name: value for name, value in asdict(result).items() if name not in ("folder", "message", "lost")}
        self._folder.write_json("run.json", {**self._folder.facts(), "ended": _now(), "result": values})

    def _write_config(self, run: Run) -> None:
        self._folder.write_text("config.yaml", self._setup.given.comment + to_yaml(run))

    def _images(self, done: FinishedStep) -> list[str]:
        return [self._setup.splits.train.id(index) for index in done.index.tolist()]

    def _tuned_part(self) -> dict[str, Any]:
        """Return what is tuned and where the frozen part is; {} if everything is tuned."""
        tuned = self._setup.tuned
        if tuned.base is None:
            return {}
        what = {"what": tuned.tune, "parameters": tuned.parameters, "of": tuned.of}
        return {"tuned": what, "base": tuned.base.written_in(self._folder.path)}


def _rare_classes(run: Run, splits: Splits, steps: int) -> Iterator[str]:
    """Yield a warning if the training images are imbalanced and no setting of the run regards rare classes."""
    objective = run.objective
    if not isinstance(objective, Supervised) or run.data.sampler != "uniform":
        return
    if not isinstance(splits.train.labels, np.ndarray):  # labels are of any frequency, and thresholds regard that
        return
    counts = class_counts(splits.train.labels, len(splits.class_names))
    untouched = objective.class_weights == "none" and not objective.logit_adjustment
    if untouched and imbalance(counts) >= IMBALANCED:
        spread, helping = (
            imbalance_text(splits.class_names, counts),
            fairness_flags(len(splits.train), steps, objective.loss),
        )
        advice = "" if helping == FAIR and run.metric.name in EVERY_CLASS else f". For rare classes add {helping}"
        yield f"the training images are imbalanced: {spread}{advice}"


def _leaks(splits: Splits) -> Iterator[str]:
    """Yield a warning for each held-out split that contains training images, if that is known."""
    for name, source in (("validation", splits.validation), ("test", splits.test)):
        found = None if source is None else leaked(splits.train, source)
        if found:
            yield (
                f"{len(found)} {name} images are training images, too, the first is {found[0]}: do not trust results "
                "on them (vitrail data check lists them)"
            )


def _left_out(facts: dict[str, Any], wrong: list[str]) -> str:
    """Return what of run.json could not be read; "" for nothing."""
    if not facts:
        return "run.json cannot be read, so what it says about earlier parts of this run is lost"
    return f"run.json: entries of another type than a run writes are left out: {listing(wrong, NAMED)}" if wrong else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
