"""Measure the reports of runs with 100 classes and 10,000 validation images, and the comparison of two such runs.

It measures the size of a page, the time and memory to write it, and the time a browser takes to open it. The runs are
synthetic: real photographs under other names. Opening is the time from requesting the page in a running headless
Chromium until it is loaded and the first screen is painted. The benchmark fails if a page requests anything from
outside or logs an error.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from benchmarks import record
from vitrail.config import to_yaml
from vitrail.data.roles import Splits
from vitrail.data.settings import Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.evaluation.classify import Classification
from vitrail.model.build import build
from vitrail.model.variants import variant
from vitrail.reports.compare import write_comparison
from vitrail.reports.page import write_report
from vitrail.tasks.catalog import save_results
from vitrail.training.run import Optim, Run
from vitrail.weights.card import Card
from vitrail.weights.store import save_model

PHOTOS = record.DATA / "flowers12"
CLASSES, IMAGES, SIDE, STEPS = 100, 10_000, 224, 2_000
LIMIT_MB, LIMIT_SECONDS = 5.0, 1.0
EMPTY = "<!doctype html><title>empty</title><p>empty"


def photographs(folder: Path) -> Data:
    """Write a data set of this many classes and images: photographs of 224 px, each repeated."""
    files = [file.read_bytes() for file in sorted(PHOTOS.rglob("*.jpg"))]
    for split, count in (("train", 2 * CLASSES), ("val", IMAGES)):
        for number in range(count):
            place = folder / split / f"a longer name of class {number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"photograph {number:05}.jpg").write_bytes(files[number % len(files)])
    return Data(str(folder))


def answers(splits: Splits, seed: int) -> Classification:
    """Return made-up predictions, of which about four fifths are right."""
    assert splits.validation is not None
    rng, label = np.random.default_rng(seed), np.asarray(splits.validation.labels)
    logits = rng.normal(size=(len(label), CLASSES))
    logits[np.arange(len(label)), label] += 3.5
    share = np.exp(logits)
    share /= share.sum(1, keepdims=True)
    top = np.argsort(-share, 1)[:, :5]
    own = share[np.arange(len(label)), label]
    brier = np.square(share).sum(1) - own**2 + (1 - own) ** 2
    kept = np.take_along_axis(share, top, 1).astype(np.float32)
    return Classification(splits.class_names, np.arange(len(label)), label, top, kept, -np.log(own), brier)


def run_folder(folder: Path, data: Data, splits: Splits, seed: int) -> Path:
    """Write what a run of 2,000 steps leaves behind, with a Ti/16 of random weights."""
    folder.mkdir()
    run = Run(data=data, model="Ti/16", image_size=SIDE, batch_size=128, optim=Optim(lr=1e-3 * (1 + seed)))
    (folder / "config.yaml").write_text(to_yaml(run))
    facts = {
        "command": "vitrail train photos",
        "data": {"path": data.path, "fingerprint": splits.fingerprint, "images": {"train": len(splits.train)}},
        "result": {"steps": STEPS, "epochs": 30.0, "seconds": 3600.0, "ended": "all steps done", "test": None},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "classes.json").write_text(json.dumps(splits.class_names))
    rng = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "loss": 5 / step**0.3 + 0.2 * rng.random(), "lr": 1e-3 * (1 - step / STEPS)}
        for step in range(1, STEPS + 1)
    ]
    lines += [
        {"kind": "validation", "step": step, "top1": step / (2 * STEPS), "nll": 5 / step**0.3, "count": IMAGES}
        for step in range(100, STEPS + 1, 100)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    save_results(folder / "evaluation.npz", answers(splits, seed))
    batch = rng.integers(0, 256, (4 * 116, 8 * 116, 3), dtype=np.uint8)
    Image.fromarray(batch // 2 + 64).save(folder / "batch.png")
    torch.manual_seed(seed)
    config = variant("Ti/16", classes=CLASSES, image_size=SIDE)
    card = Card(config, splits.class_names, Preprocess(image_size=(SIDE, SIDE), resize="squash"))
    save_model(folder / "model" / "best", build(config), card)
    return folder


def written(write: str, folders: list[Path], out: Path) -> dict[str, float]:
    """Write a page in this process, which has done nothing else. Return the seconds and the peak memory."""
    start = time.perf_counter()
    if write == "report":
        write_report(folders[0], out)
    else:
        write_comparison(folders, out)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux; what was imported is in it
    return {"seconds_to_write": round(seconds, 2), "peak_gib": round(peak / 2**20, 2)}


def opened(browser: Any, page: Path) -> tuple[float, float]:
    """Return the seconds until a page is loaded and until its first screen is painted. Raises RuntimeError."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab, faults = context.new_page(), []
    tab.on("console", lambda message: faults.append(message.text))
    tab.on("pageerror", lambda error: faults.append(str(error)))
    own = page.resolve().as_uri()
    tab.on("request", lambda request: None if request.url.startswith(("data:", own)) else faults.append(request.url))
    start = time.perf_counter()
    tab.goto(own, wait_until="load")
    loaded = time.perf_counter() - start
    tab.screenshot()
    painted = time.perf_counter() - start
    context.close()
    if faults:
        raise RuntimeError(f"{page.name} asks for or complains about: {faults[:5]}")
    return loaded, painted


