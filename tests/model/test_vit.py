"""The ViT against three independent implementations, and its own contracts."""

from __future__ import annotations

import itertools

import pytest
import timm
import torch
import torchvision
import transformers
from hypothesis import given
from hypothesis import strategies as st
from timm.layers import resample_abs_pos_embed

from vitrail.errors import UsageError
from vitrail.model.build import build, create
from vitrail.model.compute import attention_path
from vitrail.model.variants import NAMES, ViTConfig
from vitrail.model.vit import ViT

TINY = dict(width=32, depth=2, heads=2, mlp_dim=64, patch=8, image_size=32, classes=5)

BLOCK_TO_TIMM = {
    "attentions.0.norm": "norm1",
    "attentions.0.attention.qkv": "attn.qkv",
    "attentions.0.attention.out": "attn.proj",
    "mlps.0.norm": "norm2",
    "mlps.0.mlp.fc1": "mlp.fc1",
    "mlps.0.mlp.fc2": "mlp.fc2",
}


def randomise(model: torch.nn.Module) -> None:
    """Give every parameter a value that matters: biases, norms and the zero head included."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def to_timm(model: ViT) -> dict[str, torch.Tensor]:
    """Our weights under timm's names."""
    ours = model.state_dict()
    theirs = {"patch_embed.proj.weight": ours["stem.weight"], "patch_embed.proj.bias": ours["stem.bias"]}
    if "cls" in ours:
        theirs["cls_token"] = ours["cls"]
    if "registers" in ours:
        theirs["reg_token"] = ours["registers"]
    if "positions.embedding" in ours:
        theirs["pos_embed"] = ours["positions.embedding"]
    for layer in range(model.config.depth):
        for (our, their), end in itertools.product(BLOCK_TO_TIMM.items(), ("weight", "bias")):
            theirs[f"blocks.{layer}.{their}.{end}"] = ours[f"blocks.{layer}.{our}.{end}"]
        if model.config.layer_scale:
            theirs[f"blocks.{layer}.ls1.gamma"] = ours[f"blocks.{layer}.attentions.0.residual.gamma"]
            theirs[f"blocks.{layer}.ls2.gamma"] = ours[f"blocks.{layer}.mlps.0.residual.gamma"]
    for end in ("weight", "bias"):
        theirs[f"norm.{end}"] = ours[f"norm.{end}"]
        theirs[f"head.{end}"] = ours[f"head.{end}"]
    return theirs


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        (dict(image_size=(32, 48)), dict(img_size=(32, 48))),
        (dict(layer_scale=0.1), dict(init_values=0.1)),
        (dict(pool="gap"), dict(global_pool="avg", class_token=False, fc_norm=False)),
        (dict(registers=3, cls_position=False), dict(reg_tokens=3, no_embed_class=True)),
        (dict(channels=1), dict(in_chans=1)),
        (dict(gelu="tanh"), dict(act_layer="gelu_tanh")),
    ],
)
def test_equals_timm_forward_and_backward(path: str, ours: dict, theirs: dict) -> None:
    model = build(ViTConfig.of(**(TINY | ours)))
    randomise(model)
    settings_ = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=5)
    peer = timm.models.VisionTransformer(**(settings_ | theirs))
    peer.load_state_dict(to_timm(model))
    height, width = model.config.image_size
    images = torch.randn(3, model.config.channels, height, width, requires_grad=True)
    with attention_path(path):
        out = model(images)
        out.square().sum().backward()
    grad, images.grad = images.grad, None
    expected = peer(images)
    expected.square().sum().backward()
    assert error(out, expected) < 1e-5
    assert error(grad, images.grad) < 1e-5
    ours_grads = to_timm_grads(model)
    for name, parameter in peer.named_parameters():
        assert error(ours_grads[name], parameter.grad) < 1e-4, name


