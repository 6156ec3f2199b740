from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from masked_cases import TRUE, batch, images, vit
from torch import nn

from vitrail.errors import UsageError, WeightsError
from vitrail.objective.beit import BEiTObjective
from vitrail.objective.settings import BEiT, Tokenizer
from vitrail.objective.tokenizer import ImageTokenizer, TokenizerObjective, load_tokenizer
from vitrail.weights.load import load

CODES = Tokenizer(codes=12, width=8, depth=1, features=4, decay=0.5)


def tokenizer(patch: int = 8) -> ImageTokenizer:
    torch.manual_seed(5)
    return ImageTokenizer(CODES, patch).eval().requires_grad_(False)


def objective(**changes: object) -> BEiTObjective:
    model = vit(positions="relative_bias", place="shared", layer_scale=0.1, **changes)
    return BEiTObjective(model, BEiT(smallest_block=2), seed=3, tokenizer=tokenizer())


def test_a_zero_classifier_is_as_good_as_guessing() -> None:
    loss, count, metrics = objective()(batch(), step=0)
    assert float(loss.detach()) / count == pytest.approx(math.log(12), rel=1e-6)
    assert set(metrics) == {"code"}


def test_the_loss_is_minus_the_log_probability_of_the_tokenizers_codes() -> None:
    found = objective().eval()
    nn.init.normal_(found.predict.weight, std=0.5)
    prepared = found.prepare(batch(), step=0)
    z = found.outputs(prepared).detach().double().numpy()
    book = tokenizer().codebook.vectors.numpy()
    vectors = tokenizer().find(prepared.images).numpy().reshape(4, 16, 1, 4)
    codes = ((vectors - book) ** 2).sum(-1).argmin(-1)
    total = 0.0
    for logits, wanted, places in zip(z, codes, prepared.targets.numpy(), strict=True):
        log = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        total -= log[np.arange(len(places)), wanted[places]].mean()
    assert float(found.loss(prepared)[0].detach()) == pytest.approx(total, rel=1e-4)


def test_logits_and_loss_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BeitConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0, use_mask_token=True,
        use_shared_relative_position_bias=True, layer_scale_init_value=0.1, vocab_size=12,
    )  # fmt: skip
    theirs = transformers.BeitForMaskedImageModeling(config).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    model = load(tmp_path, classes=0)
    ours = BEiTObjective(model, BEiT(smallest_block=2), seed=3, tokenizer=tokenizer()).eval()
    assert "of the pretrained weights" in ours.load_mask(theirs.state_dict())[0]
    ours.predict.load_state_dict(theirs.lm_head.state_dict())
    prepared = ours.prepare(batch(), step=0)
    masked = torch.zeros(4, 16, dtype=torch.bool).scatter(1, prepared.targets, True)
    pixels = model.normalise(prepared.images)
    labels = tokenizer().codes(prepared.images)[masked]
    with torch.no_grad():
        expected = theirs(pixels, bool_masked_pos=masked, labels=labels)
        torch.testing.assert_close(ours.outputs(prepared).flatten(0, 1), expected.logits[masked], rtol=1e-3, atol=1e-4)
        loss, count, _ = ours.loss(prepared)
    assert float(loss) / count == pytest.approx(float(expected.loss), rel=1e-4)


@pytest.mark.parametrize("stem", ["linear", "hmlp"])
def test_masked_pixels_do_not_reach_the_prediction(stem: str) -> None:
    found = objective(stem=stem).train()  # with BatchNorm's statistics of the batch
    nn.init.normal_(found.predict.weight, std=0.5)
    prepared = found.prepare(batch(), step=0)
    hidden = torch.zeros(4, 16, dtype=torch.bool).scatter(1, prepared.targets, True)
    pixels = hidden.view(4, 1, 4, 4).repeat_interleave(8, 2).repeat_interleave(8, 3)
    changed = torch.where(pixels, images(4, seed=8), prepared.images)
    before = found.outputs(prepared)
    after = found.outputs(type(prepared)(changed, prepared.labels, prepared.index, prepared.targets))
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)


def test_the_tokenizer_is_neither_trained_nor_saved() -> None:
    found = objective()
    assert not [name for name in found.state_dict() if "token" in name or "codebook" in name]
    assert all(parameter.requires_grad for parameter in found.parameters())


def test_the_mask_embedding_of_published_weights_is_taken_over() -> None:
    found = objective()
    found.load_mask({"beit.embeddings.mask_token": torch.arange(16.0).view(1, 1, 16)})
    assert found.mask.tolist() == list(range(16))


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="patch is 8"):
        BEiTObjective(vit(), BEiT(), 0, tokenizer(4))
    with pytest.raises(UsageError, match="mask-after-stem"):
        BEiTObjective(vit(stem="levit"), BEiT(), 0, tokenizer())
    with pytest.raises(UsageError, match=r"objective\.decay is 1"):
        ImageTokenizer(Tokenizer(decay=1.0), 8)
    with pytest.raises(UsageError, match="train one"):
        load_tokenizer("")
    with pytest.raises(WeightsError, match="no tokenizer at"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.safetensors").write_bytes(b"no")
    with pytest.raises(WeightsError, match="is not a tokenizer of vitrail"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("patch", [4, 7, 8, 16])
def test_each_patch_has_a_code_and_is_painted_in_its_place(patch: int) -> None:
    found = tokenizer(patch)
    pixels = images(2, 2 * patch)
    codes = found.codes(pixels)
    assert codes.shape == (2, 4) and codes.dtype == torch.int64 and codes.min() >= 0 and codes.max() < 12
    assert found.pictures(codes, (2, 2)).shape == pixels.shape


def test_a_saved_tokenizer_gives_the_same_codes(tmp_path: Path) -> None:
    found = tokenizer()
    found.save(tmp_path / "best")
    again = load_tokenizer(tmp_path)
    assert again.config == CODES and not again.training
    assert torch.equal(again.codes(images()), found.codes(images()))


@pytest.mark.train
def test_a_tokenizer_learns_to_paint_plain_images() -> None:
    torch.manual_seed(0)
    plain = batch(6, side=16)
    plain.images[:] = torch.tensor([[0, 0, 0], [255, 255, 255], [255, 0, 0]], dtype=torch.uint8).repeat(2, 1)[
        ..., None, None
    ]
    found = TokenizerObjective(ImageTokenizer(replace(CODES, width=16, features=8), 8))
    optimizer = torch.optim.AdamW(found.parameters(), lr=1e-2)
    for step in range(250):
        loss, count, _ = found(plain, step=step)
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()
        found.after_step(TRUE)
    loss, count, metrics = found.eval()(plain, step=-1)
    # the best single colour for all of them leaves their variance: (2/9)(4) in red, (2/9)(4) in green and blue
    assert float(loss.detach()) / count < 0.25 * 8 / 9
    assert 3 / 12 < float(metrics["use"]) / count <= 1
    seen = found.show(found.prepare(plain, step=-1))
    assert [picture.shape for picture in seen.values()] == [plain.images.shape] * 4
