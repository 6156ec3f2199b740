"""Which part of a pretrained network is tuned: everything, attention layers, MLPs, low-rank updates, or the classifier.

The follow-up paper, section 4 ("Fine-tuning attention is all you need"), tunes the weights of the MHSA layers, a
third of a ViT. This takes 10 % less memory and 10 % less time than tuning everything, and only that third has to be
stored. The parts are, in each kind of network:

* attention: weights and biases of the projections (q, k, v and output) of every attention layer, in all branches of
  parallel blocks and both axes of axial blocks; the relative positions and BEiT's biases, which are added to attention
  logits; the projections of a MAP head.
* attention+positions: the same, and the positions added to the tokens. This is what the authors' code tunes
  (DeiT repository, `main.py --attn-only`); their text names the attention weights alone.
* ffn: both dense layers of every MLP in the same blocks, and of a MAP head.
* lora: updates of low rank (`vitrail.model.low_rank`) of the dense layers of attention, of the MLPs or of
  both, as named above. The layers themselves are frozen.
* head: only the classifier, which is always tuned: `head`, `head_dist` of a distilled network, and `pre_logits` if
  there is one.

Everything else is frozen, as the paper says:

* the norms before the branches and LayerScale, which are not MHSA weights (the authors' code freezes them too);
* class token, distillation token and registers;
* the positions added to the tokens, except with attention+positions. With them, autograd keeps the activations of the
  whole trunk;
* the final norm, and the stem, including a hybrid's ResNet.

A frozen BatchNorm, as in an hMLP stem, uses its running statistics and does not change them. Dropout and stochastic
depth do not change. Frozen parameters have no gradient and no optimiser state. Autograd keeps no activations before the
first tuned parameter; with `head` it keeps none of the whole trunk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.errors import UsageError
from vitrail.model.attention import Attention
from vitrail.model.block import MLP, AttentionBranch, SwiGLU
from vitrail.model.head import MAPHead
from vitrail.model.low_rank import LowRank, adapt
from vitrail.model.posemb import Learned1D, Learned2D, Relative, RelativeBias
from vitrail.model.variants import NetworkConfig, ResNetConfig
from vitrail.training.run import LORA, Run, Tune
from vitrail.weights.assemble import HEAD
from vitrail.weights.base import BaseWeights
from vitrail.weights.store import checksum

LACKING = {"attention+positions": "attention", "lora": "attention and MLP"}
"""Names of the layers that a ResNet does not have, where they are not the value of `Run.tune` itself."""
LORA_RANK = 8
"""Rank of updates unless `Run.lora_rank` gives another one."""
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True)
class Tuned:
    """Which part of a network is tuned, and where the frozen part comes from."""

    tune: Tune
    parameters: int
    """Number of tuned values."""
    of: int
    """Number of all values."""
    base: BaseWeights | None = None
    """None if everything is tuned."""


def check_tune(run: Run, config: NetworkConfig) -> None:
    """Raise UsageError if `run.tune` names a part that the network does not have."""
    given = [name for name in LORA if getattr(run, name) is not None]
    if run.tune != "lora" and given:
        raise UsageError(f"{given[0]} is for tune lora, and tune is {run.tune!r}: set tune to lora, or leave it out")
    if run.tune == "all":
        return
    if run.weights is None:
        raise UsageError(
            f"tune is {run.tune!r}, which trains only a part of a pretrained network, but no weights are given. Name "
            "them with --from WEIGHTS, or train everything with --tune all."
        )
    if isinstance(config, ResNetConfig) and run.tune != "head":
        raise UsageError(
            f"tune is {run.tune!r}, but {run.weights} is a ResNet, not a Vision Transformer: it has no "
            f"{LACKING.get(run.tune, run.tune)} layers to tune. Use --tune all or --tune head."
        )


def with_lora_defaults(run: Run) -> Run:
    """Return `run` with every setting of tune lora, if this is what it tunes."""
    if run.tune != "lora":
        return run
    rank = run.lora_rank or LORA_RANK
    return replace(run, lora_rank=rank, lora_alpha=run.lora_alpha or rank, lora_on=run.lora_on or "attention")


def tune(model: nn.Module, run: Run) -> tuple[Tuned, dict[str, str]]:
    """Freeze, in place, the part of `model` that `run.tune` does not name; return what is tuned, in words, too.

    `model` is what `vitrail.training.assemble.build_model` returned. Call this before the optimiser, the average and
    `parallel.prepare` get the model.
    """
    told = {"lora": _adapt(model, run)} if run.tune == "lora" else {}
    freeze_rest(model, run.tune)
    if run.probe_head or run.keeps_classes:
        freeze_statistics(model)
    parameters = list(model.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    count = sum(parameter.numel() for parameter in parameters)
    if run.tune == "all":
        return Tuned(run.tune, learning, count), told
    told["tune"] = f"{run.tune}: {learning:,} of {count:,} parameters are trained, the others are frozen"
    return Tuned(run.tune, learning, count, _base(model, str(run.weights))), told


def freeze_rest(model: nn.Module, tune: Tune) -> None:
    """Freeze all parameters that `tune` does not name, in place, and turn BatchNorms into `FrozenBatchNorm`."""
    if tune == "all":
        return
    learning = {parameter for module in _learning(model, tune) for parameter in module.parameters()}
    learning |= {parameter for name, parameter in model.named_parameters() if name.startswith(HEAD)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in learning)
    freeze_statistics(model)


def freeze_statistics(model: nn.Module) -> None:
    """Turn the BatchNorms of `model` into `FrozenBatchNorm`, in place.

    A classifier that begins as a linear probe needs it, too: with the statistics of batches of new images, the features
    are no longer those that the probe has seen. On grey photographs of tiles, five steps at a hundredth of the learning
    rate took the accuracy from 95 to 75 %.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d) and not isinstance(child, FrozenBatchNorm):
                setattr(parent, name, FrozenBatchNorm(child))