def to_timm_grads(model: ViT) -> dict[str, torch.Tensor]:
    """Our gradients under timm's names."""
    grads = build(model.config)
    grads.load_state_dict({name: p.grad for name, p in model.named_parameters()}, strict=False)
    return to_timm(grads)


def test_equals_transformers() -> None:
    model = build(ViTConfig.of(**TINY, norm_eps=1e-12, pre_logits=None))
    randomise(model)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32,
        patch_size=8, num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    peer = transformers.ViTForImageClassification(config).eval()
    ours, theirs = model.state_dict(), {}
    theirs["vit.embeddings.cls_token"] = ours["cls"]
    theirs["vit.embeddings.position_embeddings"] = ours["positions.embedding"]
    projections = {"projection.weight": "stem.weight", "projection.bias": "stem.bias"}
    for their, our in projections.items():
        theirs[f"vit.embeddings.patch_embeddings.{their}"] = ours[our]
    for layer, end in itertools.product(range(2), ("weight", "bias")):
        block, prefix = f"blocks.{layer}", f"vit.layers.{layer}"
        qkv = ours[f"{block}.attentions.0.attention.qkv.{end}"].chunk(3)
        for part, value in zip("qkv", qkv, strict=True):
            theirs[f"{prefix}.attention.{part}_proj.{end}"] = value
        theirs[f"{prefix}.attention.o_proj.{end}"] = ours[f"{block}.attentions.0.attention.out.{end}"]
        theirs[f"{prefix}.layernorm_before.{end}"] = ours[f"{block}.attentions.0.norm.{end}"]
        theirs[f"{prefix}.layernorm_after.{end}"] = ours[f"{block}.mlps.0.norm.{end}"]
        theirs[f"{prefix}.mlp.fc1.{end}"] = ours[f"{block}.mlps.0.mlp.fc1.{end}"]
        theirs[f"{prefix}.mlp.fc2.{end}"] = ours[f"{block}.mlps.0.mlp.fc2.{end}"]
    for end in ("weight", "bias"):
        theirs[f"vit.layernorm.{end}"] = ours[f"norm.{end}"]
        theirs[f"classifier.{end}"] = ours[f"head.{end}"]
    peer.load_state_dict(theirs)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert error(model(images), peer(images).logits) < 1e-5


def test_equals_torchvision() -> None:
    model = build(ViTConfig.of(**TINY, pre_logits=24))
    randomise(model)
    peer = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=5,
        representation_size=24,
    ).eval()  # fmt: skip
    ours, theirs = model.state_dict(), {}
    theirs["class_token"] = ours["cls"]
    theirs["encoder.pos_embedding"] = ours["positions.embedding"]
    for end in ("weight", "bias"):
        theirs[f"conv_proj.{end}"] = ours[f"stem.{end}"]
        theirs[f"encoder.ln.{end}"] = ours[f"norm.{end}"]
        theirs[f"heads.pre_logits.{end}"] = ours[f"pre_logits.hidden.{end}"]
        theirs[f"heads.head.{end}"] = ours[f"head.{end}"]
        for layer in range(2):
            block, prefix = f"blocks.{layer}", f"encoder.layers.encoder_layer_{layer}"
            theirs[f"{prefix}.ln_1.{end}"] = ours[f"{block}.attentions.0.norm.{end}"]
            theirs[f"{prefix}.self_attention.in_proj_{end}"] = ours[f"{block}.attentions.0.attention.qkv.{end}"]
            theirs[f"{prefix}.self_attention.out_proj.{end}"] = ours[f"{block}.attentions.0.attention.out.{end}"]
            theirs[f"{prefix}.ln_2.{end}"] = ours[f"{block}.mlps.0.norm.{end}"]
            theirs[f"{prefix}.mlp.0.{end}"] = ours[f"{block}.mlps.0.mlp.fc1.{end}"]
            theirs[f"{prefix}.mlp.3.{end}"] = ours[f"{block}.mlps.0.mlp.fc2.{end}"]
    peer.load_state_dict(theirs)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert error(model(images), peer(images)) < 1e-5


