"""The tables and figures of the follow-up paper. Each function returns the study of one of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from vitrail.durations import Epochs, Percent, Steps
from vitrail.objective.settings import BEiT, MaskedPatch
from vitrail.recipes.registry import recipe
from vitrail.recipes.three_things import TABLE_1
from vitrail.studies.claims import Claim, Column, Parts, Scores, alike, column_lead, columns, gain, lead, mean_of
from vitrail.studies.laptop import LABELS, LARGER_SIDE, SIDE, at_laptop_scale, fine_tuning, pre_training
from vitrail.studies.published_runs import IMAGENET, pre_trained
from vitrail.studies.study import UNITS, Cell, Counted, LaptopData, MetricName, Stage, Study, best_of, with_data
from vitrail.training.run import Run, Tune

# deep networks: "24x1" is 24 sequential blocks, "12x2" as many blocks in 12 layers of two branches

SEQUENTIAL, PARALLEL = "24x1", "12x2"
EPOCHS = 4
COSTS: tuple[Counted, ...] = ("parameters", "MACs", "memory")


def _of_width(width: int, layer_scale: bool) -> dict[str, Any]:
    """Return the settings of a network of a width, with or without LayerScale."""
    scale = 1e-4 if layer_scale else None
    return {"width": width, "heads": width // 32, "mlp_dim": 4 * width, "layer_scale": scale}


def _deep(shape: str, width: int = 64, layer_scale: bool = False) -> Stage:
    """Return a network of layers x branches with patches of 8 pixels, trained and tested with labels."""
    run = pre_training("ViT-64/8", EPOCHS, tested=True, depth=None, **_of_width(width, layer_scale))
    return Stage(replace(run, model=f"Ti{shape}/8"))


def _on_imagenet(network: str, layer_scale: bool = False, epochs: int = 300) -> Stage:
    """Return the follow-up's training of a network such as "S18x2" or, of its Table 1, "b16", on ImageNet."""
    return pre_trained(f"three-things/vit-{network.lower()}-{epochs}{'-ls' * layer_scale}", IMAGENET)


def _tested(row: str, at: Column, stage: Stage, costs: tuple[Counted, ...] = ()) -> Iterator[Cell]:
    """Yield the accuracy on the test images of a network's own classes, and what it costs."""
    metrics: tuple[MetricName, ...] = ("top-1", *costs)
    return (Cell(row, at, stage, metric=metric) for metric in metrics)


def table1() -> Study:
    """Table 1: baselines of several widths, also longer and with LayerScale (section 2.3)."""
    widths = {"width 32": 32, "width 64": 64, "width 128": 128}
    costs: tuple[Counted, ...] = (*COSTS, "images/s")

    def at(epochs: int, layer_scale: bool) -> str:
        return f"{epochs} epochs" + " with LayerScale" * layer_scale

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield three widths, trained for 6 epochs, or for 8 with LayerScale."""
        for (epochs, layer_scale), (row, width) in product(((6, False), (8, True)), widths.items()):
            run = pre_training("ViT-64/8", epochs, tested=True, **_of_width(width, layer_scale))
            yield from _tested(row, at(epochs, layer_scale), Stage(run), () if layer_scale else costs)

    def paper() -> Iterator[Cell]:
        """Yield Ti, S, B and L on ImageNet for 300 epochs, and for 400 with LayerScale."""
        for row, (epochs, layer_scale) in product(TABLE_1, ((300, False), (400, True))):
            stage = _on_imagenet(row.model.replace("/", ""), layer_scale, epochs)
            yield from _tested(row.model, at(epochs, layer_scale), stage, () if layer_scale else costs)

    plain, scaled = at(300, False), at(400, True)
    names = {at(6, False): plain, at(8, True): scaled, "width 32": "Ti/16", "width 64": "S/16", "width 128": "L/16"}
    return Study(
        name="three-table1", where="Follow-up, Table 1", title="baselines of several widths", axis="length of training",
        laptop=laptop, paper=paper,
        claims=(
            Claim("The widest network is better than the narrowest.",
                  lambda s: lead(s, "width 128", "width 32", at(6, False), at(8, True)), paper=names),
            Claim("Longer training with LayerScale is better at every width, on average.",
                  lambda s: column_lead(s, at(8, True), at(6, False), *widths), paper=names),
        ),
        published={
            (UNITS["top-1"], row.model, column): value
            for row in TABLE_1
            for column, value in ((plain, row.top1), (scaled, row.top1_with_layer_scale))
        },
    )  # fmt: skip


def table2() -> Study:
    """Table 2: LayerScale in deep sequential and parallel networks (section 3.3)."""
    without, scaled = "without LayerScale", "with LayerScale"
    columns = {without: False, scaled: True}

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield 24 blocks of width 64 in one and two branches, without and with LayerScale."""
        for (at, layer_scale), shape in product(columns.items(), (SEQUENTIAL, PARALLEL)):
            yield from _tested(shape, at, _deep(shape, layer_scale=layer_scale))

    def paper() -> Iterator[Cell]:
        """Yield S and B with 36 blocks in one and two branches, without and with LayerScale."""
        for name, (at, layer_scale) in product(("S36x1", "S18x2", "B36x1", "B18x2"), columns.items()):
            yield from _tested(name, at, _on_imagenet(name, layer_scale))

    names = {SEQUENTIAL: "B36x1", PARALLEL: "B18x2"}
    return Study(
        name="three-table2", where="Follow-up, Table 2", axis="LayerScale",
        title="LayerScale in deep networks, in sequence (24x1) and in two branches (12x2)", laptop=laptop, paper=paper,
        claims=(
            Claim("LayerScale helps deep networks.",
                  lambda s: column_lead(s, scaled, without, SEQUENTIAL, PARALLEL), paper=names),
            Claim("LayerScale shrinks the lead of two branches.",
                  lambda s: gain(s, PARALLEL, SEQUENTIAL, scaled, without), paper=names),
        ),
    )  # fmt: skip


