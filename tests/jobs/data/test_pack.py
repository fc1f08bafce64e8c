"""Packing as a whole: the same bytes however it was done, and clear ends where it cannot be done."""

import csv
import inspect
import logging
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as pds
import pyarrow.parquet as pq
import pytest
from PIL import Image

from jobs.data import index
from jobs.data.pack import PackJob, run, source_of_split
from jobs.recipes.pack import CIFAR10_CLASSES, RECIPES
from jobs.stages import commands_of
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.images.config import Resize
from shards.manifest import QUARANTINE_PATH
from shards.packing.config import Dedup
from shards.sources.kinds import DigitsSource, FlatSource, FolderSource, ParquetSource
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import file_hashes, index_rows, object_hashes
from tests.rigs.images import class_folders, image_bytes
from tests.rigs.tables import read_table

CHECKOUT = Path(__file__).resolve().parents[3]


@pytest.fixture
def job(tmp_path: Path) -> PackJob:
    """12 generated images into 4 shards."""
    root = class_folders(tmp_path / "images", num_classes=3, images_a_class=4)
    return PackJob(source=FolderSource(root=str(root)), samples_per_shard=3, samples_per_block=2)


def image_of(dataset: Dataset, shard: int, row: int) -> bytes:
    """The image that an index row points at."""
    found = index_rows(dataset, shard)[row]
    return dataset.store.read_range(dataset.shard_path(shard), found.offset, found.offset + found.size)


@pytest.mark.parametrize("where", ["folder", pytest.param("s3", marks=pytest.mark.long)])
def test_workers_and_parts_change_no_byte(
    job: PackJob, tmp_path: Path, where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 2)  # so that every part of the scan has work
    job = replace(job, samples_per_shard=1)
    assert run(replace(job, out=str(tmp_path / "one"))) == 0
    expected = file_hashes(tmp_path / "one")
    root = str(tmp_path) if where == "folder" else f"s3://{request.getfixturevalue('s3_bucket')}"
    assert run(replace(job, out=f"{root}/four", workers=4)) == 0
    assert object_hashes(open_store(f"{root}/four")) == expected
    order = random.Random(7)
    for phase in ("scan", "plan", "shards", "merge"):
        shares = [f"{part}/7" for part in range(7)] if phase in ("scan", "shards") else ["0/1"]
        for share in order.sample(shares, len(shares)):
            assert run(replace(job, out=f"{root}/parts", phase=phase, part=share)) == 0
    assert object_hashes(open_store(f"{root}/parts")) == expected
    assert verify_dataset(f"{root}/parts", deep=True) == []


def test_a_second_run_changes_nothing(job: PackJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(replace(job, out=str(out)))
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert run(replace(job, out=str(out))) == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_another_seed_is_another_order(job: PackJob, tmp_path: Path) -> None:
    orders = []
    for seed in (0, 1):
        run(replace(job, out=str(tmp_path / str(seed)), seed=seed))
        orders.append([row.source for row in index_rows(open_dataset(str(tmp_path / str(seed))), 0)])
    assert orders[0] != orders[1]


# 18 files are written, each synced and then its folder: 36 moments to die at.
KILLED_SCRIPT = """
import os, signal, sys
from jobs.data.pack import PackJob, run
from shards.sources.kinds import FolderSource

left, real = int(sys.argv[3]), os.fsync
def fsync_or_die(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    real(descriptor)
os.fsync = fsync_or_die
run(PackJob(out=sys.argv[2], source=FolderSource(root=sys.argv[1]), samples_per_shard=3, samples_per_block=2))
"""


@pytest.mark.parametrize(
    ("moment", "what"),
    [
        (1, "the listing is a temporary file"),
        (5, "the source is listed, its scan is a temporary file"),
        (11, "the plan's samples are there, plan.json is a temporary file"),
        (13, "the first tar is a temporary file"),
        (15, "a tar is there, its index is not"),
        (21, "two shards are committed, the third tar is a temporary file"),
        (33, "the labels are there, the quarantine list is not"),
        (35, "all is there but the manifest"),
        (36, "the manifest is there, and the work folder still"),
    ],
)
def test_killed_and_run_again_gives_the_same_bytes(job: PackJob, tmp_path: Path, moment: int, what: str) -> None:
    run(replace(job, out=str(tmp_path / "one")))
    assert isinstance(job.source, FolderSource)
    out = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED_SCRIPT, job.source.root, str(out), str(moment)]
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT)}
    killed = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (out / "manifest.json").exists() == (moment == 36)
    assert run(replace(job, out=str(out))) == 0
    assert file_hashes(out) == file_hashes(tmp_path / "one")


