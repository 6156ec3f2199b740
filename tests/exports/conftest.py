"""What makes testing many programs quick: torch looks up its operators once, and each program is written once."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from references import once
from small_models import Programs, made

from vitrail.exports.kinds import To
from vitrail.exports.write import Exported, export_model


@pytest.fixture(autouse=True)
def one_list_of_operators(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch looks up all operators of ONNX anew for each export, for most of a second; once is enough here."""
    if request.node.get_closest_marker("export") is None:
        yield
        return
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(_operators()))
        yield


@functools.cache
def _operators() -> Any:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    return functools.cache(ONNXRegistry.from_torchlib)


@pytest.fixture(scope="session")
def programs() -> Programs:
    """Return the programs of small networks, which are references."""

    @functools.cache
    def program(name: str = "plain", to: To = "onnx", **how: Any) -> Exported:
        def make(place: Path) -> None:
            (place / "said").write_bytes(pickle.dumps(export_model(made(name), place / "program", to, **how)))

        place = once("-".join(["program", name, to, *map(str, how.values())]).replace(", ", "-"), make)
        return pickle.loads((place / "said").read_bytes())

    return program
