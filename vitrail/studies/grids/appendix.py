"""The tables and figures of the ViT paper's appendix D. Each function returns the study of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import permutations, product
from math import log2
from typing import Any, Literal

from vitrail.costs.count import macs
from vitrail.costs.published import published_table
from vitrail.durations import Epochs
from vitrail.model.limits import Pool, PositionKind, PositionPlace
from vitrail.studies.claims import MEAN, Claim, Column, Parts, Scores, alike, column_lead, lead, mean_of, minus
from vitrail.studies.laptop import pre_training, transferred
from vitrail.studies.measure import config_of
from vitrail.studies.published_runs import JFT, PRINTED, by_set, pre_trained
from vitrail.studies.study import UNITS, Cell, LaptopData, Stage, Study
from vitrail.training.run import Optim, Run


def table7() -> Study:
    """Table 7: ResNets pre-trained with Adam and with SGD, then fine-tuned (appendix D.1)."""
    adam, sgd = "Adam", "SGD"
    # column -> optimiser, weight decay, rates to try
    optimisers: dict[str, tuple[Literal["adamw", "sgd"], float, tuple[float, ...]]] = {
        adam: ("adamw", 0.05, (1e-3, 3e-3)),
        sgd: ("sgd", 1e-4, (0.03, 0.1, 0.3)),
    }
    recipes = {
        "ResNet50x1": {adam: "paper/r50x1-jft", sgd: "bit/r50x1-jft-7ep"},
        "ResNet152x2": {adam: "paper/r152x2-jft", sgd: "bit/r152x2-jft-7ep"},
    }
    networks = {"R50x1/4": "ResNet50x1", "R50x1/2": "ResNet152x2"}  # row at laptop scale -> row of the paper

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield two ResNets with both optimisers, each at the best of several rates, fine-tuned on each data set."""
        for network, (title, (name, decay, rates)) in product(networks, optimisers.items()):
            run = pre_training(network, 3)
            starts = [Stage(replace(run, optim=Optim(name=name, lr=rate, weight_decay=decay))) for rate in rates]
            yield from transferred(network, title, starts, given)

    def paper() -> Iterator[Cell]:
        """Yield both ResNets with both optimisers on JFT-300M, 7 epochs."""
        for network, title in product(recipes, optimisers):
            yield from by_set(network, title, pre_trained(recipes[network][title], JFT))

    return Study(
        name="table7", where="Table 7", title="ResNets pre-trained with Adam and with SGD",
        axis="optimiser of pre-training", laptop=laptop, paper=paper, mean=True,
        claims=(
            Claim("Pre-training with Adam is better than with SGD, on average over the data sets.",
                  lambda s: column_lead(s, adam, sgd, *networks), MEAN, networks),
        ),
        published={
            (MEAN if on == "Average" else f"fine-tuned on {PRINTED.get(on, on)}", network, title): value
            for on, *values in published_table("table7_adam_vs_sgd")["rows"]
            for (network, title), value in zip(product(recipes, optimisers), values, strict=True)
        },
    )  # fmt: skip


def table8() -> Study:
    """Table 8: kinds of position embeddings, and where they are added (appendix D.4)."""
    none, at_input = "no positions", "at the input"
    kinds: dict[str, PositionKind] = {none: "none", "1-D": "1d", "2-D": "2d", "relative": "relative"}
    places: dict[str, PositionPlace] = {
        at_input: "input",
        "at every layer": "every",
        "at every layer, shared": "shared",
    }

    def cells(base: Run) -> Iterator[Cell]:
        """Yield a network with each kind in each place. The paper has relative positions, and none, in one place."""
        for place, kind in product(places, kinds):
            if place == at_input or kind in ("1-D", "2-D"):
                vit = replace(base.vit, positions=kinds[kind], place=places[place])
                yield Cell(kind, place, Stage(replace(base, vit=vit)))

    def needed(scores: Scores) -> list[float]:
        """Return the mean advantage of having positions."""
        return mean_of([minus(scores, place, (none, at_input)) for place in scores if place[0] != none])

    def nearer(scores: Scores) -> Parts:
        """Return by how much the advantage of having positions exceeds each lead of one kind over another."""
        pairs = permutations([(kind, at_input) for kind in kinds if kind != none], 2)
        leads = (minus(scores, one, other) for one, other in pairs)
        return Parts([a - b for a, b in zip(needed(scores), lead, strict=True)] for lead in leads)

    return Study(
        name="table8", where="Table 8", title="kinds of position embeddings, and where they are added",
        axis="where positions are added", laptop=lambda given: cells(pre_training("ViT-64/4", 4)),
        paper=lambda: cells(pre_trained("paper/vit-b16-jft", JFT).run),  # 7 epochs
        claims=(
            Claim("A network without positions is worse than those with positions, on average.", needed),
            Claim("The kinds of positions differ less from each other than from none.", nearer, matters=0),
        ),
        published={
            (UNITS["5-shot"], none if kind == "none" else kind, place): 100 * value
            for kind, *values in published_table("table8_position_embeddings")["rows"]
            for place, value in zip(places, values, strict=True)
            if value is not None
        },
    )  # fmt: skip


