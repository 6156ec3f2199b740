"""How people train any `nn.Module`, done with ours and with timm's network of the same weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from test_citizen import NAMES, close, images, layer, losses, ours, saved, theirs
from timm_peers import rebuilt
from torch import Tensor, nn

import vitrail
from vitrail.model.vit import ViT

__all__ = ["images", "ours", "saved", "theirs"]

OPTIMISERS: dict[str, Any] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "adamw, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4),
}


@pytest.mark.parametrize("kind", OPTIMISERS)
def test_a_loop_of_ones_own(ours: ViT, theirs: nn.Module, images: Tensor, kind: str) -> None:
    found, expected = (
        losses(model.train(), OPTIMISERS[kind](model.parameters()), images, steps=5) for model in (ours, theirs)
    )
    assert found == pytest.approx(expected, rel=2e-3) and found[-1] < found[0]


def test_a_loop_under_autocast(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    curves: list[list[float]] = []
    for model in (ours, theirs):
        optimizer, curve = torch.optim.SGD(model.train().parameters(), lr=1e-2), []
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(images), torch.arange(4))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=0.05, abs=0.05) and curves[0][-1] < curves[0][0]


def test_a_loop_in_bfloat16(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    found, expected = (
        losses(model.bfloat16(), torch.optim.SGD(model.parameters(), lr=1e-2), images.bfloat16(), steps=3)
        for model in (ours, theirs)
    )
    assert found == pytest.approx(expected, rel=0.05, abs=0.05) and found[-1] < found[0]


def test_clipped_and_accumulated_gradients(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    norms = []
    for model in (ours, theirs):
        for part, labels in zip(images.chunk(2), torch.arange(4).chunk(2), strict=True):
            (F.cross_entropy(model(part), labels) / 2).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        assert nn.utils.get_total_norm(p.grad for p in model.parameters()).item() == pytest.approx(0.1, rel=1e-3)  # type: ignore[misc]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    assert close(layer(ours, "head").weight.grad, layer(theirs, "head").weight.grad, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("trained", ["head", "blocks.0.attn.qkv", "blocks.1.mlp.fc2"])
def test_frozen_parameters(ours: ViT, theirs: nn.Module, images: Tensor, trained: str) -> None:
    for model in (ours, theirs):
        model.requires_grad_(False)
        layer(model, trained).requires_grad_(True)
        F.cross_entropy(model(images), torch.arange(4)).backward()
        assert sum(parameter.grad is not None for parameter in model.parameters()) == 2
    assert close(layer(ours, trained).weight.grad, layer(theirs, trained).weight.grad, 1e-3)  # type: ignore[arg-type]


def test_an_optimisers_state_is_resumed(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    curves = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=20)
        losses(model, optimizer, images, steps=2)
        schedule.step()
        other = copy.deepcopy(model)
        again = torch.optim.AdamW(other.parameters(), lr=1.0)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        curve = losses(model, optimizer, images)
        assert losses(other, again, images) == pytest.approx(curve, rel=1e-6)
        curves.append(curve)
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_lbfgs_with_a_closure(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    found = []
    for model in (ours, theirs):
        model.requires_grad_(False)
        head = layer(model, "head").requires_grad_(True)
        optimizer = torch.optim.LBFGS(head.parameters(), max_iter=5)

        def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), torch.arange(4))
            loss.backward()
            return loss

        optimizer.step(closure)
        found.append(closure().item())
    assert found[0] == pytest.approx(found[1], rel=1e-2)


def test_distillation(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    found = []
    for model in (ours, theirs):
        with torch.inference_mode():
            teacher = copy.deepcopy(model)(images * 1.1).softmax(-1)
        F.cross_entropy(model.train()(images), teacher.clone()).backward()
        found.append(layer(model, "blocks.0.attn.proj").weight.grad)
    assert close(*found, 1e-3)  # type: ignore[arg-type]


def test_adversarial_images(ours: ViT, theirs: nn.Module, images: Tensor) -> None:
    changed = []
    for model in (ours, theirs):
        batch = images.clone().requires_grad_()
        F.cross_entropy(model(batch), torch.arange(4)).backward()
        changed.append(batch.grad)
    assert close(*changed, 1e-3)  # type: ignore[arg-type]


# timm's optimisers: who is decayed, and how fast a layer learns


def groups_by_parameter(model: nn.Module, **settings: Any) -> dict[str, tuple[float, float]]:
    """timm's name of a parameter -> weight decay and factor of the learning rate."""
    from timm.optim import create_optimizer_v2

    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, **settings)
    return {
        names[parameter]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


OTHERS = {"cls": "cls_token", "positions.embedding": "pos_embed", "stem.weight": "patch_embed.proj.weight"}
"""Parameters that are no dense layers: our name -> timm's."""


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_timms_parameter_groups(ours: ViT, theirs: nn.Module, layer_decay: float | None) -> None:
    settings = dict(weight_decay=0.1, layer_decay=layer_decay)
    found, expected = groups_by_parameter(ours, **settings), groups_by_parameter(theirs, **settings)
    names = OTHERS | {f"{mine}.{part}": f"{peer}.{part}" for peer, mine in NAMES.items() for part in ("weight", "bias")}
    names |= {"norm.weight": "norm.weight", "blocks.1.mlps.0.norm.bias": "blocks.1.norm2.bias"}
    assert {peer: found[mine] for mine, peer in names.items()} == {peer: expected[peer] for peer in names.values()}
    assert found["cls"][0] == 0 and found["head.weight"] == (0.1, 1.0)


def test_timms_layer_decay_of_a_resnet() -> None:
    model = vitrail.create("R50x1", units=(1, 2), width=16, classes=5)
    found = groups_by_parameter(model, weight_decay=0.1, layer_decay=0.5)
    scales = ("root.weight", "stages.0.0.conv1.weight", "stages.1.1.conv1.weight", "norm.weight", "head.weight")
    assert [found[name][1] for name in scales] == [0.5**4, 0.5**3, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("layer_decay", [None, 0.7])
def test_timms_optimisers_learn_the_same(
    ours: ViT, theirs: nn.Module, images: Tensor, layer_decay: float | None
) -> None:
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    curves = []
    for model in (ours, theirs):
        optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1, layer_decay=layer_decay)
        CosineLRScheduler(optimizer, t_initial=10).step(0)  # it applies the factors of the groups
        curves.append(losses(model.train(), optimizer, images, steps=5))
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


# data, and the libraries that run a loop


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name in "abcd":
        (folder / name).mkdir()
        for number in range(4):
            Image.fromarray(rng.integers(0, 256, (40, 36, 3), dtype=np.uint8)).save(folder / name / f"{number}.png")
    return folder


def loader(photos: Path, **settings: Any) -> Any:
    """Batches of normalised images, as torchvision makes them."""
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    steps = [v2.ToImage(), v2.Resize((32, 32)), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    return torch.utils.data.DataLoader(ImageFolder(photos, v2.Compose(steps)), batch_size=8, **settings)


@pytest.mark.processes
def test_batches_of_an_image_folder(ours: ViT, theirs: nn.Module, photos: Path) -> None:
    curves: list[list[float]] = []
    for model in (ours, theirs):
        optimizer, curve = torch.optim.AdamW(model.parameters(), lr=1e-3), []
        for batch, labels in loader(photos, num_workers=1):
            loss = F.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        curves.append(curve)
    assert len(curves[0]) == 2 and curves[0] == pytest.approx(curves[1], rel=1e-3)


def test_accelerate(ours: ViT, theirs: nn.Module, photos: Path, tmp_path: Path) -> None:
    from accelerate import Accelerator

    curves: list[list[float]] = []
    for model in (ours, theirs):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        prepared, optimizer, data = accelerator.prepare(model, optimizer, loader(photos))
        curve = []
        for batch, labels in [*data, *data]:
            with accelerator.accumulate(prepared):
                loss = F.cross_entropy(prepared(batch), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                curve.append(loss.item())
        curves.append(curve)
        assert accelerator.unwrap_model(prepared) is model
    assert len(curves[0]) == 4 and curves[0] == pytest.approx(curves[1], rel=1e-3)


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
def test_accelerate_keeps_weights_elsewhere(
    ours: ViT, theirs: nn.Module, images: Tensor, tmp_path: Path, how: str
) -> None:
    """Each layer's weights are there only while its own `forward` runs."""
    import accelerate

    expected = theirs(images)
    if how == "cpu_offload":
        accelerate.cpu_offload(ours, execution_device="cpu")
    else:
        accelerate.disk_offload(ours, str(tmp_path), execution_device="cpu")
    assert ours.head.weight.is_meta  # type: ignore[union-attr]
    with torch.no_grad():
        assert close(ours(images), expected)


@pytest.mark.full_size
def test_accelerate_builds_without_memory(ours: ViT, images: Tensor, tmp_path: Path) -> None:
    import accelerate
    from safetensors.torch import save_file

    save_file(ours.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with accelerate.init_empty_weights():
        empty = ViT(ours.config)
    place = {"": "cpu"}
    filled = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path / "model.safetensors"), place).eval()
    assert torch.equal(filled(images), ours(images))


@pytest.mark.full_size
def test_lightning(ours: ViT, theirs: nn.Module, photos: Path, tmp_path: Path) -> None:
    import pytorch_lightning as lightning

    class Classifier(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.curve = model, []

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.curve.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    curves = []
    for name, model in (("ours", ours), ("theirs", theirs)):
        module = Classifier(model.train())
        quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, barebones=False)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", devices=1, enable_checkpointing=False, gradient_clip_val=1.0, **quiet
        )
        trainer.fit(module, loader(photos))
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        curves.append(module.curve)
        state = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)["state_dict"]
        assert len(state) == len(model.state_dict())
    assert len(curves[0]) == 4 and curves[0] == pytest.approx(curves[1], rel=1e-3)