def table3() -> Study:
    """Table 3: more blocks against more width, at equal parameters (section 3.3)."""
    at, scaled = f"{EPOCHS} epochs", f"{EPOCHS} epochs with LayerScale"
    narrow, parallel, wide = "width 64, 24x1", "width 64, 12x2", "width 128, 6x1"
    networks = {narrow: (SEQUENTIAL, 64), parallel: (PARALLEL, 64), wide: ("6x1", 128)}

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield 24 blocks of width 64 in both shapes, and 6 of width 128, which have as many parameters.

        In so short a training, deep networks need LayerScale to compete, so there are both.
        """
        for column, (row, (shape, width)) in product((at, scaled), networks.items()):
            yield from _tested(row, column, _deep(shape, width, column == scaled), () if column == scaled else COSTS)

    def paper() -> Iterator[Cell]:
        """Yield S48 in both shapes beside B12, and B36 in both shapes beside L24."""
        for name in ("S48x1", "S24x2", "B12x1", "B36x1", "B18x2", "L24x1"):
            yield from _tested(name, "300 epochs", _on_imagenet("b16" if name == "B12x1" else name), COSTS)

    def deeper(scores: Scores, column: str) -> list[float]:
        return mean_of([lead(scores, row, wide, column) for row in (narrow, parallel)])

    names = {narrow: "S48x1", parallel: "S24x2", wide: "B12x1", at: "300 epochs"}
    return Study(
        name="three-table3", where="Follow-up, Table 3", axis="length of training",
        title="more blocks (24x1, 12x2) against more width (6x1)", laptop=laptop, paper=paper,
        claims=(
            Claim("More blocks are better than more width, at equal parameters.",
                  lambda s: deeper(s, at), paper=names),
            Claim("With LayerScale, more blocks are better than more width.", lambda s: deeper(s, scaled)),
        ),
    )  # fmt: skip


def table4() -> Study:
    """Table 4: speed of parallel and sequential blocks, measured on this machine (section 3.3).

    Each seed is another round of measurements, in which the two shapes take turns. Ten rounds tell a difference of some
    percent. `vitrail` computes the branches of a frozen network together where that is faster; accuracy does not matter
    here, so nothing is trained.
    """
    sizes = ("Ti", "S", "B")

    def paper() -> Iterator[Cell]:
        """Yield the time of an image and the throughput of 24 blocks of Ti, S and B at 224 pixels in both shapes."""
        metrics: tuple[MetricName, ...] = ("latency", "images/s")
        for metric, size, shape in product(metrics, sizes, (SEQUENTIAL, PARALLEL)):
            yield Cell(shape, size, _on_imagenet(f"{size}{shape}"), metric=metric)

    def more(scores: Scores, one: str, other: str) -> list[float]:
        """Return by how much the number of row `one` exceeds that of row `other`, in percent, on average."""
        pairs = [zip(scores[one, size], scores[other, size], strict=True) for size in sizes]
        return mean_of([[100 * (a / b - 1) for a, b in pair] for pair in pairs])

    return Study(
        name="three-table4", where="Follow-up, Table 4", title="speed of parallel and sequential blocks", axis="width",
        laptop=lambda given: paper(), paper=paper,  # the table has no data and no training
        claims=(
            Claim("Single images are faster with two branches, in percent.",
                  lambda s: more(s, SEQUENTIAL, PARALLEL), UNITS["latency"], matters=5),
            # the follow-up reports no gain of note for large batches; 5 percent of the throughput count as none
            Claim("Throughput at the best batch size changes by less than 5 percent.",
                  lambda s: alike(more(s, PARALLEL, SEQUENTIAL), 5), UNITS["images/s"], matters=0),
        ),
    )  # fmt: skip


def figure1() -> Study:
    """Figure 1: accuracy by the number of branches, at an equal number of blocks (section 3.3)."""
    row = "24 blocks"

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield 24 blocks of width 64 in one to four branches."""
        for shape in (SEQUENTIAL, PARALLEL, "8x3", "6x4"):
            yield from _tested(row, float(shape[-1]), _deep(shape))

    def paper() -> Iterator[Cell]:
        """Yield 36 and 60 blocks of S in one to four branches."""
        for name in ("S36x1", "S18x2", "S12x3", "S9x4", "S60x1", "S30x2", "S20x3"):
            layers, branches = (int(number) for number in name[1:].split("x"))
            yield from _tested(f"{layers * branches} blocks", float(branches), _on_imagenet(name))

    return Study(
        name="three-figure1", where="Follow-up, Figure 1", title="accuracy by number of branches", axis="branches",
        laptop=laptop, paper=paper,
        claims=(
            Claim("Two branches are better than one.",
                  lambda s: column_lead(s, 2.0, 1.0, row), paper={row: "36 blocks"}),
            Claim("Two branches are better than three or four.",
                  lambda s: mean_of([column_lead(s, 2.0, more, row) for more in (3.0, 4.0)]), paper={row: "36 blocks"}),
        ),
    )  # fmt: skip


