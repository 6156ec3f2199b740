"""Cards, configs and names from elsewhere: their claims are compared with the tensors before anything is allocated."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_peers
import numpy as np
import pytest
import torch
from flax_arrays import bit, google, hybrid
from forked import Forked
from peak_memory import kibibytes
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_networks import fresh, tiny

from vitrail.cli import main
from vitrail.data.settings import Preprocess
from vitrail.errors import ExportError, VitrailError, WeightsError
from vitrail.objective.settings import Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer, load_tokenizer
from vitrail.weights.base import BaseWeights
from vitrail.weights.card import Card
from vitrail.weights.load import load, read_card
from vitrail.weights.store import save_model

Change = Callable[[dict[str, Any]], None]


def model(folder: Path, names: list[str] | None = None, **config: Any) -> Path:
    """Write a small model of vitrail."""
    network = fresh(tiny(**config))
    save_model(folder, network, Card(network.config, ["a", "b", "c"] if names is None else names, Preprocess((16, 16))))
    return folder


def with_card(folder: Path, text: str) -> Path:
    """Replace the card of a model, and make its checksum right."""
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as handle:
        header, tensors = handle.metadata(), {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    save_file(tensors, file, header | {"card": text, "card_sha256": hashlib.sha256(text.encode()).hexdigest()})
    return folder


def changed(folder: Path, **changes: Any) -> Path:
    """Replace entries of a model's card; "config__depth" is the entry depth of config."""
    with safe_open(folder / "model.safetensors", "pt") as handle:
        card = json.loads(handle.metadata()["card"])
    for name, value in changes.items():
        *outer, last = name.split("__")
        section = card
        for part in outer:
            section = section[part]
        section[last] = value
    return with_card(folder, json.dumps(card))


# ---- a card and its tensors


@pytest.mark.full_size
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(config__channels=4), r"'stem.weight' in shape \(16, 3, 4, 4\).*\(16, 4, 4, 4\).*channels 4"),
        (dict(config__patch=8), r"'stem.weight' in shape .*patch 8"),
        (dict(config__width=32), r"in shape .*width 32"),
        (dict(config__depth=1000), r"lacks the tensor 'blocks.2.attentions.0.*depth 1000"),
        (dict(config__depth=1), r"holds the tensor 'blocks.1.*does not have \(depth 1,"),
        (dict(config__mlp_dim=64), r"'blocks.0.mlps.0.mlp.fc1.weight' in shape \(32, 16\).*mlp_dim 64"),
        (dict(config__classes=5, class_names=[]), r"'head.weight' in shape \(3, 16\).*classes 5"),
        (dict(config__image_size=[4096, 4096], config__patch=32), r"'stem.weight' in shape .*patch 32"),
        (dict(config__image_size=[64, 64]), r"'positions.embedding' in shape \(1, 17, 16\).*image_size \(64, 64\)"),
        (dict(config__registers=4096), r"lacks the tensor 'registers' of shape \(1, 4096, 16\).*registers 4096"),
        (dict(config__heads=3), "width 16 is not divisible by 3 heads"),
        (dict(config__heads=-2), "heads is -2; valid: 1 to 4,096"),
        (dict(config__channels=10**9), "channels is 1000000000; valid: 1 to 1,024"),
        (dict(config__classes=10**12, class_names=[]), "classes is 1000000000000"),
        (
            dict(preprocess__image_size=[10**5, 10**5]),
            r"preprocess: image_size is \(100000, 100000\); it must be from 1 to 4,",
        ),
        (dict(preprocess__crop=1e-9), "crop is 1e-09, so images of 16 x 16 pixels would be cut from larger ones"),
        (dict(class_names=None), "class_names: expected a list of names, got None"),
        (dict(class_names=["a", "b"]), "2 class names for a model with 3 classes"),
    ],
)
def test_60_a_card_is_compared_with_its_tensors(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = changed(model(tmp_path / "model"), **changes)
    with pytest.raises(WeightsError, match=message) as error:
        load(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 101 + "]" * 101,
        "[1,",
        "NaN",
        '"' + "x" * 100,
        "1" * 5000,
        "\x00",
        "{}" * 2,
    ],
)
def test_60_a_card_that_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    folder = with_card(model(tmp_path / "model"), text)
    with pytest.raises(WeightsError, match="has an unusable card"):
        load(folder)


