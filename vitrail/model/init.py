"""The initialisation of all networks."""

from __future__ import annotations

import math

import torch
from torch import nn

from vitrail.model.attention import Attention
from vitrail.model.axial import AxisAttention
from vitrail.model.block import MLP, SwiGLU
from vitrail.model.head import MAPHead, PreLogits
from vitrail.model.hybrid import HybridBottleneck
from vitrail.model.limits import Init
from vitrail.model.own_part import built_in_modules, is_own_part
from vitrail.model.queries import Queries
from vitrail.model.stem import LinearStem

STD = 0.02
"""Standard deviation of the kernels of DeiT and BEiT."""
TUNED_STD = 2e-5
"""Standard deviation of the classifier's kernel where BEiT and MAE are fine-tuned."""


def init_weights(model: nn.Module, init: Init = "paper") -> None:
    """Initialise every parameter of a ViT or ResNet in place, by default as the paper's authors do in their code.

    | tensor | init |
    |---|---|
    | stem.weight | lecun_normal |
    | stem.bias | zeros |
    | cls | zeros |
    | dist | normal 0.02 |
    | registers | normal 0.02 |
    | positions.* | normal 0.02 |
    | positions.bias | zeros |
    | attention.qkv.weight | xavier_uniform, each of q, k, v on its own |
    | attention.qkv.bias | zeros |
    | attention.out.weight | xavier_uniform |
    | attention.out.bias | zeros |
    | mlp.fc1.weight | xavier_uniform, gate and value of SwiGLU each on its own |
    | mlp.fc1.bias | normal 1e-6 |
    | mlp.fc2.weight | xavier_uniform |
    | mlp.fc2.bias | normal 1e-6 |
    | norm.weight | ones |
    | norm.bias | zeros |
    | residual.gamma | config.layer_scale |
    | pool.probe | xavier_uniform |
    | pre_logits.hidden.weight | lecun_normal |
    | pre_logits.hidden.bias | zeros |
    | head.weight | zeros |
    | head.bias | zeros |
    | head_dist.weight | zeros |
    | head_dist.bias | zeros |

    The distillation token is initialised as in DeiT's code, the relative position bias as in BEiT's, mixed rotary
    frequencies as in RoPE-ViT's. Convolutions of
    other stems and of ResNets are lecun_normal with zero bias; their norms are ones and zeros. The last norm of a
    hybrid's bottleneck starts at zero. AxialResNet's projections are lecun_normal, and its relative positions normal
    with variance 1 / features of a head, as in Axial-DeepLab's code.

    The other schemes are those of DeiT (also of DeiT-III, the follow-up and DINO), BEiT and MAE. They change these
    tensors:

    | tensor | deit | beit | mae |
    |---|---|---|---|
    | stem.weight | uniform, up to 1/sqrt(fan_in) | normal 0.02 | xavier_uniform |
    | stem.bias | uniform, up to 1/sqrt(fan_in) | zeros | uniform, up to 1/sqrt(fan_in) |
    | cls, dist | normal 0.02 | normal 0.02 | normal 0.02 |
    | attention.qkv.weight | normal 0.02 | normal 0.02 | xavier_uniform, q, k and v as one kernel |
    | attention.out.weight, mlp.fc2.weight | normal 0.02 | normal 0.02 / sqrt(2 * layer) | as the paper |
    | mlp.fc1.weight | normal 0.02 | normal 0.02 | as the paper |
    | mlp.fc1.bias, mlp.fc2.bias | zeros | zeros | zeros |
    | head.weight, head_dist.weight | normal 0.02 | normal 2e-5 | normal 2e-5 |

    The classifier matters most: with zeros, blocks have no gradient at first, and LAMB, which scales every step to the
    size of its kernel, does nothing but decay them.

    lecun_normal is a normal truncated at two standard deviations with variance 1/fan_in. xavier_uniform uses fan_in +
    fan_out of one projection. A part of the user's own initialises itself. On the meta device, where tensors have no
    values, nothing is done.
    """
    if next(model.parameters()).is_meta:
        return
    for module in built_in_modules(model):
        _init_module(module)
    for module in built_in_modules(model):
        if isinstance(module, HybridBottleneck):  # starts as the identity
            nn.init.zeros_(module.norm3.weight)
        if isinstance(module, Queries):
            module.reset_parameters()
    for name in ("cls", "dist", "registers"):
        token = getattr(model, name, None)
        if token is not None:
            nn.init.zeros_(token) if name == "cls" else nn.init.normal_(token, std=STD)
    positions = getattr(model, "positions", None)
    if positions is not None and not is_own_part(positions):
        if positions.rotary is not None:
            positions.rotary.reset_parameters()
        for name, table in positions.named_parameters(recurse=False):
            nn.init.zeros_(table) if name == "bias" else nn.init.normal_(table, std=STD)
    if init != "paper":
        _change(model, init)


