"""From JPEG files to augmented 224-pixel uint8 batches on one core: ours against timm's loader.

All processes and threads of both sides share one core. Augmentation is the same on both sides: a crop of 8 to 100 % of
the area, bilinear resizing, a mirror image with probability 0.5. The files are in the page cache. "timm" is its loader
with its defaults, which also normalises; "timm, uint8 batches" stops before that. "crops left" and "JPEGs left to the
device" are what remains for the processor with --augment-on device and --decode-on device.

`--workers 4` compares threads with processes instead, 1 to 4 of them on all cores, alone and beside a thread that
launches small operations as a step on a GPU does: images/s of both, their ratio round by round, how much slower the
launches get, and the memory of a process. It writes results/input_workers.json,
with the load of the machine: where it exceeds the number of cores, only ratios mean something.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import compare, peers, record, train_step
from benchmarks.compare import Contender

IMAGES = record.DATA / "imagenet-samples"
SIZE, BATCH, COPIES, SHORT_SIDE = 224, 32, 4, 256
SCALE = (0.08, 1.0)


def class_folders(images: Path, folder: Path, copies: int) -> int:
    """Copy the JPEGs into one class folder per class, several times over. Return their number."""
    files = sorted(images.glob("*.JPEG"))
    for copy, file in itertools.product(range(copies), files):
        target = folder / "train" / file.name.partition("_")[0]
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / f"{copy}_{file.name}")
    return copies * len(files)


def our_loader(
    path: Path, *, batch: int = BATCH, workers: int = 0, kind: Any = "threads", left: str = "", **augment: Any
) -> Any:
    """Return vitrail's loader of the data at `path`; left: "crops" or "JPEGs" for a device."""
    from vitrail.data.images.batched import divided
    from vitrail.data.images.ops import train_transform
    from vitrail.data.loading.loader import Loader
    from vitrail.data.settings import Augment, Preprocess
    from vitrail.data.sources.open import open_split

    transform = train_transform(Augment(scale=SCALE, **augment), Preprocess(image_size=(SIZE, SIZE)))
    source, rest = open_split(path, "train"), None
    if left:
        transform, rest = divided(transform, (SIZE, SIZE), decodes=True)  # type: ignore[misc]
        rest = replace(rest, crop=replace(rest.crop, decodes=left == "JPEGs"))  # type: ignore[type-var]
    return Loader(
        source,
        transform=transform,
        rest=rest,
        image_size=SIZE,
        batch_size=batch,
        workers=workers,
        worker_kind=kind,
    )


def timm_loader(path: Path, *, prefetcher: bool = True) -> Any:
    """Return timm's loader of the same folder, with one worker."""
    from timm.data import create_dataset, create_loader

    loader = create_loader(
        create_dataset("", root=str(path), split="train"),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        scale=SCALE,
        color_jitter=0.0,
        interpolation="bilinear",
        num_workers=1,
        device=torch.device("cpu"),
    )
    return loader if prefetcher else loader.loader


def our_epochs(loader: Any) -> Callable[[], int]:
    """Return a step that reads one epoch, and the next one at each further call."""
    epochs = itertools.count()
    return lambda: sum(len(batch.labels) for batch in loader.epoch(next(epochs)))


def their_epochs(loader: Any) -> Callable[[], int]:
    """Return the same step for timm's loader."""
    return lambda: sum(len(labels) for _, labels in loader)


def pack(folder: Path, target: Path) -> None:
    """Pack a folder into shards whose images have a short side of `SHORT_SIDE`."""
    from vitrail.data.loading.pack import pack_data

    pack_data(str(folder), target, short_side=SHORT_SIDE)


def one_core(options: argparse.Namespace, folder: Path, packed: Path, count: int) -> list[compare.Measurement]:
    """Time all loaders on a single core, then restore the process's cores and threads."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    whole = count // BATCH * BATCH  # both sides drop the last, smaller batch
    field = [
        Contender(record.OURS, our_epochs(our_loader(folder)), whole),
        Contender(f"{record.OURS}, packed", our_epochs(our_loader(packed)), whole),
        Contender("timm", their_epochs(timm_loader(folder)), whole),
        Contender("timm, uint8 batches", their_epochs(timm_loader(folder, prefetcher=False)), whole),
        Contender(f"{record.OURS}, packed, crops left", our_epochs(our_loader(packed, left="crops")), whole),
        Contender(f"{record.OURS}, packed, JPEGs left", our_epochs(our_loader(packed, left="JPEGs")), whole),
        Contender(f"{record.OURS}, JPEGs left", our_epochs(our_loader(folder, left="JPEGs")), whole),
    ]
    try:
        return compare.race(field, rounds=options.rounds, seconds=0.1 if options.quick else 3.0)
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def waiting(folder: Path, steps: int) -> float:
    """Return the share of the time that training S/16 waits for data (224 px, batch 16, bf16, one worker)."""
    case = train_step.CASES[1]
    loader = our_loader(folder, batch=case.batch, workers=1)
    feed = (batch for epoch in itertools.count() for batch in loader.epoch(epoch))
    with compare.tuned():
        step = train_step.vitrail_step(peers.ours(case.architecture), case, "bf16", feed)
        step()
        start, before = time.perf_counter(), loader.wait_seconds
        for _ in range(steps):
            step()
        share = (loader.wait_seconds - before) / (time.perf_counter() - start)
    loader.close()
    return share


LAUNCHES = 845
"""Number of operations that a step of S/16 launches."""


def launches(tensors: list[torch.Tensor]) -> None:
    """Do as many small operations as a step launches; each gives the interpreter's lock away, as a launch does."""
    for number in range(LAUNCHES):
        tensors[number % len(tensors)].add_(1)


