"""The same labels from every source: what is refused, and what the flag that settles it makes of them."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data.index import IndexJob
from jobs.data.index import run as index
from jobs.data.pack import PackJob, run
from shards.class_labels import LabelRules
from shards.errors import UserError
from shards.index import read_labels
from shards.sources.folders import FlatSource
from shards.sources.image_lists import ManifestSource
from shards.sources.kinds import Source
from shards.sources.parquets import ParquetSource
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.images import image_bytes

Labels = list[Any]
NAMES = ("ant", "bee", "cat")


def rows(labels: Labels, root: Path) -> None:
    for number in range(len(labels)):
        (root / f"{number}.png").write_bytes(image_bytes(number))


def text_of(label: Any) -> str:
    """A label as a CSV has it: a list is joined."""
    return "|".join(map(str, label)) if isinstance(label, list) else str(label)


def csv(root: Path, labels: Labels, column: str) -> str:
    rows(labels, root)
    quoted = (text_of(label).replace('"', '""') for label in labels)
    lines = [f"{column},label", *(f'{number}.png,"{label}"' for number, label in enumerate(quoted))]
    (root / "list.csv").write_text("\n".join(lines))
    return str(root / "list.csv")


def manifest(root: Path, labels: Labels) -> Source:
    return ManifestSource(files=(csv(root, labels, "path"),))


def manifest_parquet(root: Path, labels: Labels) -> Source:
    rows(labels, root)
    pq.write_table(pa.table({"path": [f"{n}.png" for n in range(len(labels))], "label": labels}), root / "list.parquet")
    return ManifestSource(files=(str(root / "list.parquet"),))


def flat(root: Path, labels: Labels) -> Source:
    return FlatSource(root=str(root), labels_csv=csv(root, labels, "file"))


def parquet(root: Path, labels: Labels) -> Source:
    images = [{"bytes": image_bytes(number), "path": None} for number in range(len(labels))]
    pq.write_table(pa.table({"image": images, "label": labels}), root / "a.parquet")
    return ParquetSource(files=(str(root / "a.parquet"),))


def tars(root: Path, labels: Labels, suffix: str) -> str:
    (root / "tars").mkdir()
    with tarfile.open(root / "tars/0.tar", "w") as archive:
        for number, label in enumerate(labels):
            said = text_of(label).encode() if suffix == "cls" else json.dumps({"label": label}).encode()
            for name, data in ((f"{number}.png", image_bytes(number)), (f"{number}.{suffix}", said)):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return str(root / "tars")


MAKE: dict[str, Callable[[Path, Labels], Source]] = {
    "manifest": manifest,
    "list in Parquet": manifest_parquet,
    "flat": flat,
    "parquet": parquet,
}
KINDS = [*MAKE, "cls", "json"]


class Dataset:
    """Labels, written into each kind of source once; packed or indexed with several rules."""

    def __init__(self, kind: str, root: Path, labels: Labels) -> None:
        self._kind, self._root = kind, root
        self._made = MAKE[kind](root, labels) if kind in MAKE else tars(root, labels, kind)

    def classes(self, *, names: tuple[str, ...] = (), **rules: Any) -> list[tuple[str, int]]:
        """The classes, with their numbers of images."""
        file = self._root / "names.txt"
        file.write_text("\n".join(names))
        labels_file, labels = str(file) if names else "", LabelRules(**rules)
        out = str(self._root / "out")
        if isinstance(self._made, str):
            field = "label" if self._kind == "json" else ""
            assert (
                index(
                    IndexJob(
                        url=self._made,
                        index_url=out,
                        label_field=field,
                        labels_file=labels_file,
                        labels=labels,
                        max_quarantined=0.5,
                    )
                )
                == 0
            )
        else:
            assert (
                run(PackJob(source=self._made, out=out, labels_file=labels_file, labels=labels, max_quarantined=0.5))
                == 0
            )
        assert verify_dataset(out, deep=True) == []
        found = read_labels(open_store(out).read("labels.parquet")).to_pylist()
        return [(row["name"], row["num_samples"]) for row in found]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_count_from_1(kind: str, tmp_path: Path) -> None:
    made = Dataset(kind, tmp_path, [1, 2, 3, 1])
    with pytest.raises(UserError, match=r"3 is a label, but the 3 names .*--labels\.numbers from-1"):
        made.classes(names=NAMES)
    assert made.classes(names=NAMES, numbers="from-1") == [("ant", 2), ("bee", 1), ("cat", 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_that_count_from_0_after_all(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Dataset(kind, tmp_path, [1, 2, 3, 1])
    assert made.classes(names=NAMES, numbers="from-0") == [("ant", 0), ("bee", 2), ("cat", 1)]
    assert "no image has label 0" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_without_class_k_it_is_said(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Dataset(kind, tmp_path, [1, 2, 1]).classes(names=NAMES) == [("ant", 0), ("bee", 2), ("cat", 1)]
    assert "no image has label 0, which is 'ant'; the largest label is 2, 'cat'" in caplog.text


@pytest.mark.parametrize("given", ["label_names", "metadata"])
def test_names_of_a_parquet_file(given: str, tmp_path: Path) -> None:
    source = parquet(tmp_path, [1, 2, 3, 1])
    assert isinstance(source, ParquetSource)
    if given == "label_names":
        source = ParquetSource(files=source.files, label_names=NAMES)
    else:
        said = json.dumps({"info": {"features": {"label": {"names": NAMES, "_type": "ClassLabel"}}}}).encode()
        table = pq.read_table(source.files[0]).replace_schema_metadata({b"huggingface": said})
        pq.write_table(table, source.files[0])
    job = PackJob(source=source, out=str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"--labels\.numbers from-1"):
        run(job)
    scans = [path.stat().st_mtime_ns for path in (tmp_path / "out/plan").iterdir()]
    assert run(PackJob(source=source, out=job.out, labels=LabelRules(numbers="from-1"))) == 0
    again = [path.stat().st_mtime_ns for path in (tmp_path / "out/plan").iterdir() if path.name.startswith("scan")]
    assert again == scans, "the images were read again"
    found = read_labels(open_store(job.out).read("labels.parquet")).to_pylist()
    assert [(row["name"], row["num_samples"]) for row in found] == [("ant", 2), ("bee", 1), ("cat", 1)]


VECTORS = [[0, 1, 0], [1, 0, 1], [0, 0, 1]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", [list, json.dumps])
def test_vectors(kind: str, write: Callable[[list[int]], Any], tmp_path: Path) -> None:
    made = Dataset(kind, tmp_path, [write(vector) for vector in VECTORS])
    with pytest.raises(UserError, match=r"the labels of 3 of 3 images are lists of 3 .*--labels\.lists positions"):
        made.classes()
    assert made.classes(lists="positions") == [("0", 1), ("1", 1), ("2", 2)]


@pytest.mark.parametrize("kind", ["list in Parquet", "parquet", "json"])
@pytest.mark.parametrize("number", [bool, float])
def test_vectors_of_other_types(kind: str, number: Callable[[int], Any], tmp_path: Path) -> None:
    made = Dataset(kind, tmp_path, [list(map(number, vector)) for vector in VECTORS])
    with pytest.raises(UserError):
        made.classes(names=NAMES)
    assert made.classes(names=NAMES, lists="positions") == [("ant", 1), ("bee", 1), ("cat", 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_classes_called_none(kind: str, tmp_path: Path) -> None:
    labels = ["None", "NA", "cat", "nan", "-1", "null"]
    made = Dataset(kind, tmp_path, labels)
    assert made.classes(names=("cat", "None", "NA", "-1", "nan", "null")) == [
        (name, 1) for name in ("cat", "None", "NA", "-1", "nan", "null")
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "labels", [["['ant', 'bee']", "['bee']"], ["ant, bee", "bee", "ant"]], ids=["pandas", "commas"]
)
def test_lists_as_text(kind: str, labels: Labels, tmp_path: Path) -> None:
    made = Dataset(kind, tmp_path, labels)
    with pytest.raises(UserError, match=r"lists written as text.*--labels\.text lists"):
        made.classes()
    assert made.classes(text="lists") == [("ant", 1 + (len(labels) > 2)), ("bee", 2)]


@pytest.mark.parametrize("kind", KINDS)
def test_labels_as_floats(kind: str, tmp_path: Path) -> None:
    assert Dataset(kind, tmp_path, [0.0, 1.0, 2.0, 1.0]).classes() == [("0", 1), ("1", 2), ("2", 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_fractions(kind: str, tmp_path: Path) -> None:
    made = Dataset(kind, tmp_path, [0.5, 1.5, 1.5])
    with pytest.raises(UserError, match=r"its label \d\.5 is not a whole number.*names"):
        made.classes()
    assert made.classes(text="names") == [("0.5", 1), ("1.5", 2)]


@pytest.mark.parametrize("kind", ["manifest", "list in Parquet", "flat", "parquet"])
def test_an_image_listed_twice_has_both_labels(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    again = pa.table({"path": ["0.png", "0.png", "1.png"], "label": ["ant", "bee", "cat"]})
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(image_bytes(number))
    source: Source
    if kind == "parquet":
        images = [{"bytes": image_bytes(int(path[0])), "path": path} for path in again["path"].to_pylist()]
        pq.write_table(pa.table({"image": images, "label": again["label"]}), tmp_path / "a.parquet")
        source = ParquetSource(files=(str(tmp_path / "a.parquet"),))
    elif kind == "list in Parquet":
        pq.write_table(again, tmp_path / "list.parquet")
        source = ManifestSource(files=(str(tmp_path / "list.parquet"),))
    else:
        (tmp_path / "list.csv").write_text("path,label\n0.png,ant\n0.png,bee\n1.png,cat\n")
        source = ManifestSource(files=(str(tmp_path / "list.csv"),))
        if kind == "flat":
            source = FlatSource(root=str(tmp_path), labels_csv=str(tmp_path / "list.csv"), file_column="path")
    assert run(PackJob(source=source, out=str(tmp_path / "out"))) == 0
    found = read_labels(open_store(str(tmp_path / "out")).read("labels.parquet")).to_pylist()
    assert [(row["name"], row["num_samples"]) for row in found] == [("ant", 1), ("bee", 1), ("cat", 1)]
    assert "1 image listed again with other labels: an image has the labels of all its rows" in caplog.text
