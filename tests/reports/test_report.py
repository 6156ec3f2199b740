from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from references import copy_of
from run_folders import Page, answers, run_folder

from vitrail import reports as reports_package
from vitrail.config import to_yaml
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.errors import DataError
from vitrail.evaluation.metric import on_images, wilson
from vitrail.inspection.overlay import under_attention
from vitrail.reports.figures import confusion, draw_curves, thin_curve
from vitrail.reports.gallery import SHOWN
from vitrail.reports.page import environment, percent, write_report
from vitrail.tasks.catalog import TASKS
from vitrail.training.checkpoints.state import RunStatus
from vitrail.training.result import Result
from vitrail.training.run import Run
from vitrail.verbs.train.train import show
from vitrail.words import time_span

HOSTILE = ['<script>alert("x")</script>', "'\" onerror=alert(1) x='", "$\\frac{a}$", "&amp;\u202e\x07\n", "日本 ✿"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = Data("digits")
    splits = open_data(data)
    assert splits.validation is not None
    found = answers(splits.class_names, len(splits.validation), labels=splits.validation.labels)
    mark = {
        "path": "digits",
        "fingerprint": splits.fingerprint,
        "images": {"train": len(splits.train), "validation": len(splits.validation)},
    }
    return run_folder(tmp_path_factory.mktemp("runs") / "digits-1", data, found, data=mark)


@pytest.fixture(scope="module")
def page(digits: Path) -> Page:
    return Page(write_report(digits).read_text(encoding="utf-8"))


@pytest.mark.full_size
def test_the_report_says_what_happened(digits: Path, page: Page) -> None:
    text = re.sub(r"\s+", " ", page.text)
    assert (
        "A Vision Transformer (Ti/2) trained from scratch on 1,295 images of 10 classes (digits) in 1 min 15 s" in text
    )
    assert re.search(r"gets \d\d\.\d % of 143 validation images right \(95 % confidence: \d", text)
    for heading in (
        "How training went",
        "Which classes are confused",
        "How sure it is",
        "Worst mistakes",
        "Most uncertain",
        "How far attention reaches",
        "What it knows about positions",
        "What the network saw",
        "What it cost",
        "How to repeat the run",
        "Where it ran",
    ):
        assert heading in text, heading
    assert "vitrail train 'my <photos>'" in page.text
    assert f"vitrail train --config {digits.name}/config.yaml" in page.text
    assert str(digits.parent) not in page.text  # others see the page
    assert "8 px: <median>" in page.text
    assert "<AMD>" in page.text
    assert "Not in this report" not in page.text


def test_every_picture_is_an_image_with_a_text(page: Page) -> None:
    sources = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    texts = [value for tag, name, value in page.attributes if (tag, name) == ("img", "alt") and value]
    assert len(sources) == len(texts) == 4 * SHOWN + 1
    for source in sources:
        head, data = source.split(",", 1)
        with Image.open(io.BytesIO(base64.b64decode(data))) as image:
            assert f"data:image/{image.format.lower()};base64" == head  # type: ignore[union-attr]
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert len(labels) == page.tags["svg"] == 8
    assert all(len(label) > 30 for label in labels)


def test_the_page_loads_nothing_and_runs_nothing(digits: Path, page: Page) -> None:
    assert not page.tags.keys() & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for _, name, value in page.attributes:
        if name in ("src", "href", "xlink:href"):
            assert value.startswith(("data:image/", "#")), value[:60]
    html = (digits / "report.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in html
    assert not re.search(r"url\((?!#)", html)


@pytest.mark.full_size
def test_writing_again_gives_the_same_page(digits: Path, page: Page) -> None:
    before = (digits / "report.html").read_bytes()
    assert write_report(digits).read_bytes() == before


@pytest.mark.full_size
def test_hostile_names_are_text(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for number in range(len(HOSTILE)):
        folder = root / f"class{number}"
        folder.mkdir(parents=True)
        for i in range(20):
            noise = np.random.default_rng(20 * number + i).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / f"<img src=x onerror=alert({i})>.png")
    splits = open_data(Data(str(root)))
    assert splits.validation is not None
    found = answers(HOSTILE, len(splits.validation), labels=splits.validation.labels)
    folder = run_folder(tmp_path / "<b>run</b>-1", Data(str(root)), found)
    html = write_report(folder).read_text(encoding="utf-8")
    page = Page(html)
    assert page.tags["img"] > 1 and page.tags["script"] == page.tags["b"] - page.tags["figcaption"] == 0
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for name in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[4], "<img src=x onerror=alert("):
        assert name in page.text
    assert "\u202e" not in html and "\x07" not in html


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("broken", "notes"),
    [
        (
            {"run.json": None, "metrics.jsonl": None, "batch.png": None},
            ["run.json is missing", "metrics.jsonl is missing", "batch.png is missing"],
        ),
        (
            {"run.json": b"[1]", "model/best/model.safetensors": b"1234567890"},
            ["run.json cannot be used", "the model cannot be loaded: "],
        ),
        (
            {
                "run.json": b"""{"data": {"images": {"test": null, "train": "x"}}, "result": {"epochs": [0]},
                "resumed": [3], "tuned": {"what": 1}, "versions": [], "decisions": 3}"""
            },
            [
                "run.json: ",
                *(
                    f"{name} cannot be used"
                    for name in ("data.images.train", "result.epochs", "resumed.0", "decisions")
                ),
            ],
        ),
        ({"config.yaml": b"model: ["}, ["config.yaml cannot be used"]),
        ({"classes.json": None}, ["classes.json is missing"]),
        ({"classes.json": b'["a", "b"]'}, ["names class 9, and there are 2 classes"]),
        ({"evaluation.npz": b"PK\x03\x04"}, ["evaluation.npz cannot be used"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_is_missing_or_broken_becomes_a_note(
    digits: Path, tmp_path: Path, broken: dict[str, bytes | None], notes: list[str]
) -> None:
    folder = copy_of(digits, tmp_path)
    for name, content in broken.items():
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    said = page.text.split("Not in this report")[1]
    assert all(note in said for note in notes), said
    assert "How to repeat the run" in page.text


@pytest.mark.full_size
def test_images_that_are_gone_or_changed_are_not_shown(tmp_path: Path) -> None:
    data = Data("digits")
    splits = open_data(data)
    assert splits.validation is not None
    found = answers(splits.class_names, len(splits.validation), labels=splits.validation.labels)
    gone = run_folder(tmp_path / "a-1", Data(str(tmp_path / "gone")), found)
    assert "pictures of mistakes and attention distance: " in Page(write_report(gone).read_text(encoding="utf-8")).text
    other = run_folder(tmp_path / "b-1", data, found, data={"path": "digits", "fingerprint": "another"})
    assert "is not what the run was trained on" in Page(write_report(other).read_text(encoding="utf-8")).text


def test_a_run_that_was_killed_early_still_has_a_report(tmp_path: Path) -> None:
    folder = tmp_path / "early-1"
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(Run()), encoding="utf-8")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "it was not evaluated. The run has not ended." in page.text


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run folder"):
        write_report(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_is_not_there_is_told_with_those_that_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "roses-1").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"no run folder roses-2\. Did you mean runs/roses-1\? runs holds roses-1\."):
        write_report(Path("roses-2"))


@pytest.mark.full_size
def test_size_stays_small_with_many_classes_and_images(tmp_path: Path) -> None:
    classes = [f"class number {i}" for i in range(100)]
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "arrays.npz",
        images=rng.integers(0, 256, (12_000, 32, 32, 3), dtype=np.uint8),
        labels=np.arange(12_000) % 100,
    )
    data = Data(str(tmp_path / "arrays.npz"), holdout=10 / 12)
    splits = open_data(data)
    assert splits.validation is not None and len(splits.validation) == 10_000
    found = answers(classes, 10_000, labels=splits.validation.labels)
    path = write_report(run_folder(tmp_path / "large-1", data, found))
    page = Page(path.read_text(encoding="utf-8"))
    assert page.tags["img"] == 4 * SHOWN + 1
    assert path.stat().st_size < 5e6


@given(count=st.integers(1, 5000), share=st.floats(0, 1))
def test_the_confidence_interval_is_wilsons(count: int, share: float) -> None:
    right = round(count * share)
    expected = scipy.stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert wilson(right, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_an_accuracy_on_few_images_has_its_interval(tmp_path: Path) -> None:
    ends = scipy.stats.binomtest(60, 65).proportion_ci(0.95, method="wilson")
    said = f" on 65 images (95 % confidence: {ends.low:.1%} to {ends.high:.1%})"
    assert on_images("top1", {"top1": 60 / 65, "count": 65.0}) == said
    result = Result.of(RunStatus(step=3, ended="all steps done", best={"top1": 60 / 65, "count": 65.0}), tmp_path, 1)
    assert f"validation top-1 92.31%{said}; everything is in" in result.message
    result = replace(result, test={"top1": 0.5, "count": 40.0})
    assert "top-1 50.00% on 40 test images (95 % confidence: 35.2% to 64.8%), which had no part" in show(result)
    assert on_images("top1", {"top1": 0.5, "count": 5000.0}) == " on 5,000 images"
    assert on_images("map", {"map": 0.5, "count": 65.0}) == " on 65 images"


@pytest.mark.full_size
@given(st.text())
def test_safe_text_has_no_markup_and_no_control_characters(text: str) -> None:
    shown = environment().from_string("{{ text }}").render(text=text)
    page = Page(f"<p>{shown}</p>")
    assert page.tags == {"p": 1}
    assert len(page.text) == len(text)
    assert page.text.isprintable()
    assert not set(shown) & set("<>\"'")


def test_numbers_for_people() -> None:
    assert [percent(0.12345), percent(1.0, 0), percent(float("nan"))] == ["12.3\xa0%", "100\xa0%", "–"]
    assert [time_span(41.6), time_span(75), time_span(7500)] == ["42 s", "1 min 15 s", "2 h 5 min"]


def test_galleries_hold_the_largest_losses_and_the_smallest_gaps() -> None:
    found = answers([str(i) for i in range(10)], 500)
    wrong = found.label != found.top[:, 0]
    mistakes = found.worst(12)
    assert wrong[mistakes].all() and len(mistakes) == SHOWN
    assert (np.sort(found.loss[wrong])[::-1][:SHOWN] == found.loss[mistakes]).all()
    gaps = found.probability[:, 0] - found.probability[:, 1]
    assert (np.sort(gaps)[:SHOWN] == gaps[found.uncertain(SHOWN)]).all()


def test_thinned_curves_keep_their_mean_and_ends() -> None:
    steps = np.arange(1, 10_001, dtype=float)
    values = np.random.default_rng(0).normal(size=10_000)
    x, y = thin_curve(steps, values, 500)
    assert len(x) == len(y) == 500
    assert (x.mean(), y.mean()) == pytest.approx((steps.mean(), values.mean()))
    assert x[0] < 21 and x[-1] > 9980


def test_figures_are_images_to_a_screen_reader_and_take_the_colour_of_the_page() -> None:
    svg = draw_curves("Loss", "nats", {"training": (np.arange(9), np.arange(9.0))}, describe='falls "fast" <b>')
    assert svg.startswith('<svg role="img" aria-label="falls &quot;fast&quot; &lt;b&gt;"')
    assert "currentColor" in svg and "#010203" not in svg
    assert "var(--series-0)" in svg
    assert "optimiser step" in svg  # as text, not as outlines
    matrix = confusion(np.array([[3, 1], [0, 2]]), ["$a$ <b>", "b"])
    assert "4 of" not in matrix and "5 of 6 images are on the diagonal" in matrix
    assert "$a$ &lt;b&gt;" in matrix


def test_the_report_says_how_sure_the_network_is(digits: Path, page: Page) -> None:
    with np.load(digits / "evaluation.npz") as file:
        sure, right = file["probabilities"][:, 0], file["classes"][:, 0] == file["labels"]
        brier = file["brier"].mean()
    place = np.ceil(sure.astype(np.float64) * 15)
    gaps = [abs(right[place == k].mean() - sure[place == k].mean()) * (place == k).mean() for k in set(place)]
    text = re.sub(r"\s+", " ", page.text)
    lean = "overconfident" if sure.mean() > right.mean() else "underconfident"
    gap = f"{100 * abs(sure.mean() - right.mean()):.1f} percentage points."
    assert (
        f"confidence is {percent(sure.mean())} and its accuracy {percent(right.mean())}: ".replace("\xa0", " ") in text
    )
    assert f": it is {lean} by {gap}" in text
    assert f"over 15 bins, is {percent(sum(gaps))}; the Brier score".replace("\xa0", " ") in text
    assert f"to 2 (wrong and sure), is {brier:.3f}." in text
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert sum(label.startswith("Reliability diagram of 143 images in 15 bins") for label in labels) == 1


def test_attention_tints_from_blue_to_yellow() -> None:
    image = np.full((32, 64, 3), 128, dtype=np.uint8)
    shares = np.zeros((2, 4))
    shares[0, 3] = 1.0  # top right
    tinted = under_attention(image, shares).astype(int)
    assert tinted.shape == (64, 128, 3)
    red, _, blue = tinted[0, -1]
    assert red > blue + 80
    red, _, blue = tinted[-1, 0]
    assert blue > red + 30
    assert (under_attention(image, np.ones((2, 4))) == tinted[-1, 0]).all()  # nothing stands out


def test_every_template_is_used_and_every_task_has_one() -> None:
    names = set(environment().list_templates())
    reports = Path(reports_package.__file__).parent
    texts = "".join(file.read_text() for ending in ("py", "html") for file in sorted(reports.rglob(f"*.{ending}")))
    tasks = {f"tasks/{name}.html" for name in TASKS}
    assert tasks == {name for name in names if name.startswith("tasks/")}
    assert [name for name in names - tasks if name not in texts] == []