def beside(loader: Any, seconds: float) -> tuple[float, float]:
    """Return images/s of a loader and launches/s of this thread, at the same time."""
    ended, images = threading.Event(), [0]

    def read() -> None:
        for batch in (batch for epoch in itertools.count(1) for batch in loader.epoch(epoch)):
            if ended.is_set():
                return
            images[0] += len(batch.labels)

    reader, tensors, steps = threading.Thread(target=read), [torch.zeros(8) for _ in range(64)], 0
    began = time.perf_counter()
    reader.start()
    while time.perf_counter() - began < seconds or not images[0]:
        launches(tensors)
        steps += 1
    took = time.perf_counter() - began
    read_images = images[0]
    ended.set()
    reader.join()
    return read_images / took, steps * LAUNCHES / took


def alone(loader: Any, seconds: float) -> float:
    """Return images/s of a loader."""
    began, images = time.perf_counter(), 0
    for batch in (batch for epoch in itertools.count(1) for batch in loader.epoch(epoch)):
        images += len(batch.labels)
        if (took := time.perf_counter() - began) >= seconds:
            break
    return images / took


def compared(path: Path, augment: dict[str, Any], workers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare threads with processes in alternation, after an epoch of each."""
    loaders = {kind: our_loader(path, workers=workers, kind=kind, **augment) for kind in ("threads", "processes")}
    found: dict[str, list[float]] = {}
    for loader in loaders.values():
        list(loader.epoch(0))
    processes = [psutil.Process(pid).memory_full_info() for pid in loaders["processes"].pids]
    for _ in range(rounds):
        for kind, loader in loaders.items():
            found.setdefault(f"{kind}, alone", []).append(alone(loader, seconds))
            images, launched = beside(loader, seconds)
            found.setdefault(f"{kind}, beside", []).append(images)
            found.setdefault(f"{kind}, launches", []).append(launched)
    for loader in loaders.values():
        loader.close()
    rates = {name: round(statistics.median(values), 1) for name, values in found.items()}
    ratios = {
        f"processes over threads, {what}": compare.Ratio(
            [one / other for one, other in zip(found[f"processes, {what}"], found[f"threads, {what}"], strict=True)]
        ).summary()
        for what in ("alone", "beside", "launches")
    }
    private = max(one.uss for one in processes) / 2**20
    return {"workers": workers, **rates, **ratios, "private_mib_of_a_process": round(private)}


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "files": ("files", {}),
    "packed": ("packed", {}),
    "packed, RandAugment": ("packed", {"randaugment": (2, 9)}),
    "packed, 3-Augment and jitter": ("packed", {"three_augment": True, "color_jitter": 0.3}),
}


def kinds(options: argparse.Namespace, folders: dict[str, Path]) -> None:
    """Compare threads with processes and write results/input_workers.json."""
    torch.set_num_threads(1)
    rows = []
    for name, (data, augment) in CASES.items():
        for workers in range(1, options.workers + 1):
            seconds = 0.1 if options.quick else 2.5
            rows.append({"name": name} | compared(folders[data], augment, workers, options.rounds, seconds))
            print(json.dumps(rows[-1]), flush=True)
    record.save("input_workers", options, rows=rows, load_average=round(os.getloadavg()[1], 1))


def main() -> None:
    """Measure and write results/input_pipeline.json, or results/input_workers.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--workers", type=int, default=0, help="compare threads with processes, up to this number")
    parser.add_argument("--images", type=Path, default=IMAGES, help="a folder of JPEGs named class_name.JPEG")
    options = parser.parse_args()
    record.prepare(options)
    with tempfile.TemporaryDirectory() as scratch:
        folder, packed = Path(scratch) / "files", Path(scratch) / "packed"
        count = class_folders(options.images, folder, 1 if options.quick else COPIES)
        pack(folder, packed)
        if options.workers:
            kinds(options, {"files": folder, "packed": packed})
            return
        measured = one_core(options, folder, packed, count)
        share = waiting(folder, 2 if options.quick else 20)
    rows = record.rows(measured)
    record.show("full-size JPEGs to augmented 224 px batches on one core, images/s", rows)
    ours, from_packed, timm, timm_uint8, crops_left, packed_left, left = measured
    ratios = {
        "over_timm": ours.ratio(timm).summary(),
        "over_timm_uint8": ours.ratio(timm_uint8).summary(),
        "packed_over_timm": from_packed.ratio(timm).summary(),
        "packed_over_timm_uint8": from_packed.ratio(timm_uint8).summary(),
        "packed_crops_left_over_packed": crops_left.ratio(from_packed).summary(),
        "packed_jpegs_left_over_packed": packed_left.ratio(from_packed).summary(),
        "jpegs_left_over_ours": left.ratio(ours).summary(),
    }
    print(*(f"  {name}: {ratio}" for name, ratio in ratios.items()), sep="\n")
    print(f"  training S/16 waits for data {share:.1%} of the time")
    record.save("input_pipeline", options, rows=rows, **ratios, images=count, waiting_share=round(share, 4))


if __name__ == "__main__":
    main()
