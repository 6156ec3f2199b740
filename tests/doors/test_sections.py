"""An objective, an optimiser and a schedule of the user's own, by import path: flags, help, config.yaml, resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import timm.optim
import torch
from own import EXAMPLES, SMALL, config, importable, train, weights, write
from torch import nn

from vitrail import Optim, Run, Schedule, Supervised, cli, from_yaml, to_yaml
from vitrail.config import merge
from vitrail.errors import UsageError
from vitrail.objective.base import Moment
from vitrail.training.optim.optimizer import build_optimizer, update

THREE = (
    *("--objective", "focal:Focal", "--objective.gamma", "1.5"),
    *("--optim", "lion:Lion", "--schedule", "cyclic:Cyclic", "--schedule.cycles", "2"),
)


@pytest.mark.train
def test_a_run_with_own_classes_is_written_and_resumed(tmp_path: Path, examples: None) -> None:
    whole = train(tmp_path / "whole", *THREE)
    written = config(whole)
    assert (written["objective"]["class"], written["objective"]["gamma"]) == ("focal:Focal", 1.5)
    assert (written["optim"]["class"], written["optim"]["lr"], written["optim"]["betas"]) == (
        "lion:Lion",
        1e-4,
        [0.9, 0.99],
    )
    assert (written["schedule"]["class"], written["schedule"]["cycles"]) == ("cyclic:Cyclic", 2)
    # the recipe's values stay where the class does not declare its own
    assert written["objective"]["smoothing"] == 0.1

    cut = train(tmp_path / "cut", *THREE, "--max-nonfinite", "3")
    for step in (cut / "checkpoints").glob("step-*6"):
        for file in step.rglob("*"):
            file.unlink() if file.is_file() else None
        step.rmdir()
    assert cli.main(["train", "--resume", str(cut), "--quiet"]) == 0
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(cut)[name]), name


@pytest.mark.train
def test_a_resumed_run_needs_its_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name in ("focal", "lion", "cyclic"):
        (home / f"{name}.py").write_text((EXAMPLES / f"{name}.py").read_text())
    path = [*sys.path]
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*path])  # the current folder is added to it
    assert cli.main(["train", "digits", *SMALL, *THREE]) == 0  # found in the current folder
    for name in ("focal", "lion", "cyclic"):
        del sys.modules[name]
    resume = ["train", "--resume", "home/runs/digits-1", "--duration", "8 steps"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*path])
    assert cli.main(resume) == 2
    said = capsys.readouterr().err
    for part in ("objective.class", "--import focal", "optim.class", "--import lion", "schedule.class"):
        assert part in said, said
    resume += ["--import", "focal", "--import", "lion", "--import", "cyclic"]
    assert cli.main(resume) == 2
    said = capsys.readouterr().err
    for part in ("'focal'", str(tmp_path), "focal.py", "PYTHONPATH"):
        assert part in said, said
    with importable(home):  # as PYTHONPATH does
        assert cli.main(resume) == 0
    assert config(home / "runs/digits-1")["duration"] == "8 steps"


def test_help_shows_the_flags_of_an_own_class(examples: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--objective", "focal:Focal", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--objective.gamma NUMBER Exponent of 1 - p, where p is the probability of the label. (at least 0)" in shown
    assert "--objective.smoothing NUMBER" in shown  # inherited, with its help
    assert "Label smoothing: share of the target" in shown


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--objective", "focal:Focal", "--objective.gamma", "-1"), ("objective.gamma", "-1", "at least 0")),
        (("--objective", "focal:Focal", "--objective.gama", "1"), ("--objective.gama", "--objective.gamma")),
        (("--objective", "focal:Focall"), ("focal", "Focall", "Did you mean 'Focal'")),
        (("--objective", "focl:Focal"), ("objective.class", "'focl'", "current folder", "PYTHONPATH", "focl.py")),
        (("--optim", "focal:Focal"), ("optim.class", "focal:Focal", "subclass of Optim")),
        (("--objective", "focal"), ("objective.kind", "'focal'", "supervised")),
        (("--objective", "focal:"), ("objective.class", "module:Class")),
        (("--average.class", "focal:Focal"), ("--average.class",)),
    ],
)
def test_wrong_names_and_values(
    words: tuple[str, ...], parts: tuple[str, ...], examples: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", "digits", "--recipe", "digits", *words, "--print-config"]) == 2
    error = capsys.readouterr().err
    for part in parts:
        assert part in error, error


BROKEN = {
    "no_decorator": ("class Mine(Optim):\n    extra: int = 1", "@dataclass(frozen=True)"),
    "no_default": ("@dataclass(frozen=True, kw_only=True)\nclass Mine(Optim):\n    extra: int", "default for 'extra'"),
    "strange_type": (
        "@dataclass(frozen=True)\nclass Mine(Optim):\n    extra: list[int] | None = None",
        "'extra' of type",
    ),
    "unknown_type": (
        "from __future__ import annotations\n@dataclass(frozen=True)\nclass Mine(Optim):\n    x: Nope = 1",
        "Nope",
    ),
    "needs": ("import not_installed_anywhere\nclass Mine: pass", "needs not_installed_anywhere"),
    "fails": ("1 / 0", "ZeroDivisionError"),
    "syntax": ("class Mine(", "SyntaxError"),
    "a_function": ("def Mine(): pass", "subclass of Optim"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_class_is_refused_with_the_reason(name: str, mine: Path) -> None:
    text, reason = BROKEN[name]
    future = "from __future__ import annotations\n"
    head = future * text.startswith(future) + "from dataclasses import dataclass\nfrom vitrail import Optim\n"
    write(mine, f"mine_{name}", head + text.removeprefix(future))
    with pytest.raises(UsageError, match=r"optim\.class") as error:
        merge(Run(), {"optim": {"class": f"mine_{name}:Mine"}}, imports=True)
    assert reason in str(error.value)


def test_a_file_imports_nothing_unless_it_is_trusted(mine: Path) -> None:
    write(mine, "traced", "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n1 / 0")
    text = "optim: {class: 'traced:Mine'}"
    with pytest.raises(UsageError, match="--import traced"):
        from_yaml(text, Run())
    assert not (mine / "traced.ran").exists()
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        from_yaml(text, Run(), imports=True)
    assert (mine / "traced.ran").exists()


def test_yaml_round_trip(examples: None) -> None:
    run = merge(Run(), {"objective": {"class": "focal.Focal", "gamma": 3}, "optim": "lion:Lion"}, imports=True)
    assert from_yaml(to_yaml(run), Run()) == run
    from focal import Focal

    assert merge(Run(), {"objective": Focal(gamma=3.0)}) == Run(objective=Focal(gamma=3.0))
    assert merge(run, {"objective": {"gamma": 1}}).objective == Focal(gamma=1.0)
    assert type(merge(run, {"objective": {"kind": "supervised"}}).objective) is Supervised
    assert merge(run, {"objective": "mae"}).objective.kind == "mae"
    assert merge(run, {"optim": {"class": None, "lr": 0.5}}).optim == Optim(lr=0.5, betas=(0.9, 0.99))


def test_focal_without_gamma_is_cross_entropy(examples: None) -> None:
    from focal import Focal

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 10, generator=generator, dtype=torch.float64)
    labels = torch.randint(10, (64,), generator=generator)
    theirs = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)(logits, labels)
    torch.testing.assert_close(
        Focal(gamma=0.0, smoothing=0.1).losses(logits, labels).double(), theirs, rtol=1e-5, atol=1e-6
    )
    probability = logits.softmax(-1)[torch.arange(64), labels]
    closed = -((1 - probability) ** 2) * probability.log()
    torch.testing.assert_close(Focal(gamma=2.0).losses(logits, labels).double(), closed, rtol=1e-5, atol=1e-6)


@pytest.mark.train
def test_torchs_own_optimiser_through_the_door_gives_the_same_bits(tmp_path: Path, mine: Path) -> None:
    write(
        mine,
        "plain",
        """
        from dataclasses import dataclass
        import torch
        from vitrail import Optim, Schedule
        from vitrail.training.run import learning_rate

        @dataclass(frozen=True)
        class Torch(Optim):
            fused: bool = True
            def build(self, groups):
                return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=self.fused)
        """,
    )
    rate = ("--optim.lr", "2e-3", "--optim.weight-decay", "0.05")
    ours = weights(train(tmp_path / "ours", "--optim.name", "adamw", *rate))
    theirs = weights(train(tmp_path / "theirs", "--optim", "plain:Torch", *rate))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    loop = weights(train(tmp_path / "loop", "--optim", "plain:Torch", "--optim.no-fused", *rate))
    for name, tensor in ours.items():
        torch.testing.assert_close(loop[name], tensor, rtol=1e-4, atol=5e-5)


def test_lion_is_timms(examples: None) -> None:
    from lion import Lion

    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 4), nn.Linear(5, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizer = build_optimizer(ours, Lion(lr=0.01, weight_decay=0.1))
    decays = [{"params": [theirs.weight], "weight_decay": 0.1}, {"params": [theirs.bias], "weight_decay": 0.0}]
    reference = timm.optim.Lion(decays, lr=0.01, betas=(0.9, 0.99))
    for _ in range(5):
        images = torch.randn(8, 5)
        for model, each in ((ours, optimizer), (theirs, reference)):
            each.zero_grad()
            model(images).square().sum().backward()
            each.step()
    torch.testing.assert_close(ours.weight, theirs.weight)
    torch.testing.assert_close(ours.bias, theirs.bias)


def test_an_own_optimiser_does_not_step_on_a_gradient_that_is_not_finite(examples: None) -> None:
    from lion import Lion

    layer = nn.Linear(3, 2)
    optimizer = build_optimizer(layer, Lion())
    before = layer.weight.detach().clone()
    layer(torch.ones(1, 3)).sum().backward()
    update(optimizer, torch.tensor(False))
    assert torch.equal(layer.weight, before)
    update(optimizer, torch.tensor(True))
    assert not torch.equal(layer.weight, before)


@pytest.mark.train
def test_cyclic_is_torchs_warm_restarts(tmp_path: Path, examples: None) -> None:
    run = train(
        tmp_path, "--schedule", "cyclic:Cyclic", "--schedule.cycles", "2", "--schedule.end", "1e-5", "--lr", "0.01"
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in lines if line["kind"] == "train"]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.01)
    reference = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3, eta_min=1e-5)
    expected = []
    for _ in range(6):
        expected.append(reference.get_last_lr()[0])
        optimizer.step()
        reference.step()
    assert rates == pytest.approx(expected, rel=1e-4)


def test_a_schedule_must_return_a_rate(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        mine,
        "bad_rate",
        """
        from dataclasses import dataclass
        from vitrail import Schedule

        @dataclass(frozen=True)
        class Below(Schedule):
            def rate(self, now, peak):
                return -peak
        """,
    )
    words = ("--schedule", "bad_rate:Below", "--out", str(mine))
    assert cli.main(["train", "digits", *SMALL, *words]) == 2
    assert "Below.rate returned -" in capsys.readouterr().err


def test_the_built_in_schedule_uses_the_same_method() -> None:
    assert (
        Schedule(warmup=merge(Schedule(), {"warmup": "0 steps"}).warmup).rate(Moment(0.5, 100, 10, 1, 50.0), 1.0) == 0.5
    )
    assert isinstance(
        Optim(name="sgd").build([{"name": "kernels", "params": [nn.Parameter(torch.ones(1))]}]), torch.optim.SGD
    )


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("import sys; sys.exit(3)", "mine.a cannot be imported: SystemExit: 3"),
        ("class End(BaseException): pass\nraise End('now')", "mine.a cannot be imported: End: now"),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom vitrail import Supervised\n"
            "@dataclass(frozen=True)\nclass A(Supervised):\n    inner: A | None = None",
            "has a setting 'inner' of type .*A.* | None",
        ),
        ("A = 5", "is not a subclass of"),
        ("class B:\n    __slots__ = ('A',)\nA = B()", "has no class 'C'"),
        (
            "from dataclasses import dataclass\nfrom vitrail import Supervised\n@dataclass(frozen=True)\n"
            "class A(Supervised):\n    def __post_init__(self): raise ValueError('never')",
            "cannot be made with its defaults: ValueError: never",
        ),
    ],
)
def test_modules_that_do_not_give_a_class(body: str, reason: str, mine: Path) -> None:
    name = f"broken_{abs(hash(body))}"
    (mine / f"{name}.py").write_text(body)
    path = f"{name}:A.C" if "__slots__" in body else f"{name}:A"
    with pytest.raises(UsageError, match=reason.replace("mine.a", name).replace("(", "\\(")):
        merge(Run(), {"objective": {"class": path}}, imports=True)