@pytest.mark.parametrize(("split", "num_samples"), [("train", 1438), ("test", 359)])
def test_digits(tmp_path: Path, split: str, num_samples: int) -> None:
    job = PackJob(out=str(tmp_path), source=DigitsSource(), split=split, samples_per_shard=500)
    assert run(job) == 0
    dataset = open_dataset(str(tmp_path))
    assert (dataset.num_samples, dataset.num_classes, dataset.manifest.split) == (num_samples, 10, split)
    assert dataset.label_names == tuple("0123456789")
    assert verify_dataset(str(tmp_path), deep=True) == []
    index = pds.dataset(str(tmp_path / "index")).to_table()
    assert index.num_rows == num_samples
    assert set(index.column("height").to_pylist()) == {32}


def test_bad_images_go_to_quarantine_and_are_counted(job: PackJob, tmp_path: Path) -> None:
    (tmp_path / "images" / "c1" / "empty.jpg").write_bytes(b"")
    (tmp_path / "images" / "c2" / "cut.jpg").write_bytes(image_bytes(3)[:20])
    out = str(tmp_path / "out")
    with pytest.raises(UserError, match=r"2 of 14 images cannot be packed.*--max-quarantined") as refusal:
        run(replace(job, out=out))
    name, share = refusal.value.flags
    assert (name, share) == ("--max-quarantined", "0.143")
    assert run(replace(job, out=out, max_quarantined=float(share))) == 0
    dataset = open_dataset(out)
    assert (dataset.num_samples, dataset.manifest.num_quarantined) == (12, 2)
    listed = read_table(dataset.store.read(QUARANTINE_PATH)).to_pylist()
    assert [(row["source"], row["phase"]) for row in listed] == [
        ("c1/empty.jpg", "scan"),
        ("c2/cut.jpg", "scan"),
    ]
    assert verify_dataset(out) == []


