"""A classifier of images in scikit-learn's shape: a frozen network, and a linear or nearest-neighbour classifier on it.

`ViTClassifier` goes wherever an estimator goes: pipelines, cross-validation, grid searches. Images are paths, images of
Pillow's, or arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image

from vitrail.data.images.decode import pillow_channels, pillow_pixels
from vitrail.data.images.pixels import pixels_of
from vitrail.data.item import UNKNOWN, Reader
from vitrail.data.sources.folder import read_file
from vitrail.device import Precision
from vitrail.errors import DataError, DecodeError, UsageError
from vitrail.evaluation.confidence import fit_if_better as fit_temperature
from vitrail.evaluation.knn import TEMPERATURE, neighbours
from vitrail.ranges import InputSize
from vitrail.verbs.features import Embedder
from vitrail.verbs.flags.compute import Compute
from vitrail.version import extras_named

with extras_named():
    from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

    from vitrail.evaluation.linear_probe import STRENGTHS, held_out, score_classifier
    from vitrail.evaluation.softmax import solve

UNTRIED = 0.1
"""Strength of the penalty where no image can be held out to choose one by."""


class ViTClassifier(ClassifierMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Classify images by the features of a pretrained Vision Transformer, which does not change.

    weights: A run folder, a model folder, a weight file, or a name on the hub. It may be None if all images are given
    as features.
    probe: "linear" is softmax regression, solved to its optimum; "knn" lets the `k` nearest training images vote.
    l2: Strength of the penalty on the squared weights (default: the best of seven on a held-out tenth of the images).
    calibrate: Divide the outputs of "linear" by the temperature that fits the held-out images best; without them, and
    with too few of them, the temperature is 1.
    image_size, batch_size, workers, device, precision: As in `vitrail embed`.

    Wherever X is named, it is a sequence of images: paths, images of Pillow's, uint8 arrays [height, width, 3] or
    [height, width], or one uint8 array [images, height, width, 3]. A network of other bands takes arrays with its
    number and depth of bands: [height, width, bands], or one array [images, height, width, bands]. A two-dimensional
    array of numbers is taken for features [images, width] that were computed before, for example by `transform` or
    `vitrail.embed`.

    After `fit`: `classes_`, `n_features_in_` (number of features of an image), and for "linear" `l2_`, `temperature_`,
    `coef_` [classes, features] and `intercept_` [classes].
    """

    def __init__(
        self,
        weights: str | Path | None = None,
        *,
        probe: Literal["linear", "knn"] = "linear",
        l2: float | None = None,
        k: int = 20,
        calibrate: bool = True,
        image_size: InputSize | None = None,
        batch_size: int = 64,
        workers: int | None = None,
        device: str | None = None,
        precision: Precision = "auto",
    ) -> None:
        self.weights = weights
        self.probe = probe
        self.l2 = l2
        self.k = k
        self.calibrate = calibrate
        self.image_size = image_size
        self.batch_size = batch_size
        self.workers = workers
        self.device = device
        self.precision = precision

    def fit(self, X: Any, y: Any) -> Self:
        """Fit the classifier to images and their classes, which may be of any type that scikit-learn accepts.

        Raises UsageError for an invalid setting, DataError for an image that cannot be read, ValueError for fewer than
        two classes and for features that are not finite.
        """
        if self.probe not in ("linear", "knn"):
            raise UsageError(f"probe is {self.probe!r}. Valid: linear, knn")
        if self.k < 1 or (self.l2 is not None and not self.l2 > 0):
            raise UsageError(f"k is {self.k} and l2 is {self.l2}; k must be at least 1, and l2 above 0")
        features = X if not _are_images(X) else self._embed(X)
        features, y = validate_data(self, features, y, dtype=np.float32, multi_output=False)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"the images have one class, {self.classes_[0]}, and a classifier needs two")
        if self.probe == "linear":
            self._fit_linear(features, labels.astype(np.int64))
        else:
            self._train, self._labels = features, labels
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the features of images, float32 [images, width]."""
        check_is_fitted(self)
        return self._features(X)

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each of `classes_` for each image, float64 [images, classes]."""
        check_is_fitted(self)
        features = self._features(X)
        if self.probe == "linear":
            logits = (features.astype(np.float64) @ self.coef_.T + self.intercept_) / self.temperature_
            shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        else:
            shares = self._votes(features)
        return shares / shares.sum(axis=1, keepdims=True)  # type: ignore[no-any-return]

    def predict(self, X: Any) -> np.ndarray:
        """Return the most likely class of each image."""
        check_is_fitted(self)
        return self.classes_[self.predict_proba(X).argmax(axis=1)]  # type: ignore[no-any-return]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []  # features are float32, whatever the images are
        return tags

    def __getstate__(self) -> Any:
        state = super().__getstate__()
        # the network is loaded again from `weights`
        return {name: value for name, value in state.items() if name != "_embedder"}

    def _fit_linear(self, features: np.ndarray, labels: np.ndarray) -> None:
        """Choose penalty and temperature on held-out images if no penalty is given, and solve."""
        everything, classes = np.arange(len(labels)), len(self.classes_)
        self.temperature_ = 1.0
        if self.l2 is not None:
            self.l2_ = self.l2
        elif np.bincount(labels).max() < 2:
            self.l2_ = UNTRIED
        else:
            others, held = held_out(labels, seed=0)
            tried = solve(features, labels, others, STRENGTHS, classes=classes)
            scores = {one: score_classifier(one.classifier, features, labels, held) for one in tried}
            best = max(scores, key=lambda one: (scores[one][0], -scores[one][2]))
            self.l2_ = best.l2
            if self.calibrate:
                logits = best.classifier.logits(torch.from_numpy(features[held])).cpu().numpy()
                self.temperature_ = fit_temperature(logits, labels[held]) or 1.0
        (final,) = solve(features, labels, everything, [self.l2_], classes=classes)
        found = final.classifier
        self.coef_ = found.weight.double().numpy()
        self.intercept_ = found.bias.double().numpy() - self.coef_ @ found.mean.double().numpy()

    def _votes(self, features: np.ndarray) -> np.ndarray:
        """Return the votes of the nearest training images for each class, float64 [images, classes]."""
        votes = np.zeros((len(features), len(self.classes_)))
        begin = 0
        for _, found in neighbours(self._train, features, min(self.k, len(self._train))):
            rows, near = begin + np.arange(len(found)), found.numpy()
            # exact, so that an image has the same votes whatever images it comes with
            similarity = np.einsum("nw,nkw->nk", _directions(features[rows]), _directions(self._train[near]))
            np.add.at(votes, (rows[:, None], self._labels[near]), np.exp((similarity - 1) / TEMPERATURE))
            begin += len(rows)
        return votes

    def _features(self, X: Any) -> np.ndarray:
        features = self._embed(X) if _are_images(X) else X
        return validate_data(self, features, dtype=np.float32, reset=False)  # type: ignore[no-any-return]

    def _embed(self, X: Any) -> np.ndarray:
        """Return the features of images. Raises DataError with the number of the first that cannot be read."""
        if self.weights is None:
            raise UsageError("weights is None, and images need a network: ViTClassifier('google/vit-base-patch16-224')")
        if not hasattr(self, "_embedder"):
            compute = Compute(self.image_size, self.batch_size, self.workers, self.device, self.precision)
            self._embedder = Embedder(self.weights, compute)
        bands = self._embedder.network.card.preprocess.bands
        images = _Images(X, rgb=bands is None)
        if bands is not None:  # all images mostly have the same bands: say at once what is wrong with them
            try:
                pixels_of(bands).read(images.image(0))
            except DecodeError as error:
                raise DataError(f"{images.id(0)} cannot be read: {error}") from error
        found = self._embedder(images)
        if found.bad:
            raise DataError(f"{found.bad[0][0]} cannot be read: {found.bad[0][1]}")
        return found.features


