from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitrail.data.cache import cache_folder
from vitrail.data.item import split_word
from vitrail.data.settings import Columns, Data
from vitrail.data.sources.arrow import encode_labels
from vitrail.data.sources.open import open_data, open_path
from vitrail.errors import DataError, DecodeError, UsageError
from vitrail.verbs.flags.reading import read_settings


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


def write(root: Path, text: str | bytes, name: str = "t.csv", files: int = 4) -> Path:
    """Write a table beside `img/0.jpg` ... (whose contents opening must not care about)."""
    (root / "img").mkdir(exist_ok=True)
    for index in range(files):
        (root / "img" / f"{index}.jpg").write_bytes(b"x" * (index + 1))
    (root / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return root / name


def only(path: Path, columns: Columns = Columns()):
    (source,) = open_path(str(path), columns).splits.values()
    return source


def rows(source) -> list[tuple[str, str]]:
    return [(source.id(i), source.class_names[source.labels[i]]) for i in range(len(source))]


EXPECTED = [("img/0.jpg", "cat"), ("img/1.jpg", "dog"), ("img/2.jpg", "cat")]


@pytest.mark.parametrize(
    "text",
    [
        "path,label\nimg/0.jpg,cat\nimg/1.jpg,dog\nimg/2.jpg,cat\n",
        "label;width;Filename\ncat;3;img/0.jpg\ndog;4;img/1.jpg\n\ncat;5;img/2.jpg",
        "image\tclass\nimg/0.jpg\tcat\nimg/1.jpg\tdog\nimg/2.jpg\tcat\n",
        "\ufeffpath,label\r\nimg/0.jpg,cat\r\nimg/1.jpg,dog\r\nimg/2.jpg,cat\r\n",
        'file,label\n"img/0.jpg","cat"\n"img/1.jpg","dog"\n"./img/2.jpg"," cat "\n',
        "path,label\nimg\\0.jpg,cat\n.\\img\\1.jpg,dog\nimg\\2.jpg,cat\n",
    ],
    ids=["plain", "semicolon", "tab", "bom-crlf", "quoted", "windows"],
)
def test_the_usual_ways_to_write_a_table(tmp_path: Path, text: str) -> None:
    source = only(write(tmp_path, text))
    assert rows(source) == EXPECTED
    assert source[1].image == b"xx" and source.sizes.tolist() == [1, 2, 3]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(labels=st.lists(st.text("aé,;\"' 日\t", min_size=1).map(str.strip).filter(bool), min_size=4, max_size=4))
def test_any_label_survives_quoting(tmp_path: Path, labels: list[str]) -> None:
    import csv
    import io

    text = io.StringIO()
    csv.writer(text).writerows([("path", "label"), *((f"img/{i}.jpg", label) for i, label in enumerate(labels))])
    separated = any(";" in label for label in labels)  # such names could be sets of labels
    source = only(write(tmp_path, text.getvalue()), Columns(per_image="one" if separated else "auto"))
    assert [label for _, label in rows(source)] == labels


def test_integer_labels_are_ordered_by_value(tmp_path: Path) -> None:
    source = only(write(tmp_path, "path,label\nimg/0.jpg,10\nimg/1.jpg,9\nimg/2.jpg,10\n"))
    assert source.class_names == ["9", "10"] and source.labels.tolist() == [1, 0, 1]


def test_bad_rows_are_dropped_and_listed_with_their_number(tmp_path: Path) -> None:
    text = "path,label\nimg/0.jpg,a\nimg/9.jpg,a\nimg/1.jpg,b\nimg/0.jpg,b\n,a\nimg,a\n"
    found = open_path(str(write(tmp_path, text)))
    assert rows(found.splits[""]) == [("img/0.jpg", "a"), ("img/1.jpg", "b")]
    reasons = [(item.id, item.reason) for item in found.findings.dropped]
    assert [id for id, _ in reasons] == ["img/9.jpg", "img/0.jpg", "", "img"]
    assert ["row 3" in reasons[0][1], "row 5" in reasons[1][1], "in row 2" in reasons[1][1]] == [True] * 3
    assert "row 6" in reasons[2][1] and "row 7" in reasons[3][1]


@pytest.mark.parametrize("label", ["", "nan", "NaN", "None", "null", "  "])
def test_a_row_without_a_label_is_an_error_with_its_number(tmp_path: Path, label: str) -> None:
    with pytest.raises(DataError, match=r"t\.csv, row 3: no label for 'img/1\.jpg'"):
        open_path(str(write(tmp_path, f"path,label\nimg/0.jpg,a\nimg/1.jpg,{label}\n")))


def test_a_short_row_lacks_its_label(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="row 2: no label"):
        open_path(str(write(tmp_path, "path,label\nimg/0.jpg\n")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name,label\nimg/0.jpg,a\n", "no image column: its columns are name, label"),
        ("path,wing\nimg/0.jpg,a\n", "no label column"),
        ("", "no image column"),
        ("path,label\n", "lists no existing image"),
        ("path,label\nimg/7.jpg,a\nimg/8.jpg,a\n", r"2 rows left out; the first: 'img/7\.jpg', row 2"),
        (b"path,label\nimg/0.jpg,caf\xe9\n", "not UTF-8"),
        (b"path,label\nimg/0.jpg,\0a\n", "row|CSV|NUL|no label|one class"),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_data(str(write(tmp_path, text)))


def test_columns_can_be_named(tmp_path: Path) -> None:
    path = write(tmp_path, "path,thumb,label,kind\nnope,img/0.jpg,x,a\nnope,img/1.jpg,x,b\n")
    assert rows(only(path, Columns("thumb", "kind"))) == [("img/0.jpg", "a"), ("img/1.jpg", "b")]
    with pytest.raises(UsageError, match=r"no column 'knid'.*Did you mean 'kind'"):
        open_data(Data(str(path), label_column="knid"))


def test_a_column_of_splits_and_tables_of_splits(tmp_path: Path) -> None:
    one = write(tmp_path, "path,label,split\nimg/0.jpg,a,train\nimg/1.jpg,b,train\nimg/2.jpg,b,val\n")
    splits = open_data(str(one))
    assert len(splits.train) == 2 and splits.validation.labels.tolist() == [1]
    folder = tmp_path / "several"
    folder.mkdir()
    write(folder, "path,label\nimg/0.jpg,a\nimg/1.jpg,b\n", "train.csv")
    write(folder, "path,label\nimg/2.jpg,b\n", "my_val.csv")
    splits = open_data(str(folder))
    assert len(splits.train) == 2 and splits.validation.labels.tolist() == [1]


def test_splits_that_nothing_uses_are_said(tmp_path: Path) -> None:
    splits = ("train", "train", "val", "", "Train", "test", "Bonus", "")
    lines = "".join(f"img/{number}.jpg,{'ab'[number % 2]},{split}\n" for number, split in enumerate(splits))
    path = write(tmp_path, "path,label,split\n" + lines, files=len(splits))
    said = open_data(str(path)).report.warnings
    assert [line.partition(":")[0] for line in said] == [
        f"split {name!r} is not used" for name in ("", "Train", "Bonus")
    ]
    assert "its 2 images are for no part of the training" in said[0]
    named = Data(str(path), train="train+Train", validation="Bonus")
    assert [line.partition(":")[0] for line in open_data(named).report.warnings] == ["split '' is not used"]
    with pytest.raises(DataError, match=r"data\.strict is set: split '' is not used"):
        open_data(Data(str(path), strict=True))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_that_are_classes_or_targets_are_no_defect(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path, "path,x,y\n" + "".join(f"img/{k}.jpg,{k % 2},{int(k % 3 == 0)}\n" for k in range(4)))
    if kind == "parquet":
        columns = {"image": [b"x"] * 4, "x": [0, 1, 0, 1], "y": [1, 0, 0, 1]}
        path = tmp_path / "t.parquet"
        pq.write_table(pa.table(columns), path)
    for per_image in ("auto", "numbers"):
        data = Data(str(path), label_columns=("x", "y"), labels_per_image=per_image, strict=True, holdout=0.25)
        found = open_data(data)
        assert not found.report.warnings
        assert (per_image, kind) == (
            "numbers",
            "parquet",
        ) or "each of the 2 columns 'x', 'y' is a" in found.report.lines()[0]


def test_one_column_of_labels_or_several(tmp_path: Path) -> None:
    path = write(tmp_path, "path,x,y,z\nimg/0.jpg,1,0,a\nimg/1.jpg,0,1,b\n")
    with pytest.raises(UsageError, match=r"data.label_column is 'z' and data.label_columns is 'x', 'y': each says"):
        open_path(str(path), Columns(label="z", classes=("x", "y")))
    # what a command names takes the place of what a run has
    assert read_settings({"label_column": "z"}, base=Data(label_columns=("x", "y"))).label_columns is None
    assert read_settings({"label_columns": ("x", "y")}, base=Data(label_column="z")).label_column is None
    assert read_settings({"strict": True}, base=Data(label_column="z")).label_column == "z"


def test_absolute_and_upward_paths(tmp_path: Path) -> None:
    write(tmp_path, "")
    (tmp_path / "lists").mkdir()
    table = tmp_path / "lists" / "t.csv"
    table.write_text(f"path,label\n../img/0.jpg,a\n{tmp_path}/img/1.jpg,b\n")
    source = only(table)
    assert [source[i].image for i in range(2)] == [b"x", b"xx"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("test.parquet", "test"),
        ("my_val_2.csv", "val"),
        ("data-validation.tar", "validation"),
        ("trainer.csv", ""),
        ("images.tar", ""),
    ],
)
def test_split_names_in_file_names(name: str, split: str) -> None:
    assert split_word(Path(name).stem) == split


# parquet


def write_parquet(
    path: Path, images: object, labels: object, names: list[str] | None = None, **options: object
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"image": images, "label": labels})
    if names is not None:
        info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path, **options)
    return path