def test_60_json_that_is_too_long_or_too_deep_is_refused_beside_foreign_weights(tmp_path: Path) -> None:
    hf_peers.saved(tmp_path, "vit")
    for name in ("config.json", "preprocessor_config.json"):
        before = (tmp_path / name).read_text() if (tmp_path / name).exists() else None
        for text, message in (
            ("[" * 100_000, "nested deeper than 100"),
            (" " * (65 << 20) + "{}", "at most 67,108,864"),
        ):
            (tmp_path / name).write_text(text)
            with pytest.raises(WeightsError, match=f"{name} .*{message}"):
                load(tmp_path)
        (tmp_path / name).unlink() if before is None else (tmp_path / name).write_text(before)
    load(tmp_path)


# ---- names on a terminal


def test_60_names_cannot_steer_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = ["\x1b[2J\x1b]0;title\x07red", "two\nlines\r\x9b31m", "\u202edog"]
    folder = model(tmp_path / "model", hostile)
    assert load(folder).card.class_names == hostile
    changed(folder, source="\x1b[31msource", metrics={"\x1b[31mtop1": "\x1b[5m"})
    assert main(["weights", "info", str(folder)]) == 0
    output = capsys.readouterr().out
    assert r"\x1b[2J\x1b]0;title\x07red" in output and r"\x1b[31msource" in output and r"\u202edog" in output
    assert not set("\x1b\x07\r\x9b\u202e") & set(output)
    changed(folder, licence=["\x1b[31m"])
    assert main(["weights", "info", str(folder)]) == 1
    assert "\x1b" not in capsys.readouterr().err


# ---- configs of other libraries

HF: list[tuple[dict[str, Any], str]] = [
    (dict(image_size=None), ""),
    (dict(image_size="32"), "image_size of config.json is '32'"),
    (dict(image_size=10**9), r"image_size is \(1000000000, 1000000000\); it must be from 1 to 4,096"),
    (dict(image_size=[32]), r"image_size of config.json is \[32\]"),
    (dict(image_size=[64, 64]), r"position_embeddings' of shape \(1, 17, 32\).*image_size \(64, 64\)"),
    (dict(patch_size=0), "patch_size 0, but the tensors are of 8"),
    (dict(num_channels=10**9), "num_channels 1000000000, but the tensors are of 3"),
    (dict(hidden_size=-1), "hidden_size -1, but the tensors are of 32"),
    (dict(num_hidden_layers=10**12), "num_hidden_layers 1000000000000, but the tensors are of 2"),
    (dict(num_attention_heads=0), "num_attention_heads of config.json is 0; valid: a number above 0"),
    (dict(num_attention_heads=-1), "num_attention_heads of config.json is -1"),
    (dict(num_attention_heads=7), "width 32 is not divisible by 7 heads"),
    (dict(num_attention_heads=2.5), "num_attention_heads of config.json is 2.5; valid: a whole number"),
    (dict(num_attention_heads="2"), "num_attention_heads is '2'; valid: a finite number"),
    (dict(layer_norm_eps=float("nan")), "layer_norm_eps is nan"),
    (dict(layer_norm_eps=10**400), "layer_norm_eps is 1000"),
    (dict(layer_norm_eps=5.0), "norm_eps is 5.0; valid: 0 to 1"),
    (dict(hidden_act="mish"), "hidden_act of config.json is 'mish'"),
    (dict(hidden_act=["gelu"]), r"hidden_act of config.json is \['gelu'\]"),
    (dict(model_type=["vit"]), r"model_type is \['vit'\]; valid: text"),
    (dict(architectures={"0": "ViT"}), "architectures is {'0': 'ViT'}; valid: text"),
    (dict(id2label={"0": "a", "2": "c"}), "id2label of config.json should name the classes 0 to 2 .*it has 2"),
    (dict(id2label={"0": "a", "1": "b", "2": {"c": []}}), "a name in id2label is {'c': "),
    (dict(id2label=["a"] * 10**6), "it has .'a', 'a', "),
    (dict(num_labels=10**9), "num_labels 1000000000, but the tensors are of 3 classes"),
]


