"""Augmentations in words, against torchvision's functions; and named transforms, whose noise is the image's alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from vitrail.config import from_yaml, merge
from vitrail.data.images.augment import CHANGES
from vitrail.data.images.batched import Plan, divided
from vitrail.data.images.native import picture
from vitrail.data.images.ops import train_transform
from vitrail.data.images.worded import DRAWN, STEPS
from vitrail.data.loading.loader import Loader
from vitrail.data.loading.order import stream
from vitrail.data.settings import Augment, Bands, Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.data.wording import MEANINGS, Worded
from vitrail.errors import UsageError
from vitrail.training.run import Run

SMALL = Preprocess((48, 48), resize="squash")
FIVE = Preprocess((48, 48), resize="squash", bands=Bands("16", (1.0,) * 5, (2.0,) * 5, (0.0,) * 5, (9.0,) * 5))
V2 = "torchvision.transforms.v2"
BILINEAR = InterpolationMode.BILINEAR
GREY = [128, 128, 128]


class Scripted:
    """Random numbers that are known beforehand."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = list(numbers)

    def random(self, shape: Any = None) -> Any:
        if shape is None:
            return self.numbers.pop(0)
        return np.array([self.numbers.pop(0) for _ in range(int(np.prod(shape)))]).reshape(shape)

    def standard_normal(self, shape: Any, dtype: Any = float) -> np.ndarray:
        return np.full(shape, self.numbers.pop(0), dtype)


@pytest.fixture(scope="module")
def photograph(shared_data: Path) -> np.ndarray:
    file = sorted((shared_data / "imagenet-val20").glob("*.JPEG"))[1]
    return np.asarray(Image.open(file).convert("RGB").resize((96, 72)))


def alone(*also: str, preprocess: Preprocess = SMALL) -> Any:
    return train_transform(Augment(crop="center", flip=False, also=also), preprocess)


def test_every_word_is_computed_in_one_place() -> None:
    assert {*STEPS} ^ {*DRAWN} == {*MEANINGS}


def drawn(word: str, image: np.ndarray, strength: float, *numbers: float) -> np.ndarray:
    return DRAWN[word](image, strength, Scripted(*numbers))  # type: ignore[arg-type]


def test_shear_zoom_and_hue_are_torchvisions(photograph: np.ndarray) -> None:
    picture = Image.fromarray(photograph)
    still: dict[str, Any] = dict(angle=0.0, translate=[0, 0], interpolation=BILINEAR, fill=GREY)
    for across, down in [(0.9, 0.2), (0.1, 0.5), (0.0, 1.0)]:
        degrees = [20 * (2 * across - 1), 20 * (2 * down - 1)]
        expected = np.asarray(F.affine(picture, scale=1.0, shear=degrees, **still))
        assert np.array_equal(drawn("shear", photograph, 20, across, down), expected)
    for number in (0.1, 0.9):
        expected = np.asarray(F.affine(picture, scale=1 + 0.3 * (2 * number - 1), shear=[0.0, 0.0], **still))
        assert np.array_equal(drawn("zoom", photograph, 0.3, number), expected)
        expected = np.asarray(F.adjust_hue(picture, 0.2 * (2 * number - 1)))
        assert np.array_equal(drawn("hue", photograph, 0.2, number), expected)


def test_a_perspective_is_torchvisions(photograph: np.ndarray) -> None:
    height, width = photograph.shape[:2]
    numbers = [0.9, 0.1, 0.4, 0.8, 0.2, 0.6, 0.7, 0.3]
    start = [[0, 0], [width, 0], [width, height], [0, height]]
    inwards = np.array([(1, 1), (-1, 1), (-1, -1), (1, -1)]) * np.reshape(numbers, (4, 2)) * 0.5 / 2 * (width, height)
    end = (np.array(start) + inwards).tolist()
    expected = F.perspective(Image.fromarray(photograph), start, end, interpolation=BILINEAR, fill=GREY)
    found = drawn("perspective", photograph, 0.5, *numbers).astype(int)
    # the coefficients are float32 there
    assert (abs(found - np.asarray(expected)).max(2) > 2).mean() < 0.01
    assert (abs(found - photograph).max(2) > 2).mean() > 0.5


def test_an_elastic_bend_by_one_displacement_is_a_shift(photograph: np.ndarray) -> None:
    found = drawn("elastic", photograph, 0.05, 1.0).astype(int)
    expected = np.asarray(
        Image.fromarray(photograph).transform(
            (96, 72),
            Image.Transform.AFFINE,
            (1, 0, 0.05 * 96, 0, 1, 0.05 * 72),
            Image.Resampling.BILINEAR,
            fillcolor=(128, 128, 128),
        )
    )
    assert (abs(found - expected) > 1).mean() < 0.02


