"""Learning from labels: cross-entropy with softmax or sigmoid, focal and asymmetric loss, soft targets; numbers.

For rare classes there are weights in the loss and logit adjustment. `class_weights` are factors on the loss of an
image, by its class. "effective" is from "Class-Balanced Loss Based on Effective Number of Samples" (Cui et al. 2019):
n images of a class count as (1 - beta^n) / (1 - beta). `log_prior` is for "Long-Tail Learning via Logit Adjustment"
(Menon et al. 2021, equation 10): it is added to the logits in training only, so that the logits without it rank the
classes as if all were equally frequent. Numbers are predicted by squared error or Huber loss of standardised targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.data.images.mix import Mix
from vitrail.data.labels.numbers import TargetScale
from vitrail.data.settings import Augment
from vitrail.errors import UsageError
from vitrail.objective.base import ImageBatch, Objective, Prepared, RunFacts
from vitrail.objective.settings import Regression, Supervised
from vitrail.words import shown

TINY = 1e-8
"""Smallest base of a power, because a power below 1 has no gradient at 0."""


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

    With `focal_gamma` each logarithm of a probability p has the factor (1 - p)^gamma (Lin et al. 2017, equation 4). The
    loss stays linear in the targets, which may be mixed or smoothed: with sigmoid and bce, a target in part counts in
    part as a label, and for the rest as none.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if (
        config.loss == "softmax" and targets.ndim == 1 and not config.focal_gamma
    ):  # the fast path: the same value without a one-hot matrix
        return F.cross_entropy(logits, targets, label_smoothing=config.smoothing, reduction="none")
    soft = soft_targets(targets, logits.shape[1], config).to(logits.dtype)
    if config.loss == "softmax":
        log_p = logits.log_softmax(-1)
        easy = (-torch.expm1(log_p)).clamp(min=TINY) ** config.focal_gamma if config.focal_gamma else 1.0
        return -(soft * easy * log_p).sum(-1)
    if config.loss == "asymmetric":
        return asymmetric_loss(logits, soft, config).sum(-1)
    if config.focal_gamma:
        gamma = config.focal_gamma
        per_class = asymmetric_loss(logits, soft, Supervised(gamma_positive=gamma, gamma_negative=gamma, margin=0.0))
    else:
        per_class = F.binary_cross_entropy_with_logits(logits, soft, reduction="none")
    return per_class.sum(-1) if config.loss == "sigmoid" else per_class.mean(-1)


def asymmetric_loss(logits: Tensor, targets: Tensor, config: Supervised) -> Tensor:
    """Return the asymmetric loss of each class, [batch, classes] (Ridnik et al. 2021, equations 5 to 7).

    -t (1 - p)^gamma_positive log p - (1 - t) q^gamma_negative log(1 - q), with p = s(z) and q = max(p - margin, 0).
    logits and targets are [batch, classes]. A mixed target weighs both terms.
    """
    p = logits.sigmoid()
    shifted = (p - config.margin).clamp(min=TINY)
    log_absent = torch.log1p(-shifted) if config.margin else F.logsigmoid(-logits)
    present = (1 - p).clamp(min=TINY) ** config.gamma_positive * F.logsigmoid(logits)
    absent = shifted**config.gamma_negative * log_absent
    return -(targets * present + (1 - targets) * absent)


class SupervisedObjective(Objective):
    """Predict the labels of an image. Metrics: "top1", images whose best class is one of their labels before mixing.

    `classes` is the number of outputs of `model`; `augment` holds the settings of mixing, which is a function of
    (seed, step, place in the batch). `compared` are the classes, int64 in ascending order, among which the label of an
    image is predicted (None: all): classes without training images, of which softmax would learn that they never occur,
    are left out. `class_counts` is the number of training images of each class, for the settings that favour rare
    classes. Raises UsageError if the settings contradict each other.
    """

    compared: Tensor | None

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
        if config.focal_gamma and config.loss == "asymmetric":
            raise UsageError(
                "objective.focal_gamma is for objective.loss softmax, sigmoid and bce. Loss asymmetric has exponents "
                "of its own: objective.gamma_positive and objective.gamma_negative"
            )
        self.config = config
        self.losses: Callable[[Tensor, Tensor], Tensor] = config.losses
        self.mix = Mix(augment, classes, seed)
        self.balance = Balance(config, class_counts)
        self.register_buffer("compared", None, persistent=False)
        if config.head_bias:
            _set_head_bias(model, config.head_bias)

    @classmethod
    def of(cls, model: nn.Module, settings: Supervised, task: RunFacts) -> Self:
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
        logits = self.balance.logits(logits)
        if self.compared is not None:
            logits = logits[:, self.compared]
            targets = torch.searchsorted(self.compared, targets) if targets.ndim == 1 else targets[:, self.compared]
        losses = _of_each_image(self.losses(logits, targets), len(prepared))
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


def class_weights(counts: Sequence[float], settings: Supervised) -> np.ndarray:
    """Return the weight of each class, float64 [classes]; their mean over the training images is 1.

    counts: Number of training images of each class. A class without images gets the weight of a class with one. (Cui et
    al. scale the weights to a sum of `classes`; this differs by one factor on the whole loss.)
    """
    number = np.maximum(np.asarray(counts, dtype=np.float64), 1.0)
    if settings.class_weights == "effective":
        beta = settings.class_weights_beta
        raw = (1 - beta) / -np.expm1(number * np.log(beta)) if beta else np.ones_like(number)
    else:
        raw = 1 / number
    images = np.asarray(counts, dtype=np.float64)
    return raw * images.sum() / (raw * images).sum()  # type: ignore[no-any-return]


def log_prior(counts: Sequence[float]) -> np.ndarray:
    """Return the logarithm of each class's share of the images, float64 [classes]; a class without images has one."""
    number = np.maximum(np.asarray(counts, dtype=np.float64), 1.0)
    return np.log(number / number.sum())  # type: ignore[no-any-return]