@pytest.mark.parametrize(("changes", "message"), HF)
def test_60_a_config_of_transformers_is_compared_with_its_tensors(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    network = hf_peers.saved(tmp_path, "vit")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    if not message:
        assert torch.equal(load(tmp_path).stem.weight, network.vit.embeddings.patch_embeddings.projection.weight)
        return
    with pytest.raises(WeightsError, match=message) as error:
        read_card(tmp_path)
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 1000


PROCESSORS: list[tuple[dict[str, Any], str]] = [
    (dict(size=10**9), r"image_size is \(1000000000, 1000000000\); it must be from 1 to 4,096"),
    (dict(size={"height": -1, "width": 3}), r"a size in preprocessor_config.json is \[-1, 3\]"),
    (dict(size={"shortest_edge": [1, 2, 3]}), r"a size in preprocessor_config.json is \[1, 2, 3\]"),
    (dict(do_center_crop=True, crop_size=[True, True]), r"is \[True, True\]"),
    (dict(do_center_crop=True, crop_size=1, size={"shortest_edge": 10**9}), "crop is 1e-09, so images of 1 x 1 pixels"),
    (dict(rescale_factor=0), "rescale_factor in preprocessor_config.json is 0; valid: a number above 0"),
    (dict(rescale_factor=[1]), r"rescale_factor in preprocessor_config.json is \[1\]"),
    (dict(image_std=[0, 0, 0]), "std is 0.0; valid: 1e-06"),
    (dict(image_mean=[0.5, 0.4]), ""),
    (dict(image_mean=[[0.5]]), r"image_mean in preprocessor_config.json is \[0.5\]"),
    (dict(image_mean=[]), r"image_mean in preprocessor_config.json is \[\]"),
    (dict(resample=[3]), r"resample is \[3\], which vitrail does not have"),
]


@pytest.mark.parametrize(("changes", "message"), PROCESSORS)
def test_60_a_processor_of_transformers_has_ranges(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    hf_peers.saved(tmp_path, "vit")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(changes))
    if not message:
        load(tmp_path)
        return
    with pytest.raises(WeightsError, match=message):
        load(tmp_path)


# ---- names and shapes of tensors


def npz(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            google() | {"Transformer/encoderblock_999999999/LayerNorm_0/bias": np.zeros(24)},
            "no 'Transformer/encoderblock_2'",
        ),
        (google() | {f"Transformer/encoderblock_{'9' * 5000}/x": np.zeros(1)}, "5,0.. letters"),
        (google() | {"posembed_input": np.zeros(1)}, "holds the tensor 'posembed_input'"),
        (
            google(grid=(1, 1)) | {"Transformer/posembed_input/pos_embedding": np.zeros((1, 1, 24), np.float32)},
            "only the class",
        ),
        (hybrid() | {"block999999999/unit1/conv1/kernel": np.zeros(1)}, "has 'block999999999' but no 'block"),
        (
            bit() | {"resnet/block99999999/unit01/a/group_norm/gamma": np.zeros(1)},
            "has 'resnet/block99999999' but no 'resnet/block",
        ),
        (
            {f"resnet/block{n}/unit01/x": np.zeros(1) for n in range(1, 3000)}
            | {"resnet/root_block/standardized_conv2d/kernel": np.zeros((7, 7, 3, 32), np.float32)},
            "2,999 layers; at most 1,000",
        ),
    ],
)
def test_60_names_of_any_depth_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        load(npz(tmp_path / "w.npz", arrays))


