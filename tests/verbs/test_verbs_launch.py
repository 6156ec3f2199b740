"""`vitrail launch`: what it prints is checked, and run by bash, with stand-ins for what a cluster brings.

The stand-ins do what Slurm's programs do as far as the script goes: `srun` starts the processes with their numbers and
kills them when it is itself asked to end, `scancel` signals the processes and not the script, `scontrol` notes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from vitrail import cli
from vitrail.errors import CheckpointError, UsageError
from vitrail.objective.settings import MaskedPatch
from vitrail.recipes.asked import Asked
from vitrail.recipes.decide import decide
from vitrail.recipes.known import Known
from vitrail.training.checkpoints import checkpoint
from vitrail.training.loop import fit
from vitrail.verbs.launch import checked_run, slurm
from vitrail.verbs.train.resume import resumed

ROOT = Path(__file__).resolve().parents[2]
TASK = yaml.safe_load((ROOT / "examples" / "skypilot.yaml").read_text())
"""The example for rented machines, as SkyPilot reads it."""
COMMAND = ("train", "s3://bucket/packed", "--recipe", "paper/vit-h14-jft")
"""What it trains."""
STEPS = 200
TRAIN = ("train", "digits", "--recipe", "digits", "--model", "Ti/4", "--vit.width", "16", "--vit.depth", "1")
TRAIN += ("--vit.heads", "2", "--vit.mlp-dim", "32", "--batch-size", "8", "--duration", f"{STEPS} steps")
TRAIN += ("--evaluate-every", f"{STEPS} steps", "--checkpoint-every", "50 steps", "--workers", "0")
TRAIN += ("--precision", "float32", "--device", "cpu", "--accumulate", "1", "--data.subset", "64")
HOSTILE = ["photos of mine/it's", '"$(touch gone)"', "`touch gone`", "a\nb", "a\\b", "*", "${HOME}", "äöü/写真", "#x"]
STAND_INS = {
    "srun": r"""
while [[ $1 == --* ]]; do echo "$1" >> "$STATE/srun"; shift; done
pids=()
for ((n = 0; n < TASKS; n++)); do
    SLURM_PROCID=$n SLURM_LOCALID=$n SLURM_NTASKS=$TASKS "$@" &
    pids+=($!)
done
trap 'kill -KILL "${pids[@]}"; exit 137' TERM
echo "${pids[@]}" > "$STATE/tasks.partial" && mv "$STATE/tasks.partial" "$STATE/tasks"
code=0
for pid in "${pids[@]}"; do wait "$pid"; last=$?; ((last > code)) && code=$last; done
exit $code
""",
    "scancel": r"""
[[ $1 == --signal=TERM && $2 == "$SLURM_JOB_ID" ]] || exit 1
kill -TERM $(< "$STATE/tasks")
""",
    "scontrol": r"""
echo "$@" >> "$STATE/scontrol"
[[ $1 == show ]] && echo 127.0.0.1
exit 0
""",
    "pip": 'printf "%s\\n" "$@" > "$STATE/pip"\n',
}


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment in which the stand-ins are found; its STATE is a folder for what they note."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in STAND_INS.items():
        (commands / name).write_text(f"#!/bin/bash\n{text}")
        (commands / name).chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    names = {"STATE": str(tmp_path), "TASKS": "1", "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    slurm_names = {"SLURM_JOB_ID": "123", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_CPUS_PER_TASK": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SKYPILOT"))}
    return {**inherited, **names, **slurm_names}


def options(script: str) -> dict[str, str]:
    """What a batch script asks Slurm for."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script, re.MULTILINE))


