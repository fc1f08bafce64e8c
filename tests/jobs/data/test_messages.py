"""What packing, indexing and the card say when they refuse, each message once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.data.card import CardJob
from jobs.data.card import run as run_card
from jobs.data.pack import PackJob
from jobs.data.pack import run as run_pack
from shards.sources.folders import FolderSource
from shards.sources.kinds import VtabSource
from tests.jobs.data.test_label_rules import NAMES, VECTORS, Dataset
from tests.jobs.data.test_pack_vtab import packed, scanned, source, write_text
from tests.jobs.data.test_strange_sources import Make, folders, pack, parquet, parquet_files, put, split_column
from tests.rigs.messages import Row, row, table
from tests.rigs.prepared import example, write_prepared
from tests.rigs.vtab_tasks import OWN, write


def mistakes(_: Path, fields: dict[str, object]) -> None:
    run_card(CardJob(**fields))  # type: ignore[arg-type]


def vectors_of(folder: Path, kind: str, number: Callable[[int], Any]) -> None:
    made = Dataset(kind, folder, [list(map(number, vector)) for vector in VECTORS])
    made.classes(names=NAMES)


def folder_without_images(folder: Path) -> None:
    (folder / "none").mkdir()
    source = FolderSource(root=str(folder / "none"))
    run_pack(PackJob(out=str(folder / "out"), source=source))


def shard_after(folder: Path, edit: Callable[[bytes], bytes]) -> None:
    write(folder, "dtd")
    path = folder / "dtd" / "3.0.1" / "dtd-test.tfrecord-00000-of-00003"
    path.write_bytes(edit(path.read_bytes()))
    scanned(source("dtd", folder, split="test"))


def packed_task(folder: Path, changes: dict[str, str]) -> None:
    few = {split: [example({})] * 3 for split in OWN}
    write_prepared(folder, "oxford_flowers102", few, version="2.1.1")
    asked = {"task": "dtd", "split": "train"} | changes
    packed(asked["task"], folder, folder / "out", split=asked["split"])


def missing_shard(folder: Path) -> None:
    write(folder, "dtd")
    (folder / "dtd" / "3.0.1" / "dtd-train.tfrecord-00002-of-00003").unlink()
    list(source("dtd", folder).entries())


def originals(folder: Path, asked: dict[str, str], lists: dict[str, str]) -> None:
    for path, text in lists.items():
        write_text(folder / path, text)
    list(VtabSource(originals=str(folder), **asked).entries())  # type: ignore[arg-type]


def packing(folder: Path, make: Make) -> None:
    try:
        pack(make(folder), folder / "out")
    finally:
        assert not (folder / "out/shards").exists()


def one_hurt_image(folder: Path) -> None:
    source, out = folders(["cat", "dog"])(folder), folder / "out"
    put(folder / "images/cat/hurt.png", b"")
    pack(source, out)


def no_usable_image(folder: Path) -> None:
    for number in range(6):
        put(folder / f"images/a/{number}.jpg", b"no image")
    pack(FolderSource(root=str(folder / "images")), folder / "out")


@table(
    # card
    row("mistakes: url: /nowhere", mistakes, {"url": "/nowhere"}).says(
        "NoDatasetError: there is nothing at '/nowhere'; check the path, or pack a dataset there: patchline pack "
        "RECIPE --out /nowhere"
    ),
    row("mistakes: num_mosaic: 5000", mistakes, {"num_mosaic": 5000}).says("num_mosaic is 5000; allowed: 0 to 96"),
    # label_rules
    *(
        row(f"vectors of other types, {kind}, {number!r:.24}", vectors_of, kind, number).says(
            "the labels of 3 of 3 images are lists of 3 values, each 0 or 1; if they are vectors with a position for "
            "each class, give --labels.lists positions; if they are the ids 0 and 1 of classes: --labels.lists ids"
        )
        for kind in ("list in Parquet", "parquet", "json")
        for number in (bool, float)
    ),
    # pack
    row("a folder without images", folder_without_images).says(
        "no image found below DIR/none; give a source that has some"
    ),
    # pack_vtab
    row(
        "another number of examples than is counted: lambda data: data * 2",
        shard_after,
        lambda data: data * 2,
    ).says(
        "InvalidDataError: DIR/dtd/3.0.1/dtd-test.tfrecord-00000-of-00003 has more than the 3 examples that "
        "dataset_info.json says; prepare the dataset again"
    ),
    row(
        "another number of examples than is counted: lambda data: data[:47]",
        shard_after,
        lambda data: data[:47],
    ).says(
        "InvalidDataError: DIR/dtd/3.0.1/dtd-test.tfrecord-00000-of-00003 has 47 bytes, too few for the 3 "
        "examples that dataset_info.json says; copy the whole dataset, or prepare it again"
    ),
    row("prepared task: task: mnist", packed_task, {"task": "mnist"}).says(
        "--source.task is 'mnist'; allowed: caltech101, cifar100, dtd, flowers102, pets, sun397, svhn, "
        "patch_camelyon, eurosat, resisc45, retinopathy, clevr_count, clevr_distance, dmlab, kitti_distance, "
        "dsprites_location, dsprites_orientation, smallnorb_azimuth, smallnorb_elevation"
    ),
    row("prepared task: task: ", packed_task, {"task": ""}).says(
        "--source.task is missing; allowed: caltech101, cifar100, dtd, flowers102, pets, sun397, svhn, "
        "patch_camelyon, eurosat, resisc45, retinopathy, clevr_count, clevr_distance, dmlab, kitti_distance, "
        "dsprites_location, dsprites_orientation, smallnorb_azimuth, smallnorb_elevation"
    ),
    row("prepared task: split: val", packed_task, {"split": "val"}).says(
        "--split is 'val'; a task of VTAB-1k has train, train800, val200, test"
    ),
    row("prepared task: task: svhn", packed_task, {"task": "svhn"}).says(
        "--source.root 'DIR' has no svhn_cropped/VERSION/dataset_info.json; wanted: version 3.*.*, which TFDS "
        "makes with tfds build svhn_cropped --data_dir DIR"
    ),
    row("prepared task: task: flowers102", packed_task, {"task": "flowers102"}).says(
        "DIR/oxford_flowers102/2.1.1: split 'train' has 3 examples, and flowers102 takes those from 0 to 799; "
        "prepare the whole dataset"
    ),
    row("no other test set is set aside", lambda _: PackJob(source=VtabSource(), split_test=0.2)).says(
        "--split-test is given for a task of VTAB-1k, which has a test set; pack it with --split test"
    ),
    row("a missing shard", missing_shard).says(
        "DIR/dtd/3.0.1/dtd-train.tfrecord-00002-of-00003 is missing, although dataset_info.json counts it; copy "
        "the whole dataset, or prepare it again"
    ),
    row("originals: task: svhn ", originals, {"task": "svhn"}, {}).says(
        "--source.originals is given for svhn; allowed: dtd, eurosat, pets, resisc45; prepare this task with tfds "
        "build svhn_cropped, and give --source.root"
    ),
    row("originals: task: dtd, root: x ", originals, {"task": "dtd", "root": "x"}, {}).says(
        "--source.root and --source.originals do not go together; give one of them"
    ),
    row("originals: task: dtd ", originals, {"task": "dtd"}, {}).says(
        "--source.originals 'DIR' has no labels/train1.txt; give the folder of the dataset as published"
    ),
    row(
        "originals: task: pets annotations/trainval.txt: A_1 1 1\\n",
        originals,
        {"task": "pets"},
        {"annotations/trainval.txt": "A_1 1 1\n"},
    ).says(
        "InvalidDataError: DIR/annotations/trainval.txt has the line A_1 1 1; allowed: NAME CLASS SPECIES BREED; "
        "give the published file"
    ),
    row(
        "originals: task: pets annotations/trainval.txt: A_1 x 1 1\\n",
        originals,
        {"task": "pets"},
        {"annotations/trainval.txt": "A_1 x 1 1\n"},
    ).says(
        "InvalidDataError: DIR/annotations/trainval.txt has the line A_1 x 1 1; allowed: NAME CLASS SPECIES "
        "BREED; give the published file"
    ),
    row(
        "originals: task: pets annotations/trainval.txt: A_1 1 1 1\\nB_1 1 1 1\\n",
        originals,
        {"task": "pets"},
        {"annotations/trainval.txt": "A_1 1 1 1\nB_1 1 1 1\n"},
    ).says("InvalidDataError: DIR/annotations/trainval.txt: class 1 is B and 'A'; give the published file"),
    row(
        "originals: task: eurosat a/b/c.jpg: ",
        originals,
        {"task": "eurosat"},
        {"a/b/c.jpg": ""},
    ).says(
        "--source.originals 'DIR' has a/b/c.jpg; allowed: CLASS/IMAGE alone; give the folder that holds the class "
        "folders"
    ),
    row(
        "originals: task: eurosat c.jpg: ",
        originals,
        {"task": "eurosat"},
        {"c.jpg": ""},
    ).says(
        "--source.originals 'DIR' has c.jpg; allowed: CLASS/IMAGE alone; give the folder that holds the class folders"
    ),
    row(
        "originals: task: resisc45 a/c.jpg: ",
        originals,
        {"task": "resisc45"},
        {"a/c.jpg": ""},
    ).says(
        "--source.originals 'DIR' has 1 image of TFDS's split 'train'; resisc45 has 31,500, and their choice "
        "depends on all of them; give the folder with all images as published"
    ),
    # strange_sources
    row("file", packing, parquet([0, 1, 2], ["crane", "ant", "crane"])).says(
        "DIR/a.parquet: the classes 0 and 2 are both named 'crane'; give other names for all classes in "
        "--source.label-names, for example 'crane' and 'crane (2)'"
    ),
    row("given", packing, parquet([0], given=("a", "a "))).says(
        "--source.label-names: the classes 0 and 1 are both named 'a'; give each class its own name"
    ),
    row("Unicode forms", packing, parquet([0], ["caf\u00e9", "cafe\u0301"])).says(
        "DIR/a.parquet: the classes 0 and 1 are both named 'café'; give other names for all classes in "
        "--source.label-names, for example 'crane' and 'crane (2)'"
    ),
    row("no name", packing, parquet([0, 1], ["a", " "])).says(
        "DIR/a.parquet: class 1 has an empty name; give other names for all classes in --source.label-names, for "
        "example 'crane' and 'crane (2)'"
    ),
    row("a line break", packing, parquet([0, 1], ["a", "b\nc"])).says(
        "DIR/a.parquet: its label 'b\\nc' has a line break; allowed: text on one line; give other names for all "
        "classes in --source.label-names, for example 'crane' and 'crane (2)'"
    ),
    row("folders", packing, folders(["train", "val"])).says(
        "--source.root 'DIR/images' holds 'train', 'val', which are names of splits, not of classes; pack each as "
        "a dataset of its own:\n  patchline pack flat --source.root DIR/images/train --split train --out "
        "DATA/train\n  patchline pack flat --source.root DIR/images/val --split validation --out DATA/validation"
    ),
    row("folders in them", packing, folders(["Train/cat", "Test/dog"])).says(
        "--source.root 'DIR/images' holds 'Test', 'Train', which are names of splits, not of classes; pack each "
        "as a dataset of its own:\n  patchline pack folder --source.root DIR/images/Test --split test --out "
        "DATA/test\n  patchline pack folder --source.root DIR/images/Train --split train --out DATA/train"
    ),
    row("beside another", packing, folders(["training", "validation", "x"])).says(
        "--source.root 'DIR/images' holds 'training', 'validation', which are names of splits, not of classes; "
        "pack each as a dataset of its own:\n  patchline pack flat --source.root DIR/images/training --split train "
        "--out DATA/train\n  patchline pack flat --source.root DIR/images/validation --split validation --out "
        "DATA/validation"
    ),
    row("one split", packing, folders(["test"])).says(
        "--source.root 'DIR/images' holds 'test', which are names of splits, not of classes; pack each as a "
        "dataset of its own:\n  patchline pack flat --source.root DIR/images/test --split test --out DATA/test"
    ),
    row("one class's own folder", packing, folders(["."])).says(
        "the source has no usable image: of 2, 2 have no label (--unlabeled keep packs them without)\n  0.png: no "
        "label\n  1.png: no label\nthe classes are the folders in --source.root DIR/images, and there is none; give "
        "the folder above it (--source.root DIR), or take patchline pack flat for labels in file names or in a "
        "table"
    ),
    row(
        "parquet files",
        packing,
        parquet_files("train-0.parquet", "train-1.parquet", "validation-0.parquet", "test-0.parquet"),
    ).says(
        "--source.files are of the splits test (1 file), train (2 files), validation (1 file), which would become "
        "one dataset; pack each as its own dataset, for example: --source.files DIR/test-0.parquet --split test"
    ),
    row("rows", packing, split_column(["train", "Test"])).says(
        "column 'split' has rows of the splits train (DIR/0.parquet), test (DIR/1.parquet), which would become "
        "one dataset; write the rows of each split to files of their own, and pack these with --split"
    ),
    row(
        "their folders",
        packing,
        parquet_files("a/train/0.parquet", "a/test/0.parquet"),
    ).says(
        "--source.files are of the splits test (1 file), train (1 file), which would become one dataset; pack "
        "each as its own dataset, for example: --source.files DIR/a/test/0.parquet --split test"
    ),
    row("one hurt image", one_hurt_image).says(
        "1 of 5 images cannot be packed, more than the allowed share of 0.01; all are in DIR/out/quarantine.csv; "
        "repair them and run the same command again, or pack the others with --max-quarantined 0.2"
    ),
    row("no usable image", no_usable_image).says(
        "the source has no usable image: of 6, 6 cannot be packed\n  a/0.jpg: not a JPEG, PNG, WebP, GIF, TIFF or "
        "BMP image\n  a/1.jpg: not a JPEG, PNG, WebP, GIF, TIFF or BMP image\n  a/2.jpg: not a JPEG, PNG, WebP, "
        "GIF, TIFF or BMP image\n  … or BMP image\n  a/5.jpg: not a JPEG, PNG, WebP, GIF, TIFF or BMP image\nall "
        "reasons: column reason of DIR/out/plan/scan-*"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