def figure8() -> Study:
    """Figure 8: one dimension of the network scaled at a time, from a base of the same shape (appendix D.2)."""
    depth, width, mlp, patch, every = "depth", "width", "MLP width", "patch size", "all"

    def shape(depth: int, width: int, patch: int, head: int) -> dict[str, Any]:
        """Return the settings of a network; its MLPs are twice as wide as it is."""
        return {"depth": depth, "width": width, "heads": width // head, "mlp_dim": 2 * width, "patch": patch}

    def cells(base: Run, scaled: Mapping[str, list[dict[str, Any]]]) -> Iterator[Cell]:
        """Yield the base, on every line of the figure, and the networks around it, by their compute relative to it."""
        unit = macs(config_of(Stage(base)))
        yield from (Cell(row, 1.0, Stage(base)) for row in scaled)
        for row, all_changes in scaled.items():
            for changes in all_changes:
                stage = Stage(replace(base, vit=replace(base.vit, **changes)))
                yield Cell(row, float(f"{macs(config_of(stage)) / unit:.3g}"), stage)

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield 15 networks around one of 3 blocks of width 128."""
        return cells(
            pre_training("ViT-128/8", 3, **shape(3, 128, 8, head=32)),
            {
                depth: [{"depth": 1}, {"depth": 6}, {"depth": 12}],
                width: [{"width": 64, "heads": 2}, {"width": 192, "heads": 6}, {"width": 256, "heads": 8}],
                mlp: [{"mlp_dim": 128}, {"mlp_dim": 512}, {"mlp_dim": 1024}],
                patch: [{"patch": 16}, {"patch": 4}],
                every: [shape(1, 64, 16, head=32), shape(4, 160, 8, head=32), shape(4, 160, 4, head=32)],
            },
        )

    def paper() -> Iterator[Cell]:
        """Yield the networks around one of 8 blocks of width 1024 on JFT-300M, 7 epochs.

        The paper prints the base alone; the values around it are the powers of two near those of its figure.
        """
        base = pre_trained("paper/vit-b32-jft", JFT).run
        return cells(
            replace(base, vit=replace(base.vit, **shape(8, 1024, 32, head=64))),
            {
                depth: [{"depth": blocks} for blocks in (4, 12, 16, 32, 64)],
                width: [{"width": width, "heads": width // 64} for width in (256, 512, 2048)],
                mlp: [{"mlp_dim": width} for width in (512, 1024, 4096, 8192)],
                patch: [{"patch": side} for side in (56, 16, 8)],
                every: [shape(4, 512, 56, head=64), shape(16, 1536, 16, head=64)],
            },
        )

    def slope(scores: Scores, name: str) -> list[float]:
        """Return the points gained per doubling of the compute, from the cheapest to the most expensive network."""
        places = sorted(float(at) for row, at in scores if row == name)
        few, many = scores[name, places[0]], scores[name, places[-1]]
        return [(b - a) / log2(places[-1] / places[0]) for a, b in zip(few, many, strict=True)]

    def over_width(scores: Scores, name: str) -> list[float]:
        return [a - b for a, b in zip(slope(scores, name), slope(scores, width), strict=True)]

    return Study(
        name="figure8", where="Figure 8", title="depth, width, MLP width and patch size scaled one at a time",
        axis="compute relative to the base network", laptop=laptop, paper=paper, log=True,
        claims=(
            Claim("More depth gains more than more width, for the same compute.",
                  lambda s: over_width(s, depth), matters=0.1),
            Claim("Smaller patches gain more than more width, for the same compute.",
                  lambda s: over_width(s, patch), matters=0.1),
            Claim("Scaling all dimensions gains more than more width, for the same compute.",
                  lambda s: over_width(s, every), matters=0.1),
        ),
    )  # fmt: skip


def figure9() -> Study:
    """Figure 9: class token against average pooling, each at several learning rates (appendix D.3)."""
    token, average = "class token", "average pooling"
    pools: dict[str, Pool] = {token: "cls", average: "gap", "attention pooling": "map"}

    def cell(base: Run, row: str, rate: float) -> Cell:
        run = replace(base, vit=replace(base.vit, pool=pools[row]), optim=replace(base.optim, lr=rate))
        return Cell(row, rate, Stage(run))

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield a network with each way of pooling, at each rate."""
        base = pre_training("ViT-64/8", 6)
        return (cell(base, row, rate) for rate in (3e-4, 1e-3, 3e-3) for row in pools)

    def paper() -> Iterator[Cell]:
        """Yield B/16 on JFT-300M, 7 epochs: the class token at 8e-4, average pooling at 8e-4 and 3e-4."""
        base = pre_trained("paper/vit-b16-jft", JFT).run
        return (cell(base, row, rate) for row, rate in ((token, 8e-4), (average, 8e-4), (average, 3e-4)))

    def best(scores: Scores, row: str) -> Column:
        """Return the rate with the best mean."""
        return max((at for name, at in scores if name == row), key=lambda at: sum(scores[row, at]))

    def as_good(scores: Scores) -> Parts:
        """Return by how much average pooling stays within a point of the class token, each at its best rate."""
        return alike(minus(scores, (token, best(scores, token)), (average, best(scores, average))), 1)

    return Study(
        name="figure9", where="Figure 9", title="class token against pooling, at several learning rates",
        axis="learning rate", laptop=laptop, paper=paper, log=True,
        claims=(
            Claim("At the class token's best learning rate, average pooling is worse.",
                  lambda s: lead(s, token, average, best(s, token))),
            Claim("At their own best rates, average pooling is within a point of the class token.", as_good,
                  matters=0),
        ),
    )  # fmt: skip


def figure10() -> Study:
    """Figure 10: similarity of position embeddings that were learned with different settings (appendix D.4)."""

    def cells(row: str, base: Run, epochs: float, rate: float, decay: float) -> Iterator[Cell]:
        """Yield a network at half the rate and a tenth of the decay, with these settings, and trained twice as long."""
        for longer, faster, stronger in ((1, 0.5, 0.1), (1, 1, 1), (2, 1, 1)):  # the panels of the paper
            length, optim = longer * epochs, replace(base.optim, lr=faster * rate, weight_decay=stronger * decay)
            at = f"{length:g} epochs, rate {optim.lr:g}, decay {optim.weight_decay:g}"
            yield Cell(row, at, Stage(replace(base, optim=optim, duration=Epochs(length))))

    return Study(
        name="figure10", where="Figure 10", title="similarity of position embeddings learned with different settings",
        axis="setting", tiles=True,
        laptop=lambda given: cells("ViT-64/4", pre_training("ViT-64/4"), 4, 1e-3, 0.1),
        paper=lambda: cells("ViT-L/16", pre_trained("paper/vit-l16-jft", JFT).run, 7, 4e-4, 0.1),
    )  # fmt: skip


def figure13() -> Study:
    """Figure 13: axial attention against ViT and ResNet, over compute and over measured speed (appendix D.6)."""
    vit, axial, resnet, axial_resnet = "ViT", "Axial-ViT", "ResNet50", "AxialResNet50"

    def cells(plain: Mapping[str, Run], base: Run, at: str, axial_at: str) -> Iterator[Cell]:
        """Yield the accuracy of each network, its compute and its speed.

        Axial networks have no class token; at laptop scale all ViTs have average pooling, and differ in their attention
        only.
        """
        runs = {}
        for column, run in plain.items():
            runs[vit, column] = run
            runs[axial, column] = replace(run, model=f"axial-{run.model}", vit=replace(run.vit, pool=None))
        runs |= {(resnet, at): base, (axial_resnet, axial_at): replace(base, model="axial-R50")}
        for metric in ("5-shot", "MACs", "images/s"):
            yield from (Cell(row, column, Stage(run), metric=metric) for (row, column), run in runs.items())

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield plain and axial networks with patches of 4 and 8 pixels, and both ResNets at half their width."""
        plain = {f"patch {patch}": pre_training(f"ViT-64/{patch}", 3, pool="gap") for patch in (4, 8)}
        return cells(plain, pre_training("R50x1/2", 3), "R50x1/2", "axial-R50/2")

    def paper() -> Iterator[Cell]:
        """Yield B/32, B/16, their axial forms, R50x1 and AxialResNet50 on JFT-300M, 7 epochs."""
        plain = {name: pre_trained(f"paper/vit-b{name[2:]}-jft", JFT).run for name in ("B/32", "B/16")}
        return cells(plain, pre_trained("paper/r50x1-jft", JFT).run, "R50x1", "axial-R50")

    names = {"patch 4": "B/16", "patch 8": "B/32", "R50x1/2": "R50x1", "axial-R50/2": "axial-R50"}
    return Study(
        name="figure13", where="Figure 13", title="axial attention against ViT and ResNet", axis="network",
        laptop=laptop, paper=paper, over=("MACs", "images/s"),
        claims=(
            Claim("Axial-ViT is better than ViT with the same patches.",
                  lambda s: lead(s, axial, vit, "patch 4", "patch 8"), paper=names),
            Claim("Axial-ViT costs more compute than ViT with the same patches.",
                  lambda s: lead(s, axial, vit, "patch 4", "patch 8"), UNITS["MACs"], names, exact=True),
            Claim("AxialResNet50 is slower than ResNet50.",
                  lambda s: minus(s, (resnet, "R50x1/2"), (axial_resnet, "axial-R50/2")), UNITS["images/s"], names,
                  matters=0),
        ),
    )  # fmt: skip