@torch.no_grad()
def _change(model: nn.Module, init: Init) -> None:
    """Initialise again what a scheme draws otherwise than the paper's authors."""
    for module in built_in_modules(model):
        if isinstance(module, LinearStem | nn.Conv2d):
            _other_stem(module, init)
        elif init == "mae" and isinstance(module, Attention):
            nn.init.xavier_uniform_(module.qkv.weight)
        elif isinstance(module, Attention | MLP | SwiGLU):
            for layer in (each for each in module.children() if isinstance(each, nn.Linear)):
                if init != "mae":
                    nn.init.normal_(layer.weight, std=STD)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    if init == "beit":
        for number, block in enumerate(model.blocks, start=1):  # type: ignore[arg-type]
            for module in block.modules():
                if isinstance(module, Attention | MLP | SwiGLU):
                    last = module.out if isinstance(module, Attention) else module.fc2
                    last.weight /= math.sqrt(2 * number)
    for name in ("cls", "dist"):
        if (token := getattr(model, name, None)) is not None:
            nn.init.normal_(token, std=STD)
    for name in ("head", "head_dist"):
        if isinstance(head := getattr(model, name, None), nn.Linear):
            nn.init.normal_(head.weight, std=STD if init == "deit" else TUNED_STD)


def _other_stem(stem: LinearStem | nn.Conv2d, init: Init) -> None:
    if init == "beit":
        nn.init.normal_(stem.weight, std=STD)
        return
    bound = 1 / math.sqrt(stem.weight[0].numel())  # torch's own for convolutions, which DeiT and MAE's bias keep
    if init == "deit":
        nn.init.uniform_(stem.weight, -bound, bound)
    else:
        nn.init.xavier_uniform_(stem.weight.flatten(1))
    if stem.bias is not None:
        nn.init.uniform_(stem.bias, -bound, bound)


@torch.no_grad()
def _init_module(module: nn.Module) -> None:
    if isinstance(module, Attention):
        _xavier(module.qkv, parts=3)
        _xavier(module.out)
    elif isinstance(module, MLP):
        for layer in (module.fc1, module.fc2):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.normal_(layer.bias, std=1e-6)
    elif isinstance(module, SwiGLU):
        for part in (*module.fc1.weight.chunk(2), module.fc2.weight):
            nn.init.xavier_uniform_(part)
        for layer in (module.fc1, module.fc2):
            nn.init.normal_(layer.bias, std=1e-6)
    elif isinstance(module, MAPHead):
        nn.init.xavier_uniform_(module.probe[0])
        if isinstance(module.query, nn.Linear):
            _xavier(module.query)
        _xavier(module.key_value, parts=2)
        _xavier(module.out)
    elif isinstance(module, PreLogits):
        _lecun(module.hidden)
    elif isinstance(module, AxisAttention):
        _lecun(module.qkv)
        nn.init.normal_(module.relative, std=module.sizes[-1] ** -0.5)
    elif isinstance(module, LinearStem | nn.Conv2d):
        _lecun(module)
    elif isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.BatchNorm2d):
        nn.init.ones_(module.weight)
        nn.init.zeros_(module.bias)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)


def _xavier(layer: nn.Linear, parts: int = 1) -> None:
    """Draw each of `parts` projections in the weight on its own; the bias is zero."""
    for part in layer.weight.chunk(parts):
        nn.init.xavier_uniform_(part)
    nn.init.zeros_(layer.bias)


def _lecun(layer: nn.Linear | nn.Conv2d | LinearStem) -> None:
    """Draw a normal truncated at two standard deviations, variance 1/fan_in (flax's default); the bias is zero."""
    fan_in = layer.weight[0].numel()
    # a normal cut at two standard deviations has only 0.8796 of its standard deviation left
    std = math.sqrt(1 / fan_in) / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
