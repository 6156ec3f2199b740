"""The follow-up's lessons on fine-tuning and stems, as its tables: Tables 5 and 6, Table 7 and Figure 6.

    python -m benchmarks.learn --side vitrail --seeds 0 --keep runs     trains the network that is fine-tuned
    python -m benchmarks.lessons --weights runs/scratch-small-1 --minutes 60
    python -m benchmarks.lessons --what stems --arms supervised

The first lesson, parallel branches, is benchmarks/parallel.py. Each finished run is one line of `--log`. The same
command continues an interrupted benchmark, and starts no further run after `--minutes`. Tables and figures show the
runs that are finished.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import lesson_stems, lesson_tuning, record
from benchmarks.cells import Cells

SHARED = Path(os.environ.get("VITRAIL_TEST_DATA", record.ROOT.parent / "shared" / "data"))
START = Path("runs/scratch-small-1")
QUICK = ("--data.subset=200", "--evaluate-every=1 epoch")
"""Settings of the runs with `--quick`."""


LESSONS: dict[str, Any] = {"tuning": lesson_tuning, "stems": lesson_stems}


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = record.arguments(__doc__)
    parser.add_argument("--what", nargs="+", choices=LESSONS, default=list(LESSONS))
    parser.add_argument("--weights", type=Path, default=START, help="run folder of the network to fine-tune (tuning)")
    parser.add_argument("--minutes", type=float, help="start no run after this time (default: no limit)")
    parser.add_argument("--log", type=Path, default=record.RESULTS / "lessons.jsonl", help="finished runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--data", nargs="+", choices=lesson_tuning.SETTINGS, default=list(lesson_tuning.SETTINGS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 48], help="pixels (tuning)")
    parser.add_argument("--epochs", type=float, default=20, help="epochs of each fine-tuning run (tuning)")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 4e-3], help="learning rates to try (tuning)")
    parser.add_argument("--arms", nargs="+", choices=lesson_stems.ARMS, default=list(lesson_stems.ARMS), help="(stems)")
    parser.add_argument("--stem-epochs", type=float, default=2, help="epochs with labels (stems)")
    parser.add_argument("--masked-epochs", type=float, default=2, help="epochs without labels (stems)")
    parser.add_argument("--flowers", type=Path, default=SHARED / "flowers12")
    parser.add_argument("--cifar", type=Path, default=SHARED / "cifar100")
    options = parser.parse_args()
    options.fewer = []
    if options.quick:
        options.seeds, options.epochs, options.stem_epochs, options.masked_epochs = [0], 1, 1, 1
        options.lrs, options.fewer = options.lrs[:1], list(QUICK)
    if "tuning" in options.what and not options.weights.is_dir():
        parser.error(f"{options.weights} is not a run folder: name the network to fine-tune with --weights RUN")
    return options


def main() -> None:
    """Run the missing cells, print the tables, write results/lessons.json and a figure of each lesson."""
    options = arguments()
    record.prepare(options)
    found: dict[str, Any] = {}
    folder = Path(tempfile.gettempdir()) if options.quick else record.RESULTS
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log" if options.quick else options.log
        cells, logged = Cells(log, options.minutes), Cells(log, 0)
        for name, lesson in LESSONS.items():
            asked = name in options.what
            rows = found[name] = lesson.measure(cells if asked else logged, options)  # else: the finished ones only
            if asked and rows:
                lesson.show(rows)
                lesson.draw(rows, folder / f"lessons_{name}.png")
    if cells.missing:
        print(f"{cells.missing} runs are missing: the same command continues with them")
        return
    settings = {name: getattr(options, name) for lesson in LESSONS.values() for name in lesson.RECORDED}
    record.save("lessons", options, settings=settings, **found)


if __name__ == "__main__":
    main()
