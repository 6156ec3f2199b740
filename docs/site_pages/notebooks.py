"""The notebooks of examples/ as pages: their text, their code, and the outputs that are stored in them."""

from __future__ import annotations

from pathlib import PurePosixPath

from nbconvert import MarkdownExporter
from nbconvert.filters import strip_ansi

from site_pages import repository


def page(path: str) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by their paths in the repository, beside the notebook.

    `path` is relative to the root of the repository.
    """
    name = PurePosixPath(path).stem
    names = {"unique_key": name, "output_files_dir": "pictures"}
    markdown, resources = MarkdownExporter().from_filename(str(repository.ROOT / path), resources=names)
    folder = PurePosixPath(path).parent
    source = f"This page is the notebook `{path}` of the repository, with the outputs of a real run.\n"
    title, _, rest = strip_ansi(markdown.lstrip()).partition("\n")
    return f"{title}\n\n{source}{rest}", {str(folder / file): data for file, data in resources["outputs"].items()}
