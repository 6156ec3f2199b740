"""Pre-training without labels: the paper's masked patch prediction, MAE, BEiT with its tokenizer, and DINO.

Masked patch prediction follows appendix B.1.2: Adam, 2e-4, 10,000 steps of warmup, cosine, batch 4096, a million steps
of JFT-300M (about 14 epochs); "diminishing returns after 100k steps". Its weight decay and augmentation are not
printed; its authors say the augmentation is that of supervised pre-training (google-research/vision_transformer, issue
103).

MAE follows He et al. 2022 and the commands and defaults of its repository (PRETRAIN.md, FINETUNE.md). BEiT follows Bao
et al. 2022 and the commands and defaults of its repository for ImageNet-1k; the tokenizer is trained by vitrail, as in
the follow-up (section 5). `vitrail probe linear RUN DIR` measures linear probes at many learning rates; MAE trains its
linear probe with LARS after a BatchNorm.

DINO follows Caron et al. 2021 (section 3.2, "Implementation details") and its repository's defaults for ViT-S/16, with
three differences. Crops are cut from the largest square of a photograph, placed at random along its longer side, not
from the whole photograph. Positions are resampled linearly for local crops, not by cubics. Clipping uses the norm of
all gradients together, not of each tensor.

Other differences that cannot be expressed: MAE's fine-tuning averages the patches (vitrail: the class token, which
pre-training keeps; MAE's authors find that both perform alike). BEiT's tokenizer sees the image at half the side
(vitrail: at the full side) and is trained differently (`vitrail.objective.tokenizer`). BEiT's fine-tuning gives
every layer its own copy of the relative positions with that layer's learning rate (vitrail: one shared table with the
full rate).
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.settings import Augment
from vitrail.durations import Epochs, Percent, Steps
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Tokenizer
from vitrail.recipes import deit
from vitrail.recipes.preprocessing import bicubic
from vitrail.recipes.published import by_name, described, pre_training
from vitrail.training.run import Model, Optim, Run, Schedule

IMAGENET = bicubic(Run(model="B/16", evaluate_every=Percent(2.5), checkpoint_every=Percent(2.5)), 224, crop=0.875)
"""The settings that the pre-training recipes on ImageNet share."""


def masked_patch() -> Run:
    """Masked patch prediction with B/16, as in appendix B.1.2 of the ViT paper.

    Command: `vitrail train DIR --recipe masked-patch`
    Cost: 1,000,000 steps of 4096 images (about 14 epochs of JFT-300M); 100,000 steps are nearly as good.
    Expected: 79.9 % on ImageNet, 2 points over training from scratch (section 4.6).
    """
    return replace(
        pre_training("B/16", "jft300m", 14),
        objective=MaskedPatch(),
        optim=Optim(name="adamw", lr=2e-4, weight_decay=0.0, betas=(0.9, 0.999), clip=None),
        schedule=Schedule(shape="cosine", warmup=Steps(10_000)),
        duration=Steps(1_000_000),
        evaluate_every=Percent(1),
        checkpoint_every=Percent(1),
    )


def mae() -> Run:
    """Masked autoencoder with B/16 on ImageNet (He et al. 2022, table 8).

    Command: `vitrail train DIR --recipe mae`; then fine-tune with mae-finetune
    Cost: 800 epochs of 1.28 million images, with 8.9 billion multiplications per image (supervised: 17.6).
    Expected: 83.6 % on ImageNet after 1600 epochs and fine-tuning (published).
    """
    return replace(
        IMAGENET,
        vit=Model(positions="sincos", init="mae"),
        objective=MAE(),
        augment=Augment(crop="inception", scale=(0.2, 1.0)),
        optim=Optim(name="adamw", lr=1.5e-4 * 4096 / 256, weight_decay=0.05, betas=(0.9, 0.95), clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(40)),
        duration=Epochs(800),
        batch_size=4096,
    )


def mae_finetune() -> Run:
    """Fine-tuning of an MAE on ImageNet (its repository's FINETUNE.md), with layer-wise learning rates for B/16.

    The rates fall by a factor of 0.65 per layer. Table 9 of the paper has 0.75 and twice the rate, for all sizes.

    Command: `vitrail finetune DIR --recipe mae-finetune --from RUN`
    Cost: 100 epochs of 1.28 million images.
    Expected: 83.6 %, the mean of four runs (published, with the mean of the patches as features).
    """
    run = deit.base("B/16")
    return replace(
        run,
        vit=replace(run.vit, init="mae"),
        augment=replace(run.augment, repeats=1),
        optim=Optim(name="adamw", lr=5e-4 * 1024 / 256, weight_decay=0.05, layer_decay=0.65, clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(5), end=1e-6),
        duration=Epochs(100),
        evaluate_every=Percent(5),
        checkpoint_every=Percent(5),
    )


def tokenizer() -> Run:
    """The tokenizer that BEiT needs, trained on the same images: 8192 visual tokens, one for each 16 x 16 patch.

    Command: `vitrail train DIR --recipe tokenizer`
    Cost: 20 epochs.
    """
    return replace(
        IMAGENET,
        objective=Tokenizer(),
        augment=Augment(crop="inception", scale=(0.2, 1.0)),
        optim=Optim(lr=1e-3, weight_decay=0.0, clip=1.0),
        schedule=Schedule(shape="cosine", warmup=Percent(2)),
        duration=Epochs(20),
        batch_size=256,
        evaluate_every=Percent(5),
        checkpoint_every=Percent(5),
    )


def beit() -> Run:
    """BEiT with B/16 (Bao et al. 2022): LayerScale 0.1, one table of relative positions for all layers.

    Command: `vitrail train DIR --recipe beit --objective.tokenizer RUN`; RUN is a run of the recipe tokenizer
    Cost: 800 epochs of 1.28 million images.
    Expected: the hMLP stem (--vit.stem hmlp) gains 0.3 to 0.4 points after fine-tuning (follow-up, section 5).
    """
    return replace(
        IMAGENET,
        vit=Model(positions="relative_bias", place="shared", layer_scale=0.1, drop_path=0.1, init="beit"),
        objective=BEiT(),
        augment=replace(deit.CROP, color_jitter=0.4),
        optim=Optim(name="adamw", lr=1.5e-3, weight_decay=0.05, betas=(0.9, 0.98), clip=3.0),
        schedule=Schedule(shape="cosine", warmup=Epochs(10), end=1e-5),
        duration=Epochs(800),
        batch_size=2048,
    )


def beit_finetune() -> Run:
    """Fine-tuning of a BEiT on ImageNet (its repository's command for B/16), with layer-wise learning rates.

    Command: `vitrail finetune DIR --recipe beit-finetune --from RUN`
    Cost: 100 epochs of 1.28 million images.
    """
    run = mae_finetune()
    return replace(
        run,
        vit=replace(run.vit, init="beit"),
        optim=Optim(name="adamw", lr=4e-3, weight_decay=0.05, layer_decay=0.65, clip=None),
        schedule=Schedule(shape="cosine", warmup=Epochs(20), end=1e-6),
    )


def dino() -> Run:
    """DINO with S/16 on ImageNet (Caron et al. 2021): two global and eight local crops, and an averaged teacher.

    Command: `vitrail train DIR --recipe dino`; --knn 20 measures the features during training
    Cost: 100 epochs of 1.28 million images. An image costs about four times as much as in supervised training.
    Expected: kNN 69.3 % on ImageNet in 100 epochs with a constant teacher temperature of 0.04 (published).
    """
    return replace(
        IMAGENET,
        model="S/16",
        vit=Model(drop_path=0.1, init="deit"),
        objective=DINO(view=2.0),
        augment=Augment(crop="random"),
        optim=Optim(name="adamw", lr=5e-4 * 1024 / 256, weight_decay=0.04, weight_decay_end=0.4, clip=3.0),
        schedule=Schedule(shape="cosine", warmup=Epochs(10), end=1e-6),
        duration=Epochs(100),
        batch_size=1024,
    )


SELF_SUPERVISED = by_name(
    [
        *map(described, (masked_patch, mae, tokenizer, beit, dino)),
        *(described(make, "finetune") for make in (mae_finetune, beit_finetune)),
    ]
)
