"""What the fork server imports last: the modules that commands import only when they run.

A process that is forked afterwards needs no time for them, and does not look at them again when it collects garbage.
"""

from __future__ import annotations

import gc
import importlib
from contextlib import suppress

from vitrail.cli import VERBS
from vitrail.verbs.flags.parse import parse

LATE = (
    "encodings.utf_8_sig",  # who gives up root's rights cannot read the standard library any more
    *("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.font_manager"),
    *("matplotlib.style", "pyarrow.parquet", "einops", "vitrail.transfer.sweep", "vitrail.exports.engines"),
    *("torch.export", "torch.onnx._internal.exporter._core", "onnxscript", "onnxruntime"),
    *("vitrail.verbs.serve", "vitrail.server.app", "uvicorn"),
)
for name in LATE:
    with suppress(ImportError):  # an extra that is not installed
        importlib.import_module(name)
parse(VERBS["recipes list"].load()[1], [], "vitrail recipes list")  # the recipes
gc.collect()
gc.freeze()