BYTES = [bytes([65 + index]) * (index + 1) for index in range(10)]


@pytest.mark.parametrize("form", ["struct", "binary"])
@pytest.mark.parametrize("group", [3, 100])
def test_parquet_rows_in_any_grouping(tmp_path: Path, form: str, group: int) -> None:
    images = [{"bytes": data, "path": None} for data in BYTES] if form == "struct" else BYTES
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()}) if form == "struct" else pa.binary()
    names = ["b", "a"]
    for number in range(2):
        part = slice(5 * number, 5 * number + 5)
        write_parquet(
            tmp_path / "d" / "data" / f"train-0000{number}-of-00002.parquet",
            pa.array(images[part], kind), [0, 1, 0, 1, 1], names, row_group_size=group,
        )  # fmt: skip
    before = sorted(tmp_path.joinpath("d").rglob("*"))
    source = open_path(str(tmp_path / "d")).splits["train"]
    assert source.class_names == names  # a ClassLabel's order is kept
    assert [source[i].image for i in range(10)] == BYTES
    assert source.labels.tolist() == [0, 1, 0, 1, 1] * 2
    assert source.sizes.tolist() == list(range(1, 11))
    assert len({source.id(i) for i in range(10)}) == 10
    assert sorted(tmp_path.joinpath("d").rglob("*")) == before
    # the copy is found again, and made anew when the file changes
    kept = list(cache_folder().rglob("*.arrow"))
    open_path(str(tmp_path / "d"))
    assert list(cache_folder().rglob("*.arrow")) == kept and len(kept) == 1


