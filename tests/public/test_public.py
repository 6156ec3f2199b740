"""The public face: names, flags and exit codes that other people's scripts rely on."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import public_face
import pytest
from gathered import failures

import vitrail
from vitrail import cli, results
from vitrail.verbs.flags.declared import flags_of
from vitrail.verbs.table import VERBS

ROOT = Path(__file__).resolve().parents[2]
BUILT_IN = {"None", "Any", "Path", "Iterator", "Mapping", "Tensor", "Module", "Network", "StudyName", "T"}
"""Types of Python and torch, and names of unions."""

NAMES = """
BEiT DINO DINOv2 MAE Regression Segmentation SeveralAnswers Tokenizer
Augment Average CheckpointError Data DataError DecodeError Duration Epochs Examples ExportError MaskedPatch Model Optim
Percent Preprocess ResNetConfig Run Schedule Steps Supervised TrainingError UsageError ViTConfig VitrailError
WeightsError __version__
bench cost create demo doctor embed evaluate export finetune fit from_yaml inspect load plan predict probe recipe
regroup report save search serve study sweep to_yaml train variant vtab
AtLayer Card Engine Metric Objective ObjectiveSettings OwnPart Positions Preview ResNet Result SelfSupervised ViT freeze
reset_head
attention_distance attention_maps component_maps embedding_map head_maps neighbours patch_attention patch_components
position_tiles principal_filters relevance rollout tap_attention
"""

RUN = """
objective.blur objective.bottleneck objective.centre_momentum objective.centring objective.freeze_last_layer
objective.global_scale objective.global_size objective.hidden objective.jitter objective.local_crops
objective.local_scale objective.local_size objective.norm_last_layer objective.outputs objective.student_temperature
objective.teacher_momentum objective.teacher_temperature objective.temperature_warmup objective.view
objective.aspect objective.codes objective.commitment objective.decay objective.decoder_depth objective.decoder_heads
objective.decoder_width objective.depth objective.features objective.normalise objective.ratio
objective.smallest_block objective.tokenizer objective.width objective.huber_delta objective.gram_refresh
objective.gram_start objective.gram_weight objective.koleo_weight objective.mask_shares objective.patch_head
objective.patch_weight
accumulate activation_checkpointing augment.color_jitter augment.crop augment.cutmix augment.erasing augment.flip
augment.also augment.mixup augment.pad augment.randaugment augment.randaugment_form
augment.ratio augment.repeats augment.scale augment.three_augment
augment_on average.decay average.kind average.start batch_size cache checkpoint_every compile data.holdout decode_on
data.image_column data.label_column data.label_columns data.label_separator data.labels_per_image data.max_bad
data.answers metric.answer objective.answer_weights objective.number_loss
data.sampler data.strict data.subset data.test data.together data.train data.exclude data.include data.label_from
data.fold data.group data.ignore
calibrate
data.channels data.bits data.display preprocess.bands.bits preprocess.bands.display preprocess.bands.high
preprocess.bands.low preprocess.bands.mean preprocess.bands.std
data.validation device duration early_stop evaluate_every fewshot knn
image_size keep keep_head lora_alpha lora_on lora_rank max_nonfinite model name objective.bce_threshold
objective.class_weights objective.class_weights_beta objective.focal_gamma objective.corrupt objective.gamma_negative
objective.gamma_positive objective.head_bias distill.features distill.kind distill.temperature distill.weight teacher
objective.kind objective.logit_adjustment objective.loss objective.margin objective.mask objective.mask_after_stem
objective.other objective.smoothing objective.target optim.betas optim.clip optim.eps optim.layer_decay optim.lr
optim.momentum optim.name optim.weight_decay optim.weight_decay_end out
precision preprocess.crop preprocess.fill preprocess.image_size preprocess.interpolation preprocess.patch
preprocess.resize probe_head classes
progressive.start progressive.until schedule.drops schedule.end schedule.shape schedule.timescale schedule.warmup seed
shard time_limit timeout track tune
vit.cls_position vit.depth vit.dropout vit.drop_path vit.drop_path_shape vit.heads vit.init vit.segmentation
vit.layer_scale vit.mlp_dim vit.patch vit.place vit.pool vit.positions vit.pre_logits vit.queries vit.registers vit.stem
vit.stem_norm vit.width weights worker_kind workers
augment.class data.class metric.class metric.name objective.class optim.class schedule.class vit.attention vit.head
"""
TRAINING = f"path recipe config epochs lr resume nproc print_config dry_run {RUN}"

FLAGS = {
    "demo": "out seed",
    "plan": "path weights time_limit image_size seconds",
    "train": TRAINING,
    "finetune": TRAINING,
    "sweep": f"path recipe config lr vary seeds dev epochs out parallel devices ray dry_run {RUN}",
    "launch slurm": (
        "command nodes gpus_per_node cpus_per_task time saving name partition account option image mount setup python "
        "out restarts"
    ),
    "vtab": "weights data tasks seeds image_size steps batch_size lr config out device precision workers ray show_list",
    "study": (
        "name data transfer scale rows seeds seed known minutes longer parallel devices ray limit_images limit_steps "
        "dry_run out"
    ),
    "evaluate": (
        "model data split protocol labels groups tta calibrate image_size batch_size workers device "
        "precision engine out raw"
    ),
    "predict": (
        "model images top reject calibrate strict out merge ray tiles overlap raw "  # what is written
        "batch_size workers device precision engine"
    ),
    "embed": (
        "model paths out merge ray split tokens layers norm dtype format tiles overlap prepare image_size batch_size "
        "workers device precision engine"
    ),
    "search": "model paths like features top out raw image_size batch_size workers device precision engine",
    "inspect": (
        "model images out what layer head class_name data split count pictures image_size format batch_size device raw"
    ),
    "report": "run runs out",
    "serve": (
        "models host port allow_host allow_origin root_path forwarded_allow_ips keep_alive reject calibrate image_size "
        "batch_size queue max_mb max_megapixels deadline drain log device precision engine"
    ),
    "export": (
        "model images to out image_size output precision calibrate max_drop any_size opset device vendor vendor_from "
        "overwrite"
    ),
    "probe fewshot": (
        "model data features shots seeds l2 protocol prepare split image_size batch_size workers device precision"
    ),
    "probe knn": "model data features k temperature split image_size batch_size workers device precision",
    "probe linear": ("model data features l2 iterations seed split image_size batch_size workers device precision"),
    "probe segment": ("model data layers ignore steps seed group out image_size batch_size workers device precision"),
    "cost": (
        "model images epochs image_size classes device batch_size utilisation usd_per_hour core_days devices energy "
        "watts overhead intensity count"
    ),
    "bench": "models image_size batch_size mode device precision engines engine seconds out",
    "data audit": "path weights split folds seed out sheet raw image_size batch_size workers device precision",
    "data next": "path weights count by split out sheet raw batch_size workers device precision",
    "data augment": f"path recipe config epochs lr images draws {RUN}",
    "data check": "path out raw workers",
    "data stats": "path",
    "data pack": "path folder short_side quality shard_mb outside shuffle workers",
    "data dedup": (
        "path against model distance cosine mirrored crops out keep_list sheet raw batch_size workers device precision"
    ),
    "weights convert": "source target format branches overwrite",
    "weights info": "source tensors",
    "weights average": "source sources out kind on overwrite batch_size workers device precision",
    "weights verify": "source",
    "weights push": "source repository format licence private dry_run",
    "recipes list": "",
    "recipes show": "name yaml",
    "recipes cp": "name file",
    "completion": "shell",
    "doctor": "",
}
"""The flags of every verb, and its subjects: taking one away breaks somebody's script."""
READING = {
    *["plan", "export", "evaluate", "predict", "embed", "search", "inspect"],
    *("probe fewshot", "probe knn", "probe linear"),
    *("data audit", "data next", "data check", "data stats", "data pack", "data dedup", "weights average"),
}
"""Verbs that open data without training. They have every setting data.* of RUN, too."""