def until(what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait until something has happened, as long as the process runs."""
    while not what():
        assert process.poll() is None, "it ended before"
        time.sleep(0.005)


def has_steps(folder: Path) -> bool:
    """Has a run in the folder noted a step of training?"""
    return any('"train"' in path.read_text() for path in folder.glob("*/metrics.jsonl"))


def weights(runs: Path) -> dict[str, torch.Tensor]:
    """The last state of the one run in a folder."""
    (run,) = runs.iterdir()
    path = checkpoint.latest_valid(run / "checkpoints")
    assert path is not None and path.name == f"step-{STEPS:06d}"
    return checkpoint.load(path)["model"]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Are these the same bits?"""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was left alone."""
    out = tmp_path_factory.mktemp("whole")
    assert cli.main([*TRAIN, "--out", str(out)]) == 0
    return out


def as_if_killed(runs: Path, target: Path) -> None:
    """Copy a folder of runs as it was before the newest checkpoint."""
    shutil.copytree(runs, target)
    (run,) = target.iterdir()
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:06d}")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({name: facts[name] for name in facts if name != "result"}))


# what is printed


@pytest.mark.processes
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 8), (3, 0)])
def test_a_batch_script_asks_for_what_was_asked(nodes: int, gpus: int) -> None:
    script = slurm(*TRAIN[:4], "--batch-size", "96", nodes=nodes, gpus_per_node=gpus, time="2-12", partition="long")
    asked = options(script.text)
    assert (asked["nodes"], asked["ntasks-per-node"]) == (str(nodes), str(max(gpus, 1)))
    assert asked.get("gpus-per-node") == (str(gpus) if gpus else None)
    assert (asked["time"], asked["partition"], asked["signal"]) == ("2-12", "long", "B:USR1@180")
    assert {"requeue", "open-mode"} <= asked.keys()
    assert script.processes == nodes * max(gpus, 1)
    first, rest = script.text.split("\n\n", 1)
    assert first.startswith("#!/bin/bash\n#SBATCH") and "#SBATCH" not in rest  # sbatch stops reading at a command
    subprocess.run(["bash", "-n"], input=script.text.encode(), check=True)


@pytest.mark.processes
def test_a_batch_script_passes_the_shell_checker(tmp_path: Path) -> None:
    checker = shutil.which("shellcheck", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("no shellcheck beside this Python")
    batch = slurm(*TRAIN, image="a#b/c", mount=("/da ta",), setup=("module load cuda",), out="a b").text
    for text in (batch, "#!/bin/bash\n" + TASK["run"]):
        (tmp_path / "script").write_text(text)
        # SC2016: what stands in single quotes is not expanded, as is meant of names and of the words srun's shell reads
        command = [checker, "--exclude=SC2016", tmp_path / "script"]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


@pytest.mark.processes
@pytest.mark.parametrize(("gpus", "processes"), [("8", "8"), ("0", "1")])
def test_the_example_for_rented_machines_starts_a_training(
    gpus: str, processes: str, cluster: dict[str, str], tmp_path: Path
) -> None:
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_GPUS_PER_NODE": gpus, "SKYPILOT_NUM_NODES": "2"}
    given |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_TASK_ID": "sky-1"}
    run = TASK["run"].replace("exec torchrun", 'printf "%s\\0"')
    done = subprocess.run(["bash", "-c", run], env={**cluster, **given}, cwd=tmp_path, capture_output=True, check=True)
    said = done.stdout.decode().split("\0")
    assert said[: said.index("-m")] == shlex.split(
        f"--nnodes 2 --nproc-per-node {processes} --node-rank 1 --master-addr 10.0.0.1 --master-port 29500"
    )
    assert said[said.index("-m") :] == ["-m", "vitrail", *COMMAND, "--out", "/runs/sky-1", "--resume", "auto", ""]
    assert TASK["file_mounts"].keys() == {"/runs"}  # the folder of --out
    checked_run(COMMAND, TASK["num_nodes"], int(TASK["resources"]["accelerators"].partition(":")[2]))


@pytest.mark.processes
@pytest.mark.parametrize("words", [[word] for word in HOSTILE] + [["photos", "--name=it's"]])
def test_any_name_arrives_as_it_is(words: list[str], cluster: dict[str, str], tmp_path: Path) -> None:
    command = ["train", *words, "--recipe", "smoke"]
    (tmp_path / "bin" / "srun").write_text(ECHO)
    script = slurm(*command, gpus_per_node=1, python="my python", out="its 'runs'", setup=("export LATER=1",))
    done = subprocess.run(["bash", "-c", script.text], env=cluster, cwd=tmp_path, capture_output=True, check=True)
    expected = ["vitrail", "my python", "-m", "vitrail", *command, "--out", "its 'runs'/slurm-123", "--resume", "auto"]
    assert done.stdout.decode().split("\0") == [*expected, ""]
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no command is given"),
        (["evaluate", "runs/x"], "cannot launch 'evaluate', only: train, finetune"),
        (["trian", "photos"], "Did you mean 'train'"),
        (["train", "photos", "--epcohs", "3"], "Did you mean '--epochs'"),
        (["train", "photos", "--recipe", "scratch-smal"], "Did you mean|Valid"),
        (["train", "photos", "--config", "not-there.yaml"], "not-there.yaml"),
        (["train"], "no images to train on"),
        (["finetune"], "no images are given: vitrail finetune DIR"),
        (["train", "photos", "--out", "x"], "Remove --out from the launched command"),
        (["train", "photos", "--resume", "latest"], "Remove --resume from the launched command"),
        (["train", "photos", "--nproc", "8"], "Remove --nproc from the launched command"),
        (["train", "photos", "--dry-run"], "Remove --dry-run from the launched command"),
        (
            ["train", "photos", "--batch-size", "12"],
            r"is 12, but .* 8 processes \(1 x 8\).*Use --batch-size 8 or --batch-size 16",
        ),
        (["train", "photos", "--data.train", "\udcff"], "not UTF-8"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_printed(words: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        slurm(*words)


def test_a_value_that_is_wrong_is_told_as_by_train() -> None:
    with pytest.raises(UsageError, match=r"--duration: expected a duration .* got '3 fortnights'"):
        slurm("train", "photos", "--duration", "3 fortnights")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"time": "a day"}, "'a day', which Slurm cannot read"),
        ({"nodes": 0}, "nodes is 0"),
        ({"gpus_per_node": -1}, "gpus_per_node is -1"),
        ({"partition": "a b"}, "partition is 'a b'"),
        ({"name": "x\n#SBATCH --nodes=99"}, "name is"),
        ({"option": ("qos=high\n#SBATCH --nodes=99",)}, "cannot be written as an option of sbatch"),
        ({"option": ("--qos=high",)}, "cannot be written as an option of sbatch"),
        ({"mount": ("/data",)}, "--image"),
    ],
)
def test_what_slurm_would_not_read_is_refused(given: dict, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        slurm("train", "photos", **given)


def test_the_command_line_takes_the_words_behind_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["launch", "slurm", "--nodes", "2", "--option", "qos=high", "--", *TRAIN[:4], "--batch-size", "32"]
    assert cli.main(argv) == 0
    text = capsys.readouterr().out
    assert options(text)["qos"] == "high" and options(text)["nodes"] == "2"
    assert f"-m vitrail {shlex.join(argv[7:])} --out" in text
    assert cli.main(["--json", *argv]) == 0
    assert '"processes": 16' in capsys.readouterr().out
    assert cli.main(["launch", "slurm", "--nodes", "2"]) == 2


# what is printed, run

GOES_ON = "test_verbs_launch.py::test_what_a_script_starts_goes_on_to_the_same_end, in this process"
ECHO = '#!/bin/bash\nwhile [[ $1 != vitrail ]]; do shift; done\nprintf "%s\\0" "$@"\n'
"""A stand-in for srun that prints what it should start."""


@pytest.mark.train
def test_what_a_script_starts_goes_on_to_the_same_end(
    cluster: dict[str, str], tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin" / "srun").write_text(ECHO)
    script = slurm(*TRAIN, gpus_per_node=0, out=str(tmp_path)).text
    done = subprocess.run(["bash", "-c", script], env=cluster, cwd=tmp_path, capture_output=True, text=True, check=True)
    words = done.stdout.split("\0")[:-1]
    as_if_killed(uninterrupted, tmp_path / "slurm-123")
    assert words[2:4] == ["-m", "vitrail"] and cli.main(words[4:]) == 0
    assert "resuming from" in capsys.readouterr().err
    assert same(weights(tmp_path / "slurm-123"), weights(uninterrupted))


@pytest.mark.nightly(GOES_ON + "; test_only_a_training_that_saved_in_time_is_queued_again")
@pytest.mark.kill
def test_a_job_whose_time_is_over_goes_on_to_the_same_end(
    cluster: dict[str, str], tmp_path: Path, uninterrupted: Path
) -> None:
    (tmp_path / "job").write_text(slurm(*TRAIN, gpus_per_node=0, out="runs").text)
    runs = tmp_path / "runs" / "slurm-123"
    with open(tmp_path / "log", "wb") as log:
        sitting = subprocess.Popen(["bash", "job"], cwd=tmp_path, env=cluster, stdout=log, stderr=log)
        until(lambda: has_steps(runs), sitting)
        sitting.send_signal(signal.SIGUSR1)
        assert sitting.wait(120) == 143, (tmp_path / "log").read_text()
    requeued = "show hostnames node[1-2]\nrequeue 123\n"
    assert (tmp_path / "scontrol").read_text() == requeued
    (run,) = runs.iterdir()
    saved = checkpoint.latest_valid(run / "checkpoints")
    assert saved is not None and 0 < int(saved.name.removeprefix("step-")) < STEPS
    again = subprocess.run(["bash", "job"], cwd=tmp_path, env=cluster, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert f"resuming from {saved.relative_to(tmp_path)}" in again.stderr
    assert same(weights(runs), weights(uninterrupted))
    assert (tmp_path / "scontrol").read_text() == f"{requeued}show hostnames node[1-2]\n"  # it is over
    flags = (tmp_path / "srun").read_text()
    assert "--kill-on-bad-exit=1" in flags and "--cpu-bind=cores\n--distribution=block:block" in flags


ENDS = """
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[1])))
Path(sys.argv[2], "ready").touch()
while True:
    time.sleep(0.01)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "asked", "restarts", "requeued"),
    [
        (143, signal.SIGUSR1, "0", True),
        (143, signal.SIGUSR1, "100", False),  # often enough
        (1, signal.SIGUSR1, "0", False),  # it failed
        (0, signal.SIGUSR1, "0", False),  # it came to its end
        (143, signal.SIGTERM, "0", False),  # scancel signals script and training
    ],
)
def test_only_a_training_that_saved_in_time_is_queued_again(
    code: int, asked: signal.Signals, restarts: str, requeued: bool, cluster: dict[str, str], tmp_path: Path
) -> None:
    text = slurm(*TRAIN[:4], gpus_per_node=0).text
    stand_in = shlex.join([sys.executable, "-c", ENDS, str(code), str(tmp_path)])
    text, count = re.subn(r"^command=\(.*\)$", lambda _: f"command=({stand_in})", text, flags=re.MULTILINE)
    assert count == 1
    environment = {**cluster, "SLURM_RESTART_COUNT": restarts}
    with subprocess.Popen(["bash", "-c", text], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL) as script:
        until((tmp_path / "ready").exists, script)
        until((tmp_path / "tasks").exists, script)
        script.send_signal(asked)
        if asked == signal.SIGTERM:
            for pid in (tmp_path / "tasks").read_text().split():
                os.kill(int(pid), asked)
        assert script.wait(60) == code
    assert ("requeue 123" in (tmp_path / "scontrol").read_text()) == requeued


