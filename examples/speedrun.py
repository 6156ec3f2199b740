"""Train a Vision Transformer in ten minutes on a CPU: `python speedrun.py cifar100/`. Explained in docs/speedrun.md."""

import argparse
import os
import tempfile
import time
from multiprocessing.pool import ThreadPool

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchvision.transforms.v2.functional import resize

from vitrail.data.images.decode import decode
from vitrail.data.item import IndexedSource
from vitrail.data.settings import Data
from vitrail.data.sources.open import open_data
from vitrail.device import fast_bf16
from vitrail.training.optim.rules import Muon

WIDTH, DEPTH, HEADS = 128, 4, 2
BATCH, MICRO_BATCH, DECAY, SMOOTHING, WARMUP = 256, 128, 0.05, 0.1, 0.05
RATES = {True: 0.0085, False: 0.021}  # Muon's and AdamW's
GROWTH = ((0.3, 0.5), (0.6, 0.75), (1.0, 1.0))  # until this part of the training, this part of an image's side
FOR_TEST = 0.03  # part of the time that is kept for the test images


def matrix(inputs: int, outputs: int, gain: float = 1.0) -> nn.Parameter:
    """Return weights [outputs, inputs], which multiply the length of what they transform by about `gain`."""
    return nn.Parameter(torch.randn(outputs, inputs) * gain * inputs**-0.5)