def test_all_is_what_was_promised() -> None:
    assert sorted(vitrail.__all__) == sorted(NAMES.split())


def test_parameters_defaults_and_results_are_what_was_promised() -> None:
    """If you change the public face on purpose: `python tests/public/public_face.py > tests/public/public_face.txt`."""
    promised = set(re.sub(r"\n +", " ", (ROOT / "tests" / "public" / "public_face.txt").read_text()).splitlines())
    found = set(public_face.face())
    assert {"gone": promised - found, "new": found - promised} == {"gone": set(), "new": set()}


def test_every_public_name_is_there_and_documented() -> None:
    assert failures(NAMES.split(), documented) == []


def documented(name: str) -> None:
    value = getattr(vitrail, name)
    assert isinstance(value, str) or inspect.getdoc(value)


def test_what_functions_return_is_public_and_documented() -> None:
    functions = [verb.load()[1] for verb in VERBS.values()]
    functions += [value for name in vitrail.__all__ if inspect.isfunction(value := getattr(vitrail, name))]
    returned = {word for one in functions for word in re.findall(r"\w+", str(one.__annotations__["return"]))}
    classes = {word for word in returned - BUILT_IN if word[0].isupper()}
    assert classes <= {*vitrail.__all__, *results.__all__}
    assert all(inspect.isclass(getattr(results, name)) and getattr(results, name).__doc__ for name in results.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="trian"):
        vitrail.trian  # noqa: B018
    assert set(vitrail.__all__) <= set(dir(vitrail))


