"""The tables and figures of the ViT paper's main text. Each function returns the study of one of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from vitrail.costs.count import training_flops
from vitrail.costs.published import published_table
from vitrail.durations import Examples, Percent, Steps
from vitrail.objective.settings import Tokenizer
from vitrail.recipes.registry import recipe
from vitrail.studies.claims import MEAN, Claim, Column, Scores, column_lead, extremes, gain, lead
from vitrail.studies.grids.three_things import ALL, PARTS, trained_with_labels, tuned_part
from vitrail.studies.laptop import (
    LABELS,
    LARGER_SIDE,
    at_laptop_scale,
    at_rates,
    fine_tuning,
    pre_training,
    transferred,
    tuned_on,
)
from vitrail.studies.measure import config_of
from vitrail.studies.published_runs import (
    IMAGENET,
    IMAGENET_21K,
    JFT,
    PRINTED,
    REAL,
    TITLES,
    by_set,
    fine_tuned,
    on_each_set,
    pre_trained,
    vtab,
)
from vitrail.studies.study import UNITS, Cell, LaptopData, Stage, Study, Trained, best_of, with_data
from vitrail.training.run import Run
from vitrail.transfer.grid import changed


def _pre_trained_on(share: float, network: str, given: LaptopData) -> Stage:
    """Return the pre-training on a share of the images, for 160,000 images seen whatever the share."""
    subset = None if share == 1 else round(share * given.images)
    return Stage(with_data(replace(pre_training(network), duration=Examples(160_000)), subset=subset))


def table2() -> Study:
    """Table 2: pre-trained networks on many data sets, and what pre-training cost (section 4.2).

    At laptop scale: a ViT pre-trained on all images and on few, a smaller ViT, and a ResNet of equal cost. The ResNet
    stands for BiT-L, which cost 9,900 core-days to pre-train where ViT-L/16 cost 680.
    """
    more, less = "ViT-64/4, all images", "ViT-64/4, 1/32 of the images"
    small, resnet = "ViT-64/8, all images", "R50x1/2, all images"
    networks = {more: ("ViT-64/4", 1.0), less: ("ViT-64/4", 1 / 32), small: ("ViT-64/8", 1.0), resnet: ("R50x1/2", 1.0)}
    huge, large, fewer, bit = "ViT-H/14 (JFT)", "ViT-L/16 (JFT)", "ViT-L/16 (I21k)", "BiT-L (ResNet152x4)"
    # row -> its recipe, its data set, and the recipe that fine-tunes it on ImageNet
    recipes = {
        huge: ("paper/vit-h14-jft", JFT, "paper/finetune-imagenet-518"),
        large: ("paper/vit-l16-jft", JFT, "paper/finetune-imagenet-512"),
        fewer: ("paper/vit-l16-imagenet21k", IMAGENET_21K, "paper/finetune-imagenet-512"),
        bit: ("bit/r152x4-jft", JFT, "paper/finetune-imagenet-bit"),
    }

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield a linear classifier for each data set on the features of four networks."""
        for (row, (network, share)), on in product(networks.items(), given.sets):
            tried = at_rates(_pre_trained_on(share, network, given))
            yield best_of(row, LABELS.get(on, on), tried, "", "linear", on)

    def paper() -> Iterator[Cell]:
        """Yield the networks of Table 2, on five data sets and the 19 tasks of VTAB. Noisy Student is only quoted."""
        for row, (name, data, imagenet) in recipes.items():
            start = pre_trained(name, data)
            for title, metric, tried in on_each_set(start, imagenet):
                yield best_of(row, title, tried, UNITS["top-1"], metric)
            yield from vtab(row, start)

    def first_number(text: str) -> float:
        """Return the mean of "88.55±0.04", the first number of "88.4/88.5", and 2500 for "2.5k"."""
        first = text.split("±")[0].split("/")[0]
        return 1000 * float(first[:-1]) if first.endswith("k") else float(first)

    printed = published_table("table2_state_of_the_art")
    days = {"TPUv3-core-days": "TPUv3-core-days of pre-training"}
    return Study(
        name="table2", where="Table 2", title="pre-trained networks on several data sets", axis="data set",
        laptop=laptop, paper=paper,
        claims=(
            Claim("More images to pre-train on are better, on average over the data sets.",
                  lambda s: lead(s, more, less), paper={more: large, less: fewer}),
            Claim("The larger ViT is better than the smaller one.",
                  lambda s: lead(s, more, small), paper={more: huge, small: large}),
            Claim("The ViT is better than the ResNet that costs as much.",
                  lambda s: lead(s, more, resnet), paper={more: large, resnet: bit}),
        ),
        published={
            (days.get(title, UNITS["top-1"]), network, title): first_number(value)
            for title, values in printed["rows"].items()
            for network, value in zip(printed["columns"], values, strict=True)
            if value is not None
        },
        quoted=(bit, "Noisy Student (EfficientNet-L2)"),
    )  # fmt: skip


