"""Collections as strangers bring them: what becomes a class, what is refused, and what is said about it."""

import csv
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.data.pack import PackJob, run
from shards.dataset import open_dataset
from shards.errors import UserError
from shards.index import read_labels
from shards.sources.folders import FlatSource, FolderSource
from shards.sources.image_lists import ManifestSource
from shards.sources.kinds import Source
from shards.sources.parquets import ParquetSource
from shards.store import open_store
from tests.rigs.images import image_bytes

Make = Callable[[Path], Source]


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def folders(names: list[str], *, num: int = 2) -> Make:
    """`num` images in each folder."""

    def make(root: Path) -> Source:
        for place, name in enumerate(names):
            for number in range(num):
                put(root / "images" / name / f"{number}.png", image_bytes(100 * place + number))
        return FolderSource(root=str(root / "images"))

    return make


def listed(labels: list[str]) -> Make:
    """A CSV with one image for each label."""

    def make(root: Path) -> Source:
        for number in range(len(labels)):
            put(root / f"{number}.png", image_bytes(number))
        rows = [f"{number}.png,{label}" for number, label in enumerate(labels)]
        (root / "list.csv").write_text("\n".join(["path,label", *rows]), encoding="utf-8")
        return ManifestSource(files=(str(root / "list.csv"),))

    return make


def parquet(labels: list[int | None], names: list[str] | None = None, *, given: tuple[str, ...] = ()) -> Make:
    """Images with integer labels, whose names are in the file's metadata or given."""

    def make(root: Path) -> Source:
        images = [{"bytes": image_bytes(number), "path": None} for number in range(len(labels))]
        table = pa.table({"image": images, "label": pa.array(labels, pa.int64())})
        if names is not None:
            feature = {"label": {"names": names, "_type": "ClassLabel"}}
            said = json.dumps({"info": {"features": feature}}).encode()
            table = table.replace_schema_metadata({b"huggingface": said})
        pq.write_table(table, root / "a.parquet")
        return ParquetSource(files=(str(root / "a.parquet"),), label_names=given)

    return make


def parquet_files(*paths: str) -> Make:
    def make(root: Path) -> Source:
        for number, path in enumerate(paths):
            table = pa.table({"image": [{"bytes": image_bytes(number), "path": None}], "label": [number]})
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, root / path)
        return ParquetSource(files=(str(root),))

    return make


def split_column(splits: list[str | None]) -> Make:
    """Images whose rows say the split that they are of, in two files."""

    def make(root: Path) -> Source:
        for number, split in enumerate(splits):
            image = {"bytes": image_bytes(number), "path": None}
            table = pa.table({"image": [image], "label": [number], "split": pa.array([split], pa.string())})
            pq.write_table(table, root / f"{number}.parquet")
        return ParquetSource(files=(str(root),))

    return make


def pack(source: Source, out: Path, **more: object) -> list[tuple[str, int]]:
    """Packs it; returns the classes with their numbers of images."""
    assert run(PackJob(source=source, out=str(out), **more)) == 0  # type: ignore[arg-type]
    labels = read_labels(open_store(str(out)).read("labels.parquet"))
    return [(row["name"], row["num_samples"]) for row in labels.to_pylist()]


