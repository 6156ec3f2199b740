"""Pre-training without labels on a few thousand to 100,000 small images, in minutes on a CPU; then fine-tuning.

All recipes train the same narrow network with patches of 4 pixels, so that their features can be compared
(`vitrail study self-supervision`).
"""

from __future__ import annotations

from dataclasses import replace

from vitrail.data.settings import Augment
from vitrail.durations import Epochs, Percent
from vitrail.objective.settings import DINO, MAE, BEiT, DINOv2, MaskedPatch, Tokenizer
from vitrail.recipes.published import by_name, described
from vitrail.training.run import Model, Optim, Run, Schedule

NARROW = "narrow/4"
"""A network narrow enough for many epochs, with the mean of the patches as features."""
COMMON = Run(duration=Epochs(100), batch_size=128, evaluate_every=Percent(5), checkpoint_every=Percent(5))


def masked_patch_small() -> Run:
    """Masked patch prediction on a few thousand to 100,000 images: a narrow network, patches of 4 pixels.

    Command: `vitrail train DIR --recipe masked-patch-small`; then fine-tune with finetune-small
    Cost: 100 epochs, or the minutes given with --time-limit.
    """
    return replace(
        COMMON,
        model=NARROW,
        objective=MaskedPatch(),
        augment=Augment(crop="inception", scale=(0.3, 1.0)),
        optim=Optim(lr=1e-3, weight_decay=0.05),
        schedule=Schedule(warmup=Percent(5)),
    )


def mae_small() -> Run:
    """Masked autoencoder on a few thousand to 100,000 images, with a decoder as narrow as the network.

    Command: `vitrail train DIR --recipe mae-small`; then fine-tune with finetune-small
    Cost: 200 epochs, or the minutes given with --time-limit.
    """
    return replace(
        masked_patch_small(),
        vit=Model(positions="sincos"),
        objective=MAE(decoder_width=64, decoder_depth=2, decoder_heads=4),
        optim=Optim(lr=1e-3, weight_decay=0.05, betas=(0.9, 0.95)),
        duration=Epochs(200),
    )


def tokenizer_small() -> Run:
    """A tokenizer for the recipe beit-small: 512 visual tokens, one for each 4 x 4 pixels.

    Command: `vitrail train DIR --recipe tokenizer-small`
    Cost: 20 epochs, or the minutes given with --time-limit.
    """
    return replace(
        masked_patch_small(),
        objective=Tokenizer(codes=512, width=64, depth=1, features=16, decay=0.9),
        optim=Optim(lr=2e-3, weight_decay=0.0),
        duration=Epochs(20),
    )


def beit_small() -> Run:
    """BEiT on a few thousand to 100,000 small images, with a tokenizer from the recipe tokenizer-small.

    Command: `vitrail train DIR --recipe beit-small --objective.tokenizer RUN`; then fine-tune with finetune-small
    Cost: 100 epochs, or the minutes given with --time-limit.
    """
    return replace(
        masked_patch_small(),
        vit=Model(positions="relative_bias", place="shared", layer_scale=0.1),
        objective=BEiT(smallest_block=4),
    )


def dino_small() -> Run:
    """DINO on a few thousand to 100,000 small images: a narrow network, few crops, and a fast teacher.

    Sinkhorn-Knopp balances the teacher's outputs over the batch, as in DINOv2, and both temperatures are lower than
    DINO's. In a short run, DINO's running mean would put all images into a few outputs. The projection has few outputs.
    The colour jitter is half as strong as in the paper, and there is no blur. Global crops have half the side of the
    images, which is four times as fast, and local crops are nearly as large. For runs of many hours,
    --objective.global-size 1 --objective.jitter 1 --objective.blur 0.5 --objective.local-crops 8 are closer to the
    paper.

    Command: `vitrail train DIR --recipe dino-small --knn 20`; then fine-tune with finetune-small
    Cost: 100 epochs, or the minutes given with --time-limit.
    """
    return replace(
        masked_patch_small(),
        objective=DINO(
            outputs=1024,
            hidden=512,
            bottleneck=128,
            freeze_last_layer=Percent(0),
            global_size=0.5,
            local_scale=(0.15, 0.6),
            local_crops=2,
            local_size=0.75,
            jitter=0.5,
            blur=0.0,
            student_temperature=0.07,
            teacher_temperature=(0.025, 0.025),
            teacher_momentum=0.98,
            centring="sinkhorn",
        ),
        augment=Augment(crop="random"),
        optim=Optim(lr=2e-3, weight_decay=0.04, weight_decay_end=0.4),
    )


def dinov2_small() -> Run:
    """DINOv2 and Gram anchoring on a few thousand to 100,000 images, from loaded weights that they are to keep.

    What protects the weights: the rate is 2e-4, that of DINOv2's large networks; it falls by a factor of 0.9 from layer
    to layer (DINOv2's default), and warms up while the new heads learn. On one draw of 500 flowers (seed 7 of
    benchmarks/continued.py), 20 neighbours were right for 77.4 % of the test images before, and for 77.4, 78.4 and
    78.4 % after 20 epochs with 5e-5, 2e-4 and 5e-4; a linear classifier for 80.4 %, then 81.6, 82.0 and 80.0 %. Gram
    anchoring has the weight of DINOv3, 2, and begins with the first step. Head, temperatures and Sinkhorn-Knopp are
    those of dino-small; the crops' shares, masks and KoLeo those of DINOv2, and the view of photographs that of dino.
    Momentum and weight decay are those of DINOv2's large networks and of DINOv3's anchoring, 0.994 and 0.04. There are
    4 local crops in place of 8.

    Command: `vitrail train DIR --recipe dinov2-small --from vitrail/tiny --knn 20`
    Cost: 20 epochs, or the minutes given with --time-limit.
    """
    small = dino_small().objective
    assert isinstance(small, DINO)
    return replace(
        COMMON,
        model=NARROW,
        objective=DINOv2(
            outputs=small.outputs,
            hidden=small.hidden,
            bottleneck=small.bottleneck,
            freeze_last_layer=Percent(0),
            view=2.0,
            local_crops=4,
            student_temperature=small.student_temperature,
            teacher_temperature=small.teacher_temperature,
            teacher_momentum=0.994,
            gram_weight=2.0,
        ),
        augment=Augment(crop="random"),
        optim=Optim(lr=2e-4, weight_decay=0.04, layer_decay=0.9, clip=3.0),
        schedule=Schedule(warmup=Percent(10)),
        duration=Epochs(20),
        batch_size=64,
    )


def finetune_small() -> Run:
    """Fine-tuning after these recipes: AdamW with layer-wise learning rates that fall by a factor of 0.75, as for MAE.

    The rates were chosen after mae-small on images held out of CIFAR-100: in one epoch (386 steps), a single rate
    for all layers reaches 18.4 % (1e-3) or 19.5 % (4e-3), and this recipe 26.7 %.

    Command: `vitrail finetune DIR --recipe finetune-small --from RUN`
    Cost: 20 epochs, or the minutes given with --time-limit.
    """
    return replace(
        COMMON,
        augment=Augment(crop="pad"),
        optim=Optim(lr=4e-3, weight_decay=0.05, layer_decay=0.75),
        schedule=Schedule(warmup=Percent(2.5)),
        duration=Epochs(20),
    )


SELF_SUPERVISED_SMALL = by_name(
    [
        *map(described, (masked_patch_small, mae_small, tokenizer_small, beit_small, dino_small, dinov2_small)),
        described(finetune_small, "finetune"),
    ]
)