def test_type_checkers_see_what_runs() -> None:
    tree = ast.parse((ROOT / "vitrail" / "__init__.py").read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname: (node.module, alias.name)
        for node in [*block.body, *tree.body]
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vitrail")
        for alias in node.names
    }
    assert typed == {name: (module, name) for name, module in vitrail._MODULE_OF.items()}


@pytest.mark.processes
def test_verbs_of_two_words_are_functions_of_a_module() -> None:
    code = "import vitrail; print(vitrail.probe.fewshot.__name__, vitrail.probe.linear.__name__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["fewshot", "linear"]


@pytest.mark.processes
def test_importing_takes_no_time() -> None:
    code = (
        "import sys, vitrail; vitrail.Run; sys.exit(bool(sys.modules.keys() & {'torch', 'docstring_parser', 'numpy'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.processes
@pytest.mark.parametrize("name", ["train", "evaluate", "cost", "inspect", "report", "serve", "export"])
def test_a_verb_is_a_function_whatever_has_been_imported(name: str) -> None:
    code = f"""
import inspect, pkgutil, vitrail
assert inspect.isfunction(vitrail.{name})
for package in pkgutil.iter_modules(vitrail.__path__):
    __import__(f"vitrail.{{package.name}}") if package.ispkg else None
assert inspect.isfunction(vitrail.{name})  # no package has its name
assert list(inspect.signature(vitrail.{name}).parameters)[0] in ("path", "model", "models", "run")
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = project.get("version") or vitrail.__version__  # setuptools may read it from here instead
    assert vitrail.__version__ == declared
    assert "version" in project or project["dynamic"] == ["version"]
    assert project["scripts"] == {"vitrail": "vitrail.cli:main"}
    assert re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == vitrail.__version__


def test_the_verbs() -> None:
    assert sorted(cli.VERBS) == sorted(FLAGS)


def test_the_flags_of_a_verb() -> None:
    assert failures(FLAGS, has_its_flags) == []


def has_its_flags(verb: str) -> None:
    _, function = cli.VERBS[verb].load()
    everywhere = "json quiet verbose traceback modules"
    of_data = [flag for flag in RUN.split() if flag.startswith("data.") and flag != "data.class"]
    settings = of_data if verb in READING else []
    assert sorted(flag.name for flag in flags_of(function)) == sorted(
        {*FLAGS[verb].split(), *everywhere.split(), *settings}
    )


@pytest.mark.parametrize(
    "verb",
    [
        "demo",
        "train",
        "finetune",
        "sweep",
        "study",
        "vtab",
        "evaluate",
        "predict",
        "embed",
        "search",
        "inspect",
        "report",
        "serve",
        "export",
        "cost",
        "bench",
        "doctor",
    ],
)
def test_keywords_are_the_flags(verb: str) -> None:
    _, function = cli.VERBS[verb].load()
    public = getattr(vitrail, verb)
    assert inspect.signature(public) == inspect.signature(function)
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    own = {flag.name for flag in flags_of(function) if "." not in flag.name}
    assert {p.name for p in parameters} <= own
