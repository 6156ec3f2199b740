"""The verbs of the command line: one function each. The table names them without importing them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Verb:
    """A verb: its function, as "module:function" in this package, and its purpose."""

    target: str
    summary: str

    def load(self) -> tuple[Any, Any]:
        """Import and return its module and its function."""
        name, _, function = self.target.partition(":")
        module = importlib.import_module(f"{__package__}.{name}")
        return module, getattr(module, function)


GROUPS: dict[str, dict[str, Verb]] = {
    "learn": {
        "demo": Verb("train.train:demo", "train on the embedded digits, in about a minute"),
        "plan": Verb("plan.plan:plan", "recommend how to learn from these images, with time and memory"),
        "train": Verb("train.train:train", "train a network on a folder of images"),
        "finetune": Verb("train.train:finetune", "fine-tune a pretrained network on other images"),
        "sweep": Verb("sweep:sweep", "find the learning rate, then retrain with several seeds and test"),
        "vtab": Verb("vtab:vtab", "fine-tune on the 19 tasks of VTAB-1k, as in the paper's Table 9"),
        "study": Verb("study:study", "reproduce a table or a figure of the papers: train, measure, claims"),
        "launch slurm": Verb("launch:slurm", "print a batch script that trains on a Slurm cluster"),
    },
    "use": {
        "predict": Verb("predict:predict", "name the classes of images"),
        "evaluate": Verb("evaluate:evaluate", "measure a network: top-1, top-5, each class, confusions"),
        "embed": Verb("embed:embed", "write the features of images to a file"),
        "search": Verb("search:search", "find the images that are most like given ones"),
        "serve": Verb("serve:serve", "serve networks: a page for images, and an HTTP interface"),
        "export": Verb("export:export", "export a network to ONNX Runtime, OpenVINO, torch.export or a web page"),
    },
    "understand": {
        "inspect": Verb("inspect:inspect", "look inside a network: filters, positions, attention, features"),
        "report": Verb("report:report", "write the report of a run again, or compare runs on one page"),
        "probe fewshot": Verb("probe:fewshot", "measure features by least squares on a few images"),
        "probe knn": Verb("probe:knn", "measure features by nearest neighbours"),
        "probe linear": Verb("probe:linear", "measure features by a linear classifier"),
        "probe segment": Verb("segment:segment", "measure patch tokens by a linear segmentation of masks"),
        "cost": Verb("cost:cost", "estimate the cost of training: exaFLOPs, days, money, memory"),
        "bench": Verb("bench:bench", "measure speed and memory on this machine"),
    },
    "images": {
        "data check": Verb("data.check:check", "decode every image; list bad files, duplicates, imbalance"),
        "data stats": Verb("data.check:stats", "count splits, classes and image sizes"),
        "data pack": Verb("data.check:pack", "write images to shards for fast reading"),
        "data augment": Verb("data.augment:augment", "draw what training does to images, and each augmentation alone"),
        "data dedup": Verb("data.dedup:dedup", "find duplicates, and training images that are also test images"),
        "data audit": Verb("data.audit:audit", "rank labels that are probably wrong, copies with two labels, outliers"),
        "data next": Verb("data.next:next_images", "choose which unlabelled images to label next"),
    },
    "weights": {
        "weights info": Verb("weights:info", "describe weights: architecture, card, tensors"),
        "weights convert": Verb("weights:convert", "write weights in another library's format"),
        "weights average": Verb("average:average", "average the weights of several networks (model soup)"),
        "weights verify": Verb("weights:verify", "compare weights with their card and their own library"),
        "weights push": Verb("weights:push", "upload weights to the hub, with a model card"),
    },
    "settings and help": {
        "recipes list": Verb("recipes:list_recipes", "list the recipes"),
        "recipes show": Verb("recipes:show_recipe", "show a recipe, or its settings"),
        "recipes cp": Verb("recipes:copy_recipe", "copy a recipe to a YAML file that you can change"),
        "doctor": Verb("doctor:doctor", "describe this installation, for a bug report"),
        "completion": Verb("flags.completion:completion", "print a script that completes commands in a shell"),
    },
}
"""Heading in the help -> verbs."""
VERBS = {name: verb for verbs in GROUPS.values() for name, verb in verbs.items()}
