"""Comparing runs: what differs, who is better, and the page that says so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from run_folders import Page, answers, run_folder

from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.durations import Epochs
from vitrail.errors import DataError, UsageError
from vitrail.objective.settings import MAE, ObjectiveSettings, Regression, SeveralAnswers, Supervised
from vitrail.reports.compare import MOST_EACH, compare_runs, write_comparison
from vitrail.reports.curves import comparison_curves, training_curves
from vitrail.reports.run_record import RunRecord
from vitrail.training.run import Optim, Run
from vitrail.words import distinct_labels

HOSTILE = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs on the digits: another learning rate, and another seed of the answers' luck."""
    place, root = Data("digits"), tmp_path_factory.mktemp("runs")
    splits = open_data(place)
    assert splits.validation is not None
    mark = {"path": "digits", "fingerprint": splits.fingerprint, "images": {"train": len(splits.train)}}
    folders = []
    for number, lr in enumerate((1e-3, 3e-3, 1e-2)):
        found = answers(splits.class_names, len(splits.validation), seed=number, labels=splits.validation.labels)
        run = Run(data=place, model="Ti/2", batch_size=16, optim=Optim(lr=lr), duration=Epochs(3), name=f"r{number}")
        folders.append(run_folder(root / f"r-{number + 1}", place, found, run=run, data=mark))
    return folders


@pytest.mark.parametrize(
    ("objective", "nats"), [(Supervised(), True), (Regression(), False), (MAE(), False), (SeveralAnswers(), False)]
)
def test_losses_are_drawn_as_what_they_are(objective: ObjectiveSettings, nats: bool) -> None:
    lines = [{"step": 1, "loss": 3.5, "lr": 0.1}, {"step": 1, "nll" if nats else "loss": 2.5, "count": 4}]
    run = RunRecord(Path("r"), Run(objective=objective), {}, [], lines, None, None)
    for drawn in (comparison_curves([run, run], ["a", "b"]), training_curves(run)):
        text = "".join(drawn)
        assert ("(nats)" in text) == nats and "from 3.5 to 3.5" in text and "from 2.5 to 2.5" in text


def test_only_what_differs_is_listed(runs: list[Path]) -> None:
    found = compare_runs(runs)
    assert found.settings == {"optim.lr": [1e-3, 3e-3, 1e-2]}  # and not the name
    assert found.labels == ["r-1", "r-2", "r-3"] and found.notes == []


def test_numbers_are_those_of_the_answers(runs: list[Path]) -> None:
    found = compare_runs(runs)
    with np.load(runs[0] / "evaluation.npz") as a, np.load(runs[2] / "evaluation.npz") as b:
        right = [file["classes"][:, 0] == file["labels"] for file in (a, b)]
    only = (right[0] & ~right[1]).sum(), (right[1] & ~right[0]).sum()
    one = found.against[1]
    assert (one.pair.only_first, one.pair.only_second) == only and min(only) > 0
    p = [scipy.stats.binomtest(x.pair.only_first, x.pair.only_first + x.pair.only_second).pvalue for x in found.against]
    assert one.pair.p == pytest.approx(p[1])
    # Holm, of two: the smaller twice, the larger no less
    assert sorted(x.p for x in found.against) == pytest.approx(
        [min(1.0, 2 * min(p)), max(max(p), min(1.0, 2 * min(p)))]
    )


def test_the_page_shows_it_all(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "two.html"
    found = write_comparison(runs[:2], out)
    html = out.read_text(encoding="utf-8")
    page = Page(html)
    text = re.sub(r"\s+", " ", page.text)
    matched = found.against[0].pair
    assert f"{matched.only_second} images only r-2 gets right, {matched.only_first} only r-1" in text
    headings = ("How good they are", "What differs", "How training went", "Which classes gain and lose")
    for heading in (*headings, "Right by r-2, wrong by r-1", "Right by r-1, wrong by r-2", "What they cost"):
        assert heading in text, heading
    assert "optim.lr" in text and "optim.momentum" not in text and "Not in this report" not in text
    assert page.tags["svg"] == 4
    assert page.tags["img"] == min(MOST_EACH, matched.only_first) + min(MOST_EACH, matched.only_second) > 2
    assert not page.tags.keys() & {"script", "link", "iframe", "object", "embed", "base", "form"}
    for _, name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("data:image/", "#"))
    assert "default-src 'none'" in html and len(html) < 1e6


def test_the_gallery_is_of_images_that_only_one_gets_right(runs: list[Path], tmp_path: Path) -> None:
    found = write_comparison(runs[:2], tmp_path / "two.html")
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", (tmp_path / "two.html").read_text(encoding="utf-8"))
    matched = found.against[0].pair
    shown = min(MOST_EACH, matched.only_second)
    for number, caption in enumerate(captions):
        kinds = re.findall(r'<span class="(right|wrong)">', caption)
        assert kinds == (["wrong", "right"] if number < shown else ["right", "wrong"])
    assert len(set(captions)) == len(captions)


def test_three_runs_share_the_room_for_pictures(runs: list[Path], tmp_path: Path) -> None:
    found = write_comparison(runs, tmp_path / "three.html")
    page = Page((tmp_path / "three.html").read_text(encoding="utf-8"))
    wanted = [min(MOST_EACH, n) for one in found.against for n in (one.pair.only_first, one.pair.only_second)]
    assert page.tags["img"] == sum(wanted)
    assert "corrected for 2 comparisons (Holm)" in re.sub(r"\s+", " ", page.text)


