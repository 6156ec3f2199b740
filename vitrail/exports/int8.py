"""int8: quantise a program after training, and keep it only if it classifies held-out images as well as before.

NNCF quantises weights and activations, after SmoothQuant (Xiao et al. 2023) has moved outliers of the activations into
the weights. The classifier stays out of int8. If accuracy falls by more than is allowed, so do the layers that add most
to the error. (NNCF's own accuracy control leaves the biases corrected for int8 where it puts layers back, which can
cost more than it gains.)
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import numpy as np

from vitrail.data.images.ops import eval_transform
from vitrail.data.item import IndexedSource, Subset
from vitrail.data.labels.sets import one_label
from vitrail.data.loading.loader import Loader
from vitrail.data.roles import Splits
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.device import available_cores
from vitrail.errors import DataError, ExportError, UsageError
from vitrail.exports.kinds import Opened, Scheme, errors_only
from vitrail.version import install_extra
from vitrail.weights.card import Card

log = logging.getLogger("vitrail")

CALIBRATION = 300
"""Maximum number of training images from which the ranges of the activations are taken."""
HELD_OUT = 1000
"""Maximum number of held-out images on which accuracy is measured."""
RANKED = 32
"""Number of images on which layers are compared, if some have to stay out of int8."""

_LOUD = ("nncf", "torch.utils.cpp_extension")
"""Loggers that warn during quantisation: NNCF, which imports parts of torch late, and such a part that misses CUDA."""

Labelled = tuple[np.ndarray, int]
"""One image, uint8 [1, channels, height, width], and its class."""

ToCalibrate = Data | str | Path | Callable[[], Splits]
"""A data set, or a function that opens one and divides it as the training of the network did."""


@dataclass(frozen=True)
class Samples:
    """Images of a data set, prepared as in prediction."""

    calibration: list[Labelled]
    """Training images."""
    held_out: list[Labelled]
    """Images that are not among them."""


@dataclass(frozen=True)
class Quantised:
    """The effect of quantisation on a program."""

    calibrated: int
    """Number of training images for calibration; 0 if the program takes ranges as it runs."""
    held_out: int
    """Number of held-out images on which the following values were measured."""
    top1: float
    top5: float
    """Accuracy of the int8 program."""
    float_top1: float
    float_top5: float
    """Accuracy of the float32 program."""
    agreement: float
    """Share of the held-out images for which both predict the same class."""
    layers: int
    """Number of matrix products and convolutions with weights."""
    int8_layers: int
    """Number of them that are computed in int8."""

    @property
    def drop(self) -> float:
        """Loss of top-1 accuracy in points."""
        return 100 * (self.float_top1 - self.top1)

    def __str__(self) -> str:
        own = "rounded by each image's own ranges"
        ranges = f"calibrated on {self.calibrated} training images" if self.calibrated else own
        return (
            f"int8: {ranges}; on {self.held_out} held-out images top-1 is "
            f"{self.top1:.2%} (float32 {self.float_top1:.2%}), top-5 {self.top5:.2%} ({self.float_top5:.2%}), and the "
            f"best class is the same for {self.agreement:.2%}; {self.int8_layers} of {self.layers} layers are in int8"
        )


@runtime_checkable
class Quantisable(Protocol):
    """Functions of a runtime's module that quantisation needs. A network is in the runtime's own form."""

    def read_network(self, path: Path) -> Any:
        """Return the network of a program."""

    def write_network(self, network: Any, path: Path, about: dict[str, Any]) -> None:
        """Write a network and its description as a program."""

    def function(self, network: Any, precision: str = "float32") -> Callable[[np.ndarray], list[np.ndarray]]:
        """Return the function from images to all outputs of a network, as it is computed for a program's precision."""

    def scheme(self, network: Any) -> Scheme:
        """Return what of a network should be in int8 on this processor."""

    def products(self, network: Any) -> list[str]:
        """Return the names of the matrix products and convolutions of a network, in its order."""

    def expose_output(self, network: Any, name: str) -> Any:
        """Return a network whose output is that of one of its operations."""

    def argument(self, images: np.ndarray) -> Any:
        """Return images as the argument with which NNCF calls the runtime."""

    def layers(self, network: Any) -> tuple[int, int]:
        """Return the number of products with weights, and how many of them are computed in int8."""


@runtime_checkable
class OwnInt8(Protocol):
    """Functions of the module of a runtime that quantises in a way of its own."""

    def read(self, path: Path, device: str = "cpu") -> Opened:
        """Open a program."""

    def write_int8(self, path: Path, changed: Path) -> tuple[int, int]:
        """Write the program at `path` in int8 to `changed`; return the numbers of products as `Quantisable.layers`."""