def table5() -> Study:
    """Table 5 and Figure 3: accuracy after fine-tuning, by network and pre-training set (section 4.3).

    At laptop scale the pre-training sets are shares of one set, and each network sees the same number of images. In the
    paper all sets are trained to convergence, with regularisation tuned for the smaller ones. The larger and the
    smaller network of the claims have the same patches and differ in width: in Table 5, L falls behind B, but /16 never
    behind /32.
    """
    large, small, resnet = "ViT-128/8", "ViT-64/8", "R50x1/2"
    sets = {"ImageNet": IMAGENET, "ImageNet-21k": IMAGENET_21K, "JFT-300M": JFT}
    # row -> the recipes for these sets; the ResNets are the shaded band of Figure 3
    recipes = {
        "ViT-B/16": ("paper/vit-b16-imagenet", "paper/vit-b16-imagenet21k", "paper/vit-b16-jft"),
        "ViT-B/32": ("paper/vit-b32-imagenet", "paper/vit-b32-imagenet21k", "paper/vit-b32-jft"),
        "ViT-L/16": ("paper/vit-l16-imagenet", "paper/vit-l16-imagenet21k", "paper/vit-l16-jft"),
        "ViT-L/32": ("paper/vit-l32-imagenet", "paper/vit-l32-imagenet21k", "paper/vit-l32-jft"),
        "ViT-H/14": (None, "paper/vit-h14-imagenet21k", "paper/vit-h14-jft"),
        "R50x1 (BiT)": ("bit/r50x1-imagenet", "bit/r50x1-imagenet21k", "paper/r50x1-jft"),
        "R152x2 (BiT)": ("bit/r152x2-imagenet", "bit/r152x2-imagenet21k", "paper/r152x2-jft"),
    }

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield four networks pre-trained on three shares of the images, and fine-tuned on each data set.

        ViT-128/8 and ViT-64/4 cost as much as the ResNet.
        """
        for share, network in product((1.0, 3 / 8, 1 / 10), (large, small, resnet, "ViT-64/4")):
            start = _pre_trained_on(share, network, given)
            yield from transferred(network, round(share * given.images), [start], given)

    def paper() -> Iterator[Cell]:
        """Yield the networks of Table 5, and two ResNets, on three pre-training sets."""
        for network, names in recipes.items():
            for (title, data), name in zip(sets.items(), names, strict=True):
                if name is not None:
                    yield from by_set(network, title, pre_trained(name, data))

    printed = published_table("table5_pretraining_size")
    other = tuned_on("down")
    # the columns of the paper are its pre-training sets in this order
    names: dict[Column, Column] = {
        large: "ViT-L/16", small: "ViT-B/16", resnet: "R152x2 (BiT)", other: "fine-tuned on ImageNet",
        1.0: "ImageNet", 2.0: "ImageNet-21k", 3.0: "JFT-300M",
    }  # fmt: skip
    return Study(
        name="table5", where="Table 5 and Figure 3", title="accuracy after fine-tuning by network and pre-training set",
        axis="images to pre-train on", laptop=laptop, paper=paper, log=True,
        claims=(
            Claim("More images to pre-train on make the large network better on other classes.",
                  lambda s: column_lead(s, extremes(s, large)[1], extremes(s, large)[0], large), other, names),
            Claim("The larger network gains more than the smaller one from more images to pre-train on.",
                  lambda s: gain(s, large, small, *extremes(s, large)), other, names),
            Claim("With few images to pre-train on, the ResNet is better than the ViT.",
                  lambda s: lead(s, resnet, large, extremes(s, large)[0]), other, names),
            Claim("With many images to pre-train on, the ViT is better than the ResNet.",
                  lambda s: lead(s, large, resnet, extremes(s, large)[1]), other, names),
        ),
        published={
            (f"fine-tuned on {PRINTED.get(on, on)}", network, data): value
            for data, by_data in printed["rows"].items()
            for on, values in by_data.items()
            for network, value in zip(printed["models"], values, strict=True)
            if value is not None
        },
    )  # fmt: skip


def figure4() -> Study:
    """Figure 4: few-shot accuracy by the number of images to pre-train on (section 4.3).

    The paper takes subsets of JFT-300M with the same hyper-parameters for all of them, without more regularisation, and
    stops early: it reports the best validation accuracy reached. So here.
    """
    large, resnet, small = "ViT-64/4", "R50x1/2", "ViT-64/8"
    # row -> its recipe and its network; the rate of b/32 is not printed, it is that of B/32
    recipes = {
        "ViT-b/32": ("paper/vit-b32-jft", "b/32"),
        "ViT-B/32": ("paper/vit-b32-jft", "B/32"),
        "ViT-L/32": ("paper/vit-l32-jft", "L/32"),
        "ViT-L/16": ("paper/vit-l16-jft-7ep", "L/16"),
        "ResNet50x1 (BiT)": ("paper/r50x1-jft", "R50x1"),
        "ResNet152x2 (BiT)": ("paper/r152x2-jft", "R152x2"),
    }

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield three networks on four subsets, with the same number of steps for each."""
        for share, network in product((1.0, 1 / 2, 1 / 8, 1 / 32), (large, resnet, small)):
            count = max(round(share * given.images), 1)
            run = replace(pre_training(network), duration=Steps(900), evaluate_every=Percent(10))
            yield Cell(network, count, Stage(with_data(run, subset=None if share == 1 else count)), best=True)

    def paper() -> Iterator[Cell]:
        """Yield six networks on four subsets of JFT-300M, 7 epochs of each."""
        counts = (9_000_000, 30_000_000, 90_000_000, 303_000_000)
        for (row, (name, model)), count in product(recipes.items(), counts):
            run = replace(pre_trained(name, JFT).run, model=model)
            yield Cell(row, count, Stage(with_data(run, subset=None if count == counts[-1] else count)), best=True)

    names = {large: "ViT-B/32", resnet: "ResNet50x1 (BiT)"}  # networks of equal cost
    return Study(
        name="figure4", where="Figure 4", title="few-shot accuracy by the number of images to pre-train on",
        axis="images to pre-train on", laptop=laptop, paper=paper, log=True,
        claims=(
            Claim("ResNets are better than ViTs with few images to pre-train on.",
                  lambda s: lead(s, resnet, large, extremes(s, large)[0]), paper=names),
            Claim("ViTs gain more than ResNets from more images to pre-train on.",
                  lambda s: gain(s, large, resnet, *extremes(s, large)), paper=names),
        ),
    )  # fmt: skip