def test_an_elastic_bend_has_no_seams(photograph: np.ndarray) -> None:
    """A ramp stays monotonous: neighbouring pixels differ by a little everywhere."""
    ramp = np.repeat(np.arange(0, 240, 2, dtype=np.uint8)[None, :, None], 120, 0).repeat(3, 2)
    for seed in range(5):
        bent = DRAWN["elastic"](ramp, 0.03, np.random.default_rng(seed))[20:-20, 20:-20].astype(int)
        assert abs(np.diff(bent, axis=0)).max() <= 4 and abs(np.diff(bent, axis=1)).max() <= 6
        assert not np.array_equal(bent, ramp[20:-20, 20:-20])


def test_noise_has_its_deviation() -> None:
    grey = np.full((64, 64, 3), 128, np.uint8)
    found = DRAWN["noise"](grey, 0.1, np.random.default_rng(3))
    used = np.random.default_rng(3).random()
    assert found.std() == pytest.approx(255 * 0.1 * used, rel=0.03)
    bands = np.zeros((64, 64, 5), np.float32)
    found = DRAWN["noise"](bands, 0.1, np.random.default_rng(3))
    assert found.dtype == np.float32 and found.std() == pytest.approx(0.1 * used, rel=0.03)


THEIRS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "vflip": ("vflip", F.vertical_flip),
    "solarize": ("solarize:100", lambda picture: F.solarize(picture, 100)),
    "posterize": ("posterize:3", lambda picture: F.posterize(picture, 3)),
    "autocontrast": ("autocontrast", F.autocontrast),
    "equalize": ("equalize", F.equalize),
    "invert": ("invert", F.invert),
    "grayscale": ("grayscale", lambda picture: F.rgb_to_grayscale(picture, 3)),
    "rotate": ("rotate:40", lambda picture: F.rotate(picture, 40 * 0.6, BILINEAR, fill=GREY)),
    "brightness": ("brightness:0.5", lambda picture: F.adjust_brightness(picture, 1.3)),
    "contrast": ("contrast:0.5", lambda picture: F.adjust_contrast(picture, 1.3)),
    "saturation": ("saturation:0.5", lambda picture: F.adjust_saturation(picture, 1.3)),
    "sharpness": ("sharpness:0.5", lambda picture: F.adjust_sharpness(picture, 1.3)),
}


@pytest.mark.parametrize("word", THEIRS)
def test_the_other_words_are_torchvisions(word: str, photograph: np.ndarray) -> None:
    text, theirs = THEIRS[word]
    asked = Worded.of(text)
    found = Image.fromarray(photograph)
    for name, value in STEPS[word](asked.strength, Scripted(0.8)):  # type: ignore[arg-type]
        found = CHANGES[name](found, value)
    assert np.array_equal(np.asarray(found), np.asarray(theirs(Image.fromarray(photograph))))


def test_quarter_turns_are_all_drawn(photograph: np.ndarray) -> None:
    square = photograph[:48, :48]
    turn = alone("rotate90")
    found = [turn(square, stream(0, 0, index)) for index in range(40)]
    counts = [sum(np.array_equal(one, np.rot90(square, turns)) for one in found) for turns in range(4)]
    assert sum(counts) == 40 and min(counts) >= 4


