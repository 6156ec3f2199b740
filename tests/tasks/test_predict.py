from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from device_work import Elsewhere, copies_elsewhere
from PIL import Image
from torch import Tensor

from vitrail.data.images.tiles import TileBox
from vitrail.data.settings import Preprocess
from vitrail.data.sources.files import find_images
from vitrail.errors import DataError, WeightsError
from vitrail.tasks.predict import PreparedFile, _rows, predict_files
from vitrail.tasks.prediction import Prediction, Unreadable, write_predictions

NAMES = ["red", "green", "blue, <i>", "none"]
PREPROCESS = Preprocess(image_size=(8, 8), resize="squash")


def model(names: list[str] = NAMES, preprocess: Preprocess = PREPROCESS) -> Any:
    config, probabilities = SimpleNamespace(classes=4), {"thresholds": [], "temperature": 1.0, "task": "classes"}
    card = SimpleNamespace(class_names=names, preprocess=preprocess, config=config, **probabilities)
    return SimpleNamespace(card=card)


def by_colour(images: Tensor) -> Tensor:
    """Logits: mean of each channel in tens of levels, and 0 for "none"."""
    assert images.dtype == torch.uint8 and images.shape[1:] == (3, 8, 8)
    means = images.float().mean((2, 3)) / 25.5
    return torch.cat([means, torch.zeros(len(images), 1)], dim=1)