def table6() -> Study:
    """Table 6 and Figure 5: accuracy after fine-tuning over the compute of pre-training (section 4.4, appendix C)."""
    vit, resnet, hybrid = "ViT", "ResNet (BiT)", "hybrid"
    # family -> network -> its changes; the hybrids have a convolutional stem
    networks: dict[str, Mapping[str, dict[str, Any]]] = {
        vit: {"ViT-64/8": {}, "ViT-128/8": {}, "ViT-64/4": {}},
        resnet: {"R50x1/4": {}, "R50x1/2": {}},
        hybrid: {"ViT-64/8": {"stem": "early"}, "ViT-64/4": {"stem": "early"}},
    }
    # family -> its recipes, the rows of Table 6 in its order
    recipes = {
        vit: "vit-b32-jft vit-b16-jft vit-l32-jft vit-l16-jft-7ep vit-l16-jft vit-h14-jft",
        resnet: "r50x1-jft r50x2-jft r101x1-jft r152x1-jft r152x2-jft r152x2-jft-14ep r200x3-jft-14ep",
        hybrid: "r50-b32-jft r50-b16-jft r50-l32-jft r50-l16-jft-7ep r50-l16-jft",
    }
    printed = published_table("table6_scaling")
    columns = [PRINTED.get(name, name) for name in printed["columns"]]
    values = [dict(zip(columns, row, strict=True)) for row in printed["rows"]]
    named = [(family, name) for family, names in recipes.items() for name in names.split()]
    rows = [(family, name, row) for (family, name), row in zip(named, values, strict=True)]

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield 14 networks of three families by the teraFLOPs of their pre-training, fine-tuned on each data set."""
        for family in networks:
            for (network, changes), epochs in product(networks[family].items(), (1, 3)):
                start = Stage(pre_training(network, epochs, **changes))
                flops = training_flops(config_of(start)) * epochs * given.images
                yield from transferred(family, float(f"{flops / 1e12:.3g}"), [start], given)

    def paper() -> Iterator[Cell]:
        """Yield the 18 networks of Table 6 by the exaFLOPs that it prints, fine-tuned on five data sets."""
        for family, name, row in rows:
            yield from by_set(family, float(row["exaFLOPs"]), pre_trained(f"paper/{name}", JFT))

    return Study(
        name="table6", where="Table 6 and Figure 5", title="accuracy after fine-tuning by the compute of pre-training",
        axis="teraFLOPs of pre-training (the paper: exaFLOPs)", laptop=laptop, paper=paper, log=True, mean=True,
        claims=(
            Claim("ViTs are better than ResNets at equal compute.", lambda s: _lead_at_equal_compute(s, vit, resnet),
                  MEAN),
            Claim("Hybrids are ahead of ViTs at small budgets.",
                  lambda s: _lead_at_equal_compute(s, hybrid, vit, smallest=4), MEAN),
        ),
        published={
            (f"fine-tuned on {title}", family, float(row["exaFLOPs"])): row[title]
            for family, _, row in rows
            for title in (*TITLES.values(), REAL)
        },
    )  # fmt: skip


def _lead_at_equal_compute(scores: Scores, one: str, other: str, smallest: int = 9) -> list[float]:
    """Return the mean lead of one family over another at nine budgets that both have, or at the smallest of them.

    A family is as good as the line through its networks that are better, on average over seeds, than all cheaper ones.
    """

    def line(family: str) -> tuple[list[float], np.ndarray]:
        """Return compute (log2) and accuracy [networks, seeds] of the networks on a family's line."""
        points = sorted((float(at), values) for (row, at), values in scores.items() if row == family)
        means = [float(np.mean(values)) for _, values in points]
        kept = [point for number, point in enumerate(points) if means[number] >= max(means[: number + 1])]
        return [float(np.log2(at)) for at, _ in kept], np.array([values for _, values in kept])

    (x, ours), (u, theirs) = line(one), line(other)
    most = min(max(float(np.log2(float(at))) for row, at in scores if row == family) for family in (one, other))
    budgets = np.linspace(max(x[0], u[0]), most, 9)[:smallest]
    seeds = range(ours.shape[1])
    return [float(np.mean(np.interp(budgets, x, ours[:, i]) - np.interp(budgets, u, theirs[:, i]))) for i in seeds]


