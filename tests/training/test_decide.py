from __future__ import annotations

import io
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from random_inputs import EXAMPLES

from vitrail import world
from vitrail.config import merge, plain
from vitrail.data.images.bands import HeaderFacts
from vitrail.data.item import Item
from vitrail.data.labels.numbers import Numbers, TargetScale
from vitrail.data.labels.sets import LabelSets
from vitrail.data.settings import Augment, Bands, Preparation, Preprocess
from vitrail.errors import DataError, TrainingError, UsageError
from vitrail.evaluation.metric import Metric
from vitrail.model.build import build
from vitrail.model.own_part import OwnPart
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.objective.settings import DINO, MAE, Regression, Supervised
from vitrail.objective.supervised import SupervisedObjective
from vitrail.tasks.catalog import task_for
from vitrail.training import batch_size, facts
from vitrail.training import decide as mind
from vitrail.training.assemble import build_model
from vitrail.training.batch_size import default_batch, explaining_memory, image_bytes, micro_batches
from vitrail.training.checkpoints.state import inherit
from vitrail.training.run import Model, Run
from vitrail.weights.answer import CardAnswer
from vitrail.weights.assemble import Overrides
from vitrail.weights.card import Card
from vitrail.weights.store import load_model, save_model


class Pictures:
    """`count` images of the given sizes (height, width), in turn."""

    def __init__(self, count: int, *sizes: tuple[int, int], encoded: bool = False) -> None:
        self.sizes_ = sizes
        self.encoded = encoded
        self.labels = np.arange(count) % 2
        self.sizes = np.full(count, 100)
        self.class_names = ["cat", "dog"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        image = np.zeros((*self.sizes_[index % len(self.sizes_)], 3), np.uint8)
        if not self.encoded:
            return Item(image, int(self.labels[index]), self.id(index))
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return Item(file.getvalue() if index % 5 else b"torn", int(self.labels[index]), self.id(index))

    def id(self, index: int) -> str:
        return str(index)


@dataclass(frozen=True)
class OwnHead(OwnPart):
    """A classifier of the user's own."""

    def build(self, config: ViTConfig) -> torch.nn.Module:
        """Return the layer."""
        return torch.nn.Linear(config.head_width, config.classes)


def decide(run: Run, source: Pictures) -> mind.Decision:
    return mind.decide(run, facts.Facts.of(run, source, source.class_names))


TINY = Model(width=16, depth=2, heads=2, mlp_dim=32)
RUN = Run(model="Ti/16", vit=TINY, device="cpu")


@pytest.mark.parametrize("start", ["runs/finetune-1", "google/vit-base-patch16-224"])
def test_a_card_names_no_local_path_as_if_it_were_on_the_hub(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the name of the run as that of a recipe: `finetune` is the paper's."""
    monkeypatch.chdir(tmp_path)
    Path("runs/finetune-1").mkdir(parents=True)
    found = decide(Run(name="finetune", model="Ti/4", image_size=8), Pictures(40, (8, 8)))
    card = replace(found, run=replace(found.run, weights=start)).card(["cat", "dog"])
    assert card.provenance == {"data": found.run.data.path, "from": start.removeprefix("runs/")}


@pytest.mark.parametrize(
    ("sizes", "patch", "side"),
    [
        ([(32, 32)], 4, 32),
        ([(28, 28)], 4, 28),
        ([(28, 28)], 16, 32),  # whole patches
        ([(8, 8)], 16, 16),
        ([(480, 640), (500, 375)], 16, 224),
        ([(480, 640)], 14, 224),
        ([(100, 200), (120, 90)], 16, 96),  # half are 90 px short, half 100: rounded up to whole patches
        ([(600, 600)], 15, 210),
    ],
)
@pytest.mark.parametrize("encoded", [False, True])
def test_image_size_follows_the_images(sizes: list[tuple[int, int]], patch: int, side: int, encoded: bool) -> None:
    run = replace(RUN, vit=replace(TINY, patch=patch))
    found = decide(run, Pictures(40, *sizes, encoded=encoded))
    assert found.config.image_size == (side, side)
    assert found.run.image_size == side and found.run.preprocess is not None
    assert found.run.preprocess.resize == ("squash" if len(set(sizes)) == 1 else "small")
    assert found.run.preprocess.image_size == (side, side)
    assert f"{side} px" in found.why["image_size"]


def test_what_was_asked_for_is_kept() -> None:
    asked = Preprocess(image_size=(48, 48), resize="squash", interpolation="bicubic")
    run = replace(RUN, image_size=48, preprocess=asked, batch_size=10, workers=3, precision="bf16", cache="no")
    run = replace(run, worker_kind="threads", augment_on="host", compile=False)
    found = decide(run, Pictures(100, (500, 400), (300, 200)))
    assert found.run == run and found.why.keys() == {"patch"}  # only 9 tokens: said, not changed
    with pytest.raises(UsageError, match="image_size"):
        decide(replace(run, image_size=32), Pictures(100, (500, 400)))


def test_who_asks_for_bfloat16_on_a_processor_without_it_hears_that_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for fast in (True, False):
        monkeypatch.setattr(facts, "fast_bf16", lambda device, fast=fast: fast)
        decide(replace(RUN, precision="bf16"), Pictures(100, (32, 32)))
        assert ("--precision float32 is many times faster" in caplog.text) != fast


def test_nothing_stays_open_and_every_decision_is_told() -> None:
    found = decide(replace(RUN, device=None), Pictures(100, (32, 32)))
    for name in ("image_size", "preprocess", "precision", "batch_size", "workers", "cache"):
        assert getattr(found.run, name) not in (None, "auto")
        assert str(getattr(found.run, name, "")) or found.why[name]
        assert name in found.why
    assert "device" in found.why


@pytest.mark.parametrize("name", ["miou", "pixel_accuracy", "score", "map", "r2"])
def test_a_number_that_other_labels_have_is_refused(name: str) -> None:
    metric = Metric(name)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=f"{name}, which needs images with other labels, and these have one class each"
    ):
        decide(replace(RUN, metric=metric), Pictures(8, (32, 32)))
    several = LabelSets.of([[0], [1], []], 2)
    if name not in ("map", "r2"):  # of numbers, as of classes, it becomes map
        with pytest.raises(UsageError, match=r"these have several labels each\. Valid are map, micro_f1, exact"):
            task_for(several).adapt(Run(metric=metric), several)


def test_a_metric_of_an_answer_needs_several() -> None:
    with pytest.raises(UsageError, match=r"metric\.answer is 'kind', and these images have one answer each"):
        decide(replace(RUN, metric=Metric(answer="kind")), Pictures(8, (32, 32)))


CARDS = (
    None,
    Card(ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=14, image_size=(42, 42), classes=3)),
    Card(ResNetConfig(units=(1, 1, 1, 1), width=8, image_size=(64, 64), classes=3), ["a", "b", "c"]),
)
BANDS = Bands("16", (9.0,) * 4, (2.0,) * 4, (0.0,) * 4, (99.0,) * 4, display=(1, 2, 3))


