from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import sklearn.metrics
import torch
from imagenet_layouts import OVERLAP, RED, objectnet, picture
from PIL import Image
from torch import Tensor

from vitrail.data.benchmarks.imagenet import PROTOCOLS, Benchmark, open_benchmark
from vitrail.data.benchmarks.imagenet_labels import part, read_answers, read_mapping, wnids
from vitrail.data.loading.loader import Loader
from vitrail.data.settings import Preprocess
from vitrail.errors import DataError, UsageError
from vitrail.evaluation.classify import Classification, classify
from vitrail.evaluation.imagenet import choosing, output_order, view

SMALL = Preprocess(image_size=(8, 8), resize="squash")
same = np.testing.assert_array_equal


def told(logits: np.ndarray) -> Callable[[Tensor], Tensor]:
    """A network that gives these logits [N, 1000] to the images in their order."""
    rows = iter(torch.tensor(logits, dtype=torch.float32))
    return lambda images: torch.stack([next(rows) for _ in images])


def answered(opened: Benchmark, logits: np.ndarray) -> Classification:
    """What comes of these logits, one row for each image of the source."""
    loader = Loader(
        opened.source,
        transform=view(opened.protocol, SMALL),
        image_size=8,
        batch_size=3,
        shuffle=False,
        drop_last=False,
    )
    predict = choosing(told(logits), opened.columns)
    found = classify(predict, loader, opened.class_names, opened.key)
    same(found.index, np.arange(len(opened.source)))  # every image, once
    return found


def numbers(images: int, seed: int = 0) -> np.ndarray:
    return 2 * np.random.default_rng(seed).normal(size=(images, 1000))


def softmax(logits: np.ndarray) -> np.ndarray:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def ids(opened: Benchmark) -> list[str]:
    return [opened.source.id(i) for i in range(len(opened.source))]


# classes


def timm_data() -> Path:
    """Where timm's lists lie: importing it takes seconds."""
    spec = find_spec("timm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "data"


def timm_list(name: str) -> list[str]:
    return (timm_data() / "_info" / name).read_text().split()


def test_classes_are_those_of_the_files_and_of_timm(shared_data: Path) -> None:
    assert list(wnids()) == json.loads((shared_data / "imagenet-samples" / "wnids.json").read_text())
    assert list(wnids()) == timm_list("imagenet_synsets.txt") == sorted(set(wnids()))
    for mark in "ar":
        assert part(mark).tolist() == list(map(int, timm_list(f"imagenet_{mark}_indices.txt")))
        assert [wnids()[number] for number in part(mark)] == timm_list(f"imagenet_{mark}_synsets.txt")


def test_outputs_are_found_by_the_names_the_network_gives_them() -> None:
    shuffled = np.random.default_rng(0).permutation(1000)
    for name in (lambda k: wnids()[k], lambda k: f"{wnids()[k]} some thing, thing", str):
        order = output_order([name(k) for k in shuffled], 1000)
        assert order.assumed == ""
        same(shuffled[order.outputs], np.arange(1000))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], r"does not name its outputs: they are taken to be in ImageNet's order, from n01440764 to n15075141"),
        ([f"thing {k}" for k in range(1000)], "names its outputs 'thing 0' to 'thing 999', not by WordNet id: they"),
        (["n01440764"] * 1000, "not by WordNet id"),
    ],
)
def test_an_order_that_is_assumed_is_said(names: list[str], said: str) -> None:
    order = output_order(names, 1000)
    same(order.outputs, np.arange(1000))
    assert said in order.assumed


def test_a_network_of_other_classes_is_refused() -> None:
    with pytest.raises(DataError, match="has 21,843 classes, but the protocol needs the 1,000 classes of ImageNet"):
        output_order([], 21843)


# ImageNet ReaL, on real files with their real labels


@pytest.fixture(scope="module")
def val20(shared_data: Path) -> Path:
    return shared_data / "imagenet-val20"