def self_supervision() -> Study:
    """Section 4.6 and appendix B.1.2: masked patch prediction, MAE, BEiT and DINO beside labels and random weights.

    All methods train the same network (BEiT with relative positions, as it is defined) for the same number of images.
    The features are then measured on classes that no network has seen, and the network is fine-tuned with labels.
    """
    nothing, with_labels, epochs = "random weights", "labels", 4
    colour, pixels = "masked patches: colour", "masked patches: pixels"
    masked: dict[str, dict[str, Any]] = {
        colour: {},
        "masked patches: 4x4 colours": {"objective.target": "small"},
        pixels: {"objective.target": "pixels"},
        "masked patches: colour, 15 %": {"objective.corrupt": 0.15},
    }

    def small(name: str, epochs: float = epochs) -> Run:
        """Return a recipe for small images."""
        run = recipe(name)
        vit = run.vit if isinstance(run.objective, Tokenizer) else replace(run.vit, width=64, heads=2, mlp_dim=256)
        return at_laptop_scale(run, epochs, vit=vit)

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield nine ways to pre-train, each measured by its features and after fine-tuning with labels."""
        labels = pre_training("ViT-64/4", epochs, pool="gap")
        untrained = replace(labels, duration=Steps(1), optim=replace(labels.optim, lr=1e-12, weight_decay=0.0))
        methods = {
            nothing: Stage(untrained),
            with_labels: Stage(labels),
            **{row: Stage(changed(small("masked-patch-small"), changes)) for row, changes in masked.items()},
            "MAE": Stage(small("mae-small")),
            "BEiT": Stage(small("beit-small"), tokenizer=Stage(small("tokenizer-small", 1))),
            "DINO": Stage(small("dino-small")),
        }
        metrics: tuple[Trained, ...] = ("5-shot", "20-NN", "linear")
        for method, stage in methods.items():
            yield from (Cell(method, f"{epochs} epochs", stage, metric=metric) for metric in metrics)
            yield best_of(method, f"{epochs} epochs", [fine_tuning(stage, "down")], tuned_on("down"))

    def paper() -> Iterator[Cell]:
        """Yield B/16 pre-trained by each method: fine-tuned on ImageNet at each rate of Table 4, and by 5 shots."""
        methods = {
            "nothing": pre_trained("paper/vit-b16-imagenet", IMAGENET),
            with_labels: pre_trained("paper/vit-b16-jft", JFT),
            **{row: Stage(changed(pre_trained("masked-patch", JFT).run, changes)) for row, changes in masked.items()},
            "MAE": pre_trained("mae", IMAGENET),
            "BEiT": replace(pre_trained("beit", IMAGENET), tokenizer=pre_trained("tokenizer", IMAGENET)),
            "DINO": pre_trained("dino", IMAGENET),
        }
        for method, stage in methods.items():
            yield best_of(method, "ImageNet", fine_tuned(stage, IMAGENET))
            yield Cell(method, "ImageNet", stage)

    printed = published_table("self_supervision")  # section 4.6 prints one number and two differences
    numbers = {
        "nothing": printed["imagenet_top1"] - printed["gain_over_scratch"],
        colour: printed["imagenet_top1"],
        with_labels: printed["imagenet_top1"] + printed["gap_to_supervised"],
    }
    tuned = tuned_on("down")
    names = {nothing: "nothing", tuned: UNITS["top-1"]}
    return Study(
        name="self-supervision", where="Section 4.6", axis="length of pre-training",
        title="pre-training without labels, beside labels and random weights", laptop=laptop, paper=paper,
        claims=(
            Claim("Masked patch prediction is better than training from scratch.",
                  lambda s: lead(s, colour, nothing), tuned, names),
            Claim("Pre-training with labels is better than masked patch prediction.",
                  lambda s: lead(s, with_labels, colour), tuned, names),
            Claim("Predicting pixels is worse than predicting colours.",
                  lambda s: lead(s, colour, pixels), UNITS["5-shot"]),
        ),
        published={(UNITS["top-1"], method, "ImageNet"): number for method, number in numbers.items()},
    )  # fmt: skip


def protocols() -> Study:
    """Section 4.1, metrics: one network measured by every protocol, from few images to fine-tuning everything."""
    accuracy, linear = "top-1, %", "linear classifier"
    attention, everything = "attention fine-tuned", f"{ALL} fine-tuned"
    probes: dict[str, Trained] = {"5-shot": "5-shot", "20 nearest neighbours": "20-NN", linear: "linear"}
    tuned = {attention: "attention", everything: ALL}

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield one network measured on the classes that it has not seen; three-table6 starts from it, too.

        Fine-tuning takes about ten epochs. With the 200 steps of three-table6 a linear classifier is ahead of it.
        """
        at = "ViT-64/8"
        yield from (
            Cell(row, at, trained_with_labels(), metric=metric, what=accuracy) for row, metric in probes.items()
        )
        for row, name in tuned.items():
            yield replace(tuned_part(name, at, "down", LARGER_SIDE, duration=Steps(1500)), row=row, what=accuracy)

    def paper() -> Iterator[Cell]:
        """Yield B/16 from ImageNet-21k, measured on ImageNet."""
        at, network = "ViT-B/16", pre_trained("paper/vit-b16-imagenet21k", IMAGENET_21K)
        yield from (Cell(row, at, network, metric=metric, what=accuracy) for row, metric in probes.items())
        for row, name in tuned.items():
            tried = fine_tuned(network, IMAGENET)
            yield best_of(row, at, [replace(one, run=replace(one.run, tune=PARTS[name])) for one in tried], accuracy)

    return Study(
        name="protocols", where="Section 4.1", title="one network measured by every protocol", axis="network",
        laptop=laptop, paper=paper,
        claims=(
            Claim("Fine-tuning everything is better than a linear classifier.", lambda s: lead(s, everything, linear)),
            Claim("Fine-tuning attention is better than a linear classifier.", lambda s: lead(s, attention, linear)),
        ),
    )  # fmt: skip
