"""Compare learning without labels (masked patches, MAE, BEiT, DINO) with supervised and random weights on CIFAR-100.

    python -m benchmarks.self_supervised --calibrate     once, on a quiet machine (about 8 minutes)
    python -m benchmarks.self_supervised

Each method is pre-trained for the same number of minutes on this machine; for BEiT this includes its tokenizer. Its
frozen features are then evaluated by few-shot regression, nearest neighbours and a linear classifier, and the network
by fine-tuning. "labels" is supervised training for the minutes of pre-training. "labels, all the time" is supervised
training for the minutes of pre-training and fine-tuning together: pre-training is worth its time if it beats that.
"random" is an untrained network.

`--calibrate` measures the steps per minute of each method alone on the machine, before anything is trained. Minutes
become steps by these rates. So a run does not depend on the load of the machine, and can be repeated to the step.
Every run uses the command line. Settings are chosen on held-out training images, and the test images are read once, at
the end of each run. The log holds all finished runs: the same command continues an interrupted benchmark, and starts no
further run after `--stop-after`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from benchmarks import compare, record
from benchmarks.cells import Cells
from benchmarks.learn import vitrail_verb
from vitrail.costs.figure import COLOURS

DATA = Path(os.environ.get("VITRAIL_TEST_DATA", record.ROOT.parent / "shared" / "data")) / "cifar100"
LOG = record.RESULTS / "self_supervised.jsonl"
NEIGHBOURS = 20
SHOTS = ("1", "5", "10", "25")
HOLDOUT = "--data.holdout=0.02"
FINETUNE = "--recipe=finetune-small"
RESUME = "--resume=auto"
TOKENIZER = 0.1
"""Share of the pre-training minutes for BEiT's tokenizer."""
CALIBRATION = 60
"""Number of steps in which the steps per minute are measured."""
SHOWN = ("1-shot", "5-shot", "10-shot", "25-shot", f"{NEIGHBOURS}-NN", "linear", "fine-tuned")
LABELS, ALL_THE_TIME, RANDOM, TUNING = "labels", "labels, all the time", "random", "fine-tuning"


@dataclass(frozen=True)
class Way:
    """One method: the arguments of `vitrail train DIR`."""

    name: str
    words: tuple[str, ...] = ()
    tokenizer: str | None = None
    """Recipe of the tokenizer that has to be trained first."""
    tuned: bool = False
    """Whether the network is also fine-tuned."""


MASKED = "--recipe=masked-patch-small"
WAYS = (
    Way(RANDOM),
    Way(LABELS, ("--recipe=scratch-small",)),
    Way("masked patch: colour", (MASKED,), tuned=True),
    Way("MAE", ("--recipe=mae-small",), tuned=True),
    Way("DINO", ("--recipe=dino-small",), tuned=True),
    Way("BEiT", ("--recipe=beit-small",), tokenizer="tokenizer-small", tuned=True),
    Way(ALL_THE_TIME, ("--recipe=scratch-small",)),
    Way("masked patch: colour, 15 %", (MASKED, "--objective.corrupt=0.15")),
    Way("masked patch: 4x4 colours", (MASKED, "--objective.target=small")),
    Way("masked patch: pixels", (MASKED, "--objective.target=pixels")),
)


def network() -> list[str]:
    """Return the flags that give another recipe the network of the masked recipes."""
    from vitrail.recipes.registry import recipe

    run = recipe("masked-patch-small")
    chosen = {**vars(run.vit), "stem": "linear"}  # the supervised recipe has another stem
    given = [f"--vit.{name.replace('_', '-')}={value}" for name, value in chosen.items() if value is not None]
    return [f"--model={run.model}", *given]


def steps(kind: str, minutes: float, rates: dict[str, float]) -> str:
    """Return the flag for a training of `minutes`, at the rate that was calibrated as `kind`."""
    return f"--duration={max(1, round(minutes * rates[kind]))} steps"