def draw_samples(calibrate: ToCalibrate, card: Card) -> Samples:
    """Return training images to calibrate on, and held-out ones to measure on, drawn with seed 0.

    Held-out images are of the validation or the test split, or else the share of the training images that
    `vitrail train` holds out; a warning then says that the network may know them, unless `calibrate` has divided the
    images itself. Raises DataError if the data cannot be read, are unlabelled, have classes that the network does not
    know, or if nothing is held out.
    """
    if callable(calibrate):
        splits = calibrate()
    else:
        splits = open_data(calibrate if isinstance(calibrate, Data) else Data(path=str(calibrate)))
    one_label(splits.train.labels, "export --precision int8, which measures top-1 accuracy,")
    drawn = "share" in splits.held_out  # from the training images
    held_out = splits.validation
    if splits.test is not None and (drawn or held_out is None):
        held_out = splits.test
    elif drawn and not callable(calibrate):
        log.warning(
            "the images on which int8 is measured are drawn from the data: the network may have learned them, and may "
            "be less accurate on new ones. Name a split that it has not learned (data.validation, data.test), or "
            "export the run with the data and the settings of its training"
        )
    if held_out is None:
        raise DataError(
            "no images are held out, on which the accuracy of int8 could be measured. Set data.holdout to a share "
            "above 0, or name a split (data.validation, data.test)"
        )
    names = list(card.class_names) or list(splits.class_names)
    if len(names) != card.config.classes:
        raise DataError(
            f"the network has {card.config.classes} classes and the data have {len(names)}: calibrate on images of the "
            "classes that the network was trained on"
        )
    return Samples(_some(splits.train, CALIBRATION, card), _some(Subset(held_out, class_names=names), HELD_OUT, card))


def _some(source: IndexedSource, most: int, card: Card) -> list[Labelled]:
    """Return at most `most` images of a source, drawn with seed 0."""
    drawn = np.sort(np.random.default_rng(0).permutation(len(source))[:most])
    loader = Loader(
        Subset(source, drawn),
        transform=eval_transform(card.preprocess),
        image_size=card.preprocess.size,
        batch_size=1,
        workers=available_cores() // 2,
        shuffle=False,
        drop_last=False,
    )
    with closing(loader):
        images = [(batch.images.numpy().copy(), int(batch.labels[0])) for batch in loader.epoch(0)]
    if not images:
        raise DataError(f"none of {len(drawn)} images could be read: {loader.bad[0][1]}")
    return images


def quantise(
    module: Quantisable | OwnInt8, path: Path, about: dict[str, Any], given: Samples, max_drop: float
) -> Quantised:
    """Replace the float32 program at `path` by an int8 program, and return what that changed.

    Classifiers stay out of int8. `max_drop` is the largest loss of top-1 accuracy on the held-out images in points.
    While it is exceeded, twice as many layers as before stay out of it, too. Raises ExportError if no program with a
    layer in int8 keeps the limit; the program is then unchanged. Raises UsageError if NNCF is not installed.
    """
    if isinstance(module, OwnInt8):
        return _in_its_own_way(module, path, given, max_drop)
    network = module.read_network(path)
    before = _outputs(module.function(network), given.held_out)
    scheme = module.scheme(network)
    heads = 2 if about["card"]["config"].get("distilled") else 1
    products = module.products(network)
    # products of one token, whose rounding goes straight into the answer
    classifiers = products[-heads:]
    names = [name for name in products[:-heads] if name not in scheme.left_out]
    worst: list[str] = []
    kept = 0
    while True:
        changed = _in_int8(module, network, given, scheme, [*worst[:kept], *classifiers])
        after = _outputs(module.function(changed, "int8"), given.held_out)
        quantised = _compared(given, before, after, len(given.calibration), module.layers(changed))
        if quantised.drop <= max_drop:
            break
        worst = worst or _by_error(module, network, changed, given, names)
        kept = max(1, 2 * kept)
        out, every = kept + heads, len(worst) + heads
        log.info("int8 loses %.2f points; %d of %d products stay out of int8", quantised.drop, out, every)
        if kept >= len(worst):
            raise _too_much(quantised, max_drop, "calibrate on more images")
    with TemporaryDirectory(dir=path.parent) as folder:  # the runtime may still read the old file
        module.write_network(changed, Path(folder) / path.name, {**about, "quantised": asdict(quantised)})
        for file in Path(folder).iterdir():
            os.replace(file, path.parent / file.name)
    return quantised


