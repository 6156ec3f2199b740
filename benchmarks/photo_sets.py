"""Unpack public sets of photographs from clones of their repositories, as folders that `benchmarks.first_run` takes.

    git clone https://github.com/alexeygrigorev/clothing-dataset-small clones/alexeygrigorev+clothing-dataset-small
    python -m benchmarks.photo_sets clones/ sets/           every set of `SETS` whose clone is there

A clone stands in a folder named OWNER+NAME, or in its sub-folder repo, and may be bare. Only its newest commit is
read. Images are written as they are stored; masks, annotations and pictures of the documentation are left out.
"""

from __future__ import annotations

import argparse
import csv
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PhotoSet:
    """A public set of photographs in a repository."""

    repository: str
    """Owner and name on github.com."""
    place: str
    """Pattern of the paths in the repository that are images, or the table of labels."""
    to: str
    """Path in the unpacked set, with the groups of `place`."""
    labels: Callable[[str], str] | None = None
    """Translates the table of labels to a CSV file with a header, if labels are not names of folders."""

    @property
    def images(self) -> str:
        """What is given to vitrail: the folder itself, or the CSV file in it."""
        return "labels.csv" if self.labels else "."


def elpv_labels(text: str) -> str:
    """Return the labels of the solar cells as CSV; the probability of a defect, one of four, is a class."""
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return "image,label\n" + "".join(f"{image},{round(100 * float(probability))} %\n" for image, probability, _ in rows)


SETS = {
    "clothing": PhotoSet("alexeygrigorev/clothing-dataset-small", r"((?:train|validation|test)/.+)", r"\1"),
    "brain": PhotoSet("SartajBhuvaji/Brain-Tumor-Classification-DataSet", r"((?:Training|Testing)/.+)", r"\1"),
    "pets": PhotoSet("Naveen-Dodda/Sample_Pets_dataset", r"images/(([A-Za-z_]+)_\d+\.jpg)", r"\2/\1"),
    "tiles": PhotoSet("abin24/Magnetic-tile-defect-datasets.", r"(MT_\w+)/Imgs/(.+\.jpg)", r"\1/\2"),
    "solar": PhotoSet(
        "zae-bayern/elpv-dataset", r"src/elpv_dataset/data/(images/.+\.png|labels\.csv)", r"\1", elpv_labels
    ),
    "trashnet": PhotoSet("congduytran12/Trash-Classification-", r"dataset-resized/(.+/.+\.jpg)", r"\1"),
    "flowers5": PhotoSet("atiaisaac/flowers_classification", r"flowers/(.+/.+\.jpg)", r"\1"),
    "rooms4": PhotoSet("emanhamed/Houses-dataset", r"Houses Dataset/(\d+)_([a-z]+)(\.jpg)", r"\2/\1\3"),
    "monkeys10": PhotoSet("nikhildutta333/Monkey-Species-Classification", r"((?:training|validation)/.+g)", r"\1"),
    "satellite7": PhotoSet("palewithout/RSSCN7", r"(\w+/.+\.jpg)", r"\1"),
    "plants3": PhotoSet("M720d/plant-leaves-images-dataset-", r"(\w+/.+\.jpg)", r"\1"),
    "seedlings12": PhotoSet("sergeyvilov/plant_seedings", r"((?:train|validation|test)/.+)", r"\1"),
}
"""Name of a set -> where it comes from, and how it is laid out. Nothing was tuned on the last seven, and `vitrail/tiny`
learned from none of them."""


def git_folder(clones: Path, repository: str) -> Path | None:
    """Return the folder of a clone in which git runs; None if there is no such clone."""
    home = clones / repository.replace("/", "+")
    return next((place for place in (home / "repo", home) if place.is_dir()), None)


def unpack(chosen: PhotoSet, clone: Path, folder: Path) -> int:
    """Write the images of a set to `folder`, and return their number. Raises SystemExit if git fails."""
    archive = subprocess.Popen(["git", "-C", str(clone), "archive", "HEAD"], stdout=subprocess.PIPE)
    count = 0
    with tarfile.open(fileobj=archive.stdout, mode="r|") as members:
        for member in members:
            found = re.fullmatch(chosen.place, member.name)
            stored = members.extractfile(member) if found and member.isfile() else None
            if found is None or stored is None:
                continue
            target = folder / found.expand(chosen.to)
            target.parent.mkdir(parents=True, exist_ok=True)
            content = stored.read()
            if chosen.labels and target.suffix == ".csv":
                target.write_text(chosen.labels(content.decode()))
                continue
            target.write_bytes(content)
            count += 1
    if archive.wait():
        raise SystemExit(f"git archive failed in {clone}")
    return count


def main() -> None:
    """Unpack the sets whose clones are there and whose folders are not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clones", type=Path, help="folder of the clones, OWNER+NAME each")
    parser.add_argument("out", type=Path, help="folder in which a folder for each set is made")
    options = parser.parse_args()
    print_row = csv.writer(sys.stdout, delimiter="\t").writerow
    for name, chosen in SETS.items():
        folder = options.out / name
        if folder.exists():
            print_row([folder / chosen.images, "there already"])
        elif (clone := git_folder(options.clones, chosen.repository)) is None:
            print_row([name, f"no clone of https://github.com/{chosen.repository} in {options.clones}"])
        else:
            print_row([folder / chosen.images, f"{unpack(chosen, clone, folder):,} images"])


if __name__ == "__main__":
    main()