def figure2() -> Study:
    """Figure 2: parallel against sequential networks of 24 blocks, by width (section 3.3).

    The paper trains the widest networks with LayerScale: "even though we used LS for this size".
    """

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield three widths in both shapes."""
        for width, shape in product((32, 64, 96), (SEQUENTIAL, PARALLEL)):
            yield from _tested(shape, float(width), _deep(shape, width))

    def paper() -> Iterator[Cell]:
        """Yield Ti, S, B and L in both shapes."""
        for size, shape in product(("Ti", "S", "B", "L"), (SEQUENTIAL, PARALLEL)):
            yield from _tested(shape, size, _on_imagenet(f"{size}{shape}", layer_scale=size == "L"))

    names: dict[Column, Column] = {32.0: "Ti", 96.0: "L"}
    return Study(
        name="three-figure2", where="Follow-up, Figure 2", axis="width",
        title="parallel against sequential networks of 24 blocks, by width", laptop=laptop, paper=paper,
        claims=(
            Claim("The widest network is better with two branches.",
                  lambda s: lead(s, PARALLEL, SEQUENTIAL, 96.0), paper=names),
            Claim("The wider the network, the more it gains from two branches.",
                  lambda s: gain(s, PARALLEL, SEQUENTIAL, 32.0, 96.0), paper=names),
        ),
    )  # fmt: skip


def figure3() -> Study:
    """Figure 3: parallel against sequential networks, by the number of blocks (section 3.3)."""
    sequential, parallel = "sequential", "two branches"
    branches = {sequential: 1, parallel: 2}

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield four numbers of blocks of width 64 in both shapes."""
        for blocks, (row, number) in product((36, 24, 12, 6), branches.items()):
            yield from _tested(row, float(blocks), _deep(f"{blocks // number}x{number}"))

    def paper() -> Iterator[Cell]:
        """Yield S and B with 24 to 60 blocks in both shapes."""
        networks = (("S", 24), ("S", 36), ("S", 48), ("S", 60), ("B", 24), ("B", 36))
        for (size, blocks), (row, number) in product(networks, branches.items()):
            yield from _tested(f"{size}, {row}", float(blocks), _on_imagenet(f"{size}{blocks // number}x{number}"))

    names: dict[Column, Column] = {
        sequential: f"S, {sequential}", parallel: f"S, {parallel}", 6.0: 24.0, 36.0: 60.0,
    }  # fmt: skip
    return Study(
        name="three-figure3", where="Follow-up, Figure 3", axis="blocks",
        title="parallel against sequential networks, by number of blocks", laptop=laptop, paper=paper,
        claims=(
            Claim("The deeper the network, the more it gains from two branches.",
                  lambda s: gain(s, parallel, sequential, 6.0, 36.0), paper=names),
        ),
    )  # fmt: skip


