"""The numbers that the papers publish, as data for studies, reports and tests. Torch-free.

`published.json` holds every table of the Vision Transformer paper, the results of others that its Figure 2 shows, the
numbers of the follow-up paper that its text states, and the prices of a blog post. Each entry names its source.
Accuracies are in percent unless the entry says otherwise; `None` marks a number that a table lacks.
"""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Literal

PublishedTable = Literal[
    "table1_variants",
    "table2_state_of_the_art",
    "table3_pretraining",
    "table4_finetuning",
    "table5_pretraining_size",
    "table6_scaling",
    "table7_adam_vs_sgd",
    "table8_position_embeddings",
    "table9_vtab",
    "figure2_quoted",
    "self_supervision",
    "objectnet",
    "figure8_shape",
    "cloud_cost_2020",
    "three_things",
]
"""The tables are those of the Vision Transformer paper; `three_things` is the follow-up paper."""


def published_table(entry: PublishedTable) -> dict[str, Any]:
    """Return one entry of `published.json`. Its `source` says where the numbers are from."""
    return json.loads(files("vitrail.costs").joinpath("published.json").read_text(encoding="utf-8"))[entry]