def test_uint8_images_are_normalised_exactly_as_floats() -> None:
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    for stem in ("linear", "hmlp", "early"):
        model = build(ViTConfig.of(**TINY, stem=stem, mean=mean, std=std)).eval()
        randomise(model)
        shape = (1, 3, 1, 1)
        floats = (images / 255 - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)
        with torch.no_grad():
            assert error(model(images), model(floats)) < 1e-5


def test_a_resolution_the_positions_were_not_made_for_equals_timm() -> None:
    model = build(ViTConfig.of(**TINY, resize_mode="timm"))
    randomise(model)
    peer = timm.models.VisionTransformer(
        img_size=(48, 64), patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2, num_classes=5
    )
    weights = to_timm(model)
    weights["pos_embed"] = resample_abs_pos_embed(weights["pos_embed"], [6, 8], [4, 4])
    peer.load_state_dict(weights)
    images = torch.randn(2, 3, 48, 64)
    with torch.no_grad():
        assert error(model(images), peer(images)) < 1e-5


POOLS, PLACES = ("cls", "gap", "map", "cls+gap"), ("input", "every", "shared")
POSITIONS = ("none", "1d", "2d", "relative", "sincos", "relative_bias")


@pytest.mark.parametrize(
    ("positions", "place", "pool"),
    [(*pair, pool) for pair, pool in zip(itertools.product(POSITIONS, PLACES), itertools.cycle(POOLS))],
)
def test_every_position_place_and_head_trains(positions: str, place: str, pool: str) -> None:
    torch.manual_seed(0)
    model = build(ViTConfig.of(**TINY, positions=positions, place=place, pool=pool))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
    losses = []
    for _ in range(7):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():  # and runs at a size of its own
        assert model(torch.randn(1, 3, 48, 16)).shape == (1, 5)


@given(
    rows=st.integers(1, 5), columns=st.integers(1, 5), patch=st.sampled_from([2, 3, 7]),
    block=st.sampled_from([dict(), dict(block="parallel", branches=3), dict(block="axial", pool="gap")]),
    channels=st.integers(1, 4),
)  # fmt: skip
def test_any_size_divisible_by_the_patch(rows: int, columns: int, patch: int, block: dict, channels: int) -> None:
    shape = dict(patch=patch, image_size=(rows * patch, columns * patch), channels=channels)
    config = ViTConfig.of(**(TINY | shape | block))
    model = build(config)
    assert model(torch.randn(2, channels, rows * patch, columns * patch)).shape == (2, 5)
    assert model(torch.randn(2, channels, (rows + 1) * patch, columns * patch)).shape == (2, 5)
    with pytest.raises(UsageError, match="divisible"):
        model(torch.randn(2, channels, rows * patch + 1, columns * patch))


def test_parallel_costs_what_the_same_depth_in_a_row_costs() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts, flops = [], []
    for depth, branches in ((6, 1), (3, 2), (2, 3)):
        block = "parallel" if branches > 1 else "sequential"
        model = build(ViTConfig.of(**(TINY | dict(depth=depth, block=block, branches=branches, pool="gap"))))
        counts.append(sum(p.numel() for p in model.parameters()))
        with FlopCounterMode(display=False) as counter, attention_path("explicit"), torch.no_grad():
            model.to("meta")(torch.empty(1, 3, 32, 32, device="meta"))
        flops.append(counter.get_total_flops())
    assert len(set(counts)) == 1
    assert len(set(flops)) == 1 and flops[0] > 0


def test_parallel_branches_add_to_the_same_input() -> None:
    model = build(ViTConfig.of(**(TINY | dict(depth=1, block="parallel", branches=2))))
    randomise(model)
    x = torch.randn(2, 17, 32)
    block, places = model.blocks[0], torch.arange(16)
    middle = x + block.attentions[0](x) + block.attentions[1](x)
    expected = middle + block.mlps[0](middle) + block.mlps[1](middle)
    assert torch.allclose(block(x, places, (4, 4)), expected, atol=1e-6)


