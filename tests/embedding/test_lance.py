"""Lance datasets, in a process of their own: once Lance is imported, forks warn."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.embedding.models import write_photos

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys
from pathlib import Path

import lance
import numpy as np

import vitrail
from tests.embedding.models import small_vit
from vitrail.errors import EmbeddingError

photos, out = sys.argv[1], Path(sys.argv[2])
path, options = out / "a.lance", {"batch": 4, "dtype": "float32"}


def refused(words, target, model=None, **more):
    try:
        vitrail.embed(model or small_vit(), photos, target, **options, **more)
    except EmbeddingError as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"{target} was not refused")


memory = vitrail.embed(small_vit(), photos, **options)
written = vitrail.embed(small_vit(), photos, path, **options)
again = vitrail.read_embeddings(path)
for found in (written, again):
    np.testing.assert_array_equal(found["class"], memory["class"])
    assert found.names == memory.names and found.settings == memory.settings
    assert [one[:2] for one in found.skipped] == [(7, "007.jpg")]
assert sorted(one.name for one in out.iterdir()) == ["a.lance", "a.skipped.csv"]

row = lance.dataset(str(path)).take([3], columns=["name", "class"]).to_pylist()[0]
assert row["name"] == memory.names[3]
np.testing.assert_array_equal(np.float32(row["class"]), memory["class"][3])

merged = small_vit()
vitrail.merge(merged, r=2)
refused("changes.merge", path, merged)
np.testing.assert_array_equal(vitrail.read_embeddings(path)["class"], memory["class"])
other = vitrail.embed(merged, photos, path, overwrite=True, **options)
assert not np.array_equal(other["class"], memory["class"])
assert sorted(one.name for one in out.iterdir()) == ["a.lance", "a.skipped.csv"]

(out / "mine.lance").mkdir()
(out / "mine.lance" / "notes.txt").write_text("my notes")
refused("not a dataset of vitrail embed", out / "mine.lance")
refused("not a dataset of vitrail embed", out / "mine.lance", overwrite=True)
assert (out / "mine.lance" / "notes.txt").read_text() == "my notes"
refused("local directory", "memory://bucket/a.lance")
"""


@pytest.mark.skipif(importlib.util.find_spec("lance") is None, reason="Lance is not installed (extra lance)")
def test_a_lance_dataset_holds_what_a_table_does(tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos", 12, broken=(7,))
    (tmp_path / "out").mkdir()
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(photos), str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
