"""Train what `vitrail demo` trains: the embedded handwritten digits, three seeds, each in a new process."""

from __future__ import annotations

import tempfile
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import compare, record
from benchmarks.learn import summarise, vitrail_verb

SIDE = "vitrail demo"


def run(seed: int) -> dict[str, Any]:
    """Train with one seed; the test digits are read once, after training."""
    with tempfile.TemporaryDirectory() as scratch, compare.foreign_load() as foreign:
        trained = vitrail_verb(["demo", f"--seed={seed}", f"--out={scratch}"])
    return {
        "side": SIDE,
        "seed": seed,
        "accuracy": 100 * trained["test"]["top1"],
        "test_images": trained["test"]["count"],
        "validation": trained["best"],
        "steps": trained["steps"],
        "seconds": trained["seconds"],
        "foreign_load": round(foreign[0], 3),
    }


def main() -> None:
    """Run the seeds, print the table and write results/digits.json."""
    parser = record.arguments(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    runs = [run(seed) for seed in (options.seeds[:1] if options.quick else options.seeds)]
    (summary,) = summarise(runs).values()
    table = Table(title="digits, test images", title_justify="left")
    for column in ("seed", "top-1", "seconds of training"):
        table.add_column(column)
    for row in runs:
        table.add_row(str(row["seed"]), f"{row['accuracy']:.2f} %", f"{row['seconds']:.1f}")
    Console(width=110).print(table)
    kept = {key: summary[key] for key in ("mean", "deviation", "seeds")}
    record.save("digits", options, summary=kept, runs=runs)


if __name__ == "__main__":
    main()