def paint(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (13, 9)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def rows(paths: list[Path | str], **options: Any) -> list[Any]:
    options = {"batch_size": 3, "workers": 0, **options}
    return list(predict_files(model(), paths, predict=by_colour, **options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "photos"
    paint(root / "b" / "2.png", (0, 200, 0))
    paint(root / "b" / "10.png", (0, 0, 200))
    paint(root / "a.bmp", (200, 0, 0))
    paint(root / ".hidden.png", (0, 0, 0))
    paint(root / "__MACOSX" / "x.png", (0, 0, 0))
    (root / "notes.txt").write_text("no image")
    (root / "b" / "broken.jpg").write_bytes(b"")
    return root


def names(root: Path, found: Any) -> list[str]:
    return [str(path.relative_to(root)) for path in found]


def test_folders_are_searched_below_in_order_and_without_hidden_files(folder: Path) -> None:
    assert names(folder, find_images([folder])) == ["a.bmp", "b/10.png", "b/2.png", "b/broken.jpg"]


def test_patterns_files_and_lists_keep_the_order_of_the_arguments(folder: Path) -> None:
    paths = [folder / "b" / "2.png", folder / "**" / "*.bmp", str(folder / "*"), folder / "notes.txt"]
    expected = ["b/2.png", "a.bmp", "a.bmp", "b/10.png", "b/2.png", "b/broken.jpg", "notes.txt"]
    assert names(folder, find_images(paths)) == expected


def test_links_to_folders_are_followed_once(folder: Path) -> None:
    (folder / "b" / "loop").symlink_to(folder)
    assert len(list(find_images([folder]))) == 4


def test_nothing_to_predict_is_an_error_before_the_model_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing to predict at .*typo.jpg"):
        predict_files(model(), [tmp_path / "typo.jpg", tmp_path / "*.png"], predict=by_colour)


def test_a_model_without_a_card_is_refused(folder: Path) -> None:
    with pytest.raises(WeightsError, match="no card"):
        predict_files(torch.nn.Identity(), [folder])


@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_each_file_gets_its_own_answer_in_order(folder: Path, workers: int, batch_size: int) -> None:
    missing = folder / "missing.png"
    found = rows([folder, missing], workers=workers, batch_size=batch_size)
    assert [Path(row.path).name for row in found] == ["a.bmp", "10.png", "2.png", "broken.jpg", "missing.png"]
    assert [row.classes[0] for row in found[:3]] == ["red", "blue, <i>", "green"]
    assert [row.reason for row in found[3:]] == ["empty", "unreadable"]
    logits = np.array([200 / 25.5, 0, 0, 0])
    expected = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(found[0].probabilities, expected, rtol=1e-5)


def test_fewer_classes_than_asked_for_and_classes_without_names(folder: Path) -> None:
    assert [len(row.classes) for row in rows([folder / "a.bmp"], top=2)] == [2]
    assert [len(row.classes) for row in rows([folder / "a.bmp"], top=10)] == [4]
    found = list(predict_files(model([]), [folder / "a.bmp"], predict=by_colour))
    assert found[0].classes[0] == "0"


def test_images_are_prepared_as_for_evaluation(tmp_path: Path) -> None:
    from vitrail.data.images.decode import decode
    from vitrail.data.images.ops import eval_transform

    rng = np.random.default_rng(0)
    path = tmp_path / "noise.png"
    Image.fromarray(rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)).save(path)
    preprocess = Preprocess(image_size=(8, 8), resize="small", crop=0.5)
    seen: list[Tensor] = []

    def predict(images: Tensor) -> Tensor:
        seen.append(images)
        return torch.zeros(len(images), 4)

    list(predict_files(model(preprocess=preprocess), [path], predict=predict))
    expected = eval_transform(preprocess)(decode(path.read_bytes()), rng)
    np.testing.assert_array_equal(seen[0][0].permute(1, 2, 0).numpy(), expected)


def test_awkward_images_never_stop_the_stream(shared_data: Path) -> None:
    folder = shared_data / "awkward-images"
    found = rows([folder], batch_size=16)
    assert [row.path for row in found] == [str(path) for path in find_images([folder])]
    bad = [row for row in found if isinstance(row, Unreadable)]
    assert 5 < len(bad) < len(found) / 2
    assert all(row.reason in ("truncated", "corrupt", "too-many-pixels", "unsupported") for row in bad)


def test_memory_does_not_grow_with_the_number_of_files(folder: Path) -> None:
    drawn = 0

    def endless() -> Any:
        nonlocal drawn
        for _ in range(5000):
            drawn += 1
            yield folder / "a.bmp"

    from vitrail.data.images.ops import eval_transform
    from vitrail.tasks import predict

    prepare = partial(predict._prepared, eval_transform(PREPROCESS))
    prepared = predict._each_prepared(endless(), prepare, str, 2 * 8, 2)
    stream = predict._rows(prepared, by_colour, partial(predict._predictions, model().card, 1, None), 8)
    assert next(stream).classes == ["red"]
    assert drawn <= 3 * 8
    stream.close()


def read_csv(path: Path) -> list[list[str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_csv_holds_every_row_and_the_errors_beside_it(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out.csv"
    summary = write_predictions(rows([folder], top=2), out)
    table = read_csv(out)
    assert table[0] == ["path", "class", "probability", "class_2", "probability_2"]
    assert [line[1] for line in table[1:]] == ["red", "blue, <i>", "green"]
    assert read_csv(out.with_name("out.csv.errors.csv"))[1][:2] == [str(folder / "b" / "broken.jpg"), "empty"]
    assert summary.predicted == 3
    assert str(summary) == (f"3 images predicted; 1 file could not be read (1 empty), listed in {out}.errors.csv")
    write_predictions(rows([folder / "a.bmp"]), out)  # the list of an earlier run is not left behind
    assert sorted(os.listdir(out.parent)) == ["out.csv"]


def test_json_lines_go_to_a_stream(folder: Path) -> None:
    file = io.StringIO()
    summary = write_predictions(rows([folder], top=2), file, kind="jsonl")
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    assert [line["class"] for line in lines] == ["red", "blue, <i>", "green"]
    assert [len(line["top"]) for line in lines] == [2, 2, 2]
    assert lines[0]["top"][0]["class"] == "red"
    assert lines[0]["probability"] == lines[0]["top"][0]["probability"]
    assert [row.path for row in summary.unreadable] == [str(folder / "b" / "broken.jpg")]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_file_names_that_are_no_text_are_escaped(tmp_path: Path, kind: Any) -> None:
    path = tmp_path / os.fsdecode(b'caf\xe9\n"=.png')
    paint(path, (200, 0, 0))
    write_predictions(rows([tmp_path]), tmp_path / "out", kind=kind)
    text = (tmp_path / "out").read_text(encoding="utf-8")
    read = json.loads(text)["path"] if kind == "jsonl" else read_csv(tmp_path / "out")[1][0]
    assert read == f'{tmp_path}/caf\\xe9\n"=.png'


def test_an_interrupted_file_does_not_replace_the_old_one(tmp_path: Path) -> None:
    out = tmp_path / "out.csv"
    write_predictions([Prediction("a", ["x"], [1.0])], out)
    before = out.read_bytes()

    def broken() -> Any:
        yield Prediction("b", ["x"], [1.0])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_predictions(broken(), out)
    assert out.read_bytes() == before
    assert os.listdir(tmp_path) == ["out.csv"]


@pytest.mark.parametrize(("gpu", "order"), [(False, "1r1w1w2r2w"), (True, "1r2r1w1w2w")])
def test_a_gpu_computes_the_next_batch_while_rows_are_written(
    gpu: bool, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """r: the network is called; w: a row is taken."""
    copies_elsewhere(monkeypatch)
    seen: list[str] = []

    def predict(images: torch.Tensor) -> torch.Tensor:
        seen.append(f"{1 + sum(what.endswith('r') for what in seen)}r")
        return images.float().as_subclass(Elsewhere) if gpu else images.float()

    def answer(outputs: torch.Tensor, tiles: Sequence[TileBox | None]) -> list[Prediction]:
        return [Prediction("", ["a"], [1.0])] * len(outputs)

    def prepared() -> Generator[PreparedFile]:
        yield from (PreparedFile(Path(f"{number}.png"), np.zeros((4, 4, 3), np.uint8)) for number in range(3))

    for number, row in enumerate(_rows(prepared(), predict, answer, batch_size=2)):
        assert row.path == f"{number}.png"
        seen.append(f"{1 + number // 2}w")
    assert "".join(seen) == order
