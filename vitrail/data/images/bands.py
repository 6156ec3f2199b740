"""Decide how the images of a run are read: as RGB with 8 bits, or with all their bands and bits.

Of other bands than RGB the statistics are measured on training images.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from vitrail.data.images import png
from vitrail.data.images.decode import DICOM, format_of, header_size
from vitrail.data.images.pixels import check_finite
from vitrail.data.images.stored import bands_text, read_stored, stored
from vitrail.data.item import IndexedSource, evenly_spaced
from vitrail.data.loading.prefetch import each_image, threads
from vitrail.data.settings import Bands, Bits, Data
from vitrail.device import available_cores
from vitrail.errors import DataError, DecodeError, UsageError

SNIFFED = 64
"""Largest number of training images whose header is read."""


class HeaderFacts(NamedTuple):
    """What the header of an image says."""

    height: int
    """Of the upright image, as is its width."""
    width: int
    channels: int
    bits: Bits | None
    picture: bool
    """Whether RGB with 8 bits can be made of it."""

    @property
    def kind(self) -> str:
        """The bands in words: "4 bands of 16 bits"."""
        return _words(self.channels, self.bits)


def layouts(source: IndexedSource, channels: int | None = None) -> list[HeaderFacts]:
    """Return the layouts of up to `SNIFFED` images spread over the source; [] if none opens.

    channels: The number of bands, if it is known, which tells the axes of an array apart. Raises DataError for a read
    that hangs.
    """
    rows = evenly_spaced(len(source), SNIFFED)
    layout = partial(_layout, channels)
    with threads(1) as pool:  # without a thread, nobody would notice a read that hangs
        return [found for found in each_image(pool, layout, source, rows) if found is not None]


def choose_bands(
    data: Data,
    given: Bands | None,
    weights: Bands | None,
    found: Sequence[HeaderFacts],
    measure: Callable[[int, Bits], tuple[Bands, str]],
) -> tuple[Bands | None, dict[str, str]]:
    """Return the bands of the images, or None for RGB with 8 bits, and each decision with its reason.

    given: Bands of an earlier decision, or the user's. weights: Bands of the network to start from. found: `layouts` of
    the training images. measure: `measure_bands` of the training images. Raises UsageError for settings that contradict
    each other, and DataError if most of the images are others.
    """
    if given is not None:
        given.require_consistent()
        for name, asked, has in (("channels", data.channels, given.channels), ("bits", data.bits, given.bits)):
            if asked not in (None, has):
                raise UsageError(f"data.{name} is {asked}, and preprocess.bands has {has}: leave one of them out")
        return _shown(given, data), {}
    asks = data.channels is not None or data.bits is not None
    if not asks and weights is not None:
        channels, bits, why = weights.channels, weights.bits, "as the weights need"
    else:
        kind = bands_to_keep(data, found, rgb=weights is None)
        if kind is None:
            said = {} if data.display is None else {"display": "of no effect: the images are RGB with 8 bits"}
            deep = Counter(one.kind for one in found if one.bits != "8").most_common(1)
            if deep and not asks:
                share = f"{deep[0][1]} of {len(found)} images have {deep[0][0]}"
                return None, {**said, "bits": f"8 bits of RGB: {share}. data.channels and data.bits keep them all"}
            return None, said
        (channels, bits), why = kind, "as data.channels and data.bits say" if asks else "as they are stored"
    _require(channels, bits, found, why)
    decided = {"bands": f"{_words(channels, bits)}: {why}"}
    if weights is not None and (weights.channels, weights.bits) == (channels, bits):
        return _shown(weights, data), {**decided, "statistics": "mean and std of each band: those of the weights"}
    bands, measured = measure(channels, bits)
    display = (1, 2, 3) if channels >= 3 else (1,)
    return _shown(replace(bands, display=display), data), {**decided, "statistics": measured}


def bands_to_keep(data: Data, found: Sequence[HeaderFacts], *, rgb: bool = True) -> tuple[int, Bits] | None:
    """Return number and depth of the bands to read, by the settings or by what most images are.

    None for RGB with 8 bits: for pictures without settings, or, if `rgb`, with settings for three bands of 8 bits.
    Raises DataError for values of a type that no image has.
    """
    pictures = 2 * sum(one.picture for one in found) >= len(found)
    usual = Counter((one.channels, one.bits) for one in found).most_common(1)
    channels, bits = usual[0][0] if usual else (3, "8")
    asked = data.channels is not None or data.bits is not None
    channels, bits = data.channels or channels, data.bits or bits
    if pictures and (not asked or (rgb and (channels, bits) == (3, "8"))):
        return None
    if bits is None:
        raise DataError("the values of the images have a type that no image has. Valid are 8, 16 and 32f (data.bits)")
    return channels, bits


def _shown(bands: Bands, data: Data) -> Bands:
    """Return `bands` with the display that `data` asks for. Raises UsageError as `Bands.require_consistent` does."""
    bands = bands if data.display is None else replace(bands, display=data.display)
    bands.require_consistent()
    return bands


def _require(channels: int, bits: Bits, found: Sequence[HeaderFacts], why: str) -> None:
    """Raise DataError if most images have other bands, because a run without them would be of no use."""
    fitting = [(channels, bits)]
    if fitting == [(1, "8")]:
        fitting.append((3, "8"))  # grey pictures are often stored with three equal bands
    wrong = [one for one in found if (one.channels, one.bits) not in fitting]
    if 2 * len(wrong) > len(found):
        kinds = Counter(one.kind for one in wrong).most_common(3)
        listed = ", ".join(f"{count} with {kind}" for kind, count in kinds)
        raise DataError(
            f"images with {_words(channels, bits)} are needed ({why}), and of {len(found)} training images {listed}. "
            "Set data.channels and data.bits to what the images have, or convert them"
        )


def _words(channels: int, bits: Bits | None) -> str:
    return f"{bands_text(channels)} of {'floating-point numbers' if bits == '32f' else f'{bits} bits'}"


def _layout(channels: int | None, source: IndexedSource, index: int) -> HeaderFacts | None:
    """Return the layout of an image; None for an unreadable one, which the loader reports."""
    try:
        image = source[index].image
    except Exception:
        return None
    picture = _picture(image) if isinstance(image, bytes) else None
    if isinstance(image, bytes) and picture is not None and not image.startswith((b"II", b"MM")):
        return picture
    try:
        found = stored(image)
    except DecodeError:
        return picture
    usual = found.format in ("array", DICOM) and found.dtype == "uint8" and found.size()[2] == 3
    rgb = picture is not None or usual
    return HeaderFacts(*found.size(channels), found.bits, rgb)


def _picture(data: bytes) -> HeaderFacts | None:
    """Return the layout of an image file that `decode` makes RGB of, by its header; None for another one."""
    try:
        format = format_of(data)
        if format.reader is None:
            return None
        with format.reader(io.BytesIO(data)) as image:
            deep = format.name == "PNG" and png.bits(data) == 16
            bits: Bits = "16" if deep or image.mode.startswith("I;16") else "32f" if image.mode in ("F", "I") else "8"
            return HeaderFacts(*header_size(image), len(image.getbands()), bits, True)
    except Exception:  # a damaged header raises anything; the loader says what is wrong
        return None


MEASURED = 1000
"""Largest number of training images whose values are read."""


@dataclass
class _Moments:
    """Mean, sum of squared differences from it, and ends of the values of an image's bands, float64 [bands] each."""

    count: int
    mean: np.ndarray
    squares: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def add(self, other: _Moments) -> None:
        """Add the values of another image (Chan et al. 1979, equation 2.1: exact for large means, too)."""
        count, apart = self.count + other.count, other.mean - self.mean
        self.mean += apart * (other.count / count)
        self.squares += other.squares + apart**2 * (self.count * other.count / count)
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.count = count


