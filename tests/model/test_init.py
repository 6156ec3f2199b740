"""How networks start: as the table says, and by other authors' schemes as those of timm and transformers."""

from __future__ import annotations

import math
import re

import pytest
import timm
import torch
from torch import nn
from transformers import BeitConfig, BeitForMaskedImageModeling

from vitrail.model.build import build
from vitrail.model.init import STD, TUNED_STD, init_weights
from vitrail.model.limits import Init
from vitrail.model.variants import ViTConfig


def _statistics(name: str, kind: str, tensor: torch.Tensor, config: ViTConfig) -> bool:
    """Does a tensor look as its row of the table in init_weights says?"""
    if kind == "zeros":
        return tensor.eq(0).all().item()
    if kind == "ones":
        return tensor.eq(1).all().item()
    if kind == "config.layer_scale":
        return tensor.eq(config.layer_scale).all().item()
    if match := re.fullmatch(r"normal (\S+)", kind):
        std = float(match[1])
        return abs(tensor.std().item() / std - 1) < 0.15 and tensor.abs().max().item() > 2.2 * std
    if kind == "lecun_normal":
        std = math.sqrt(1 / tensor[0].numel())
        return abs(tensor.std().item() / std - 1) < 0.05 and tensor.abs().max().item() <= 2 * std / 0.8796 + 1e-6
    assert kind.startswith("xavier_uniform")
    parts = tensor.chunk(3) if name.endswith("qkv.weight") else [tensor.flatten(0, -2)]
    if name.endswith("fc1.weight") and config.origin.mlp == "swiglu":
        parts = tensor.chunk(2)
    for part in parts:
        bound = math.sqrt(6 / (part.shape[0] + part.shape[1]))
        if not 0.97 * bound < part.abs().max().item() <= bound + 1e-6:
            return False
        if abs(part.std().item() / (bound / math.sqrt(3)) - 1) > 0.05:
            return False
    return True


def test_every_tensor_is_initialised_as_the_table_says() -> None:
    table, _ = (init_weights.__doc__ or "").split("The other schemes")
    rows = dict(re.findall(r"^    \| (\S+) \| (.+?) \|$", table, flags=re.MULTILINE))
    rows.pop("---", None), rows.pop("tensor", None)
    assert len(rows) == 25
    used: set[str] = set()
    for options in (
        dict(layer_scale=1e-4, registers=8, pre_logits=96),
        dict(pool="map", positions="2d", pre_logits=96),
        dict(distilled=True, mlp="swiglu"),
        dict(pool="gap", class_token=True, positions="relative_bias"),
    ):
        torch.manual_seed(0)
        shape = dict(width=192, depth=2, heads=3, mlp_dim=768, patch=8, image_size=64)
        config = ViTConfig.of(**shape, classes=50, **options)
        for name, tensor in build(config).named_parameters():
            patterns = {row: re.escape(row).replace(r"\*", ".*") for row in rows}
            matching = [row for row, pattern in patterns.items() if re.search(rf"(^|\.){pattern}$", name)]
            if name.startswith("pool.") and not matching:
                continue  # the attention inside MAP is initialised as the encoder's
            assert matching, f"{name} has no row in the table"
            if not tensor.numel():
                continue
            row = max(matching, key=len)
            used.add(row)
            if tensor.numel() < 500 and "normal" in rows[row] and "lecun" not in rows[row]:
                assert tensor.abs().max() < 5 * float(rows[row].split()[1])
                continue
            assert _statistics(name, rows[row].split(",")[0], tensor.detach(), config), (name, rows[row])
    assert used == set(rows), f"rows that describe nothing: {set(rows) - used}"


SHAPE = dict(width=192, depth=3, heads=3, mlp_dim=768)


def spread(module: nn.Module, name: str) -> tuple[float, float]:
    """Standard deviation of a tensor, and its largest value in these deviations."""
    tensor = module.get_parameter(name).detach()
    std = tensor.pow(2).mean().sqrt().item()
    return std, tensor.abs().max().item() / std


def ours(init: Init) -> nn.Module:
    torch.manual_seed(0)
    return build(ViTConfig.of(**SHAPE, patch=16, image_size=(64, 64), classes=1000, init=init))


@pytest.mark.parametrize(
    ("init", "pairs"),
    [
        ("deit", {"stem.weight": "patch_embed.proj.weight", "stem.bias": "patch_embed.proj.bias"}),
        ("beit", {"stem.weight": "beit.embeddings.patch_embeddings.projection.weight"}),
    ],
)
def test_patch_embeddings_start_as_in_other_libraries(init: Init, pairs: dict[str, str]) -> None:
    sizes = dict(hidden_size=192, num_hidden_layers=3, num_attention_heads=3, intermediate_size=768, image_size=64)
    torch.manual_seed(0)
    theirs: nn.Module
    if init == "deit":
        theirs = timm.create_model("deit3_small_patch16_224", embed_dim=192, depth=3, num_heads=3, img_size=64)
    else:
        theirs = BeitForMaskedImageModeling(BeitConfig(**sizes))
    for one, other in pairs.items():
        assert spread(ours(init), one) == pytest.approx(spread(theirs, other), rel=0.1)


def test_kernels_of_deit_are_those_of_timms() -> None:
    torch.manual_seed(0)
    theirs = timm.create_model("deit3_small_patch16_224", embed_dim=192, depth=3, num_heads=3, img_size=64)
    names = {"attentions.0.attention.qkv": "attn.qkv", "attentions.0.attention.out": "attn.proj"}
    names |= {"mlps.0.mlp.fc1": "mlp.fc1", "mlps.0.mlp.fc2": "mlp.fc2"}
    network = ours("deit")
    for one, other in names.items():
        found = spread(network, f"blocks.1.{one}.weight"), spread(theirs, f"blocks.1.{other}.weight")
        assert found[0] == pytest.approx(found[1], rel=0.15) and found[0][0] == pytest.approx(STD, rel=0.02)
        assert not network.get_parameter(f"blocks.1.{one}.bias").any()
    assert spread(network, "positions.embedding")[0] == pytest.approx(spread(theirs, "pos_embed")[0], rel=0.1)


def test_the_classifier_starts_as_its_authors_start_it() -> None:
    """`trunc_normal_(std=.02)` in DeiT; the same times `init_scale` 0.001 in BEiT's, and 2e-5 in MAE's fine-tuning."""
    for init, std in (("paper", 0.0), ("deit", STD), ("beit", TUNED_STD), ("mae", TUNED_STD)):
        head = ours(init).head  # type: ignore[arg-type]
        assert head.weight.std().item() == pytest.approx(std, rel=0.02) and not head.bias.any()  # type: ignore
    assert pytest.approx(0.001 * STD) == TUNED_STD


def test_output_projections_of_beit_shrink_with_depth() -> None:
    network = ours("beit")
    for layer in range(3):
        for name in ("attentions.0.attention.out", "mlps.0.mlp.fc2"):
            std = network.get_parameter(f"blocks.{layer}.{name}.weight").std().item()
            assert std == pytest.approx(STD / math.sqrt(2 * (layer + 1)), rel=0.02)


def test_kernels_of_mae_are_drawn_as_whole_layers() -> None:
    """Its code's `xavier_uniform_`: 192 to 3 x 192 features for query, key and value; 3 x 16 x 16 pixels to 192."""
    for name, features in (("blocks.0.attentions.0.attention.qkv.weight", 4 * 192), ("stem.weight", 768 + 192)):
        bound = math.sqrt(6 / features)
        assert 0.99 * bound < ours("mae").get_parameter(name).abs().max().item() <= bound
