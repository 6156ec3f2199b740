"""Which part of a pretrained network is tuned: everything, its attention layers, its MLPs, or its classifier alone.

The follow-up paper, section 4 ("Fine-tuning attention is all you need"), tunes the weights of the MHSA layers, a
third of a ViT: 10 % less memory and 10 % less time than tuning everything, and only that third has to be stored. What
that is in each kind of network:

* attention: weights and biases of every attention's projections (q, k, v and output), all branches of parallel
  blocks and both axes of axial ones; what is added to its logits, which are relative positions and BEiT's biases;
  the projections of a MAP head.
* ffn: both dense layers of every MLP, in the same blocks, and a MAP head's.
* head: nothing else than the classifier, which always learns: `head`, `head_dist` of a distilled network, and
  `pre_logits` where it is kept with them.

All else is frozen, by the paper's words: the norms in front of the branches and LayerScale, which are no MHSA weights
though they stand in its branch (the authors' code freezes them too); the class token, distillation token and
registers; the positions added to the tokens (the authors' code lets these learn; the text does not name them, and
with them the first block would have to keep its input); the final norm; and the stem, a hybrid's ResNet included. A
frozen BatchNorm, of an hMLP stem and its kin, goes by its running statistics and leaves them alone. Dropout and
stochastic depth stay as they are.

Frozen parameters get no gradient and no optimiser state, and autograd keeps nothing that only they would need: in
front of the first parameter that learns it keeps nothing at all, with `head` nothing of the whole trunk.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from vitrail.errors import UsageError
from vitrail.model.attention import Attention
from vitrail.model.block import MLP, SwiGLU
from vitrail.model.head import MAPHead
from vitrail.model.posemb import Relative, RelativeBias
from vitrail.model.variants import ResNetConfig, ViTConfig
from vitrail.training.run import Run, Tune
from vitrail.weights.assemble import HEAD
from vitrail.weights.base import BaseWeights
from vitrail.weights.store import checksum

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


def check_tune(run: Run, config: ViTConfig | ResNetConfig) -> None:
    """Raise UsageError if `run.tune` names a part that the network does not have."""
    if run.tune == "all":
        return
    if run.weights is None:
        raise UsageError(
            f"tune is {run.tune!r}, which leaves the rest of a network as it was trained, and there is none: say "
            "which (--from WEIGHTS), or train everything (--tune all)"
        )
    if isinstance(config, ResNetConfig) and run.tune != "head":
        raise UsageError(
            f"tune is {run.tune!r}, and {run.weights} is a ResNet, not a Vision Transformer: it has no {run.tune} "
            "layers to tune; use --tune all or --tune head"
        )


def tune(model: nn.Module, run: Run, decisions: dict[str, str]) -> Tuned:
    """Freeze, in place, what `run.tune` leaves out of `model`, as `vitrail.training.resolve.build_model` gave it.

    What learns is told in `decisions`. Do it before the optimiser, the average and `parallel.prepare`
    look at the model.
    """
    freeze_rest(model, run.tune)
    parameters = list(model.parameters())
    learning = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    count = sum(parameter.numel() for parameter in parameters)
    if run.tune == "all":
        return Tuned(run.tune, learning, count)
    decisions["tune"] = f"{run.tune}: {learning:,} of {count:,} parameters learn, the rest stays as it was"
    return Tuned(run.tune, learning, count, _base(model, str(run.weights)))


def freeze_rest(model: nn.Module, tune: Tune) -> None:
    """Let only the parameters that `tune` names require gradients, in place; BatchNorms become `FrozenBatchNorm`."""
    if tune == "all":
        return
    learning = {parameter for module in _learning(model, tune) for parameter in module.parameters()}
    learning |= {parameter for name, parameter in model.named_parameters() if name.startswith(HEAD)}
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in learning)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, FrozenBatchNorm(child))


def _learning(model: nn.Module, tune: Tune) -> Iterator[nn.Module]:
    """Yield the modules below the classifier whose parameters are all tuned."""
    for module in model.modules():
        if tune == "attention" and isinstance(module, Attention | Relative | RelativeBias):
            yield module
        elif tune == "attention" and isinstance(module, MAPHead):
            yield from (module.query, module.key_value, module.out)
        elif tune == "ffn" and isinstance(module, MLP | SwiGLU):
            yield module


class FrozenBatchNorm(nn.BatchNorm2d):
    """A BatchNorm that stays in evaluation mode while its network trains; the tensors are those of `norm`."""

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
    """The reference to what `model` leaves as it was in the weights `source`.

    What was resampled to another resolution is not there in this form, and is no part of it.
    """
    report = model.load_report
    apart = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    apart |= {*report.reset, *report.resampled}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in apart}
    given = Path(source).expanduser()
    hub = not given.exists()
    if hub:  # a folder of the hub's cache, named after the commit that it is
        given = report.path.parent if report.path.is_file() else report.path
        source = f"{source.partition('@')[0]}@{given.name}" if _COMMIT.fullmatch(given.name) else source
    return BaseWeights(source, os.path.abspath(given), checksum(state), hub, shared=frozenset(state))
