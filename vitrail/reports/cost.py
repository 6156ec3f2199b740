"""The cost of a run: FLOPs calculated from the network, time from the clock, and energy if the machine measures it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.errors import VitrailError
from vitrail.model.variants import Config
from vitrail.objective.settings import BEiT, Tokenizer
from vitrail.objective.tokenizer import load_tokenizer
from vitrail.reports.run_record import RunRecord
from vitrail.training.batches import Sizes
from vitrail.training.flops import forward_macs
from vitrail.training.run import Run
from vitrail.training.timetable import Timetable


@dataclass(frozen=True)
class RunCost:
    """The cost of a run. None means unknown."""

    steps: int
    images: int | None
    """Training images that the network processed; an image counts once per epoch."""
    flops: float | None
    """FLOPs of training (`vitrail.training.flops`)."""
    seconds: float | None
    """Time of training, including evaluations."""
    joules: float | None
    part: bool = False
    """Whether only part of the network was trained. Then `flops` is an upper bound."""

    @property
    def rate(self) -> float | None:
        """FLOP/s of training, averaged over `seconds`."""
        return None if not self.seconds or self.flops is None else self.flops / self.seconds


def cost_of(record: RunRecord, config: Config | None) -> RunCost:
    """Return the cost of a run. `config` is that of its network; without it, FLOPs are unknown."""
    result, run = record.result, record.run
    lines = [line for line in record.metrics if line.get("kind") == "train"]
    steps = int(result.get("steps") or max((line.get("step", 0) for line in lines), default=0))
    images = flops = None
    if run is not None and run.batch_size:
        images = steps * run.batch_size
        tokenizer = _tokenizer(run)
        if config is not None and (tokenizer is not None or not isinstance(run.objective, BEiT)):
            flops = run.batch_size * _flops_per_image(record, run, config, steps, lines, tokenizer)
    joules = [line.get("joules") for line in lines]
    known = bool(joules) and None not in joules
    return RunCost(
        steps,
        images,
        flops,
        float(result["seconds"]) if result.get("seconds") else None,
        sum(joules) if known else None,  # type: ignore[arg-type]
        part=run is not None and run.tune != "all",
    )


def _flops_per_image(
    record: RunRecord,
    run: Run,
    config: Config,
    steps: int,
    lines: Sequence[dict[str, Any]],
    tokenizer: Tokenizer | None,
) -> float:
    """Return the FLOPs of one image of the batch, over all steps, each with the image size of that step."""
    if run.progressive.start >= 1 or not lines or not lines[-1].get("epoch"):
        return float(steps * forward_macs(run.objective, config, tokenizer=tokenizer).flops)
    per_epoch = max(round(lines[-1]["step"] / lines[-1]["epoch"]), 1)
    plan, sizes, at = Timetable(run, per_epoch), Sizes(run.progressive, config), _elapsed(record, lines, steps)
    found = Counter(sizes.size(plan.growth(step, float(at[step]))) for step in range(steps))
    flops = {size: forward_macs(run.objective, config, size, tokenizer=tokenizer).flops for size in found}
    return float(sum(count * flops[size] for size, count in found.items()))


def _tokenizer(run: Run) -> Tokenizer | None:
    """Return the settings of the tokenizer that a BEiT run used; None if there was none or it is gone."""
    if not isinstance(run.objective, BEiT):
        return None
    try:
        return load_tokenizer(run.objective.tokenizer).config
    except VitrailError:
        return None


def _elapsed(record: RunRecord, lines: Sequence[dict[str, Any]], steps: int) -> np.ndarray:
    """Return the approximate seconds of training before each step, float64 [steps].

    They are needed because images grow by the clock in a run with a time limit. The time between a kill and the
    resumption does not count.
    """
    done = np.array([line["step"] for line in lines])
    clock = np.array([line.get("time", 0.0) for line in lines], dtype=np.float64)
    spent = np.diff(clock, prepend=clock[0])
    resumed = np.isin(done[:-1], [entry.get("step") for entry in record.facts.get("resumed", [])])
    spent[1:][resumed] = np.median(spent)
    passed = spent.cumsum()
    whole = record.result.get("seconds")
    passed += whole - passed[-1] if whole else 0.0  # the time before the first line
    return np.interp(np.arange(steps), [0, *done], [0.0, *passed])
