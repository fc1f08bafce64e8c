"""One tar made by others: what is found, what is refused, and that it is read only once."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pytest

from shards.adoption.foreign_samples import SampleRules
from shards.adoption.foreign_tar import (
    AdoptSpec,
    LabelTask,
    TarFacts,
    TarTask,
    adopted_path,
    adopted_rows,
    read_labels,
    read_tar,
)
from shards.class_labels import LabelRules, Meaning, WrittenLabels, settle
from shards.errors import UserError
from shards.images.config import ImageLimits
from shards.store import open_store
from shards.tables import table_bytes
from tests.rigs.images import image_bytes
from tests.rigs.tables import read_table

JPEG, PNG = image_bytes(1), image_bytes(2, height=40, image_format="PNG")
GOOD = [("a.jpg", JPEG), ("a.cls", b"3"), ("d/b.png", PNG), ("d/b.cls", b"0")]


def tar_of(members: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return file.getvalue()


def task_of(folder: Path, tar: bytes, *, spec: AdoptSpec | None = None) -> TarTask:
    spec = spec or AdoptSpec(rules=SampleRules())
    (folder / "some.tar").write_bytes(tar)
    return TarTask(
        tars_url=str(folder),
        index_url=str(folder / "index"),
        spec=spec,
        spec_hash=spec.hash(),
        number=7,
        path="some.tar",
        num_bytes=len(tar),
    )


def described(folder: Path, tar: bytes, *, meaning: Meaning | None = None) -> tuple[TarFacts, list[dict[str, object]]]:
    task = task_of(folder, tar)
    number, facts = read_tar(task)
    assert number == 7
    return facts, adopted_rows(
        open_store(task.index_url), 7, meaning or Meaning(names=None), unlabeled="refuse"
    ).to_pylist()


def outcomes(rows: list[dict[str, object]]) -> list[tuple[object, object]]:
    return [(row["source"], row["reason"]) for row in rows]


def test_a_good_tar(tmp_path: Path) -> None:
    tar = tar_of(GOOD)
    facts, rows = described(tmp_path, tar)
    assert (facts.sha256, facts.num_fit, facts.num_refused) == (hashlib.sha256(tar).hexdigest(), 2, 0)
    assert facts.labels == ("0", "3")
    first, second = rows
    assert (first["key"], first["ext"], first["labels"], first["orientation"]) == ("a", "jpg", ["3"], 1)
    assert (second["key"], second["source"], second["height"]) == ("d/b", "some.tar/d/b.png", 40)
    for row, data in ((first, JPEG), (second, PNG)):
        offset, size = row["offset"], row["size"]
        assert isinstance(offset, int)
        assert isinstance(size, int)
        assert tar[offset : offset + size] == data


def test_a_description_is_made_once(tmp_path: Path) -> None:
    task = task_of(tmp_path, tar_of(GOOD))
    facts = read_tar(task)
    (tmp_path / "some.tar").unlink()
    assert read_tar(task) == facts
    other = AdoptSpec(rules=SampleRules(), limits=ImageLimits(max_bytes=5))
    with pytest.raises(UserError, match="changed while it was indexed"):
        read_tar(TarTask(**{**vars(task), "spec": other, "spec_hash": other.hash()}))


def test_bad_samples_are_refused_alone(tmp_path: Path) -> None:
    gif = image_bytes(1, image_format="GIF")
    members = [
        ("t.jpg", JPEG[:100]),
        ("t.cls", b"1"),
        ("g.jpg", gif),
        ("g.cls", b"1"),
        ("n.jpg", JPEG),
        ("n.cls", b"-1"),
    ]
    facts, rows = described(tmp_path, tar_of([*members, *GOOD]))
    assert (facts.num_fit, facts.num_refused) == (3, 2)
    found = dict(outcomes(rows))
    assert "truncated" in str(found["some.tar/t.jpg"])
    assert found["some.tar/g.jpg"] == "a gif image; allowed in shards are jpg, png, webp"
    assert found["some.tar/n.jpg"] == "no label"
    assert found["some.tar/a.jpg"] is None


def test_names_that_are_not_utf_8(tmp_path: Path) -> None:
    _, rows = described(tmp_path, tar_of([("\udcff.jpg", JPEG), ("\udcff.cls", b"1")]))
    assert [(row["key"], row["reason"]) for row in rows] == [("\\xff", None)]


def test_only_the_labels_of_the_file(tmp_path: Path) -> None:
    members = [
        (f"{number}.{suffix}", data)
        for number, label in enumerate((b"shark", b"1", b"2", b"ray"))
        for suffix, data in (("jpg", JPEG), ("cls", label))
    ]
    meaning = settle(LabelRules(numbers="from-0"), WrittenLabels.of([]), listed=("tench", "shark"))
    _, rows = described(tmp_path, tar_of(members), meaning=meaning)
    assert [row["labels"] for row in rows[:2]] == [["shark"], ["shark"]]
    assert [row["reason"] for row in rows] == [None, None, "unknown label '2'", "unknown label 'ray'"]


def test_labels_that_are_no_integers_are_told_apart(tmp_path: Path) -> None:
    members = [
        (f"{number}.{suffix}", data)
        for number, label in enumerate((b"7", b"1.0", b"12", b"\xd9\xa3"))
        for suffix, data in (("jpg", JPEG), ("cls", label))
    ]
    facts, rows = described(tmp_path, tar_of(members))
    assert [row["reason"] for row in rows] == [None] * 4
    assert facts.labels == ("1.0", "12", "7", "\u0663")
    store, meaning = open_store(str(tmp_path / "index")), Meaning(names=None)
    number, found = read_labels(LabelTask(index_url=store.url, number=7, meaning=meaning, unlabeled="refuse"))
    assert (number, found.num_labels, found.num_integers, found.num_odd) == (7, 4, 3, 1)
    assert (found.labels, found.integers) == (("1", "12", "7", "\u0663"), ("1", "12", "7"))
    settled = adopted_rows(store, 7, meaning, integers_only=True, unlabeled="refuse")
    assert settled["reason"].to_pylist() == [None, None, None, "label '\u0663' is not an integer, others are"]
    only = found.of_integers()
    assert (only.num_fit, only.num_refused, only.labels) == (3, 1, ("1", "12", "7"))


def test_of_two_samples_with_one_key_the_last_stays(tmp_path: Path) -> None:
    _, rows = described(tmp_path, tar_of([GOOD[0], GOOD[1], GOOD[2], GOOD[3], GOOD[0], GOOD[1]]))
    assert [row["reason"] for row in rows] == ["another sample of the same key follows in its tar", None, None]


def test_a_tar_that_breaks_off_is_lost(tmp_path: Path) -> None:
    facts, rows = described(tmp_path, tar_of(GOOD)[:4000])
    assert facts.num_fit == 0
    assert rows[0]["reason"] == "its tar breaks off, or has a member where other readers fail"
    assert str(rows[-1]["reason"]).startswith("damaged tar: it ends at byte 4000, inside 'd/b.png'")


def test_a_tar_with_a_member_twice_is_lost(tmp_path: Path) -> None:
    facts, _ = described(tmp_path, tar_of([GOOD[0], GOOD[0], GOOD[1]]))
    assert (facts.num_fit, facts.num_refused) == (0, 2)


def test_a_tar_that_others_may_take_differently_is_lost(tmp_path: Path) -> None:
    """Its sparse file of a gigabyte would be as large in the memory of those who read it."""
    records = b"34 GNU.sparse.realsize=1000000000\n"
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, len(records)
    sparse = header.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
    good = tar_of(GOOD[:2])
    facts, rows = described(tmp_path, good[: end_of(good)] + sparse + tar_of([("x.txt", b"")]))
    assert facts.num_fit == 0
    assert rows[-1]["reason"] == "'x.txt': a sparse file, not a file, where other readers may fail"


def end_of(tar: bytes) -> int:
    """The end of the last member."""
    used = len(tar.rstrip(b"\0"))
    return used + -used % 512


def test_a_missing_end_mark_is_told(tmp_path: Path) -> None:
    tar = tar_of(GOOD)
    facts, rows = described(tmp_path, tar[: end_of(tar)])
    assert (facts.num_fit, facts.num_refused) == (2, 1)
    assert "without an end mark" in str(rows[-1]["reason"])


def test_what_is_behind_a_damaged_stretch_is_refused(tmp_path: Path) -> None:
    good = tar_of(GOOD[:2])
    facts, rows = described(tmp_path, good[: end_of(good)] + b"g" * 1024 + tar_of(GOOD[2:]))
    assert (facts.num_fit, facts.num_refused) == (1, 2)
    assert rows[0]["reason"] is None
    assert "no header is in bytes" in str(rows[1]["reason"])
    assert rows[2]["reason"] == "after a fault of its tar, where other readers stop"


def test_the_settings_decide_the_hash(tmp_path: Path) -> None:
    """What labels mean does not: a tar is not read again for it."""
    (tmp_path / "labels.txt").write_text("a\n")
    specs = [
        AdoptSpec(rules=SampleRules()),
        AdoptSpec(rules=SampleRules(label_field="label")),
        AdoptSpec(rules=SampleRules(), limits=ImageLimits(max_bytes=5)),
    ]
    assert len({spec.hash() for spec in specs}) == 3
    assert AdoptSpec(rules=SampleRules(), labels_file=str(tmp_path / "labels.txt")).hash() == specs[0].hash()
    assert AdoptSpec(rules=SampleRules(), labels=LabelRules(numbers="from-1")).hash() == specs[0].hash()
    with pytest.raises(UserError, match="samples_per_block is 0; allowed: 1 or more"):
        AdoptSpec(rules=SampleRules(), samples_per_block=0)


@pytest.mark.parametrize("damage", ["facts", "type", "rows", "pages"])
def test_a_damaged_description_is_made_again(tmp_path: Path, damage: str) -> None:
    task = task_of(tmp_path, tar_of(GOOD))
    store, path = open_store(task.index_url), adopted_path(task.number)
    facts = read_tar(task)
    data = store.read(path)
    table = read_table(data)
    [(key, footer)] = [item for item in table.schema.metadata.items() if item[0].startswith(b"patchline")]
    if damage == "facts":
        table = table.replace_schema_metadata({key: json.dumps(json.loads(footer) | {"num_fit": 1 << 62}).encode()})
    elif damage == "type":
        table = table.set_column(table.schema.get_field_index("size"), "size", pa.array(["x"] * table.num_rows))
    elif damage == "rows":
        table = table.slice(0, 1)
    store.write(path, data[:4] + bytes(200) + data[204:] if damage == "pages" else table_bytes(table))
    assert read_tar(task) == facts
    assert store.read(path) == data