@pytest.mark.parametrize("number", ["999999999", "9" * 900, "-1", "1e3", "٣"])
@pytest.mark.parametrize("start", ["blocks", "vit.encoder.layer", "encoder.layers.encoder_layer_", "stages"])
def test_60_layers_of_any_number_are_refused(tmp_path: Path, start: str, number: str) -> None:
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "blocks": {"cls_token": (1, 1, 64), "pos_embed": (1, 4, 64), "patch_embed.proj.weight": (64, 3, 4, 4),
                   "blocks.0.norm1.weight": (64,), "blocks.0.attn.qkv.weight": (192, 64), "blocks.0.gamma_1": (64,),
                   "blocks.0.mlp.fc1.weight": (64, 64)},
        "vit.encoder.layer": {"vit.embeddings.patch_embeddings.projection.weight": (64, 3, 4, 4)},
        "encoder.layers.encoder_layer_": {"class_token": (1, 1, 64), "encoder.pos_embedding": (1, 5, 64)},
        "stages": {"stem.conv.weight": (64, 3, 7, 7), "stages.0.blocks.0.norm1.weight": (64,),
                   "stages.0.blocks.0.conv1.weight": (64, 64, 1, 1), "stages.0.blocks.0.conv3.weight": (256, 64, 1, 1)},
    }  # fmt: skip
    names = shapes[start] | {f"{start}.{number}.norm1.weight": (64,)}
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError):
        load(tmp_path / "w.safetensors")


def test_60_a_stem_of_any_kernels_is_refused(tmp_path: Path) -> None:
    names = {"cls_token": (1, 1, 64), "blocks.0.norm1.weight": (64,), "blocks.0.attn.qkv.weight": (192, 64)}
    names["pos_embed"] = (1, 197, 64)
    names |= {f"patch_embed.proj.{place}.weight": (1, 1, 99_991, 1) for place in (0, 3, 6)}
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, tmp_path / "w.safetensors")
    with pytest.raises(WeightsError, match="hMLP stem with kernels"):
        load(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    "entries",
    [
        {"a": dict(dtype="F32", shape=[2**60, 2**60], data_offsets=[0, 8])},
        {
            "a": dict(dtype="F32", shape=[2], data_offsets=[0, 8]),
            "b": dict(dtype="F32", shape=[2], data_offsets=[4, 12]),
        },
        {
            "a": dict(dtype="F32", shape=[0, 2**62, 2**62], data_offsets=[0, 0]),
            "b": dict(dtype="F32", shape=[2], data_offsets=[0, 8]),
        },
        {"a": dict(dtype="F32", shape=[-2], data_offsets=[0, 8])},
        {"a": dict(dtype="F32", shape=[2], data_offsets=[8, 0])},
        {"a": dict(dtype="F999", shape=[2], data_offsets=[0, 8])},
    ],
)
def test_60_offsets_and_shapes_that_cannot_be_are_refused(tmp_path: Path, entries: dict[str, Any]) -> None:
    header = json.dumps(entries).encode()
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(WeightsError):
        load(tmp_path / "w.safetensors")


INDEX: list[tuple[Any, str]] = [
    ({"a": "../w.safetensors"}, "only files of its own folder"),
    ({"a": "/etc/passwd"}, "only files of its own folder"),
    ({"a": "..\\w.safetensors"}, "only files of its own folder"),
    ({"a": "w\0.safetensors"}, "only files of its own folder"),
    ({"a": ["w.safetensors"]}, "only files of its own folder"),
    ({"a": None}, "only files of its own folder"),
    ({"a": "x" * 10**6}, "only files of its own folder"),
    ({"a": "x" * 255}, "which is not there"),
    ({"a": "missing.safetensors"}, "which is not there"),
    ({"a": "model.safetensors.index.json"}, "cannot be read"),
    ({"b": "w.safetensors"}, "lacks the tensor 'b'"),
    ({}, 'lacks "weight_map"'),
    (["w.safetensors"], 'lacks "weight_map"'),
]


@pytest.mark.parametrize(("places", "message"), INDEX)
def test_60_an_index_reads_only_its_own_complete_folder(tmp_path: Path, places: Any, message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.zeros(2)}, folder / "w.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "w.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(WeightsError, match=message) as error:
        load(folder)
    assert len(str(error.value)) < 1000


# ---- memory


def peaks(legitimate: Path, hostile: list[Path], out: Path) -> None:
    """Write the peak of this process's memory in KiB, after the legitimate model and after each hostile one."""
    load(legitimate)
    found = {"legitimate": kibibytes("VmHWM")}
    for folder in hostile:
        with pytest.raises(VitrailError):
            load(folder)
        found[str(folder)] = kibibytes("VmHWM")
    out.write_text(json.dumps(found))


