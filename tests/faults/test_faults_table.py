"""docs/faults.md keeps its promise: a row for each of the faults, and each test it names is there."""

from __future__ import annotations

import re

from documents import ROOT, code, tables
from gathered import failures

(ROWS,) = tables(ROOT / "docs" / "faults.md")
NOT_HERE = ("cannot occur", "not dealt with")


def test_rows_are_numbered_in_order() -> None:
    numbers = [int(row["#"]) for row in ROWS]
    assert numbers == sorted(set(numbers)) and numbers[:55] == list(range(1, 56))


def test_every_row_names_tests_that_exist_or_says_why_there_is_none() -> None:
    assert failures(ROWS, row_names_tests) == []


def row_names_tests(row: dict[str, str]) -> None:
    assert row["fault"] and row["what happens"]
    named = code(row["tests"])
    if not named:
        assert row["what happens"].startswith(NOT_HERE)
    for test in named:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), test
