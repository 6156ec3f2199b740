"""Folders as TensorFlow Datasets writes them, by other hands than ours: tensorboard frames the records, protobuf
writes the examples, and the JSON is spelled out as the library does in either of its generations.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from tensorboard.summary.writer.record_writer import RecordWriter

Value = bytes | int | float | str | Sequence[Any]
Features = Mapping[str, Value]


@functools.cache
def example_class(packed: bool = True) -> Any:
    """The message `tensorflow.Example`, from its published definition; proto2 does not pack lists."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    for name, kind in (
        ("BytesList", field.TYPE_BYTES),
        ("FloatList", field.TYPE_FLOAT),
        ("Int64List", field.TYPE_INT64),
    ):
        value = file.message_type.add(name=name).field.add(name="value", number=1, type=kind, label=3)
        if kind != field.TYPE_BYTES:
            value.options.packed = packed
    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    for number, name in enumerate(("bytes", "float", "int64"), 1):
        kind = f".tensorflow.{name.capitalize()}List"
        feature.field.add(name=f"{name}_list", number=number, type=11, label=1, type_name=kind, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=11, label=1, type_name=".tensorflow.Feature")
    features.field.add(name="feature", number=1, type=11, label=3, type_name=".tensorflow.Features.FeatureEntry")
    example = file.message_type.add(name="Example")
    example.field.add(name="features", number=1, type=11, label=1, type_name=".tensorflow.Features")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


def serialised(features: Features, *, packed: bool = True) -> bytes:
    """The bytes of an Example; a single value is a list of one."""
    message = example_class(packed)()
    for name, value in features.items():
        values = list(value) if isinstance(value, list | tuple) else [value]
        values = [item.encode() if isinstance(item, str) else item for item in values]
        feature = message.features.feature[name]
        if values and isinstance(values[0], bytes):
            feature.bytes_list.value.extend(values)
        elif values and isinstance(values[0], float):
            feature.float_list.value.extend(values)
        else:
            feature.int64_list.value.extend(values)
    return bytes(message.SerializeToString())


def write_records(path: Path, records: Sequence[bytes]) -> Path:
    """Write a TFRecord file with tensorboard's writer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        writer = RecordWriter(file)
        for record in records:
            writer.write(record)
    return path


def prepare(
    folder: Path,
    name: str,
    splits: Mapping[str, Sequence[Features]],
    *,
    shards: int = 1,
    labels: Mapping[str, Sequence[str]] | None = None,
    supervised: tuple[str, str] | None = ("image", "label"),
    old: bool = False,
) -> Path:
    """Write `folder` as TensorFlow Datasets prepares it; `old` as it did before features.json."""
    described = []
    for split, rows in splits.items():
        size = -(-len(rows) // shards)
        parts = [rows[size * shard : size * (shard + 1)] for shard in range(shards)]
        for shard, part in enumerate(parts):
            file = folder / f"{name}-{split}.tfrecord-{shard:05d}-of-{shards:05d}"
            write_records(file, [serialised(row) for row in part])
        described.append({"name": split, "shardLengths": [str(len(part)) for part in parts]})
    info: dict[str, Any] = {"name": name, "version": folder.name, "splits": described}
    if supervised is not None:
        keys = [{"featureKey": key} for key in supervised]
        pair = {"input": supervised[0], "output": supervised[1]}
        info["supervisedKeys"] = pair if old else {"tuple": {"items": keys}}
    if not old:
        info["fileFormat"] = "tfrecord"
        row = next(iter(splits.values()))[0]
        (folder / "features.json").write_text(json.dumps(_described(row, labels or {})))
    (folder / "dataset_info.json").write_text(json.dumps(info))
    for key, names in (labels or {}).items():
        (folder / f"{key.replace('/', '-')}.labels.txt").write_text("".join(f"{name}\n" for name in names))
    return folder


def _described(row: Features, labels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """features.json of a row: images are bytes, labels integers, "objects/..." a sequence of dicts."""
    flat: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    for key, value in row.items():
        inner = key.removeprefix("objects/")
        if isinstance(value, bytes):
            kind: dict[str, Any] = {"pythonClassName": "tensorflow_datasets.core.features.image_feature.Image"}
        elif isinstance(value, int) and (key in labels or key.startswith("label")):
            kind = {"pythonClassName": "tensorflow_datasets.core.features.class_label_feature.ClassLabel"}
            kind["classLabel"] = {"numClasses": str(len(labels.get(key, "x" * 40)))}
        else:
            kind = {"pythonClassName": "tensorflow_datasets.core.features.tensor_feature.Tensor", "tensor": {}}
        (objects if key.startswith("objects/") else flat)[inner] = kind
    if objects:
        inner_dict = {"pythonClassName": "...features_dict.FeaturesDict", "featuresDict": {"features": objects}}
        flat["objects"] = {
            "pythonClassName": "tensorflow_datasets.core.features.sequence_feature.Sequence",
            "sequence": {"feature": inner_dict, "length": "-1"},
        }
    return {
        "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
        "featuresDict": {"features": flat},
    }