@pytest.fixture(scope="module")
def real(val20: Path) -> tuple[Benchmark, np.ndarray, Classification]:
    """The files with made-up answers, about half of which are right, and what comes of them."""
    opened = open_benchmark("real", val20)
    labels = json.loads((val20 / "real.json").read_text())
    logits = numbers(len(opened.source))
    for row, name in enumerate(ids(opened)):
        valid = labels[int(name[15:23]) - 1]
        if row % 2:
            logits[row, valid[-1]] = 10
    return opened, logits, answered(opened, logits)


def test_real_counts_any_of_an_images_classes(val20: Path, real: tuple[Benchmark, np.ndarray, Classification]) -> None:
    opened, logits, found = real
    labels = json.loads((val20 / "real.json").read_text())
    present = sorted(int(path.name[15:23]) for path in val20.glob("*.JPEG"))
    valid = {f"ILSVRC2012_val_{number:08d}.JPEG": labels[number - 1] for number in present if labels[number - 1]}
    assert ids(opened) == list(valid)
    first = [int(row.argmax()) in good for row, good in zip(logits, valid.values(), strict=True)]
    five = [bool(set(np.argsort(-row)[:5]) & set(good)) for row, good in zip(logits, valid.values(), strict=True)]
    assert 0 < sum(first) < len(first)
    assert (found.count, found.top1, found.top5) == (len(valid), np.mean(first), np.mean(five))
    shares = softmax(logits)
    own = np.array([row[good].sum() for row, good in zip(shares, valid.values(), strict=True)])
    np.testing.assert_allclose(found.loss, -np.log(own), rtol=1e-5, atol=1e-6)
    rest = [np.delete(row, good) for row, good in zip(shares, valid.values(), strict=True)]
    expected = [(1 - p) ** 2 + np.square(row).sum() for p, row in zip(own, rest, strict=True)]
    np.testing.assert_allclose(found.brier, expected, rtol=1e-4, atol=1e-6)
    # listed under the first of its classes, whichever of them was the answer
    assert [wnids()[good[0]] for good in valid.values()] == [found.class_names[k] for k in found.label]


def test_real_agrees_with_timms_evaluator(val20: Path, real: tuple[Benchmark, np.ndarray, Classification]) -> None:
    timm = SourceFileLoader("real_labels", str(timm_data() / "real_labels.py")).load_module()
    opened, logits, found = real
    names = ids(opened)
    theirs = timm.RealLabelsImagenet(names + ["none"] * (50_000 - len(names)), str(val20 / "real.json"))
    theirs.add_result(torch.tensor(logits))
    assert theirs.get_accuracy() == pytest.approx({1: 100 * found.top1, 5: 100 * found.top5})


def test_real_says_that_it_is_not_the_whole_set(real: tuple[Benchmark, np.ndarray, Classification]) -> None:
    opened, _, _ = real
    assert opened.notes[-1] == (
        f"{len(opened.source)} images instead of 46,837: the result is not comparable with others on ImageNet ReaL"
    )
    without = 20 - len(opened.source)
    assert len(opened.notes) == 1 + bool(without)
    assert not without or opened.notes[0].startswith(f"{without} images that show none of the 1,000 classes")


def test_the_real_set_has_the_size_its_authors_give(val20: Path) -> None:
    labels = json.loads((val20 / "real.json").read_text())
    assert (len(labels), sum(map(bool, labels))) == (PROTOCOLS["imagenet"].images, PROTOCOLS["real"].images)


