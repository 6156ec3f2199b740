"""The inputs of `vitrail inspect`: networks with their labels, pictures, and a data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import from_yaml
from vitrail.errors import UsageError
from vitrail.terminal import ProgressLine
from vitrail.training.run import Run
from vitrail.verbs.flags.compute import Compute
from vitrail.verbs.flags.reading import READ, read_settings
from vitrail.verbs.network.classifier import load_network
from vitrail.words import distinct_labels

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.item import IndexedSource
    from vitrail.inspection.data_pages import DataFeatures
    from vitrail.inspection.network_pages import InspectedNetwork
    from vitrail.inspection.pictures import Pictures


def split_networks_and_images(words: Sequence[str | Path]) -> tuple[list[str | Path], list[str | Path]]:
    """Split words into networks and images: the first word is a network, and so is every run or weight file."""
    networks = list(words[:1])
    images: list[str | Path] = []
    for word in words[1:]:
        (networks if _is_network(word) else images).append(word)
    return networks, images


def _is_network(word: str | Path) -> bool:
    from vitrail.data.image_names import is_image_name
    from vitrail.weights.archive import INDEX, SINGLE, SUFFIXES
    from vitrail.weights.download import is_name
    from vitrail.weights.store import is_ours

    path = Path(word).expanduser()
    if path.is_dir():
        return is_ours(path) or any((path / name).is_file() for name in (*SINGLE, *INDEX))
    if path.suffix in SUFFIXES:
        return True
    return not path.exists() and not is_image_name(path.name) and is_name(word)


def network_labels(networks: Sequence[str | Path]) -> list[str]:
    """Return a short label for each network. Raises UsageError if a network is given twice."""
    labels = distinct_labels(networks)
    if len(set(labels)) < len(labels):
        twice = next(label for number, label in enumerate(labels) if label in labels[:number])
        raise UsageError(f"the network {twice} is given twice. Give each network once.")
    return labels


def inspected_network(source: str | Path, label: str, compute: Compute) -> InspectedNetwork:
    """Load a network, with or without a classifier. Assumptions about a foreign file are logged."""
    from vitrail.data.images.ops import eval_transform
    from vitrail.inspection.network_pages import InspectedNetwork

    model = load_network(source, compute.image_size)
    transform = eval_transform(model.card.preprocess)
    return InspectedNetwork(label, model.to(compute.place()), transform, list(model.card.class_names))


@dataclass
class InspectionInputs:
    """Networks, pictures and a data set. Pictures and data are opened when they are first needed."""

    networks: list[InspectedNetwork]
    first: str | Path
    """Where the first network came from."""
    paths: list[str | Path]
    """Images on the command line, if any."""
    data: str | Path | None
    split: str | None
    compute: Compute
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the data."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out -> the reason."""

    @cached_property
    def data_set(self) -> IndexedSource:
        """The data set. Raises UsageError if none was given."""
        from vitrail.data.sources.open import open_split

        if self.data is None:
            raise UsageError("neighbours and map need a data set: pass it with --data DIR")
        return open_split(read_settings(self.reading, self.data), self.split)

    @cached_property
    def source(self) -> IndexedSource:
        """The given images, else the data set, else the validation images of the first network's run."""
        from vitrail.data.sources.indexed import GivenImages
        from vitrail.evaluation.predict import find_images

        if self.paths:
            data = read_settings(self.reading, used=READ if self.data is not None else ("include", "exclude"))
            return GivenImages(list(find_images(self.paths, data.columns.selection._replace(lists=()))))
        return self.data_set if self.data is not None else _validation_images(self.first)

    def pictures(self, most: int, what: str) -> list[Pictures]:
        """Return at most `most` evenly spaced pictures, prepared for each network; `what` is the word of progress."""
        from vitrail.data.item import Subset, evenly_spaced
        from vitrail.inspection.pictures import Pictures

        source = self.source
        if len(source) > most:
            source = Subset(source, evenly_spaced(len(source), most))
        # all readers share one record of unreadable images
        each, unreadable, progress = self.compute.batch_size, self.unreadable, ProgressLine(what)
        return [Pictures(source, network.transform, each, unreadable, progress) for network in self.networks]

    @cached_property
    def all_features(self) -> DataFeatures:
        """The first network's features of the whole data set."""
        from vitrail.inspection.data_pages import DataFeatures

        return DataFeatures(self.data_set, *self.features(self.data_set))

    def some_features(self, most: int) -> DataFeatures:
        """Return features of at least `most` evenly spaced images of the data set, or of all."""
        from vitrail.data.item import evenly_spaced
        from vitrail.inspection.data_pages import DataFeatures

        if most >= len(self.data_set) or "all_features" in vars(self):  # computed already
            return self.all_features
        rows = evenly_spaced(len(self.data_set), most)
        features, index = self.features(self.data_set, rows)
        return DataFeatures(self.data_set, features, rows[index])

    def features(self, source: IndexedSource, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the first network's features of the images `rows` (default: all) of a source, and their numbers."""
        from vitrail.data.item import Subset
        from vitrail.evaluation.features import extract

        network = self.networks[0]
        chosen = source if rows is None else Subset(source, rows)
        size = network.model.card.preprocess.image_size
        with closing(self.compute.loader(chosen, network.transform, size, ProgressLine("features"))) as loader:
            found = extract(network.model, loader, source.class_names, device=network.device, precision="float32")
        self.unreadable.update(found.bad)
        return found.features, found.index


def _validation_images(model: str | Path) -> IndexedSource:
    """Return the images that selected the best model of a run. Raises UsageError without a run or such images."""
    from vitrail.data.sources.open import open_data

    written = Path(model) / "config.yaml"
    if not written.is_file():
        raise UsageError(f"no images are given, and {model} is not a run: vitrail inspect {model} IMAGE ...")
    run = from_yaml(written, Run())
    splits = open_data(run.data, seed=run.seed, labels=run.supervised)
    found = splits.test if splits.validation is None else splits.validation
    if found is None:
        raise UsageError(f"{model} was trained without validation images: vitrail inspect {model} IMAGE ...")
    return found