def test_parquet_of_paths(tmp_path: Path) -> None:
    write(tmp_path, "")
    path = write_parquet(tmp_path / "t.parquet", ["img/0.jpg", "img/9.jpg", "img/2.jpg"], ["x", "y", "y"])
    found = open_path(str(path))
    (source,) = found.splits.values()
    assert rows(source) == [("img/0.jpg", "x"), ("img/2.jpg", "y")]
    assert "row 2" in found.findings.dropped[0].reason


def test_a_single_parquet_without_a_split_can_be_trained_on(tmp_path: Path) -> None:
    labels = [0, 1, 0, 1, 1, 0, 0, 1, 0, 1]
    path = write_parquet(tmp_path / "pets.parquet", BYTES, labels, ["cat", "dog"])
    splits = open_data(Data(path=str(path), holdout=0.2))
    assert (len(splits.train), len(splits.validation), splits.test) == (8, 2, None)
    assert splits.train.id(0).startswith("pets[")
    write_parquet(tmp_path / "test.parquet", BYTES, labels, ["cat", "dog"])
    assert sorted(open_path(str(tmp_path)).splits) == sorted([tmp_path.name, "test"])


def test_parquet_rows_that_point_to_files(tmp_path: Path) -> None:
    write(tmp_path, "")
    images = pa.array([{"bytes": None, "path": "img/1.jpg"}, {"bytes": None, "path": None}])
    images = images.cast(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    source = only(write_parquet(tmp_path / "t.parquet", images, [0, 1]))
    assert source[0].image == b"xx"
    with pytest.raises(DecodeError, match="neither bytes nor a path"):
        source[1]


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (pa.array([0, None, 1]), None, "row 2: no label"),
        (pa.array([0.0, 1.0, float("nan")]), None, "row 3: no label"),
        (pa.array(["a", "", "b"]), None, "row 2: no label"),
        (pa.array([0, 1, 2]), ["a", "b"], r"row 3: label 2 is not one of the 2 classes 0\.\.1"),
        (pa.array([-2, 1, 0]), ["a", "b"], "row 1: label -2"),
        (pa.array([0.5, 1.0, 2.0]), None, "valid are integers and names"),
    ],
)
def test_parquet_labels_that_are_none(tmp_path: Path, labels: pa.Array, names: list[str] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_path(str(write_parquet(tmp_path / "t.parquet", BYTES[:3], labels, names)))


def test_unlabelled_rows_are_unknown_and_not_trained_on(tmp_path: Path) -> None:
    write_parquet(tmp_path / "d" / "train.parquet", BYTES[:4], [0, 1, 0, 1], ["a", "b"])
    write_parquet(tmp_path / "d" / "test.parquet", BYTES[4:6], [-1, -1], ["a", "b"])
    splits = open_data(Data(str(tmp_path / "d"), holdout=0.5))
    assert splits.test.labels.tolist() == [-1, -1] and len(splits.validation) == 2  # held out of train
    with pytest.raises(DataError, match=r"2 of 2 images of split 'test'.*no label"):
        open_data(Data(str(tmp_path / "d"), train="test"))


@given(st.lists(st.integers(-3, 40), min_size=1, max_size=60))
def test_labels_round_trip_through_names(values: list[int]) -> None:
    for column in (pa.array(values), pa.array([str(v) for v in values]), pa.array(values).cast(pa.int8())):
        labels, names = encode_labels(pa.chunked_array([column]), None, "here")
        assert [int(names[label]) for label in labels] == values
        assert [int(name) for name in names] == sorted(set(values))


def test_dictionary_labels(tmp_path: Path) -> None:
    column = pa.array(["x", "y", "x"]).dictionary_encode()
    assert rows(only(write_parquet(tmp_path / "t.parquet", BYTES[:3], column))) == [
        ("t[0]", "x"), ("t[1]", "y"), ("t[2]", "x")
    ]  # fmt: skip


def test_a_broken_parquet_and_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match="not a readable parquet"):
        open_path(str(tmp_path / "a.parquet"))
    good = write_parquet(tmp_path / "b.parquet", BYTES, np.arange(10) % 2)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("VITRAIL_CACHE", str(blocked))
    with pytest.raises(DataError, match="VITRAIL_CACHE"):
        open_path(str(good))


@pytest.mark.full_size
def test_reading_rows_does_not_bring_the_table_into_memory(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).bytes
    path = write_parquet(tmp_path / "t.parquet", [noise(200_000) for _ in range(300)], np.arange(300) % 3)
    held = pa.total_allocated_bytes()
    source = only(path)
    for index in range(300):
        assert len(source[index].image) == 200_000
    assert pa.total_allocated_bytes() - held < 5_000_000  # of 60,000,000
