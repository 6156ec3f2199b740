"""What a run cost: exaFLOPs from the network's arithmetic, time from the clock, energy where the machine told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitrail.costs.estimate import amount
from vitrail.errors import VitrailError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.beit.tokenizer import load_tokenizer
from vitrail.objective.settings import BEiT, Tokenizer
from vitrail.reports.contents import Contents
from vitrail.reports.text import facts, table
from vitrail.training.arithmetic import passes
from vitrail.training.optim.progressive import Sizes
from vitrail.training.plan import Plan
from vitrail.training.run import Run
from vitrail.words import time_span

Config = ViTConfig | ResNetConfig
UNKNOWN = "unknown"
EXA = 1e18


@dataclass(frozen=True)
class Cost:
    """What is known of a run's cost; None is unknown."""

    steps: int
    images: int | None
    """Training images that went through the network, each as often as it did."""
    flops: float | None
    """Of training (`vitrail.training.arithmetic`)."""
    seconds: float | None
    """Evaluations on the way included."""
    joules: float | None
    part: bool = False
    """Did only part of the network learn? `flops` is then an upper bound."""

    @property
    def rate(self) -> float | None:
        """FLOP/s of training, over all of the time."""
        return None if not self.seconds or self.flops is None else self.flops / self.seconds


def cost_of(contents: Contents, config: Config | None) -> Cost:
    """Work out the cost of a run from its folder and its network's config."""
    result, run = contents.facts.get("result") or {}, contents.run
    lines = [line for line in contents.metrics if line.get("kind") == "train"]
    steps = int(result.get("steps") or max((line.get("step", 0) for line in lines), default=0))
    images = flops = None
    if run is not None and run.batch_size:
        images = steps * run.batch_size
        tokenizer = _tokenizer(run)
        if config is not None and (tokenizer is not None or not isinstance(run.objective, BEiT)):
            flops = run.batch_size * _flops_per_place(contents, run, config, steps, lines, tokenizer)
    joules = [line.get("joules") for line in lines]
    known = bool(joules) and None not in joules
    return Cost(
        steps,
        images,
        flops,
        float(result["seconds"]) if result.get("seconds") else None,
        sum(joules) if known else None,  # type: ignore[arg-type]
        part=run is not None and run.tune != "all",
    )


def _flops_per_place(
    contents: Contents,
    run: Run,
    config: Config,
    steps: int,
    lines: Sequence[dict[str, Any]],
    tokenizer: Tokenizer | None,
) -> float:
    """FLOPs of one place of the batch over all steps, each at the size that images had then."""
    if run.progressive.start >= 1 or not lines or not lines[-1].get("epoch"):
        return float(steps * passes(run.objective, config, tokenizer=tokenizer).flops)
    per_epoch = max(round(lines[-1]["step"] / lines[-1]["epoch"]), 1)
    plan, sizes, at = Plan.of(run, per_epoch), Sizes(run.progressive, config), _elapsed(contents, lines, steps)
    found = Counter(sizes.size(plan.growth(step, float(at[step]))) for step in range(steps))
    flops = {size: passes(run.objective, config, size, tokenizer=tokenizer).flops for size in found}
    return float(sum(count * flops[size] for size, count in found.items()))


def _tokenizer(run: Run) -> Tokenizer | None:
    """The settings of the tokenizer that a run of BEiT learned from, if it is still there."""
    if not isinstance(run.objective, BEiT):
        return None
    try:
        return load_tokenizer(run.objective.tokenizer).config
    except VitrailError:
        return None


def _elapsed(contents: Contents, lines: Sequence[dict[str, Any]], steps: int) -> np.ndarray:
    """Seconds of training before each step, about: with a time limit, images grow by the clock.

    float64 [steps], from the times of the lines; the time between a kill and going on does not count.
    """
    done = np.array([line["step"] for line in lines])
    clock = np.array([line.get("time", 0.0) for line in lines], dtype=np.float64)
    spent = np.diff(clock, prepend=clock[0])
    resumed = np.isin(done[:-1], [entry.get("step") for entry in contents.facts.get("resumed", [])])
    spent[1:][resumed] = np.median(spent)
    passed = spent.cumsum()
    whole = (contents.facts.get("result") or {}).get("seconds")
    passed += whole - passed[-1] if whole else 0.0  # what came before the first line
    return np.interp(np.arange(steps), [0, *done], [0.0, *passed])


def cost(contents: Contents, config: Config | None) -> str:
    """The section of one run; "" for one that did nothing."""
    found = cost_of(contents, config)
    if not found.steps:
        return ""
    flops = _flops(found)
    if found.flops is not None and found.flops < EXA / 10:
        flops += f" ({found.flops / EXA:.3g} exaFLOPs)"
    rows = [("arithmetic of training", flops)]
    if found.images is not None:
        rows.append(("training images seen", f"{found.images:,} in {found.steps:,} steps"))
    rows.append(("time, with evaluations on the way", UNKNOWN if found.seconds is None else time_span(found.seconds)))
    if found.rate is not None:
        rows.append(("arithmetic over time", _per_second(found)))
    rows.append(("energy", _energy(found)))
    text = (
        "Counted are the products of linear layers, convolutions and attention, two FLOPs for a multiply-add and three "
        "forward passes for a training step, as in Table 6 of the paper, one for a network that only gives targets; "
        "evaluations are not counted."
    )
    if found.part:
        text += " Only part of the network learned, so the gradients cost less than that."
    text += (
        " Energy is that of processors (RAPL) and GPUs (NVML) of the main process's machine, whatever else ran on it."
        if found.joules is not None
        else " Energy is unknown because the machine did not tell this user (RAPL for processors, NVML for GPUs)."
    )
    return f'<h2>What it cost</h2>{facts(rows)}<p class="why">{text}</p>'


def costs(names: Sequence[str], found: Sequence[Cost]) -> str:
    """The costs of several runs beside each other; `names` are HTML."""
    head = ("run", "arithmetic", "images seen", "steps", "time", "over time", "energy")
    rows = [
        (
            name,
            _flops(one),
            UNKNOWN if one.images is None else f"{one.images:,}",
            f"{one.steps:,}",
            UNKNOWN if one.seconds is None else time_span(one.seconds),
            UNKNOWN if one.rate is None else _per_second(one),
            _energy(one),
        )
        for name, one in zip(names, found, strict=True)
    ]
    caption = "Arithmetic of training as in Table 6 of the paper; time with evaluations on the way."
    return f"<h2>What they cost</h2>{table(caption, head, rows, numeric=(1, 2, 3, 4, 5, 6))}"


def _flops(found: Cost) -> str:
    return UNKNOWN if found.flops is None else _bound(found) + amount(found.flops)


def _per_second(found: Cost) -> str:
    assert found.rate is not None
    return f"{_bound(found)}{amount(found.rate).removesuffix('s')}/s"


def _bound(found: Cost) -> str:
    return "at most " if found.part else ""


def _energy(found: Cost) -> str:
    if found.joules is None:
        return UNKNOWN
    return f"{found.joules / 3600:.3g} Wh" if found.joules < 3.6e6 else f"{found.joules / 3.6e6:.3g} kWh"
