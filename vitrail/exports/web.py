"""A program for a web page: the ONNX program, a page that classifies images with it in the browser, and its runtime.

The page (`page/`) decodes and prepares images as `vitrail predict` does, and runs the program with onnxruntime-web,
without a server: the folder only has to be reachable over HTTP. The page loads one version of the runtime from a public
CDN, or from the folder, and uses it only if its hash is that below.
"""

from __future__ import annotations

import hashlib
import http.client
import io
import tarfile
import zlib
from base64 import b64encode
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from vitrail.errors import ExportError, UsageError
from vitrail.files import open_regular
from vitrail.weights.card import Card

NAME, VERSION = "onnxruntime-web", "1.30.0"
SCRIPT = {
    "file": "ort.wasm.bundle.min.mjs",
    "integrity": "sha384-PLWz+nHEVHpjwBsO0YVdvQj6n5814Iv8E3b8FG0Rp/uIAtjFMCKOpP66iPzedrIG",
}
WASM = {
    "file": "ort-wasm-simd-threaded.wasm",
    "integrity": "sha384-vjBJ1z7qrhkTyYsNqKeF6c7N+nOJSU94czEo+tvZcu8G75JparGq9kB+kTnEUNVM",
}
CDN = f"https://cdn.jsdelivr.net/npm/{NAME}@{VERSION}/dist/"
"""Where the page finds the runtime by default: the files of the npm package, as they are."""
TARBALL = f"https://registry.npmjs.org/{NAME}/-/{NAME}-{VERSION}.tgz"
TARBALL_INTEGRITY = "sha512-q0y+JrrtukXSzsBWEMccVfqX25LRmosXHF+CaRJmg8pZClzcV7svNc4rKY3jL02Vb7QmRMDs1SigqR4CXAfKYQ=="
PAGE = ("index.html", "page.css", "page.js", "picture.js")
LICENCE = "onnxruntime.LICENSE"
"""Licence of the runtime, which the package lacks."""
MOST = 1 << 30
"""Largest program in bytes: the memory of a page is 4 GB, and the runtime copies the weights."""
TIMEOUT = 60.0
"""Seconds without an answer of the registry."""


@dataclass(frozen=True)
class Page:
    """A page that is written beside a program."""

    vendored: dict[str, bytes]
    """Files of its runtime by name; empty if it loads them from the CDN."""

    def about(self) -> dict[str, Any]:
        """Return what the card says about the runtime: its version, its place, and its files with their hashes."""
        at = "" if self.vendored else CDN
        return {"name": NAME, "version": VERSION, "at": at, "script": SCRIPT, "wasm": WASM}

    def write(self, folder: Path) -> None:
        """Write the page beside the program in `folder`. Raises ExportError for a program that is too large."""
        size = sum(file.stat().st_size for file in folder.iterdir())
        if size > MOST:
            raise ExportError(
                f"the program has {size / 1e9:.1f} GB, more than a page has memory for. Export it to onnx"
            )
        for name, content in {**{name: _page_file(name) for name in PAGE}, **self.vendored}.items():
            (folder / name).write_bytes(content)


def page_of(card: Card, output: str, to: str, vendor: bool, vendor_from: str | Path | None) -> Page | None:
    """Return the page of an export, None for another kind of program; with `vendor`, its runtime is read now.

    Raises UsageError for a network whose images no browser reads, for an output that no page shows, and for `vendor`
    without a page; ExportError for a runtime that is not there.
    """
    vendored = vendor or vendor_from is not None
    if to != "web":
        if vendored:
            raise UsageError(f"only a web page has its runtime beside it, and this is a program for {to}: add --to web")
        return None
    if card.preprocess.bands is not None or card.config.channels != 3:
        raise UsageError("a web page reads RGB images, and this network takes other bands: add --to onnx")
    if card.answers and output != "features":
        raise UsageError("a web page shows one answer, and this network gives several: add --to onnx")
    if output == "features":
        raise UsageError("a web page shows classes or numbers, not features. Export logits, or add --to onnx")
    return Page(runtime_files(vendor_from) if vendored else {})


def runtime_files(source: str | Path | None) -> dict[str, bytes]:
    """Return the files of the runtime: from the npm registry, or from its package at `source`, a tarball or a folder.

    Raises ExportError, with what to download, if they are not there or are not those of this version.
    """
    place = TARBALL if source is None else Path(source).expanduser()
    try:
        if isinstance(place, Path) and place.is_dir():
            found = {file["file"]: _in_folder(place, file["file"]) for file in (SCRIPT, WASM)}
        else:
            found = _in_tarball(_downloaded() if isinstance(place, str) else _read(place))
    except (OSError, EOFError, http.client.HTTPException, tarfile.TarError, zlib.error, LookupError) as error:
        raise ExportError(f"{place} has no usable {NAME} {VERSION} ({error}). {_cure()}") from error
    for file in (SCRIPT, WASM):
        if integrity(found[file["file"]], "sha384") != file["integrity"]:
            raise ExportError(f"{file['file']} in {place} is not that of {NAME} {VERSION}. {_cure()}")
    return {**found, LICENCE: _page_file(LICENCE)}


def _cure() -> str:
    return (
        f"Run `npm pack {NAME}@{VERSION}` where there is a network, or download {TARBALL}, and name the file: "
        f"--vendor-from {NAME}-{VERSION}.tgz"
    )


def _downloaded() -> bytes:
    with urlopen(TARBALL, timeout=TIMEOUT) as response:
        content: bytes = response.read()
    if integrity(content, "sha512") != TARBALL_INTEGRITY:
        raise OSError("the download is not the published package")
    return content


def _in_tarball(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as package:
        found = {}
        for name in (SCRIPT["file"], WASM["file"]):
            member = package.extractfile(f"package/dist/{name}")
            if member is None:
                raise LookupError(f"{name} is no file")
            found[name] = member.read()
    return found


def _in_folder(folder: Path, name: str) -> bytes:
    places = (folder / name, folder / "dist" / name, folder / "package" / "dist" / name)
    return _read(next((place for place in places if place.is_file()), places[0]))


def _read(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def integrity(content: bytes, algorithm: str) -> str:
    """Return the hash of a file as browsers and npm write it."""
    return f"{algorithm}-{b64encode(hashlib.new(algorithm, content).digest()).decode()}"


def _page_file(name: str) -> bytes:
    return (files("vitrail.exports") / "page" / name).read_bytes()
