"""The follow-up's third lesson: stems, with labels and after masked pre-training (its Table 7 and Figure 6).

Parameters and GFLOPs are those of B/16 at 224 pixels, as in the follow-up. Accuracies are those of a small network on
CIFAR-100: trained with labels only, or pre-trained with masked patches on the same images without labels and then
fine-tuned. "linear, a block more" is the follow-up's ViT-B13: one more block costs about as much as a convolutional
stem. It is trained with labels only, which already shows what one more block brings.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks import compare
from benchmarks.cells import Cells
from benchmarks.learn import vitrail_verb
from benchmarks.self_supervised import FINETUNE, RESUME
from vitrail.costs.count import macs, parameters
from vitrail.costs.figure import COLOURS
from vitrail.costs.published import published
from vitrail.model.attention import attention_path
from vitrail.model.variants import ViTConfig, variant
from vitrail.model.vit import ViT

PAPER_GFLOPS, PAPER_EXTRA = published("three_things")["hmlp"]["vit_b_gflops"], 0.01
"""GFLOPs of B/16 with hMLP (section 5; a multiply-add counts as one), and the largest relative excess over linear."""
FLOPS_OF = {nn.LayerNorm: 5, nn.BatchNorm2d: 2}
"""FLOPs per value of a normalisation as fvcore counts them, which gives the published 17.73 GFLOPs."""
HOLDOUT = 0.02
ONLY_THE_LAST = "--evaluate-every=100 %"
"""Nothing is chosen during pre-training, and evaluating 5,000 held-out images takes time."""


@dataclass(frozen=True)
class Stem:
    """One row of Table 7."""

    name: str
    stem: Literal["linear", "levit", "early", "hmlp"]
    norm: Literal["batch", "layer"] = "batch"
    more: int = 0
    """Number of additional blocks."""

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the ways to train a network with this stem."""
        return ("supervised",) if self.more else tuple(ARMS)

    def flags(self, depth: int) -> list[str]:
        """Return the flags that give a recipe's network this stem."""
        return [f"--vit.stem={self.stem}", f"--vit.stem_norm={self.norm}", f"--vit.depth={depth + self.more}"]


STEMS = (
    Stem("linear", "linear"),
    Stem("linear, a block more", "linear", more=1),
    Stem("LeViT", "levit"),
    Stem("early convolutions", "early"),
    Stem("hMLP, BN", "hmlp"),
    Stem("hMLP, LN", "hmlp", "layer"),
)
RECORDED = ("stem_epochs", "masked_epochs", "arms")
"""Settings that the results file lists beside the table."""
DEPTH = 6
"""Number of blocks of the recipes' small network."""


def paper_network(stem: Stem) -> ViTConfig:
    """Return the configuration of B/16 with this stem."""
    config = variant("B/16", stem=stem.stem, stem_norm=stem.norm)
    assert isinstance(config, ViTConfig)
    return replace(config, depth=config.depth + stem.more)


def gflops(config: ViTConfig) -> float:
    """Return the multiply-adds of an image in units of 10^9, normalisation included, as the follow-up counts."""
    counted: list[int] = []

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        counted.append(output.numel() * next(each for kind, each in FLOPS_OF.items() if isinstance(module, kind)))

    with torch.no_grad(), attention_path("explicit"), torch.device("meta"):
        model = ViT(config).eval()
        for module in model.modules():
            if isinstance(module, tuple(FLOPS_OF)):
                module.register_forward_hook(count)
        images = torch.empty(1, config.channels, *config.image_size)
        model.encode(model.embed(images))
    return (macs(config) + sum(counted)) / 1e9