def _directions(features: np.ndarray) -> np.ndarray:
    """Return vectors of length 1, float64; a vector of zeros stays zero."""
    lengths = np.linalg.norm(features.astype(np.float64), axis=-1, keepdims=True)
    return features / np.maximum(lengths, 1e-12)  # type: ignore[no-any-return]


def _are_images(X: Any) -> bool:
    """Return whether X is a sequence of images, and not an array of features."""
    if isinstance(X, np.ndarray) and X.dtype.kind not in "OU":
        return X.ndim == 4
    first = X[0] if isinstance(X, Sequence | np.ndarray) and len(X) else None
    return isinstance(first, str | Path | Image.Image) or (isinstance(first, np.ndarray) and first.ndim > 1)


class _Images(Reader):
    """Images in memory or in files, without labels.

    rgb: The network reads RGB with 8 bits. Otherwise its pixels read the arrays as they are.
    """

    def __init__(self, images: Sequence[Any] | np.ndarray, *, rgb: bool = True) -> None:
        super().__init__(np.full(len(images), UNKNOWN, dtype=np.int64), np.zeros(len(images), dtype=np.int64), [])
        self._images, self._rgb = images, rgb

    def image(self, index: int) -> bytes | np.ndarray:
        """See `Reader.image`. Raises DataError for a value that is no image."""
        image = self._images[index]
        if isinstance(image, str | Path):
            return read_file(image)
        if isinstance(image, Image.Image):
            return pillow_pixels(image) if self._rgb else pillow_channels(image)
        array = np.asarray(image)
        if not self._rgb:
            return array
        if array.dtype != np.uint8 or array.ndim not in (2, 3) or array.shape[2:] not in ((), (3,)):
            raise DataError(
                f"{self.id(index)} is {array.dtype} of shape {array.shape}; an array must be uint8 [height, width, 3] "
                "or [height, width]"
            )
        return array if array.ndim == 3 else np.repeat(array[:, :, None], 3, axis=2)

    def id(self, index: int) -> str:
        """See `IndexedSource.id`."""
        image = self._images[index]
        return str(image) if isinstance(image, str | Path) else f"image {index}"