@st.composite
def situations(draw: st.DrawFn) -> tuple[Run, facts.Facts]:
    """A run with any of its settings open, and any images, labels, weights and machine."""
    card, count = draw(st.sampled_from(CARDS)), draw(st.integers(1, 3))
    sides = st.integers(1, 700)
    pictures = st.builds(HeaderFacts, sides, sides, st.just(3), st.just("8"), st.just(True))
    stacks = st.builds(HeaderFacts, sides, sides, st.just(4), st.just("16"), st.just(False))
    labels = draw(
        st.sampled_from([
            np.zeros(4, np.int64),
            LabelSets.of([[0], [], [0], [0]], count),
            Numbers(np.array([[float(row * (1 + target)) for target in range(count)] for row in range(4)])),
        ])
    )  # fmt: skip
    objectives = [Supervised(), Supervised(loss="sigmoid"), Regression(), MAE(), DINO()]
    settings = {
        "model": st.none() | st.sampled_from(["Ti/16", "S/32", "R50x1", "B/14"]),
        "vit": st.sampled_from([Model(), Model(patch=8), Model(dropout=0.1)]),
        "image_size": st.none() | st.integers(1, 300) | st.tuples(st.integers(1, 300), st.integers(1, 300)),
        "preprocess": st.none()
        | st.builds(Preparation, resize=st.none() | st.sampled_from(["small", "squash", "pad"])),
        "objective": st.sampled_from(objectives),
        "tune": st.sampled_from(["all", "attention", "lora", "head"]),
        "batch_size": st.none() | st.integers(1, 600),
        "precision": st.sampled_from(["auto", "bf16", "float32"]),
        "workers": st.none() | st.integers(0, 9),
        "worker_kind": st.sampled_from(["auto", "threads", "processes"]),
        "cache": st.sampled_from(["auto", "yes", "no"]),
        "augment_on": st.sampled_from(["auto", "host", "device"]),
        "decode_on": st.sampled_from(["host", "device"]),
        "augment": st.sampled_from([Augment(), Augment(randaugment=(2, 9))]),
    }
    chosen = {name: draw(values) for name, values in settings.items() if draw(st.booleans())}
    if card is not None:
        chosen |= {"weights": "w", "model": None, "keep_head": draw(st.booleans())}
    known = facts.Facts(
        images=draw(st.integers(1, 10**6)),
        class_names=["a", "b", "c"][:count],
        labels=labels,
        layouts=draw(st.lists(pictures, max_size=4) | st.lists(stacks, min_size=1, max_size=4)),
        statistics=lambda channels, bits: (BANDS, "measured"),
        start=chosen.get("weights"),
        card=card,
        precision=draw(st.sampled_from(["bf16", "float32"])),
        cores=draw(st.integers(1, 200)),
        device=torch.device(draw(st.sampled_from(["cpu", "cuda"]))),
        obstacle=draw(st.sampled_from([lambda: "", lambda: "it is a lambda"])),
        memory=draw(st.integers(0, 2**40)),
        processes=draw(st.integers(1, 9)),
    )
    return Run(**chosen), known