@pytest.mark.processes
def test_60_nothing_large_is_allocated_for_a_claim(tmp_path: Path) -> None:
    """Every case has a few kilobytes; what it claims has gigabytes."""
    claims: list[dict[str, Any]] = [
        dict(config__channels=10**9),
        dict(config__channels=1024),
        dict(config__width=65_536, config__heads=1),
        dict(config__depth=1000),
        dict(config__mlp_dim=1_048_576),
        dict(config__classes=16_777_216, class_names=[]),
        dict(config__registers=4096),
        dict(config__pre_logits=1_048_576),
        dict(config__image_size=[1024, 1024]),
        dict(config__image_size=[4096, 4096]),
        dict(config__patch=4096, config__image_size=[4096, 4096]),
        dict(config__positions="relative", config__image_size=[256, 256]),
        dict(config__mean=[*[0.5] * 100_000, 0.4]),
        dict(preprocess__image_size=[10**5, 10**5]),
        dict(preprocess__crop=1e-9),
        dict(class_names=["x"] * 100_000),
    ]
    legitimate = model(tmp_path / "legitimate")
    folders = [changed(model(tmp_path / str(number)), **claim) for number, claim in enumerate(claims)]
    measuring = Forked(peaks, legitimate, folders, tmp_path / "peaks.json", env=os.environ)
    assert measuring.wait(60) == 0
    found = json.loads((tmp_path / "peaks.json").read_text())
    before = found.pop("legitimate")
    assert max(found.values()) - before < 128 << 10, found


