"""The files for other people's machines: the container, the workflows, the issue forms."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from vitrail.server import health
from vitrail.server.app import PATHS

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def tool(name: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a linter that stands beside this Python."""
    place = shutil.which(name, path=str(Path(sys.executable).parent))
    assert place, f"{name} is not installed: pip install -e '.[test]'"
    return subprocess.run([place, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.processes
def test_the_container_is_linted() -> None:
    done = tool("hadolint", "Dockerfile")
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.processes
def test_the_workflows_are_linted() -> None:
    done = tool("zizmor", "--offline", "--no-progress", "--config", ".github/zizmor.yml", ".github")
    assert done.returncode == 0, done.stdout


@pytest.mark.processes
@pytest.mark.timeout(1800)
def test_the_container_is_built_and_starts() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True, check=False).returncode:
        pytest.skip("no docker runs here")
    built = subprocess.run([docker, "build", "--quiet", "."], cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    command = [docker, "run", "--rm", built.stdout.strip(), "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "torch" in done.stdout, done.stdout + done.stderr


def test_the_container_copies_what_the_package_needs_and_no_more() -> None:
    copied = {word for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M) for word in line.split()[:-1]}
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed and all((ROOT / name).exists() for name in copied)


def test_the_container_has_no_root_and_asks_the_server_for_its_health() -> None:
    assert re.search(r"^USER [1-9]\d*$", DOCKERFILE, re.M)
    (module,) = re.findall(r'^HEALTHCHECK .+ CMD \["python", "-m", "([\w.]+)"\]$', DOCKERFILE, re.M)
    assert module == health.__name__ and "/readyz" in PATHS


@pytest.mark.parametrize(
    ("command", "port"),
    [
        ("vitrail serve /model --host 0.0.0.0", 8000),
        ("python /opt/vitrail/bin/vitrail serve /model --port 9000", 9000),
        ("vitrail serve --port=81 /model", 81),
        ("vitrail train /data", None),
    ],
)
def test_the_health_check_asks_at_the_port_that_is_given(command: str, port: int | None) -> None:
    assert health.port_of([*command.split(), ""]) == port


def test_the_containers_versions_are_valid_ones() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    extras = project["optional-dependencies"]
    for text in (*project["dependencies"], *extras["serve"], *extras["engines"], *extras["train"]):
        one = Requirement(text)
        assert pinned[canonicalize_name(one.name)] in one.specifier, text


def test_workflows_call_what_is_called_here() -> None:
    commands = [
        step["run"]
        for path in WORKFLOWS
        for job in yaml.safe_load(path.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert sorted(name for name in commands if name.startswith(".ci/run")) == [
        *[".ci/run"] * 2,
        '.ci/run "everything or nightly"',
    ]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_the_form_for_bugs_asks_for_doctor() -> None:
    form = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    assert any("vitrail doctor" in field["attributes"]["label"] for field in form["body"])