class Balance(nn.Module):
    """The changes that `settings` make to logits, targets and losses for rare classes; none by default.

    Raises UsageError if `counts`, the number of training images of each class, are needed and not known, and for logit
    adjustment of a loss that is not softmax.
    """

    weights: Tensor | None
    """float32 [classes]."""
    shift: Tensor | None
    """float32 [classes], added to the logits in training."""

    def __init__(self, settings: Supervised, counts: Sequence[float]) -> None:
        super().__init__()
        weighted, adjusted = settings.class_weights != "none", settings.logit_adjustment > 0
        if adjusted and settings.loss != "softmax":
            raise UsageError(
                f"objective.logit_adjustment needs objective.loss softmax, not {settings.loss}. With {settings.loss}, "
                "use objective.class_weights"
            )
        if (weighted or adjusted) and not len(counts):
            raise UsageError("class weights and logit adjustment need the number of training images of each class")
        weights = torch.from_numpy(class_weights(counts, settings)).float() if weighted else None
        shift = torch.from_numpy(settings.logit_adjustment * log_prior(counts)).float() if adjusted else None
        self.register_buffer("weights", weights, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def logits(self, logits: Tensor) -> Tensor:
        """Return the logits [batch, classes] that the loss sees."""
        return logits if self.shift is None else logits + self.shift

    def targets(self, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets that the loss sees, and the factor on the loss of each image [batch] (None: 1).

        targets: int64 [batch], or float [batch, classes] whose rows sum to 1. A mixed image with the shares t counts as
        its parts do: the loss of class k with the factor t_k w_k. A loss is linear in the targets, so that is one loss
        of targets in proportion to t_k w_k, times the sum of t_k w_k.
        """
        if self.weights is None:
            return targets, None
        if targets.ndim == 1:
            return targets, self.weights[targets]
        parts = targets * self.weights
        whole = parts.sum(-1)
        return parts / whole[:, None], whole


class RegressionObjective(Objective):
    """Predict the targets of an image as multiples of their deviation from their mean, which `scale` holds.

    The loss of an image is the mean over targets, so that none dominates by its unit. Mixup and CutMix blend targets as
    they blend images. Metrics: "error", the mean absolute error in deviations.
    """

    def __init__(self, model: nn.Module, config: Regression, augment: Augment, scale: TargetScale, seed: int) -> None:
        super().__init__(model)
        self.config, self.scale = config, scale
        self.mix = Mix(augment, len(scale.mean), seed)

    @classmethod
    def of(cls, model: nn.Module, settings: Regression, task: RunFacts) -> Self:
        """See `Objective`."""
        assert task.scale is not None
        return cls(model, settings, task.augment, task.scale, task.seed)

    def prepare(self, batch: ImageBatch, *, step: int) -> Prepared:
        """See `Objective`. Targets are standardised in float64, because their mean may be far larger than they vary."""
        labels = self.scale.standardised(batch.labels.double()).float()
        return super().prepare(Prepared(batch.images, labels, batch.index, labels), step=step)

    def draw(self, prepared: Prepared, step: int) -> Prepared:
        """Mix images and targets (mixup, CutMix)."""
        images, targets = self.mix(prepared.images, prepared.labels, step)
        return replace(prepared, images=images, targets=targets)

    def loss(self, prepared: Prepared) -> tuple[Tensor, int, dict[str, Tensor]]:
        """See `Objective`."""
        outputs = self.model(prepared.images)
        outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
        error = (outputs.detach() - prepared.targets).abs().mean(dim=1).sum()
        losses = number_losses(outputs, prepared.targets, self.config.loss, self.config.huber_delta)
        return losses.sum(), len(prepared), {"error": error}


def number_losses(outputs: Tensor, targets: Tensor, loss: Literal["mse", "huber"], delta: float = 1.0) -> Tensor:
    """Return the loss of each image [batch], the mean over targets, from outputs and targets [batch, targets]."""
    outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if loss == "huber":
        return F.huber_loss(outputs, targets, reduction="none", delta=delta).mean(dim=1)
    return F.mse_loss(outputs, targets, reduction="none").mean(dim=1)
