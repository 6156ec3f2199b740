"""`vitrail weights convert | info | verify | push`: convert, describe, verify and publish weights of any format."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vitrail.errors import UsageError, WeightsError
from vitrail.ranges import Count, checked
from vitrail.terminal import page, table
from vitrail.words import one_line

if TYPE_CHECKING:
    from vitrail.weights.assemble import LoadReport
    from vitrail.weights.card import Card
    from vitrail.weights.save import Saved
    from vitrail.weights.verify import Verification

FormatName = Literal["vitrail", "google", "big_vision", "bit", "timm", "hf", "torchvision", "deit", "open_clip"]
SHOWN = 10
"""Maximum number of class names shown on a terminal; --json has all of them."""


@one_line
@dataclass(frozen=True)
class Converted:
    """Result of a conversion: the report of loading, and what was saved."""

    report: LoadReport
    saved: Saved


@dataclass(frozen=True)
class Tensor:
    """One row of the table of tensors: name, shape and a summary of the values."""

    name: str
    shape: tuple[int, ...]
    mean: float
    std: float
    largest: float
    """Largest absolute value."""


@one_line
@dataclass(frozen=True)
class Info:
    """Description of weights: architecture, card, load report and, on request, all tensors."""

    report: LoadReport
    architecture: str
    parameters: int
    card: Card
    tensors: list[Tensor] = field(default_factory=list)


@one_line
@dataclass(frozen=True)
class Pushed:
    """The files uploaded to the hub, or written into a folder, and their address; `url` is None for a dry run."""

    repository: str
    files: dict[str, int]
    readme: str
    url: str | None = None


@checked
def convert(
    source: str | Path,
    target: str | Path,
    *,
    format: FormatName = "vitrail",
    branches: Count | None = None,
    overwrite: bool = False,
) -> Converted:
    """Write weights in another library's format, if that format can express them.

    The written weights are read again, and their outputs must be the same.

    Args:
        source: A run, a model folder, a weight file of any known library, or a name on the hub.
        target: The folder (vitrail, hf, timm) or file to write.
        format: Format to write.
        branches: Regroup the encoder's blocks into this number of parallel branches (1 restores the sequential
            network) without changing any weight (`vitrail.regroup`). The function changes, so measured accuracies
            are not copied.
        overwrite: Replace an existing file or folder.
    """
    from vitrail.weights.load import load
    from vitrail.weights.save import save

    model: Any = load(source)
    report = model.load_report
    if branches is not None:
        model = _regrouped(model, branches)
    return Converted(report, save(model, target, format, overwrite=overwrite))


@checked
def info(source: str | Path, *, tensors: bool = False) -> Info:
    """Describe weights: architecture, parameters, preprocessing, classes, origin, and how loading converts them.

    Args:
        source: A run, a model folder, a weight file of any known library, or a name on the hub.
        tensors: List every tensor, too, with its shape and a summary of its values.
    """
    from vitrail.weights.card import architecture, parameters
    from vitrail.weights.load import load

    model: Any = load(source)
    rows = [_row(name, tensor) for name, tensor in model.state_dict().items()] if tensors else []
    return Info(model.load_report, architecture(model.config), parameters(model), model.card, rows)


@checked
def verify(source: str | Path) -> Verification:
    """Run a fixed image through weights, and compare with the outputs on their card and with their own library.

    The library (timm, transformers, torchvision) runs the same weights if it is installed. The error of each layer is
    the largest difference relative to the layer's largest value. The exit code is 1 if an error is too large.

    Args:
        source: A run, a model folder, a weight file of any known library, or a name on the hub.
    """
    from vitrail.weights.verify import verify

    found = verify(source)
    if found.compared and not found.passed:
        raise WeightsError(f"{found.path} does not compute the expected outputs\n{_verified(found)}")
    return found


@checked
def push(
    source: str | Path,
    repository: str,
    *,
    format: Literal["vitrail", "hf", "timm"] = "vitrail",
    licence: str | None = None,
    private: bool = False,
    dry_run: bool = False,
) -> Pushed:
    """Upload weights to the hub, with a model card: results, base model, preprocessing, class names, licence.

    Args:
        source: A run, a model folder, a weight file of any known library, or a name on the hub.
        repository: Repository owner/name. It is created if it does not exist. A path that starts with ./ or / is a
            new folder here, and nothing is uploaded.
        format: Format of the weights: 'hf' loads with AutoModelForImageClassification of transformers, 'timm' with
            timm.create_model('hf-hub:owner/name').
        licence: Licence of the weights, such as apache-2.0 (default: the licence on their card).
        private: Make a new repository private.
        dry_run: Show what would be uploaded, and exit.
    """
    from tempfile import TemporaryDirectory

    from vitrail.weights.load import load
    from vitrail.weights.publish import README, prepare_upload
    from vitrail.weights.publish import push as upload

    folder_here = repository.startswith((".", "/", "~"))
    if not folder_here and repository.count("/") != 1:
        raise UsageError(
            f"{repository!r} is not the name of a repository; give owner/name, or ./folder to write what would be "
            "uploaded into a folder"
        )
    model: Any = load(source)
    stays = folder_here and not dry_run
    with TemporaryDirectory() as temporary:
        folder = Path(repository).expanduser() if stays else Path(temporary)
        files = prepare_upload(model, folder, folder.resolve().name if stays else repository, licence, format)
        text = (folder / README).read_text(encoding="utf-8")
        if stays:
            return Pushed(str(folder), files, text, str(folder))
        url = None if dry_run else upload(folder, repository, private=private)
    return Pushed(repository, files, text, url)


def _regrouped(model: Any, branches: int) -> Any:
    from dataclasses import replace

    from vitrail.model.regroup import regroup, regrouped

    config = regrouped(model.config, branches)
    other = regroup(model, branches)
    told = f"{model.card.source}, its {config.depth * branches} blocks {config.depth} x {branches}"
    other.card = replace(model.card.unmeasured(), config=config, source=told, provenance={})
    return other


def _row(name: str, tensor: Any) -> Tensor:
    values = tensor.double()
    if not values.numel():
        return Tensor(name, tuple(tensor.shape), 0.0, 0.0, 0.0)
    std = float(values.std(correction=0))
    return Tensor(name, tuple(tensor.shape), float(values.mean()), std, float(values.abs().max()))


def show(result: Converted | Info | Verification | Pushed) -> Any:
    """Return the result of one of these verbs as text or tables for a terminal."""
    if isinstance(result, Converted):
        return f"{result.report}\n{result.saved}"
    if isinstance(result, Pushed):
        return _pushed(result)
    if not isinstance(result, Info):
        return _verified(result)
    rows = []
    for tensor in result.tensors:
        shape = " x ".join(map(str, tensor.shape)) or "one number"
        rows.append((tensor.name, shape, *(f"{value:.3g}" for value in (tensor.mean, tensor.std, tensor.largest))))
    return page(table(("", ""), _facts(result)), table(("tensor", "shape", "mean", "std", "largest"), rows))


def _facts(info: Info) -> list[tuple[str, str]]:
    card = info.card
    how = card.preprocess
    resized = {"small": "short side", "squash-crop": "squash"}.get(how.resize)
    crop = how.resize if resized is None else f"{resized}, then the central {how.crop:.4g}"
    names = ", ".join(card.class_names[:SHOWN]) or "no names"
    more = f" and {len(card.class_names) - SHOWN} more" if len(card.class_names) > SHOWN else ""
    facts = {
        "architecture": info.architecture,
        "parameters": f"{info.parameters:,}",
        "format": info.report.format,
        "origin": card.source,
        "input": f"{how.image_size[0]} x {how.image_size[1]} pixels, {crop}, {how.interpolation}",
        **_pixels(card),
        "classes": f"{card.config.classes}: {names}{more}",
        "licence": card.licence or "not known",
        "metrics": ", ".join(f"{name} {value}" for name, value in card.metrics.items()) or "none",
        "reference": "stored" if card.reference else "none",
        "loading": str(info.report),
    }
    return list(facts.items())


def _pixels(card: Card) -> dict[str, str]:
    """Return how pixels are normalised."""
    bands = card.preprocess.bands
    if bands is None:
        return {"mean, std": f"{_short(card.config.mean)}, {_short(card.config.std)}"}
    depth = "float32" if bands.bits == "32f" else f"{bands.bits} bits"
    return {
        "bands": f"{bands.channels} of {depth}, shown: {' '.join(map(str, bands.display))}",
        "mean, std": f"{_short(bands.mean)}, {_short(bands.std)} (stored values)",
        "range": f"{_short(bands.low)} to {_short(bands.high)} in the training images",
    }


def _short(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.4g}" for value in (values[:1] if len(set(values)) == 1 else values))


def _verified(result: Verification) -> str:
    lines = [f"{result.path} ({result.format})"]
    for name, error in (result.reference or {}).items():
        lines.append(f"{name} compared with the card: relative error {error:.1e}")
    lines += [f"compared with {result.library}, largest relative error of"] if result.library else []
    lines += [f"  {name:10} {error:.1e}" for name, error in result.layers.items()]
    lines += result.notes
    verdict = f"largest relative error {result.worst:.1e}; rounding explains up to {result.tolerance:.0e}"
    return "\n".join([*lines, verdict if result.compared else "not verified: there is nothing to compare with"])


def _pushed(result: Pushed) -> str:
    lines = [f"  {name}, {size / 2**20:.2f} MiB" for name, size in result.files.items()]
    if result.url is not None:
        done = "wrote" if result.url == result.repository else "pushed to"
        return "\n".join([f"{done} {result.url}", *lines])
    return "\n".join([f"would push to {result.repository}", *lines, "", result.readme.rstrip("\n")])


def as_json(result: Converted | Info | Verification | Pushed) -> Any:
    """Return the result of one of these verbs as JSON values."""
    from vitrail.config import plain

    if isinstance(result, Info):
        values = {name: plain(getattr(result, name)) for name in ("report", "architecture", "parameters", "tensors")}
        return {**values, "card": result.card.to_dict()}
    fields = plain(result)
    if not isinstance(result, Converted | Pushed):
        fields |= {"worst": result.worst, "verified": result.passed if result.compared else None}
    return fields
