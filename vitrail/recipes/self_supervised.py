"""Pre-training without labels: the paper's masked patch prediction, MAE, BEiT and the tokenizer it needs, DINO.

Masked patch prediction is appendix B.1.2: Adam, 2e-4, 10,000 steps of warmup, cosine, batch 4096, a million steps of
JFT-300M (about 14 epochs); "diminishing returns after 100k steps". Its weight decay and augmentation are not printed;
its authors say the augmentation is that of supervised pre-training (google-research/vision_transformer, issue 103).

MAE is He et al. 2022 and its repository's commands and defaults (PRETRAIN.md, FINETUNE.md); BEiT is Bao et al. 2022 and
its repository's commands and defaults for ImageNet-1k, with the tokenizer trained here, as the follow-up does (section
5). Linear probes are `vitrail probe linear RUN DIR`, at many learning rates; MAE's own is trained by LARS behind a
BatchNorm.

DINO is Caron et al. 2021 (section 3.2, "Implementation details") and its repository's defaults for ViT-S/16. Here crops
are cut from the largest square of a photograph, placed at random along its longer side, not from all of it; positions
are resampled linearly for local crops, not by cubics; the clipped norm is that of all gradients, not of each tensor.

Not expressible: the mean of the patches after fine-tuning (here the class token, which pre-training keeps; MAE's
authors find that they perform alike); BEiT's tokenizer sees the image at half the side, here at the same,
and is trained otherwise (`vitrail.objective.beit.tokenizer`); its fine-tuning gives every layer a copy of the shared
relative positions, which learns at that layer's rate, while here they stay one table, at the full rate.
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.config import Epochs, Percent, Steps
from vitrail.data.settings import Augment
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Supervised, Tokenizer
from vitrail.recipes.deit import CROP, bicubic
from vitrail.recipes.preprocessing import PRE_TRAINING, inception
from vitrail.recipes.published import Recipe, by_name
from vitrail.training.run import Model, Optim, Run, Schedule

SIDE = 224


def masked_patch() -> Run:
    """Masked patch prediction with B/16 as in the ViT paper's appendix B.1.2.

    Command: `vitrail train DIR --recipe masked-patch`
    Cost: 1,000,000 steps of 4096 images (about 14 epochs of JFT-300M); 100,000 steps are nearly as good.
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
        duration=Steps(1_000_000),
        batch_size=4096,
        evaluate_every=Percent(1),
        checkpoint_every=Percent(1),
    )


def mae() -> Run:
    """Masked autoencoder with B/16 on ImageNet (He et al. 2022, table 8).

    Command: `vitrail train DIR --recipe mae`; then fine-tune with mae-finetune
    Cost: 800 epochs of 1.28 million images, each half a supervised one: 8.9 billion multiplications for 17.6.
    Expected: 83.6 % on ImageNet after 1600 such epochs and fine-tuning (published).
    """
    return Run(
        name="mae",
        model="B/16",
        vit=Model(positions="sincos"),
        image_size=SIDE,
        objective=MAE(),
        augment=Augment(crop="inception", scale=(0.2, 1.0)),
        preprocess=bicubic(SIDE, crop=0.875),
        optim=Optim(name="adamw", lr=1.5e-4 * 4096 / 256, weight_decay=0.05, betas=(0.9, 0.95), clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(40)),
        duration=Epochs(800),
        batch_size=4096,
        evaluate_every=Percent(2.5),
        checkpoint_every=Percent(2.5),
    )


def mae_finetune() -> Run:
    """Fine-tuning of an MAE on ImageNet (its repository's FINETUNE.md), with layer-wise learning rates for B/16.

    They fall by a factor of 0.65 per layer; Table 9 of the paper has 0.75 and twice the rate for all sizes.

    Command: `vitrail finetune DIR --recipe mae-finetune --from RUN`
    Cost: 100 epochs of 1.28 million images.
    Expected: 83.6 %, the mean of four runs (published); its authors took the mean of the patches.
    """
    return Run(
        name="mae-finetune",
        model="B/16",
        vit=Model(drop_path=0.1),
        image_size=SIDE,
        objective=Supervised(loss="softmax", smoothing=0.1),
        augment=replace(CROP, randaugment=(2, 9.0), erasing=0.25, mixup=0.8, cutmix=1.0),
        preprocess=bicubic(SIDE, crop=0.875),
        optim=Optim(name="adamw", lr=5e-4 * 1024 / 256, weight_decay=0.05, layer_decay=0.65, clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(5), end=1e-6),
        duration=Epochs(100),
        batch_size=1024,
        evaluate_every=Percent(5),
        checkpoint_every=Percent(5),
    )


