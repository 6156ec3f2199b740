"""The paper's fine-tuning (section 3.2, appendix B.1.1 and Table 4)."""

from __future__ import annotations

from vitrail.config import Percent, Steps
from vitrail.data.settings import Augment
from vitrail.training.run import Average, Optim, Run, Schedule


def finetune() -> Run:
    """SGD with momentum 0.9, cosine decay, no weight decay, gradients clipped at norm 1, batch 512.

    Inception crop and mirroring, a zero classifier in place of the old one, positions resampled to the new
    resolution. `vitrail finetune` shortens duration and warmup for smaller data sets
    (`vitrail.transfer.finetune.budget`); the paper tries learning rates 0.003, 0.01, 0.03 and 0.06.

    Command: `vitrail finetune DIR --from runs/x`
    Cost: 500 to 20,000 steps of 512 images, by the size of the data set.
    """
    return Run(
        name="finetune",
        augment=Augment(crop="inception"),
        optim=Optim(name="sgd", lr=0.03, momentum=0.9, weight_decay=0.0, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Percent(2.5)),
        average=Average(kind="none"),
        duration=Steps(20_000),
        batch_size=512,
        evaluate_every=Percent(10),
        checkpoint_every=Percent(10),
    )
