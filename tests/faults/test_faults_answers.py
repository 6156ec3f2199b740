"""What a reader takes for a result: no cell of a CSV is a formula, and no number of a network is NaN."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import commands
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from random_inputs import QUIETLY
from scenes import draw

from vitrail import load
from vitrail.data.settings import Preprocess
from vitrail.data.sources.lists import read_list, refers_to, write_list
from vitrail.data.sources.open import open_path
from vitrail.data.spreadsheet import SafeWriter, escape_formula, unescape_formula
from vitrail.errors import WeightsError
from vitrail.evaluation.ahead import Refusing
from vitrail.evaluation.groups import read_groups
from vitrail.evaluation.knn import neighbours as nearest
from vitrail.inspection.components import patch_components
from vitrail.inspection.distance import attention_distance
from vitrail.inspection.embedding_map import neighbours
from vitrail.inspection.maps import head_maps, patch_attention
from vitrail.inspection.positions import position_tiles
from vitrail.inspection.relevance import relevance
from vitrail.inspection.rollout import rollout
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.server.limits import Refused
from vitrail.server.served_model import AttentionQuery, ServedModel
from vitrail.tasks.prediction import Prediction, Unreadable, write_predictions
from vitrail.weights.card import Card
from vitrail.weights.reference import reference, relative_error
from vitrail.weights.store import save_model

FORMULAS = ["=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", "'=1", "=cmd|' /C calc'!A0", "+", "-0.5x", "-٣"]
HARMLESS = ["cat", "-0.5", "+3", "0.25", "a=b", "", "<b>", "café", 'say "a", b', "--", "1e5", "'tis"]


@pytest.mark.parametrize("name", FORMULAS)
def test_66_no_cell_is_a_formula(tmp_path: Path, name: str) -> None:
    rows = [Prediction(name, [name, "b"], [0.75, 0.25]), Unreadable(name, "truncated", name)]
    out = tmp_path / "out.csv"
    write_predictions(rows, out)
    for file in (out, tmp_path / "out.csv.errors.csv"):
        with open(file, newline="", encoding="utf-8") as stream:
            _, row = csv.reader(stream)
        assert not any(cell[:1] in "=+-@\t\r" for cell in row if cell)
        assert unescape_formula(row[0]) == name and unescape_formula(row[1 if file == out else 2]) == name


@pytest.mark.parametrize("name", HARMLESS[:-3])
def test_66_other_text_is_written_as_it_is(name: str) -> None:
    assert escape_formula(name) == name == unescape_formula(name)


@QUIETLY
@given(text=st.text() | st.text(alphabet="=+-@\t\r\n'\",;0.1a", max_size=6))
def test_66_every_name_comes_back(text: str) -> None:
    stream = io.StringIO(newline="")
    SafeWriter(stream).writerow([text, 5, -0.5])
    ((name, *numbers),) = csv.reader(io.StringIO(stream.getvalue(), newline=""))
    assert unescape_formula(name) == text and numbers == ["5", "-0.5"]
    assert name[:1] not in tuple("=@\t\r") and (name[:1] not in ("+", "-") or float(name) is not None)


def test_66_lists_and_tables_give_true_names_back(tmp_path: Path) -> None:
    names = ("'=a", "+b", "-1+c", "@d", "=e")
    draw(tmp_path / "photos", classes=names, count=2)
    data = str(tmp_path / "photos")
    found = open_path(data)
    write_list(tmp_path / "list.csv", data, found, found.splits)
    assert refers_to(tmp_path / "list.csv") == (data, None)
    again = read_list(tmp_path / "list.csv", open_path(data))
    for name, source in found.splits.items():
        assert again.splits[name].class_names == source.class_names == sorted(names)
        assert again.splits[name].labels.tolist() == source.labels.tolist()
    with open(tmp_path / "table.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)  # a table of the user is read as it is
        writer.writerows([("path", "label"), *((f"photos/{name}/0.png", name) for name in names)])
    (table,) = open_path(str(tmp_path / "table.csv")).splits.values()
    assert table.class_names == sorted(names)
    with open(tmp_path / "groups.csv", "w", newline="", encoding="utf-8") as file:
        SafeWriter(file).writerows([("class", "group"), *((name, f"={name}") for name in names)])
    assert read_groups(tmp_path / "groups.csv") == {name: f"={name}" for name in names}


def overflowing(folder: Path) -> Path:
    """A model of finite weights whose outputs are not finite."""
    config = ViTConfig(width=16, depth=1, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 3e38)
    save_model(folder, model, Card(config, ["blue", "red"], Preprocess(image_size=(8, 8))))
    return folder


@pytest.mark.processes
@pytest.mark.parametrize(
    "argv",
    [
        ["predict", "model", "photos"],
        ["predict", "model", "photos", "--out", "out.csv"],
        ["predict", "model", "photos", "--out", "folder"],
        ["evaluate", "model", "photos"],
        ["embed", "model", "photos", "--out", "features.npz"],
        ["embed", "model", "photos", "--out", "features.npz", "--tokens"],
        ["probe", "knn", "model", "photos"],
        ["inspect", "model", "photos", "--data", "photos", "--out", "figures"],
        ["inspect", "model", "photos", "--what", "distance", "--out", "figures"],
        ["data", "dedup", "photos", "--model", "model", "--out", "pairs.csv"],
        ["export", "model", "--to", "program", "--out", "program"],
    ],
    ids=lambda argv: " ".join(argv),
)
def test_67_weights_that_overflow_have_no_result(tmp_path: Path, argv: list[str]) -> None:
    draw(tmp_path / "photos", count=4)
    Image.open(tmp_path / "photos/red/3.png").resize((20, 20)).save(tmp_path / "photos/red/3.png")  # a near copy of
    Image.open(tmp_path / "photos/red/3.png").resize((40, 40)).save(tmp_path / "photos/red/2.png")  # the other
    overflowing(tmp_path / "model")
    device = [] if "export" in argv else ["--device", "cpu"]
    done = commands.run(*argv, *device, cwd=tmp_path)
    said = "8 not-finite" if "out.csv" in argv else "NaN or infinity"
    assert done.process.exitcode == 1 and said in done.err + done.out, done.err
    assert "nan" not in done.out and "Traceback" not in done.err
    table = tmp_path / "out.csv.errors.csv"
    answer = done.err + done.out + (table.read_text() if table.exists() else "")
    verb = argv[:2] if argv[0] in ("data", "probe") else argv[:1]
    assert "--precision float32" not in answer or "--precision" in commands.run(*verb, "--help", cwd=tmp_path).out
    assert ("--precision float32" in answer) == (argv[0] in ("predict", "evaluate", "embed", "probe", "data"))
    assert not any((tmp_path / name).exists() for name in ("figures", "pairs.csv", "program", "features.npz"))
    if "out.csv" in argv:
        with open(tmp_path / "out.csv.errors.csv", newline="") as file:
            assert [row["reason"] for row in csv.DictReader(file)] == ["not-finite"] * 8


OVERFLOWS: dict[str, tuple[torch.dtype, float]] = {
    "float32": (torch.float32, 1e30),
    "bfloat16": (torch.bfloat16, 1e30),
    "float16": (torch.float16, 6e4),
}


@pytest.mark.parametrize(("dtype", "scale"), OVERFLOWS.values(), ids=OVERFLOWS)
def test_67_a_picture_of_a_network_is_finite_or_refused(dtype: torch.dtype, scale: float) -> None:
    config = ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=2)
    model = build(config)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -scale, scale)
    model.to(dtype)
    images = torch.rand(2, 3, 8, 8, dtype=dtype)
    assert not model(images).isfinite().all()
    looks: list[Callable[[], object]] = [
        lambda: rollout(model, images),
        lambda: relevance(model, images),
        lambda: head_maps(model, images),
        lambda: patch_attention(model, images, (0, 0)),
        lambda: attention_distance(model, [images]),
        lambda: patch_components(model, [images]),
    ]
    for look in looks:
        with pytest.raises(WeightsError, match="NaN or infinity"):
            look()
    tiles = position_tiles(model).values.reshape(4, 4)
    np.testing.assert_allclose(np.diag(tiles), 1, atol=1e-5)  # squares of these positions overflow


def test_67_neighbours_of_features_whose_squares_overflow() -> None:
    rng = np.random.default_rng(0)
    small = rng.normal(size=(20, 8)).astype(np.float32)
    large = small * np.float32(1e25)
    for near in (
        lambda rows: neighbours(rows[:5], rows, 3)[0],
        lambda rows: next(iter(nearest(rows, rows[:5], 3)))[1].numpy(),
    ):
        np.testing.assert_array_equal(near(large), near(small))


def test_67_outputs_that_are_nan_equal_nothing_and_are_no_reference(tmp_path: Path) -> None:
    one, nan, inf = torch.ones(2), torch.tensor([1.0, np.nan]), torch.tensor([1.0, np.inf])
    for found, expected in ((nan, nan), (one, nan), (nan, one), (inf, inf), (one, inf), (inf, one)):
        assert relative_error(found, expected) == np.inf
    assert reference(load(overflowing(tmp_path / "model"))) == {}


def test_67_the_server_draws_no_attention_that_is_nan(tmp_path: Path) -> None:
    served = ServedModel("m", load(overflowing(tmp_path / "model")), "cpu")
    draw(tmp_path / "photos", count=1)
    image = served.prepare((tmp_path / "photos/red/0.png").read_bytes(), 10**6)
    for patch in (None, (0, 0)):
        (refused,) = served.look([(image, AttentionQuery(patch=patch))])
        assert isinstance(refused, Refused) and (refused.status, refused.reason) == (500, "not-finite")


def test_67_finite_outputs_pass_and_others_are_refused() -> None:
    def outputs(images: torch.Tensor) -> torch.Tensor:
        return images

    fine = torch.tensor([[1.0, -3e38]])
    assert Refusing(outputs)(fine) is fine
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(WeightsError, match="NaN or infinity"):
            Refusing(outputs)(torch.tensor([[0.0, bad]]))


def test_66_a_prediction_in_json_has_the_name(tmp_path: Path) -> None:
    write_predictions([Prediction("=a", ["=b"], [1.0])], tmp_path / "out.jsonl", kind="jsonl")
    assert json.loads((tmp_path / "out.jsonl").read_text())["path"] == "=a"
