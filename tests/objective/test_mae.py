from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from masked_cases import batch, vit
from torch.utils.flop_counter import FlopCounterMode

from vitrail.errors import UsageError, WeightsError
from vitrail.model.variants import variant
from vitrail.model.vit import ViT
from vitrail.objective.mae import MAEObjective, mae_positions
from vitrail.objective.masks import encode_normalised
from vitrail.objective.settings import MAE
from vitrail.weights.load import load

LIGHT = MAE(decoder_width=16, decoder_depth=2, decoder_heads=2)


def test_the_loss_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.vit_mae.modeling_vit_mae import build_2d_sinusoidal_position_embedding

    for normalised in (True, False):
        torch.manual_seed(0)
        config = transformers.ViTMAEConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=32,
            patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, mask_ratio=0.75,
            decoder_hidden_size=16, decoder_num_attention_heads=2, decoder_num_hidden_layers=2,
            decoder_intermediate_size=64, norm_pix_loss=normalised, layer_norm_eps=1e-6,
        )  # fmt: skip
        theirs = transformers.ViTMAEForPreTraining(config).eval()
        for parameter in theirs.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        table = build_2d_sinusoidal_position_embedding(4, 4, 16, cls_token=True)
        theirs.decoder.decoder_pos_embed.data[:] = torch.cat([table[:, 8:], table[:, :8]], dim=1)
        folder = tmp_path / str(normalised)
        theirs.save_pretrained(folder)

        model = load(folder)
        ours = MAEObjective(model, MAE(**{**vars(LIGHT), "normalise": normalised}), seed=0).eval()  # type: ignore[arg-type]
        said = ours.load_decoder(theirs.state_dict())
        assert "tensors of the pretrained weights" in said[0]
        prepared = ours.prepare(batch(), step=0)
        noise = torch.ones(4, 16).scatter(1, prepared.targets, 0.0)  # the kept ones sort first
        pixels = model.normalise(prepared.images)
        with torch.no_grad():
            expected = theirs(pixels, noise=noise)
            predicted, _ = ours.outputs(prepared)
            loss, count, _ = ours.loss(prepared)
        torch.testing.assert_close(predicted, expected.logits, rtol=1e-3, atol=1e-4)
        assert float(loss) / count == pytest.approx(float(expected.loss), rel=1e-4)


def test_positions_are_sines_of_the_column_then_the_row() -> None:
    found = mae_positions((2, 3), torch.empty(8))[0].numpy()
    for n in range(6):
        row, column = divmod(n, 3)
        angles = [np.outer([where], [1, 1 / 100])[0] for where in (column, row)]
        expected = np.concatenate([wave(angle) for angle in angles for wave in (np.sin, np.cos)])
        np.testing.assert_allclose(found[n], expected, atol=1e-6)


def test_predicting_nothing_costs_the_variance_of_normalised_pixels() -> None:
    ours = MAEObjective(vit(), LIGHT, seed=0)
    torch.nn.init.zeros_(ours.decoder.predict.weight)
    loss, count, metrics = ours(batch(), step=0)
    values = 3 * 8 * 8  # noise images: the variance is far above the epsilon
    assert float(loss.detach()) / count == pytest.approx((values - 1) / values, rel=1e-4)
    assert metrics == {}


def test_masked_pixels_are_seen_by_the_target_alone() -> None:
    ours = MAEObjective(vit(stem="hmlp"), LIGHT, seed=0).train()  # BatchNorm in training, too
    prepared = ours.prepare(batch(), step=0)
    before, places = ours.outputs(prepared)
    changed = prepared.images.clone()
    for image, masked in zip(changed, places, strict=True):
        for place in masked.tolist():
            image[:, place // 4 * 8 : place // 4 * 8 + 8, place % 4 * 8 : place % 4 * 8 + 8] = 7
    after, _ = ours.outputs(type(prepared)(changed, prepared.labels, prepared.index, prepared.targets))
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-5)


def test_the_encoder_works_on_visible_patches_only() -> None:
    model = vit(width=64, depth=4, mlp_dim=256, patch=4)  # 64 patches
    ours = MAEObjective(model, MAE(decoder_width=8, decoder_depth=1, decoder_heads=2), seed=0)
    prepared = ours.prepare(batch(2), step=0)
    seen: list[int] = []
    handles = [block.register_forward_hook(lambda _, inputs, out: seen.append(out.shape[1])) for block in model.blocks]
    ours(prepared, step=0)
    for handle in handles:
        handle.remove()
    assert seen == [1 + 16] * 4  # a class token and a quarter of 64, in every layer


@pytest.mark.full_size
def test_a_step_of_b16_is_half_of_a_supervised_one() -> None:
    """Multiplications of a forward pass: 8.9 of 17.6 billion go by the formulas of both transformers."""
    with torch.device("meta"):
        model = ViT(variant("B/16", classes=0))
        ours = MAEObjective(model, MAE(), seed=0)
        pixels = torch.empty(1, 3, 224, 224)
        keep = torch.zeros(1, 49, dtype=torch.int64)
    count = FlopCounterMode(display=False)
    with count:
        tokens = model.place(model.patches(pixels), (14, 14))
        ours.decoder(encode_normalised(model, tokens, (14, 14), keep), keep, (14, 14))
    with FlopCounterMode(display=False) as whole:
        model(pixels)

    def layers(tokens: int, width: int, depth: int) -> int:
        return depth * (12 * tokens * width**2 + 2 * tokens**2 * width)

    stem = 196 * 768 * 768
    ends = 50 * 768 * 512 + 196 * 512 * 768
    expected = stem + layers(50, 768, 12) + ends + layers(197, 512, 8)
    assert count.get_total_flops() == pytest.approx(2 * expected, rel=0.01)
    assert count.get_total_flops() < 0.6 * whole.get_total_flops()


def test_a_perfect_prediction_paints_the_image() -> None:
    ours = MAEObjective(vit(), LIGHT, seed=0).eval()
    prepared = ours.prepare(batch(), step=0)
    seen = ours.show(prepared)
    assert torch.equal(seen["target"], prepared.images)
    ours.outputs = lambda p: (_perfect(ours, p), None)  # type: ignore[method-assign]
    error = (ours.show(prepared)["prediction"].int() - prepared.images.int()).abs().max()
    assert error <= 1  # rounding


def _perfect(ours: MAEObjective, prepared) -> torch.Tensor:  # type: ignore[no-untyped-def]
    pixels = ours.model.normalise(prepared.images)
    patches = pixels.reshape(4, 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(4, 16, -1)
    return (patches - patches.mean(-1, keepdim=True)) / patches.std(-1, keepdim=True)


def test_decoders_of_another_shape_are_refused() -> None:
    with pytest.raises(UsageError, match=r"objective\.ratio is 1"):
        MAEObjective(vit(), MAE(ratio=1.0), 0)
    ours, other = (
        MAEObjective(vit(), config, 0) for config in (LIGHT, MAE(decoder_width=8, decoder_depth=2, decoder_heads=2))
    )
    assert ours.load_decoder({}) == ["decoder: initialised randomly, because the pretrained weights have none"]
    theirs = {"decoder_embed.weight": other.decoder.embed.weight}
    with pytest.raises(WeightsError, match="lacks"):
        ours.load_decoder(theirs)