def _learning(model: nn.Module, tune: Tune) -> Iterator[nn.Module]:
    """Yield the modules below the classifier whose parameters are all tuned."""
    kinds: dict[Tune, Any] = {
        "attention": Attention | Relative | RelativeBias,
        "attention+positions": Attention | Relative | RelativeBias | Learned1D | Learned2D,
        "ffn": MLP | SwiGLU,
        "lora": LowRank,
        "head": (),
    }
    for module in model.modules():
        if isinstance(module, kinds[tune]):
            yield module
        elif tune.startswith("attention") and isinstance(module, AttentionBranch):
            yield module.attention  # perhaps one of the user's own
        elif tune.startswith("attention") and isinstance(module, MAPHead):
            yield from (module.query, module.key_value, module.out)


def _adapt(model: nn.Module, run: Run) -> str:
    """Give the layers that `run.lora_on` names an update of low rank, in place. Return the decision, in words."""
    assert run.lora_rank and run.lora_alpha and run.lora_on  # decided by now
    tunes: dict[str, tuple[Tune, ...]] = {"attention": ("attention",), "mlp": ("ffn",), "both": ("attention", "ffn")}
    parts = [part for name in tunes[run.lora_on] for part in _learning(model, name)]
    scale = run.lora_alpha / run.lora_rank
    count = adapt(model, parts, run.lora_rank, scale)
    where = {"mlp": "the MLPs", "both": "attention and MLPs"}.get(run.lora_on, run.lora_on)
    return f"rank {run.lora_rank}, factor {scale:g}, on {count} dense layers of {where}"


class FrozenBatchNorm(nn.BatchNorm2d):
    """A BatchNorm with the tensors of `norm` that stays in evaluation mode while its network trains."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        for name, tensor in [*norm.named_parameters(), *norm.named_buffers()]:
            setattr(self, name, tensor)
        norm.eval()
        self.eval()

    def train(self, mode: bool = True) -> FrozenBatchNorm:
        """Stay in evaluation mode."""
        return super().train(False)


def _base(model: Any, source: str) -> BaseWeights:
    """Return the reference to the frozen tensors of `model` in the weights `source`.

    Tensors that were resampled to another resolution differ there, so they are not part of it.
    """
    report = model.load_report
    apart = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    apart |= {*report.reset, *report.resampled}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in apart}
    given = Path(source).expanduser()
    hub = not given.exists()
    if hub:  # a folder of the hub's cache, whose name is the commit
        given = report.path.parent if report.path.is_file() else report.path
        source = f"{source.partition('@')[0]}@{given.name}" if _COMMIT.fullmatch(given.name) else source
    return BaseWeights(source, os.path.abspath(given), checksum(state), hub, shared=frozenset(state))
