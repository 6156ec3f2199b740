"""Train on CIFAR-100 from scratch for the same time with vitrail and with timm's training script, and compare accuracy.

    python -m benchmarks.learn                        three seeds of every side, 10 minutes each, test split
    python -m benchmarks.learn --split dev --side vitrail --seeds 0 --minutes 3      to choose settings

Each run is a separate process that has the machine to itself. The sides alternate seed by seed, and each learning rate
schedule ends when the time is over. Settings are chosen on 5,000 images held out of the training set (`--split dev`).
The test set is read once, after training. The time for reading and decoding images, and for compiling, counts for
vitrail but not for timm (benchmarks/timm_script.py lists what else favours timm).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks import compare, record

DATA = record.DATA / "cifar100"
DEV_IMAGES = 5_000
HOLDOUT = 0.02
"""Share of the training images that vitrail holds out to choose the best weights: the paper's for CIFAR (B.1.1)."""
SIDES = ("vitrail", "timm-light", "timm-deit")
SUMMARY = ("accuracy", "images_per_second", "parameters")


def split_folders(data: Path, split: str, folder: Path, limit: int | None = None) -> tuple[Path, Path]:
    """Write the training images and the test images as two separate data sets in the hub's layout."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def read(name: str) -> Any:
        files = sorted((data / "data").glob(f"{name}-*.parquet"))
        return pa.concat_tables([pq.read_table(path) for path in files])

    train = read("train")
    if split == "dev":
        order = np.random.default_rng(0).permutation(len(train))
        train, test = train.take(np.sort(order[DEV_IMAGES:])), train.take(np.sort(order[:DEV_IMAGES]))
    else:
        test = read("test")
    places = folder / "train", folder / "test"
    for place, table in zip(places, (train, test), strict=True):
        (place / "data").mkdir(parents=True)
        pq.write_table(table.slice(0, limit), place / "data" / f"{place.name}-00000-of-00001.parquet")
    return places


def arrays(place: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return uint8 images [N, H, W, 3] and int64 labels [N] of a data set, for timm."""
    import pyarrow.parquet as pq

    (file,) = (place / "data").glob("*.parquet")
    table = pq.read_table(file)
    images = [np.asarray(Image.open(io.BytesIO(e["bytes"])).convert("RGB")) for e in table["img"].to_pylist()]
    return np.stack(images), table["fine_label"].to_numpy()


