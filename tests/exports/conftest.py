"""What makes testing many programs quick: torch looks up its operators once, and each program is written once."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from filelock import FileLock
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
def programs(tmp_path_factory: pytest.TempPathFactory) -> Programs:
    """Return the programs of small networks, each written by the first test process that asks. Nobody changes them."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "programs"
    folder.mkdir(exist_ok=True)

    @functools.cache
    def program(name: str = "plain", to: To = "onnx", **how: Any) -> Exported:
        place = folder / "-".join([name, to, *map(str, how.values())]).replace(", ", "-")
        said = place.with_suffix(".pickle")
        with FileLock(place.with_suffix(".lock")):
            if not said.exists():
                said.write_bytes(pickle.dumps(export_model(made(name), place, to, **how)))
        return pickle.loads(said.read_bytes())

    return program
