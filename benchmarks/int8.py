"""What int8 costs in accuracy: networks that were trained here, as programs in float32 and in int8.

    python -m benchmarks.learn --side vitrail --keep runs            networks for 100 classes of CIFAR-100
    python -m benchmarks.transfer runs/scratch-small-* --keep runs   networks for 12 kinds of flowers
    python -m benchmarks.int8 runs/scratch-small-* runs/flowers12/*

A program is made as `vitrail export RUN --precision int8 --calibrate DATA` makes it, and computed on all test images,
of which the export has seen at most 1,000. A network is measured on the set that has as many classes. The images are
the same for both programs, so the difference is exact for them.

vitrail makes other int8 programs for processors with AMX, so their figures are kept apart, in results/amx/int8.json.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.learn import vitrail_verb

DATA = record.DATA
SETS = {100: "cifar100", 12: "flowers12"}
"""Number of classes -> the set of images."""
RUNTIMES = {"openvino": "OpenVINO", "onnx": "ONNX Runtime"}


def measured(run: Path, to: str, data: Path, folder: Path) -> dict[str, Any]:
    """Return top-1 of both programs of a network in percent, and what the export says about int8.

    A network for which the export keeps no int8 program, because it would lose too much, has no value for it.
    """
    made, tested = {}, {}
    for precision, more in (("float32", []), ("int8", ["--precision=int8", f"--calibrate={data}"])):
        out = folder / f"{run.parent.name}-{run.name}-{to}-{precision}"
        try:
            made[precision] = vitrail_verb(["export", str(run), f"--to={to}", f"--out={out}", *more])
        except subprocess.CalledProcessError:  # its message is above
            break
        tested[precision] = vitrail_verb(["evaluate", str(out), str(data), "--split=test"])
    row: dict[str, Any] = {"network": run.name, "set": data.name, "to": to}
    row |= {precision: round(100 * found["top1"], 2) for precision, found in tested.items()}
    if "int8" not in tested:
        return row
    about = made["int8"]["quantised"]
    return {
        **row,
        "images": tested["int8"]["count"],
        "drop": round(100 * (tested["float32"]["top1"] - tested["int8"]["top1"]), 2),
        "drop_in_export": round(100 * (about["float_top1"] - about["top1"]), 2),
        "held_out": about["held_out"],
        "agreement": round(100 * about["agreement"], 2),
        "int8_layers": [about["int8_layers"], about["layers"]],
        "megabytes": {name: round(max(found["files"].values()) / 1e6, 2) for name, found in made.items()},
    }


def summary(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the table: means over the networks of a set that have an int8 program, and the largest loss."""
    header = ("test top-1, %", "networks", "float32", "int8", "largest loss", "same class", "layers in int8")
    lines: list[tuple[str, ...]] = [header]
    rows = document["rows"]
    for name, to in dict.fromkeys((row["set"], row["to"]) for row in rows):
        every = [row for row in rows if (row["set"], row["to"]) == (name, to)]
        some = [row for row in every if "int8" in row]
        cells = [f"{len(some)} of {len(every)}"]
        if some:
            cells += [f"{statistics.fmean(row[key] for row in some):.2f}" for key in ("float32", "int8")]
            cells += [f"{max(row['drop'] for row in some):.2f}"]
            cells += [f"{statistics.fmean(row['agreement'] for row in some):.1f} %"]
            cells += [" or ".join(dict.fromkeys("{} of {}".format(*row["int8_layers"]) for row in some))]
        lines.append((f"{name}, {RUNTIMES[to]}", *cells, *[""] * (len(header) - 1 - len(cells))))
    return lines


def main() -> None:
    """Export and evaluate each network for each runtime, print the table and write int8.json."""
    from vitrail.weights.load import read_card

    parser = record.arguments(__doc__)
    parser.add_argument("networks", type=Path, nargs="+", help="runs of CIFAR-100 and of flowers12")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of cifar100 and flowers12")
    options = parser.parse_args()
    networks = options.networks[:1] if options.quick else options.networks
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for to in RUNTIMES:
            for run in networks:
                data = options.data / SETS[read_card(run).config.classes]
                rows.append(measured(run, to, data, Path(scratch)))
    record.print_lines("int8", summary({"rows": rows}))
    record.save("int8", options, by_amx=True, rows=rows)


if __name__ == "__main__":
    main()
