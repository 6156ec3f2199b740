"""The test sets of ImageNet classifiers, each as its authors evaluate it. Torch-free.

| protocol | images | right is | the network chooses among |
|---|---|---|---|
| imagenet | 50,000, ILSVRC2012 validation | the class of the image | 1,000 classes |
| real | 46,837 of them, ImageNet ReaL | any of the image's classes | 1,000 |
| v2 | 10,000, ImageNet-V2 | the class of the image | 1,000 |
| a | 7,500, ImageNet-A | the class of the image | the set's 200 |
| r | 30,000, ImageNet-R | the class of the image | the set's 200 |
| objectnet | 18,574, ObjectNet | any ImageNet class of the object | 1,000 |

Sources: ILSVRC2012; "Are we done with ImageNet?" (Beyer et al., 2020); "Do ImageNet Classifiers Generalize to
ImageNet?" (Recht et al., 2019); "Natural Adversarial Examples" (Hendrycks et al., 2019); "The Many Faces of
Robustness" (Hendrycks et al., 2020); "ObjectNet" (Barbu et al., 2019), for which the ViT paper (D.9) takes the view
of "Big Transfer" (Kolesnikov et al., 2019): the shorter side is resized to 512 pixels, of which 480 are seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitrail.data.benchmarks import objectnet
from vitrail.data.benchmarks.answer_key import AnswerKey
from vitrail.data.item import Listed
from vitrail.errors import DataError

IMAGES = "https://image-net.org (an account is needed)"
HENDRYCKS = "https://people.eecs.berkeley.edu/~hendrycks"


@dataclass(frozen=True)
class Protocol:
    """What a test set is, where it is to be had, and how it is looked at."""

    title: str
    images: int
    """That are counted, if all are there."""
    get: str
    """What to download from where."""
    layout: str
    border: int = 0
    """Pixels cut from each side of an image before anything else."""
    crop: float | None = None
    """Share of the resized shorter side that is seen; None: as the network's card says."""

    def missing(self, problem: str) -> DataError:
        """Return the error that says what is wrong, what to download and how it should lie."""
        lines = "\n".join(f"    {line}" for line in self.layout.splitlines())
        return DataError(f"{self.title}: {problem}. Get {self.get}; unpacked it is\n{lines}")


PROTOCOLS: dict[str, Protocol] = {
    "imagenet": Protocol(
        "ImageNet (ILSVRC2012, validation)",
        50_000,
        f"ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz from {IMAGES}",
        "val/ILSVRC2012_val_00000001.JPEG, ... and ILSVRC2012_devkit_t12/ beside val/ (or labels named with --labels)\n"
        "or val/n01440764/*.JPEG, ... one folder for each class",
    ),
    "real": Protocol(
        "ImageNet ReaL",
        46_837,
        f"ILSVRC2012_img_val.tar from {IMAGES} and real.json from\n"
        "https://github.com/google-research/reassessed-imagenet",
        "val/ILSVRC2012_val_00000001.JPEG, ... in class folders or not\n"
        "val/real.json, or beside val/, or named with --labels",
    ),
    "v2": Protocol(
        "ImageNet-V2",
        10_000,
        "imagenetv2-matched-frequency.tar.gz from https://huggingface.co/datasets/vaishaal/ImageNetV2",
        "imagenetv2-matched-frequency-format-val/0/*.jpeg to .../999/*.jpeg: folders are numbers of classes",
    ),
    "a": Protocol(
        "ImageNet-A",
        7_500,
        f"{HENDRYCKS}/imagenet-a.tar",
        "imagenet-a/n01498041/*.jpg, ... 200 folders",
    ),
    "r": Protocol(
        "ImageNet-R",
        30_000,
        f"{HENDRYCKS}/imagenet-r.tar",
        "imagenet-r/n01443537/*.jpg, ... 200 folders",
    ),
    "objectnet": Protocol(
        "ObjectNet",
        18_574,
        "objectnet-1.0.zip from https://objectnet.dev",
        "objectnet-1.0/images/alarm_clock/*.png, ...\n"
        f"objectnet-1.0/mappings/{objectnet.FOLDERS}, {objectnet.OVERLAP},\n"
        f"    {objectnet.NUMBERS}, {objectnet.LABELS} (or name mappings/ with --labels)",
        border=objectnet.BORDER,
        crop=480 / 512,
    ),
}


@dataclass(frozen=True)
class Benchmark:
    """A test set, opened."""

    protocol: Protocol
    source: Listed
    """Each image that counts, once; its labels are those of `key`, or without one numbers of `class_names`."""
    class_names: list[str]
    """WordNet ids, or names of ObjectNet's."""
    columns: np.ndarray
    """int64: the numbers of ImageNet's classes among which the network chooses, in the order of `key`'s outputs."""
    key: AnswerKey | None
    notes: list[str]
    """What was left out, and whether the set is complete."""
