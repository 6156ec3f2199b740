"""References are made once, again where that failed, and a test that changes one is found out."""

from __future__ import annotations

from pathlib import Path

import pytest
from references import FOLDER, changed_files, copy_of, once


def test_a_reference_is_made_once_and_its_changes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    made: list[Path] = []

    def make(place: Path) -> None:
        made.append(place)
        (place / "a").write_text("a")
        (place / "b").write_text("b")
        if len(made) == 1:
            raise ValueError("the first time")

    with pytest.raises(ValueError, match="the first time"):
        once("letters", make)
    assert once("letters", make) == once("letters", make) == tmp_path / "letters" and len(made) == 2
    copy = copy_of(tmp_path / "letters", tmp_path / "elsewhere")
    (copy / "a").write_text("another")
    assert changed_files() == []
    (tmp_path / "letters" / "a").write_text("another")
    (tmp_path / "letters" / "b").unlink()
    (tmp_path / "letters" / "c").touch()
    assert changed_files() == ["letters/a", "letters/b", "letters/c"]
