"""The first pass over scan files: why an image cannot be packed, and how duplicates are recognised."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from shards.class_labels import are_names
from shards.images.config import Resize
from shards.packing.scan import SCAN_SCHEMA, scan_path
from shards.packing.survey import SurveyTask, labelled, reasons, survey
from shards.sources.kinds import FolderSource
from shards.store import open_store
from tests.rigs.images import class_folders
from tests.rigs.packing import pack_spec, scanned
from tests.rigs.tables import read_table

IMAGE = {"labels": ["a"], "ext": "jpg", "mode": "RGB", "reason": None}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (IMAGE, None),
        (IMAGE | {"labels": []}, "no label"),
        (IMAGE | {"labels": ["a", "x", "y"]}, "unknown label 'x'"),
        (IMAGE | {"ext": "gif", "mode": "P"}, "gif"),
        ({"labels": ["a"], "ext": None, "mode": None, "reason": "empty file"}, "empty file"),
        ({"labels": [], "ext": None, "mode": None, "reason": "empty file"}, "empty file"),
    ],
)
def test_the_first_reason_is_given(row: dict[str, object], reason: str | None) -> None:
    rows = [IMAGE, row, IMAGE]
    table = pa.Table.from_pylist(rows, schema=pa.schema([SCAN_SCHEMA.field(name) for name in IMAGE]))
    why, is_unlabeled = reasons(labelled(table, are_names(("a", "b"))), pack_spec(FolderSource(root="x")))
    found = why.to_pylist()
    assert (found[0], found[2]) == (None, None)
    assert (found[1] is None) == (reason is None)
    assert reason is None or found[1].startswith(reason)
    assert is_unlabeled.to_pylist() == [False, reason == "no label", False]


def test_images_without_a_label_may_be_kept() -> None:
    table = pa.Table.from_pylist([IMAGE | {"labels": []}], schema=SCAN_SCHEMA)
    why, is_unlabeled = reasons(table, pack_spec(FolderSource(root="x"), unlabeled="keep"))
    assert (why.to_pylist(), is_unlabeled.to_pylist()) == ([None], [False])


def test_formats_may_be_converted_where_it_is_allowed() -> None:
    table = pa.Table.from_pylist([IMAGE | {"ext": "gif", "mode": "P"}], schema=SCAN_SCHEMA)
    spec = pack_spec(FolderSource(root="x"), resize=Resize(convert=True))
    assert reasons(table, spec)[0].to_pylist() == [None]


def test_several_scan_files_are_one_survey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 2)
    root = class_folders(tmp_path / "images", num_classes=2, images_a_class=3)
    (root / "c0" / "img 1.png").write_bytes(b"")
    store, spec = open_store(str(tmp_path / "out")), pack_spec(FolderSource(root=str(root)))
    listing = scanned(store, spec)
    task = SurveyTask(
        url=store.url,
        spec=spec,
        first_number=1,
        slices_sha256=tuple(some.sha256 for some in listing.slices[1:]),
        meaning=are_names(None),
        evaluation_sets=(),
    )
    found = survey(task)
    assert (found.first_number, found.num_rows, found.labels, found.overlaps) == (1, (2, 2), ["c0", "c1"], [])
    assert found.is_fit.tolist() == [True] * 4
    shas = [row for number in (1, 2) for row in read_table(store.read(scan_path(number))).column("sha256").to_pylist()]
    assert found.sha_prefix.tolist() == [int(np.frombuffer(sha256[:8], np.uint64)[0]) for sha256 in shas]