@pytest.mark.parametrize(
    ("make", "classes", "said"),
    [
        pytest.param(parquet([-1, 0, 1, 2]), {"0": 1, "1": 1, "2": 1}, "left out: 1 image;", id="-1"),
        pytest.param(parquet([-1, 0, 1], ["a", "b"]), {"a": 1, "b": 1}, "--unlabeled keep", id="-1 and names"),
        pytest.param(parquet([0, 1, None]), {"0": 1, "1": 1}, "without a label", id="null"),
        pytest.param(listed(["-1", "0", "1"]), {"0": 1, "1": 1}, "without a label", id="-1 as text"),
        pytest.param(listed(["NaN", "None", "null", "NULL", "", "cat"]), {"cat": 1}, "5 images;", id="missing"),
        pytest.param(listed(["0", "0.0", "1"]), {"0": 2, "1": 1}, "2 classes (0, 1)", id="0 and 0.0"),
        pytest.param(listed(["caf\u00e9", "cafe\u0301"]), {"caf\u00e9": 2}, "1 class", id="two Unicode forms"),
        pytest.param(folders(["\u00e9", "e\u0301", "z"]), {"\u00e9": 4, "z": 2}, "are one class", id="of folders"),
        pytest.param(folders(["cat", "cat ", "dog"]), {"cat": 4, "dog": 2}, "are one class", id="a trailing space"),
        pytest.param(folders(["Cat", "cat"]), {"Cat": 2, "cat": 2}, "'Cat', 'cat' differ only in case", id="case"),
        pytest.param(folders(["IMG"]), {"IMG": 2}, "there is only one class, 'IMG'", id="one class"),
        pytest.param(
            split_column(["train", "training", None, "x"]), dict.fromkeys("0123", 1), "4 classes", id="a split"
        ),
        pytest.param(folders(["train", "plane"]), {"plane": 2, "train": 2}, "(plane, train)", id="a class named train"),
    ],
)
def test_what_becomes_a_class(
    make: Make, classes: dict[str, int], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert dict(pack(make(tmp_path), tmp_path / "out")) == classes
    assert said in caplog.text


def test_unlabelled_images_of_a_test_split_are_kept(tmp_path: Path) -> None:
    source = parquet([-1] * 4, ["ant", "bee"])(tmp_path)
    assert pack(source, tmp_path / "out", unlabeled="keep") == [("ant", 0), ("bee", 0)]
    assert open_dataset(str(tmp_path / "out")).num_samples == 4


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("train-0.parquet", "train-1.parquet"), id="one split"),
        pytest.param(("train_val-0.parquet", "train_val-1.parquet"), id="two splits in one"),
        pytest.param(("train_val.parquet", "train.parquet"), id="two splits in one, and one of them"),
        pytest.param(("latest.parquet", "contest.parquet"), id="words that only hold a split's name"),
    ],
)
def test_files_that_are_not_of_different_splits_are_packed(names: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    source = parquet_files(*names)(tmp_path / "test")
    assert pack(source, tmp_path / "out") == [("0", 1), ("1", 1)]


HEIC = b"\x00\x00\x00\x18ftypheic" + bytes(200)


def test_a_class_without_an_image_stays_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, photo = tmp_path / "images", image_bytes(1)
    put(root / "ok/0.png", photo)
    put(root / "ok/1.png", image_bytes(2))
    put(root / "phone/0.HEIC", HEIC)
    put(root / "scan/0.png", b"")
    put(root / "twin/0.png", photo)
    with caplog.at_level(logging.INFO):
        found = pack(FolderSource(root=str(root)), tmp_path / "out", max_quarantined=0.9)
    assert found == [("ok", 2), ("phone", 0), ("scan", 0), ("twin", 0)]
    assert "without any image: 3 classes (phone, scan, twin)" in caplog.text
    assert "only one class has images, so there is nothing to tell it from" in caplog.text
    assert "phone/0.HEIC: HEIC is not read here; convert it to JPEG or PNG first" in caplog.text
    assert "scan/0.png: empty file" in caplog.text
    with (tmp_path / "out/quarantine.csv").open(newline="") as file:
        left_out = [(line["source"], line["kind"]) for line in csv.DictReader(file)]
    assert left_out == [("phone/0.HEIC", "refused"), ("scan/0.png", "refused"), ("twin/0.png", "duplicate")]


def test_the_list_of_refused_images_goes_once_none_is_refused(tmp_path: Path) -> None:
    source, out = folders(["cat", "dog"])(tmp_path), tmp_path / "out"
    put(tmp_path / "images/cat/hurt.png", b"")
    with pytest.raises(UserError):
        pack(source, out)
    assert "cat/hurt.png" in (out / "quarantine.csv").read_text()
    put(tmp_path / "images/cat/hurt.png", image_bytes(7))
    shutil.rmtree(out / "plan")
    shutil.rmtree(out / "work")
    assert pack(source, out) == [("cat", 3), ("dog", 2)]
    assert not (out / "quarantine.csv").exists()


def test_names_of_one_camera_are_one_class_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(3):
        put(tmp_path / f"images/IMG_{number}.png", image_bytes(number))
    assert pack(FlatSource(root=str(tmp_path / "images")), tmp_path / "out") == [("IMG", 3)]
    assert "there is only one class, 'IMG'" in caplog.text
