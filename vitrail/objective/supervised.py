"""Learning from one label or several: cross-entropy with softmax or sigmoid, asymmetric loss, soft targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.images.mix import Mix
from vitrail.data.settings import Augment
from vitrail.errors import UsageError
from vitrail.objective.base import Objective, Prepared, Task
from vitrail.objective.rare import Balance
from vitrail.objective.settings import Supervised
from vitrail.words import shown


def soft_targets(targets: Tensor, classes: int, config: Supervised) -> Tensor:
    """Return float32 targets [batch, classes]: one-hot, multi-hot or mixed, thresholded (bce), then smoothed.

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

    logits [batch, classes] in any precision; targets int64 [batch], or [batch, classes] for mixed or several labels.

    * softmax: -sum_k t_k log softmax(z)_k
    * sigmoid: sum_k -t_k log s(z_k) - (1 - t_k) log(1 - s(z_k))   (paper, B.1, after BiT)
    * bce: the mean over classes of these terms   (ResNet strikes back, A2; DeiT-III)
    * asymmetric: see `asymmetric_loss`
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if config.loss == "softmax" and targets.ndim == 1:  # the fast path: the same value without a one-hot matrix
        return F.cross_entropy(logits, targets, label_smoothing=config.smoothing, reduction="none")
    soft = soft_targets(targets, logits.shape[1], config).to(logits.dtype)
    if config.loss == "softmax":
        return -(soft * logits.log_softmax(-1)).sum(-1)
    if config.loss == "asymmetric":
        return asymmetric_loss(logits, soft, config).sum(-1)
    per_class = F.binary_cross_entropy_with_logits(logits, soft, reduction="none")
    return per_class.sum(-1) if config.loss == "sigmoid" else per_class.mean(-1)


def asymmetric_loss(logits: Tensor, targets: Tensor, config: Supervised) -> Tensor:
    """Return the asymmetric loss of each class, [batch, classes] (Ridnik et al. 2021, equations 5 to 7).

    -t (1 - p)^gamma_positive log p - (1 - t) q^gamma_negative log(1 - q), with p = s(z) and q = max(p - margin, 0).
    logits and targets are [batch, classes]. A mixed target weighs both terms.
    """
    tiny = 1e-8  # a power below 1 has no gradient at 0
    p = logits.sigmoid()
    shifted = (p - config.margin).clamp(min=tiny)
    log_absent = torch.log1p(-shifted) if config.margin else F.logsigmoid(-logits)
    present = (1 - p).clamp(min=tiny) ** config.gamma_positive * F.logsigmoid(logits)
    absent = shifted**config.gamma_negative * log_absent
    return -(targets * present + (1 - targets) * absent)


class SupervisedObjective(Objective):
    """Predict the labels of an image. Metrics: "top1", images whose best class is one of their labels before mixing.

    `classes` is the number of outputs of `model`; `augment` holds the settings of mixing, which is a function of
    (seed, step, place in the batch). `class_counts` is the number of training images of each class, for the settings
    that favour rare classes. Raises UsageError if the settings contradict each other.
    """

    pure = True

    def __init__(
        self,
        model: nn.Module,
        config: Supervised,
        augment: Augment,
        classes: int,
        seed: int,
        class_counts: Sequence[float] = (),
    ) -> None:
        super().__init__(model)
        if config.bce_threshold is not None and config.loss != "bce":
            raise UsageError(f"objective.bce_threshold needs objective.loss: bce, not {config.loss}")
        self.config = config
        self.losses: Callable[[Tensor, Tensor], Tensor] = config.losses
        self.mix = Mix(augment, classes, seed)
        self.balance = Balance(config, class_counts)
        if config.head_bias:
            _set_head_bias(model, config.head_bias)

    @classmethod
    def of(cls, model: nn.Module, settings: Supervised, task: Task) -> Self:
        """See `Objective`."""
        return cls(model, settings, task.augment, task.classes, task.seed, task.class_counts)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Mix images and targets (mixup, CutMix)."""
        images, targets = self.mix(prepared.images, prepared.labels, step)
        return replace(prepared, images=images, targets=targets)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        logits = self.model(prepared.images)
        return self.of_labels(logits, prepared).sum(), len(prepared), {"top1": self.right(logits, prepared)}

    def of_labels(self, logits: Tensor, prepared: Prepared) -> Tensor:
        """Return the loss of each image [batch], from logits [batch, classes]."""
        targets, weights = self.balance.targets(prepared.targets)
        losses = _of_each_image(self.losses(self.balance.logits(logits), targets), len(prepared))
        return losses if weights is None else losses * weights

    def right(self, logits: Tensor, prepared: Prepared) -> Tensor:
        """Return the number of images whose best class is one of their labels before mixing."""
        best, labels = logits.detach().argmax(-1), prepared.labels
        return (best == labels if labels.ndim == 1 else labels.gather(1, best[:, None]) > 0).sum()


def _of_each_image(losses: Tensor, count: int) -> Tensor:
    """Return losses of a loss function that may be the user's. Raises UsageError if they are not one for each image.

    A mean would train with a gradient that is too small by the number of images.
    """
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        found = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else shown(losses)
        raise UsageError(
            f"the loss function returned {found} for {count} images; it must return the loss of each image, [batch]. "
            "The losses of torch do so with reduction='none'"
        )
    return losses


def _set_head_bias(model: nn.Module, value: float) -> None:
    heads = [head for name in ("head", "head_dist") if (head := getattr(model, name, None)) is not None]
    if not heads or any(not isinstance(head, nn.Linear) or head.bias is None for head in heads):
        raise UsageError("objective.head_bias needs a model with a linear classifier that has a bias")
    with torch.no_grad():
        for head in heads:
            head.bias.fill_(value)
