"""`vitrail completion`: the scripts, asked by the shells themselves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from vitrail import cli

CASES = [
    (["tr"], ["train"]),
    (["data", "ch"], ["check"]),
    (["recipes", ""], ["cp", "list", "show"]),
    (["train", "--tune", ""], ["all", "attention", "attention+positions", "ffn", "head", "lora"]),
    (["train", "--optim.l"], ["--optim.layer-decay", "--optim.lr"]),
    (["data", "check", "--o"], ["--out"]),
    (["finetune", "--fro"], ["--from"]),
    (["export", "run", "--to", "open"], ["openvino"]),
    (["predict", "run", "REA"], ["README.md"]),
]
IN_BASH = """
source ./script
COMP_WORDS=({words}); COMP_CWORD={last}; COMPREPLY=()
_vitrail
# as complete -o default does
[ ${{#COMPREPLY[@]}} -eq 0 ] && COMPREPLY=($(compgen -f -- "${{COMP_WORDS[COMP_CWORD]}}"))
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").touch()
    assert cli.main(["completion", shell]) == 0
    (folder / "script").write_text(capsys.readouterr().out)


@pytest.mark.processes
def test_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("bash", tmp_path, capsys)
    for words, expected in CASES:
        quoted = " ".join(f"'{word}'" for word in ["vitrail", *words])
        asked = IN_BASH.format(words=quoted, last=len(words))
        done = subprocess.run(["bash", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert sorted(done.stdout.split()) == expected and not done.stderr, words


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("fish", tmp_path, capsys)
    for words, expected in CASES:
        asked = f"source ./script; complete -C 'vitrail {' '.join(words)}'"
        done = subprocess.run(["fish", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
        found = [line.partition("\t")[0] for line in done.stdout.splitlines()]
        assert sorted(found) == expected and not done.stderr, words


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_knows_the_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script("zsh", tmp_path, capsys)
    asked = 'autoload -U compinit; compinit -D; source ./script; print -- "$_comps[vitrail]"'
    done = subprocess.run(["zsh", "-f", "-c", asked], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "_bash_complete -o default -F _vitrail\n" and not done.stderr


def test_an_unknown_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["completion", "tcsh"]) == 2
    assert "fish" in capsys.readouterr().err