def test_a_refused_packing_is_planned_again(job: PackJob, tmp_path: Path) -> None:
    """With other settings, whose scan may be the same; or with the same command, once the images are repaired."""
    image, whole = tmp_path / "images/c0/img 0.JPEG", (tmp_path / "images/c0/img 0.JPEG").read_bytes()
    (tmp_path / "images/c1/copy.JPEG").write_bytes(whole)
    image.write_bytes(bytes(len(whole)))
    with pytest.raises(UserError, match=r"1 of 13 images cannot be packed"):
        run(replace(job, out=str(tmp_path / "out"), samples_per_shard=1))
    changed = replace(job, max_quarantined=0.1, seed=2)
    for name in ("out", "fresh"):
        assert run(replace(changed, out=str(tmp_path / name))) == 0
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh"), "nothing is left of the first plan"
    with pytest.raises(UserError, match="planned with other settings"):
        run(replace(changed, out=str(tmp_path / "out"), seed=3))
    with pytest.raises(UserError, match=r"1 of 13 images cannot be packed"):
        run(replace(job, out=str(tmp_path / "repaired")))
    image.write_bytes(whole)
    assert run(replace(job, out=str(tmp_path / "repaired"))) == 0
    with (tmp_path / "repaired/quarantine.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["kind"], row["source"], row["match"]) == ("duplicate", "c1/copy.JPEG", "c0/img 0.JPEG")


def test_a_refused_packing_in_phases_is_scanned_again(
    job: PackJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shards.packing.listing.SLICE_ENTRIES", 4)
    image, whole = tmp_path / "images/c0/img 0.JPEG", (tmp_path / "images/c0/img 0.JPEG").read_bytes()
    image.write_bytes(whole[:20])
    job = replace(job, out=str(tmp_path / "out"))
    scans = [replace(job, phase="scan", part=f"{part}/2") for part in range(2)]
    plan = replace(job, phase="plan")
    assert [run(each) for each in scans] == [0, 0]
    for each in (plan, replace(job, phase="shards"), plan):
        with pytest.raises(UserError, match=r"repair them and run --phase scan \(every part\) and --phase plan again"):
            run(each)
        image.write_bytes(whole)
    for each in (*scans, plan, *(replace(job, phase=phase) for phase in ("shards", "merge"))):
        assert run(each) == 0
    assert run(replace(job, out=str(tmp_path / "fresh"))) == 0
    assert file_hashes(tmp_path / "out") == file_hashes(tmp_path / "fresh")


def test_an_image_lost_after_the_plan_is_listed(job: PackJob, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    for phase in ("scan", "plan"):
        run(replace(job, out=out, phase=phase))
    (tmp_path / "images" / "c0" / "img 0.JPEG").unlink()
    run(replace(job, out=out, phase="shards"))
    run(replace(job, out=out, phase="merge", max_quarantined=0.1))
    dataset = open_dataset(out)
    (row,) = read_table(dataset.store.read(QUARANTINE_PATH)).to_pylist()
    assert (row["source"], row["phase"], row["reason"][:10]) == ("c0/img 0.JPEG", "shards", "unreadable")
    assert dataset.num_samples == 11
    assert verify_dataset(out) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": ""}, "--out is missing"),
        ({"out": "ftp://x"}, "s3://bucket/prefix"),
        ({"source": FolderSource()}, r"--source\.root is missing"),
        ({"source": FolderSource(root="/nowhere")}, r"--source\.root.*'/nowhere/?' cannot be listed"),
        ({"source": ParquetSource()}, r"--source\.files is missing"),
        ({"source": DigitsSource(), "split": "val"}, "--split is 'val'"),
        ({"source": DigitsSource(split="test")}, "set --split alone"),
        ({"workers": 0}, "workers is 0"),
        ({"samples_per_shard": 0}, "samples_per_shard is 0"),
        ({"part": "4/4", "phase": "shards"}, "--part is '4/4'"),
        ({"part": "x", "phase": "shards"}, "--part is 'x'"),
        ({"part": "0/2"}, "--part 0/2 needs --phase"),
        ({"max_quarantined": 1.5}, "max_quarantined is 1.5"),
        ({"phase": "plan"}, "scan-000000.parquet is missing"),
        ({"phase": "shards"}, "has no plan yet"),
        ({"phase": "merge"}, "has no plan yet"),
    ],
)
def test_mistakes_get_one_clear_message(job: PackJob, tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(replace(job, **{"out": str(tmp_path / "out"), **change}))  # type: ignore[arg-type]


def test_a_dataset_does_not_go_among_its_images(job: PackJob) -> None:
    root = Path(job.source.root)  # type: ignore[union-attr]
    for out in (root, root / ".." / root.name):
        with pytest.raises(UserError, match=r"the folder of the images; give another, such as --out data/"):
            run(replace(job, out=str(out)))
    assert not (root / "manifest.json").exists()


def test_the_split_is_put_into_the_source() -> None:
    assert source_of_split(DigitsSource(), "test") == DigitsSource(split="test")
    files = ParquetSource(files=("a/{split}-*.parquet",))
    assert source_of_split(files, "val") == ParquetSource(files=("a/val-*.parquet",))
    assert source_of_split(FolderSource(root="{split}"), "val") == FolderSource(root="{split}")


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        (
            "imagenet-val",
            "train",
            "the split validation, the dataset's split is train; .* --split validation",
        ),
        ("val", "validation", ""),
        ("val", "dev2", ""),
        ("cats", "train", ""),
        ("train_and_val", "test", ""),
    ],
)
def test_a_source_of_another_split_is_mentioned(
    tmp_path: Path, name: str, split: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = class_folders(tmp_path / name)
    assert run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=f"{root}/"), split=split)) == 0
    found = [text for text in caplog.messages if "split" in text]
    assert len(found) == bool(said)
    assert not said or re.search(said, found[0])


def test_real_photographs(test_data: Path, tmp_path: Path) -> None:
    root = test_data / "imagenet-sample"
    out = str(tmp_path / "out")
    run(PackJob(out=out, source=FlatSource(root=str(root)), samples_per_shard=200))
    dataset = open_dataset(out)
    assert (dataset.num_samples, dataset.num_classes) == (500, 500)
    assert verify_dataset(out, deep=True) == []
    for number, row in list(enumerate(index_rows(dataset, 2)))[::10]:
        assert image_of(dataset, 2, number) == (root / row.source).read_bytes()
        assert row.source.startswith(dataset.label_names[row.labels[0]])


