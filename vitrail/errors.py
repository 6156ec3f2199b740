"""Every error a user can cause, as one tree.

```
VitrailError            exit 1: printed as one message, without a traceback
├── UsageError          exit 2: a flag, a name or a configuration value is wrong
├── DataError           a data set is missing, empty, mislabelled or too broken to use
│   └── DecodeError     one file cannot become an image; the reason is in `reason`
├── WeightsError        a weight file or model folder cannot be read, or does not fit
├── ExportError         a model cannot be written for another runtime, or computes something else there
├── CheckpointError     no valid checkpoint, or one that belongs to another run
├── TrainingError       training cannot continue: loss not finite, out of memory
└── WriteError          a file cannot be written: the disk is full or read-only, its folder is gone
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class VitrailError(Exception):
    """Base of all errors in a user's input. The message says what is wrong, where, and what would be valid."""

    exit_code = 1


class UsageError(VitrailError):
    """A flag, a name or a configuration value is wrong."""

    exit_code = 2


class DataError(VitrailError):
    """A data set is missing, empty, mislabelled or too broken to use."""


class DecodeError(DataError):
    """One file cannot become an image.

    `reason` is a short, stable, machine-readable word: "empty", "not-an-image", "truncated", "corrupt",
    "too-many-pixels", "too-large", "out-of-memory", "unsupported", "unreadable"; for images of other bands than 8-bit
    RGB also "wrong-bands", "wrong-depth", "not-finite".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        # pickling would lose the keyword-only argument when a worker process sends the error
        return (partial(DecodeError, reason=self.reason), (str(self),))


class WeightsError(VitrailError):
    """A weight file or model folder cannot be read, or does not fit the model asked for."""


class ExportError(VitrailError):
    """A model cannot be written for another runtime, or computes something else there."""


class CheckpointError(VitrailError):
    """There is no valid checkpoint to resume from, or it belongs to another run."""


class TrainingError(VitrailError):
    """Training cannot continue."""


class WriteError(VitrailError, OSError):
    """A file cannot be written. `errno` is the system's number of the reason."""

    def __str__(self) -> str:
        # OSError would show the number in place of the message
        return str(self.args[0])


LONGEST_NAME = 1000
"""Maximum length of a name that is compared with the valid ones."""


def did_you_mean(wrong: str, valid: Iterable[str], *, similarity: float = 0.5) -> str:
    """Return " Did you mean 'x'?" for the nearest valid name, or "" if none has this similarity, from 0 to 1."""
    if len(wrong) > LONGEST_NAME:  # a name from a file; the time to compare names grows with the square of their length
        return ""
    near = difflib.get_close_matches(wrong, list(valid), n=1, cutoff=similarity)
    return f" Did you mean {near[0]!r}?" if near else ""


def finite_rows(outputs: Tensor) -> Tensor:
    """Return whether the outputs [N, ...] for each image are finite: bool [N].

    Only such outputs are a result: finite weights, too, may overflow to NaN or infinity.
    """
    return outputs.flatten(1).isfinite().all(dim=1)


def finite(values: Tensor, what: str, precision: str | None = None) -> Tensor:
    """Return `values`, of any shape. Raises WeightsError, as `not_finite` says, if one is not finite."""
    if not values.isfinite().all():
        raise WeightsError(not_finite(what, precision))
    return values


def not_finite(what: str, precision: str | None = None) -> str:
    """Return the sentence about values of a network, named by `what`, that contain NaN or infinity.

    precision: The setting they were computed with; None where the user cannot choose it.
    """
    advice = "use other weights" if precision in (None, "float32") else "try --precision float32, or other weights"
    return (
        f"The network's {what} contains NaN or infinity, so there is no result. Its weights are damaged or too large: "
        f"{advice}"
    )
