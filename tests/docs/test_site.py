"""The README and every page of the site can be followed: commands are accepted, Python runs, links lead somewhere."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT, Block, anchors, blocks, refused, shell_commands, tables
from gathered import failures
from PIL import Image
from site_pages import api, flags, recipes, repository

import vitrail
from vitrail.durations import Steps
from vitrail.verbs.flags.declared import flags_of
from vitrail.verbs.table import VERBS

PAGES = sorted([*(ROOT / name for name in repository.EMBEDDED), *(ROOT / "docs").rglob("*.md")])
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
OTHERS = {
    *("curl", "docker", "jupyter", "kill", "mkdocs", "mypy", "npm", "pip", "pytest", "python", "ruff", "sbatch", "sky"),
    *("source", "time"),
}
"""Programs of other people that the pages name."""
LAUNCHERS = {"torchrun", "srun"}
"""Programs that start vitrail with flags of their own in front of it."""
FOREIGN = {"--", "--version", "--build-arg", "--shutdown-timeout", "--kind", "--help"}
"""Flags of the program itself and of other programs."""
TESTED = {"PAPER.md", "CHANGELOG.md"}
"""Documents whose commands other tests try, or that tell the past."""
NAV = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Each command of a bash block, with its place."""
    return [
        (f"{page}:{block.line}", tuple(words))
        for page in TEXTS
        for block in blocks(ROOT / page)
        if block.language == "bash"
        for words in shell_commands(block.text)
    ]


