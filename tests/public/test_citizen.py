"""What people do with any `nn.Module`, done with ours and with timm's network of the same weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from timm_peers import hub, peer, rebuilt
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import vitrail
from vitrail.errors import UsageError
from vitrail.model.compute import attention_path, computed
from vitrail.model.vit import ViT

NAMES = {
    "blocks.0.attn.qkv": "blocks.0.attentions.0.attention.qkv",
    "blocks.0.attn.proj": "blocks.0.attentions.0.attention.out",
    "blocks.0.mlp.fc1": "blocks.0.mlps.0.mlp.fc1",
    "blocks.0.mlp.fc2": "blocks.0.mlps.0.mlp.fc2",
    "blocks.1.mlp.fc2": "blocks.1.mlps.0.mlp.fc2",
    "head": "head",
}
"""Dense layers: timm's name -> ours."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny network of timm's with random weights, as a file with its architecture beside it."""
    return hub(peer("plain"), tmp_path_factory.mktemp("timm"))


@pytest.fixture
def ours(saved: Path) -> ViT:
    model = vitrail.load(saved)
    assert isinstance(model, ViT)
    return model


@pytest.fixture
def theirs(saved: Path) -> nn.Module:
    return rebuilt(saved).eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def close(left: Tensor, right: Tensor, tolerance: float = 1e-4) -> bool:
    """Is the difference small beside the values?"""
    assert left.shape == right.shape
    return bool((left - right).norm() <= tolerance * right.norm())


def layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer with timm's name."""
    return model.get_submodule(NAMES[name] if isinstance(model, ViT) else name)


def set_layer(model: nn.Module, name: str, value: nn.Module) -> None:
    parent, _, child = (NAMES[name] if isinstance(model, ViT) else name).rpartition(".")
    setattr(model.get_submodule(parent), child, value)


