"""What must hold for everything of a kind is tested over a table, and everything of the kind has a row there."""

from __future__ import annotations

import inspect

from writers import WRITERS

from vitrail.cli import VERBS

WITHOUT = {
    "demo": "train by another name",
    "study": "trains for hours; where it writes, it writes as a sweep does",
    "launch slurm": "it prints; the folder is the job's",
    "weights average": "needs two fine-tunings of one network; it writes by the same function as weights convert",
    "probe segment": "needs masks; it writes by the same functions as evaluate",
}
"""Verbs that write and have no row among the writers -> why. The first three are asked for an address (fault 68)."""


def test_every_verb_that_writes_is_among_the_writers() -> None:
    """What may happen to a target, such as a disk that is full: tests/faults/test_faults_writing.py."""
    rows = {writer.words.partition(" {")[0] for writer in WRITERS.values()}
    for verb, found in VERBS.items():
        names = inspect.signature(found.load()[1]).parameters
        if {"out", "target"} & names.keys() or verb in ("train", "finetune", "recipes cp"):
            assert verb in WITHOUT or any(row.startswith(verb) for row in rows), f"add {verb} to WRITERS"