def supervised(stem: Stem, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the test top-1 in percent of a network trained with labels only."""
    with compare.foreign_load() as foreign:
        words = ["train", str(options.cifar), "--recipe=scratch-small", *stem.flags(DEPTH), f"--seed={seed}", RESUME]
        words += [f"--epochs={options.stem_epochs}", f"--data.holdout={HOLDOUT}", f"--out={folder}", *options.fewer]
        return _summary(vitrail_verb(words), foreign)


def pretrained(stem: Stem, seed: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the test top-1 in percent after masked pre-training without labels and fine-tuning with labels.

    Stems that mix patches are masked after the stem, as in the follow-up.
    """
    mixing = ["--objective.mask-after-stem"] if stem.stem in ("levit", "early") else []
    with compare.foreign_load() as foreign:
        words = ["train", str(options.cifar), "--recipe=masked-patch-small", *stem.flags(DEPTH), *mixing, RESUME]
        words += [f"--seed={seed}", f"--epochs={options.masked_epochs}", f"--out={folder / 'masked'}", ONLY_THE_LAST]
        start = vitrail_verb([*words, *options.fewer])
        words = ["finetune", str(options.cifar), f"--from={start['folder']}", FINETUNE, f"--seed={seed}", RESUME]
        words += [f"--epochs={options.stem_epochs}", f"--data.holdout={HOLDOUT}", f"--out={folder / 'tuned'}"]
        words += options.fewer
        return _summary(vitrail_verb(words), foreign)


def _summary(trained: dict[str, Any], foreign: list[float]) -> dict[str, Any]:
    return {"test": 100 * trained["test"]["top1"], "seconds": round(trained["seconds"], 1), "foreign": foreign[0]}


ARMS = {"supervised": supervised, "masked": pretrained}


def measure(cells: Cells, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows of Table 7 with the accuracies so far.

    All networks of one seed are trained before the next seed, so that an interrupted benchmark has complete seeds.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for seed in options.seeds:
        for arm in options.arms:
            for stem in (stem for stem in STEMS if arm in stem.arms):
                key = dict(lesson="stems", arm=arm, stem=stem.name, seed=seed, epochs=options.stem_epochs)
                key |= dict(masked_epochs=options.masked_epochs) if arm == "masked" else {}
                run = ARMS[arm]
                result = cells.train(lambda at, run=run, stem=stem, seed=seed: run(stem, seed, at, options), **key)  # type: ignore[misc]
                if result:
                    found.setdefault((arm, stem.name), []).append(result["test"])
    rows = []
    for stem in STEMS:
        config = paper_network(stem)
        row: dict[str, Any] = {"stem": stem.name, "parameters": parameters(config), "gflops": gflops(config)}
        for arm in ARMS:
            if values := found.get((arm, stem.name)):
                spread = round(statistics.stdev(values), 2) if len(values) > 1 else None
                row[arm] = {"mean": round(statistics.fmean(values), 2), "deviation": spread, "seeds": values}
        rows.append(row)
    check_paper(rows)
    return rows


def check_paper(rows: list[dict[str, Any]]) -> None:
    """Raise SystemExit if the GFLOPs of B/16 with hMLP are not the published ones."""
    by_name = {row["stem"]: row for row in rows}
    found, linear = by_name["hMLP, BN"]["gflops"], by_name["linear"]["gflops"]
    if round(found, 2) != PAPER_GFLOPS or not 0 < found / linear - 1 < PAPER_EXTRA:
        raise SystemExit(f"B/16 with hMLP takes {found:.3f} GFLOPs, {found / linear - 1:.1%} more than linear")


def show(rows: list[dict[str, Any]]) -> None:
    """Print one table."""
    table = Table(title="Stems (follow-up, Table 7)", title_justify="left")
    for column in ("", "B/16, M", "GFLOPs", "supervised", "+-", "after masking", "+-"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        cells = []
        for arm in ARMS:
            one = row.get(arm, {})
            cells += [f"{one['mean']:.1f}" if one else "", f"{one['deviation']:.1f}" if one.get("deviation") else ""]
        table.add_row(row["stem"], f"{row['parameters'] / 1e6:.1f}", f"{row['gflops']:.2f}", *cells)
    Console(width=120).print(table)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw Figure 6: accuracy after masked pre-training over supervised accuracy.

    If no masked run is finished, the figure shows supervised accuracy over cost instead.
    """
    both = all(arm in row for stem, row in zip(STEMS, rows, strict=True) for arm in stem.arms)
    figure = Figure(figsize=(5.6, 4.2), layout="constrained")
    axes = figure.subplots()
    for row, colour in zip(rows, COLOURS, strict=False):
        if "supervised" not in row or (both and "masked" not in row):
            continue
        one, other = row["supervised"], row.get("masked", {})
        bar = dict(fmt="o", color=colour, capsize=3, label=row["stem"])
        if both:
            errors = dict(xerr=one["deviation"] or 0, yerr=other["deviation"] or 0)
            axes.errorbar(one["mean"], other["mean"], **errors, **bar)
        else:
            axes.errorbar(row["gflops"], one["mean"], yerr=one["deviation"] or 0, **bar)
    axes.set_xlabel("supervised top-1, %" if both else "GFLOPs of B/16 with the stem")
    axes.set_ylabel("top-1 after masked pre-training, %" if both else "supervised top-1, %")
    axes.set_title("Stems of a small network on CIFAR-100 (bars: over seeds)", fontsize="medium")
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=144)
