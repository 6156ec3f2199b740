"""Learning from labels: softmax, sigmoid or binary cross-entropy, with label smoothing and soft targets."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.images.mix import Mix
from vitrail.data.settings import Augment
from vitrail.errors import UsageError
from vitrail.objective.base import Objective, Prepared
from vitrail.objective.settings import Supervised


def soft_targets(targets: Tensor, classes: int, config: Supervised) -> Tensor:
    """Return float32 targets [batch, classes]: one-hot or mixed, thresholded (bce), then smoothed.

    Smoothing spreads `smoothing` evenly over all classes, including the target: (1 - s) t + s / classes.
    The threshold is applied first, because after smoothing every class would be above 0.
    """
    soft = targets.float() if targets.ndim == 2 else F.one_hot(targets, classes).float()
    if config.loss == "bce" and config.bce_threshold is not None:
        soft = (soft > config.bce_threshold).float()
    if config.smoothing:
        soft = soft * (1 - config.smoothing) + config.smoothing / classes
    return soft


def supervised_loss(logits: Tensor, targets: Tensor, config: Supervised) -> Tensor:
    """Return the loss of each example [batch], in float32 or better.

    logits [batch, classes] in any precision; targets int64 [batch] or float [batch, classes].

    * softmax: -sum_k t_k log softmax(z)_k
    * sigmoid: sum_k -t_k log s(z_k) - (1 - t_k) log(1 - s(z_k))   (paper, B.1, after BiT)
    * bce: the mean over classes of these terms   (ResNet strikes back, A2; DeiT-III)
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.loss == "softmax" and targets.ndim == 1:  # the fast path: the same value without a one-hot matrix
        return F.cross_entropy(logits, targets, label_smoothing=config.smoothing, reduction="none")
    soft = soft_targets(targets, logits.shape[1], config).to(logits.dtype)
    if config.loss == "softmax":
        return -(soft * logits.log_softmax(-1)).sum(-1)
    per_class = F.binary_cross_entropy_with_logits(logits, soft, reduction="none")
    return per_class.sum(-1) if config.loss == "sigmoid" else per_class.mean(-1)


class SupervisedObjective(Objective):
    """Predict the label of an image. Metrics: "top1", correct predictions of the label before mixing.

    `classes` is the number of outputs of `model`; `augment` holds the settings of mixing, which is a function of
    (seed, step, place in the batch). Raises UsageError if the settings contradict each other.
    """

    def __init__(self, model: nn.Module, config: Supervised, augment: Augment, classes: int, seed: int) -> None:
        super().__init__(model)
        if not 0 <= config.smoothing < 1:
            raise UsageError(f"objective.smoothing is {config.smoothing}; it must be at least 0 and below 1")
        if config.bce_threshold is not None and config.loss != "bce":
            raise UsageError(f"objective.bce_threshold needs objective.loss: bce, not {config.loss}")
        self.config = config
        self.mix = Mix(augment, classes, seed)
        if config.head_bias:
            _set_head_bias(model, config.head_bias)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Mix images and targets (mixup, CutMix)."""
        images, targets = self.mix(prepared.images, prepared.labels, step)
        return replace(prepared, images=images, targets=targets)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        logits = self.model(prepared.images)
        losses = supervised_loss(logits, prepared.targets, self.config)
        right = (logits.detach().argmax(-1) == prepared.labels).sum()
        return losses.sum(), len(prepared), {"top1": right}


def _set_head_bias(model: nn.Module, value: float) -> None:
    heads = [head for name in ("head", "head_dist") if (head := getattr(model, name, None)) is not None]
    if not heads or any(not isinstance(head, nn.Linear) or head.bias is None for head in heads):
        raise UsageError("objective.head_bias needs a model with a linear classifier that has a bias")
    with torch.no_grad():
        for head in heads:
            head.bias.fill_(value)