def test_real_parquet_with_embedded_images(test_data: Path, tmp_path: Path) -> None:
    few = pq.ParquetFile(test_data / "cifar10" / "test.parquet").read_row_groups([1])
    pq.write_table(few, tmp_path / "test.parquet", row_group_size=300)
    source = ParquetSource(files=(str(tmp_path / "{split}.parquet"),))
    out = str(tmp_path / "out")
    run(PackJob(out=out, source=source, split="test"))
    dataset = open_dataset(out)
    assert verify_dataset(out) == []
    expected = dict(zip(few["image"].combine_chunks().field("path").to_pylist(), few.to_pylist(), strict=True))
    for shard in range(2):
        for number, row in list(enumerate(index_rows(dataset, shard)))[::50]:
            original = expected[row.source]
            assert image_of(dataset, shard, number) == original["image"]["bytes"]
            assert row.labels == (original["label"],)
    assert {row.height for row in index_rows(dataset, 0)} == {32}


def test_smaller_copies(test_data: Path, tmp_path: Path) -> None:
    root = tmp_path / "images"
    (root / "c").mkdir(parents=True)
    for number, path in enumerate(sorted((test_data / "imagenet-sample").iterdir())[:20]):
        (root / "c" / f"{number}.jpg").write_bytes(path.read_bytes())
    Image.new("P", (300, 200)).save(root / "c" / "palette.gif")
    Image.new("CMYK", (300, 200)).save(root / "c" / "print.jpg")
    Image.new("L", (50, 40)).save(root / "c" / "small.png")
    job = PackJob(source=FolderSource(root=str(root)), samples_per_shard=10)
    run(replace(job, out=str(tmp_path / "untouched"), max_quarantined=0.1))
    run(replace(job, out=str(tmp_path / "small"), resize=Resize(short_side=128, quality=85), workers=2))
    untouched, small = open_dataset(str(tmp_path / "untouched")), open_dataset(str(tmp_path / "small"))
    assert (untouched.num_samples, small.num_samples) == (22, 23)
    [refused] = read_table(untouched.store.read(QUARANTINE_PATH)).to_pylist()
    assert (refused["source"], refused["kind"]) == ("c/palette.gif", "refused")
    assert "--resize" in refused["reason"]
    assert verify_dataset(str(tmp_path / "small"), deep=True) == []
    for shard in range(3):
        for number, row in enumerate(index_rows(small, shard)):
            if row.source == "c/small.png":
                assert image_of(small, shard, number) == (root / row.source).read_bytes()
            else:
                assert (min(row.height, row.width), row.ext) == (128, "jpg")