class Convolution(nn.Module):
    """A 3x3 convolution of [B, rows, columns, C] with batch norm and GELU. Its kernel is a matrix, for Muon."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inputs, self.stride = inputs, stride
        self.kernel, self.norm = matrix(9 * inputs, outputs, gain=2**0.5), nn.BatchNorm2d(outputs, momentum=0.3)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        kernel = self.kernel.view(-1, self.inputs, 3, 3).contiguous(memory_format=torch.channels_last)
        x = F.conv2d(x.permute(0, 3, 1, 2), kernel, stride=self.stride, padding=1)
        return F.gelu(self.norm(x)).permute(0, 2, 3, 1)


class Block(nn.Module):
    """Self-attention over all patches, then an MLP with a depthwise 3x3 convolution. Both begin by adding nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = matrix(WIDTH, 3 * WIDTH), matrix(WIDTH, WIDTH, gain=0)
        self.up, self.down = matrix(WIDTH, 2 * WIDTH), matrix(2 * WIDTH, WIDTH, gain=0)
        self.near = nn.Parameter(torch.zeros(2 * WIDTH, 1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        batch, rows, columns, _ = x.shape
        qkv = F.linear(F.layer_norm(x, (WIDTH,)), self.qkv).view(batch, rows * columns, 3, HEADS, -1)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        weights = (queries @ keys.mT * queries.shape[-1] ** -0.5).softmax(-1)  # torch's own form has a slow gradient
        attended = weights.to(values.dtype) @ values
        x = x + F.linear(attended.transpose(1, 2).reshape(x.shape), self.out)
        hidden = F.linear(F.layer_norm(x, (WIDTH,)), self.up)
        around = F.conv2d(hidden.permute(0, 3, 1, 2), self.near, padding=1, groups=len(self.near))
        return x + F.linear(F.gelu(hidden + around.permute(0, 2, 3, 1)), self.down)


class Network(nn.Module):
    """Pixels [B, rows, columns, 3] to logits. Three convolutions make a patch of each 4x4 pixels for the blocks."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        stem = Convolution(3, WIDTH // 4, 1), Convolution(WIDTH // 4, WIDTH // 2, 2), Convolution(WIDTH // 2, WIDTH, 2)
        self.body = nn.Sequential(*stem, *(Block() for _ in range(DEPTH)))
        self.head, self.bias = matrix(WIDTH, classes, gain=0), nn.Parameter(torch.zeros(classes))

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        with torch.autocast("cpu", torch.bfloat16, enabled=fast_bf16(images.device)):
            x = self.body((images - 128) / 64)
        return F.linear(F.layer_norm(x.float(), (WIDTH,)).mean((1, 2)), self.head, self.bias)


def optimiser(network: Network) -> Muon:
    """Return Muon for the matrices of the stem and the blocks (query, key and value are three), AdamW for the rest."""
    parts: dict[int, list[nn.Parameter]] = {0: [], 1: [], 3: []}
    for name, weights in network.named_parameters():
        parts[0 if weights.ndim != 2 or name == "head" else 3 if name.endswith("qkv") else 1].append(weights)
    return Muon([{"params": found, "parts": n, "weight_decay": DECAY if n else 0.0} for n, found in parts.items()])


def read(source: IndexedSource, size: int) -> tuple[Tensor, Tensor]:
    """Return all images of a split, uint8 [N, size, size, 3], and their labels, int64 [N]."""

    def pixels(index: int) -> Tensor:
        stored = source[index].image
        image = torch.from_numpy(decode(stored) if isinstance(stored, bytes) else stored)
        return resize(image.permute(2, 0, 1), [size, size]).permute(1, 2, 0)

    with ThreadPool(os.cpu_count()) as pool:
        return torch.stack(pool.map(pixels, range(len(source)))), torch.as_tensor(source.labels)


def views(padded: Tensor, index: Tensor, size: int, side: int) -> Tensor:
    """Return random crops of padded images, half of them mirrored, as [len(index), side, side, 3]."""
    top, left = torch.randint(padded.shape[1] - size + 1, (2, len(index), 1))
    along = torch.arange(size)
    across = torch.where(torch.rand(len(index), 1) < 0.5, along, size - 1 - along)
    crops = padded[index[:, None, None], (top + along)[:, :, None], (left + across)[:, None]].permute(0, 3, 1, 2)
    return F.interpolate(crops.float(), (side, side), mode="area").permute(0, 2, 3, 1)


def learn(network: Network, images: Tensor, labels: Tensor, options: argparse.Namespace) -> None:
    """Train until the time is over, in step with the other processes: each takes its share of every batch."""
    rank, processes, size = dist.get_rank(), dist.get_world_size(), images.shape[1]
    padded = F.pad(images.permute(0, 3, 1, 2), [size // 8] * 4, "reflect").permute(0, 2, 3, 1).contiguous()
    rule, weights = optimiser(network), list(network.parameters())
    order = torch.Generator().manual_seed(options.seed)  # the same batches in all processes, but other crops
    torch.manual_seed(options.seed + 1000 * (rank + 1))
    waiting, done, step = torch.arange(0), torch.zeros(1), 0
    while done < 1:
        while len(waiting) < BATCH:
            waiting = torch.cat([waiting, torch.randperm(len(labels), generator=order)])
        parts, waiting = waiting[:BATCH][rank::processes].split(MICRO_BATCH), waiting[BATCH:]
        side = next(int(size * part) // 4 * 4 for until, part in GROWTH if done < until)
        for group in rule.param_groups:
            group["lr"] = RATES[group["parts"] > 0] * min(float(done) / WARMUP, 1) * (1 - float(done)) + 1e-9
        for part in parts:
            logits = network(views(padded, part, size, side))
            loss = F.cross_entropy(logits, labels[part], label_smoothing=SMOOTHING)
            (loss * len(part) / BATCH).backward()
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        joined = parameters_to_vector(gradients)
        dist.all_reduce(joined)
        vector_to_parameters(joined, gradients)
        rule.step()
        rule.zero_grad()
        step += 1
        spent = (time.time() - options.started) / (60 * options.minutes * (1 - FOR_TEST))
        done.fill_(step * BATCH / len(labels) / options.epochs if options.epochs else spent)
        dist.broadcast(done, 0)
        if rank == 0 and step % 50 == 0:
            print(f"{float(done):4.0%}  {step} steps  {side} px  loss {float(loss):.2f}", flush=True)


def accuracy(network: Network, images: Tensor, labels: Tensor) -> list[float]:
    """Return the percentage of images that are right, alone and together with their mirror images."""
    right = torch.zeros(2)
    for part in torch.arange(dist.get_rank(), len(labels), dist.get_world_size()).split(MICRO_BATCH):
        alone, mirrored = (network(x.float()).softmax(1) for x in (images[part], images[part].flip(2)))
        right += torch.stack([(p.argmax(1) == labels[part]).sum() for p in (alone, alone + mirrored)])
    dist.all_reduce(right)
    return (100 * right / len(labels)).tolist()


def run(rank: int, store: str, options: argparse.Namespace, *splits: tuple[Tensor, Tensor]) -> None:
    """Train and measure as one of the processes. Each has one thread."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.processes)
    torch.manual_seed(options.seed)
    (images, labels), (test_images, test_labels) = splits
    network = Network(int(labels.max()) + 1)
    learn(network, images, labels, options)
    with torch.inference_mode():
        alone, both = accuracy(network.eval(), test_images, test_labels)
    if rank == 0:
        size, minutes = len(parameters_to_vector(network.parameters())), (time.time() - options.started) / 60
        print(f"{alone:.2f} % of {len(test_labels):,} images ({both:.2f} % with their mirror images)")
        print(f"{size:,} parameters, {minutes:.1f} minutes")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="images in any layout that vitrail reads")
    parser.add_argument("--minutes", type=float, default=10, help="from start to end")
    parser.add_argument("--epochs", type=float, help="passes over the training images, in place of minutes")
    parser.add_argument("--size", type=int, default=32, help="side of the images in pixels")
    parser.add_argument("--holdout", type=float, default=0, help="test on this part of the training images instead")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(namespace=argparse.Namespace(started=time.time()))
    found = open_data(Data(options.data, holdout=options.holdout))
    test = found.validation if options.holdout else found.test
    if test is None:
        parser.error(f"{options.data} has no test images: hold some out, as with --holdout 0.1")
    splits = read(found.train, options.size), read(test, options.size)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run, (f"{folder}/store", options, *splits), options.processes)