def test_the_networks_are_equal(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    assert close(ours(images), theirs(images))
    with computed("definition"):
        assert close(ours(images), theirs(images))


# replaced and changed layers


class LowRank(nn.Module):
    """LoRA as one writes it by hand: the layer plus a product of two thin matrices."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        generator = torch.Generator().manual_seed(2)
        self.a = nn.Parameter(torch.randn(4, layer.in_features, generator=generator))  # type: ignore[arg-type]
        self.b = nn.Parameter(torch.randn(layer.out_features, 4, generator=generator))  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.a.T @ self.b.T


@pytest.mark.parametrize("name", NAMES)
def test_a_wrapper_around_a_dense_layer(ours: ViT, theirs: nn.Module, images: Tensor, name: str) -> None:
    before = ours(images)
    for model in (ours, theirs):
        set_layer(model, name, LowRank(layer(model, name)))
    assert not close(ours(images), before)
    assert close(ours(images), theirs(images))
    for model in (ours, theirs):
        model(images).square().sum().backward()
    assert close(layer(ours, name).a.grad, layer(theirs, name).a.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["parametrize", "weight_norm", "spectral_norm", "prune", "old weight_norm"])
@pytest.mark.parametrize("name", NAMES)
def test_changed_weights(ours: ViT, theirs: nn.Module, images: Tensor, name: str, way: str) -> None:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2 * weight

    ways: dict[str, Callable[[nn.Module], object]] = {
        "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Double()),
        "weight_norm": nn.utils.parametrizations.weight_norm,
        "spectral_norm": nn.utils.parametrizations.spectral_norm,
        "prune": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        "old weight_norm": nn.utils.weight_norm,
    }
    for model in (ours, theirs):
        torch.manual_seed(0)
        ways[way](layer(model, name))
        torch.manual_seed(0)
        model.train()
    assert close(ours(images), theirs(images))
    for model in (ours, theirs):
        model(images).square().sum().backward()
    found, expected = (
        {key: parameter.grad for key, parameter in layer(model, name).named_parameters()} for model in (ours, theirs)
    )
    assert found.keys() == expected.keys()
    assert all(close(found[key], expected[key], 1e-3) for key in expected)


@pytest.mark.parametrize("together", [False, True])
def test_peft_on_all_linear_layers(ours: ViT, theirs: nn.Module, images: Tensor, together: bool) -> None:
    before = ours(images)
    adapted = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        names = list(NAMES.values() if model is ours else NAMES)
        config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
        adapted.append(peft.get_peft_model(model, config))
        torch.manual_seed(1)
        for name, parameter in sorted(adapted[-1].named_parameters(), key=lambda pair: tuple(pair[1].shape)):
            assert parameter.requires_grad == ("lora" in name)
    mine, peers = adapted
    if together:
        mine, peers = mine.merge_and_unload(), peers.merge_and_unload()
    lora = {name: layer(ours, name) for name in NAMES}
    assert len(lora) == 6 and not close(mine(images), before)
    assert close(mine(images), peers(images), 1e-3)


# hooks


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "backward pre"])
def test_hooks_fire_on_every_module(ours: ViT, images: Tensor, kind: str) -> None:
    called: list[str] = []
    modules = dict(ours.named_modules())
    for name, module in modules.items():
        register = {
            "forward": module.register_forward_hook,
            "pre": module.register_forward_pre_hook,
            "backward": module.register_full_backward_hook,
            "backward pre": module.register_full_backward_pre_hook,
        }[kind]
        register(lambda *_, name=name: called.append(name))  # type: ignore[arg-type]
    ours(images.requires_grad_()).sum().backward()
    containers = {name for name, module in modules.items() if isinstance(module, nn.ModuleList)}
    silent = {"normalise", "stem.normalise"}  # for uint8 only
    assert set(called) == modules.keys() - containers - silent


def test_a_hook_may_change_an_output(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    for model in (ours, theirs):
        layer(model, "blocks.0.attn.qkv").register_forward_hook(lambda module, inputs, output: 3 * output)
        layer(model, "blocks.0.mlp.fc2").register_forward_hook(lambda module, inputs, output: output + 1)
    assert close(ours(images), theirs(images))


@pytest.mark.parametrize("inner", [False, True])
def test_a_hook_on_the_last_block_sees_all_tokens(ours: ViT, theirs: nn.Module, images: Tensor, inner: bool) -> None:
    seen: list[Tensor] = []
    for model, name in ((ours, "mlps.0.mlp" if inner else ""), (theirs, "mlp" if inner else "")):
        target = model.blocks[-1].get_submodule(name)  # type: ignore[union-attr, operator]
        target.register_forward_hook(lambda module, inputs, output: seen.append(output))
        model(images)
    assert seen[0].shape == (4, 17, 32) and close(*seen)


# derivatives of derivatives


@pytest.mark.parametrize("path", ["explicit", "math"])
def test_second_derivatives(ours: ViT, theirs: nn.Module, images: Tensor, path: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    found = []
    for model in (ours, theirs):
        inputs = images.clone().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH), attention_path("explicit" if path == "explicit" else "fused"):
            (first,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
            parameters = dict(model.named_parameters())
            penalty = first.square().sum()
            found.append(torch.autograd.grad(penalty, [inputs, layer(model, "blocks.0.mlp.fc1").weight]))  # type: ignore[list-item]
        assert parameters
    assert all(close(*pair, 1e-3) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "jacrev", "hessian"])
def test_transforms_of_torch_func(ours: ViT, theirs: nn.Module, images: Tensor, transform: str) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def result(model: nn.Module) -> Tensor:
        parameters = dict(model.named_parameters())

        def loss(image: Tensor) -> Tensor:
            return torch.func.functional_call(model, parameters, (image[None],)).square().sum()

        if transform == "grad":
            return torch.func.grad(loss)(images[0])
        if transform == "vmap":
            return torch.func.vmap(torch.func.grad(loss))(images)
        if transform == "jvp":
            return torch.func.jvp(loss, (images[0],), (images[1],))[1]
        if transform == "jacrev":
            return torch.func.jacrev(lambda image: model(image[None])[0])(images[0])
        direction = lambda step: loss(images[0] + step * images[1])  # noqa: E731
        return torch.func.hessian(direction)(torch.tensor(0.1))

    with sdpa_kernel(SDPBackend.MATH):
        assert close(result(ours), result(theirs), 1e-3)


# counted, traced, exported and compiled


@pytest.mark.parametrize("training", [True, False])
def test_flops_are_counted(ours: ViT, theirs: nn.Module, images: Tensor, training: bool) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for model in (ours, theirs):
        # the explicit path multiplies zeros, too
        with attention_path("fused"), torch.set_grad_enabled(training), FlopCounterMode(display=False) as counter:
            logits = model(images)
            if training:
                logits.sum().backward()
        counts.append(counter.get_total_flops())
    # ours computes the last layer's queries, output and MLP for the class token alone
    tokens, width, hidden = 17, 32, 64
    skipped = 2 * 4 * (tokens - 1) * (2 * width * width + 2 * width * hidden)
    assert counts[0] >= counts[1] - 4 * skipped and counts[0] <= counts[1]


def test_dynamic_quantisation(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    if not torch.backends.quantized.supported_engines:
        pytest.skip("this build of torch has no engine for quantised layers")
    found = []
    for model in (ours, theirs):
        small = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
        replaced = [m for m in small.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)]
        found.append((len(replaced), small(images)))
    assert found[0][0] == found[1][0] == 9
    assert close(found[0][1], found[1][1], 0.05)


def test_torchao_quantisation(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    from torchao import quantization

    found = []
    for model in (ours, theirs):
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
        found.append(model(images))
    assert close(*found, 0.02)


@pytest.mark.parametrize("size", [(32, 32), (48, 40)])
def test_jit_trace(ours: ViT, images: Tensor, size: tuple[int, int]) -> None:
    traced = torch.jit.trace(ours, images)
    stream = io.BytesIO()
    torch.jit.save(traced, stream)
    stream.seek(0)
    again = torch.jit.load(stream)
    assert close(again(images), ours(images))
    if size != (32, 32):  # positions are resampled within the trace, too
        other = torch.randn(2, 3, *size)
        assert close(again(other), ours(other))


@pytest.mark.export
def test_the_older_onnx_exporter(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    import onnxruntime

    stream = io.BytesIO()
    axes = {"images": {0: "batch"}}
    torch.onnx.export(ours, (images,), stream, dynamo=False, input_names=["images"], dynamic_axes=axes)
    session = onnxruntime.InferenceSession(stream.getvalue())
    for batch in (images, images[:3]):
        assert close(torch.from_numpy(session.run(None, {"images": batch.numpy()})[0]), theirs(batch))


def test_tracers_that_cannot_follow_say_what_can(ours: ViT, images: Tensor) -> None:
    with pytest.raises(UsageError, match=r"torch\.export\.export\(model, \(images,\)\).*model\.intermediate\("):
        torch.fx.symbolic_trace(ours)  # as torchvision's create_feature_extractor does
    for module in (ours, nn.Sequential(ours)):
        with pytest.raises(UsageError, match=r"torch\.jit\.trace\(model, images\)"):
            torch.jit.script(module)
    scripted = torch.jit.script(nn.Sequential(torch.jit.trace(ours, images)))
    assert close(scripted(images[:2]), ours(images[:2]))


@pytest.mark.full_size
def test_export_with_any_size(ours: ViT, images: Tensor) -> None:
    from torch.export import Dim

    shapes = {0: Dim("batch"), 2: 8 * Dim("rows", min=2, max=12), 3: 8 * Dim("columns", min=2, max=12)}
    program = torch.export.export(ours, (torch.randn(2, 3, 48, 40),), dynamic_shapes=(shapes,))
    for size in ((48, 40), (32, 32), (64, 24)):
        batch = torch.randn(3, 3, *size)
        assert close(program.module()(batch), ours(batch))


@pytest.mark.export
def test_compile(ours: ViT, images: Tensor) -> None:
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert close(compiled(images), ours(images))
    compiled(images).sum().backward()


# copied, stored and built


def test_copies_and_pickles(ours: ViT, images: Tensor) -> None:
    expected = ours(images)
    assert torch.equal(copy.deepcopy(ours)(images), expected)
    assert torch.equal(pickle.loads(pickle.dumps(ours))(images), expected)


@pytest.mark.parametrize("assign", [False, True])
def test_built_without_memory(ours: ViT, images: Tensor, assign: bool) -> None:
    pixels = images.mul(40).add(128).clamp(0, 255).to(torch.uint8)
    with torch.device("meta"):
        empty = type(ours)(ours.config)
    if not assign:
        empty.to_empty(device="cpu")
    empty.load_state_dict(ours.state_dict(), assign=assign)
    assert torch.equal(empty.eval()(pixels), ours(pixels))
    assert torch.equal(empty(images), ours(images))


def test_built_without_initial_values(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    empty = nn.utils.skip_init(type(ours), ours.config)
    assert all(tensor.device.type == "cpu" for tensor in (*empty.parameters(), *empty.buffers()))
    empty.load_state_dict(ours.state_dict())
    assert close(empty.eval()(images), theirs(images))
    assert all(each.is_meta for each in type(ours)(ours.config, device="meta").parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(ours: ViT, theirs: nn.Module, images: Tensor, dtype: torch.dtype) -> None:
    mine, peers = ours.to(dtype)(images.to(dtype)), theirs.to(dtype)(images.to(dtype))
    assert mine.dtype == dtype and close(mine.double(), peers.double(), 0.05 if dtype != torch.float64 else 1e-9)


def test_autocast(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert close(ours(images).float(), theirs(images).float(), 0.05)


# trained


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, steps: int = 3) -> list[float]:
    """Train for a few steps with a loop of one's own."""
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), torch.arange(4))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", ["adamw", "lamb"])
def test_optimisers_of_timm(ours: ViT, theirs: nn.Module, images: Tensor, kind: str) -> None:
    from timm.optim import create_optimizer_v2

    found, expected = (
        losses(model.train(), create_optimizer_v2(model, kind, lr=1e-3, weight_decay=0.0), images)
        for model in (ours, theirs)
    )
    assert found == pytest.approx(expected, rel=1e-3) and found[-1] < found[0]