def run_vitrail(train: Path, test: Path, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Train with vitrail's command line, as a user would, and evaluate the resulting model once."""
    started = time.perf_counter()
    command = ["train", str(train), "--recipe=scratch-small", f"--time-limit={options.minutes}"]
    command += [f"--seed={options.seed}", f"--out={out}", f"--data.holdout={HOLDOUT}", *options.overrides]
    trained = vitrail_verb(command)
    wall = time.perf_counter() - started
    evaluated = vitrail_verb(["evaluate", trained["folder"], str(test)])
    folder = Path(trained["folder"])
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    return {
        "accuracy": 100 * evaluated["top1"],
        "validation": trained["best"],
        "parameters": _parameters(folder),
        "steps": trained["steps"],
        "images_per_second": round(trained["steps"] * settings["batch_size"] / trained["seconds"], 1),
        "training_minutes": round(trained["seconds"] / 60, 2),
        "wall_minutes": round(wall / 60, 2),
        "settings": settings,
    }


def _parameters(folder: Path) -> int:
    from vitrail.weights.store import load_model

    return sum(parameter.numel() for parameter in load_model(folder).parameters())


def vitrail_verb(words: list[str]) -> Any:
    """Run `vitrail WORDS --json` in a new process and return the values that it prints."""
    return json_of([sys.executable, "-m", "vitrail", *words, "--json"])


def json_of(command: list[str]) -> Any:
    """Run a command and return the JSON that it prints."""
    done = subprocess.run(command, cwd=record.ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def run_side(options: argparse.Namespace) -> dict[str, Any]:
    """Run one side with one seed in this process and its children, and record the load of all other processes."""
    with tempfile.TemporaryDirectory() as scratch:
        limit = 256 if options.quick else None
        train, test = split_folders(options.data, options.split, Path(scratch), limit)
        if options.threads:  # for this process and its children
            os.environ["OMP_NUM_THREADS"] = str(options.threads)
            torch.set_num_threads(options.threads)
        with compare.foreign_load() as foreign:
            if options.side == "vitrail":
                out = options.keep or Path(scratch) / "runs"
                result = run_vitrail(train, test, options, out)
            else:
                from benchmarks import timm_script

                given = dict(item.split("=", 1) for item in options.overrides)
                recipe = options.side.removeprefix("timm-")
                both = {"train": arrays(train), "test": arrays(test)}
                result = timm_script.run(both, recipe, options.seed, options.minutes, given, quick=options.quick)
    return {"side": options.side, "seed": options.seed, **result, "foreign_load": round(foreign[0], 3)}


def race(options: argparse.Namespace, sides: list[str]) -> list[dict[str, Any]]:
    """Run all sides and seeds one after another; the sides alternate.

    Runs that `options.log` already holds are not repeated.
    """
    passed = [f"--minutes={options.minutes}", f"--split={options.split}", f"--data={options.data}"]
    passed += ["--quick"] if options.quick else []
    passed += [f"--threads={options.threads}"] if options.threads else []
    passed += [f"--keep={options.keep}"] if options.keep else []
    log = options.log
    results = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    done = {(row["side"], row["seed"]) for row in results}
    for seed in options.seeds:
        for side in sides:
            if (side, seed) in done:
                continue
            command = [sys.executable, "-m", "benchmarks.learn", "--one", f"--side={side}", f"--seed={seed}"]
            results.append(json_of([*command, *passed, *options.overrides]))
            print({k: v for k, v in results[-1].items() if not isinstance(v, dict)}, file=sys.stderr, flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
    return results


def summarise(results: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each side the mean and standard deviation of the accuracy over seeds, and medians of the rest."""
    table: dict[str, dict[str, Any]] = {}
    for side in dict.fromkeys(row["side"] for row in results):
        scores = [row["accuracy"] for row in results if row["side"] == side]
        table[side] = {
            **record.over_seeds(scores),
            "seeds": len(scores),
        }
        for key in SUMMARY[1:]:
            values = [row[key] for row in results if row["side"] == side and row.get(key)]
            table[side][key] = statistics.median(values) if values else None
    return table


def main() -> None:
    """Run all sides, print the table and write results/learn.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--side", choices=SIDES, help="only this side")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--split", choices=("dev", "test"), default="test")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", type=Path, default=DATA, help="CIFAR-100 in the hub's layout")
    parser.add_argument("--log", type=Path, help="file of finished runs, from which an interrupted race continues")
    parser.add_argument("--keep", type=Path, help="folder to store vitrail's runs in, for benchmarks.transfer")
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options, overrides = parser.parse_known_args()
    options.overrides = overrides
    if options.overrides and not options.side:
        parser.error(f"these settings are for a single side ({' '.join(options.overrides)}): name it with --side")
    if options.one:
        print(json.dumps(run_side(options)))
        return
    if options.quick:
        options.minutes, options.seeds = 0.05, [0]
    results = race(options, [options.side] if options.side else list(SIDES))
    summary = summarise(results)
    table = Table(title=f"CIFAR-100, {options.minutes:g} minutes, {options.split} split", title_justify="left")
    for column in ("", "top-1", "+-", "seeds", *SUMMARY[1:]):
        table.add_column(column)
    for side, row in summary.items():
        table.add_row(side, *(str(value) for value in row.values()))
    Console(width=110).print(table)
    if options.split == "test" and not options.side:
        record.save("learn", options, minutes=options.minutes, summary=summary, runs=results)


if __name__ == "__main__":
    main()
