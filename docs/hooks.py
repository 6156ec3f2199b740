"""Hooks of mkdocs: add the pages that the program makes, and the repository's own documents, without copies by hand."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import api, flags, notebooks, recipes, repository

from vitrail.verbs.table import VERBS


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every verb in the navigation, below the index of verbs."""
    config.nav = _with_verbs(config.nav)
    return config


def _with_verbs(nav: Any) -> Any:
    if isinstance(nav, list):
        return [_with_verbs(item) for item in nav]
    if not isinstance(nav, dict):
        return nav
    pages: list[Any] = [flags.INDEX, *({f"{name}": flags.verb_page(name)} for name in VERBS)]
    return {title: pages if where == flags.INDEX else _with_verbs(where) for title, where in nav.items()}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated pages, documents of the repository, and the files that pages link to."""
    written = {f"{repository.DOCS}/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    outside = {path: (repository.ROOT / path).read_text(encoding="utf-8") for path in repository.EMBEDDED}
    pictures: dict[str, bytes] = {}
    for path in repository.NOTEBOOKS:
        outside[path], found = notebooks.page(path)
        pictures |= found
    pages = {**flags.pages(), api.PLACE: api.page(), recipes.PLACE: recipes.page()}
    pages |= {repository.PLACES[path]: text for path, text in outside.items()}
    for path in sorted(repository.linked(written | outside)):
        where = repository.place(path)
        if path in pictures:
            files.append(File.generated(config, where, content=pictures[path]))
        elif path.endswith(repository.PICTURES):
            files.append(File.generated(config, where, abs_src_path=str(repository.ROOT / path)))
        else:
            pages[where] = repository.source_page(path)
    for where, text in pages.items():
        files.append(File.generated(config, where, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links into the repository to their places in the site."""
    if page.file.src_uri.startswith(f"{repository.SOURCE}/"):
        return markdown
    return repository.for_site(markdown, page.file.src_uri)
