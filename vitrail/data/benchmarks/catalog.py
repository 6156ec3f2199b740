"""The data sets of the papers by name: what they hold and where they are published. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One published data set."""

    name: str
    classes: int
    """Of its label; 0 where it has several (their tasks are in `vitrail.data.benchmarks.vtab`)."""
    splits: dict[str, int] = field(default_factory=dict)
    """Split -> number of images."""
    hub: str | None = None
    """Its name on the Hugging Face hub; None where it is not published there as images and a label."""
    image_column: str | None = None
    label_column: str | None = None
    url: str | None = None
    """Its authors' page; None where it was never published."""
    tfds: str | None = None
    """Its name in TensorFlow Datasets, NAME[/CONFIG]:VERSION, "*" being any number."""
    by_hand: bool = False
    """Must its files be fetched by hand, after an agreement, before TensorFlow Datasets can prepare it?"""

    @property
    def source(self) -> str:
        """Where it comes from, in a sentence."""
        places = [f"the hub as {self.hub}"] if self.hub else []
        places += [f"tfds build {self.tfds.partition(':')[0]} ({self.tfds})"] if self.tfds else []
        places += [f"{self.url}{' (by hand)' if self.by_hand else ''}"] if self.url else []
        return "; ".join(places) or "never published"


_ENTRIES = (
    # paper, section 4.1: pre-training
    Entry(
        "imagenet",
        1000,
        {"train": 1_281_167, "validation": 50_000},
        "ILSVRC/imagenet-1k",
        url="https://www.image-net.org",
        tfds="imagenet2012:5.*.*",
        by_hand=True,
    ),
    Entry("imagenet21k", 21_841, {"train": 14_197_122}, url="https://www.image-net.org", by_hand=True),
    Entry("jft300m", 18_291, {"train": 303_000_000}),  # never published
    # paper, section 4.1: transfer
    Entry(
        "cifar10",
        10,
        {"train": 50_000, "test": 10_000},
        "uoft-cs/cifar10",
        "img",
        "label",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "cifar10:3.*.*",
    ),
    Entry(
        "cifar100",
        100,
        {"train": 50_000, "test": 10_000},
        "uoft-cs/cifar100",
        "img",
        "fine_label",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        "cifar100:3.*.*",
    ),
    Entry(
        "pets",
        37,
        {"train": 3_680, "test": 3_669},
        "timm/oxford-iiit-pet",
        "image",
        "label",
        "https://www.robots.ox.ac.uk/~vgg/data/pets/",
        "oxford_iiit_pet:3.*.*",
    ),
    Entry(
        "flowers102",
        102,
        {"train": 1_020, "validation": 1_020, "test": 6_149},
        "nelorth/oxford-flowers",
        url="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        tfds="oxford_flowers102:2.*.*",
    ),
    # follow-up, appendix B: transfer
    Entry(
        "inaturalist2018",
        8_142,
        {"train": 437_513, "validation": 24_426},
        url="https://github.com/visipedia/inat_comp/tree/master/2018",
        tfds="i_naturalist2018:0.1.0",
    ),
    Entry(
        "inaturalist2019",
        1_010,
        {"train": 265_240, "validation": 3_003},  # of the 268,243 that were published
        url="https://github.com/visipedia/inat_comp/tree/master/2019",
    ),
    Entry(
        "cars",
        196,
        {"train": 8_144, "test": 8_041},
        "tanganke/stanford_cars",
        "image",
        "label",
        "https://ai.stanford.edu/~jkrause/cars/car_dataset.html",
        "cars196:2.*.*",
    ),
    # VTAB-1k (paper, section 4.1 and appendix D.10), beside CIFAR-100, Pets and Flowers
    Entry(
        "caltech101",
        102,  # 101 and the background
        {"train": 3_060, "test": 6_084},
        url="https://data.caltech.edu/records/mzrjq-6wc02",
        tfds="caltech101:3.*.*",
    ),
    Entry(
        "dtd",
        47,
        {"train": 1_880, "validation": 1_880, "test": 1_880},
        "tanganke/dtd",
        "image",
        "label",
        "https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        "dtd:3.*.*",
    ),
    Entry(
        "sun397",
        397,
        {"train": 76_128, "validation": 10_875, "test": 21_750},
        "tanganke/sun397",
        "image",
        "label",
        "https://vision.princeton.edu/projects/2010/SUN/",
        "sun397/tfds:4.*.*",
    ),
    Entry(
        "svhn",
        10,
        {"train": 73_257, "test": 26_032},
        url="http://ufldl.stanford.edu/housenumbers/",
        tfds="svhn_cropped:3.*.*",
    ),
    Entry(
        "patch_camelyon",
        2,
        {"train": 262_144, "validation": 32_768, "test": 32_768},
        "1aurent/PatchCamelyon",
        "image",
        "label",
        "https://github.com/basveeling/pcam",
        "patch_camelyon:2.*.*",
    ),
    Entry(
        "eurosat",
        10,
        {"train": 27_000},
        "tanganke/eurosat",
        "image",
        "label",
        "https://github.com/phelber/eurosat",
        "eurosat/rgb:2.*.*",
    ),
    Entry(
        "resisc45",
        45,
        {"train": 31_500},
        "timm/resisc45",
        "image",
        "label",
        "http://www.escience.cn/people/JunweiHan/NWPU-RESISC45.html",
        "resisc45:3.*.*",
        by_hand=True,
    ),
    Entry(
        "retinopathy",
        5,
        {"train": 35_126, "validation": 10_906, "test": 42_670},
        url="https://www.kaggle.com/c/diabetic-retinopathy-detection/data",
        tfds="diabetic_retinopathy_detection/btgraham-300:3.*.*",
        by_hand=True,
    ),
    Entry(
        "clevr",
        0,
        {"train": 70_000, "validation": 15_000, "test": 15_000},
        url="https://cs.stanford.edu/people/jcjohns/clevr/",
        tfds="clevr:3.*.*",
    ),
    Entry(
        "dmlab",
        6,
        {"train": 65_550, "validation": 22_628, "test": 22_735},
        url="https://github.com/google-research/task_adaptation",
        tfds="dmlab:2.0.1",
    ),
    Entry(
        "dsprites",
        0,
        {"train": 737_280},
        url="https://github.com/deepmind/dsprites-dataset",
        tfds="dsprites:2.*.*",
    ),
    Entry(
        "kitti",
        0,
        {"train": 6_347, "validation": 423, "test": 711},
        url="http://www.cvlibs.net/datasets/kitti/",
        tfds="kitti:3.1.0",
    ),
    Entry(
        "smallnorb",
        0,
        {"train": 24_300, "test": 24_300},
        url="https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
        tfds="smallnorb:2.*.*",
    ),
)

CATALOG: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
"""Name -> data set, for the names that `open_data` takes beside paths ('digits' comes with scikit-learn)."""
