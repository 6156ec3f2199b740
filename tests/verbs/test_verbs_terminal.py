"""Tables on terminals and in pipes: no word is broken, paths are whole, and a pipe gets tabs."""

from __future__ import annotations

import csv
import io

import pytest

from vitrail import cli
from vitrail.terminal import Unwrapped, page, table
from vitrail.verbs import doctor as doctor_module

PATH = "photographs/of/a/long/expedition/IMG_20240613_123456.jpg"
ROWS = [
    ("all", 12345, PATH, "200 (american_bulldog)"),
    ("validation", 7, "b.jpg", "a class whose name is of several words, and longer than it should be"),
]
NAMES = ("split", "images", "first image", "most frequent class")
WORDS = {word for row in (*ROWS, NAMES) for cell in row for word in str(cell).split()}


@pytest.mark.parametrize("width", [200, 120, 102])
def test_a_table_fits_and_keeps_words_whole(width: int) -> None:
    lines = page(table(NAMES, ROWS)).text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert {word for line in lines for word in line.split()} >= WORDS
    numbers = [line for line in lines if "12345" in line or line.split()[:1] == ["validation"]]
    assert len({line.index(number) + len(number) for line, number in zip(numbers, ("12345", " 7"), strict=True)}) == 1


@pytest.mark.parametrize("width", [96, 80, 60])
def test_a_row_that_does_not_fit_takes_a_line_for_each_cell(width: int) -> None:
    text = page(table(NAMES, ROWS)).text(width)
    assert set(text.split()) >= WORDS
    assert f"  first image           {PATH}" in text.splitlines() or width < 80


def test_a_pipe_gets_tabs() -> None:
    text = page("a sentence " * 20, table(NAMES, [*ROWS, ("", 1, "two\tcells\nand lines", "")])).text(None)
    sentence, *lines = text.split("\n")
    assert len(sentence) == 220
    rows = list(csv.reader(io.StringIO("\n".join(lines)), delimiter="\t"))
    assert rows[0] == list(NAMES) and rows[1] == [str(cell) for cell in ROWS[0]]
    assert rows[3] == ["", "1", "two cells and lines", ""]


def test_text_is_wrapped_at_spaces_and_commands_are_not() -> None:
    command = f"vitrail train {PATH} --data.label-from 'name: ^(.+)_[0-9]+' --time-limit 3min --batch-size 64"
    text = page([f"see {PATH} and {PATH}", Unwrapped(command)], table(("",), [])).text(40)
    assert text.split("\n") == ["see", PATH, "and", PATH, command]


def test_wide_characters_take_two_columns() -> None:
    lines = page(table(("class", "split"), [("\u732b" * 4, "train"), ("cat", "test")])).text(80).splitlines()
    assert lines[0].index("split") == lines[2].index("train") + 4 == lines[3].index("test")


def test_control_characters_of_names_are_not_printed() -> None:
    assert "\x1b" not in page("\x1b[31m", table(("a\x1b",), [("\x1b[0m",)], "\x1b")).text(None)


class Terminal(io.StringIO):
    """Standard output that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "tabs"), [(Terminal(), False), (io.StringIO(), True)])
def test_the_command_line_asks_where_it_prints(
    stream: io.StringIO, tabs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_module, "show", lambda result: page(table(NAMES, ROWS)))
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["doctor"]) == 0
    assert ("\t" in stream.getvalue()) == tabs and PATH in stream.getvalue()
