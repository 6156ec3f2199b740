"""Changed tables from files, each read in a process of its own: a bus error would end the whole test."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vitrail.data.cache import read_arrow, stored_table, write_arrow
from vitrail.data.sources.shards import index_table

pytestmark = pytest.mark.fuzz

READ = """
import os, signal, sys
from pathlib import Path
import pyarrow as pa
from vitrail.data.cache import read_arrow
from vitrail.data.settings import Columns
from vitrail.data.sources.arrow import read_parquet
from vitrail.errors import VitrailError
os.environ["VITRAIL_CACHE"] = sys.argv[1]
for name in sys.argv[2:]:
    child = os.fork()
    if not child:
        signal.alarm(60)
        try:
            if name.endswith(".parquet"):
                for source in read_parquet(Path(name), [Path(name)], Columns()).splits.values():
                    [source[index] for index in range(len(source))]
            else:
                read_arrow(Path(name)).to_pylist()
        except (VitrailError, pa.ArrowException, OSError):
            os._exit(3)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_changed_tables_are_values_or_errors(kind: str, tmp_path: Path) -> None:
    whole = tmp_path / f"whole.{kind}"
    if kind == "arrow":
        rows = [{"shard": 0, "offset": 512 * n, "size": 9, "label": f"c{n % 3}", "id": f"{n}.jpg"} for n in range(40)]
        table = index_table(rows)
        write_arrow(whole, table.schema, lambda writer: writer.write_table(table))
    else:
        images = [{"bytes": bytes([n]) * 50, "path": f"{n}.png"} for n in range(40)]
        pq.write_table(pa.table({"image": images, "label": [f"c{n % 3}" for n in range(40)]}), whole)
    changed, data = [str(whole)], whole.read_bytes()
    for seed in range(120):
        chance, new = random.Random(seed), bytearray(data)
        for _ in range(chance.choice((1, 1, 2, 8))):
            new[chance.randrange(len(new))] = chance.choice((0, 127, 128, 255, chance.randrange(256)))
        file = tmp_path / f"{seed}.{kind}"
        file.write_bytes(new[: chance.randrange(len(new))] if seed % 8 == 0 else new)
        changed.append(str(file))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / "cache"), *changed], capture_output=True, text=True, check=False
    )
    codes = list(map(int, done.stdout.split()))
    assert len(codes) == len(changed), done.stderr[-2000:]
    wrong = {file: code for file, code in zip(changed, codes, strict=True) if code not in (0, 3)}
    assert codes[0] == 0 and 3 in codes and not wrong, (wrong, done.stderr[-2000:])


def test_an_index_whose_offsets_leave_its_text_is_refused(tmp_path: Path) -> None:
    texts = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(np.array([0, 1 << 30, 3], np.int32)), pa.py_buffer(b"abc")]
    )
    table = pa.table({"id": texts})
    write_arrow(tmp_path / "index.arrow", table.schema, lambda writer: writer.write_table(table))
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        read_arrow(tmp_path / "index.arrow")


def test_a_damaged_table_of_the_cache_is_written_again(tmp_path: Path) -> None:
    table = pa.table({"id": ["a", "b"]})
    target = tmp_path / "table.arrow"
    target.write_bytes(b"ARROW1 and nothing else")
    found = stored_table(target, table.schema, lambda writer: writer.write_table(table), "a table")
    assert found.to_pydict() == {"id": ["a", "b"]} == read_arrow(target).to_pydict()