def trained(way: Way, seed: int, minutes: float, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train for `minutes` and return the JSON that `vitrail train` prints."""
    words, rates = list(way.words), options.rates
    if way.tokenizer is not None:
        first = ["train", str(options.data), f"--recipe={way.tokenizer}", HOLDOUT, RESUME]
        first.append(steps(way.tokenizer, TOKENIZER * minutes, rates))
        made = vitrail_verb([*first, f"--seed={seed}", f"--out={folder / 'tokenizer'}", *options.fewer])
        words.append(f"--objective.tokenizer={made['folder']}")
        minutes *= 1 - TOKENIZER
    if way.name in (LABELS, ALL_THE_TIME):
        words += network()
    words += [HOLDOUT, f"--knn={NEIGHBOURS}", "--evaluate-every=10 %", steps(way.name, minutes, rates)]
    ran: dict[str, Any] = vitrail_verb(
        ["train", str(options.data), *words, RESUME, f"--seed={seed}", f"--out={folder / 'trained'}", *options.fewer]
    )
    return ran


def untrained(seed: int, folder: Path) -> dict[str, Any]:
    """Save a network with random initial weights."""
    import torch

    import vitrail
    from vitrail.recipes.registry import recipe

    run = recipe("masked-patch-small")
    values = {name: value for name, value in vars(run.vit).items() if value is not None}
    torch.manual_seed(seed)
    vitrail.save(vitrail.create(run.model, classes=100, image_size=32, **values), folder)
    return {"folder": str(folder), "steps": 0}


def probes(model: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Return the test top-1 in percent of all evaluations of the frozen features."""
    with tempfile.TemporaryDirectory() as scratch:
        file = str(Path(scratch) / "features.npz")
        vitrail_verb(["embed", model, str(options.data), f"--out={file}", "--image-size=32"])
        few = vitrail_verb(["probe", "fewshot", "--features", file, "--shots", *SHOTS])
        near = vitrail_verb(["probe", "knn", "--features", file, "--k", str(NEIGHBOURS)])
        line = vitrail_verb(["probe", "linear", "--features", file, f"--seed={seed}", *options.shorter])
    found = {f"{row['shots']}-shot": 100 * statistics.fmean(row["seeds"]) for row in few["results"]}
    return found | {f"{NEIGHBOURS}-NN": 100 * near["results"][0]["top1"], "linear": 100 * line["top1"]}


def learned(way: Way, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Pre-train, evaluate the frozen features and fine-tune. Return test top-1 in percent and the learning curves."""
    if way.name == RANDOM:
        ran = untrained(seed, folder / "random")
    else:
        longer = options.tune_minutes if way.name == ALL_THE_TIME else 0.0
        ran = trained(way, seed, options.minutes + longer, folder, options)
    found: dict[str, Any] = {"steps": ran["steps"], "curve": curve(Path(ran["folder"]))}
    if way.name == ALL_THE_TIME:
        return {**found, "fine-tuned": 100 * ran["test"]["top1"]}
    found |= probes(ran["folder"], seed, options)
    if way.tuned:
        words = ["finetune", str(options.data), f"--from={ran['folder']}", FINETUNE, HOLDOUT, RESUME, *options.fewer]
        words += ["--evaluate-every=5 %", steps(TUNING, options.tune_minutes, options.rates)]
        tuned = vitrail_verb([*words, f"--seed={seed}", f"--out={folder / 'tuned'}"])
        found |= {"fine-tuned": 100 * tuned["test"]["top1"], "tuning curve": curve(Path(tuned["folder"]))}
    return found


def calibrated(way: Way, options: argparse.Namespace) -> dict[str, float]:
    """Return the steps per minute of each run that a method needs, from a short run without evaluation."""
    few = [f"--duration={CALIBRATION} steps", "--evaluate-every=100 %", HOLDOUT, *options.fewer]
    found = {}
    with tempfile.TemporaryDirectory() as scratch, compare.foreign_load() as foreign:
        words = list(way.words)
        if way.tokenizer is not None:
            made = vitrail_verb(["train", str(options.data), f"--recipe={way.tokenizer}", *few, f"--out={scratch}"])
            found[way.tokenizer] = rate(Path(made["folder"]))
            words.append(f"--objective.tokenizer={made['folder']}")
        if way.name == LABELS:
            words += network()
        ran = vitrail_verb(["train", str(options.data), *words, *few, f"--out={scratch}"])
        found[way.name] = rate(Path(ran["folder"]))
        if way.name == LABELS:
            tuned = ["finetune", str(options.data), f"--from={ran['folder']}", FINETUNE, *few, f"--out={scratch}"]
            found[TUNING] = rate(Path(vitrail_verb(tuned)["folder"]))
    return {**found, "foreign load": round(foreign[0], 3)}


def lines(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    """Return the entries of these kinds in a run's log; none for an untrained network."""
    log = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [row for row in rows if row["kind"] in kinds]


def rate(folder: Path) -> float:
    """Return the steps per minute between the first and the last logged step."""
    rows = lines(folder, "train")
    return round(60 * (rows[-1]["step"] - rows[0]["step"]) / (rows[-1]["time"] - rows[0]["time"]), 2)


def curve(folder: Path) -> list[dict[str, float]]:
    """Return the validation measurements of each logged step."""
    kept, found = ("step", "loss", "nll", "knn", "top1", "colour", "code"), dict[int, dict[str, float]]()
    for row in lines(folder, "validation", "knn"):
        found.setdefault(row["step"], {}).update({name: row[name] for name in kept if name in row})
    return list(found.values())


def draw(rows: list[dict[str, Any]], options: argparse.Namespace, path: Path) -> None:
    """Draw the learning curves of fine-tuning and of supervised training all the time (first seeds)."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in rows if row["way"] == ALL_THE_TIME or "tuning curve" in row]
    end = options.minutes + options.tune_minutes
    for row, colour in zip(shown, COLOURS, strict=False):
        start, points = (0.0, row["curve"]) if row["way"] == ALL_THE_TIME else (options.minutes, row["tuning curve"])
        at = [start + (end - start) * point["step"] / points[-1]["step"] for point in points]
        axes.plot(at, [100 * point["top1"] for point in points], color=colour, label=row["way"])
    axes.axvline(options.minutes, color="grey", linewidth=0.8, linestyle=":")
    axes.annotate("labels from here on", (options.minutes, 0), (4, 6), textcoords="offset points", fontsize=8)
    axes.set_title("Labels all the time, or only after pre-training without them", fontsize="medium")
    axes.set_xlabel("minutes on this machine, pre-training included")
    axes.set_ylabel("top-1 on held-out images of CIFAR-100, %")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.2)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=144)


def table(found: dict[str, list[dict[str, Any]]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Print means and deviations over seeds, and return them as rows with the curves of the first seed."""
    title = f"CIFAR-100, test top-1 in %: {options.minutes:g} minutes, {options.tune_minutes:g} more to fine-tune"
    shown, rows = Table(title=title, title_justify="left"), []
    for column in ("", *SHOWN):
        shown.add_column(column, justify="right" if column else "left")
    for name, results in found.items():
        row: dict[str, Any] = {"way": name, "seeds": len(results), "steps": results[0]["steps"]}
        for what in SHOWN:
            if values := [result[what] for result in results if what in result]:
                deviation = round(statistics.stdev(values), 2) if len(values) > 1 else None
                row[what] = {"mean": round(statistics.fmean(values), 2), "deviation": deviation}
        row |= {name: results[0][name] for name in ("curve", "tuning curve") if name in results[0]}
        rows.append(row)
        shown.add_row(name, *(cell(row.get(what)) for what in SHOWN))
    Console(width=120).print(shown)
    return rows


def cell(value: dict[str, Any] | None) -> str:
    """Return a mean with its deviation as text; empty if nothing was measured."""
    if value is None:
        return ""
    return f"{value['mean']:.1f}" + ("" if value["deviation"] is None else f" ± {value['deviation']:.1f}")


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = record.arguments(__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="CIFAR-100 in the hub's layout")
    parser.add_argument("--minutes", type=float, default=12, help="minutes of pre-training")
    parser.add_argument("--tune-minutes", type=float, default=6, help="minutes of fine-tuning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--ways", nargs="+", choices=[way.name for way in WAYS], help="methods to run (default: all)")
    parser.add_argument("--log", type=Path, default=LOG, help="file of finished runs and calibrated rates")
    parser.add_argument("--calibrate", action="store_true", help="measure the rates that the log lacks, then stop")
    parser.add_argument("--stop-after", type=float, metavar="MINUTES", help="start no run after this time")
    options = parser.parse_args()
    options.fewer, options.shorter = [], []
    if options.quick:
        options.minutes, options.tune_minutes, options.seeds = 0.02, 0.02, [0]
        options.fewer, options.shorter = ["--data.subset=300"], ["--epochs=1"]
        options.log = Path(tempfile.mkdtemp()) / "log.jsonl"
    if options.threads:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    return options


def main() -> None:
    """Run the cells that the log lacks, print the table, draw the curves, write results/self_supervised.json."""
    options = arguments()
    ways = [way for way in WAYS if not options.ways or way.name in options.ways]
    measured = Cells(options.log)
    options.rates = {}
    for way in WAYS:
        if way.name in (RANDOM, ALL_THE_TIME) or not (way in ways or way.name == LABELS):
            continue
        if not (options.calibrate or options.quick) and measured.find(rate=way.name) is None:
            raise SystemExit(f"the log has no rate for {way.name!r}: first run with --calibrate on a quiet machine")
        options.rates |= measured.get(lambda way=way: calibrated(way, options), rate=way.name) or {}  # type: ignore[misc]
    if options.calibrate:
        return
    options.rates[ALL_THE_TIME] = options.rates[LABELS]
    cells, found = Cells(options.log, options.stop_after), dict[str, list[dict[str, Any]]]()
    for seed in options.seeds:
        for way in ways:
            key = dict(way=way.name, words=way.words, seed=seed, minutes=options.minutes, tune=options.tune_minutes)
            result = cells.train(lambda folder, way=way, seed=seed: learned(way, seed, folder, options), **key)  # type: ignore[misc]
            if result:
                found.setdefault(way.name, []).append(result)
    rows = table(found, options)
    if cells.missing:
        print(f"{cells.missing} runs are missing: the same command continues with them")
    if rows and not options.quick:
        draw(rows, options, record.RESULTS / "self_supervised.png")
        shown = dict(minutes=options.minutes, tune_minutes=options.tune_minutes, seeds=options.seeds)
        record.save("self_supervised", options, **shown, missing=cells.missing, rates=options.rates, rows=rows)


if __name__ == "__main__":
    main()
