"""The follow-up's lessons on fine-tuning and stems, as its tables: Tables 5 and 6, Table 7 and Figure 6.

    python -m benchmarks.learn --side vitrail --seeds 0 --keep runs     trains the network to fine-tune
    python -m benchmarks.lessons --weights runs/scratch-small-1 --minutes 60
    python -m benchmarks.lessons --what stems --arms supervised

The first lesson, parallel branches, is benchmarks/parallel.py. Each finished run is a line of `--log`: started again,
with the same settings, this goes on where it stopped; it stops by itself once `--minutes` are spent. Tables and figures
are made of what is there.
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
"""Settings of the runs of a quick proof."""


LESSONS: dict[str, Any] = {"tuning": lesson_tuning, "stems": lesson_stems}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = record.arguments(__doc__)
    parser.add_argument("--what", nargs="+", choices=LESSONS, default=list(LESSONS))
    parser.add_argument("--weights", type=Path, default=START, help="the network to fine-tune, a run (tuning)")
    parser.add_argument("--minutes", type=float, help="start no run after so many; left out: finish")
    parser.add_argument("--log", type=Path, default=record.RESULTS / "lessons.jsonl", help="finished runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--data", nargs="+", choices=lesson_tuning.SETTINGS, default=list(lesson_tuning.SETTINGS))
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 48], help="pixels (tuning)")
    parser.add_argument("--epochs", type=float, default=20, help="of each fine-tuning (tuning)")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 4e-3], help="learning rates to try (tuning)")
    parser.add_argument("--arms", nargs="+", choices=lesson_stems.ARMS, default=list(lesson_stems.ARMS), help="(stems)")
    parser.add_argument("--stem-epochs", type=float, default=2, help="passes with labels (stems)")
    parser.add_argument("--masked-epochs", type=float, default=2, help="passes without labels (stems)")
    parser.add_argument("--flowers", type=Path, default=SHARED / "flowers12")
    parser.add_argument("--cifar", type=Path, default=SHARED / "cifar100")
    options = parser.parse_args()
    options.fewer = []
    if options.quick:
        options.seeds, options.epochs, options.stem_epochs, options.masked_epochs = [0], 1, 1, 1
        options.lrs, options.fewer = options.lrs[:1], list(QUICK)
    if "tuning" in options.what and not options.weights.is_dir():
        parser.error(f"tuning starts from a trained network, and {options.weights} is none: --weights RUN")
    return options


def main() -> None:
    """Run what is missing, print the tables, write results/lessons.json and a figure of each lesson."""
    options = arguments()
    record.prepare(options)
    found: dict[str, Any] = {}
    folder = Path(tempfile.gettempdir()) if options.quick else record.RESULTS
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log" if options.quick else options.log
        cells, logged = Cells(log, options.minutes), Cells(log, 0)
        for what, lesson in LESSONS.items():
            asked = what in options.what
            rows = found[what] = lesson.measure(cells if asked else logged, options)  # else: what is there already
            if asked and rows:
                lesson.show(rows)
                lesson.draw(rows, folder / f"lessons_{what}.png")
    if cells.missing:
        print(f"{cells.missing} runs are not done yet: the same command goes on")
        return
    settings = {name: getattr(options, name) for lesson in LESSONS.values() for name in lesson.RECORDED}
    record.save("lessons", options, settings=settings, **found)


if __name__ == "__main__":
    main()