def test_averaged_weights(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    found = []
    for model in (ours, theirs):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(3):
            losses(model, optimizer, images, steps=1)
            average.update_parameters(model)
        found.append(average(images))
    assert close(*found, 1e-3)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ours: ViT, theirs: nn.Module, images: Tensor, reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    inputs = images.requires_grad_()
    gradients = []
    for model in (ours, theirs):
        out = checkpoint(model, inputs, use_reentrant=reentrant)
        gradients.append(torch.autograd.grad(out.sum(), inputs)[0] if not reentrant else None)
        if reentrant:
            inputs.grad = None
            out.sum().backward()
            gradients[-1] = inputs.grad
    assert close(*gradients)  # type: ignore[arg-type]


# replaced modules


class Doubled(nn.Module):
    """A wrapper that hides its module's type."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return 2 * self.inner(*args, **kwargs)


class Mixed(nn.Module):
    """An MLP of somebody else's that mixes tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(1) + x.mean(1, keepdim=True)


PARTS = {
    "attention": ("attentions.0.attention", "attn"),
    "mlp": ("mlps.0.mlp", "mlp"),
    "act": ("mlps.0.mlp.act", "mlp.act"),
    "norm": ("mlps.0.norm", "norm2"),
}
"""Part of a block: our name, timm's."""

SURGERY: dict[str, tuple[str, Callable[[nn.Module], nn.Module]]] = {
    "wrapped attention": ("attention", Doubled),
    "other activation": ("act", lambda old: nn.ReLU()),
    "GELU with tanh": ("act", lambda old: nn.GELU(approximate="tanh")),
    "no norm": ("norm", lambda old: nn.Identity()),
    "RMSNorm": ("norm", lambda old: nn.RMSNorm(32)),
    "wrapped MLP": ("mlp", Doubled),
    "MLP that mixes tokens": ("mlp", lambda old: Mixed()),
}


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("what", SURGERY)
def test_a_part_of_a_block_is_replaced(ours: ViT, theirs: nn.Module, images: Tensor, what: str, block: int) -> None:
    before = ours(images)
    part, change = SURGERY[what]
    for model, name in zip((ours, theirs), PARTS[part], strict=True):
        parent, _, child = f"blocks.{block}.{name}".rpartition(".")
        place = model.get_submodule(parent)
        setattr(place, child, change(getattr(place, child)))
    assert not close(ours(images), before, 1e-5)
    assert close(ours(images), theirs(images))
    assert close(vitrail.freeze(ours)(images), theirs(images))


@pytest.mark.parametrize("how", ["fewer", "more", "identity", "wrapped", "own"])
def test_blocks_are_removed_added_and_replaced(ours: ViT, theirs: nn.Module, images: Tensor, how: str) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 + x.mean(1, keepdim=True)

    for model in (ours, theirs):
        blocks = model.blocks
        if how == "fewer":
            model.blocks = type(blocks)(*blocks[:1]) if isinstance(blocks, nn.Sequential) else blocks[:1]
        elif how == "more":
            blocks.append(copy.deepcopy(blocks[0]))  # type: ignore[union-attr, operator]
        else:
            blocks[1] = {"identity": nn.Identity(), "wrapped": Doubled(blocks[1]), "own": Own()}[how]  # type: ignore
    assert close(ours(images), theirs(images))


def test_a_stem_of_another_kind(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 32, 8, 8)
    ours.stem, theirs.patch_embed.proj = stem, stem  # type: ignore[assignment, union-attr]
    assert close(ours(images), theirs(images))


def test_a_head_of_ones_own(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 3))
    ours.head, theirs.head = head, head  # type: ignore[assignment]
    assert ours(images).shape == (4, 3) and close(ours(images), theirs(images))