@pytest.mark.parametrize(("text", "share"), [("vflip", 0.5), ("vflip@0.1", 0.1), ("hue:0.5", 1), ("noise@0.3", 0.3)])
def test_the_share_of_the_images(text: str, share: float, photograph: np.ndarray) -> None:
    still, change = alone(), alone(text)
    plain = still(photograph, stream(0, 0, 0))
    changed = [not np.array_equal(change(photograph, stream(0, 0, index)), plain) for index in range(300)]
    assert np.mean(changed) == pytest.approx(share, abs=0.09)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("vflop", "no word 'vflop'. Did you mean 'vflip'"),
        ("hflip", "Use augment.flip"),
        ("mixup:0.8", "Use augment.mixup"),
        ("rotate:200", "is '200'; it must be greater than 0 and at most 180"),
        ("rotate:", "is ''; it must be"),
        ("rotate:nan", "is 'nan'; it must be"),
        ("vflip:3", "takes no strength"),
        ("vflip@0", "the share in 'vflip@0'"),
        ("vflip@2", "the share in 'vflip@2' is '2'; it must be"),
        (f"{V2}:RandomRotation(__import__('os'))", "cannot be read"),
        (f"{V2}:RandomRotation(**{{'degrees': 3}})", "None"),
        (f"{V2}:RandomRotation(3).forward(2)", "cannot be read"),
        (f"{V2}:RandomRotation(3", "cannot be read"),
        (f"{V2}:RandomRotatio(3)", "no function or class 'RandomRotatio'. Did you mean 'RandomRotation'"),
        (f"{V2}:RandomRotation()", "cannot be made: TypeError"),
        (f"{V2}:RandomCrop(20)", "made an image of 20 x 20 pixels of one of 48 x 48"),
        (f"{V2}:ToPILImage()", "an operation returns an image, uint8"),
        (f"{V2}:InterpolationMode", "Valid: a function of (image, random numbers)"),
        ("torch.nn:Dropout(0.5)", "cannot be seeded|failed on an image"),
    ],
)
def test_what_cannot_be_done_is_told(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as error:
        alone(text)
    assert any(part in str(error.value) for part in reason.split("|")), error.value


def test_a_text_among_the_arguments_may_hold_any_sign() -> None:
    asked = Worded.of("my.mod:f('a@0.5', b=[1, -2.5])@0.25")
    assert (asked.name, asked.arguments, asked.keywords, asked.share) == (
        "my.mod:f",
        ("a@0.5",),
        {"b": [1, -2.5]},
        0.25,
    )


# ---------------------------------------------------------------- images of other bands, and the device


def test_other_bands_are_moved_alike_and_not_recoloured(photograph: np.ndarray) -> None:
    bands = np.random.default_rng(0).standard_normal((48, 48, 1)).astype(np.float32) * np.arange(1, 6, dtype=np.float32)
    for name, meaning in MEANINGS.items():
        if meaning.colours:
            with pytest.raises(UsageError, match=r"is for RGB images with 8 bits.*vflip, rotate90"):
                alone(name, preprocess=FIVE)
            continue
        found = alone(f"{name}@1", preprocess=FIVE)(bands, stream(0, 0, 3))
        assert found.dtype == np.float32 and found.shape == bands.shape and not np.array_equal(found, bands)
        if name != "noise":
            assert np.allclose(found / np.arange(1, 6), found[..., :1], atol=1e-5)
    jpeg = f"{V2}:JPEG((20, 50))"
    with pytest.raises(UsageError, match=r"failed on an image \(float32, 5 channels\)"):
        alone(jpeg, preprocess=FIVE)
    assert alone(f"{V2}:RandomVerticalFlip(p=1.0)", preprocess=FIVE)(bands, stream(0, 0, 0))[0, 0, 0] == bands[-1, 0, 0]


def test_quarter_turns_need_a_square() -> None:
    with pytest.raises(UsageError, match="must be square, not 32 x 64"):
        alone("rotate90", preprocess=Preprocess((32, 64)))


def test_images_of_any_shape_are_turned_and_keep_their_shapes(photograph: np.ndarray) -> None:
    native = Preprocess((32, 48), resize="native", patch=8)
    transform = alone("rotate90", preprocess=native)
    found = {picture(transform(photograph[:20], stream(0, 0, index))).shape[:2] for index in range(20)}
    assert len(found) == 2 and {(width, height) for height, width in found} == found
    for text in (f"{V2}:Resize((32, 48))", f"{V2}:CenterCrop(32)"):
        with pytest.raises(UsageError, match="it must keep the size"):
            alone(text, preprocess=native)
    assert alone(f"{V2}:RandomRotation(20)", preprocess=native)(photograph, stream(0, 0, 0)).shape == (*native.size, 3)


WORDS = ("vflip", "rotate90", "rotate:30", "translate:0.1", "saturation:0.8", "equalize@0.3", "solarize:90@0.2")


def test_words_on_a_device_are_those_of_the_host(photograph: np.ndarray) -> None:
    """Turns and colours to the bit; what is resampled a level apart, and an equalised level may be some more."""
    for also, most in ((WORDS[:2] + WORDS[4:], 0.0), (WORDS, 0.02)):
        whole = alone(*also)
        host, rest = divided(whole, (48, 48))  # type: ignore[misc]
        assert len(host.ops) == 1 and len(rest.changes) == len(also)  # type: ignore[attr-defined]
        images, rows, expected = [], [], []
        for index in range(64):
            random = stream(0, 0, index)
            images.append(host(photograph, random))
            rows.append(rest.draw(random))
            expected.append(whole(photograph, stream(0, 0, index)))
        plan = Plan.of(rows, (48, 48))
        found = plan.apply(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2), torch.device("cpu"))
        differs = abs(found.permute(0, 2, 3, 1).numpy().astype(int) - np.stack(expected)) > (8 if most else 0)
        assert differs.mean() <= most


def test_words_that_only_the_host_knows_stay_there() -> None:
    transform = train_transform(Augment(also=("vflip", "perspective"), color_jitter=0.4), SMALL)
    host, rest = divided(transform, (48, 48))  # type: ignore[misc]
    assert len(host.ops) == 4 and len(rest.changes) == 1  # type: ignore[attr-defined]
    assert divided(train_transform(Augment(also=("vflip", "elastic")), SMALL), (48, 48)) is None
    assert divided(train_transform(Augment(also=("vflip",)), FIVE), (48, 48), decodes=True) is None