def test_parquet_is_read_by_the_scan_alone(tmp_path: Path) -> None:
    """Row groups are read once by the scan; packing reads the copies, and the work folder is gone in the end."""
    rows = [{"image": {"bytes": image_bytes(n), "path": f"{n}.jpg"}, "label": n % 3} for n in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet", row_group_size=4)
    job = PackJob(source=ParquetSource(files=(str(tmp_path / "train.parquet"),)), samples_per_shard=7)
    for phase in ("scan", "plan"):
        run(replace(job, out=str(tmp_path / "out"), phase=phase))
    (tmp_path / "train.parquet").unlink()
    for phase in ("shards", "merge"):
        run(replace(job, out=str(tmp_path / "out"), phase=phase, workers=2))  # type: ignore[arg-type]
    assert open_dataset(str(tmp_path / "out")).num_samples == 40
    assert not (tmp_path / "out" / "work").exists()
    assert verify_dataset(str(tmp_path / "out"), deep=True) == []


def test_a_test_split_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    photos = class_folders(tmp_path / "photos", num_classes=2, images_a_class=10)
    for number, name in enumerate(sorted((photos / "c1").iterdir())):
        if number >= 5:
            name.rename(photos / "c0" / f"more {name.name}")  # 15 of c0, 5 of c1
    (photos / "c2").mkdir()
    (photos / "c2" / "only.png").write_bytes(image_bytes(999, image_format="PNG"))
    for path in sorted((photos / "c0").iterdir()):
        (photos / "c0" / f"z copy of {path.name}").write_bytes(path.read_bytes())  # 30 of c0, each twice
    source, kept = FolderSource(root=str(photos)), Dedup(duplicates="keep")
    job = PackJob(source=source, out=str(tmp_path / "data"), split_test=0.2, dedup=kept, samples_per_shard=100)
    caplog.set_level(logging.INFO)
    assert run(job) == 0
    assert "left out: 7 in the other split" in caplog.text
    train, test = (open_dataset(str(tmp_path / name)) for name in ("data", "data-test"))
    assert (train.manifest.split, test.manifest.split) == ("train", "test")
    assert train.label_names == test.label_names == ("c0", "c1", "c2")
    labels = [[row.labels[0] for row in index_rows(each, 0)] for each in (train, test)]
    assert [[found.count(number) for number in range(3)] for found in labels] == [[24, 4, 1], [6, 1, 0]]
    images = [[image_of(each, 0, row) for row in range(each.num_samples)] for each in (train, test)]
    assert not set(images[0]) & set(images[1]), "equal images are on one side"
    for url in (train.url, test.url):
        assert verify_dataset(url, deep=True) == []

    in_parts = replace(job, out=str(tmp_path / "parts"), workers=2)
    for phase in ("scan", "plan", "shards", "merge"):
        for part in ("0/2", "1/2") if phase in ("scan", "shards") else ("0/1",):
            assert run(replace(in_parts, phase=phase, part=part)) == 0
    assert file_hashes(tmp_path / "parts") == file_hashes(tmp_path / "data")
    assert run(replace(job, out=str(tmp_path / "alone"), split="test")) == 0
    assert (
        file_hashes(tmp_path / "alone") == file_hashes(tmp_path / "data-test") == file_hashes(tmp_path / "parts-test")
    )
    with pytest.raises(UserError, match=r"--split is 'val' with --split-test"):
        replace(job, split="val")


def test_what_is_not_ours_stays(job: PackJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ours = "shards/.tmp-shard-000000.tar.0123456789abcdef"
    others = {"work/thesis.txt": b"a", "proj/.tmp-notes": b"b", f"another/{ours}": b"c"}
    for name, data in {**others, ours: b"d"}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(data)
    assert run(replace(job, out=str(out))) == 0
    assert {name: (out / name).read_bytes() for name in others} == others
    assert not (out / ours).exists()
    assert run(replace(job, out=str(out))) == 0  # packed already: looks into the work folder once more
    assert (out / "work" / "thesis.txt").exists()


def test_shards_of_an_earlier_packing_are_removed(job: PackJob, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(replace(job, out=str(out))) == 0
    for file in ("manifest.json", "plan/plan.json"):
        (out / file).unlink()
    for path in sorted((tmp_path / "images" / "c2").iterdir()):
        path.unlink()
    assert run(replace(job, out=str(out))) == 0
    assert verify_dataset(str(out)) == []
    assert run(replace(job, out=str(tmp_path / "fresh"))) == 0
    assert file_hashes(out) == file_hashes(tmp_path / "fresh")


def test_an_index_of_others_is_not_packed_over(job: PackJob, tmp_path: Path) -> None:
    assert run(replace(job, out=str(tmp_path / "packed"))) == 0
    tars = tmp_path / "tars"
    tars.mkdir()
    (tars / "a.tar").write_bytes((tmp_path / "packed" / "shards" / "shard-000000.tar").read_bytes())
    assert index.run(index.IndexJob(url=str(tars))) == 0
    with pytest.raises(UserError, match=r"holds an index of tars made by others.*another --out"):
        run(replace(job, out=str(tars)))


def test_a_wrong_evaluation_set_is_told_before_images_are_read(job: PackJob, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is nothing at .*/none'; check the path"):
        run(replace(job, out=str(tmp_path / "out"), dedup=Dedup(against=(str(tmp_path / "none"),))))
    assert not (tmp_path / "out").exists()


def test_description_and_licence_change_no_other_file(job: PackJob, tmp_path: Path) -> None:
    plain, described = tmp_path / "plain", tmp_path / "described"
    assert run(replace(job, out=str(plain))) == 0
    told = replace(job, out=str(described), description="Birds of a park.\nOne a folder.", licence="CC BY 4.0")
    assert run(told) == 0
    differs = {name for name, sha256 in file_hashes(described).items() if file_hashes(plain)[name] != sha256}
    assert differs == {"manifest.json"}
    assert open_dataset(str(described)).fingerprint == open_dataset(str(plain)).fingerprint
    assert run(replace(told, out=str(plain))) == 0  # packed already: the texts are added
    assert file_hashes(plain) == file_hashes(described)
    with pytest.raises(UserError, match="--licence has 10,001 characters"):
        replace(job, licence="x" * 10_001)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_each_recipe_of_packing_is_a_documented_job(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.__name__ == name
    assert isinstance(recipe(), PackJob)
    assert recipe() == recipe()
    assert inspect.getdoc(recipe)
    assert commands_of("pack", name), "help shows a command"


def test_cifar10_keeps_the_integers_of_its_files() -> None:
    source = RECIPES["cifar10"]().source
    assert isinstance(source, ParquetSource)
    assert source.known_labels() == CIFAR10_CLASSES
    assert len(CIFAR10_CLASSES) == 10
