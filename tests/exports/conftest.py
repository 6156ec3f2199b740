"""What makes exporting many small networks quick."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_list_of_operators() -> Iterator[None]:
    """torch looks up all operators of ONNX anew for each export, for most of a second; once is enough here."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield
