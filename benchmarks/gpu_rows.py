"""The rows of `benchmarks.gpu`: each measures one thing on a device and returns the figures of all its sides.

Sides of a row take turns in one process. On CUDA they are timed with CUDA events, after a warm-up that compiles and
allocates; a figure is the median of the rounds. Images and labels of training and prediction are on the device already,
for timm normalised, so that only the rows "loader" and "end to end" measure how they get there.
"""

from __future__ import annotations

import gc
import io
import itertools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.autograd import DeviceType

from benchmarks import peers
from benchmarks.peers import Architecture
from vitrail.costs.count import FusedAttention, activation_bytes, fake, kept_bytes
from vitrail.data.images.batched import divided
from vitrail.data.images.ops import train_transform
from vitrail.data.item import Item
from vitrail.data.loading.loader import Loader, WorkerKind
from vitrail.data.settings import Augment, Preprocess
from vitrail.device import Precision
from vitrail.evaluation.classify import How, predictor
from vitrail.model.build import build
from vitrail.model.compute import computed
from vitrail.model.variants import ViTConfig
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.torch_private import TorchDispatchMode
from vitrail.training.batches import Sizes, endless
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.feed import Feed
from vitrail.training.guard import FiniteGuard
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer
from vitrail.training.parallel import distribute
from vitrail.training.run import Average, Optim, Run
from vitrail.training.step import TrainingStep
from vitrail.training.timetable import Timetable

Row = dict[str, Any]
"""The figures of one side, by name; "name" says which side it is."""
OURS = "vitrail"
OPTIM = Optim(lr=1e-3, weight_decay=0.05, clip=None)
WARM_UP = 3
ROUNDS = 5
SHORT_SIDE = 256
"""Short side in pixels of the JPEGs that the loader reads, as packed shards have them."""
AUGMENTED = {"crop, flip": Augment(), "RandAugment": Augment(randaugment=(2, 9))}


@dataclass(frozen=True)
class Size:
    """How large everything is: as measured on a GPU, or as rehearsed on a CPU."""

    networks: dict[str, Architecture] = field(default_factory=lambda: {"S/16": peers.S16, "B/16": peers.B16})
    training: tuple[tuple[str, int], ...] = (("S/16", 256), ("B/16", 256), ("S/16", 64), ("S/16", 1024), ("B/16", 64))
    """(network, batch), the most important first."""
    predicting: tuple[int, ...] = (1, 8, 256)
    product: int = 8192
    """Side of the square matrices whose product is the ceiling."""
    copied: int = 2**28
    """Bytes that are copied at once."""
    workers: int = 16
    loaded: int = 256
    """Images in a batch of the loader."""
    seconds: float = 0.5
    """Length of a round."""
    images: int = 51_200
    """Images of an epoch; the files are repeated."""


TOY = Architecture(width=64, depth=2, heads=2, patch=16, image_size=32, classes=10)
REHEARSED = Size(
    networks={"S/16": TOY, "B/16": TOY},
    training=(("S/16", 4), ("B/16", 4), ("S/16", 2), ("S/16", 6), ("B/16", 2)),
    predicting=(1, 2, 3),
    product=128,
    copied=2**16,
    workers=2,
    loaded=4,
    seconds=0.02,
    images=64,
)


