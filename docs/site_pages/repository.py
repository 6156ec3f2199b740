"""Files of the repository on the site: documents that live elsewhere, and the code and pictures that pages link to."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs"
NOTEBOOKS = {
    f"examples/notebooks/{name}.ipynb": f"examples/{name}.md"
    for name in (
        "ten-flowers",
        "where-does-it-look",
        "few-labels",
        "train-export-serve",
        "wrong-labels-and-leaks",
    )
}
"""Notebook of the repository -> its place in the site."""
EMBEDDED = {
    "README.md": "index.md",
    "PAPER.md": "understand/paper.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "examples/README.md": "examples/index.md",
}
"""Document of the repository -> its place in the site."""
PLACES = {**EMBEDDED, **NOTEBOOKS}
"""Everything outside docs/ that is a page -> its place in the site."""
SOURCE = "source"
"""Folder of the site for everything else that a page links to."""
PICTURES = (".png", ".jpg", ".svg")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml", ".json": "json", ".cff": "yaml"}
_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def links(markdown: str) -> Iterator[str]:
    """Yield the targets of all links and pictures outside code."""
    for match in _LINK.finditer(_CODE.sub("", markdown)):
        yield match[2]


def target(link: str, document: str) -> str | None:
    """Return the path in the repository that a link of `document` leads to; None if it leads elsewhere.

    Both paths are relative to the root of the repository; an anchor is left out.
    """
    path = link.partition("#")[0]
    if "://" in link or link.startswith(("mailto:", "#")) or not path:
        return None
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))


def place(path: str) -> str:
    """Return the place in the site of a file or folder of the repository."""
    if path in PLACES:
        return PLACES[path]
    if path.startswith(f"{DOCS}/"):
        return path.removeprefix(f"{DOCS}/")
    if (ROOT / path).is_dir():
        return f"{SOURCE}/{path}/index.md"
    return f"{SOURCE}/{path}" if path.endswith(PICTURES) else f"{SOURCE}/{path}.md"


def document_of(place: str) -> str:
    """Return the document of the repository that stands at a place of the site."""
    return next((path for path, where in PLACES.items() if where == place), f"{DOCS}/{place}")


def for_site(markdown: str, place_of_page: str) -> str:
    """Return a page whose links into the repository lead to their places in the site."""
    document = document_of(place_of_page)

    def moved(match: re.Match[str]) -> str:
        path = target(match[2], document)
        if path is None:
            return match[0]
        link = posixpath.relpath(place(path), posixpath.dirname(place_of_page) or ".")
        anchor = match[2].partition("#")[2]
        return f"{match[1]}{link}{'#' + anchor if anchor else ''}{match[3]}"

    parts, last = [], 0
    for code in _CODE.finditer(markdown):
        parts += [_LINK.sub(moved, markdown[last : code.start()]), code[0]]
        last = code.end()
    return "".join([*parts, _LINK.sub(moved, markdown[last:])])


def linked(documents: dict[str, str]) -> set[str]:
    """Return the files and folders outside docs/ that documents, {path in the repository: text}, link to."""
    found = {target(link, path) for path, text in documents.items() for link in links(text)}
    return {path for path in found if path and not path.startswith(f"{DOCS}/") and path not in PLACES}


def source_page(path: str) -> str:
    """Return the page of a file or a folder outside docs/."""
    if (ROOT / path).is_dir():
        names = sorted(item.name + "/" * item.is_dir() for item in (ROOT / path).iterdir() if item.name[0] not in "._")
        return "\n".join(
            [f"# {path}/", "", "Files in this folder of the repository:", "", *(f"- `{n}`" for n in names), ""]
        )
    fence, language = "~~~~~~", LANGUAGES.get(Path(path).suffix, "text")
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"
