"""Features and nearest neighbours: `python nearest.py runs/finetune-1 photos/ photos/daisy/1.jpg`.

The model comes first, then a folder of images in any folders, then images for which similar ones are looked for.
"""

import sys
from pathlib import Path

import numpy as np

import vitrail

model, folder, *wanted = sys.argv[1:]
paths = sorted(str(path) for path in Path(folder).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))


def features(images, out):
    """Return the features [images, width] of files, and their paths. They also stay in the file `out`."""
    vitrail.embed(model, *images, out=out)
    with np.load(out) as file:
        return file["features"], file["ids"]


among, names = features(paths, "features.npz")
queries, asked = features(wanted, "queries.npz")
nearest, similarities = vitrail.neighbours(queries, among, 5)  # the cosine of two vectors: 1 is the same direction
for query, row, values in zip(asked, nearest, similarities, strict=True):
    print(f"like {query}:")
    for place, similarity in zip(row, values, strict=True):
        print(f"  {similarity:.3f}  {names[place]}")
