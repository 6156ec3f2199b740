"""A loss of one's own: `vitrail train digits --objective focal:Focal --objective.gamma 2`."""

from dataclasses import dataclass

from torch import Tensor

from vitrail import Supervised
from vitrail.objective.supervised import soft_targets
from vitrail.ranges import NotNegative


@dataclass(frozen=True)
class Focal(Supervised):
    """Focal loss (Lin et al. 2017): images that are classified well count less. With gamma 0 it is cross-entropy."""

    gamma: NotNegative = 2.0
    """Exponent of 1 - p, where p is the probability of the label."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image [batch]."""
        soft = soft_targets(targets, logits.shape[1], self)
        log_p = logits.float().log_softmax(-1)
        return -(soft * (1 - log_p.exp()) ** self.gamma * log_p).sum(-1)
