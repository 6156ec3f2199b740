"""What `vitrail inspect` looks into: networks with the names that figures call them by, pictures, a data set."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrail.config import from_yaml
from vitrail.errors import UsageError
from vitrail.training.run import Run

if TYPE_CHECKING:
    import numpy as np

    from vitrail.data.item import Listed
    from vitrail.inspection.album import Subject
    from vitrail.inspection.album_data import Embedded
    from vitrail.inspection.pictures import Pictures

log = logging.getLogger("vitrail")


def told_apart(words: Sequence[str | Path]) -> tuple[list[str | Path], list[str | Path]]:
    """Return networks and images: the first word is a network, another one where it is a run or weights."""
    networks = list(words[:1])
    images: list[str | Path] = []
    for word in words[1:]:
        (networks if _is_network(word) else images).append(word)
    return networks, images


def _is_network(word: str | Path) -> bool:
    from vitrail.data.sources.folder import is_image_name
    from vitrail.weights.archive import INDEX, SINGLE, SUFFIXES
    from vitrail.weights.hub.download import is_name
    from vitrail.weights.store import is_ours

    path = Path(word).expanduser()
    if path.is_dir():
        return is_ours(path) or any((path / name).is_file() for name in (*SINGLE, *INDEX))
    if path.suffix in SUFFIXES:
        return True
    return not path.exists() and not is_image_name(path.name) and is_name(word)


def labelled(networks: Sequence[str | Path]) -> list[str]:
    """Return for each network the shortest end of its path that no other has. Raises UsageError for the same one
    twice."""
    parts = [Path(source).parts for source in networks]
    for length in range(1, max(map(len, parts)) + 1):
        labels = ["/".join(part[-length:]) for part in parts]
        if len(set(labels)) == len(labels):
            return labels
    raise UsageError("the same network was given twice: there is nothing to compare")


def load_subject(source: str | Path, label: str, image_size: int | None, device: Any) -> Subject:
    """Load a network, with or without a classifier; what was assumed about a foreign file is logged."""
    from vitrail.data.images.ops import eval_transform
    from vitrail.inspection.album import Subject
    from vitrail.weights.load import load

    network: Any = load(source, image_size=image_size)
    report = network.load_report
    log.log(logging.INFO if report.assumptions else logging.DEBUG, "%s", report)
    return Subject(label, network.to(device), eval_transform(network.card.preprocess), list(network.card.class_names))


@dataclass
class Material:
    """Networks and what to show them; images are opened when they are first asked for."""

    networks: list[str | Path]
    subjects: list[Subject]
    paths: list[str | Path]
    """Images; empty where none were given."""
    data: str | Path | None
    split: str | None
    batch_size: int
    unreadable: dict[str, str] = field(default_factory=dict)
    """Images that were left out, and why."""
    _source: Listed | None = None
    _data_set: Listed | None = None
    _embedded: Embedded | None = None

    def data_set(self) -> Listed:
        """Return the data set. Raises UsageError where none was given."""
        from vitrail.data.sources.open import open_split

        if self.data is None:
            raise UsageError("neighbours and map are about a data set: give it as --data DIR")
        if self._data_set is None:
            self._data_set = open_split(self.data, self.split)
        return self._data_set

    def source(self) -> Listed:
        """Return the pictures: those given, else the data set's, else those that the first network was chosen by."""
        from vitrail.evaluation.predict import find_images
        from vitrail.inspection.pictures import Files

        if self._source is None:
            if self.paths:
                self._source = Files(list(find_images(self.paths)))
            else:
                self._source = self.data_set() if self.data is not None else _own_images(self.networks[0])
        return self._source

    def pictures(self, most: int) -> list[Pictures]:
        """Return the pictures as each network takes them; of more than `most` so many, evenly spaced."""
        from vitrail.data.item import View
        from vitrail.inspection.album_data import evenly
        from vitrail.inspection.pictures import Pictures

        source = self.source()
        if len(source) > most:
            source = View(source, evenly(len(source), most))
        # one list for all of what cannot be read
        return [Pictures(source, subject.transform, self.batch_size, self.unreadable) for subject in self.subjects]

    def embedded(self, most: int | None = None) -> Embedded:
        """Return the data set's features to the first network; with `most`, of so many images at least."""
        from vitrail.inspection.album_data import Embedded, evenly

        source = self.data_set()
        if most is not None and most < len(source) and self._embedded is None:
            rows = evenly(len(source), most)
            features, index = self.features(source, rows)
            return Embedded(source, features, rows[index])
        if self._embedded is None:
            self._embedded = Embedded(source, *self.features(source))
        return self._embedded

    def features(self, source: Listed, rows: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the first network's features of a source's images, or of `rows`, and their numbers in that."""
        from vitrail.data.item import View
        from vitrail.data.loading.loader import Loader
        from vitrail.evaluation.features import extract
        from vitrail.training.resolve import available_cores

        subject = self.subjects[0]
        loader = Loader(
            source if rows is None else View(source, rows),
            transform=subject.transform,
            image_size=subject.model.card.preprocess.image_size,
            batch_size=32,
            shuffle=False,
            drop_last=False,
            workers=available_cores() // 2,
        )
        try:
            found = extract(subject.model, loader, source.class_names, device=subject.device, precision="float32")
        finally:
            loader.close()
        self.unreadable.update(found.bad)
        return found.features, found.index


def _own_images(model: str | Path) -> Listed:
    """The images that a run was chosen by. Raises UsageError for what is no run, or has none."""
    from vitrail.data.sources.open import open_data

    written = Path(model) / "config.yaml"
    if not written.is_file():
        raise UsageError(f"this needs images, and {model} is no run that knows any: vitrail inspect {model} FILE ...")
    run = from_yaml(written, Run())
    splits = open_data(run.data, seed=run.seed, labels=run.supervised)
    found = splits.test if splits.validation is None else splits.validation
    if found is None:
        raise UsageError(f"{model} was trained without validation images: vitrail inspect {model} FILE ...")
    return found