def measure(pages: dict[str, Path], executable: str, rounds: int) -> dict[str, dict[str, float]]:
    """Return the megabytes of each page and the seconds to open it, in alternating rounds."""
    from playwright.sync_api import sync_playwright

    times: dict[str, list[tuple[float, float]]] = {name: [] for name in pages}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for _ in range(rounds + 1):
            for name, page in pages.items():
                times[name].append(opened(browser, page))
        browser.close()
    found = {}
    for name, page in pages.items():
        loaded, painted = zip(*times[name][1:], strict=True)  # the first round starts what the browser keeps
        found[name] = {
            "megabytes": round(page.stat().st_size / 1e6, 3),
            "loaded": round(statistics.median(loaded), 3),
            "seconds": round(statistics.median(painted), 3),
            "low": round(min(painted), 3),
            "high": round(max(painted), 3),
        }
    return found


def main() -> None:
    """Measure and write results/report.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--browser", default=shutil.which("chromium"), help="the Chromium that opens the pages")
    options: argparse.Namespace = parser.parse_args()
    if options.browser is None:
        parser.error("there is no chromium here: install one, or name another browser of its kind with --browser")
    record.prepare(options)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # pages are written as the command `vitrail` would
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = photographs(root / "photos")
        splits = open_data(data)
        folders = [run_folder(root / f"run-{seed + 1}", data, splits, seed) for seed in (0, 1)]
        pages = {kind: root / f"{kind}.html" for kind in ("empty", "report", "comparison")}
        pages["empty"].write_text(EMPTY)
        results: dict[str, dict[str, float]] = {"empty": {}}
        for kind in ("report", "comparison"):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                results[kind] = pool.submit(written, kind, folders, pages[kind]).result()
        for kind, row in measure(pages, options.browser, options.rounds).items():
            results[kind] |= row
    table = Table(title=f"{CLASSES} classes, {IMAGES:,} validation images", title_justify="left")
    for column in ("", "MB", "seconds to open", "spread", "seconds to write", "GiB"):
        table.add_column(column, justify="right" if column else "left")
    for kind, row in results.items():
        wrote = (f"{row['seconds_to_write']:.1f}", f"{row['peak_gib']:.2f}") if kind != "empty" else ("", "")
        spread = f"{row['low']:.2f} - {row['high']:.2f}"
        table.add_row(kind, f"{row['megabytes']:.2f}", f"{row['seconds']:.2f}", spread, *wrote)
    Console(width=110).print(table)
    held = all(row["megabytes"] < LIMIT_MB and row["seconds"] < LIMIT_SECONDS for row in results.values())
    print(f"under {LIMIT_MB:g} MB and {LIMIT_SECONDS:g} s: {held}")
    record.save("report", options, results=results, limits={"megabytes": LIMIT_MB, "seconds": LIMIT_SECONDS}, held=held)


if __name__ == "__main__":
    main()