def test_tied_weights(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    for model in (ours, theirs):
        layer(model, "blocks.1.mlp.fc2").weight = layer(model, "blocks.0.mlp.fc2").weight
        model(images).square().sum().backward()
    grads = [layer(model, "blocks.0.mlp.fc2").weight.grad for model in (ours, theirs)]
    assert close(*grads, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["blocks.0.attn.qkv", "blocks.1.mlp.fc2", "head"])
def test_a_replaced_forward(ours: ViT, theirs: nn.Module, images: Tensor, name: str) -> None:
    for model in (ours, theirs):
        target = layer(model, name)
        target.forward = lambda x, old=target.forward: old(x) * 2 + 1  # type: ignore[method-assign]
    assert close(ours(images), theirs(images))


# more hooks


def test_hooks_that_change_inputs_with_keywords_and_for_all_modules(
    ours: ViT, theirs: nn.Module, images: Tensor
) -> None:
    counted: list[int] = []
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, inputs, output: counted.append(1) if isinstance(module, nn.Linear) else None
    )
    found = []
    try:
        for model in (ours, theirs):
            counted.clear()
            fc1 = layer(model, "blocks.0.mlp.fc1")
            fc1.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
            layer(model, "head").register_forward_hook(
                lambda module, args, kwargs, output: output + len(kwargs) + 1, with_kwargs=True
            )
            found.append((model(images), len(counted)))
    finally:
        everywhere.remove()
    assert found[0][1] == found[1][1] == 9 and close(found[0][0], found[1][0])


