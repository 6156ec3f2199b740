"""Any verb that writes, on a disk that fails in any way: an error that names the file, and nothing left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_inputs import QUIETLY
from scenes import read_only, snapshot, vanishing
from writers import WRITERS, Scene, debris, files, scene_in, write, write_capped

pytestmark = [pytest.mark.fuzz, pytest.mark.page]

QUICK = sorted(set(WRITERS) - {"export", "export onnx", "bench", "sweep"})
"""Writers that take less than a second."""

bytes_written = st.one_of(st.integers(0, 300), st.integers(0, 9000), st.integers(0, 400_000))
targets = st.sampled_from(["absent", "of another call", "a file", "a folder", "below a file"])


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return scene_in(tmp_path_factory.mktemp("fuzz"))


def prepare(name: str, target: str, scene: Scene, place: Path) -> Path:
    """Put something where the verb will write; return the folder to write in."""
    out = place / WRITERS[name].out
    if target == "of another call":
        assert write(WRITERS[name], scene, place).process.exitcode == 0
    elif target == "a file":
        out.write_bytes(b"of the user")
    elif target == "a folder":
        out.mkdir()
        (out / "own.txt").write_bytes(b"of the user")
    elif target == "below a file":
        (place / "file").write_bytes(b"of the user")
        return place / "file"
    return place


@QUIETLY
@given(
    name=st.sampled_from(QUICK),
    kind=st.sampled_from(["full", "full", "full", "read-only", "vanishing"]),
    most=bytes_written,
    target=targets,
)
def test_68_any_writer_on_any_disk(
    tmp_path_factory: pytest.TempPathFactory, scene: Scene, name: str, kind: str, most: int, target: str
) -> None:
    top = tmp_path_factory.mktemp("place")
    sources = [snapshot(folder) for folder in (scene.photos, scene.weights, scene.run)]
    try:
        writer, place = WRITERS[name], prepare(name, target, scene, top)
        before, own = snapshot(top), files(top)
        if kind == "full":
            code, said = write_capped(writer, scene, place, most)
        else:
            before_it = read_only if kind == "read-only" else vanishing
            command = write(writer, scene, place, before=before_it, given=(str(top),))
            code, said = int(command.process.exitcode), command.out + command.err
        if code == 77:
            return  # this user may not mount
        assert code in (0, 1, 2), said
        assert "Traceback" not in said and "Exception ignored" not in said, said
        if code:
            assert "vitrail: " in said or "could not be written" in said, said
            assert str(top) in said or str(scene.cache.parent) in said, said
        if code and kind != "vanishing":
            left = [file for file in debris(writer, top) if file not in own]
            assert left == [], said
            kept = {file: state for file, state in snapshot(top).items() if file in before}
            assert kind == "full" or kept == before
            assert all(kept[file] == before[file] for file in before if "own" in file or file == "file")
        if code == 0 and kind == "full":
            assert all(size <= most for file, size in files(top).items() if file not in own)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    assert [snapshot(folder) for folder in (scene.photos, scene.weights, scene.run)] == sources