def on_cuda(run: Run, source: Pictures, **machine) -> mind.Decision:
    known = facts.Facts.of(run, source, source.class_names)
    return mind.decide(run, replace(known, **({"device": torch.device("cuda")} | machine)))


@pytest.mark.parametrize(
    ("cores", "settings", "expected"),
    [
        (2, {}, (2, "threads", "2 cores are too few")),
        (8, {}, (7, "processes", "would hold up the launches")),
        (128, {}, (25, "processes", "")),
        (128, {"augment": Augment(three_augment=True)}, (53, "processes", "")),
        (16, {"augment": Augment(randaugment=(2, 9))}, (15, "processes", "")),
        (128, {"worker_kind": "threads"}, (16, "threads", "")),
        (8, {"workers": 3}, (3, "processes", "would hold up")),
        (8, {"workers": 0}, (0, "threads", "")),
        (8, {"cache": "yes"}, (8, "threads", "cached in this process")),
    ],
)
def test_processes_decode_for_cuda_where_there_are_cores_for_them(cores: int, settings: dict, expected: tuple) -> None:
    run, source = replace(RUN, **settings), Pictures(100, (500, 400))
    found = on_cuda(run, source, cores=cores)
    assert (found.run.workers, found.run.worker_kind) == expected[:2]
    assert expected[2] in found.why.get("worker_kind", "")
    on_cpu = on_cuda(run, source, cores=cores, device=torch.device("cpu"))
    assert on_cpu.run.worker_kind == "threads" and "worker_kind" not in on_cpu.why
    assert on_cpu.run.workers == settings.get("workers", max(1, cores // 4))


def test_images_that_no_other_process_can_read_are_decoded_in_threads() -> None:
    source = Pictures(100, (500, 400))
    source.id = lambda index: str(index)  # type: ignore[method-assign]
    assert on_cuda(RUN, source, cores=8).why["worker_kind"].startswith("threads: the images or their transform cannot")
    small = Pictures(100, (32, 32))
    assert on_cuda(RUN, small, memory=2**40).run.cache == "yes"
    assert on_cuda(replace(RUN, worker_kind="processes"), small, memory=2**40).run.cache == "no"
    with pytest.raises(UsageError, match="--cache yes keeps decoded images in one process"):
        decide(replace(RUN, worker_kind="processes", cache="yes"), small)


def test_the_device_augments_where_the_cores_could_not_keep_up() -> None:
    source = Pictures(100, (500, 400))
    randaugment, plain = replace(RUN, augment=Augment(randaugment=(2, 9))), RUN
    assert on_cuda(randaugment, source, cores=16).run.augment_on == "device"
    assert "15 cores could not" in on_cuda(randaugment, source, cores=16).why["augment_on"]
    assert on_cuda(randaugment, source, cores=23).run.augment_on == "host"
    assert on_cuda(plain, source, cores=2).run.augment_on == "host"  # a flip is not worth the way
    assert decide(randaugment, source).run.augment_on == "host"
    assert decide(replace(randaugment, augment_on="device"), source).run.augment_on == "device"
    with pytest.raises(UsageError, match="--augment-on device is for RandAugment"):
        decide(replace(plain, augment_on="device"), source)
    turned, bent = (replace(RUN, augment=Augment(also=also)) for also in (("rotate:15",), ("rotate:15", "elastic")))
    assert decide(replace(turned, augment_on="device"), source).run.augment_on == "device"
    assert on_cuda(bent, source, cores=2).run.augment_on == "host"  # as asked, where it can be done
    with pytest.raises(UsageError, match="followed by no shear, zoom, perspective, elastic"):
        decide(replace(bent, augment_on="device"), source)


def test_a_device_that_decodes_does_the_rest_too() -> None:
    source, asked = Pictures(100, (32, 32)), replace(RUN, decode_on="device")
    decision = on_cuda(asked, source, cores=64, memory=2**40)
    assert decision.run.augment_on == "device" and decision.why["augment_on"] == "device: as it decodes the images"
    assert decision.run.cache == "no" and decision.run.workers == 2  # one core reads 16,000 files per second
    for wrong, message in (
        (dict(augment_on="host"), "remove --augment-on host"),
        (dict(cache="yes"), "remove --decode-on device"),
        (dict(augment=Augment(crop="pad")), "--decode-on device is for RGB images with --augment.crop inception"),
        (dict(preprocess=Preprocess(image_size=(32, 32), resize="pad")), "resized in another way than by 'pad'"),
    ):
        with pytest.raises(UsageError, match=message):
            decide(replace(asked, **wrong), source)  # type: ignore[arg-type]


def test_a_device_that_decodes_needs_torchcodec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitrail.training.decide.decodes_on_device", lambda: False)
    with pytest.raises(UsageError, match="--decode-on device needs torchcodec: pip install"):
        decide(replace(RUN, decode_on="device"), Pictures(100, (500, 400)))


def test_a_long_run_on_a_gpu_is_compiled() -> None:
    def decided(device: str = "cuda", images: int = 1_281_167, **changes: object) -> tuple[bool | None, str]:
        known = facts.Facts(
            images=images,
            class_names=["cat", "dog"],
            labels=np.arange(images) % 2,
            layouts=[],
            statistics=lambda channels, bits: (BANDS, "measured"),
            device=torch.device(device),
            precision="bf16",
        )
        found = mind.decide(Run(image_size=224, **changes), known)  # type: ignore[arg-type]
        return found.run.compile, found.why.get("compile", "")

    # 30 epochs of S/16 (4.6 billion multiplications: Touvron et al. 2021) are 1.06 EFLOP
    assert decided() == (True, "yes: at least 1 h 57 min of training, and compiling pays from 10 min on")
    assert decided(images=5_000) == (False, "no: at least 28 s of training, and compiling pays from 10 min on")
    assert decided(time_limit=5.0)[0] is False and decided(duration=None, time_limit=30.0)[0] is True
    assert decided("cpu") == (False, "") and decided("cpu", compile=True) == (True, "")
    assert decided(compile=False) == (False, "") and decided(model="R50x1")[0] is False


@pytest.mark.fuzz
@settings(max_examples=4 * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(situations())
def test_deciding_a_decided_run_changes_nothing(situation: tuple[Run, facts.Facts]) -> None:
    run, known = situation
    try:
        found = mind.decide(run, known)
    except (UsageError, DataError):
        assume(False)
    again = mind.decide(found.run, known)
    assert (again.run, again.config, again.scale) == (found.run, found.config, found.scale)
    written = merge(Run(), plain(found.run))  # what config.yaml holds
    assert mind.decide(written, known).run == found.run


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ([(40, 40)], "images of 40 x 40 px are resized to 32 x 32 px"),
        ([(32, 32)], "images of 32 x 32 px keep their size"),
        ([(30, 40)], "images of 30 x 40 px are resized to 32 x 32 px (squash: their proportions change)"),
        # 32 / 0.875 = 36.57, rounded down as timm's transforms do
        ([(40, 50), (60, 50)], "images differ in size: the short side becomes 36 px, the central 32 x 32 px are used"),
    ],
)
def test_resizing_is_told_from_what_to_what(sizes: list[tuple[int, int]], told: str) -> None:
    found = decide(replace(RUN, image_size=32), Pictures(10, *sizes))
    assert found.why["preprocess"] == told
    assert not [text for name, text in found.why.items() if name != "preprocess" and "resized" in text]


@pytest.mark.parametrize(
    ("images", "batch"), [(3, 3), (16, 16), (100, 16), (1000, 32), (6000, 256), (50_000, 512), (10**6, 512)]
)
def test_small_data_get_small_batches(images: int, batch: int) -> None:
    assert default_batch(images) == batch


@pytest.mark.parametrize(
    ("gpus", "images", "batch"),
    [(1, 10**6, 512), (2, 10**6, 512), (6, 10**6, 1020), (8, 10**6, 2048), (8, 30_000, 1024), (64, 10**6, 4096)],
)
def test_several_gpus_share_a_larger_batch_if_the_data_are_many(gpus: int, images: int, batch: int) -> None:
    """The largest power of two, rounded down to what the GPUs can share."""
    here = facts.Facts.of(RUN, Pictures(images, (32, 32)), ["cat", "dog"])
    known = replace(here, device=torch.device("cuda"), processes=gpus)
    found = mind.decide(RUN, known)
    assert found.run.batch_size == batch and found.run.batch_size % gpus == 0
    assert (f"{batch}: for {images} training images and {gpus} GPUs" == found.why["batch_size"]) == (batch > 512)
    assert mind.decide(RUN, replace(known, device=facts.CPU)).run.batch_size <= 512
    assert mind.decide(replace(RUN, batch_size=64 * gpus), known).run.batch_size == 64 * gpus


def test_cores_are_divided_by_the_processes_that_have_them_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes of this machine may use the same 8 cores, a third has others, and one is of another machine."""
    every = [("here", {*range(8)}), ("here", {*range(8)}), ("here", {8, 9}), ("there", {*range(8)})]
    monkeypatch.setattr(facts.world, "gather", lambda own: every)
    for rank, count in enumerate((2, 2, 1, 1)):
        monkeypatch.setattr(facts.world, "rank", lambda rank=rank: rank)
        assert facts._sharing_cores() == count


def test_a_batch_larger_than_the_data_is_lowered_and_told() -> None:
    found = decide(replace(RUN, batch_size=512), Pictures(100, (32, 32)))
    assert found.run.batch_size == 100 and "not 512" in found.why["batch_size"]
    with pytest.raises(UsageError, match="batch_size is 0"):
        decide(replace(RUN, batch_size=0), Pictures(100, (32, 32)))


@pytest.mark.parametrize(
    ("batch", "processes", "near"),
    [
        (30, 4, "--batch-size 28 or --batch-size 32"),
        (3, 4, "--batch-size 4"),
        (9, 7, "--batch-size 7 or --batch-size 14"),
    ],
)
def test_a_batch_that_processes_cannot_share_names_the_nearest(
    batch: int, processes: int, near: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world, "size", lambda: processes)
    said = f"batch_size is {batch}, but there are {processes} processes, .* Use {near}, or another number"
    with pytest.raises(UsageError, match=said):
        decide(replace(RUN, batch_size=batch), Pictures(100, (32, 32)))


def test_small_images_are_cached_if_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decide(RUN, Pictures(100, (32, 32))).run.cache == "yes"
    assert decide(RUN, Pictures(100, (400, 300))).run.cache == "no"
    monkeypatch.setattr(facts, "free_memory", lambda device: 100 * 32 * 32 * 3 * 3)
    assert decide(RUN, Pictures(100, (32, 32))).run.cache == "no"


def test_overrides_reach_the_network_and_wrong_ones_are_refused() -> None:
    config = decide(replace(RUN, vit=replace(TINY, pool="gap", registers=2)), Pictures(100, (64, 64))).config
    assert isinstance(config, ViTConfig)
    assert (config.width, config.depth, config.pool, config.registers, config.classes) == (16, 2, "gap", 2, 2)
    with pytest.raises(UsageError, match="no setting 'heads'"):
        decide(replace(RUN, model="R50x1", vit=Model(heads=2)), Pictures(100, (64, 64)))
    with pytest.raises(UsageError, match="cannot be used here"):
        decide(replace(RUN, device="cuda:77"), Pictures(100, (64, 64)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=7, pre_logits=8)
    save_model(tmp_path, build(config), Card(config))
    return tmp_path


def test_weights_bring_their_network_and_get_a_new_zero_head(saved: Path) -> None:
    run = Run(weights=str(saved), vit=Model(drop_path=0.2), device="cpu")
    found = decide(run, Pictures(100, (300, 400)))
    assert found.config.image_size == (32, 32) and "that of the weights" in found.why["image_size"]
    model = build_model(found)[0]
    assert model.config == found.config and model.config.drop_path == 0.2
    assert torch.count_nonzero(model.head.weight) == 0 and model.head.out_features == 2
    original = load_model(saved)
    for name, value in original.blocks.state_dict().items():
        assert torch.equal(model.blocks.state_dict()[name], value), name
    larger = build_model(decide(replace(run, image_size=64), Pictures(100, (300, 400))))[0]
    assert larger(torch.zeros(1, 3, 64, 64, dtype=torch.uint8)).shape == (1, 2)
    with pytest.raises(UsageError, match=r"vit\.width is fixed by the weights"):
        decide(replace(run, vit=Model(width=32)), Pictures(100, (300, 400)))


def test_a_setting_that_the_network_of_the_weights_lacks_is_refused(tmp_path: Path) -> None:
    config = ResNetConfig(units=(1, 1, 1, 1), width=8, image_size=(64, 64), classes=3)
    save_model(tmp_path, build(config), Card(config))
    with pytest.raises(UsageError, match=r"is a ResNet, which has no setting vit\.dropout"):
        decide(Run(weights=str(tmp_path), vit=Model(dropout=0.1), device="cpu"), Pictures(100, (64, 64)))


@pytest.mark.parametrize(
    ("init", "std"), [(None, 0.0), ("paper", 0.0), ("deit", 0.02), ("beit", 0.001 * 0.02), ("mae", 2e-5)]
)
def test_a_new_classifier_is_drawn_as_its_authors_draw_it(init: str | None, std: float, tmp_path: Path) -> None:
    """`trunc_normal_(std=.02)` in DeiT; the same times `init_scale` 0.001 in BEiT's, and 2e-5 in MAE's fine-tuning.

    Also if the weights say that they were drawn so, and for as many classes as they have; all else is theirs.
    """
    pictures, trained = Pictures(200, (32, 32)), init or "mae"
    pictures.class_names = [str(number) for number in range(100)]
    pictures.labels = np.arange(200) % 100
    config = ViTConfig(width=64, depth=1, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=100, init=trained)
    save_model(tmp_path, build(config), Card(config))
    vit = Model() if init is None else Model(init=init)  # type: ignore[arg-type]
    found = build_model(decide(Run(weights=str(tmp_path), vit=vit, device="cpu"), pictures))[0]
    assert not found.head.bias.any() and found.head.weight.std().item() == pytest.approx(std, rel=0.05)
    theirs = load_model(tmp_path).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in found.state_dict().items() if "head" not in name)
    kept = Run(weights=str(tmp_path), vit=vit, keep_head=True, device="cpu")
    assert torch.equal(build_model(decide(kept, pictures))[0].head.weight, theirs["head.weight"])


def test_weights_with_another_dropout_keep_their_licence(tmp_path: Path) -> None:
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=2)
    save_model(tmp_path, build(config), Card(config, licence="mit"))
    for dropout in (0.0, 0.1):
        found = decide(Run(weights=str(tmp_path), vit=Model(dropout=dropout), device="cpu"), Pictures(100, (32, 32)))
        assert build_model(found)[0].card.licence == "mit"


def test_another_patch_resamples_the_weights_patch_kernels(saved: Path) -> None:
    found = decide(Run(weights=str(saved), vit=Model(patch=4, dropout=0.1), device="cpu"), Pictures(100, (300, 400)))
    assert (found.config.patch, found.config.grid, found.config.image_size) == (4, (8, 8), (32, 32))
    model, told = build_model(found)
    assert model.config == found.config and model.stem.weight.shape == (16, 3, 4, 4)
    assert torch.equal(model.stem.weight, load_model(saved, Overrides(patch=4)).stem.weight)
    assert "8 -> 4 px patches" in told["weights"]
    with pytest.raises(UsageError, match="not divisible by the patch, 5 px"):
        decide(Run(weights=str(saved), vit=Model(patch=5), device="cpu"), Pictures(100, (300, 400)))


def test_the_classifier_is_kept_for_the_same_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=2, pre_logits=8)
    model = build(config)
    torch.nn.init.normal_(model.head.weight)
    save_model(tmp_path / "same", model, Card(config, ["cat", "dog"]))
    save_model(tmp_path / "turned", model, Card(config, ["dog", "cat"]))
    save_model(tmp_path / "unnamed", model, Card(config))
    run, pictures = Run(weights=str(tmp_path / "same"), keep_head=True, device="cpu"), Pictures(100, (32, 32))
    found = decide(run, pictures)
    assert torch.equal(build_model(found)[0].head.weight, model.head.weight)
    assert found.why["head"].endswith("for 2 classes")
    unnamed = decide(replace(run, weights=str(tmp_path / "unnamed")), pictures)
    assert "cannot be checked" in unnamed.why["head"]
    with pytest.raises(UsageError, match="another order"):
        decide(replace(run, weights=str(tmp_path / "turned")), pictures)
    with pytest.raises(UsageError, match="--from"):
        decide(replace(RUN, keep_head=True), pictures)


def test_a_classifier_for_other_classes_is_not_kept(saved: Path) -> None:
    with pytest.raises(UsageError, match="7 classes, and these are 2"):
        decide(Run(weights=str(saved), keep_head=True, device="cpu"), Pictures(100, (32, 32)))


def test_a_classifier_of_another_kind_is_not_kept(tmp_path: Path) -> None:
    """Of other answers, of the same names elsewhere, or under a head that is drawn anew."""
    config = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=8, image_size=(32, 32), classes=2)
    one, scale = TargetScale((1.0,), (3.0,)), TargetScale((1.0, 2.0), (3.0, 4.0))
    answers = [CardAnswer("cat", "numbers", 1, scale=one), CardAnswer("dog", "numbers", 1, scale=one)]
    cards = {
        "numbers": Card(config, ["cat", "dog"], scale=scale),
        "answers": Card(config, ["cat", "dog"], answers=answers),
        "segmentation": Card(replace(config, segmentation="linear"), ["cat", "dog"]),
        "moved": Card(config, ["dog", "wolf"]),
        "classes": Card(config, ["cat", "wolf"]),
        "labels": Card(config, ["cat", "dog"], thresholds=[0.5, 0.5]),
    }
    for name, card in cards.items():
        save_model(tmp_path / name, build(card.config), card)
    run, pictures = Run(keep_head=True, device="cpu"), Pictures(100, (32, 32))
    for name in ("numbers", "answers", "segmentation"):
        with pytest.raises(UsageError, match=f"{name} predicts {name}, and this run learns classes"):
            decide(replace(run, weights=str(tmp_path / name)), pictures)
    with pytest.raises(UsageError, match="another order: 'dog' is number 0 there and number 1 here"):
        decide(replace(run, weights=str(tmp_path / "moved")), pictures)
    same = replace(run, weights=str(tmp_path / "classes"))
    assert "the names differ, the first 'wolf' there and 'dog' here" in decide(same, pictures).why["head"]
    decide(replace(run, weights=str(tmp_path / "labels")), pictures)
    with pytest.raises(UsageError, match=r"keep_head keeps the classifier of .*, and vit\.head is another one"):
        decide(replace(same, vit=Model(head=OwnHead())), pictures)
    with pytest.raises(UsageError, match=r"vit\.queries 5 is for images with masks"):
        decide(replace(same, vit=Model(queries=5), keep_head=False), pictures)
    with pytest.raises(UsageError, match=r"vit\.queries 5 is for images with masks"):
        decide(replace(RUN, vit=replace(TINY, queries=5)), pictures)


@pytest.mark.parametrize("begins", [{"keep_head": True}, {"probe_head": True}, {"classes": ("add",)}])
def test_a_classifier_begins_in_one_way(saved: Path, begins: dict) -> None:
    run = Run(weights=str(saved), objective=Supervised(head_bias=-7.0), device="cpu", **begins)
    with pytest.raises(UsageError, match=f"objective.head_bias -7 .*and {next(iter(begins))}"):
        decide(run, Pictures(100, (32, 32)))


def test_a_resumed_run_inherits_decisions_and_keeps_what_it_is_told() -> None:
    recorded = replace(RUN, image_size=32, batch_size=64, accumulate=4, precision="float32", workers=2, cache="no")
    again = inherit(replace(RUN, workers=5, seed=9), recorded)
    assert (again.image_size, again.batch_size, again.accumulate, again.precision) == (32, 64, 4, "float32")
    assert (again.workers, again.cache, again.seed) == (5, "no", 9)


# memory


def tiny_objective(run: Run, side: int = 64) -> tuple[SupervisedObjective, ViTConfig]:
    config = ViTConfig(
        width=64, depth=4, heads=2, mlp_dim=256, patch=8, image_size=(side, side), classes=2, stem="hmlp"
    )
    objective = SupervisedObjective(build(config), Supervised(), Augment(crop="center"), 2, 0)
    return objective.train(), config


def test_micro_batches_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(RUN, batch_size=64, precision="float32")
    objective, config = tiny_objective(run)
    before = {name: value.clone() for name, value in objective.state_dict().items()}

    def parts(gib: float, **changes: object) -> int:
        monkeypatch.setattr(batch_size, "free_memory", lambda device: int(gib * 2**30))
        changed = replace(run, **changes)
        return micro_batches(objective, changed, config, image_bytes(objective, changed, config))

    assert parts(100) == 1
    few, more = parts(0.05), parts(0.02)
    assert 1 < few < more
    assert parts(0.02, activation_checkpointing=True) < more
    assert parts(0.0) == 32  # two images at a time are the least that the BatchNorm of its stem can have
    for name, value in objective.state_dict().items():  # the running statistics, too
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in objective.parameters())


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes."),
        MemoryError(),
    ],
)
def test_running_out_of_memory_says_what_to_do(error: Exception) -> None:
    run = replace(RUN, batch_size=64, accumulate=2)
    with (
        pytest.raises(TrainingError, match=r"Resume with --accumulate 4 .* or with --activation-checkpointing"),
        explaining_memory(run),
    ):
        raise error
    for other in ("something else", "could not create a primitive descriptor for the inner product"):
        with pytest.raises(RuntimeError, match=other), explaining_memory(run):
            raise RuntimeError(other)


def test_torch_still_says_it_that_way() -> None:
    with pytest.raises(TrainingError), explaining_memory(RUN):
        torch.empty(2**60)
