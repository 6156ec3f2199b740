"""A stem, an attention, positions and a classifier of the user's own: trained, resumed, loaded, fine-tuned, refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from own import EXAMPLES, command, config, importable, train, weights, write
from torch import nn

import vitrail
from vitrail import cli
from vitrail.errors import UsageError, WeightsError
from vitrail.inspection.rollout import rollout
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig
from vitrail.reports.page import write_report

TINY = dict(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(16, 16), classes=5)
FOUR = (
    *("--vit.head", "cosine_head:Cosine", "--vit.head.scale", "8"),
    *("--vit.stem", "overlapping_stem:Overlapping", "--vit.stem.overlap", "1"),
    *("--vit.positions", "alibi:Alibi", "--vit.attention", "qk_norm:QKNorm"),
)


@pytest.mark.train
def test_a_network_of_own_parts_is_trained_resumed_and_loaded(tmp_path: Path, examples: None) -> None:
    whole = train(tmp_path / "whole", *FOUR)
    written = config(whole)["vit"]
    assert written["head"] == {"class": "cosine_head:Cosine", "scale": 8.0}
    assert written["stem"] == {"class": "overlapping_stem:Overlapping", "overlap": 1}
    assert written["positions"] == {"class": "alibi:Alibi", "slope": 0.5}
    tensors = weights(whole)
    assert tensors["stem.weight"].shape[-2:] == (6, 6)  # patches of 4, and one pixel on each side
    assert "blocks.0.attentions.0.attention.norm_query.weight" in tensors and "head.bias" not in tensors
    assert "Attention" in write_report(whole).read_text()

    model = vitrail.load(whole)
    images = torch.randint(256, (3, 3, 16, 16), dtype=torch.uint8)
    again = build(model.config)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(images), model(images))
    # half precision and the fast form for prediction compute the same
    from vitrail.model.build import freeze

    torch.testing.assert_close(freeze(model)(images), model(images), rtol=1e-3, atol=1e-4)
    assert rollout(model, images).shape == (3, 4, 4)

    cut = train(tmp_path / "cut", *FOUR)
    for step in (cut / "checkpoints").glob("step-*6"):
        for file in step.rglob("*"):
            file.unlink() if file.is_file() else None
        step.rmdir()
    assert cli.main(["train", "--resume", str(cut), "--quiet"]) == 0
    for name, tensor in tensors.items():
        assert torch.equal(tensor, weights(cut)[name]), name


@pytest.mark.processes
def test_somebody_elses_model_imports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with importable(EXAMPLES):
        run = train(tmp_path, *FOUR)
    with pytest.raises(WeightsError, match="--import cosine_head"):  # the module is not imported any more
        vitrail.load(run)
    modules = ("cosine_head", "overlapping_stem", "alibi", "qk_norm")
    named = [word for name in modules for word in ("--import", name)]
    evaluate = ["evaluate", str(run), "digits"]
    with importable(EXAMPLES):  # they could be imported, but nobody has named them
        refused = command(tmp_path, *evaluate, path=EXAMPLES)
        assert refused.returncode != 0
        assert "--import" in refused.stderr and "Traceback" not in refused.stderr
        capsys.readouterr()
        assert cli.main(evaluate) != 0 and "--import" in capsys.readouterr().err
        assert not {*modules} & {*sys.modules}
        assert cli.main([*evaluate, "--json", *named]) == 0
        top1 = json.loads(capsys.readouterr().out)["top1"]
        assert cli.main([*evaluate, *named]) == 0
        assert f"top-1 {top1:.2%}" in capsys.readouterr().out
    assert cli.main([*evaluate, *named]) == 2 and "no module is named 'cosine_head'" in capsys.readouterr().err


def test_foreign_formats_refuse_own_parts(tmp_path: Path, examples: None) -> None:
    from cosine_head import Cosine

    model = build(ViTConfig.of(**TINY, head=Cosine()))
    for format in ("timm", "google", "big_vision", "hf", "torchvision", "deit"):
        with pytest.raises(WeightsError, match="cannot hold the head"):
            vitrail.save(model, tmp_path / ("x.npz" if format in ("google", "big_vision") else "x"), format)
    vitrail.save(model, tmp_path / "ours")
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(vitrail.load(tmp_path / "ours")(images), model.eval()(images))


def test_a_cosine_head_is_bounded_and_follows_the_angle(examples: None) -> None:
    from cosine_head import Cosine

    head = build(ViTConfig.of(**TINY, head=Cosine(scale=3.0))).head
    features = torch.randn(4, 16)
    expected = torch.stack([F.cosine_similarity(features, row[None]) for row in head.weight], dim=1) * 3
    torch.testing.assert_close(head(features), expected)


def test_a_stem_without_overlap_is_the_linear_stem(examples: None) -> None:
    from overlapping_stem import Overlapping

    linear, own = build(ViTConfig.of(**TINY)), build(ViTConfig.of(**TINY, stem=Overlapping(overlap=0)))
    own.load_state_dict(linear.state_dict())
    images = torch.randint(256, (2, 3, 16, 24), dtype=torch.uint8)
    torch.testing.assert_close(own.features(images), linear.features(images), rtol=1e-4, atol=1e-5)


def test_alibi_is_the_published_bias(examples: None) -> None:
    from alibi import Alibi

    model = build(ViTConfig.of(**TINY, positions=Alibi(slope=0.25), registers=1)).eval()
    attention = model.blocks[0].attentions[0]
    images = torch.randint(256, (2, 3, 16, 16), dtype=torch.uint8)
    tokens = attention.norm(model.embed(images))
    qkv = nn.functional.linear(tokens, attention.attention.qkv.weight, attention.attention.qkv.bias)
    query, key, value = qkv.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    bias = torch.zeros(2, 18, 18)
    for head in range(2):
        for i in range(16):
            for j in range(16):
                apart = ((i // 4 - j // 4) ** 2 + (i % 4 - j % 4) ** 2) ** 0.5
                bias[head, 2 + i, 2 + j] = -apart * 0.25 * 0.5**head
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)
    places = torch.arange(16)
    found = attention.attention(tokens, model.blocks[0].bias(places, (4, 4)))
    torch.testing.assert_close(found, attention.attention.out(expected), rtol=1e-4, atol=1e-5)
    # masked pre-training gives each image places of its own
    keep = torch.stack([torch.arange(0, 8), torch.arange(8, 16)])
    assert model.encode(model.embed(images), (4, 4), keep).shape == (2, 10, 16)


def test_qk_norm_is_torchs_attention_of_normed_queries(examples: None) -> None:
    from qk_norm import QKNorm

    attention = build(ViTConfig.of(**TINY, attention=QKNorm())).blocks[0].attentions[0].attention
    x = torch.randn(2, 5, 16)
    query, key, value = (
        nn.functional.linear(x, attention.qkv.weight, attention.qkv.bias)
        .unflatten(-1, (3, 2, 8))
        .permute(2, 0, 3, 1, 4)
    )
    query, key = F.layer_norm(query, (8,), eps=1e-6), F.layer_norm(key, (8,), eps=1e-6)
    expected = attention.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.train
def test_pretrained_weights_get_a_classifier_of_the_users_own(
    tmp_path: Path, examples: None, capsys: pytest.CaptureFixture[str]
) -> None:
    start = train(tmp_path / "start")
    words = ("finetune", "digits", "--from", str(start), "--vit.head", "cosine_head:Cosine", "--out", str(tmp_path))
    small = ("--duration", "2 steps", "--device", "cpu", "--workers", "0", "--quiet", "--precision", "float32")
    assert cli.main([*words, *small, "--schedule.warmup", "0 steps", "--lr", "1e-9", "--batch-size", "32"]) == 0
    run = next(tmp_path.glob("finetune-*"))
    tuned, before = weights(run), weights(start, "best")
    assert "head.bias" not in tuned and tuned["head.weight"].norm() > 0.1  # it initialises itself
    torch.testing.assert_close(tuned["blocks.0.mlps.0.mlp.fc1.weight"], before["blocks.0.mlps.0.mlp.fc1.weight"])
    assert not config(run)["probe_head"]  # which fits a linear one
    # from there, other classes: a new classifier of the same kind
    model = vitrail.load(run, classes=3)
    assert model.head.weight.shape[0] == 3 and type(model.head).__name__ == "CosineHead"
    assert model.head.weight.norm() > 0.1
    words = ("finetune", "digits", "--from", str(run), "--probe-head", "--out", str(tmp_path / "again"), *small)
    assert cli.main([*words]) == 2  # a kind of nn.Linear, but a probe is not what it computes
    assert "--no-probe-head" in capsys.readouterr().err


WRONG = {
    "not_a_module": ("def build(self, config): return 3", "must return a Module"),
    "no_build": ("def other(self): pass", "has no method build"),
    "wrong_shape": ("def build(self, config): return torch.nn.Conv2d(3, config.width, 2, 2)", "must return [width"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_stem_is_refused_with_the_reason(name: str, mine: Path) -> None:
    text, reason = WRONG[name]
    head = "import torch\nfrom dataclasses import dataclass\nfrom vitrail.model.own_part import OwnPart\n"
    write(mine, name, f"{head}@dataclass(frozen=True)\nclass Mine(OwnPart):\n    {text}")
    stem = __import__(name).Mine()
    with pytest.raises(UsageError) as error:
        build(ViTConfig.of(**TINY, stem=stem))(torch.zeros(1, 3, 16, 16))
    assert reason in str(error.value)


def test_positions_must_be_positions(examples: None) -> None:
    from cosine_head import Cosine

    with pytest.raises(UsageError, match="must return a Positions"):
        build(ViTConfig.of(**TINY, positions=Cosine()))


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (
            ("--vit.stem", "overlapping_stem:Overlapping", "--vit.stem.overlap", "-1"),
            ("vit.stem.overlap", "from 0 to 64"),
        ),
        (("--vit.stem", "hlmp"), ("vit.stem", "'hlmp'", "Did you mean 'hmlp'", "import path")),
        (("--vit.head", "linear"), ("vit.head", "import path")),
        (("--vit.head", "cosine:Cosine"), ("vit.head.class", "'cosine'", "PYTHONPATH")),
    ],
)
def test_wrong_parts(
    words: tuple[str, ...], parts: tuple[str, ...], examples: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "digits", "--recipe", "digits", *words, "--print-config"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    for part in parts:
        assert part in error, error


def test_help_of_a_part(examples: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--vit.stem", "overlapping_stem:Overlapping", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    text = "Pixels by which a patch reaches into each of its neighbours."
    assert f"--vit.stem.overlap NUMBER {text} (from 0 to 64) (default: 2)" in shown


def test_a_named_network_keeps_the_parts_that_flags_give(examples: None, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--vit.attention", "qk_norm:QKNorm", "--vit.positions", "alibi:Alibi", "--vit.positions.slope", "0.25")
    assert cli.main(["train", "digits", "--model", "Ti/16", *given, "--print-config"]) == 0
    vit = yaml.safe_load(capsys.readouterr().out)["vit"]
    assert vit["attention"]["class"] == "qk_norm:QKNorm"
    assert vit["positions"] == {"class": "alibi:Alibi", "slope": 0.25}


OWN = """
    from dataclasses import dataclass
    import torch
    from torch import nn
    from vitrail import ObjectiveSettings, OwnPart, Positions, SelfSupervised

    class Waves(Positions):
        def __init__(self, config):
            super().__init__(config)
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.line = nn.Parameter(torch.ones(config.width))
            self.raster = nn.Parameter(torch.zeros(1, config.grid[0] * config.grid[1], config.width))
        def table(self, layer, grid):
            rows = torch.arange(grid[0] * grid[1], dtype=torch.float32)[None, :, None]
            return rows * self.scale.float() * self.line.float()

    @dataclass(frozen=True)
    class Wavy(OwnPart):
        def build(self, config):
            return Waves(config)

    class WhereAmI(nn.Module):
        seen = []
        def forward(self, tokens, bias=None, num_queries=None):
            self.seen.append((bias.grid, len(bias.places)))
            return tokens[:, :num_queries]

    @dataclass(frozen=True)
    class Places(OwnPart):
        def build(self, config):
            return WhereAmI()

    @dataclass(frozen=True)
    class OneArgument(OwnPart):
        def build(self, config):
            return nn.Identity()

    @dataclass(frozen=True)
    class NoConfig(OwnPart):
        def build(self):
            return nn.Identity()

    class Half(SelfSupervised):
        def loss(self, prepared):
            return prepared.images.sum(), 1, {}

    @dataclass(frozen=True)
    class Unfinished(ObjectiveSettings):
        labels = False
        def build(self, model, task):
            return Half(model)