@pytest.mark.nightly(GOES_ON + "; test_the_example_for_rented_machines_starts_a_training")
@pytest.mark.processes
def test_a_task_whose_machine_is_taken_away_goes_on_to_the_same_end(
    cluster: dict[str, str], tmp_path: Path, uninterrupted: Path
) -> None:
    subprocess.run(["bash", "-c", TASK["setup"]], env=cluster, cwd=tmp_path, check=True)
    assert (tmp_path / "pip").read_text() == "install\n.[train,remote]\n"
    text = TASK["run"].replace('"/runs/', f'"{tmp_path}/').replace(shlex.join(COMMAND), shlex.join(TRAIN))
    given = {"SKYPILOT_NODE_IPS": "127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "0", "SKYPILOT_NUM_NODES": "1"}
    given |= {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_TASK_ID": "sky-managed-1"}
    runs = tmp_path / "sky-managed-1"
    as_if_killed(uninterrupted, runs)
    again = subprocess.run(
        ["bash", "-c", text], cwd=tmp_path, env={**cluster, **given}, capture_output=True, check=False
    )
    assert again.returncode == 0, again.stderr.decode()
    assert b"resuming from" in again.stderr
    assert same(weights(runs), weights(uninterrupted))


# --resume auto


@pytest.mark.train
def test_auto_begins_goes_on_and_does_not_begin_over_what_is_damaged(tmp_path: Path) -> None:
    settings = {"model": "Ti/4", "vit": {"width": 16, "depth": 1, "heads": 2, "mlp_dim": 32}, "device": "cpu"}
    settings |= {"data": {"subset": 32}, "batch_size": 8, "duration": "4 steps", "out": str(tmp_path), "workers": 0}
    asked = Asked("digits", "digits", settings=settings)
    assert resumed(asked, "auto", Known()) is None
    began = fit(decide(asked, Known()).run)
    found = resumed(replace(asked, settings={**settings, "duration": "6 steps"}), "auto", Known())
    assert found is not None and found[1] == began.folder
    assert fit(found[0], resume=found[1]).steps == 6
    for part in (began.folder / "checkpoints").rglob("*.safetensors"):
        part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        resumed(asked, "auto", Known())


@pytest.mark.train
def test_auto_knows_the_settings_of_the_recipe_it_is_to_begin(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"objective": {"corrupt": 0.15}, "vit": {"width": 16, "depth": 1, "heads": 2}}
    settings |= {"data": {"subset": 32}, "batch_size": 8, "duration": "2 steps", "out": str(tmp_path), "workers": 0}
    asked = Asked("digits", "masked-patch-small", settings={**settings, "image_size": 16, "device": "cpu"})
    assert resumed(asked, "auto", Known()) is None
    began = fit(decide(asked, Known()).run)
    found = resumed(replace(asked, recipe=None, settings={**settings, "duration": "3 steps"}), "latest", Known())
    assert found is not None and found[1] == began.folder
    assert found[0].objective == MaskedPatch(corrupt=0.15)
