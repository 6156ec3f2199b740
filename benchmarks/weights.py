"""Load ViT-L/16 from one safetensors file: time and peak memory, ours against timm.

The file is timm's own state dict in float32, in the page cache. Each load has a fresh process, because that is where
networks are loaded: a process that has freed one already has the memory for the next, and is several times as fast.
"timm" is `create_model(checkpoint_path=...)`; "timm, into a model" has a network built before the clock starts. Ours
always builds it, and reads every value to check that it is finite. "vitrail, own file" is the same model saved by
vitrail, whose checksum is compared as well. The peak is the highest resident set minus what the process had before, as
a multiple of the file. Our logits must equal timm's before the measurement.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from benchmarks import compare, record
from benchmarks.compare import Measurement
from vitrail.weights.load import load
from vitrail.weights.store import save_model

MODEL, QUICK = "vit_large_patch16_224", "vit_tiny_patch16_224"
TOLERANCE = 1e-5
MEMORY_LIMIT = 1.3
"""Upper limit of our peak memory, as a multiple of the file size."""

_LOAD = """
import json, time
from pathlib import Path
import torch
torch.set_num_threads({threads})
def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024
{prepare}
torch.ones(1 << 16).sum()
Path("/proc/self/clear_refs").write_text("5")  # the highest resident set is counted anew
before, start = status("VmRSS"), time.perf_counter()
model = {load}
seconds = time.perf_counter() - start
print(json.dumps(dict(seconds=seconds, peak=status("VmHWM") - before, after=status("VmRSS") - before)))
"""
_OURS = "from vitrail.weights.load import load; import vitrail.weights.timm.format"
INTO = "timm, into a model"
LOADS = {
    record.OURS: (_OURS, "load({file!r})"),
    "vitrail, own file": (_OURS, "load({own!r})"),
    INTO: ("import timm; model = timm.create_model({name!r})", "timm.models.load_checkpoint(model, {file!r})"),
    "timm": ("import timm", "timm.create_model({name!r}, checkpoint_path={file!r})"),
}
"""What a process does before the clock starts, and the load."""


def files(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a timm model of random weights, and the same model as vitrail saves it."""
    torch.manual_seed(0)
    model = timm.create_model(name)
    model.get_submodule("head").reset_parameters()  # type: ignore[operator]
    file = folder / "timm.safetensors"
    save_file(model.state_dict(), file)
    ours = load(file)
    save_model(folder / "own", ours, ours.card)
    return file, folder / "own" / "model.safetensors"


def same_logits(file: Path, own: Path, name: str) -> float:
    """Return the largest relative difference (L2) of our logits from timm's. Raises SystemExit beyond rounding."""
    images = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = timm.create_model(name, checkpoint_path=str(file)).eval()(images)
        differences = [((load(path)(images) - expected).norm() / expected.norm()).item() for path in (file, own)]
    if max(differences) > TOLERANCE:
        raise SystemExit(f"the logits differ by {max(differences):.1e}")
    return max(differences)


def times(measured: list[Measurement]) -> list[dict[str, Any]]:
    """Return the seconds of a load, and how many times as long as ours each other contender takes."""
    ours = measured[0]
    rows = []
    for one in measured:
        seconds = sorted(1 / rate for rate in one.rates)
        row: dict[str, Any] = {
            "name": one.name,
            "seconds": round(1 / one.median, 3),
            "low": round(seconds[0], 3),
            "high": round(seconds[-1], 3),
            "disturbed_rounds": one.disturbed,
        }
        if one is not ours:
            row["ours_over_this"] = ours.ratio(one).summary()
        rows.append(row)
    return rows


def memory(told: dict[str, list[dict[str, float]]], size: int) -> list[dict[str, Any]]:
    """Return the highest resident set of a load over the size of its file, the worst of all rounds."""
    parts = ("peak", "after")
    return [
        {"name": name, **{f"{part}_over_file": round(max(one[part] for one in loads) / size, 3) for part in parts}}
        for name, loads in told.items()
        if name != INTO  # its network is part of what the process had before
    ]


def sample(code: str, told: list[dict[str, float]], _seconds: float) -> tuple[float, float]:
    """Load in a fresh process, and keep what it says. Return loads/s and the share of the machine others used."""
    with compare.foreign_load() as foreign:
        run = subprocess.run([sys.executable, "-c", code], env=record.as_installed(), check=True, capture_output=True)
    told.append(json.loads(run.stdout))
    return 1 / told[-1]["seconds"], foreign[0]


def show(seconds: list[dict[str, Any]], peaks: list[dict[str, Any]]) -> None:
    """Print both results as one table."""
    table = Table(title="one load from safetensors", title_justify="left")
    for column in ("", "seconds", "spread", "as fast as this", "peak / file", "then / file", "disturbed"):
        table.add_column(column, justify="right" if column else "left")
    by_name = {row["name"]: row for row in peaks}
    for row in seconds:
        ratio, peak = row.get("ours_over_this"), by_name.get(row["name"])
        table.add_row(
            row["name"],
            f"{row['seconds']:.2f}",
            f"{row['low']:.2f} - {row['high']:.2f}",
            f"{ratio['median']:.2f}x" if ratio else "",
            f"{peak['peak_over_file']:.2f}" if peak else "",
            f"{peak['after_over_file']:.2f}" if peak else "",
            str(row["disturbed_rounds"] or ""),
        )
    Console(width=110).print(table)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Write the files and measure time and memory."""
    name = QUICK if options.quick else MODEL
    file, own = files(folder, name)
    difference = same_logits(file, own, name)
    print(f"relative difference from timm's logits: {difference:.1e}")
    given = {"file": str(file), "own": str(own), "name": name}
    told: dict[str, list[dict[str, float]]] = {key: [] for key in LOADS}
    samples = {}
    for key, texts in LOADS.items():
        prepare, load_it = (text.format(**given) for text in texts)
        code = _LOAD.format(threads=torch.get_num_threads(), prepare=prepare, load=load_it)
        samples[key] = partial(sample, code, told[key])
    seconds = times(compare.in_turn(samples, options.rounds, 0.0))
    peaks = memory(told, file.stat().st_size)
    show(seconds, peaks)
    return dict(
        model=name, file_bytes=file.stat().st_size, logit_difference=difference, load_seconds=seconds, peak_memory=peaks
    )


def main() -> None:
    """Measure and write results/weights.json."""
    options = record.arguments(__doc__).parse_args()
    record.prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        results = measure(options, Path(folder))
    record.save("weights", options, memory_limit=MEMORY_LIMIT, **results)


if __name__ == "__main__":
    main()