def test_an_image_without_a_class_is_left_out(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        picture(tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    (tmp_path / "real.json").write_text("[[5, 7], [], [7]]")
    opened = open_benchmark("real", tmp_path)
    assert ids(opened) == ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000003.JPEG"]
    logits = np.zeros((2, 1000))
    logits[:, 7] = 5
    found = answered(opened, logits)
    assert (found.top1, found.label.tolist(), found.top[:, 0].tolist()) == (1.0, [5, 7], [5, 7])


# ILSVRC2012's own labels


@pytest.fixture
def three(tmp_path: Path) -> Path:
    for number in (1, 2, 3):
        picture(tmp_path / "val" / f"ILSVRC2012_val_{number:08d}.JPEG", number)
    return tmp_path / "val"


CLASSES = [65, 970, 230]


def labels_of(path: Path, labels: Path | None = None) -> list[int]:
    return open_benchmark("imagenet", path, labels).source.labels.tolist()


@pytest.mark.parametrize(
    "lines",
    [
        [wnids()[k] for k in CLASSES],
        [f"ILSVRC2012_val_{n:08d}.JPEG {k}" for n, k in zip((3, 1, 2), (230, 65, 970), strict=True)],
        ["ImageId,PredictionString"]
        + [f"ILSVRC2012_val_{n + 1:08d},{wnids()[k]} 1 2 3 4 {wnids()[k]} 5 6 7 8 " for n, k in enumerate(CLASSES)],
    ],
    ids=["ids", "val.txt", "kaggle"],
)
def test_labels_in_a_file(three: Path, lines: list[str]) -> None:
    given = three.parent / "labels.txt"
    given.write_text("\n".join(lines) + "\n")
    assert labels_of(three, given) == CLASSES
    given.rename(three.parent / "val.txt")
    assert labels_of(three.parent) == CLASSES


def test_labels_of_the_development_kit_are_translated(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import imagenet

    kit = three.parent / "ILSVRC2012_devkit_t12"
    (kit / "data").mkdir(parents=True)
    order = np.random.default_rng(0).permutation(1000)
    kind = [("ILSVRC2012_ID", "f8"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "f8")]
    rows = [(number + 1, wnids()[k], f"class {k}", "", 0) for number, k in enumerate(order)]
    rows += [(1001, "n00001740", "entity", "", 3)]
    scipy.io.savemat(kit / "data" / "meta.mat", {"synsets": np.array(rows, dtype=kind).reshape(-1, 1)})
    truth = [int(np.flatnonzero(order == k)[0]) + 1 for k in CLASSES]
    (kit / "data" / "ILSVRC2012_validation_ground_truth.txt").write_text("".join(f"{one}\n" for one in truth))
    with tarfile.open(three.parent / "ILSVRC2012_devkit_t12.tar.gz", "w:gz") as archive:
        archive.add(kit, kit.name)
    monkeypatch.setattr(imagenet, "_verify_archive", lambda *of: None)  # it is not the real one
    imagenet.parse_devkit_archive(str(three.parent))
    _, theirs = imagenet.load_meta_file(str(three.parent))
    assert [wnids()[k] for k in labels_of(three)] == theirs
    assert labels_of(three) == CLASSES == labels_of(three, kit / "data" / "ILSVRC2012_validation_ground_truth.txt")
    (kit / "data" / "meta.mat").write_bytes(b"MATLAB 5.0")
    with pytest.raises(DataError, match=r"meta\.mat is not the meta.mat"):
        labels_of(three)
    (kit / "data" / "meta.mat").unlink()
    with pytest.raises(DataError, match=r"numbers only, .* Put its meta\.mat beside the file"):
        labels_of(three)


def test_one_folder_for_each_class_or_names_with_classes(three: Path, tmp_path: Path) -> None:
    for number, k in enumerate(CLASSES, start=1):
        old = three / f"ILSVRC2012_val_{number:08d}.JPEG"
        (tmp_path / "sorted" / wnids()[k]).mkdir(parents=True)
        shutil.copy(old, tmp_path / "sorted" / wnids()[k] / old.name)
        old.rename(old.with_name(f"{old.stem}_{wnids()[k]}.JPEG"))
    assert labels_of(three) == CLASSES
    assert sorted(labels_of(tmp_path / "sorted")) == sorted(CLASSES)
    (tmp_path / "sorted" / "real.json").write_text("[[1], [2], [3]]")
    opened = open_benchmark("real", tmp_path / "sorted")
    assert opened.key is not None
    order = [int(name[-9:-5]) for name in ids(opened)]
    assert opened.key.label[opened.source.labels].tolist() == order
    shutil.copytree(tmp_path / "sorted" / wnids()[65], tmp_path / "sorted" / wnids()[66])
    with pytest.raises(DataError, match="has image 1 twice"):
        open_benchmark("real", tmp_path / "sorted")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n01440764\n12 3\n", "'12 3' does not say which class image 2 has"),
        ("n00000001\n", "'n00000001' in 'n00000001' is not a class of ILSVRC2012"),
        ("ILSVRC2012_val_00000001.JPEG 1000\n", "'1000' in .* is not a class"),
        ("tench\n", "'tench' does not say which class image 1 has"),
        ("n01440764\n", r"has no label for ILSVRC2012_val_00000002.JPEG \(2 images\)"),
    ],
)
def test_labels_that_say_too_little_are_refused(three: Path, text: str, message: str) -> None:
    given = three.parent / "labels.txt"
    given.write_text(text)
    with pytest.raises(DataError, match=message):
        labels_of(three, given)


def test_files_of_labels_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_answers(tmp_path / "no.txt")
    for text, message in (
        ("{}", "is not real.json"),
        ("[[1000]]", "is not real.json"),
        ("[", r"real\.json cannot be read: Expecting value"),
    ):
        (tmp_path / "real.json").write_text(text)
        picture(tmp_path / "ILSVRC2012_val_00000001.JPEG")
        with pytest.raises(DataError, match=message):
            open_benchmark("real", tmp_path)
    (tmp_path / "real.json").write_text("[]")
    with pytest.raises(DataError, match=r"has no entry for ILSVRC2012_val_00000001.JPEG: it has 0"):
        open_benchmark("real", tmp_path)


# V2, A, R: class folders


def test_folders_of_v2_are_numbers_and_not_text(shared_data: Path, tmp_path: Path) -> None:
    root = tmp_path / "imagenetv2-matched-frequency-format-val"
    sample = shared_data / "imagenet-samples" / "n01440764_tench.JPEG"
    wanted = [0, 10, 100, 2, 999]  # as text sorts them
    for number in wanted:
        (root / str(number)).mkdir(parents=True)
        (root / str(number) / "a.jpeg").symlink_to(sample)
    for place in (root, tmp_path):
        opened = open_benchmark("v2", place)
        assert opened.source.labels.tolist() == wanted
        assert ids(opened)[1] == "10/a.jpeg"
    logits = numbers(5)
    logits[[0, 2, 4], [0, 100, 999]] = 20
    found = answered(opened, logits)
    assert found.top1 == np.mean(logits.argmax(1) == wanted) == 0.6
    expected = sklearn.metrics.log_loss(wanted, softmax(logits), labels=range(1000))
    assert found.nll == pytest.approx(expected, rel=1e-5)
    shutil.copytree(root, tmp_path / "imagenetv2-top-images-format-val", symlinks=True)
    with pytest.raises(DataError, match="holds several sets of ImageNet-V2, imagenetv2-matched-frequency-format-val, "):
        open_benchmark("v2", tmp_path)


@pytest.mark.parametrize("protocol", ["a", "r"])
def test_a_and_r_choose_among_their_200_classes(protocol: str, shared_data: Path, tmp_path: Path) -> None:
    chosen = part(protocol)
    samples = {path.name[:9]: path for path in sorted((shared_data / "imagenet-samples").glob("*.JPEG"))}
    present = [number for number in chosen if wnids()[number] in samples][:4]
    assert len(present) == 4
    root = tmp_path / f"imagenet-{protocol}"
    for number in present:
        (root / wnids()[number]).mkdir(parents=True)
        (root / wnids()[number] / "0.jpg").symlink_to(samples[wnids()[number]])
    (root / "README.txt").write_text("about")
    opened = open_benchmark(protocol, root)
    logits = numbers(4)
    logits[0, present[0]] = logits[2, present[2]] = 8  # surely the best, and no share so near 1 that rounding shows
    outside = next(k for k in range(1000) if k not in chosen)
    logits[:, outside] = 50  # the best of 1,000, and none of the 200
    found = answered(opened, logits)
    among = logits[:, chosen]
    right = [chosen[row.argmax()] == number for row, number in zip(among, present, strict=True)]
    assert found.top1 == np.mean(right) == 0.5
    places = np.searchsorted(chosen, present)
    expected = sklearn.metrics.log_loss(places, softmax(among), labels=range(200))
    assert found.nll == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(found.probability[:, 0], softmax(among).max(1), rtol=1e-5)
    np.testing.assert_allclose(found.brier, np.square(softmax(among) - np.eye(200)[places]).sum(1), rtol=1e-4)
    assert found.class_names == [wnids()[number] for number in chosen]
    assert opened.notes[0].startswith("ignored 1 x file beside")
    picture(root / wnids()[outside] / "0.png")
    with pytest.raises(DataError, match=f"has a folder {wnids()[outside]}/, which is none of its 200 classes"):
        open_benchmark(protocol, root)


# ObjectNet


@pytest.fixture(scope="module")
def household(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return objectnet(tmp_path_factory.mktemp("data") / "objectnet-1.0")


def test_objectnets_classes_are_found_in_its_files(household: Path) -> None:
    mapping = read_mapping(household / "mappings")
    expected = {folder: (name, numbers) for folder, (name, _, numbers) in OVERLAP.items()}
    found = zip(mapping.folders, mapping.names, mapping.classes, strict=True)
    assert {folder: (name, classes) for folder, name, classes in found} == expected


@pytest.mark.parametrize("inside", ["", "images"])
def test_objectnet_counts_an_answer_that_is_one_of_the_objects_classes(household: Path, inside: str) -> None:
    opened = open_benchmark("objectnet", household / inside)
    folders = [name.split("/")[0] for name in ids(opened)]
    assert sorted(set(folders)) == sorted(OVERLAP) and len(folders) == 10
    logits = numbers(10)
    logits[folders.index("chair"), 559] = 20
    logits[folders.index("alarm_clock"), 530] = 20
    logits[folders.index("mug"), [954, 504]] = 20, 19  # second best
    logits[folders.index("banana"), [7, 954]] = 20, 19  # behind a class that ObjectNet lacks
    found = answered(opened, logits)
    valid = [set(OVERLAP[folder][2]) for folder in folders]
    first = [int(row.argmax()) in good for row, good in zip(logits, valid, strict=True)]
    five = [bool(set(np.argsort(-row)[:5].tolist()) & good) for row, good in zip(logits, valid, strict=True)]
    assert sum(first) == 2 and sum(five) == 4
    assert (found.top1, found.top5, found.count) == (0.2, 0.4, 10)
    assert found.class_names == [name for name, _, _ in OVERLAP.values()]
    assert found.top[folders.index("mug"), :2].tolist() == [1, 4]  # Banana, Mug
    assert found.top[folders.index("banana"), 0] == -1  # none of the classes
    own = np.array([row[sorted(good)].sum() for row, good in zip(softmax(logits), valid, strict=True)])
    np.testing.assert_allclose(found.loss, -np.log(own), rtol=1e-5, atol=1e-6)
    assert "4 images of 2 classes that ImageNet does not have: not counted" in opened.notes


def test_the_border_is_cut_off_and_480_of_512_pixels_are_seen(tmp_path: Path) -> None:
    inner = np.random.default_rng(0).integers(0, 256, (600, 512, 3), dtype=np.uint8)
    framed = Image.new("RGB", (516, 604), RED)
    framed.paste(Image.fromarray(inner), (2, 2))
    shown = view(PROTOCOLS["objectnet"], Preprocess(image_size=(480, 480), resize="squash", crop=0.5))
    unused = np.random.default_rng(0)
    same(shown(np.asarray(framed), unused), inner[60:540, 16:496])
    with pytest.raises(UsageError, match="cannot cut 2 pixels off each side of an image of 4 x 9"):
        shown(np.zeros((4, 9, 3), dtype=np.uint8), unused)


def test_other_sets_are_seen_as_the_network_is_used_to() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    shown = view(PROTOCOLS["v2"], Preprocess(image_size=(20, 20), crop=0.5))
    same(shown(image, np.random.default_rng(0)), image[10:30, 10:30])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pytorch_to_imagenet_2012_id.json", '{"0": 1}', "should give each class 0 to 999 a line"),
        ("pytorch_to_imagenet_2012_id.json", '{"0": "x"}', "should map numbers of classes to numbers of lines"),
        ("pytorch_to_imagenet_2012_id.json", "[]", "should hold a JSON object, not a list"),
        ("objectnet_to_imagenet_1k.json", '{"Mug": "cup of tea"}', "'cup of tea' of 'Mug' is not a line of"),
        ("objectnet_to_imagenet_1k.json", '{"Jug": "coffee mug"}', "has a class 'Jug', for which folder_to_objectnet"),
        ("folder_to_objectnet_label.json", "", r"label\.json cannot be read: Expecting value"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(
    household: Path, tmp_path: Path, name: str, text: str, message: str
) -> None:
    shutil.copytree(household / "mappings", tmp_path / "mappings")
    (tmp_path / "mappings" / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_mapping(tmp_path / "mappings")
    (tmp_path / "mappings" / name).unlink()
    with pytest.raises(DataError, match=f"{name}, which is part of ObjectNet, does not exist"):
        read_mapping(tmp_path / "mappings")


# what is missing


@pytest.mark.parametrize(
    ("protocol", "source", "layout"),
    [
        ("imagenet", "https://image-net.org", "val/ILSVRC2012_val_00000001.JPEG"),
        ("real", "https://github.com/google-research/reassessed-imagenet", "val/real.json"),
        ("v2", "https://huggingface.co/datasets/vaishaal/ImageNetV2", "format-val/0/*.jpeg"),
        ("a", "hendrycks/imagenet-a.tar", "imagenet-a/n01498041/*.jpg"),
        ("r", "hendrycks/imagenet-r.tar", "imagenet-r/n01443537/*.jpg"),
        ("objectnet", "https://objectnet.dev", "objectnet-1.0/mappings/folder_to_objectnet_label.json"),
    ],
)
def test_what_is_missing_is_said_with_where_it_is_to_be_had(
    protocol: str, source: str, layout: str, tmp_path: Path
) -> None:
    picture(tmp_path / "photos" / "cat" / "1.png")
    for place in (tmp_path / "nothing", tmp_path / "photos"):
        with pytest.raises(DataError) as error:
            open_benchmark(protocol, place)
        assert PROTOCOLS[protocol].title in str(error.value)
        assert source in str(error.value) and layout in str(error.value)


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "ILSVRC2012_val_00000001.JPEG")
    with pytest.raises(DataError, match=r"no real\.json in"):
        open_benchmark("real", tmp_path)
    with pytest.raises(DataError, match="nothing says which classes the images in"):
        open_benchmark("imagenet", tmp_path)
    with pytest.raises(UsageError, match=r"no protocol is called 'reel': .* Did you mean 'real'"):
        open_benchmark("reel", tmp_path)
    with pytest.raises(UsageError, match="labels in the names of its folders: leave --labels out"):
        open_benchmark("a", tmp_path, tmp_path / "labels.txt")


def test_a_loader_of_fewer_outputs_is_noticed() -> None:
    predict: Any = choosing(lambda images: torch.zeros(len(images), 10), np.arange(12))
    with pytest.raises(DataError, match="gave 10 outputs, but the protocol needs output 11"):
        predict(torch.zeros(2, 3, 8, 8))