# ---- exported programs and tokenizers


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network as a program of ONNX Runtime."""
    pytest.importorskip("onnxruntime")
    from vitrail.exports.write import export_model

    folder = tmp_path_factory.mktemp("program")
    export_model(load(model(folder / "model")), folder / "onnx")
    return folder / "onnx" / "model.onnx"


DESCRIPTIONS: list[tuple[dict[str, Any], str]] = [
    (dict(card="["), "unusable description: 'card'"),
    (dict(card="[" * 10_000), "unusable description: 'card': the JSON is nested deeper"),
    (dict(card=None), "description lacks 'card'"),
    (dict(class_names=None), "description lacks 'class_names'"),
    (dict(card="3"), "has the card 3"),
    (dict(output="{}"), "the output {}"),
    (dict(output='{"name": ["logits"]}'), r"the output {'name': \['logits'\]}"),
    (dict(class_names="null"), "class_names: expected a list of names, got None"),
    (dict(class_names='["a"]'), "1 class names for a model with 3 classes"),
    (dict(provenance="3"), "provenance: expected an object"),
    (dict(format='"other"'), "description has format 'other'"),
    (dict(version="1e999"), "version inf"),
]


def described(
    program: Path, target: Path, changes: dict[str, str | None], card: Callable[[Any], None] | None = None
) -> Path:
    """Copy a program with other metadata; None removes an entry, and `card` changes the model card."""
    import onnx

    graph = onnx.load(program)
    values = {entry.key: entry.value for entry in graph.metadata_props} | changes
    if card is not None:
        content = json.loads(values["card"])
        card(content)
        values["card"] = json.dumps(content)
    del graph.metadata_props[:]
    for key, value in values.items():
        if value is not None:
            graph.metadata_props.add(key=key, value=value)
    onnx.save(graph, target)
    return target


@pytest.mark.export
@pytest.mark.parametrize(("changes", "message"), DESCRIPTIONS)
def test_60_the_description_of_a_program_is_checked(
    tmp_path: Path, program: Path, changes: dict[str, str | None], message: str
) -> None:
    from vitrail.exports.engine import Engine

    with pytest.raises(ExportError, match=message) as error:
        Engine(described(program, tmp_path / "model.onnx", changes))
    assert str(tmp_path) in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.export
def test_60_a_program_has_the_outputs_of_its_card(tmp_path: Path, program: Path) -> None:
    from vitrail.exports.engine import Engine

    images = torch.zeros(2, 3, 16, 16, dtype=torch.uint8)
    assert Engine(program)(images).shape == (2, 3)
    names = dict(class_names='["a", "b", "c", "d", "e"]')
    five = described(program, tmp_path / "model.onnx", names, lambda card: card["config"].update(classes=5))
    with pytest.raises(ExportError, match=r"outputs of shape \(2, 3\) for 2 images, but its card describes 5 classes"):
        Engine(five)(images)
    huge = described(
        program, tmp_path / "huge.onnx", {}, lambda card: card["preprocess"].update(image_size=[10**5, 10**5])
    )
    with pytest.raises(ExportError, match=r"image_size is \(100000, 100000\); it must be from 1 to 4,096"):
        Engine(huge)


TOKENIZERS: list[tuple[Any, str]] = [
    (dict(codes=10**12), "codes is 1000000000000; it must be from 2 to 1,048,576"),
    (dict(codes=10**6), r"'codebook.counts' has the shape \(16,\); its settings require \(1000000,\)"),
    (dict(width=10**6), "width is 1000000; it must be from 1 to 65,536"),
    (dict(width=60_000), "its settings require"),
    (dict(depth=10**12), "depth is 1000000000000; it must be from 0 to 1,000"),
    (dict(depth=3), "its settings require"),
    (dict(width=-4), "width is -4; it must be from 1 to 65,536"),
    (dict(patch=1_000_000_007), "patch is 1000000007; valid: 1 to 4,096"),
    (dict(patch=0), "patch is 0; valid: 1 to 4,096"),
    (dict(patch=None), "patch is None"),
    (dict(codes="16"), "codes: expected a whole number, got '16'"),
    (dict(unknown=1), "unknown: unknown setting"),
    (dict(decay=float("nan")), "decay is nan"),
    ([1], "patch is None"),
]


@pytest.mark.parametrize(("changes", "message"), TOKENIZERS)
def test_60_a_tokenizer_is_compared_with_its_tensors(tmp_path: Path, changes: Any, message: str) -> None:
    settings = Tokenizer(codes=16, width=8, depth=1, features=4)
    network = ImageTokenizer(settings, 4)
    network.save(tmp_path)
    file = tmp_path / "tokenizer.safetensors"
    state = load_tokenizer(file).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())
    with safe_open(file, "pt") as handle:
        header, tensors = handle.metadata(), {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    values = json.loads(header["tokenizer"]) | changes if isinstance(changes, dict) else changes
    save_file(tensors, file, {"tokenizer": json.dumps(values)})
    with pytest.raises(WeightsError, match=message):
        load_tokenizer(file)


# ---- models that hold only a tuned part


def tuned(folder: Path, **reference: Any) -> Path:
    """Write the head of a small model, with a reference to the rest whose entries are replaced."""
    network = fresh(tiny())
    shared = frozenset(name for name in network.state_dict() if not name.startswith("head"))
    base = BaseWeights("base", str(folder / "base"), "0" * 64, shared=shared)
    save_model(folder, network, Card(network.config, ["a", "b", "c"], Preprocess((16, 16))), base)
    file = folder / "model.safetensors"
    with safe_open(file, "pt") as handle:
        header, tensors = handle.metadata(), {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
    text = json.dumps(json.loads(header["base"]) | reference)
    save_file(tensors, file, header | {"base": text, "base_sha256": hashlib.sha256(text.encode()).hexdigest()})
    return folder


@pytest.mark.parametrize("name", ["path", "relative", "source"])
@pytest.mark.parametrize("value", ["a\0b", "x" * 256, "é" * 128, "x/" * 3000, "\ud800" * 100])
def test_60_a_base_is_a_path(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(WeightsError, match=f"base model by {name} .* which is not a path") as error:
        load(tuned(tmp_path, **{name: value}))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("path", ["", "/", "/etc/passwd", "/dev/zero", "/proc/self/mem", "~", "../" * 1000, "\x1b[31m"])
def test_60_a_base_that_is_no_model_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(WeightsError, match="holds only the tuned part of a model, and its base model"):
        load(tuned(tmp_path, path=path))


@pytest.mark.full_size
def test_60_bases_follow_each_other_only_so_far(tmp_path: Path) -> None:
    for number in range(200):
        tuned(tmp_path / str(number), path=str(tmp_path / str(number - 1)))
    with pytest.raises(WeightsError, match="one more than the 32 that are followed"):
        load(tmp_path / "199")