# fine-tuning a part of a network (section 4)

ALL = "everything"
PARTS: dict[str, Tune] = {
    ALL: "all",
    "attention": "attention",
    "FFN": "ffn",
    "attention and positions": "attention+positions",
}
"""Row -> what is tuned; the paper's text names attention, its authors' own switch also trains the positions."""
SIZES = ("ti16", "s16", "b16", "l16")


def trained_with_labels() -> Stage:
    """Return a network trained with labels, a small one so that little is left to learn, as in the follow-up."""
    return Stage(pre_training("ViT-64/8", 15, tested=True))


def tuned_part(name: str, at: Column, on: str, side: int, *, share: float | None = None, **changes: Any) -> Cell:
    """Return the accuracy of `trained_with_labels` with a part of it tuned, at the better of two rates.

    It is tuned on a data set, or on a share of it, for 200 steps. `changes` are further changes of the run.
    """

    def tuned(rate: float) -> Stage:
        stage = fine_tuning(trained_with_labels(), on, rate, side)
        run = replace(with_data(stage.run, subset=share), tune=PARTS[name], duration=Steps(200))
        return replace(stage, run=replace(run, **changes))

    return best_of(name, at, [tuned(1e-3), tuned(4e-3)])


def _published_part(row: str, at: str, size: str, name: str, on: str) -> Cell:
    """Return the follow-up's fine-tuning at 384 pixels of a part of a network of its Table 1, with LayerScale."""
    run = with_data(recipe("three-things/finetune"), path=on)
    run = replace(run, tune=PARTS[name], keep_head=on == IMAGENET)
    return Cell(row, at, Stage(run, _on_imagenet(size, True, 400)), metric="top-1")


def table5() -> Study:
    """Table 5: a part of the network fine-tuned at a higher resolution on its own data (section 4)."""
    at = f"{SIDE} to {LARGER_SIDE} pixels"

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield a network tuned at 48 pixels, after 32, on the classes it knows, with its classifier kept."""
        metrics: tuple[MetricName, ...] = ("top-1", "stored", "memory", "step")
        for name, metric in product(PARTS, metrics):
            yield replace(tuned_part(name, at, "up", LARGER_SIDE, keep_head=True), metric=metric)

    def paper() -> Iterator[Cell]:
        """Yield the baselines of Table 1, with LayerScale, tuned at 384 pixels on ImageNet."""
        return (_published_part(name, size, size, name, IMAGENET) for size in SIZES for name in PARTS)

    def cheaper(scores: Scores) -> list[float]:
        return lead(scores, ALL, "attention", at)

    return Study(
        name="three-table5", where="Follow-up, Table 5", axis="resolution",
        title="fine-tuning a part of the network at a higher resolution", laptop=laptop, paper=paper,
        claims=(
            Claim("Tuning attention is better than tuning the FFNs.",
                  lambda s: lead(s, "attention", "FFN", at), paper={at: "s16"}),
            Claim("Tuning attention is within a point of tuning everything.",
                  lambda s: [1 + points for points in lead(s, "attention", ALL, at)], paper={at: "s16"}, matters=0),
            Claim("Tuning attention stores less than tuning everything.", cheaper, UNITS["stored"], exact=True),
            Claim("Tuning attention takes less memory than tuning everything.", cheaper, UNITS["memory"], exact=True),
            Claim("Tuning attention takes less time than tuning everything.", cheaper, UNITS["step"], matters=0),
        ),
    )  # fmt: skip


def table6() -> Study:
    """Table 6: a part of the network fine-tuned on other data sets (section 4)."""
    others = LABELS["down"]
    large = [f"{others}, {side} px" for side in (SIDE, LARGER_SIDE)]

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield a network tuned on each data set that it has not seen, and on a tenth of one, at two resolutions."""
        sets = [(others, "down", None), (f"a tenth of {others}", "down", 0.1)]
        sets += [(LABELS.get(on, on), on, None) for on in given.sets if on not in ("up", "down")]
        for side, (title, on, share), name in product((SIDE, LARGER_SIDE), sets, PARTS):
            yield tuned_part(name, f"{title}, {side} px", on, side, share=share)

    def paper() -> Iterator[Cell]:
        """Yield the baselines of Table 1, with LayerScale, tuned on the six data sets of the follow-up."""
        sets = ("inaturalist2018", "inaturalist2019", "cars", "cifar100", "cifar10", "flowers102")
        for size, on, name in product(SIZES, sets, PARTS):
            yield _published_part(f"{size}, {name}", on, size, name, on)

    def small(scores: Scores) -> list[Column]:
        """Return the columns of small data sets."""
        return [at for at in columns(scores) if at not in large]

    return Study(
        name="three-table6", where="Follow-up, Table 6", axis="data set and resolution",
        title="fine-tuning a part of the network on other data sets", laptop=laptop, paper=paper,
        claims=(
            Claim("On small data sets, tuning attention is better than tuning the FFNs.",
                  lambda s: lead(s, "attention", "FFN", *small(s))),
            Claim("On small data sets, tuning attention is better than tuning everything.",
                  lambda s: lead(s, "attention", ALL, *small(s))),
            Claim("On a large data set, tuning everything is better than attention.",
                  lambda s: lead(s, ALL, "attention", *large)),
        ),
    )  # fmt: skip