# ---------------------------------------------------------------- random numbers are the image's alone

NAMED = (
    f"{V2}:RandomRotation(30)",
    f"{V2}:ElasticTransform(alpha=20.0)",
    f"{V2}:GaussianNoise(sigma=0.2)",
    f"{V2}:RandomPhotometricDistort(p=0.7)@0.5",
    f"{V2}:AugMix()",
    "noise",
)


def test_threads_do_not_share_random_numbers(photograph: np.ndarray) -> None:
    """Four threads load while another draws from the process's generator, as dropout does."""
    transform = alone(*NAMED)
    expected = [transform(photograph, stream(0, 0, index)) for index in range(12)]
    assert not np.array_equal(expected[0], expected[1])
    torch.manual_seed(5)
    undisturbed = torch.cat([torch.rand(1) for _ in range(2000)])
    torch.manual_seed(5)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(transform, photograph, stream(0, 0, index)) for index in range(12)]
        meanwhile = torch.cat([torch.rand(1) for _ in range(2000)])
        found = [result.result() for result in results]
    assert all(map(np.array_equal, found, expected))
    assert torch.equal(meanwhile, undisturbed)


def batches(workers: int, kind: Any, source: Any) -> list[torch.Tensor]:
    transform = train_transform(Augment(also=NAMED), SMALL)
    one = Loader(source, transform=transform, image_size=48, batch_size=8, seed=3, workers=workers, worker_kind=kind)
    try:
        return [batch.images for epoch in range(2) for batch in one.epoch(epoch)]
    finally:
        one.close()


@pytest.mark.processes
def test_batches_are_equal_with_any_workers() -> None:
    source = open_data(Data(path="digits", subset=24), seed=0).train
    expected = batches(0, "threads", source)
    torch.manual_seed(99)  # of no influence
    for workers, kind in ((3, "threads"), (2, "processes")):
        found = batches(workers, kind, source)
        assert len(found) == len(expected) and all(map(torch.equal, found, expected)), kind


# ---------------------------------------------------------------- the user's own, and whose names are trusted


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_changes.py").write_text(
        "import numpy as np\nimport torch\n"
        "def darker(image, rng, by=0.5):\n    image[:] = image * (1 - by * rng.random())\n    return image\n"
        "def wild(image, rng):\n    return np.random.default_rng().integers(0, 256, image.shape, np.uint8)\n"
        "class Shuffled(torch.nn.Module):\n    def forward(self, image):\n        return image[torch.randperm(3)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "my_changes"
    import sys

    sys.modules.pop("my_changes", None)


def typed(*also: str) -> Augment:
    return merge(Run(), {"augment": {"also": list(also), "crop": "center", "flip": False}}, imports=True).augment


def test_functions_and_modules_of_ones_own(mine: str, photograph: np.ndarray) -> None:
    augment = typed(f"{mine}:darker(by=0.9)", f"{mine}:Shuffled")
    transform = train_transform(augment, SMALL)
    before = photograph.copy()
    first, second = (transform(photograph, stream(0, 0, 1)) for _ in range(2))
    assert np.array_equal(first, second) and np.array_equal(photograph, before)
    assert first.mean() < photograph.mean()
    with pytest.raises(UsageError, match="different images with the same random numbers"):
        train_transform(typed(f"{mine}:wild"), SMALL)
    with pytest.raises(UsageError, match="failed on an image"):
        train_transform(typed(f"{mine}:darker('x')"), SMALL)


def test_a_file_imports_and_calls_nothing(mine: str, tmp_path: Path) -> None:
    """Only what a user types is imported, and what is imported already gets an image: os.system is no transform."""
    run = from_yaml(f"augment: {{also: ['{mine}:darker']}}", Run())
    with pytest.raises(UsageError, match="add --import my_changes"):
        train_transform(run.augment, SMALL)
    kept = merge(run, {"augment": {"flip": False}}, imports=True)  # another setting of the section is typed
    with pytest.raises(UsageError, match="add --import my_changes"):
        train_transform(kept.augment, SMALL)
    told = tmp_path / "told"
    for call in (
        f"os:system('touch {told}')",
        f"subprocess:Popen('touch {told}', shell=True)",
        f"pathlib:Path('{told}')",
    ):
        run = from_yaml(f'augment: {{also: ["{call}"]}}', Run())
        with pytest.raises(UsageError, match=r"Valid: a function of|failed on an image"):
            train_transform(run.augment, SMALL)
    assert not told.exists()
    train_transform(from_yaml(f"augment: {{also: ['{V2}:RandomInvert(p=0.2)']}}", Run()).augment, SMALL)