def _in_its_own_way(module: OwnInt8, path: Path, given: Samples, max_drop: float) -> Quantised:
    """Replace the program at `path` as `quantise` does, by what its runtime's own quantisation makes of it."""
    changed = path.with_name(f"int8-{path.name}")
    layers = module.write_int8(path, changed)
    before, after = (
        np.concatenate([run(image) for image, _ in given.held_out])
        for run in (module.read(file).run for file in (path, changed))
    )
    quantised = _compared(given, before, after, 0, layers)
    if quantised.drop > max_drop:
        raise _too_much(quantised, max_drop, "export it in float32")
    changed.replace(path)
    return quantised


def _too_much(quantised: Quantised, max_drop: float, instead: str) -> ExportError:
    return ExportError(
        f"int8 loses {quantised.drop:.2f} points of top-1 accuracy, and at most {max_drop:g} are allowed, so nothing "
        f"was written. {quantised}. Allow a larger loss (--max-drop), or {instead}"
    )


def _in_int8(module: Quantisable, network: Any, given: Samples, scheme: Scheme, kept: list[str]) -> Any:
    """Return a network in int8 by a scheme, except the products `kept`."""
    with _nncf() as nncf:
        preset = nncf.QuantizationPreset
        return nncf.quantize(
            network,
            nncf.Dataset(given.calibration, lambda labelled: module.argument(labelled[0])),
            model_type=nncf.ModelType.TRANSFORMER,
            preset=preset.PERFORMANCE if scheme.symmetric else preset.MIXED,
            subset_size=len(given.calibration),
            ignored_scope=nncf.IgnoredScope(names=[*kept, *scheme.left_out]),
        )


def _compared(
    given: Samples, before: np.ndarray, after: np.ndarray, calibrated: int, layers: tuple[int, int]
) -> Quantised:
    """Compare the outputs of a float32 network for the held-out images with those of its int8 network."""
    labels = np.array([label for _, label in given.held_out])
    return Quantised(
        calibrated=calibrated,
        held_out=len(labels),
        top1=_accuracy(after, labels),
        top5=_accuracy(after, labels, best=5),
        float_top1=_accuracy(before, labels),
        float_top5=_accuracy(before, labels, best=5),
        agreement=float((before.argmax(axis=1) == after.argmax(axis=1)).mean()),
        layers=layers[0],
        int8_layers=layers[1],
    )


def _by_error(module: Quantisable, network: Any, changed: Any, given: Samples, names: list[str]) -> list[str]:
    """Return the names of products in another order: first those that add most to the error.

    The error of a product is that of its output relative to float32. What a product adds is the difference from the
    product before it.
    """
    images = [image for image, _ in given.calibration[:RANKED]]
    errors = []
    for name in names:
        exact, rounded = (module.function(module.expose_output(each, name)) for each in (network, changed))
        pairs = [(exact(image)[0], rounded(image)[0]) for image in images]
        size = sum(np.square(a).sum() for a, _ in pairs)
        errors.append(np.sqrt(sum(np.square(a - b).sum() for a, b in pairs) / max(size, np.finfo(float).tiny)))
    return [names[number] for number in np.argsort(-np.diff(errors, prepend=0.0))]


def _outputs(run: Callable[[np.ndarray], list[np.ndarray]], images: Iterable[Labelled]) -> np.ndarray:
    """Return the output of a network for each image, float32 [n, classes]."""
    return np.concatenate([run(image)[0] for image, _ in images])


def _accuracy(outputs: np.ndarray, labels: np.ndarray, best: int = 1) -> float:
    """Return the share of the images whose class is among the `best` largest outputs."""
    chosen = np.argsort(-outputs, axis=1, kind="stable")[:, :best]
    return float((chosen == labels[:, None]).any(axis=1).mean())


@contextmanager
def _nncf() -> Iterator[Any]:
    """Yield NNCF, which neither prints nor reports what is quantised to Intel. Raises UsageError if it is missing."""
    silent = "NNCF_CI"
    before = os.environ.get(silent)
    os.environ[silent] = "1"
    try:
        with errors_only(*_LOUD):
            import nncf
    except ImportError as error:
        raise UsageError(f"int8 programs need {error.name or 'nncf'}: {install_extra('export')}") from error
    finally:
        os.environ.pop(silent)
        if before is not None:
            os.environ[silent] = before
    with errors_only(*_LOUD), redirect_stdout(io.StringIO()):  # progress bars
        yield nncf
