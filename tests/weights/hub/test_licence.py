from __future__ import annotations

from pathlib import Path

import hf_peers
import pytest

from vitrail.weights.download import licence_beside
from vitrail.weights.load import load, read_card


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("text", "licence"),
    [
        ("---\nlicense: apache-2.0\ntags:\n- vision\n---\n# A model\n", "apache-2.0"),
        ("---\nlicense: mit\n---\n", "mit"),
        ("---\ntags: [vision]\n---\n", ""),
        ("---\nlicense: [mit, bsd]\n---\n", ""),
        ("# license: mit\n", ""),
        ("---\n{: not yaml\n---\n", ""),
        ("---\njust words\n---\n", ""),
        ("", ""),
        ("---\nlicense: " + "[" * 20_000 + "\n---\n", ""),
        ("---\n? [a]\n: b\nlicense: mit\n---\n", ""),
        ("---\nlicense: mit\n---\n" + "x" * 10**6, "mit"),
    ],
)
def test_the_header_of_a_readme(tmp_path: Path, text: str, licence: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert licence_beside(tmp_path) == licence
    assert licence_beside(tmp_path / "model.safetensors") == licence


def test_no_readme_and_no_text(tmp_path: Path) -> None:
    assert licence_beside(tmp_path) == ""
    (tmp_path / "README.md").write_bytes(b"---\nlicense: \xff\n---\n")
    assert licence_beside(tmp_path) == ""


def test_a_folder_of_the_hubs_brings_its_licence(tmp_path: Path) -> None:
    hf_peers.saved(tmp_path, "vit")
    assert load(tmp_path).card.licence == ""
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    assert load(tmp_path).card.licence == "apache-2.0"
    assert read_card(tmp_path) == load(tmp_path).card