def table7() -> Study:
    """Table 7 and Figure 6: stems with labels, and after masked pre-training (section 5).

    A column has labels only; the other has masked pre-training without labels, then labels. Stems that mix patches are
    masked behind the stem. At laptop scale masked patch prediction takes the place of BeiT.
    """
    with_labels, masked = "labels", "masked pre-training"
    linear, hmlp, early = "linear", "hMLP, BN", "early convolutions"
    # row -> the changes of the network
    stems: dict[str, dict[str, Any]] = {
        linear: {"stem": "linear"},
        hmlp: {"stem": "hmlp", "stem_norm": "batch"},
        "hMLP, LN": {"stem": "hmlp", "stem_norm": "layer"},
        "LeViT": {"stem": "levit"},
        early: {"stem": "early"},
        "linear, a block more": {"stem": "linear"},  # a block costs about as much as a convolutional stem
        "linear + norm": {"stem": "linear+norm"},
        "linear + GELU": {"stem": "linear+gelu"},
        "linear + norm + GELU": {"stem": "linear+norm+gelu"},
    }

    def with_stem(run: Run, row: str, depth: int) -> Run:
        run = replace(run, vit=replace(run.vit, depth=depth + (row == "linear, a block more"), **stems[row]))
        if isinstance(run.objective, MaskedPatch | BEiT):
            mixing = run.vit.stem in ("levit", "early")
            run = replace(run, objective=replace(run.objective, mask_after_stem=mixing))
        return run

    def cells(row: str, labels: Stage, tuned: Stage) -> Iterator[Cell]:
        """Yield a stem in both columns, its parameters and its compute."""
        yield Cell(row, with_labels, labels, metric="top-1")
        yield Cell(row, masked, tuned, metric="top-1")
        yield Cell(row, with_labels, labels, metric="parameters")
        yield Cell(row, with_labels, labels, metric="MACs")

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield a network with the three stems of the claims; after masked pre-training, it has rates as for MAE."""
        plain = pre_training("ViT-64/8", 4, tested=True)
        hidden = at_laptop_scale(recipe("masked-patch-small"), 4, model=plain.model, vit=plain.vit)
        for row in (linear, hmlp, early):
            tuned = Stage(at_laptop_scale(recipe("finetune-small"), 2, tested=True), Stage(with_stem(hidden, row, 6)))
            yield from cells(row, Stage(with_stem(plain, row, 6)), tuned)

    def paper() -> Iterator[Cell]:
        """Yield B/16 with nine stems on ImageNet: 300 epochs with labels; BeiT for 300 epochs, then 100 with labels."""
        plain, beit, tokenizer = _on_imagenet("b16"), pre_trained("beit", IMAGENET), pre_trained("tokenizer", IMAGENET)
        tuned = replace(pre_trained("beit-finetune", IMAGENET).run, duration=Epochs(100))
        for row in stems:
            start = Stage(with_stem(beit.run, row, 12), tokenizer=tokenizer)
            yield from cells(row, Stage(with_stem(plain.run, row, 12)), Stage(tuned, start))

    return Study(
        name="three-table7", where="Follow-up, Table 7 and Figure 6", axis="training",
        title="stems with labels and after masked pre-training", laptop=laptop, paper=paper,
        scatter=(with_labels, masked),
        claims=(
            Claim("With labels, hMLP is better than the linear stem.", lambda s: lead(s, hmlp, linear, with_labels)),
            Claim("After masked pre-training, hMLP is better than the linear stem.",
                  lambda s: lead(s, hmlp, linear, masked)),
            Claim("Early convolutions lose their lead after masked pre-training.",
                  lambda s: gain(s, early, linear, masked, with_labels)),
        ),
    )  # fmt: skip


def table8() -> Study:
    """Table 8: the baselines beside other training procedures (appendix A)."""
    at = "8 epochs"
    first, light, deit, deit3, follow_up = "paper", "AugReg, light", "DeiT", "DeiT-III", "follow-up"
    # row -> a recipe with its augmentation, regularisation, loss and optimiser
    procedures = {
        first: "paper/vit-b16-imagenet",
        light: "augreg/light1",
        deit: "deit/vit-s16",
        deit3: "deit3/vit-s16-imagenet",
        follow_up: "three-things/vit-s16-300",
    }
    # column -> row -> the recipe on ImageNet
    recipes = {
        "Ti/16": {deit: "deit/vit-ti16", follow_up: "three-things/vit-ti16-300"},
        "S/16": {light: "augreg/vit-s16-imagenet", deit: "deit/vit-s16", deit3: "deit3/vit-s16-imagenet",
                 follow_up: "three-things/vit-s16-300"},
        "B/16": {first: "paper/vit-b16-imagenet", light: "augreg/vit-b16-imagenet", deit: "deit/vit-b16",
                 deit3: "deit3/vit-b16-imagenet", follow_up: "three-things/vit-b16-300"},
        "L/16": {first: "paper/vit-l16-imagenet", deit3: "deit3/vit-l16-imagenet",
                 follow_up: "three-things/vit-l16-300"},
    }  # fmt: skip

    def laptop(given: LaptopData) -> Iterator[Cell]:
        """Yield ViT-64/8 trained by five procedures, each at the better of two rates.

        The rates are for steps of 128 images; those of the recipes are for 1,024 to 4,096.
        """
        rates = {"adamw": (1e-3, 3e-3), "lamb": (3e-3, 1e-2)}
        for row, run in ((row, recipe(name)) for row, name in procedures.items()):
            like = pre_training("ViT-64/8")
            vit = replace(like.vit, drop_path=run.vit.drop_path, dropout=run.vit.dropout, init=run.vit.init)
            schedule = replace(run.schedule, warmup=Percent(5))
            small = at_laptop_scale(run, 8, tested=True, model=like.model, vit=vit, schedule=schedule, batch_size=128)
            tried = [replace(small, optim=replace(run.optim, lr=rate)) for rate in rates[run.optim.name]]
            yield best_of(row, at, map(Stage, tried))

    def paper() -> Iterator[Cell]:
        """Yield Ti, S, B and L on ImageNet, by each procedure that its authors used for them."""
        for size, names in recipes.items():
            for row, name in names.items():
                yield from _tested(row, size, pre_trained(name, IMAGENET))

    def leads(scores: Scores) -> Parts:
        """Return the lead of the follow-up over each other procedure."""
        return Parts(lead(scores, follow_up, row, at) for row, _ in scores if row != follow_up)

    return Study(
        name="three-table8", where="Follow-up, Table 8", title="training procedures compared",
        axis="length of training", laptop=laptop, paper=paper,
        claims=(
            Claim("The follow-up's procedure is better than each of the others.", leads, paper={at: "B/16"}),
            Claim("When training is this short, light augmentation is better than strong.",
                  lambda s: mean_of([lead(s, first, heavy, at) for heavy in (deit, deit3, follow_up)])),
        ),
    )  # fmt: skip
