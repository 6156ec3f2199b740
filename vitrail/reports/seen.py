"""What a report says of a run that learned without labels: how low its loss is, and what it sees."""

from __future__ import annotations

from vitrail.reports.contents import Contents
from vitrail.reports.figures import Curve, curves, uri
from vitrail.reports.text import percent, safe

LOSSES = {
    "masked-patch": "cross-entropy of a hidden patch's colours in nats, or squared error of its pixels",
    "mae": "squared error of a hidden patch's pixels, of mean 0 and deviation 1 by default",
    "beit": "cross-entropy of a hidden patch's visual token in nats",
    "tokenizer": "squared error of pixels, between -1 and 1",
    "dino": "cross-entropy of the student's answers with the teacher's in nats, which does not tell better models",
}
LEGENDS = {
    "masked-patch": "Hatched patches are what the [mask] embedding stands for; a corrupted patch may also be another "
    "one, or be as it was. Prediction and target are colours of 3 bits a channel, in the middle of their level.",
    "mae": "Hatched patches never enter the encoder. A prediction of normalised pixels is drawn with the mean and "
    "deviation of the true patch, which the network is not asked for.",
    "beit": "Hatched patches are replaced by the [mask] embedding. Prediction and target are visual tokens, drawn as "
    "the tokenizer paints them.",
    "dino": "Orange and yellow are the two global crops, blue the local ones; beside them the crops as the networks "
    "get them, mirrored and changed in colour. The teacher's last layer looks where the first crop is bright. Target: "
    "the teacher's strongest answers to it, the strongest first; prediction: the student's to the same, the mean over "
    "all other crops; bars of a row are on one scale.",
    "tokenizer": "Each patch becomes one token, drawn as a shade; the prediction is painted from the tokens alone.",
}
SHARES = {
    "colour": "hidden colours told right",
    "code": "hidden tokens told right",
    "agreement": "crops answered like their teacher",
    "entropy": "entropy of the teacher's answers, of the largest",
    "use": "perplexity of the tokens, of their number",
}
"""Metrics that are shares of predictions, and what the figure's axis calls them."""


def is_self_supervised(contents: Contents) -> bool:
    """Did the run learn without labels?"""
    return contents.run is not None and not contents.run.supervised


def reached(contents: Contents) -> str:
    """Return what the best evaluation came to, as the end of a sentence; "" where there was none."""
    result = contents.facts.get("result") or {}
    loss = contents.curve("loss", beside="count")[1]
    best = (result.get("best") or {}).get("loss", float(loss.min()) if len(loss) else None)
    if best is None:
        return ""
    return f"came to a validation loss of <strong>{best:.4f}</strong> ({_about(contents)})"


def tiles(contents: Contents) -> list[tuple[str, str, str]]:
    """Return the tiles of the best evaluation: name, value, remark."""
    best = (contents.facts.get("result") or {}).get("best") or {}
    found = [("validation loss", f"{best['loss']:.4f}", _about(contents))] if "loss" in best else []
    return found + [(SHARES[name], percent(best[name]), "validation images") for name in SHARES if name in best]


def shares(contents: Contents) -> list[str]:
    """Return the curves of the metrics that are shares."""
    drawn = []
    for name, label in SHARES.items():
        curve: Curve = contents.curve(name, beside="count")
        if len(curve[0]):
            text = f"{label} over steps: {percent(float(curve[1].max()))} at most."
            drawn.append(curves(label, label, {"validation": curve}, percent=True, describe=text))
    return drawn


def seen(contents: Contents) -> str:
    """Return the section with the picture; "" for a run that learns from labels, a note where it is missing."""
    if contents.run is None or contents.run.supervised:
        return ""
    try:
        data = (contents.folder / "seen.png").read_bytes()
    except OSError:
        contents.notes.append("seen.png is missing: the run had no validation images, or was not evaluated")
        return ""
    legend = safe(LEGENDS[contents.run.objective.kind], 1000)
    return (
        f'<h2>What it sees</h2><p class="why">Validation images at the newest evaluation. {legend}</p>'
        '<img class="batch" alt="Input, mask, prediction and target of validation images, side by side" '
        f'src="{uri(data, "png")}">'
    )


def _about(contents: Contents) -> str:
    return "" if contents.run is None else LOSSES.get(contents.run.objective.kind, "")
