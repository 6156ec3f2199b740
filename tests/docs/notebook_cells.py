"""The cells of a notebook, run one after the other in a process that is forked for them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from sklearn import datasets
from sklearn.utils import Bunch

from vitrail import cli
from vitrail.training import floor
from vitrail.verbs.train import train


class Shell(InteractiveShell):
    """IPython without a window: `%matplotlib inline` has none to open."""

    def enable_gui(self, gui: object = None) -> None:
        """Do nothing."""


_run = subprocess.run


def run_here(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m vitrail ...` in this process, and other programs as `subprocess.run` does."""
    if command[:3] != [sys.executable, "-m", "vitrail"]:
        return _run(command, **options)
    with redirect_stdout(io.StringIO()) as printed:
        assert cli.main(command[3:]) == 0
    return subprocess.CompletedProcess(command, 0, printed.getvalue())


def run_cells(notebook: str, folder: str) -> None:
    """Run the code of a notebook in `folder`. What it prints goes to `folder`/printed; an error ends the process."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    for descriptor in (1, 2):
        os.dup2(os.open("printed", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
    floor._affordable = lambda *_: 0  # a linear classifier and a report take longer than these runs
    train.reported = lambda result: result
    subprocess.run = run_here  # type: ignore[assignment]
    if "few-labels" in notebook:  # 600 of them have no label
        digits = datasets.load_digits()
        datasets.load_digits = lambda: Bunch(images=digits.images[:800], target=digits.target[:800])
    shell = Shell.instance()
    for cell in nbformat.read(Path(notebook), as_version=4).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source).raise_error()
