"""Objectives without labels on images of many bands: normalised float32 values."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dino_cases import TINY
from masked_cases import Images, vit

from vitrail import fit
from vitrail.data.settings import Augment, Bands, Data, Preprocess
from vitrail.data.sources.open import open_data
from vitrail.durations import Steps
from vitrail.errors import UsageError
from vitrail.objective.base import RunFacts
from vitrail.objective.crops import BLUR, BRIGHTNESS, CONTRAST, GREY, HUE, SATURATION, SOLARISE, blur
from vitrail.objective.dino import DINOObjective
from vitrail.objective.mae import MAEObjective
from vitrail.objective.masked_patch import MaskedPatchObjective
from vitrail.objective.self_supervised import SelfSupervised
from vitrail.objective.settings import DINO, MAE, BEiT, MaskedPatch, Tokenizer
from vitrail.training.decide import decide
from vitrail.training.facts import Facts
from vitrail.training.run import Model, Optim, Run
from vitrail.weights.load import read_card

BANDS = Bands("16", (100.0,) * 5, (10.0,) * 5, (0.0,) * 5, (200.0,) * 5, (3, 2, 1))
TASK = RunFacts(seed=0, preprocess=Preprocess((32, 32), bands=BANDS))
PIXELS = MaskedPatch(target="pixels")


def bands(count: int = 4) -> Images:
    values = torch.randn(count, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    return Images(values, torch.zeros(count, dtype=torch.int64), torch.arange(count))


def made(config: MAE | DINO | MaskedPatch) -> SelfSupervised:
    kinds = {"mae": MAEObjective, "dino": DINOObjective, "masked-patch": MaskedPatchObjective}
    return kinds[config.kind].of(vit(channels=5), config, TASK)  # type: ignore[arg-type]


@pytest.mark.parametrize("config", [MAE(decoder_width=32, decoder_depth=1, decoder_heads=2), TINY, PIXELS],
                         ids=lambda config: config.kind)  # fmt: skip
def test_there_are_gradients_and_pictures_show_three_bands(config: MAE | DINO | MaskedPatch) -> None:
    objective = made(config).train()
    prepared = objective.prepare(bands(), step=0)
    loss, count, _ = objective.loss(prepared)
    loss.backward()
    gradients = [one.grad.abs().sum() for one in objective.parameters() if one.grad is not None]
    assert count == 4 and torch.isfinite(loss) and sum(gradients) > 0
    shown = objective.eval().show(prepared)
    assert {picture.dtype for picture in shown.values()} == {torch.uint8}
    assert len({picture.shape for picture in shown.values()}) == 1
    if config.kind != "dino":
        black, white = -2, 2  # two deviations, within the range of the training images
        chosen = prepared.images[:, [2, 1, 0]]
        expected = (255 * ((chosen - black) / (white - black)).clamp(0, 1)).round()
        assert (shown["input"].float() - expected).abs().max() <= 1


def test_mae_and_masked_patch_predict_the_normalised_values() -> None:
    batch = bands()
    masked = made(PIXELS)
    loss = masked(batch, step=0)[0].detach()  # the predictions start at 0
    places = masked.prepare(batch, step=0).targets[:, 0]
    patches = batch.images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
    expected = sum(patches[row, places[row]].square().mean() for row in range(4))
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    plain = made(MAE(decoder_width=32, decoder_depth=1, decoder_heads=2, normalise=False))
    assert isinstance(plain, MAEObjective)
    torch.nn.init.zeros_(plain.decoder.predict.weight)
    prepared = plain.prepare(batch, step=0)
    hidden = [sorted(set(range(16)) - set(row)) for row in prepared.targets.tolist()]
    wanted = sum(patches[row, hidden[row]].square().mean() for row in range(4))
    assert float(plain.loss(prepared)[0].detach()) == pytest.approx(float(wanted), rel=1e-5)


def test_crops_of_bands_move_and_blur_and_keep_their_values() -> None:
    objective = made(replace(TINY, blur=2.0))
    assert isinstance(objective, DINOObjective)
    prepared = objective.prepare(bands(16), step=0)
    drawn = prepared.targets
    for column, unchanged in ((BRIGHTNESS, 1), (CONTRAST, 1), (SATURATION, 1), (HUE, 0), (GREY, 0), (SOLARISE, 0)):
        assert (drawn[..., column] == unchanged).all()
    near, far = objective.crops(prepared)
    assert near.min() < -0.5 and near.shape[2] == far.shape[2] == 5  # nothing is clamped to the range of pixels
    flat = Images(torch.full((2, 5, 32, 32), -3.0) + torch.arange(5)[:, None, None], torch.zeros(2), torch.arange(2))
    same = objective.crops(objective.prepare(flat, step=0))[0]  # type: ignore[arg-type]
    assert torch.allclose(same, flat.images[:, None, :, :1, :1].expand_as(same), atol=1e-5)
    sharp = made(replace(TINY, blur=0.0))
    assert isinstance(sharp, DINOObjective)
    unblurred = sharp.crops(sharp.prepare(bands(16), step=0))[0]
    expected = blur(unblurred.flatten(0, 1), drawn[:, :2, BLUR].flatten())
    assert torch.allclose(near.flatten(0, 1), expected, atol=1e-5)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, rng = tmp_path_factory.mktemp("stacks"), np.random.default_rng(0)
    for number in range(24):
        np.save(root / f"{number}.npy", rng.integers(0, 4096, (8, 8, 5)).astype(np.uint16))
    return root


def run(stacks: Path, objective: MAE | DINO | MaskedPatch | BEiT | Tokenizer) -> Run:
    return Run(
        out=str(stacks.parent / "runs"),
        data=Data(path=str(stacks)),
        objective=objective,
        model="Ti/16",
        vit=Model(width=16, depth=1, heads=2, mlp_dim=32, patch=4),
        optim=Optim(lr=1e-3),
        augment=Augment(crop="center"),
        duration=Steps(3),
        evaluate_every=Steps(3),
        batch_size=8,
        workers=0,
        device="cpu",
        precision="float32",
    )


@pytest.mark.train
@pytest.mark.parametrize("config", [MAE(decoder_width=16, decoder_depth=1, decoder_heads=2), TINY], ids=["mae", "dino"])
def test_a_run_on_a_flat_folder_of_arrays(stacks: Path, config: MAE | DINO) -> None:
    result = fit(run(stacks, config))
    found = read_card(result.folder).preprocess.bands
    assert found is not None and (found.channels, found.bits) == (5, "16")
    decisions = str(json.loads((result.folder / "run.json").read_text()))
    assert ("crops': 'without changes of colour" in decisions) == (config.kind == "dino")
    assert (result.folder / "seen.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("objective", "text"),
    [
        (BEiT(tokenizer="t"), "objective beit needs visual tokens of RGB with 8 bits"),
        (Tokenizer(), "objective tokenizer needs visual tokens of RGB with 8 bits"),
        (MaskedPatch(), "objective.target colour is a mean of red, green and blue"),
    ],
)
def test_what_is_made_for_rgb_says_what_is_valid(stacks: Path, objective: MaskedPatch, text: str) -> None:
    with pytest.raises(UsageError) as error:
        train = open_data(Data(path=str(stacks)), labels=False).train
        decide(run(stacks, objective), Facts.of(run(stacks, objective), train, []))
    valid = "Valid for other bands are objective mae, dino, dinov2, and masked-patch with objective.target pixels"
    assert str(error.value).startswith(text) and str(error.value).endswith(valid)
