"""Whole runs that tune a part of a network: what they leave behind, and that they can be stopped, moved and resumed."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from references import copy_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_runs import SHORT, assert_same_bits, interrupted, newest, tiny_run
from tiny_runs import tensors as stored

import vitrail
from tests.properties.every_kind import BASE, ROWS, materials, stirred
from tests.properties.every_kind import whole as run_of
from vitrail.config import from_yaml
from vitrail.durations import Epochs, Steps
from vitrail.errors import CheckpointError, UsageError, WeightsError
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.reports.page import write_report
from vitrail.training import loop
from vitrail.training.run import Model, Optim, Run
from vitrail.weights.load import load, read_card
from vitrail.weights.save import save


def base_in(folder: Path, config: ViTConfig | ResNetConfig = BASE, seed: int = 0) -> Path:
    return save(stirred(config, seed), folder / "base", overwrite=True).path


def tiny(out: Path, **changes: Any) -> Run:
    """Four steps on handwritten digits, with everything that a frozen parameter could disturb."""
    part: dict[str, Any] = dict(name="finetune", weights=str(out / "base"), tune="attention")
    part |= dict(vit=Model(dropout=0.1, drop_path=0.1), optim=Optim(lr=1e-2, weight_decay=0.1))
    return tiny_run(out, **{**SHORT, **part, **changes})


@pytest.fixture
def runs() -> Path:
    """A folder with the base of `whole` and `adapted`. All three are references, which no test changes."""
    return materials()


@pytest.fixture
def whole() -> Path:
    """The folder of a run that tuned the attention layers."""
    return run_of("attention")


@pytest.fixture
def adapted() -> Path:
    """The folder of a run of LoRA."""
    return run_of("lora")


# what a run leaves behind


@pytest.mark.train
def test_only_the_tuned_part_is_in_the_run(whole: Path, runs: Path) -> None:
    base = load_file(runs / "base" / "model.safetensors")
    tensors = stored(whole)
    mine = {key.split(" ", 1)[1] for key in tensors if key.startswith("last ")}
    blocks = {name for name in base if ".attention." in name}
    assert len(blocks) == 2 * 4 and mine == blocks | {"head.weight", "head.bias"}
    assert {key.split(" ", 1)[1] for key in tensors if key.startswith("best ")} == mine
    # of a checkpoint, the objective's own, too
    assert {key.split(" ", 1)[1] for key in tensors if key.startswith("model ")} == {f"model.{name}" for name in mine}
    state = {key.split(" ", 1)[1] for key in tensors if key.startswith("state ")}
    assert {name.removeprefix("average/mean/") for name in state if name.startswith("average/mean/")} == mine
    assert len([name for name in state if name.endswith("/exp_avg")]) == len(mine)


@pytest.mark.train
def test_base_and_part_together_are_the_model(whole: Path, runs: Path) -> None:
    base, tensors = load_file(runs / "base" / "model.safetensors"), stored(whole)
    model = load(whole / "model" / "last")
    moved = 0
    for name, value in model.state_dict().items():
        assert torch.equal(value, tensors.get(f"last {name}", base.get(name))), name
        moved += name in base and value.shape == base[name].shape and not torch.equal(value, base[name])
    assert moved == 8  # weights and biases of two attentions' two layers
    assert model.config.dropout == 0.1 and model.config.classes == 10


@pytest.mark.train
def test_the_run_says_what_learned(whole: Path, runs: Path) -> None:
    facts = json.loads((whole / "run.json").read_text())
    values = 2 * (4 * 16**2 + 4 * 16) + 10 * 16 + 10
    count = sum(parameter.numel() for parameter in load(whole).parameters())
    assert facts["tuned"] == {"what": "attention", "parameters": values, "of": count}
    assert facts["decisions"]["tune"].startswith(f"attention: {values:,} of {count:,} parameters are trained")
    assert (facts["base"]["source"], facts["base"]["relative"]) == (str(runs / "base"), "../../materials/base")
    assert read_card(whole).provenance["tune"] == "attention"
    reference = json.loads((newest(whole) / "state.json").read_text())["base"]
    assert reference == {name: facts["base"][name] for name in ("source", "path", "sha256")}


@pytest.mark.train
@pytest.mark.parametrize("tune", ["ffn", "head"])
def test_other_parts_and_a_resnet(tmp_path: Path, tune: Any) -> None:
    config = BASE if tune == "ffn" else ResNetConfig(units=(1, 1), width=32, image_size=(8, 8), classes=7)
    base_in(tmp_path, config)
    vit = Model(dropout=0.1) if tune == "ffn" else Model()
    run = tiny(tmp_path, tune=tune, vit=vit, duration=Epochs(1), optim=Optim(name="lamb", lr=1e-2))
    folder = loop.fit(replace(run, precision="bf16", activation_checkpointing=True)).folder
    base = load_file(tmp_path / "base" / "model.safetensors")
    for name, value in load(folder / "model" / "last").state_dict().items():
        assert torch.equal(value, base[name]) == (not name.startswith("head") and ".mlp." not in name), name


@pytest.mark.train
def test_everything_is_stored_where_everything_learns(tmp_path: Path) -> None:
    base_in(tmp_path)
    folder = loop.fit(tiny(tmp_path, tune="all", duration=Epochs(1))).folder
    shutil.rmtree(tmp_path / "base")
    assert load_file(folder / "model/last/model.safetensors").keys() == load(folder).state_dict().keys()
    assert "base" not in json.loads((folder / "run.json").read_text())


def test_what_cannot_be_tuned_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    base_in(tmp_path, ResNetConfig(units=(1, 1), width=32, image_size=(8, 8), classes=7))
    with pytest.raises(UsageError, match="is a ResNet"):
        loop.fit(tiny(tmp_path, vit=Model()))
    with pytest.raises(UsageError, match="--from WEIGHTS"):
        loop.fit(tiny(tmp_path, weights=None, model="Ti/4", vit=Model(width=16, depth=1, heads=2)))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


# updates of low rank


LORA: dict[str, Any] = dict(tune="lora", lora_rank=2, lora_alpha=4.0, lora_on="both")


@pytest.mark.train
def test_a_run_of_lora_holds_factors_which_are_added_to_the_base(adapted: Path, runs: Path) -> None:
    base, tensors = load_file(runs / "base" / "model.safetensors"), stored(adapted)
    mine = {key.removeprefix("last "): value for key, value in tensors.items() if key.startswith("last ")}
    layers = {name.removesuffix(".weight") for name in base if re.search(r"(qkv|out|fc[12])\.weight", name)}
    factors = {f"{layer}.lora.{side}.weight" for layer in layers for side in ("down", "up")}
    assert len(layers) == 2 * 4 and mine.keys() == factors | {"head.weight", "head.bias"}
    # of a checkpoint, its optimiser and its average, too
    learned = {key.removeprefix("model model.") for key in tensors if key.startswith("model ")}
    averaged = {key.removeprefix("state average/mean/") for key in tensors if key.startswith("state average/mean/")}
    assert learned == averaged == mine.keys()
    found = load(adapted / "model" / "last").state_dict()
    assert found.keys() == base.keys()
    for name, value in found.items():
        layer = name.removesuffix(".weight")
        if layer in layers:
            update = mine[f"{layer}.lora.up.weight"].double() @ mine[f"{layer}.lora.down.weight"].double()
            torch.testing.assert_close(value.double(), base[name].double() + update, rtol=1e-7, atol=1e-9, msg=name)
            assert update.abs().max() > 1e-3, name
        else:
            assert torch.equal(value, mine.get(name, base[name])), name


@pytest.mark.full_size
def test_the_run_and_the_verbs_say_what_was_adapted(adapted: Path, runs: Path, tmp_path: Path) -> None:
    from vitrail.verbs.weights import convert, info

    facts = json.loads((adapted / "run.json").read_text())
    values = 2 * 2 * (16 + 48 + 16 + 16 + 2 * (16 + 32)) + 10 * 16 + 10
    assert facts["tuned"]["what"] == "lora" and facts["tuned"]["parameters"] == values
    assert facts["decisions"]["lora"] == "rank 2, factor 2, on 8 dense layers of attention and MLPs"
    assert read_card(adapted).provenance["tune"] == "lora"
    assert f"from {runs / 'base'}, 8 of them with an update of low rank" in str(info(adapted).report)
    assert (
        "fine-tuned (low-rank updates (LoRA) and classifier only) from"
        in write_report(copy_of(adapted, tmp_path)).read_text()
    )
    convert(adapted, tmp_path / "standalone")
    alone = load_file(tmp_path / "standalone" / "model.safetensors")
    assert alone.keys() == load(adapted).state_dict().keys()
    assert all(torch.equal(alone[name], value) for name, value in load(adapted).state_dict().items())


@pytest.mark.train
def test_a_run_of_lora_is_resumed_with_its_own_rank_only(adapted: Path, tmp_path: Path) -> None:
    folder = copy_of(adapted, tmp_path)
    run = replace(ROWS["lora"].run("lora", tmp_path), duration=Steps(5))
    with pytest.raises(CheckpointError, match="lora_rank: 2 there, 3 here"):
        loop.fit(replace(run, lora_rank=3), resume=folder)
    assert loop.fit(replace(run, lora_rank=None), resume=folder).steps == 5


@pytest.mark.train
@pytest.mark.parametrize("optimizer", ["sgd", "lamb"])
def test_a_run_of_lora_starts_from_another_in_bf16(adapted: Path, tmp_path: Path, optimizer: Any) -> None:
    settings: dict[str, Any] = {**LORA, "lora_rank": None, "lora_alpha": None, "lora_on": None}
    optim = Optim(name=optimizer, lr=1e-2)
    run = tiny(tmp_path, **settings, weights=str(adapted), precision="bf16", optim=optim, duration=Epochs(1))
    folder = loop.fit(replace(run, activation_checkpointing=True)).folder
    assert json.loads((folder / "run.json").read_text())["decisions"]["lora"].startswith("rank 8, factor 1, on 4 dense")
    before, after = load(adapted).state_dict(), load(folder / "model" / "last").state_dict()
    for name, value in after.items():
        learns = name.startswith("head") or re.search(r"\.(qkv|out)\.weight", name)
        assert torch.equal(value, before[name]) != bool(learns), name


@pytest.mark.train
def test_files_of_updates_that_do_not_fit_are_refused(adapted: Path, tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    original = adapted / "model" / "last" / "model.safetensors"
    with safe_open(original, framework="pt") as file:
        header = file.metadata()
    up, down = (f"blocks.0.attentions.0.attention.qkv.lora.{side}.weight" for side in ("up", "down"))
    tensors = load_file(original)
    changes: list[dict[str, torch.Tensor | None]] = [
        {up: None},
        {up: tensors[up][:, :1]},
        {up: tensors[up][:47]},
        {up: torch.zeros(48), down: torch.zeros(16)},
        {up: None, down: None, up.replace("qkv", "none"): tensors[up], down.replace("qkv", "none"): tensors[down]},
    ]
    for change in changes:
        changed = {name: value.contiguous() for name, value in {**tensors, **change}.items() if value is not None}
        save_file(changed, place, metadata=header)
        with pytest.raises(WeightsError, match=r"lora.*which the model of its card does not have"):
            load(place)
    save_file({**tensors, up: tensors[up] + 1}, place, metadata=header)
    with pytest.raises(WeightsError, match="do not match their checksum"):
        load(place)


def test_settings_of_lora_that_cannot_work_are_refused(tmp_path: Path) -> None:
    base_in(tmp_path)
    with pytest.raises(UsageError, match=r"lora_rank is 17, and the smallest adapted layer has 16.* from 1 to 16"):
        loop.fit(tiny(tmp_path, **{**LORA, "lora_rank": 17}))
    with pytest.raises(UsageError, match="lora_on is for tune lora, and tune is 'attention'"):
        loop.fit(tiny(tmp_path, lora_on="mlp"))
    with pytest.raises(UsageError, match=r"no weights are given. Name them with --from"):
        loop.fit(tiny(tmp_path, tune="lora", weights=None, model="Ti/4", vit=Model(width=16, depth=1, heads=2)))
    base_in(tmp_path, ResNetConfig(units=(1, 1), width=32, image_size=(8, 8), classes=7))
    with pytest.raises(UsageError, match=r"is a ResNet.*no attention and MLP layers"):
        loop.fit(tiny(tmp_path, tune="lora", vit=Model()))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


# resuming


@pytest.mark.train
def test_resuming_after_both_have_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "old"
    base_in(old)
    monkeypatch.chdir(tmp_path)
    run = tiny(Path("old"))
    folder = interrupted(run, 2)
    shutil.move("old", "new")
    recorded = from_yaml(Path("new") / folder.name / "config.yaml", Run())
    result = loop.fit(recorded, resume=Path("new") / folder.name)
    assert result.ended == "all steps done"
    facts = json.loads((result.folder / "run.json").read_text())
    assert facts["base"]["path"] == str(tmp_path / "new" / "base")
    assert load(result.folder).config.classes == 10


@pytest.mark.train
def test_the_best_model_follows_a_base_whose_new_place_is_given(tmp_path: Path) -> None:
    base_in(tmp_path)
    folder = interrupted(tiny(tmp_path), 2)
    before = load_file(folder / "model/best/model.safetensors")
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match="does not exist"):
        load(folder / "model/best")
    interrupted(tiny(tmp_path, weights=str(tmp_path / "elsewhere")), 3, resume=folder)  # before there is a better one
    assert load(folder / "model/best").load_report.base.endswith(f"from {tmp_path / 'elsewhere'}")
    after = load_file(folder / "model/best/model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.train
def test_resuming_with_a_base_that_is_gone_or_another(tmp_path: Path) -> None:
    base_in(tmp_path)
    folder = interrupted(tiny(tmp_path), 2)
    with pytest.raises(CheckpointError, match="tune: 'attention' there, 'ffn' here"):
        loop.fit(tiny(tmp_path, tune="ffn"), resume=folder)
    shutil.move(tmp_path / "base", tmp_path / "elsewhere")
    with pytest.raises(WeightsError, match=f"its base model {tmp_path / 'base'} cannot be loaded(.|\n)*does not exist"):
        loop.fit(tiny(tmp_path), resume=folder)
    base_in(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"Its base is .*base .*but .*base have another checksum.*--from"):
        loop.fit(tiny(tmp_path), resume=folder)
    shutil.rmtree(tmp_path / "base")
    result = loop.fit(tiny(tmp_path, weights=str(tmp_path / "elsewhere")), resume=folder)
    assert result.ended == "all steps done"
    assert load(folder / "model" / "last").load_report.base.endswith(f"from {tmp_path / 'elsewhere'}")


@pytest.mark.train
def test_what_a_whole_network_started_from_may_be_gone_when_it_goes_on(tmp_path: Path) -> None:
    base_in(tmp_path)
    run = tiny(tmp_path, tune="all")
    never = loop.fit(replace(run, out=str(tmp_path / "never"))).folder
    folder = interrupted(run, 2)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(WeightsError, match=r"there is nothing at .*other"):  # which it never had: a slip of the pen
        loop.fit(replace(run, weights=str(tmp_path / "other")), resume=folder)
    loop.fit(run, resume=folder)
    assert_same_bits(folder, never)
    assert from_yaml(folder / "config.yaml", Run()).weights == run.weights
    assert read_card(folder).provenance["from"] == Path(str(run.weights)).name  # a card names no folders


# the verbs


@pytest.mark.train
def test_the_verbs_take_a_tuned_run(whole: Path, runs: Path, tmp_path: Path) -> None:
    answers = vitrail.evaluate(whole, "digits", batch_size=64, workers=0, device="cpu", precision="float32")
    assert 0 <= answers.results.top1 <= 1
    from vitrail.verbs.weights import convert, info

    convert(whole, tmp_path / "standalone")
    assert f"from {runs / 'base'}" in str(info(whole).report)
    alone = load_file(tmp_path / "standalone" / "model.safetensors")
    assert alone.keys() == load(whole).state_dict().keys()
    assert not load(tmp_path / "standalone").load_report.base


@pytest.mark.train
def test_finetune_tunes_a_part_of_real_photographs(shared_data: Path, tmp_path: Path) -> None:
    """Pictures of flowers, through the verb: dry run, run, report, evaluation; the part that was not tuned stays."""
    config = replace(BASE, image_size=(32, 32), patch=8)
    base = base_in(tmp_path, config)
    settings: dict[str, Any] = dict(
        weights=base,
        tune="attention",
        data={"subset": 24, "holdout": 0.05, "test": "none"},
        batch_size=12,
        duration="4 steps",
        workers=0,
        device="cpu",
        out=str(tmp_path),
    )
    photos = shared_data / "flowers12"
    tried = vitrail.finetune(photos, dry_run=True, **settings)
    values = 2 * (4 * 16**2 + 4 * 16) + 12 * 16 + 12
    assert tried.checked["tune"].startswith(f"attention: {values:,} of")
    whole = vitrail.finetune(photos, dry_run=True, **{**settings, "tune": "all"})
    assert tried.cost.state_bytes == 4 * whole.cost.params + 12 * values < whole.cost.state_bytes
    result = vitrail.finetune(photos, **settings)
    report = write_report(result.folder).read_text()
    assert f"{values:,} tuned (attention)" in report
    assert "fine-tuned (attention layers and classifier only) from" in report
    kept, found = load(base).state_dict(), load(result.folder / "model" / "last").state_dict()
    assert found["head.weight"].any()
    for name, value in found.items():
        if not name.startswith("head"):
            assert torch.equal(value, kept[name]) == (".attention." not in name), name
