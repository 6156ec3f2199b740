"""Pre-training without labels: the paper's masked patch prediction.

Masked patch prediction is appendix B.1.2: Adam, 2e-4, 10,000 steps of warmup, cosine, batch 4096, a million steps of
JFT-300M (about 14 epochs); "diminishing returns after 100k steps". Its weight decay and augmentation are not printed;
its authors say the augmentation is that of supervised pre-training (google-research/vision_transformer, issue 103).
"""

from __future__ import annotations

from vitrail.config import Epochs, Percent, Steps
from vitrail.data.config import Augment
from vitrail.objective.config import MaskedPatch
from vitrail.recipes.preprocessing import PRE_TRAINING, inception
from vitrail.train.run import Average, Model, Optim, Run, Schedule


def masked_patch() -> Run:
    """Masked patch prediction with B/16 as in the ViT paper's appendix B.1.2.

    Command: `vitrail train DIR --recipe masked-patch`
    Cost: 1,000,000 steps of 4096 images (about 14 passes over JFT-300M); 100,000 steps are nearly as good.
    Expected: 79.9 % on ImageNet, 2 points over training from scratch (section 4.6).
    """
    preset = inception(PRE_TRAINING)
    return Run(
        name="masked-patch",
        model="B/16",
        image_size=PRE_TRAINING,
        objective=MaskedPatch(),
        augment=preset.augment,
        preprocess=preset.preprocess,
        optim=Optim(name="adamw", lr=2e-4, weight_decay=0.0, betas=(0.9, 0.999), clip=None),
        schedule=Schedule(shape="cosine", warmup=Steps(10_000)),
        average=Average(kind="none"),
        duration=Steps(1_000_000),
        batch_size=4096,
        evaluate_every=Percent(1),
        checkpoint_every=Percent(1),
    )


def masked_patch_small() -> Run:
    """Masked patch prediction on a few thousand to 100,000 images: a narrow network, patches of 4 pixels.

    Command: `vitrail train DIR --recipe masked-patch-small`, then `vitrail finetune DIR --from RUN`
    Cost: 100 passes over the images, or the minutes given with --time-limit.
    """
    return Run(
        name="masked-patch-small",
        model="Ti/4",
        vit=Model(width=128, depth=6, heads=4, mlp_dim=512, pool="gap"),
        objective=MaskedPatch(),
        augment=Augment(crop="inception", scale=(0.3, 1.0)),
        optim=Optim(lr=1e-3, weight_decay=0.05),
        schedule=Schedule(warmup=Percent(5)),
        duration=Epochs(100),
        batch_size=128,
        evaluate_every=Percent(5),
        checkpoint_every=Percent(5),
    )


SELF_SUPERVISED = {
    "masked-patch": masked_patch,
    "masked-patch-small": masked_patch_small,
}
