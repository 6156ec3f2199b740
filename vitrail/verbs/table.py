"""The verbs of the command line: one function each. The table names them without importing them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verb:
    """A verb: its function, as "module:function", and its purpose."""

    target: str
    summary: str

    def load(self) -> tuple[Any, Any]:
        """Import and return its module and its function."""
        module = importlib.import_module(self.target.partition(":")[0])
        return module, getattr(module, self.target.partition(":")[2])


GROUPS: dict[str, dict[str, Verb]] = {
    "learn": {
        "demo": Verb("vitrail.verbs.train.train:demo", "train on the embedded digits, in about a minute"),
        "plan": Verb("vitrail.verbs.plan.plan:plan", "recommend how to learn from these images, with time and memory"),
        "train": Verb("vitrail.verbs.train.train:train", "train a network on a folder of images"),
        "finetune": Verb("vitrail.verbs.train.train:finetune", "fine-tune a pretrained network on other images"),
        "sweep": Verb("vitrail.verbs.sweep:sweep", "find the learning rate, then retrain with several seeds and test"),
        "vtab": Verb("vitrail.verbs.vtab:vtab", "fine-tune on the 19 tasks of VTAB-1k, as in the paper's Table 9"),
        "study": Verb(
            "vitrail.verbs.study:study", "reproduce a table or a figure of the papers: train, measure, claims"
        ),
        "launch slurm": Verb("vitrail.verbs.launch:slurm", "print a batch script that trains on a Slurm cluster"),
    },
    "use": {
        "predict": Verb("vitrail.verbs.predict:predict", "name the classes of images"),
        "evaluate": Verb("vitrail.verbs.evaluate:evaluate", "measure a network: top-1, top-5, each class, confusions"),
        "embed": Verb("vitrail.verbs.embed:embed", "write the features of images to a file"),
        "search": Verb("vitrail.verbs.search:search", "find the images that are most like given ones"),
        "serve": Verb("vitrail.verbs.serve:serve", "serve networks: a page for images, and an HTTP interface"),
        "export": Verb("vitrail.verbs.export:export", "export a network to ONNX Runtime, OpenVINO or torch.export"),
    },
    "understand": {
        "inspect": Verb(
            "vitrail.verbs.inspect:inspect", "look inside a network: filters, positions, attention, features"
        ),
        "report": Verb("vitrail.verbs.report:report", "write the report of a run again, or compare runs on one page"),
        "probe fewshot": Verb("vitrail.verbs.probe:fewshot", "measure features by least squares on a few images"),
        "probe knn": Verb("vitrail.verbs.probe:knn", "measure features by nearest neighbours"),
        "probe linear": Verb("vitrail.verbs.probe:linear", "measure features by a linear classifier"),
        "probe segment": Verb(
            "vitrail.verbs.segment:segment", "measure patch tokens by a linear segmentation of masks"
        ),
        "cost": Verb("vitrail.verbs.cost:cost", "estimate the cost of training: exaFLOPs, days, money, memory"),
        "bench": Verb("vitrail.verbs.bench:bench", "measure speed and memory on this machine"),
    },
    "images": {
        "data check": Verb(
            "vitrail.verbs.data.check:check", "decode every image; list bad files, duplicates, imbalance"
        ),
        "data stats": Verb("vitrail.verbs.data.check:stats", "count splits, classes and image sizes"),
        "data pack": Verb("vitrail.verbs.data.check:pack", "write images to shards for fast reading"),
        "data dedup": Verb(
            "vitrail.verbs.data.dedup:dedup", "find duplicates, and training images that are also test images"
        ),
        "data audit": Verb(
            "vitrail.verbs.data.audit:audit", "rank labels that are probably wrong, copies with two labels, outliers"
        ),
        "data next": Verb("vitrail.verbs.data.next:next_images", "choose which unlabelled images to label next"),
    },
    "weights": {
        "weights info": Verb("vitrail.verbs.weights:info", "describe weights: architecture, card, tensors"),
        "weights convert": Verb("vitrail.verbs.weights:convert", "write weights in another library's format"),
        "weights verify": Verb("vitrail.verbs.weights:verify", "compare weights with their card and their own library"),
        "weights push": Verb("vitrail.verbs.weights:push", "upload weights to the hub, with a model card"),
    },
    "settings and help": {
        "recipes list": Verb("vitrail.verbs.recipes:list_recipes", "list the recipes"),
        "recipes show": Verb("vitrail.verbs.recipes:show_recipe", "show a recipe, or its settings"),
        "recipes cp": Verb("vitrail.verbs.recipes:copy_recipe", "copy a recipe to a YAML file that you can change"),
        "doctor": Verb("vitrail.verbs.doctor:doctor", "describe this installation, for a bug report"),
        "completion": Verb(
            "vitrail.verbs.flags.completion:completion", "print a script that completes commands in a shell"
        ),
    },
}
"""Heading in the help -> verbs."""
VERBS = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}
