"""What a GPU shows in ten minutes, in one prepared call: `python -m benchmarks.gpu --out DIR`.

It is for a machine with one GPU, 16 cores and no network, on which torch, Triton, timm, transformers, einops, NumPy,
Pillow, safetensors, huggingface_hub, scikit-learn, rich, PyYAML, matplotlib and psutil are installed. What else vitrail
imports comes as a folder of wheels, which are unpacked and not installed (10 MB):

    pip download --dest wheels --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform any \\
        simplejpeg docstring-parser google-crc32c torchcodec
    python -m benchmarks.gpu --out DIR --wheels wheels --images JPEGS

Rows (`benchmarks.gpu_rows`): the ceilings of the device; one training step of vitrail and of timm, eager and compiled,
with images/s, the share of the ceiling, peak memory, kernels and the gaps between them; predictions; the loader; from
JPEGs to the update of the weights; and whether what is counted on fake tensors is true. Both libraries compile block by
block.

A row has 30 seconds, and all rows together `--minutes`. A row that takes longer is stopped with its process, and the
next one begins in another; what it has compiled until then is in DIR/compiled. The same command continues with the rows
that are missing. DIR/gpu.json and DIR/gpu.csv are written after each row. With `--out benchmarks/results` they are what
the documents quote (`python -m benchmarks.readme`).

`--rehearse` runs every row on a CPU with toy networks. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from functools import partial, partialmethod
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import record
from benchmarks.cells import Cells

if TYPE_CHECKING:
    from benchmarks.gpu_rows import Place

ROW_SECONDS = 30.0
"""Longest time of a row."""
START_SECONDS = 120.0
"""Longest time until a process is ready for its first row."""
CEILING = "bf16 product, FLOP/s"


def main() -> None:
    """Measure the rows that are missing, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; an earlier call is continued")
    parser.add_argument("--minutes", type=float, default=10.0, help="longest time of all rows together")
    parser.add_argument("--wheels", type=Path, help="folder of wheels with what this machine lacks")
    parser.add_argument("--images", type=Path, default=record.DATA / "imagenet-samples", help="folder of JPEGs")
    parser.add_argument("--only", default="", help="measure only rows whose name contains this text")
    parser.add_argument("--rehearse", action="store_true", help="run every row on a CPU, with toy networks")
    options = parser.parse_args()
    if options.rehearse and options.out.resolve() == record.RESULTS:
        raise SystemExit("figures of a rehearsal mean nothing: choose another --out than benchmarks/results")
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.out.resolve() / "compiled")
    with tempfile.TemporaryDirectory() as packages:
        for wheel in sorted(options.wheels.glob("*.whl")) if options.wheels else ():
            zipfile.ZipFile(wheel).extractall(packages)
        sys.path.append(packages)  # last: what is installed comes first. Processes inherit it
        measure_all(options, began)