def for_vitrail(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The words from `vitrail` on, without a redirection; None if the command is another program's."""
    words = words[: words.index(">")] if ">" in words else words
    if Path(words[0]).name == "vitrail":
        return ("vitrail", *words[1:])
    if words[0] in LAUNCHERS:
        return ("vitrail", *words[words.index("vitrail") + 1 :])
    return None


@pytest.mark.full_size
def test_every_command_is_accepted() -> None:
    found = [(place, for_vitrail(words)) for place, words in commands()]
    assert {place: why for place, words in found if words and (why := refused(words))} == {}


INLINE = {(page, found) for page in TEXTS for found in re.findall(r"`((?:vitrail )?[^`\n]*)`", TEXTS[page])}


@pytest.mark.full_size
def test_commands_inside_sentences_are_accepted() -> None:
    mentioned = {*VERBS, *(name.split()[0] for name in VERBS)}  # a verb alone is no command
    found = [
        (page, words)
        for page, text in INLINE
        if text.startswith("vitrail ") and page not in TESTED and not re.search(r"VERB|NAME|\.\.\.|:|^vitrail --", text)
        if " ".join((words := tuple(shlex.split(text)))[1:]) not in mentioned
    ]
    assert len(found) > 20
    assert {pair: why for pair in found if (why := refused(pair[1]))} == {}


def test_flags_inside_sentences_exist() -> None:
    known = [flag for verb in VERBS.values() for flag in flags_of(verb.load()[1])]
    named = {word for flag in known for word in (*flag.words, *flag.opposites)}
    flags = {(page, text.split()[0].partition("=")[0]) for page, text in INLINE if text.startswith("--")}
    assert {(page, flag) for page, flag in flags if flag not in named | FOREIGN} == set()


def test_every_other_command_is_a_program_that_is_known() -> None:
    others = [(place, words) for place, words in commands() if for_vitrail(words) is None]
    assert {place: words for place, words in others if Path(words[0]).name not in OTHERS} == {}
    ours = [words for _, words in others if words[:2] == ("python", "-m") and words[2].startswith("benchmarks.")]
    assert ours and {words: why for words in ours if (why := refused([*words[:3]])) and "NAME" not in words[2]} == {}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the pages talk about: photographs, others of new classes, and three runs."""
    folder = tmp_path_factory.mktemp("pages")
    colours = {"bluebell": (60, 80, 200), "daisy": (230, 230, 220)}
    new = {"rose": (200, 20, 60), "tulip": (200, 150, 20)}
    for kind, colour in {**colours, **new}.items():
        for place in (folder / "new" / kind,) if kind in new else (folder / "photos" / kind, folder / "new-photos"):
            place.mkdir(parents=True, exist_ok=True)
            for number in range(4):
                shade = tuple(max(0, value - 9 * number) for value in colour)
                Image.new("RGB", (40, 40), shade).save(place / f"{kind}-{number}.jpg")
    model = vitrail.create("Ti/8", width=24, depth=3, heads=2, mlp_dim=48, image_size=(32, 32), classes=2)
    model.card = vitrail.Card(model.config, list(colours))
    for run in ("cifar100-1", "finetune-1", "finetune-2"):
        vitrail.save(model, folder / "runs" / run / "model" / "best")
    return folder


SMALL: dict[str, Any] = dict(image_size=32, duration=Steps(1), batch_size=4, workers=0)
TINY: dict[str, Any] = dict(model="Ti/8", vit=dict(width=24, depth=3, heads=2, mlp_dim=48))


def shrink(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a verb that trains take one step of a tiny network, whatever the page asks for."""
    whole = getattr(vitrail, verb)

    def quick(path: str, *, epochs: int = 1, **asked: Any) -> Any:
        return whole(path, **{**asked, **SMALL, **(TINY if verb == "train" else {})})

    monkeypatch.setattr(vitrail, verb, quick)


ELSEWHERE = ("docs/export.md", "docs/tasks/several-answers.md")
"""Pages whose code needs a program; tests/exports/test_export_verb.py and tests/tasks/test_answers_used.py run it."""
PYTHON = [
    (page, block)
    for page in TEXTS
    for block in blocks(ROOT / page)
    if block.language == "python" and page not in ELSEWHERE
]


@pytest.mark.train
@pytest.mark.parametrize(("page", "block"), PYTHON, ids=[f"{page}:{block.line}" for page, block in PYTHON])
def test_python_runs(page: str, block: Block, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    for verb in ("train", "finetune"):
        shrink(verb, monkeypatch)
    exec(compile("\n" * block.line + block.text, page, "exec"), {"__name__": "__main__"})


def test_links_lead_to_files_and_anchors() -> None:
    assert failures(TEXTS, links_lead_somewhere) == []


def links_lead_somewhere(page: str) -> None:
    wrong = []
    for link in repository.links(TEXTS[page]):
        path = repository.target(link, page)
        if path is not None and not (ROOT / path).exists() and not made(path):
            wrong.append(link)
        anchor, target = link.partition("#")[2], page if link.startswith("#") else path
        if anchor and target in TEXTS and anchor not in anchors(TEXTS[target]):
            wrong.append(link)
    assert wrong == []


def made(path: str) -> bool:
    """Whether the site makes this page when it is built."""
    where = path.removeprefix("docs/")
    return where in {*repository.EMBEDDED.values(), *GENERATED} and path.startswith("docs/")


GENERATED = {flags.INDEX, flags.SETTINGS, api.PLACE, recipes.PLACE, *map(flags.verb_page, VERBS)}


def test_links_inside_code_are_not_links() -> None:
    assert list(repository.links("a [b](c.md#d) `[e](f.md)`\n```\n[g](h.md)\n```\n![i](j.png)")) == ["c.md#d", "j.png"]


def test_a_link_is_moved_to_its_place_in_the_site() -> None:
    text = "[a](docs/scale.md#b) [c](PAPER.md) ![d](docs/e.png) [e](vitrail/cli.py) [f](benchmarks) [g](#h) `[i](j)`"
    assert repository.for_site(text, "index.md") == (
        "[a](scale.md#b) [c](understand/paper.md) ![d](e.png) [e](source/vitrail/cli.py.md) "
        "[f](source/benchmarks/index.md) [g](#h) `[i](j)`"
    )
    assert (
        repository.for_site("[a](../../PAPER.md) [b](../x.md)", "start/y.md")
        == "[a](../understand/paper.md) [b](../x.md)"
    )


def places(nav: object) -> list[str]:
    """The pages of the navigation."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [place for item in items for place in places(item)]  # type: ignore[attr-defined]


def test_the_navigation_has_every_page_once() -> None:
    listed = places(NAV)
    here = {repository.place(page) for page in (*TEXTS, *repository.NOTEBOOKS)}
    verbs = set(map(flags.verb_page, VERBS))  # added to the navigation by docs/hooks.py
    assert sorted(listed) == sorted(here | GENERATED - verbs)
    tabs = ["Start", "Tasks", "Examples", "Cookbook", "Understand", "Reference", "Numbers", "Project"]
    assert [next(iter(tab)) for tab in NAV] == tabs


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    listed = re.findall(r"^::: vitrail\.(\w+)$", api.page(), re.MULTILINE)
    assert sorted(listed) == sorted(set(vitrail.__all__) - {"__version__"})


@pytest.mark.parametrize("verb", ["evaluate", "data check", "train"])
def test_the_page_of_a_verb_has_its_flags_with_their_help(verb: str) -> None:
    _, function = VERBS[verb].load()
    made = flags.pages()
    text = made[flags.verb_page(verb)] + made[flags.SETTINGS] + made[flags.INDEX]
    plain = text.replace("\\", "")
    for flag in flags_of(function):
        name = flag.name.upper()
        assert f"`{flag.words[0]}`" in plain or f"`{name}`" in plain or f"`[{name}" in plain
        assert flag.text in plain, name
    assert "(at least 1) (default: 64)" in made[flags.verb_page("evaluate")]


@pytest.mark.parametrize("page", [page for page in TEXTS if "![" in TEXTS[page]])
def test_every_picture_has_its_command_beside_it(page: str) -> None:
    lines = TEXTS[page].splitlines()
    pictures = [number for number, line in enumerate(lines) if line.startswith("![") and ".svg)" not in line]
    for number in pictures:
        near = " ".join(lines[max(0, number - 12) : number + 12])
        assert re.search(r"vitrail (\w+)|python -m benchmarks", near), f"{page}:{number + 1}"


def test_badges_are_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    shown = {
        path.stem: re.search(r'aria-label="(?:.*?): (.*?)"', path.read_text())[1].replace("&gt;", ">")  # type: ignore[index]
        for path in (ROOT / "docs" / "badges").glob("*.svg")
    }
    assert shown == {"python": project["requires-python"], "licence": project["license"], "tested": "Linux"}


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (cited["version"], cited["license"], cited["title"].split(":")[0]) == (
        vitrail.__version__,
        "Apache-2.0",
        "vitrail",
    )
    assert [reference["title"] for reference in cited["references"]] == [
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        "Three things everyone should know about Vision Transformers",
    ]


def test_published_weights_are_as_timm_states_them() -> None:
    import timm

    (rows,) = (table for table in tables(ROOT / "docs/cookbook/weights.md") if "top-1, %" in table[0])
    assert len(rows) > 10
    for row in rows:
        name = row["weights"].strip("`")
        stated = timm.get_pretrained_cfg(name.removeprefix("timm/"))
        assert stated.hf_hub_id == name
        assert row["licence"] == stated.license and int(row["resolution"]) == stated.input_size[-1]
        assert 70 < float(row["top-1, %"]) < 90


def test_nothing_is_left_to_fill_in() -> None:
    assert [page for page, text in TEXTS.items() if re.search(r"\{\{\w+\}\}", text)] == []


def test_nothing_is_fetched_when_the_site_is_built_or_read() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config and "://" not in config
    for page, text in TEXTS.items():
        assert re.findall(r"!\[[^\]]*\]\(https?:", text) == [], page
