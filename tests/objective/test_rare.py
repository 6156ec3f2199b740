"""Class weights against scikit-learn and torch, logit adjustment against its equation."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from vitrail.data.settings import Augment
from vitrail.errors import UsageError
from vitrail.objective.settings import Supervised
from vitrail.objective.supervised import SupervisedObjective, class_weights, log_prior, supervised_loss

COUNTS = (400, 60, 9, 1)
LABELS = np.repeat(np.arange(4), COUNTS)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    expected = compute_class_weight("balanced", classes=np.arange(4), y=LABELS)
    np.testing.assert_allclose(class_weights(COUNTS, Supervised(class_weights="balanced")), expected, rtol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.9999, 0.99999999])
def test_effective_weights_are_inverse_to_the_effective_number(beta: float) -> None:
    weights = class_weights(COUNTS, Supervised(class_weights="effective", class_weights_beta=beta))
    assert weights[LABELS].mean() == pytest.approx(1)
    # Cui et al., equation 1: the expected volume after n draws, E_n = 1 + beta E_(n-1)
    effective = [sum(beta**power for power in range(count)) for count in COUNTS]
    np.testing.assert_allclose(weights / weights[3], effective[3] / np.array(effective), rtol=1e-6)


def test_a_class_without_images_has_the_weight_of_one_image_and_changes_no_other() -> None:
    for kind in ("balanced", "effective"):
        weights = class_weights((8, 0, 1), Supervised(class_weights=kind))
        assert weights[1] == weights[2] and (weights * (8, 0, 1)).sum() == pytest.approx(9)
    assert np.isfinite(log_prior((8, 0, 1))).all()


class Given(nn.Module):
    """Its images [batch, classes, 1, 1] are its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1) * self.scale


def loss_of(
    settings: Supervised, augment: Augment | None = None
) -> tuple[Tensor, SupervisedObjective, SimpleNamespace]:
    """The summed loss of 12 images of 4 classes, whose logits are their pixels."""
    rng = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 4, 1, 1, generator=rng)
    batch = SimpleNamespace(images=logits, labels=torch.arange(12) % 4, index=torch.arange(12))
    still = augment or Augment(crop="center", flip=False)
    objective = SupervisedObjective(Given(), settings, still, 4, seed=0, class_counts=COUNTS)
    loss, count, metrics = objective(batch, step=0)
    assert count == 12 and (augment or metrics["top1"] == (logits.flatten(1).argmax(1) == batch.labels).sum())
    return loss, objective, batch


def test_weighted_losses_are_those_of_torch() -> None:
    settings = Supervised(class_weights="balanced")
    weights = torch.from_numpy(class_weights(COUNTS, settings)).float()
    loss, _, batch = loss_of(settings)
    expected = F.cross_entropy(batch.images.flatten(1), batch.labels, weight=weights, reduction="sum")
    torch.testing.assert_close(loss, expected)
    # mixed images: the classes of a mixture are weighted one by one
    mixed, objective, batch = loss_of(settings, Augment(crop="center", flip=False, mixup=1.0))
    seen = objective.prepare(batch, step=0)
    assert seen.targets.ndim == 2
    expected = F.cross_entropy(seen.images.flatten(1), seen.targets, weight=weights, reduction="sum")
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "bce"])
def test_a_mixture_counts_as_its_parts_do(kind: str) -> None:
    settings = Supervised(loss=kind, class_weights="effective", class_weights_beta=0.9, smoothing=0.1)
    mixed, objective, batch = loss_of(settings, Augment(crop="center", flip=False, mixup=1.0))
    weights = class_weights(COUNTS, settings)
    seen = objective.prepare(batch, step=0)
    plain = Supervised(loss=kind, smoothing=0.1)
    parts = [
        share * weights[klass] * supervised_loss(logits[None], torch.tensor([klass]), plain).item()
        for logits, target in zip(seen.images.flatten(1), seen.targets, strict=True)
        for klass, share in enumerate(target.tolist())
    ]
    assert mixed.item() == pytest.approx(sum(parts), rel=1e-5)


def test_logit_adjustment_is_its_equation_and_leaves_the_network_alone() -> None:
    loss, _, batch = loss_of(Supervised(logit_adjustment=1.5))
    # Menon et al., equation 10: log(1 + sum over y' != y of (p(y') / p(y))^tau exp(f(y') - f(y)))
    prior = np.array(COUNTS) / sum(COUNTS)
    expected = 0.0
    for logits, label in zip(batch.images.flatten(1).tolist(), batch.labels.tolist(), strict=True):
        others = [(prior[k] / prior[label]) ** 1.5 * np.exp(logits[k] - logits[label]) for k in range(4) if k != label]
        expected += np.log1p(sum(others))
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_settings_add_nothing_to_a_checkpoint_and_refuse_what_they_cannot_do() -> None:
    _, weighted, _ = loss_of(Supervised(class_weights="balanced", logit_adjustment=1.0))
    _, plain, _ = loss_of(Supervised())
    assert weighted.state_dict().keys() == plain.state_dict().keys()
    still = Augment(crop="center", flip=False)
    with pytest.raises(UsageError, match=r"logit_adjustment needs objective\.loss softmax, not sigmoid"):
        SupervisedObjective(Given(), Supervised(loss="sigmoid", logit_adjustment=1.0), still, 4, 0, COUNTS)
    with pytest.raises(UsageError, match="number of training images of each class"):
        SupervisedObjective(Given(), Supervised(class_weights="balanced"), still, 4, 0)