def test_hooks_on_parameters(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    """An optimiser inside of the backward pass: each parameter steps when its gradient is complete."""
    for model in (ours, theirs):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: 0.5 * grad)

            def step(parameter: Tensor) -> None:
                parameter.data -= 1e-3 * parameter.grad  # type: ignore[operator]
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(step)
        model(images).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert close(ours(images), theirs(images), 1e-3)


def test_macs_counted_by_hooks_as_torchinfo_and_fvcore_do(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    counts = []
    for model in (ours, theirs):
        macs: list[int] = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(
                    lambda module, inputs, output: macs.append(output.numel() * module.in_features)  # noqa: B023
                )
        model(images)
        counts.append(sum(macs))
    assert counts[0] == counts[1] > 0
    sizes = [sum(parameter.numel() for parameter in model.parameters()) for model in (ours, theirs)]
    assert sizes[0] == sizes[1]


# states


def test_parameters_come_in_the_order_of_the_network(ours: ViT, theirs: nn.Module, tmp_path: Path) -> None:
    order = [name for name, _ in ours.named_parameters()]
    vitrail.save(ours, tmp_path / "model")
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), vitrail.load(tmp_path / "model")):
        assert [name for name, _ in other.named_parameters()] == order
    mine, peers = ([p.shape for p in model.blocks.parameters()] for model in (ours, theirs))  # type: ignore[union-attr]
    assert mine == peers