@dataclass(frozen=True)
class Place:
    """Where a row is measured: the device, the sizes, and the folder of JPEGs."""

    device: torch.device
    size: Size
    jpegs: Path

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished all its work."""
        if self.cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Side:
    """One side of a row: a step, the images (or other units) that it works on, and the peak of its memory."""

    name: str
    step: Callable[[], object]
    images: float
    peak_bytes: int | None = None


def rows(size: Size) -> dict[str, Callable[[Place], list[Row]]]:
    """Return all rows by their names, the most important first."""
    found: dict[str, Callable[[Place], list[Row]]] = {"ceilings": ceilings, "same logits": same_logits}
    for (network, batch), compiled in itertools.product(size.training, (False, True)):
        name = f"training {network}, batch {batch}, {'compiled' if compiled else 'eager'}"
        found[name] = partial(training, network=network, batch=batch, compiled=compiled)
    found["counts"] = counts
    found["memory"] = memory
    found["loader"] = loader
    found["end to end"] = end_to_end
    for network, batch in itertools.product(size.networks, size.predicting):
        found[f"prediction {network}, batch {batch}"] = partial(prediction, network=network, batch=batch)
    return found


def elapsed(place: Place, step: Callable[[], object], calls: int) -> tuple[float, float]:
    """Return the seconds of some calls on the device, and the seconds that the host needs to launch them."""
    place.synchronize()
    if place.cuda:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    began = time.perf_counter()
    for _ in range(calls):
        step()
    launched = time.perf_counter() - began
    if not place.cuda:
        return launched, launched
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000, launched


def race(place: Place, sides: list[Side], unit: str = "images_per_second") -> list[Row]:
    """Return a row for each side: the median of its rounds, which all sides take in turn, and their spread."""
    calls: dict[str, int] = {}
    for side in sides:
        elapsed(place, side.step, WARM_UP)
        took, _ = elapsed(place, side.step, 2)
        calls[side.name] = max(1, round(place.size.seconds / (took / 2)))
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    hosts: dict[str, list[float]] = {side.name: [] for side in sides}
    gc.collect()
    gc.disable()
    try:
        for turn in range(ROUNDS):
            for side in sides[turn % len(sides) :] + sides[: turn % len(sides)]:
                count = calls[side.name]
                took, launched = elapsed(place, side.step, count)
                rates[side.name].append(count * side.images / took)
                hosts[side.name].append(1000 * launched / count)
    finally:
        gc.enable()
    return [
        {
            "name": side.name,
            unit: round(statistics.median(rates[side.name]), 3),
            "low": round(min(rates[side.name]), 3),
            "high": round(max(rates[side.name]), 3),
            "host_ms": round(statistics.median(hosts[side.name]), 3),
            "peak_bytes": side.peak_bytes,
            "rounds": [round(rate, 3) for rate in rates[side.name]],
        }
        for side in sides
    ]


def kernels(place: Place, step: Callable[[], object]) -> Row:
    """Return the number of kernels of one step, the share of the time between them, and the median gap.

    On a CPU, torch's operators stand in for the kernels.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    place.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        step()
        place.synchronize()
    events: list[Any] = list(profile.events() or ())
    if place.cuda:
        events = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    else:
        events = [e for e in events if e.name.startswith("aten::") and not _within_an_operator(e)]
    if not events:
        return {"launches": None, "copies": None, "idle_share": None, "gap_us": None}
    copies = sum(event.name.startswith(("Memcpy", "Memset")) for event in events)
    idle, gap = idle_share(sorted((event.time_range.start, event.time_range.end) for event in events))
    return {"launches": len(events) - copies, "copies": copies, "idle_share": round(idle, 4), "gap_us": round(gap, 3)}


def _within_an_operator(event: Any) -> bool:
    return event.cpu_parent is not None and event.cpu_parent.name.startswith("aten::")


