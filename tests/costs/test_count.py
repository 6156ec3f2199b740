"""Counting on the running network: what it returns for networks small enough to count by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitrail.costs.count import activation_bytes, every_token, kept_bytes, learned_values, macs
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig, variant


def test_a_dense_network_by_hand() -> None:
    network = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5), nn.Tanh())
    # the input, the ReLU's output (which the second layer reads too), the tanh's output; float32
    assert kept_bytes(lambda number: network(torch.empty(number, 10))) == 4 * (10 + 20 + 5)


def test_shared_memory_counts_once_and_the_batch_independent_part_not_at_all() -> None:
    weight = nn.Parameter(torch.ones(7))

    def forward(number: int) -> torch.Tensor:
        x = torch.ones(number, 7)
        return (x * weight + x.view(number, 7) * weight).exp() * (weight * weight).exp()

    # x; the first exp, which the product with the second keeps too
    assert kept_bytes(forward) == 4 * (7 + 7)


@pytest.mark.full_size
def test_counting_computes_nothing() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    config = variant("Ti/16", dropout=0.1, drop_path=0.1, classes=7)
    with torch.no_grad():
        found = activation_bytes(config, 64)  # autograd is needed for it, whatever the caller switched off
    assert found > 0 and macs(config) > 0 and learned_values(config) > 0
    assert torch.equal(torch.get_rng_state(), before)
    assert type(torch.ones(1)) is torch.Tensor and not torch.is_autocast_enabled("cuda")


def test_every_token_gives_the_models_own_logits() -> None:
    torch.manual_seed(0)
    model = build(ViTConfig(width=16, depth=2, heads=2, mlp_dim=32, patch=4, image_size=(8, 8), classes=3)).eval()
    nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(every_token(model, images), model(images))


def test_the_private_names_of_torch_that_counting_needs_exist() -> None:
    """A version of torch without them needs other ways to count in `costs/count.py`."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    with FakeTensorMode(allow_non_fake_inputs=True):
        assert torch.empty(2, device="cuda").device.type == "cuda"  # on a machine without a GPU, too
    assert issubclass(FakeTensorMode, TorchDispatchMode) and tree_leaves([1, [2]]) == [1, 2]
    assert torch.ones(1).untyped_storage()._cdata
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