def test_states_with_prefixes_and_hooks(ours: ViT, images: Tensor) -> None:
    wrapped = nn.ModuleDict({"net": copy.deepcopy(ours), "other": nn.Linear(2, 2)})
    state = wrapped.state_dict()
    state = {key.removeprefix("net."): value for key, value in state.items() if key.startswith("net.")}
    ddp = {f"module.{key}": value for key, value in state.items()}
    nn.modules.utils.consume_prefix_in_state_dict_if_present(ddp, "module.")
    other = ViT(ours.config).eval()
    seen: list[str] = []

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
        seen.append(prefix)
        for key in [key for key in state if key.startswith("old.")]:
            state[key.removeprefix("old.")] = state.pop(key)

    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict({f"old.{key}": value for key, value in ddp.items()})
    assert seen == [""] and torch.equal(other(images), ours(images))

    def without_bias(module: nn.Module, state: dict[str, Tensor], prefix: str, meta: object) -> None:
        del state[f"{prefix}head.bias"]

    other.register_state_dict_post_hook(without_bias)
    assert state.keys() - other.state_dict().keys() == {"head.bias"}
    found = other.load_state_dict({"head.weight": state["head.weight"], "old.extra": state["cls"]}, strict=False)
    assert found.unexpected_keys == ["extra"] and "cls" in found.missing_keys