def idle_share(spans: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the share of the time in which none of these spans (begin, end), sorted, runs, and the median gap."""
    gaps, end = [], spans[0][1]
    for begin, after in spans[1:]:
        gaps.append(max(begin - end, 0.0))
        end = max(end, after)
    total = end - spans[0][0]
    return sum(gaps) / total if total else 0.0, statistics.median(gaps or [0.0])


def ceilings(place: Place) -> list[Row]:
    """The highest rates of this device: matrix products, copies of memory, and copies from the host."""
    device, size = place.device, place.size
    left, right = (torch.randn(size.product, size.product, device=device, dtype=torch.bfloat16) for _ in range(2))
    source, target = (torch.empty(size.copied, dtype=torch.uint8, device=device) for _ in range(2))
    pageable = torch.zeros(size.copied, dtype=torch.uint8)
    pinned = pageable.pin_memory() if place.cuda else pageable.clone()
    sides = [
        Side("bf16 product, FLOP/s", lambda: left @ right, 2 * size.product**3),
        Side("copy on the device, bytes/s", lambda: target.copy_(source), 2 * size.copied),  # read and written
        Side("from pinned memory, bytes/s", lambda: target.copy_(pinned, non_blocking=True), size.copied),
        Side("from pageable memory, bytes/s", lambda: target.copy_(pageable), size.copied),
    ]
    found = [row for side in sides for row in race(place, [side], "per_second")]
    return [{key: row[key] for key in ("name", "per_second", "low", "high")} for row in found]


def images_and_labels(place: Place, architecture: Architecture, batch: int) -> tuple[Tensor, Tensor]:
    """Return random uint8 images and labels on the device."""
    shape = (batch, 3, architecture.image_size, architecture.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=place.device)
    labels = torch.randint(0, architecture.classes, (batch,), device=place.device)
    return images.contiguous(memory_format=torch.channels_last), labels


def normalised(images: Tensor) -> Tensor:
    """Return images as timm's loader gives them."""
    return (images.float() / 255 - 0.5) / 0.5


def our_training(place: Place, architecture: Architecture, batch: int, *, compiled: bool) -> TrainingStep:
    """Return vitrail's training step: a function of (batch, step number, rate)."""
    run = Run(batch_size=batch, accumulate=1, precision="bf16", compile=compiled, optim=OPTIM)
    model = peers.ours(architecture).to(place.device)
    objective = SupervisedObjective(model.train(), Supervised(), Augment(), architecture.classes, seed=0)
    network = distribute(objective, run)
    return TrainingStep(
        run,
        network,
        build_optimizer(objective, OPTIM),
        Averager(model, Average()),
        FiniteGuard(objective, 3),
        on_memory=_no_memory,
        on_done=lambda done: None,
        own=dict,
    )


def _no_memory(step: int, parts: int) -> None:
    raise MemoryError(f"the batch does not fit in memory: it would be cut into {parts} parts")


def our_step(place: Place, architecture: Architecture, batch: int, *, compiled: bool) -> Callable[[], object]:
    """Return vitrail's training step on images that are on the device."""
    images, labels = images_and_labels(place, architecture, batch)
    feed = SimpleNamespace(images=images, labels=labels, index=torch.arange(batch))
    train, numbers = our_training(place, architecture, batch, compiled=compiled), itertools.count()
    return lambda: train(feed, next(numbers), rate=OPTIM.lr)


def timm_step(place: Place, architecture: Architecture, batch: int, *, compiled: bool) -> Callable[[], object]:
    """Return the training step of a plain script with timm's network and its optimiser, fused as ours is."""
    from timm.optim import create_optimizer_v2

    model = peers.timm(architecture).to(place.device).train()
    optimizer = create_optimizer_v2(model, "adamw", lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)
    compile_blocks(model, compiled)
    images, labels = images_and_labels(place, architecture, batch)
    images = normalised(images)

    def step() -> None:
        with torch.autocast(place.device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compile_blocks(model: nn.Module, compiled: bool) -> None:
    """Compile timm's network block by block, as vitrail's is: the whole network takes minutes to compile."""
    for block in model.get_submodule("blocks") if compiled else ():  # type: ignore[union-attr]
        block.compile()


def measured_side(place: Place, name: str, images: int, make: Callable[[], Callable[[], object]]) -> Side:
    """Return a side with the peak of the memory that it allocates, in which other sides have no part."""
    before = torch.cuda.memory_allocated() if place.cuda else 0
    step = make()
    elapsed(place, step, WARM_UP)  # compiles, and makes the optimiser's state
    if not place.cuda:
        return Side(name, step, images)
    torch.cuda.reset_peak_memory_stats()
    elapsed(place, step, 1)
    return Side(name, step, images, torch.cuda.max_memory_allocated() - before)


def training(place: Place, *, network: str, batch: int, compiled: bool) -> list[Row]:
    """One optimiser step of vitrail and of timm: images/s, memory, kernels and the gaps between them."""
    architecture = place.size.networks[network]
    makers = {OURS: our_step, "timm": timm_step}
    sides = [
        measured_side(place, name, batch, partial(make, place, architecture, batch, compiled=compiled))
        for name, make in makers.items()
    ]
    found = race(place, sides)
    flops = 3 * architecture.flops  # the backward pass is twice the forward
    return [row | {"flops": flops} | kernels(place, side.step) for row, side in zip(found, sides, strict=True)]


def prediction(place: Place, *, network: str, batch: int) -> list[Row]:
    """Predicting a batch: vitrail with the engines that are torch, and timm in autocast, in bf16, and compiled."""
    architecture = place.size.networks[network]
    images, _ = images_and_labels(place, architecture, batch)
    ready = normalised(images).to(torch.bfloat16)

    def ours(how: How) -> Callable[[], object]:
        predict = predictor(peers.ours(architecture), place.device, "bf16", how=how)
        return lambda: predict(images)

    def theirs(*, autocast: bool = False, compiled: bool = False) -> Callable[[], object]:
        model = peers.timm(architecture).to(place.device, None if autocast else torch.bfloat16).eval()
        compile_blocks(model, compiled)

        @torch.inference_mode()
        def step() -> Tensor:
            with torch.autocast(place.device.type, torch.bfloat16) if autocast else nullcontext():
                return model(ready)

        return step

    makers = {
        OURS: partial(ours, "torch"),
        **{f"{OURS}, {how}": partial(ours, how) for how in ways(place)[1:]},
        "timm, autocast": partial(theirs, autocast=True),
        "timm, bf16": theirs,
        "timm, bf16, compiled": partial(theirs, compiled=True),
    }
    sides = [measured_side(place, name, batch, make) for name, make in makers.items()]
    found = race(place, sides)
    return [
        row | {"flops": architecture.flops} | kernels(place, side.step) for row, side in zip(found, sides, strict=True)
    ]


def ways(place: Place) -> list[How]:
    """Return the ways in which torch predicts; only CUDA has graphs."""
    return [how for how in get_args(How) if place.cuda or how != "graphs"]


def same_logits(place: Place) -> list[Row]:
    """The largest difference of vitrail's logits from timm's in float32, relative to the largest, by precision."""
    found: list[Row] = []
    for network, architecture in place.size.networks.items():
        theirs, model = peers.timm(architecture), peers.ours(architecture)
        theirs.get_submodule("head").reset_parameters()  # type: ignore[operator]
        peers.load_timm(model, theirs)
        images, _ = images_and_labels(place, architecture, 8)
        with torch.inference_mode():
            expected = theirs.to(place.device).eval()(normalised(images))
        asked: list[tuple[Precision, How]] = [("float32", "torch"), *(("bf16", how) for how in ways(place))]
        for precision, how in asked:
            logits = predictor(model, place.device, precision, how=how)(images).float()
            difference = float((logits - expected).abs().max() / expected.abs().max())
            found.append({"name": f"{network}, {precision}, {how}", "difference": difference})
    return found


class Operations(TorchDispatchMode):
    """Context that counts the operations that a device computes, by name; views compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.name())
        if name.startswith("aten::") and not (func.is_view or name in ("aten::detach", "aten::_unsafe_view")):
            self.names["attention" if "attention" in name else name] += 1
        return func(*args, **(kwargs or {}))


def counts(place: Place) -> list[Row]:
    """Operations of a forward pass with its loss, on fake tensors of this device and on real ones."""
    architecture = place.size.networks["S/16"]

    def make() -> SupervisedObjective:
        return SupervisedObjective(peers.ours(architecture).train(), Supervised(), Augment(), architecture.classes, 0)

    def counted(objective: nn.Module) -> Counter[str]:
        images = torch.zeros(2, 3, architecture.image_size, architecture.image_size, dtype=torch.uint8)
        batch = SimpleNamespace(images=images, labels=torch.zeros(2, dtype=torch.int64), index=torch.arange(2))
        objective(batch, step=0)  # type: ignore[operator]  # constants are made in the first
        with computed("fast"), Operations() as seen:  # as without a mode that watches
            objective(batch, step=0)  # type: ignore[operator]
        return seen.names

    kind = place.device.type
    with fake(make, kind) as unreal, FusedAttention(kind), torch.autocast(kind, torch.bfloat16):
        expected = counted(unreal)
    with torch.autocast(kind, torch.bfloat16):
        seen = counted(make().to(place.device))
    names = sorted(expected.keys() | seen.keys())
    different = {name: [expected[name], seen[name]] for name in names if expected[name] != seen[name]}
    return [{"name": "forward pass", "fake": expected.total(), "real": seen.total(), "different": different}]


def config_of(architecture: Architecture) -> ViTConfig:
    """Return the config of vitrail's network."""
    config = peers.ours(architecture).config
    assert isinstance(config, ViTConfig)
    return config


def memory(place: Place) -> list[Row]:
    """Bytes that an image keeps for the backward pass, as counted on fake tensors and as kept on this device."""
    found: list[Row] = []
    for network, architecture in place.size.networks.items():
        config = config_of(architecture)
        model = build(config).to(place.device).train()

        def forward(number: int, model: Any = model, architecture: Architecture = architecture) -> object:
            with torch.autocast(place.device.type, torch.bfloat16):
                return model(images_and_labels(place, architecture, number)[0].clone())

        counted = activation_bytes(config, place="accelerator" if place.cuda else "cpu")
        found.append({"name": network, "counted": counted, "kept": kept_bytes(forward)})
    return found


class HeldJpegs:
    """The JPEGs of a folder in memory, with the short side that packed shards have, repeated to a number of images."""

    class_names = ("one", "another")

    def __init__(self, folder: Path, images: int) -> None:
        files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
        if not files:
            raise SystemExit(f"there are no JPEGs in {folder}: give a folder of photographs with --images")
        self._held = [_small_jpeg(file) for file in files]
        self._count = images
        self.labels = np.arange(images) % 2
        self.sizes = np.array([len(self._held[index % len(self._held)]) for index in range(images)])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        return Item(self._held[index % len(self._held)], int(self.labels[index]), self.id(index))

    def id(self, index: int) -> str:
        """Return the name of an image."""
        return str(index)


def _small_jpeg(file: Path) -> bytes:
    with Image.open(file) as image:
        scale = SHORT_SIDE / min(image.size)
        small = image.convert("RGB").resize([round(side * scale) for side in image.size])  # type: ignore[arg-type]
    written = io.BytesIO()
    small.save(written, "JPEG", quality=90)
    return written.getvalue()


def our_loader(place: Place, augment: Augment, kind: WorkerKind, *, decodes: bool = False) -> Loader:
    """Return vitrail's loader of JPEGs, with threads or with processes; decodes: the device decodes and augments."""
    side = place.size.networks["S/16"].image_size
    source: Any = HeldJpegs(place.jpegs, place.size.images)
    transform, rest = train_transform(augment, Preprocess(image_size=(side, side))), None
    if decodes:
        transform, rest = divided(transform, (side, side), decodes=True)  # type: ignore[misc]
    return Loader(
        source,
        transform=transform,
        rest=rest,
        image_size=side,
        batch_size=place.size.loaded,
        workers=place.size.workers,
        worker_kind=kind,
        pinned_for=place.device,
    )


def loader(place: Place) -> list[Row]:
    """The loader alone: JPEGs to batches of uint8 images, with threads and with processes."""
    found = []
    for kind, (augmentation, augment) in itertools.product(get_args(WorkerKind), AUGMENTED.items()):
        name = f"{place.size.workers} {kind}, {augmentation}"
        with closing(our_loader(place, augment, kind)) as batches:
            feed = endless(batches, 0)
            next(feed)
            found += _wall_clock(name, place, lambda feed=feed: len(next(feed).labels))  # type: ignore[misc]
    return found + [
        row for augmentation, augment in AUGMENTED.items() for row in _on_device(place, augmentation, augment)
    ]


def _on_device(place: Place, augmentation: str, augment: Augment) -> list[Row]:
    """The loader alone, where the device decodes and augments."""

    def work() -> int:
        batch = next(feed)
        assert batch.plan is not None
        return len(batch.plan.apply(batch.images, place.device))

    with closing(our_loader(place, augment, "threads", decodes=True)) as batches:
        feed = endless(batches, 0)
        work()
        return _wall_clock(f"decoded on the device, {augmentation}", place, work)


def end_to_end(place: Place) -> list[Row]:
    """Training S/16 from JPEGs, fed as in a run: images/s, and the share of the time that it waits for batches."""
    architecture, found = place.size.networks["S/16"], []
    for kind, decodes in (*((kind, False) for kind in get_args(WorkerKind)), ("threads", True)):
        train = our_training(place, architecture, place.size.loaded, compiled=False)
        with closing(our_loader(place, Augment(), kind, decodes=decodes)) as loaded:
            model: Any = train.objective.model
            resize = Sizes(train.run.progressive, model.config, place.device)
            feed = Feed(train.objective, loaded, resize, Timetable(train.run, len(loaded)))
            with closing(feed):
                name = "decoded on the device" if decodes else f"{place.size.workers} {kind}"
                found += _fed(f"{OURS}, eager, {name}", place, train, feed)
    return [row | {"flops": 3 * architecture.flops} for row in found]


def _fed(name: str, place: Place, train: TrainingStep, feed: Feed) -> list[Row]:
    batches, numbers = feed.batches(RunStatus(), max_bad=0.0, report=lambda *bad: None), itertools.count()

    def step() -> int:
        loaded, batch = next(batches)
        train(batch, next(numbers), rate=OPTIM.lr)
        return len(loaded.labels)

    for _ in range(WARM_UP):
        step()
    place.synchronize()
    began, before = time.perf_counter(), feed.wait_seconds
    found = _wall_clock(name, place, step)
    share = (feed.wait_seconds - before) / (time.perf_counter() - began)
    return [row | {"waiting_share": round(share, 4)} for row in found]


def _wall_clock(name: str, place: Place, work: Callable[[], int]) -> list[Row]:
    """Return the row of something that the host does: images/s by the clock on the wall."""
    rates = []
    for _ in range(ROUNDS):
        began, images = time.perf_counter(), 0
        while not images or time.perf_counter() - began < 2 * place.size.seconds:
            images += work()
        place.synchronize()
        rates.append(images / (time.perf_counter() - began))
    spread = {"low": round(min(rates), 3), "high": round(max(rates), 3), "rounds": [round(rate, 3) for rate in rates]}
    return [{"name": name, "images_per_second": round(statistics.median(rates), 3), **spread}]


def measure(name: str, place: Place) -> list[Row]:
    """Measure one row, with nothing left of earlier ones."""
    torch.manual_seed(0)
    torch.compiler.reset()
    gc.collect()
    if place.cuda:
        torch.cuda.empty_cache()
    return rows(place.size)[name](place)