def tokenizer() -> Run:
    """The tokenizer that BEiT needs, trained on the same images: 8192 visual tokens, one for each 16 x 16 patch.

    Command: `vitrail train DIR --recipe tokenizer`
    Cost: 20 epochs.
    """
    return Run(
        name="tokenizer",
        model="B/16",
        image_size=SIDE,
        objective=Tokenizer(),
        augment=Augment(crop="inception", scale=(0.2, 1.0)),
        preprocess=bicubic(SIDE, crop=0.875),
        optim=Optim(lr=1e-3, weight_decay=0.0, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Percent(2)),
        duration=Epochs(20),
        batch_size=256,
        evaluate_every=Percent(5),
        checkpoint_every=Percent(5),
    )


def beit() -> Run:
    """BEiT with B/16 (Bao et al. 2022): LayerScale 0.1, one table of relative positions for all layers.

    Command: `vitrail train DIR --recipe beit --objective.tokenizer RUN`, where RUN is one of the recipe tokenizer
    Cost: 800 epochs of 1.28 million images.
    Expected: the hMLP stem (--vit.stem hmlp) gains 0.3 to 0.4 points after fine-tuning (follow-up, section 5).
    """
    return Run(
        name="beit",
        model="B/16",
        vit=Model(positions="relative_bias", place="shared", layer_scale=0.1, drop_path=0.1),
        image_size=SIDE,
        objective=BEiT(),
        augment=Augment(crop="inception", scale=(0.08, 1.0), color_jitter=0.4),
        preprocess=bicubic(SIDE, crop=0.875),
        optim=Optim(name="adamw", lr=1.5e-3, weight_decay=0.05, betas=(0.9, 0.98), clip=3.0),
        schedule=Schedule(shape="cosine", warmup=Epochs(10), end=1e-5),
        duration=Epochs(800),
        batch_size=2048,
        evaluate_every=Percent(2.5),
        checkpoint_every=Percent(2.5),
    )


def beit_finetune() -> Run:
    """Fine-tuning of a BEiT on ImageNet (its repository's command for B/16), with layer-wise learning rates.

    Command: `vitrail finetune DIR --recipe beit-finetune --from RUN`
    Cost: 100 epochs of 1.28 million images.
    """
    return replace(
        mae_finetune(),
        name="beit-finetune",
        optim=Optim(name="adamw", lr=4e-3, weight_decay=0.05, layer_decay=0.65, clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(20), end=1e-6),
    )


def dino() -> Run:
    """DINO with S/16 on ImageNet (Caron et al. 2021): two global and eight local crops, and an averaged teacher.

    Command: `vitrail train DIR --recipe dino`; --knn 20 measures the features during training
    Cost: 100 epochs of 1.28 million images, each about four supervised ones.
    Expected: kNN 69.3 % on ImageNet in 100 epochs with a constant teacher temperature of 0.04 (published).
    """
    return Run(
        name="dino",
        model="S/16",
        vit=Model(drop_path=0.1),
        image_size=SIDE,
        objective=DINO(view=2.0),
        augment=Augment(crop="random"),
        preprocess=bicubic(SIDE, crop=0.875),
        optim=Optim(name="adamw", lr=5e-4 * 1024 / 256, weight_decay=0.04, weight_decay_end=0.4, clip=3.0),
        schedule=Schedule(shape="cosine", warmup=Epochs(10), end=1e-6),
        duration=Epochs(100),
        batch_size=1024,
        evaluate_every=Percent(2.5),
        checkpoint_every=Percent(2.5),
    )


SELF_SUPERVISED = by_name(
    [
        Recipe("masked-patch", masked_patch),
        Recipe("mae", mae),
        Recipe("mae-finetune", mae_finetune, "finetune"),
        Recipe("tokenizer", tokenizer),
        Recipe("beit", beit),
        Recipe("beit-finetune", beit_finetune, "finetune"),
        Recipe("dino", dino),
    ]
)