def measure_bands(train: IndexedSource, channels: int, bits: Bits) -> tuple[Bands, str]:
    """Return the statistics over at most `MEASURED` training images, evenly spaced, and of how many they are, in words.

    An image that cannot be read is left out here; the loader reports it. Raises DataError if there is no other.
    """
    rows = evenly_spaced(len(train), MEASURED)

    def moments(source: IndexedSource, index: int) -> _Moments | DecodeError:
        try:
            values = read_stored(source[index].image, channels, bits).astype(np.float64)
            check_finite(values)
        except DecodeError as error:
            return error
        mean = values.mean(axis=(0, 1))
        squares = np.square(values - mean).sum(axis=(0, 1))
        return _Moments(values[..., 0].size, mean, squares, values.min(axis=(0, 1)), values.max(axis=(0, 1)))

    with threads(available_cores()) as pool:
        results = list(each_image(pool, moments, train, rows))
    found = [one for one in results if isinstance(one, _Moments)]
    if not found:
        raise DataError(f"none of {len(rows)} training images can be read with these bands. The first: {results[0]}")
    total = found[0]
    for other in found[1:]:
        total.add(other)
    std = np.sqrt(total.squares / total.count)
    constant = ", ".join(str(1 + band) for band in np.flatnonzero(std == 0).tolist())
    of = f"mean and std of each band: those of {len(found)} training images"
    if constant:
        of += f"; band {constant} has one value only, from which nothing can be learned"
    std[std == 0] = 1.0
    return Bands(bits, *(tuple(values.tolist()) for values in (total.mean, std, total.low, total.high))), of
