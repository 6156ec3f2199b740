"""What runs in an installation of the core alone, as a program: `python core_alone.py FOLDER` prints what it found.

FOLDER holds photos/ with class folders. The program imports nothing but the core, the standard library and vitrail.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vitrail
from vitrail import cli

REFUSED: dict[str, str] = {
    "train photos": "train",
    "finetune photos": "train",
    "demo": "train",
    "plan photos": "train",
    "sweep photos": "train",
    "study table2": "train",
    "report model": "train",
    "inspect model": "train",
    "inspect model photos/a/1.png": "train",
    "probe linear model photos": "train",
    "predict model photos --out parts": "train",
    "predict model photos --tiles 8 --out tiles": "train",
    "embed model photos --out parts": "train",
    "search model photos --like photos/a/1.png --out found.png": "train",
    "evaluate model photos --out evaluated": "train",
    "bench Ti/16 --out benched": "train",
    "data pack photos packed": "train",
    "data dedup photos": "train",
    "data audit photos": "train",
    "data check digits": "train",
    "data check x.parquet": "train",
    "data check x.tar": "train",
    "data check hf://datasets/a/b": "train",
    "data check s3://a/b": "remote",
    "serve model": "serve",
    "export model --to onnx --out exported": "engines",
    "predict model photos --engine openvino": "engines",
    "predict x.onnx photos/a/1.png": "engines",
    "predict model x.dcm": "",
}
"""Commands that need a package which is not installed, and the extra that brings it; "": the image is skipped."""


def run(command: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(command.split())
    return code, out.getvalue(), err.getvalue()


def worked() -> dict[str, Any]:
    """Return what the four verbs of the core answer."""
    network = vitrail.create("Ti/16", classes=2, depth=1, image_size=(16, 16), patch=8).eval()
    torch.nn.init.normal_(network.head.weight, std=0.1)  # type: ignore[union-attr, arg-type]
    vitrail.save(network, "model")
    images = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    found: dict[str, Any] = {"loaded": bool(torch.equal(vitrail.load("model").eval()(images), network(images)))}
    found["predict"] = run("predict model photos --out classes.csv")
    with open("classes.csv", encoding="utf-8") as file:
        found["rows"] = [(row["path"], float(row["probability"])) for row in csv.DictReader(file)]
    found["embed"] = run("embed model photos --out features.npz")
    with np.load("features.npz") as file:
        found["features"] = file["features"].shape
    found["evaluate"] = run("evaluate model photos")
    found["python"] = [row.probabilities[0] for row in vitrail.predict("model", "photos").rows]
    return found


def public_names() -> dict[str, str]:
    """Return the public names that are not there, with the kind of their error."""
    found = {}
    for name in [*vitrail.__all__, "sklearn"]:
        try:
            __import__("vitrail.sklearn") if name == "sklearn" else getattr(vitrail, name)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    Path("x.parquet").write_bytes(b"PAR1")
    Path("x.dcm").write_bytes(bytes(128) + b"DICM")
    Path("x.onnx").write_bytes(b"onnx")
    with tarfile.open("x.tar", "w") as tar:
        tar.add("photos/a/1.png")
    found = {"worked": worked(), "names": public_names()}
    there = {path.name for path in Path.cwd().iterdir()}
    found["refused"] = {command: run(command) for command in REFUSED}
    found["left"] = sorted({path.name for path in Path.cwd().iterdir()} - there)
    found["help"] = [verb for verb in cli.VERBS if run(f"{verb} --help")[0]]
    print(json.dumps(found), file=sys.stdout)