def measure_all(options: argparse.Namespace, began: float) -> None:
    """Measure all rows, each in the process of the row before unless that has failed."""
    from benchmarks.gpu_rows import rows

    place = place_of(options)
    here = conditions(place)
    cells = Cells(options.out / "gpu.jsonl")
    failed: dict[str, str] = {}
    worker: Worker | None = None
    for name in rows(place.size):
        if options.only not in name or cells.find(row=name, **here):
            continue
        if time.monotonic() - began > 60 * options.minutes - ROW_SECONDS:
            failed[name] = "not begun: the time was up"
            continue
        try:
            worker = worker or Worker(place)
            found = worker.measure(name)
        except RowError as error:
            failed[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            if worker is not None and not worker.alive:
                worker = None
        else:
            cells.get(lambda found=found: {"sides": found}, row=name, **here)  # type: ignore[misc]
        write(options, place, here, cells, failed)
    if worker is not None:
        worker.end()
    write(options, place, here, cells, failed)
    for name, why in failed.items():
        print(f"missing: {name}: {why}", file=sys.stderr)


def place_of(options: argparse.Namespace) -> Place:
    """Return the device and the sizes. Raises SystemExit without a GPU, unless this is a rehearsal."""
    import torch

    from benchmarks.gpu_rows import REHEARSED, Place, Size

    if not options.rehearse and not torch.cuda.is_available():
        raise SystemExit("this machine has no GPU that torch can use. --rehearse runs all rows on a CPU")
    device = torch.device("cpu" if options.rehearse else "cuda")
    return Place(device, REHEARSED if options.rehearse else Size(), options.images)


def conditions(place: Place) -> dict[str, str]:
    """Return what the figures depend on: device, driver, versions and commit. Rows of other conditions are not kept."""
    import torch

    facts = {"gpu": "none: a rehearsal", "driver": "", "cuda": str(torch.version.cuda)}
    if place.cuda:
        facts["gpu"] = torch.cuda.get_device_name()
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        facts["driver"] = done.stdout.partition("\n")[0].strip()
    versions = {"torch": torch.__version__, "timm": version("timm"), "python": sys.version.partition(" ")[0]}
    return {**facts, **versions, "commit": record.commit()}


class RowError(Exception):
    """A row that has no figures, and why."""


class Worker:
    """A process that measures rows on the device, in a session of its own so that its children end with it."""

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, place))
        self._process.start()
        theirs.close()
        self._receive(START_SECONDS)

    @property
    def alive(self) -> bool:
        """Whether it can measure another row."""
        return self._process.is_alive()

    def measure(self, name: str) -> list[dict[str, Any]]:
        """Return the figures of a row. Raises RowError, after `ROW_SECONDS` with the end of the process."""
        self._pipe.send(name)
        found, error = self._receive(ROW_SECONDS)
        if error:
            raise RowError(error)
        return found  # type: ignore[no-any-return]

    def _receive(self, seconds: float) -> Any:
        try:
            if self._pipe.poll(seconds):
                return self._pipe.recv()
            why = f"not finished after {seconds:g} s"
        except EOFError:
            self._process.join(10)
            why = f"its process ended with exit code {self._process.exitcode}"
        self.end()
        raise RowError(why)

    def end(self) -> None:
        """End the process and what it has started."""
        with suppress(ProcessLookupError):  # it has ended, or has no session of its own yet
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, place: Place) -> None:
    os.setsid()
    import torch

    from benchmarks.gpu_rows import measure

    if not place.cuda:  # inductor compiles a graph for half a minute here; what it is given is traced all the same
        torch.nn.Module.compile = partialmethod(torch.nn.Module.compile, backend="aot_eager")  # type: ignore
        torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    torch.zeros(1, device=place.device)
    pipe.send("ready")
    while True:
        name = pipe.recv()
        try:
            pipe.send((measure(name, place), ""))
        except Exception as error:
            pipe.send(([], f"{type(error).__name__}: {error}"))


def write(
    options: argparse.Namespace, place: Place, here: dict[str, str], cells: Cells, failed: dict[str, str]
) -> None:
    """Write gpu.json and gpu.csv with all rows of these conditions, and what is missing."""
    from benchmarks.gpu_rows import rows

    results = []
    for name in rows(place.size):
        if (cell := cells.find(row=name, **here)) is not None:
            results.append({"row": name, "rows": cell["sides"]})
    peak = next((s["per_second"] for r in results for s in r["rows"] if s["name"] == CEILING), None)
    for side in (side for row in results for side in row["rows"] if "flops" in side):
        if peak:
            side["share_of_ceiling"] = round(side["images_per_second"] * side["flops"] / peak, 4)
    document = {
        "benchmark": "gpu",
        "command": "python -m benchmarks.gpu",
        "date": time.strftime("%Y-%m-%d"),
        "rehearsed": options.rehearse,
        "conditions": here,
        "machine": record.machine(speed=False) | {"gpu": here["gpu"]},
        "results": results,
        "missing": failed,
    }
    (options.out / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [
        {**here, "date": document["date"], "row": row["row"], **{k: v for k, v in side.items() if k != "rounds"}}
        for row in results
        for side in row["rows"]
    ]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    with (options.out / "gpu.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
