"""The data sets of the papers by name: what they hold and where they are published. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One published data set."""

    name: str
    classes: int
    splits: dict[str, int] = field(default_factory=dict)
    """Split -> number of images."""
    hub: str | None = None
    """Its name on the Hugging Face hub; None where it is not published there."""
    image_column: str | None = None
    label_column: str | None = None


_ENTRIES = (
    # paper, section 4.1: pre-training
    Entry("imagenet", 1000, {"train": 1_281_167, "validation": 50_000}, "ILSVRC/imagenet-1k"),
    Entry("imagenet21k", 21_841, {"train": 14_197_122}),
    Entry("jft300m", 18_291, {"train": 303_000_000}),  # never published
    # paper, section 4.1: transfer
    Entry("cifar10", 10, {"train": 50_000, "test": 10_000}, "uoft-cs/cifar10", "img", "label"),
    Entry("cifar100", 100, {"train": 50_000, "test": 10_000}, "uoft-cs/cifar100", "img", "fine_label"),
    Entry("pets", 37, {"train": 3_680, "test": 3_669}, "timm/oxford-iiit-pet", "image", "label"),
    Entry("flowers102", 102, {"train": 1_020, "validation": 1_020, "test": 6_149}, "nelorth/oxford-flowers"),
)

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
"""Name -> data set, for the names that `open_data` takes beside paths ('digits' comes with scikit-learn)."""
