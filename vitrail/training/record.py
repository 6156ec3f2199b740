"""What a run writes and reports: at its start, for each step, at a resume and at its end; and its origin."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitrail import world
from vitrail.config import from_yaml, to_yaml
from vitrail.data.check import EVERY_CLASS, FAIR, IMBALANCED, fairness_flags, imbalance, imbalance_text, leaked
from vitrail.data.images.native import pictures
from vitrail.data.labels.sets import class_counts, label_names
from vitrail.data.roles import Splits
from vitrail.device import accelerators, available_cores, processor, total_memory
from vitrail.objective.base import Prepared
from vitrail.objective.settings import Supervised
from vitrail.run_log import fitting
from vitrail.training.assemble import Setup
from vitrail.training.batches import batch_picture
from vitrail.training.folder import RunFolder
from vitrail.training.guard import NAMED, FiniteGuard, LossSpikes, Signals
from vitrail.training.progress import Progress
from vitrail.training.result import Result
from vitrail.training.run import Run
from vitrail.training.step import FinishedStep
from vitrail.training.time_limit import Clock
from vitrail.words import listing

PACKAGES = ("vitrail", "torch", "torchvision", "numpy", "pillow", "simplejpeg", "safetensors")
"""Packages whose versions run.json names."""


@dataclass
class RunRecorder:
    """Writes the events of a run into its folder and reports them: called with each finished step, in order."""

    folder: RunFolder
    setup: Setup
    progress: Progress
    guard: FiniteGuard
    signals: Signals
    clock: Clock
    _spikes: LossSpikes = field(default_factory=LossSpikes)
    _unreadable: int = 0
    """Number of unreadable images that was last reported, summed over the processes."""

    @world.main_alone("looking at data and machine")
    @world.on_main
    def start(self) -> None:
        """Write config.yaml, run.json, classes.json and split.json, and report the notes about the data."""
        run, splits, decisions = self.setup.run, self.setup.splits, self.setup.why
        warned, timetable, cut = set(splits.report.warnings), self.setup.timetable, self.setup.decision.cut
        steps = 0 if timetable.open else timetable.total  # with a time limit alone nobody knows how many there will be
        warnings = [*_leaks(splits), *filter(None, (_rare_classes(run, splits, steps), cut))]
        notes = [f"warning: {line}" if line in warned else line for line in splits.report.lines()]
        notes += [f"warning: {line}" for line in warnings]
        sources = {"train": splits.train, "validation": splits.validation, "test": splits.test}
        data = {
            "path": run.data.path,
            "fingerprint": splits.fingerprint,
            "classes": len(splits.class_names),
            "images": {name: len(source) for name, source in sources.items() if source is not None},
            "notes": notes,
        }
        facts = {"name": self.folder.path.name, "started": _now(), **provenance(), "seed": run.seed, "data": data}
        given = {"given": self.setup.objects.names} if self.setup.objects.names else {}
        self._write_config(run)
        self.folder.write_json("classes.json", splits.class_names)
        self.folder.write_json("split.json", splits.held_out)
        self.folder.write_json("run.json", {**facts, "decisions": decisions, **given, **self._tuned_part()})
        self.progress.announce(self.folder.path, decisions, notes)

    def resume(self) -> None:
        """Take in that the run goes on from a checkpoint: its files and its best model are those of that step."""
        self._note_resume()
        if told := self.setup.validation.forget_lost(self.setup.state.status, self.folder):
            self.progress.say(told)

    @world.main_alone("looking at data and machine")
    @world.on_main
    def _note_resume(self) -> None:
        """Note the resume in run.json, drop what was logged after its step, and write the new config.yaml."""
        run, step, tuned = self.setup.run, self.setup.state.status.step, self._tuned_part()
        before = from_yaml(self.folder.path / "config.yaml", run).accumulate
        facts, wrong = fitting(self.folder.read_json("run.json"))
        notes = [f"warning: {note}" for note in (self.folder.rewind(step), _left_out(facts, wrong)) if note]
        facts.pop("ended", None)
        facts.pop("result", None)
        facts.setdefault("resumed", []).append({"at": _now(), "step": step, **provenance()})
        if tuned.get("base") != facts.get("base"):  # it has moved
            self.setup.validation.follow_base(self.folder)
        facts |= tuned
        self.folder.write_json("run.json", facts)
        self._write_config(run)
        why = f", before it {before}" if before != run.accumulate else ""
        if not why and facts.get("out_of_memory"):
            why = f", since memory ran out at step {facts['out_of_memory'][-1].get('step', 'unknown')}"
        note = f"batch: {run.batch_size} images, as before; accumulate: {run.accumulate}{why}"
        self.progress.announce(self.folder.path, self.setup.why, [*notes, note])

    @world.main_alone("drawing the first batch")
    @world.on_main
    def first_batch(self, batch: Prepared) -> None:
        """Write batch.png."""
        names, labels = self.setup.splits.class_names, self.setup.splits.train.labels
        captions = [", ".join(label_names(labels, index, names)) for index in batch.index.tolist()]
        images, preprocess = batch.images, self.setup.decision.preprocess
        if preprocess.resize == "native":
            shown = pictures(images.cpu().numpy().transpose(0, 2, 3, 1))
            images = torch.from_numpy(shown).permute(0, 3, 1, 2)
        self.folder.write_bytes("batch.png", batch_picture(images, captions, self.setup.loader.pixels))

    def own_numbers(self) -> dict[str, float]:
        """Return what this process adds to the sums of a step: the main process's time, signals, unreadable images."""
        own = {"unreadable": float(len(self.setup.loader.bad)), **self.signals.flags()}
        if self.setup.timetable.limit is not None:
            own["limit"] = self.clock.for_training() if world.is_main() else 0.0
        return {"elapsed": world.is_main() * self.clock.elapsed, **own}

    def __call__(self, done: FinishedStep) -> None:
        """Take in one step. Raises Diverged after too many consecutive steps that were not finite."""
        status, timetable, own = self.setup.state.status, self.setup.timetable, done.sums.own()
        self.signals.agree(own)
        status.elapsed, timetable.limit = own["elapsed"], own.get("limit")
        loss, norm, times = done.sums.loss, done.sums.norm, self._spikes.times(done.sums.loss)
        images = [] if done.finite and not times else [self.setup.splits.train.id(i) for i in done.index.tolist()]
        if not done.finite:
            self.folder.log("skipped", done.step, loss=loss, norm=norm, images=images)
            status.skipped += 1
            self.progress.say(self.guard.skip(done.step, loss, norm, images))
        if times:
            self.folder.log("spike", done.step, loss=loss, times=times, images=images)
            self.progress.say(
                f"warning: step {done.step} has loss {loss:g}, {times:.0f} times the median before it; its images: "
                f"{listing(images, NAMED, quoted=False)}"
            )
        if world.size() > 1 and own["unreadable"] > self._unreadable:
            self._unreadable = int(own["unreadable"])
            self.progress.say(
                f"unreadable images so far: {self._unreadable}, summed over the {world.size()} processes (an image "
                "counts once for each process that has read it)"
            )
            self.folder.log("unreadable", done.step, count=self._unreadable)
        steps, left = done.step + 1, timetable.left(done.step + 1, status.elapsed)
        left = None if left is None else left + self.clock.end
        expected = timetable.expected(steps, status.elapsed)
        self.progress.update(done, status, self.setup.feed.wait_seconds, left, expected)
        if timetable.logs(steps, status.elapsed):
            self.folder.log("train", steps, epoch=steps / timetable.per_epoch, **self.progress.numbers())

    def unreadable(self, image: str, reason: str) -> None:
        """Report and log a training image that this process cannot read; another image replaces it."""
        self.progress.say(f"unreadable image, skipped: {image} ({reason})")
        self.folder.log("unreadable", self.setup.state.status.step, image=image, reason=reason)

    @world.on_main
    def out_of_memory(self, step: int, parts: int) -> None:
        """Report and record that batches are cut into `parts` from `step` on, because memory ran out."""
        run = self.setup.run
        self.progress.say(
            f"warning: out of memory at step {step}: continuing with accumulate: {parts}, the same batch of "
            f"{run.batch_size} images in smaller pieces"
        )
        self.folder.log("out of memory", step, accumulate=parts)
        facts = self.folder.facts()
        facts.setdefault("out_of_memory", []).append({"step": step, "accumulate": parts})
        self.folder.write_json("run.json", facts)
        self._write_config(replace(run, accumulate=parts))

    @world.main_alone("writing the result")
    @world.on_main
    def end(self, result: Result) -> None:
        """Add the result to run.json."""
        values = {name: value for name, value in asdict(result).items() if name not in ("folder", "message", "lost")}
        self.folder.write_json("run.json", {**self.folder.facts(), "ended": _now(), "result": values})

    def _write_config(self, run: Run) -> None:
        self.folder.write_text("config.yaml", self.setup.objects.comment + to_yaml(run))

    def _tuned_part(self) -> dict[str, Any]:
        """Return what is tuned and where the frozen part is; {} if everything is tuned."""
        tuned = self.setup.tuned
        if tuned.base is None:
            return {}
        what = {"what": tuned.tune, "parameters": tuned.parameters, "of": tuned.of}
        return {"tuned": what, "base": tuned.base.written_in(self.folder.path)}