def test_safetensors_and_torch_save(ours: ViT, images: Tensor, tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_model

    save_model(ours, str(tmp_path / "model.safetensors"))
    torch.save(ours.state_dict(), tmp_path / "state.pt")
    torch.save(ours, tmp_path / "whole.pt")
    first, second = ViT(ours.config).eval(), ViT(ours.config).eval()
    load_model(first, str(tmp_path / "model.safetensors"))
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    for model in (first, second, whole):
        assert torch.equal(model(images), ours(images))


def test_global_pruning_and_its_removal(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    for model in (ours, theirs):
        layers = [(layer(model, name), "weight") for name in NAMES]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.3)
        for pruned, name in layers:
            prune.remove(pruned, name)
    assert close(ours(images), theirs(images))


def test_vectors_of_parameters_and_apply(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    def smaller(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.mul_(0.5)

    for model in (ours, theirs):
        vector_to_parameters(0.9 * parameters_to_vector(model.parameters()), model.parameters())
        model.apply(smaller)
    assert close(ours(images), theirs(images))


def test_channels_last(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    batch = images.to(memory_format=torch.channels_last)
    for model in (ours, theirs):
        model.to(memory_format=torch.channels_last)
    assert close(ours(batch), theirs(batch))
    for model in (ours, theirs):
        model(batch).square().sum().backward()
    assert close(layer(ours, "head").weight.grad, layer(theirs, "head").weight.grad)  # type: ignore[arg-type]


def test_ensembles_by_vmap(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    found = []
    for model in (ours, theirs):
        members = [copy.deepcopy(model) for _ in range(3)]
        for number, member in enumerate(members):
            for parameter in member.parameters():
                parameter.data *= 1 - 0.1 * number
        parameters, buffers = torch.func.stack_module_state(members)  # type: ignore[arg-type]

        def one(parameters: dict, buffers: dict, batch: Tensor, model: nn.Module = model) -> Tensor:
            return torch.func.functional_call(model, (parameters, buffers), (batch,))

        together = torch.func.vmap(one, in_dims=(0, 0, None))(parameters, buffers, images)
        assert close(together, torch.stack([member(images) for member in members]))
        found.append(together)
    assert close(*found)


def test_gradients_of_each_image(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    """Gradients of parameters for each image, as differential privacy needs them."""
    found = []
    for model in (ours, theirs):
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters: dict, image: Tensor, label: Tensor, model: nn.Module = model) -> Tensor:
            logits = torch.func.functional_call(model, parameters, (image[None],))
            return F.cross_entropy(logits, label[None])

        grads = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, images, torch.arange(4))
        found.append(grads[(NAMES["blocks.0.mlp.fc2"] if model is ours else "blocks.0.mlp.fc2") + ".weight"])
    assert found[0].shape == (4, 32, 64) and close(*found, 1e-3)


def test_gradients_are_those_of_differences(ours: ViT, images: Tensor) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model = ours.double()
    batch = images[:1, :, :16, :16].double().requires_grad_()
    assert torch.autograd.gradcheck(model, (batch,), fast_mode=True)
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention, chosen on AMX processors, has first derivatives only
        assert torch.autograd.gradgradcheck(model, (batch,), fast_mode=True)


def test_saved_tensors_go_to_the_cpu(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    for model in (ours, theirs):
        with torch.autograd.graph.save_on_cpu(), torch.autograd.set_detect_anomaly(True):
            model(images).square().sum().backward()
    assert close(layer(ours, "blocks.0.attn.qkv").weight.grad, layer(theirs, "blocks.0.attn.qkv").weight.grad)  # type: ignore


@pytest.mark.export
def test_compiled_gradients(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    for model, call in ((ours, torch.compile(ours, backend="aot_eager", fullgraph=True)), (theirs, theirs)):
        F.cross_entropy(call(images), torch.arange(4)).backward()
        assert layer(model, "head").weight.grad is not None
    assert close(layer(ours, "blocks.0.mlp.fc1").weight.grad, layer(theirs, "blocks.0.mlp.fc1").weight.grad, 1e-3)  # type: ignore


# explained


def test_captums_integrated_gradients(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    from captum import attr

    found = [attr.IntegratedGradients(model).attribute(images, target=1, n_steps=8) for model in (ours, theirs)]
    assert close(*found, 1e-3)


def test_captums_layer_gradients(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    from captum import attr

    found = [
        attr.LayerGradientXActivation(model, layer(model, "blocks.0.mlp.fc2")).attribute(images, target=1)
        for model in (ours, theirs)
    ]
    assert close(*found, 1e-3)


def test_grad_cam(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    import pytorch_grad_cam as cam
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    def on_grid(tokens: Tensor) -> Tensor:
        return tokens[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)

    pictures = []
    for model, norm in ((ours, ours.blocks[-1].attentions[0].norm), (theirs, theirs.blocks[-1].norm1)):  # type: ignore
        with cam.GradCAM(model=model, target_layers=[norm], reshape_transform=on_grid) as method:
            pictures.append(torch.tensor(method(input_tensor=images, targets=[ClassifierOutputTarget(1)] * 4)))
    assert pictures[1].any() and close(*pictures, 1e-3)