"""


def test_own_positions_of_any_shape_at_another_size_and_type(tmp_path: Path) -> None:
    from vitrail.model.build import freeze

    with importable(write(tmp_path, "own_positions", OWN)):
        from own_positions import Wavy

        model = build(ViTConfig.of(**TINY, positions=Wavy()))
        rows = torch.arange(4.0)[:, None]
        model.positions.raster.data[:] = rows.expand(4, 4).reshape(1, 16, 1)
        vitrail.save(model, tmp_path / "saved")
        other = vitrail.load(tmp_path / "saved", image_size=(16, 24))
        assert other.positions.scale == 2 and torch.equal(other.positions.line, torch.ones(16))
        assert torch.equal(other.positions.raster, rows.expand(4, 6).reshape(1, 24, 1).expand(1, 24, 16))
        images = torch.randint(256, (2, 3, 16, 24), dtype=torch.uint8)
        half = freeze(other, torch.bfloat16)(images)  # the table is float32 even then
        torch.testing.assert_close(half.float(), other(images), rtol=0.1, atol=0.1)


def test_own_attention_knows_where_its_tokens_are(tmp_path: Path) -> None:
    with importable(write(tmp_path, "own_attention", OWN)):
        from own_attention import Places, WhereAmI

        model = build(ViTConfig.of(**TINY, attention=Places()))
        model(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
        model(torch.zeros(1, 3, 8, 16, dtype=torch.uint8))
        assert WhereAmI.seen == [((4, 4), 16)] * 2 + [((2, 4), 8)] * 2
        with pytest.raises(UsageError, match="relevance needs an attention that derives from"):
            vitrail.relevance(model, torch.zeros(1, 3, 16, 16, dtype=torch.uint8))


def test_parts_that_do_not_keep_their_contract_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner", "below", OWN)
    with importable(write(tmp_path, "contracts", OWN)):
        from contracts import NoConfig, OneArgument, Places

        with pytest.raises(
            UsageError, match=r"Identity, whose forward takes .*called with \(tokens, bias, num_queries\)"
        ):
            build(ViTConfig.of(**TINY, attention=OneArgument()))
        with pytest.raises(UsageError, match=r"NoConfig.build takes \(\).*called with \(config\)"):
            build(ViTConfig.of(**TINY, head=NoConfig()))
        with pytest.raises(UsageError, match="must return a Positions"):
            build(ViTConfig.of(**TINY, positions=Places()))
        train = ["train", "digits", "--out", str(tmp_path / "runs"), "--objective"]
        assert cli.main([*train, "contracts:Unfinished"]) == 2
        assert "abstract method" in capsys.readouterr().err
        assert cli.main([*train, "contracts.py:Unfinished"]) == 2
        assert "contracts.py is the module contracts" in capsys.readouterr().err
        assert cli.main([*train, "below:Unfinished"]) == 2
        assert "inner/below.py is the module inner.below" in capsys.readouterr().err