def test_axial_attention_stays_in_its_row_and_column() -> None:
    model = build(ViTConfig.of(**(TINY | dict(block="axial", pool="gap", depth=1)))).eval()
    randomise(model)
    x = torch.randn(1, 16, 32)
    changed = x.clone()
    changed[0, 5] += torch.randn(32)  # row 1, column 1
    places = torch.arange(16)
    row = model.blocks[0].row(x.view(4, 4, 32), places[:4], (4, 4)).view(16, 32)
    row_changed = model.blocks[0].row(changed.view(4, 4, 32), places[:4], (4, 4)).view(16, 32)
    moved = (row != row_changed).any(1).nonzero().flatten().tolist()
    assert moved == [4, 5, 6, 7]
    both = (model.blocks[0](x, places, (4, 4)) != model.blocks[0](changed, places, (4, 4))).any(-1)
    assert both.all()  # row, then column: everything has seen everything


def test_dropout_sits_where_appendix_b1_puts_it() -> None:
    model = build(ViTConfig.of(**(TINY | dict(dropout=0.5))))
    randomise(model)
    images = torch.randn(2, 3, 32, 32)
    model.eval()
    assert torch.equal(model(images), model(images))
    dropped = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    expected = {"dropout"}  # after adding positions
    for layer in range(2):
        expected |= {f"blocks.{layer}.attentions.0.dropout", f"blocks.{layer}.mlps.0.mlp.dropout"}
    assert dropped == expected
    model.train()
    torch.manual_seed(3)
    hidden = torch.randn(1, 4, 32)
    mlp = model.blocks[0].mlps[0].mlp
    out = mlp(hidden)
    assert 0.3 < (out == 0).float().mean() < 0.7  # after the second dense layer ...
    mlp.fc2.weight.data = torch.eye(64)[:32]
    mlp.fc2.bias.data.zero_()
    kept = torch.nn.functional.gelu(mlp.fc1(hidden))[..., :32] * 4
    out = mlp(hidden)  # ... and after GELU: a value survives both with probability 1/4, scaled by 2 twice
    assert torch.allclose(out[out != 0], kept[out != 0], rtol=1e-4)
    survived = torch.stack([(mlp(hidden) != 0).float() for _ in range(200)]).mean()
    assert 0.2 < survived < 0.3


def test_stochastic_depth_drops_whole_branches_per_image_and_keeps_the_mean() -> None:
    model = build(ViTConfig.of(**(TINY | dict(depth=2, drop_path=0.5))))
    residual = model.blocks[1].mlps[0].residual
    assert (model.blocks[0].mlps[0].residual.drop_path, residual.drop_path) == (0.0, 0.5)
    torch.manual_seed(0)
    out = residual(torch.ones(4000, 3, 32))
    assert set(out[:, 0, 0].tolist()) == {0.0, 2.0}
    assert (out == out[:, :1, :1]).all()
    assert abs(out.mean().item() - 1) < 0.06
    model.eval()
    assert torch.equal(residual(torch.ones(4, 3, 32)), torch.ones(4, 3, 32))