# several processes


WAYS = ("ddp", "ddp, static graph", "fsdp2")


def _replicas(rank: int, saved: Path, out: Path) -> None:
    """Train both networks in each way for three steps on a half of the batch."""
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=2)
    torch.set_num_threads(1)
    for how in WAYS:
        torch.save(_replica(rank, saved, how), out / f"{how} {rank}.pt")
    dist.destroy_process_group()


def _replica(rank: int, saved: Path, how: str) -> list[tuple[list[float], Tensor]]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    batch = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))[2 * rank : 2 * rank + 2]
    labels = torch.arange(4)[2 * rank : 2 * rank + 2]
    found = []
    for model in (vitrail.load(saved), rebuilt(saved)):
        if how == "fsdp2":
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block)
            wrapped = fully_shard(model)
        else:
            static = how == "ddp, static graph"
            wrapped = DistributedDataParallel(model, static_graph=static, gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        curve = []
        for _ in range(3):
            loss = F.cross_entropy(wrapped(batch), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        weight = layer(model, "blocks.0.mlp.fc2").weight.detach()
        found.append((curve, weight.full_tensor() if isinstance(weight, DTensor) else weight))
    return found


@pytest.mark.processes
def test_two_processes(saved: Path, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_replicas, (saved, tmp_path), nprocs=2)  # once, because a process starts for seconds
    for how in WAYS:
        (mine, peers), (mine_too, _) = (torch.load(tmp_path / f"{how} {rank}.pt") for rank in (0, 1))
        assert mine[0] == pytest.approx(peers[0], rel=1e-3) and mine[0][-1] < mine[0][0], how
        assert close(mine[1], peers[1], 1e-3) and torch.equal(mine[1], mine_too[1]), how