def test_classes_are_in_the_order_of_their_difference(runs: list[Path], tmp_path: Path) -> None:
    found = write_comparison(runs[:2], tmp_path / "two.html")
    html = (tmp_path / "two.html").read_text(encoding="utf-8").split("Which classes gain and lose")[1]
    rows = re.findall(r"<tr><td[^>]*>(\w+)</td>.*?>(0\.0|[+-]\d+\.\d)</td></tr>", html.split("</table>")[0])
    first, second = (run.evaluation for run in found.runs)
    assert first is not None and second is not None
    shares = zip(first.class_names, first.class_accuracy, second.class_accuracy, strict=True)
    expected = {name: 100 * (b - a) for name, a, b in shares}
    assert len(rows) == 10
    assert {name: float(points) for name, points in rows} == pytest.approx(expected, abs=0.051)
    gaps = [abs(expected[name]) for name, _ in rows]
    assert gaps == sorted(gaps, reverse=True)


def test_runs_of_other_images_are_not_tested_against_each_other(runs: list[Path], tmp_path: Path) -> None:
    splits = open_data(Data("digits"), seed=5)
    assert splits.validation is not None
    found = answers(splits.class_names, len(splits.validation), labels=splits.validation.labels)
    seeded = Run(data=Data("digits"), model="Ti/2", batch_size=16, seed=5)
    mark = {"path": "digits", "fingerprint": splits.fingerprint}
    other = run_folder(tmp_path / "seed-5", Data("digits"), found, run=seeded, data=mark)
    shown = write_comparison([runs[0], other], tmp_path / "a.html")
    assert shown.against == [] and "their validation images are not the same" in shown.notes[0]
    text = re.sub(r"\s+", " ", Page((tmp_path / "a.html").read_text(encoding="utf-8")).text)
    assert "None of these runs can be called better than r-1" in text and "Not tested against r-1: seed-5;" in text
    assert shown.settings["seed"] == [0, 5]


def test_more_training_images_and_the_same_validation_images(tmp_path: Path) -> None:
    rng, folders = np.random.default_rng(0), []
    images, labels = rng.integers(0, 256, (40, 8, 8, 3), dtype=np.uint8), np.arange(40) % 2
    for name, count in (("few", 20), ("many", 40)):
        np.savez(
            tmp_path / f"{name}.npz", x_train=images[:count], y_train=labels[:count],
            x_val=images[:10], y_val=labels[:10],
        )  # fmt: skip
        place = Data(str(tmp_path / f"{name}.npz"))
        splits = open_data(place)
        assert splits.validation is not None
        found = answers(splits.class_names, len(splits.validation), len(folders), labels=splits.validation.labels)
        mark = {"path": place.path, "fingerprint": splits.fingerprint}
        folders.append(run_folder(tmp_path / f"{name}-1", place, found, data=mark))
    shown = compare_runs(folders)
    assert shown.against[0].pair.count == 10
    assert "data (fingerprint)" in shown.settings


def test_a_run_that_was_killed_is_compared_as_far_as_it_got(runs: list[Path], tmp_path: Path) -> None:
    early = tmp_path / "early-1"
    early.mkdir()
    (early / "config.yaml").write_text((runs[0] / "config.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    shown = write_comparison([runs[0], early], tmp_path / "a.html")
    assert any("early-1 has no evaluation" in note for note in shown.notes)
    assert "–" in Page((tmp_path / "a.html").read_text(encoding="utf-8")).text


def test_names_are_text_and_tell_runs_apart(tmp_path: Path) -> None:
    folders = []
    for parent in ("x", "y"):
        found = answers([HOSTILE, "b"], 40, seed=len(folders), labels=np.arange(40) % 2)
        folders.append(run_folder(tmp_path / parent / "<b>run-1", Data(str(tmp_path / "gone")), found))
    shown = write_comparison(folders, tmp_path / "a.html")
    assert shown.labels == ["x/<b>run-1", "y/<b>run-1"]
    page = Page((tmp_path / "a.html").read_text(encoding="utf-8"))
    assert page.tags["script"] == 0 and HOSTILE in page.text
    assert "pictures: " in page.text.split("Not in this report")[1]
    assert distinct_labels([Path("/a/b"), Path("/a/c")]) == ["b", "c"]


def test_what_is_no_run_or_twice_the_same_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        compare_runs([runs[0], tmp_path])
    with pytest.raises(UsageError, match="given twice"):
        compare_runs([runs[0], runs[1], runs[0].parent / "." / runs[0].name])
    with pytest.raises(UsageError, match="at least two runs"):
        compare_runs(runs[:1])
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    with pytest.raises(UsageError, match="cannot write"):
        write_comparison(runs[:2], blocked / "a.html")
    assert blocked.read_text() == "mine"


def test_equal_runs_differ_in_no_setting(runs: list[Path], tmp_path: Path) -> None:
    found = answers([str(i) for i in range(10)], 30)
    run = Run(data=Data("digits"), model="Ti/2", batch_size=16)
    pair = [
        run_folder(tmp_path / f"s-{i}", Data("digits"), found, run=replace(run, name=f"n{i}", out=f"o{i}"))
        for i in range(2)
    ]
    shown = write_comparison(pair, tmp_path / "a.html")
    assert shown.settings == {} and shown.against[0].p == 1.0
    text = re.sub(r"\s+", " ", Page((tmp_path / "a.html").read_text(encoding="utf-8")).text)
    assert "No setting differs." in text and "are right for the same number of the 30 validation images" in text
