"""Build the same architecture with each library, with the same weights where two must agree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Architecture:
    """A plain Vision Transformer: class token, learned positions, pre-norm, one linear head."""

    width: int
    depth: int
    heads: int
    patch: int
    image_size: int
    classes: int

    @property
    def tokens(self) -> int:
        """Length of the sequence, class token included."""
        return (self.image_size // self.patch) ** 2 + 1

    @property
    def flops(self) -> int:
        """Floating-point operations of one forward pass of one image: two per multiply-add, products only.

        Patches, then per layer qkv and output projection (4 D^2), MLP (8 D^2) and the two products with
        the attention map; normalisation, softmax and GELU are not counted.
        """
        d, n = self.width, self.tokens
        patches = (n - 1) * 3 * self.patch**2 * d
        layer = n * 12 * d * d + 2 * n * n * d
        return 2 * (patches + self.depth * layer + d * self.classes)


SMALL_IMAGES = Architecture(width=192, depth=6, heads=3, patch=4, image_size=32, classes=100)
S16 = Architecture(width=384, depth=12, heads=6, patch=16, image_size=224, classes=1000)
B16 = Architecture(width=768, depth=12, heads=12, patch=16, image_size=224, classes=1000)


def ours(a: Architecture) -> nn.Module:
    """Return vitrail's network."""
    from vitrail.model.build import build
    from vitrail.model.variants import ViTConfig

    return build(
        ViTConfig(
            width=a.width,
            depth=a.depth,
            heads=a.heads,
            mlp_dim=4 * a.width,
            patch=a.patch,
            image_size=(a.image_size, a.image_size),
            classes=a.classes,
        )
    )


def timm(a: Architecture, *, fused: bool = True, drop_path: float = 0.0) -> nn.Module:
    """Return timm's network; `fused` is timm's switch between scaled_dot_product_attention and explicit attention."""
    from timm.layers import set_fused_attn
    from timm.models.vision_transformer import VisionTransformer

    set_fused_attn(fused)  # read by the constructor
    try:
        return VisionTransformer(
            img_size=a.image_size,
            patch_size=a.patch,
            embed_dim=a.width,
            depth=a.depth,
            num_heads=a.heads,
            num_classes=a.classes,
            drop_path_rate=drop_path,
        )
    finally:
        set_fused_attn(True)


def transformers(a: Architecture) -> nn.Module:
    """Return Hugging Face's network with its default attention, wrapped so that it returns the logits."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=a.width,
        num_hidden_layers=a.depth,
        num_attention_heads=a.heads,
        intermediate_size=4 * a.width,
        patch_size=a.patch,
        image_size=a.image_size,
        num_labels=a.classes,  # type: ignore[call-arg]
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = ViTForImageClassification(config)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(pixel_values=images).logits

    return Logits()


def torchvision(a: Architecture) -> nn.Module:
    """Return torchvision's network."""
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        image_size=a.image_size,
        patch_size=a.patch,
        num_layers=a.depth,
        num_heads=a.heads,
        hidden_dim=a.width,
        mlp_dim=4 * a.width,
        num_classes=a.classes,
    )


RENAMES = (  # timm's parameter names -> vitrail's
    ("cls_token", "cls"),
    ("pos_embed", "positions.embedding"),
    ("patch_embed.proj", "stem"),
    (".norm1.", ".attentions.0.norm."),
    (".attn.qkv.", ".attentions.0.attention.qkv."),
    (".attn.proj.", ".attentions.0.attention.out."),
    (".norm2.", ".mlps.0.norm."),
    (".mlp.fc", ".mlps.0.mlp.fc"),
)


def load_timm(model: nn.Module, theirs: nn.Module) -> None:
    """Copy the weights of timm's model into vitrail's, so that both must compute the same."""
    state = {}
    for key, value in theirs.state_dict().items():
        for old, new in RENAMES:
            key = key.replace(old, new)
        state[key] = value.clone()
    model.load_state_dict(state)