def _rare_classes(run: Run, splits: Splits, steps: int) -> str:
    """Return a warning if the training images are imbalanced and no setting of the run regards rare classes."""
    objective, labels = run.objective, splits.train.labels
    if not isinstance(labels, np.ndarray) or not isinstance(objective, Supervised):
        return ""  # several labels of an image are of any frequency, and thresholds regard that
    if run.data.sampler != "uniform" or objective.class_weights != "none" or objective.logit_adjustment:
        return ""
    counts = class_counts(labels, len(splits.class_names))
    if imbalance(counts) < IMBALANCED:
        return ""
    helping = fairness_flags(len(splits.train), steps, objective.loss)
    advice = "" if helping == FAIR and run.metric.name in EVERY_CLASS else f". For rare classes add {helping}"
    return f"the training images are imbalanced: {imbalance_text(splits.class_names, counts)}{advice}"


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


def provenance() -> dict[str, Any]:
    """Return command, working directory, versions, commit of this source tree and machine, as JSON values."""
    return {
        "command": command(),
        "directory": os.getcwd(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": commit(),
        "machine": machine(),
    }


def command() -> str:
    """Return the command line of this process, quoted for a shell."""
    as_module = sys.argv[0] == str(Path(__file__).resolve().parents[1] / "__main__.py")
    start = [sys.executable, "-m", "vitrail"] if as_module else sys.argv[:1]
    return shlex.join([*start, *sys.argv[1:]])


def commit() -> str | None:
    """Return the git commit of this source tree, with "-dirty" if files differ; None if it is not a clone."""
    root = Path(__file__).resolve().parents[2]
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() if (root / ".git").exists() else None


def machine() -> dict[str, Any]:
    """Return host, system, processors, memory in GiB and accelerators."""
    facts: dict[str, Any] = {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": processor(),
        "cores": available_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(total_memory() / 2**30, 1),
    }
    if found := accelerators():
        facts["accelerators"] = list(found.values())
    return facts


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree that was not installed
        return None
