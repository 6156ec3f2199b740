"""Every error a user can cause, as one tree.

```
VitrailError            exit 1: printed as one message, without a traceback
├── UsageError          exit 2: a flag, a name or a configuration value is wrong
├── DataError           a data set is missing, empty, mislabelled or too broken to use
│   └── DecodeError     one file cannot become an image; the reason is in `reason`
├── WeightsError        a weight file or model folder cannot be read, or does not fit
├── ExportError         a model cannot be written for another runtime, or computes something else there
├── CheckpointError     no valid checkpoint, or one that belongs to another run
└── TrainingError       training cannot continue: loss not finite, out of memory
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


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
    "too-many-pixels", "too-large", "unsupported", "unreadable".
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        # pickling would lose the keyword-only argument when a worker process sends the error
        return (_decode_error, (str(self), self.reason))


def _decode_error(message: str, reason: str) -> DecodeError:
    return DecodeError(message, reason=reason)


class WeightsError(VitrailError):
    """A weight file or model folder cannot be read, or does not fit the model asked for."""


class ExportError(VitrailError):
    """A model cannot be written for another runtime, or computes something else there."""


class CheckpointError(VitrailError):
    """There is no valid checkpoint to resume from, or it belongs to another run."""


class TrainingError(VitrailError):
    """Training cannot continue."""


def did_you_mean(wrong: str, valid: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest valid name, or "" if none is near."""
    near = difflib.get_close_matches(wrong, list(valid), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""