def test_encoding_a_subset_equals_encoding_a_shorter_sequence() -> None:
    """keep= drops tokens after their positions were added: what masked pre-training needs."""
    for positions, place in itertools.product(("1d", "relative", "2d", "relative_bias"), ("input", "every", "shared")):
        model = build(ViTConfig.of(**(TINY | dict(positions=positions, place=place)))).eval()
        randomise(model)
        tokens = model.embed(torch.randn(2, 3, 32, 32))
        everything = torch.arange(16).expand(2, 16)
        assert torch.allclose(model.encode(tokens, keep=everything), model.encode(tokens), atol=1e-5)
        keep = torch.tensor([[0, 5, 6], [1, 2, 15]])
        out = model.encode(tokens, keep=keep)
        assert out.shape == (2, 4, 32)
        shuffled = model.encode(tokens, keep=keep[:, [2, 0, 1]])
        assert torch.allclose(shuffled[:, 1:], out[:, [3, 1, 2]], atol=1e-5)  # a set, but for the positions


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(registers=2),
        dict(positions="relative"),
        dict(positions="relative_bias"),
        dict(place="every"),
        dict(distilled=True, positions="relative"),
        dict(final_norm="pooled", mlp="swiglu"),
    ],
)
@pytest.mark.parametrize("block", [dict(), dict(block="parallel", branches=2)])
def test_sparing_the_last_layer_what_nobody_reads_changes_nothing(options: dict, block: dict) -> None:
    model = build(ViTConfig.of(**(TINY | options | block)))
    randomise(model)
    images = torch.randn(2, 3, 32, 32)
    everything = model.encode(model.embed(images))
    expected = model.classify(model.summary(everything))
    expected.square().sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(images)
    logits.square().sum().backward()
    assert error(logits, expected) < 1e-6
    for name, parameter in model.named_parameters():
        assert (parameter.grad - grads[name]).norm() <= 1e-5 * grads[name].norm() + 1e-7, name


def test_reset_head_is_zero_and_drops_pre_logits() -> None:
    model = build(ViTConfig.of(**TINY, pre_logits=16))
    assert model.head.in_features == 16
    model.reset_head(7)
    assert model(torch.randn(2, 3, 32, 32)).eq(0).all()
    assert model.config.classes == 7 and model.config.pre_logits is None
    assert build(model.config).state_dict().keys() == model.state_dict().keys()


# Parameter counts: paper and issue where given, otherwise timm's implementation of the same architecture.
PINNED = {"B/16": 86_567_656, "L/16": 304_326_632, "H/14": 632_045_800}
TIMM_NAMES = {
    "Ti/16": "vit_tiny_patch16_224", "S/32": "vit_small_patch32_224", "S/16": "vit_small_patch16_224",
    "B/32": "vit_base_patch32_224", "B/16": "vit_base_patch16_224", "L/32": "vit_large_patch32_224",
    "L/16": "vit_large_patch16_224", "H/14": "vit_huge_patch14_224", "g/14": "vit_giant_patch14_224",
    "G/14": "vit_gigantic_patch14_224", "R+Ti/16": "vit_tiny_r_s16_p8_224", "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224", "R50+L/32": "vit_large_r50_s32_224",
    "S36x1/16": ("vit_small_patch16_224", dict(depth=36)), "S18x2/16": "vit_small_patch16_18x2_224",
    "B36x1/16": ("vit_base_patch16_224", dict(depth=36)), "B18x2/16": "vit_base_patch16_18x2_224",
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in NAMES if name in TIMM_NAMES or name in PINNED])
def test_parameter_counts_equal_timm_and_the_paper(name: str) -> None:
    with torch.device("meta"):
        ours = sum(p.numel() for p in create(name).parameters())
        peer, options = TIMM_NAMES[name], {}
        if isinstance(peer, tuple):
            peer, options = peer
        model = timm.create_model(peer, num_classes=1000, weight_init="skip", **options)
    theirs = sum(p.numel() for p in model.parameters())
    for module in model.modules():  # the 18x2 models of timm start LayerScale at 1e-5; the names here have none
        theirs -= sum(p.numel() for key, p in module.named_parameters(recurse=False) if key == "gamma")
    assert ours == theirs
    assert ours == PINNED.get(name, ours)


def test_axial_parameters_in_closed_form() -> None:
    """An axial block is two blocks: one for the rows, one for the columns (D.6); no class token."""
    d, tokens = 768, 196
    block = 12 * d * d + 13 * d
    with torch.device("meta"):
        ours = sum(p.numel() for p in create("axial-B/16").parameters())
    assert ours == (3 * 256 * d + d) + tokens * d + 24 * block + 2 * d + (d * 1000 + 1000)
