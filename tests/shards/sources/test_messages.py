"""What sources say about folders, lists and archives that they cannot read, each message once."""

import gzip
import io
import json
import math
import os
import struct
import tarfile
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from jobs.data.pack import PackJob, run
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.folders import FlatSource, FolderSource
from shards.sources.image_lists import ManifestSource
from shards.sources.kinds import DigitsSource, Source, tool_versions
from shards.sources.parquets import ParquetSource
from shards.sources.tables import read_rows, written_labels
from shards.sources.tar_members import parse_number, parse_pax
from shards.sources.tfds import DatasetKey, open_prepared, read_features
from shards.sources.tree import list_images
from shards.store import open_store
from tests.rigs.images import image_bytes
from tests.rigs.messages import Row, row, table
from tests.rigs.prepared import example, framed, masked, write_prepared
from tests.shards.sources.test_archives import CLASSES
from tests.shards.sources.test_archives import tar_of as tar_of_archives
from tests.shards.sources.test_names import put
from tests.shards.sources.test_names import tar_of as tar_of_names
from tests.shards.sources.test_parquets import write_images
from tests.shards.sources.test_tables import rows
from tests.shards.sources.test_tfds import ALL, SVHN, feature, field, read, write

EUROSAT = DatasetKey(name="eurosat", config="rgb", majors=(2,))


def length_said(number: int) -> Callable[[bytes], bytes]:
    """Another length in a record, with the right checksum."""
    told = struct.pack("<Q", number)
    return lambda record: told + struct.pack("<I", masked(told)) + record[12:]


def archive_of(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def entries_of(_: Path, source: Source) -> None:
    list(source.entries())


def class_tar_called(folder: Path, name: str) -> None:
    open_store(str(folder)).write(name, b"x")
    list(ClassTarsSource(root=str(folder)).entries())


def archive_of_all_classes(folder: Path, outer: bytes) -> None:
    (folder / "all.tar").write_bytes(outer)
    list(TarOfTarsSource(path=str(folder / "all.tar")).entries())


def label_pattern(_: Path, pattern: str) -> None:
    FlatSource(root="x", label_pattern=pattern)


def entries_below(_: Path, source: FolderSource | FlatSource) -> None:
    list(source.entries())


def lists_in_several_folders(folder: Path) -> None:
    for name in ("a/list.csv", "b/list.csv"):
        open_store(str(folder)).write(name, b"path,label\nx.jpg,cat\n")
    (folder / "x.jpg").write_bytes(b"1")
    list(ManifestSource(files=(f"{folder}/*/list.csv",)).entries())


def digits_without_scikit_learn(_: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:

        def version(package: str) -> str:
            if package == "scikit-learn":
                raise PackageNotFoundError(package)
            return "1"

        monkeypatch.setattr("importlib.metadata.version", version)
        tool_versions(DigitsSource())


def images_of_several_splits(folder: Path, kind: type[FolderSource | FlatSource], paths: tuple[str, ...]) -> None:
    source = kind(root=put(folder / "images", *paths))
    try:
        run(PackJob(out=str(folder / "out"), source=source))
    finally:
        assert not (folder / "out" / "manifest.json").exists()


def tars_of_several_splits(folder: Path, names: tuple[str, ...]) -> None:
    for number, name in enumerate(names):
        tar = folder / "tars" / name
        tar.parent.mkdir(parents=True, exist_ok=True)
        tar.write_bytes(tar_of_names({"a.jpg": image_bytes(number)}))
    source = ClassTarsSource(root=str(folder / "tars"))
    run(PackJob(out=str(folder / "out"), source=source))


def class_tars_of_splits_in_a_tar(folder: Path) -> None:
    inner = archive_of(("a.jpg", image_bytes(1)))
    (folder / "all.tar").write_bytes(archive_of(("train/cat.tar", inner), ("val/cat.tar", inner)))
    source = TarOfTarsSource(path=str(folder / "all.tar"))
    run(PackJob(out=str(folder / "out"), source=source))


def splits_inside_a_class_tar(folder: Path) -> None:
    images = [(name, image_bytes(number)) for number, name in enumerate(("train/0.jpg", "test/1.jpg"))]
    (folder / "tars").mkdir()
    (folder / "tars/cat.tar").write_bytes(archive_of(*images))
    source = ClassTarsSource(root=str(folder / "tars"))
    run(PackJob(out=str(folder / "out"), source=source))


def splits_of_plain_images(folder: Path) -> None:
    root = put(folder / "kaggle", "train/cat.1.jpg", "train/dog.2.jpg", "test/3.jpg")
    run(PackJob(out=str(folder / "out"), source=FolderSource(root=root)))


def parquets_of_other_names(folder: Path) -> None:
    write_images(folder / "a.parquet", [0], names={"names": ["cat", "dog"]})
    write_images(folder / "b.parquet", [0], names={"names": ["dog", "cat"]})
    list(ParquetSource(files=(str(folder),)).entries())


def parquet_with_names(folder: Path, names: Any) -> None:
    path = write_images(folder / "a.parquet", [0], names={"names": names})
    ParquetSource(files=(str(path),)).known_labels()


def list_without_end(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    rows(str(path))


def unclosed_quote(folder: Path, row: str, name: str) -> None:
    comma = "\t" if name.endswith(".tsv") else ","
    lines = [f"path{comma}label", f"0.jpg{comma}dog", row, *(f"{number}.jpg{comma}dog" for number in range(9))]
    (folder / name).write_text("\n".join(lines))
    rows(str(folder / name))


def list_with_header(folder: Path, header: str) -> None:
    (folder / "t.csv").write_text(f"{header}\na.jpg,cat\n")
    rows(str(folder / "t.csv"))


def list_without_a_header(folder: Path) -> None:
    (folder / "t.csv").write_text("a.jpg,cat\nb.jpg,dog\n")
    rows(str(folder / "t.csv"))


def list_that_unpacks_without_end(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("shards.sources.tables._SMALL", 1 << 20)
        bomb = folder / "a.csv.gz"
        bomb.write_bytes(gzip.compress(b"path,label\n" + b"\n" * (8 << 20)))
        list(read_rows(str(bomb), {"path-column": "path"}))


def label(_: Path, value: Any) -> None:
    written_labels(value, separator="|")


def tar_number(_: Path, field: bytes) -> None:
    parse_number(field)


def pax_records(_: Path, data: bytes) -> None:
    parse_pax(data)


def description(tmp_path: Path, info: dict[str, object]) -> None:
    folder = write(tmp_path, info=info)
    open_prepared(str(folder), SVHN)


def description_in_bytes(tmp_path: Path, data: bytes) -> None:
    folder = write(tmp_path)
    (folder / "dataset_info.json").write_bytes(data)
    open_prepared(str(tmp_path), SVHN)


def missing_split(folder: Path) -> None:
    write_prepared(folder, "eurosat", {"train": [b"x"]}, version="2.0.0", config="rgb")
    open_prepared(str(folder), EUROSAT).num_examples("validation")


def record_after_an_edit(folder: Path, edit: Callable[[bytes], bytes]) -> None:
    read(framed(b"one") + edit(framed(b"twotwo")), folder)


def features(_: Path, data: bytes) -> None:
    read_features(data, ["x", "image", "ids"])


def listing(_: Path, root: str) -> None:
    list(list_images(root))


@table(
    # archives
    row("settings: ClassTarsSource()", entries_of, ClassTarsSource()).says(
        "--source.root is missing; give the folder or s3://bucket/prefix that holds the tars"
    ),
    row("settings: TarOfTarsSource()", entries_of, TarOfTarsSource()).says(
        "--source.path is ''; give a tar of class tars, a file or s3://bucket/key"
    ),
    row(
        "settings: TarOfTarsSource(path=/nowhere/x.tar)",
        entries_of,
        TarOfTarsSource(path="/nowhere/x.tar"),
    ).says("--source.path '/nowhere/x.tar' does not exist; give a tar of class tars"),
    *(
        row(f"compressed class tars, {name}", class_tar_called, name).says(
            "…n01.… of DIR is compressed, so no image can be read from it by its offset; decompress it first, e.g. "
            "with gunzip"
        )
        for name in ("n01.tar.gz", "n01.tgz", "deeper/n01.TAR.BZ2")
    ),
    row(
        "a damaged archive of all classes: cut off",
        archive_of_all_classes,
        tar_of_archives(*((f"{label}.tar", tar) for label, tar in CLASSES.items()))[:15000],
    ).says(
        "--source.path 'DIR/all.tar', the archive: damaged tar: it ends at byte 15000, inside 'n01.tar', after 1 "
        "members; give the whole archive, as it was published"
    ),
    row("a damaged archive of all classes: not a tar", archive_of_all_classes, b"x" * 2000).says(
        "--source.path 'DIR/all.tar', the archive: damaged tar: no header is in bytes 0 to 2000, after 0 members; "
        "give the whole archive, as it was published"
    ),
    row(
        "a damaged archive of all classes: compressed",
        archive_of_all_classes,
        b"\x1f\x8b" + bytes(2000),
    ).says(
        "--source.path 'DIR/all.tar', the archive: it is compressed; images cannot be read by offset: decompress "
        "it first; give the whole archive, as it was published"
    ),
    row(
        "a damaged archive of all classes: a compressed class tar",
        archive_of_all_classes,
        tar_of_archives(("n01.tar.gz", b"x")),
    ).says(
        "n01.tar.gz of DIR/all.tar is compressed, so no image can be read from it by its offset; decompress it "
        "first, e.g. with gunzip"
    ),
    row(
        "a damaged archive of all classes: a class tar above it",
        archive_of_all_classes,
        tar_of_archives(("../n01.tar", b"x")),
    ).says(
        "--source.path 'DIR/all.tar', ../n01.tar: a path with a '..' part; give the whole archive, as it was published"
    ),
    # folders
    row("label pattern, (", label_pattern, "(").says(
        "--source.label-pattern '(' is not a pattern: missing ), unterminated subpattern at position 0"
    ),
    row("label pattern, no group", label_pattern, "no group").says(
        "--source.label-pattern 'no group' has 0 groups; allowed: exactly one, around the label, e.g. '([^_]+)_'"
    ),
    row("label pattern, (two)(groups)", label_pattern, "(two)(groups)").says(
        "--source.label-pattern '(two)(groups)' has 2 groups; allowed: exactly one, around the label, e.g. '([^_]+)_'"
    ),
    row("root, FolderSource(kind='folde", entries_below, FolderSource()).says(
        "--source.root is missing; give the folder or s3://bucket/prefix that holds the images"
    ),
    row("root, FlatSource(kind='flat', ", entries_below, FlatSource()).says(
        "--source.root is missing; give the folder or s3://bucket/prefix that holds the images"
    ),
    row("root, FolderSource(kind='folde", entries_below, FolderSource(root="/no/such/folder")).says(
        "--source.root: '/no/such/folder/' cannot be listed: No such file or directory; give a folder that this "
        "user may read"
    ),
    # image_lists
    row("lists in several folders", lists_in_several_folders).says(
        "--source.files are in more than one folder, so relative paths in them are ambiguous; set --source.root "
        "to the folder that they start from"
    ),
    # kinds
    row("digits without scikit-learn", digits_without_scikit_learn).says(
        "the digits source needs scikit-learn; install it with: pip install 'patchline[demo]'"
    ),
    # names
    row(
        "images of several splits: FolderSource (train2017/a.jpg, val2017/b.jpg)",
        images_of_several_splits,
        FolderSource,
        ("train2017/a.jpg", "val2017/b.jpg"),
    ).says(
        "--source.root 'DIR/images' holds 'train2017', 'val2017', which are names of splits, not of classes; pack "
        "each as a dataset of its own:\n  patchline pack flat --source.root DIR/images/train2017 --split train "
        "--out DATA/train\n  patchline pack flat --source.root DIR/images/val2017 --split validation --out "
        "DATA/validation"
    ),
    row(
        "images of several splits: FolderSource (cat/train/a.jpg, cat/test/b.jpg)",
        images_of_several_splits,
        FolderSource,
        ("cat/train/a.jpg", "cat/test/b.jpg"),
    ).says(
        "below --source.root 'DIR/images' lie images of the splits test (cat/test/b.jpg), train "
        "(cat/train/a.jpg), which would become one dataset; give the folder of one split and --split, or list the "
        "images of each with patchline pack manifest"
    ),
    row(
        "images of several splits: FlatSource (train_1.jpg, val_2.jpg)",
        images_of_several_splits,
        FlatSource,
        ("train_1.jpg", "val_2.jpg"),
    ).says(
        "the classes 'train' (train), 'val' (validation) are names of splits, not of classes; pack the images of "
        "each split as a dataset of its own, with --split and only its part of the source"
    ),
    row(
        "images of several splits: FlatSource (train/cat_1.jpg, val/cat_2.jpg)",
        images_of_several_splits,
        FlatSource,
        ("train/cat_1.jpg", "val/cat_2.jpg"),
    ).says(
        "below --source.root 'DIR/images' lie images of the splits train (train/cat_1.jpg), validation "
        "(val/cat_2.jpg), which would become one dataset; give the folder of one split and --split, or list the "
        "images of each with patchline pack manifest"
    ),
    row("tars of several splits: (train.tar, val.tar)", tars_of_several_splits, ("train.tar", "val.tar")).says(
        "the classes 'train' (train), 'val' (validation) are names of splits, not of classes; pack the images of "
        "each split as a dataset of its own, with --split and only its part of the source"
    ),
    row(
        "tars of several splits: (train/cat.tar, val/cat.tar)", tars_of_several_splits, ("train/cat.tar", "val/cat.tar")
    ).says(
        "below --source.root 'DIR/tars' lie images of the splits train (train/cat.tar), validation (val/cat.tar), "
        "which would become one dataset; give the folder of one split and --split, or list the images of each "
        "with patchline pack manifest"
    ),
    row("a tar of the class tars of several splits", class_tars_of_splits_in_a_tar).says(
        "below --source.path 'DIR/all.tar' lie images of the splits train (train/cat.tar), validation "
        "(val/cat.tar), which would become one dataset; give the folder of one split and --split, or list the "
        "images of each with patchline pack manifest"
    ),
    row("splits inside a class tar", splits_inside_a_class_tar).says(
        "cat.tar holds images of the splits train (train/0.jpg), test (test/1.jpg), which would become one "
        "dataset; write the images of each split to tars of their own"
    ),
    row("splits of plain images", splits_of_plain_images).says(
        "--source.root 'DIR/kaggle' holds 'test', 'train', which are names of splits, not of classes; pack each "
        "as a dataset of its own:\n  patchline pack flat --source.root DIR/kaggle/test --split test --out "
        "DATA/test\n  patchline pack flat --source.root DIR/kaggle/train --split train --out DATA/train"
    ),
    # parquets
    row("files that disagree on names", parquets_of_other_names).says(
        "DIR/b.parquet has other names for its integer labels than the files before it; pack such files "
        "separately, or give --source.label-names for all"
    ),
    *(
        row(f"names in Parquet: {names!r}", parquet_with_names, names).says(
            f"DIR/a.parquet: its metadata names the classes of column 'label' by {names!r}; allowed: a list of texts; "
            "give --source.label-names with the names as a list, in the order of their integers"
        )
        for names in ({"0": "ant", "1": "bee"}, "abc", [1, 2])
    ),
    # tables
    *(
        row(f"not a regular file, {name}, {kind}", list_without_end, name, kind).says(
            "InvalidDataError: DIR/t.… is not a regular file; give a file, not a pipe or a device"
        )
        for name in ("t.csv", "t.parquet")
        for kind in ("pipe", "device")
    ),
    row("never closed", unclosed_quote, '1.jpg,"cat', "t.csv").says(
        "InvalidDataError: DIR/t.csv, line 3: the quotes of '1.jpg,\"cat' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("closed rows later", unclosed_quote, '1.jpg,"cat\n2.jpg,dog\n3.jpg,cat"', "t.csv").says(
        "InvalidDataError: DIR/t.csv, line 3: the quotes of '1.jpg,\"cat' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("in the path", unclosed_quote, '"1.jpg,cat', "t.csv").says(
        "InvalidDataError: DIR/t.csv, line 3: the quotes of '\"1.jpg,cat' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("in a .tsv", unclosed_quote, '1.jpg\t"cat', "t.tsv").says(
        "InvalidDataError: DIR/t.tsv, line 3: the quotes of '1.jpg\\t\"cat' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("not opened", unclosed_quote, '1.jpg,cat"', "t.csv").says(
        "InvalidDataError: DIR/t.csv, line 3: the quotes of '1.jpg,cat\"' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("text behind it", unclosed_quote, '1.jpg,"cat"s', "t.csv").says(
        "InvalidDataError: DIR/t.csv, line 3: the quotes of '1.jpg,\"cat\"s' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("closed by a doubled quote", unclosed_quote, '1.jpg,"cat""', "t.csv").says(
        'InvalidDataError: DIR/t.csv, line 3: the quotes of \'1.jpg,"cat""\' do not come in pairs around a value; '
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("a line break in a value", unclosed_quote, '1.jpg,"two\nlines"', "t.csv").says(
        "InvalidDataError: DIR/t.csv, line 3: the quotes of '1.jpg,\"two' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row(
        'header: "pa;th",label',
        list_with_header,
        '"pa;th",label',
    ).says("DIR/t.csv has no column 'path'; it has 'pa;th', 'label'; set --source.path-column"),
    row(
        'header: "path,label',
        list_with_header,
        '"path,label',
    ).says(
        "InvalidDataError: DIR/t.csv, line 1: the quotes of '\"path,label' do not come in pairs around a value; "
        'each row is one line; write a quote inside a value as "", and the value in quotes'
    ),
    row("a list without a header", list_without_a_header).says(
        "DIR/t.csv has no header: its first line is 'a.jpg', 'cat'; add a line with the columns' names, such as "
        "path,label"
    ),
    row("a list that unpacks without end", list_that_unpacks_without_end).says(
        "InvalidDataError: DIR/a.csv.gz: it unpacks to more than 1,638,000 bytes; allowed: 200 times its own "
        "size; unpack it yourself if it is right"
    ),
    row("not a label: id: 1", label, {"id": 1}).says(
        "ImageRefusedError: its label {'id': 1} is a dict; allowed: text, whole numbers and lists of them"
    ),
    row("not a label: True", label, True).says(
        "ImageRefusedError: its label True is a bool; allowed: text, whole numbers and lists of them"
    ),
    row("not a label: [[a], [b]]", label, [["a"], ["b"]]).says(
        "ImageRefusedError: its label ['a'] is a list; allowed: text, whole numbers and lists of them"
    ),
    row("not a label: math.inf", label, math.inf).says(
        "ImageRefusedError: its label inf is a float; allowed: text, whole numbers and lists of them"
    ),
    row("not a label: a * 1025", label, "a" * 1025).says(
        "ImageRefusedError: its label is too long: 1025 characters, allowed: 1024"
    ),
    row("not a label: ba| + bb * 1025", label, b"a|" + b"b" * 1025).says(
        "ImageRefusedError: its label is too long: 1025 characters, allowed: 1024"
    ),
    row("not a label: bcaf\\xe9", label, b"caf\xe9").says(
        "ImageRefusedError: its label 'caf\\\\xe9' is not UTF-8; save the list as UTF-8"
    ),
    row("not a label: cat\\ndog", label, "cat\ndog").says(
        "ImageRefusedError: its label 'cat\\ndog' has a line break; allowed: text on one line"
    ),
    row("not a label: cat\\u2028dog", label, "cat\u2028dog").says(
        "ImageRefusedError: its label 'cat\\u2028dog' has a line break; allowed: text on one line"
    ),
    row("not a label: cat\\x0bdog", label, "cat\x0bdog").says(
        "ImageRefusedError: its label 'cat\\x0bdog' has a line break; allowed: text on one line"
    ),
    row("not a label: b| * 10000", label, b"|" * 10_000).says(
        "ImageRefusedError: too many labels: 10001, allowed: 10000"
    ),
    row("not a label: [1] * 10001", label, [1] * 10_001).says(
        "ImageRefusedError: too many labels: 10001, allowed: 10000"
    ),
    # tar_members
    row("not a number of a tar header, b'0o17\\x00'", tar_number, b"0o17\0").says("ValueError: b'0o17' is not octal"),
    row("not a number of a tar header, b'-7\\x00'", tar_number, b"-7\0").says("ValueError: b'-7' is not octal"),
    row("not a number of a tar header, b'1_7\\x00'", tar_number, b"1_7\0").says("ValueError: b'1_7' is not octal"),
    row("not a number of a tar header, b'9\\x00'", tar_number, b"9\0").says(
        "ValueError: invalid literal for int() with base 8: b'9'"
    ),
    row("not a number of a tar header, b'x\\x00'", tar_number, b"x\0").says("ValueError: b'x' is not octal"),
    row("not a number of a tar header, b'\\xff\\xff\\xff\\xff\\xff\\x", tar_number, b"\xff" * 12).says(
        "ValueError: a negative number"
    ),
    row("damaged pax records, b'x'", pax_records, b"x").says("ValueError: subsection not found"),
    row("damaged pax records, b'99 path=a\\n'", pax_records, b"99 path=a\n").says(
        "ValueError: the record at byte 0 has no end or no value"
    ),
    row("damaged pax records, b'8 path=a\\n'", pax_records, b"8 path=a\n").says(
        "ValueError: the record at byte 0 has no end or no value"
    ),
    row("damaged pax records, b'0 a\\n'", pax_records, b"0 a\n").says(
        "ValueError: the record at byte 0 has no end or no value"
    ),
    row("damaged pax records, b'-5 a=b\\n'", pax_records, b"-5 a=b\n").says(
        "ValueError: the length of the record at byte 0 is not a number"
    ),
    row("damaged pax records, b'7 path\\n'", pax_records, b"7 path\n").says(
        "ValueError: the record at byte 0 has no end or no value"
    ),
    row("damaged pax records, b'11 size=-3\\n'", pax_records, b"11 size=-3\n").says(
        "ValueError: the size b'-3' is not a number of bytes"
    ),
    row("damaged pax records, b'1111111111111111111111", pax_records, b"1" * 6000 + b" a").says(
        "ValueError: the length of the record at byte 0 is not a number"
    ),
    row("damaged pax records, b'5013 size=999999999999", pax_records, b"5013 size=" + b"9" * 5002 + b"\n").says(
        "ValueError: the size b'999999…... is not a number of bytes"
    ),
    # tfds
    row("description with: name: mnist", description, {"name": "mnist"}).says(
        "DIR/svhn_cropped/3.1.0/dataset_info.json describes 'mnist:3.1.0'; wanted: svhn_cropped of version 3.*.*; "
        "give its folder, or TFDS's data folder, as --source.root"
    ),
    row(
        "description with: configName: x",
        description,
        {"configName": "x"},
    ).says(
        "DIR/svhn_cropped/3.1.0/dataset_info.json describes 'svhn_cropped/x:3.1.0'; wanted: svhn_cropped of "
        "version 3.*.*; give its folder, or TFDS's data folder, as --source.root"
    ),
    row(
        "description with: version: 4.0.0",
        description,
        {"version": "4.0.0"},
    ).says(
        "DIR/svhn_cropped/3.1.0/dataset_info.json describes 'svhn_cropped:4.0.0'; wanted: svhn_cropped of version "
        "3.*.*; give its folder, or TFDS's data folder, as --source.root"
    ),
    row(
        "description with: version: None",
        description,
        {"version": None},
    ).says(
        "DIR/svhn_cropped/3.1.0/dataset_info.json describes 'svhn_cropped:None'; wanted: svhn_cropped of version "
        "3.*.*; give its folder, or TFDS's data folder, as --source.root"
    ),
    row(
        "description with: fileFormat: array_record",
        description,
        {"fileFormat": "array_record"},
    ).says(
        "DIR/svhn_cropped/3.1.0/dataset_info.json: the examples are in 'array_record' files; allowed: tfrecord; "
        "write them again with tfds build --file_format=tfrecord, or convert them with tfds convert_format "
        "--out_file_format=tfrecord"
    ),
    row("description with: splits: ", description, {"splits": {}}).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: it has no "
        "list of splits; prepare it again"
    ),
    row("description with: splits: [3]", description, {"splits": [3]}).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: it has a "
        "split named None; prepare it again"
    ),
    row(
        "description with: splits: [name: ../x]",
        description,
        {"splits": [{"name": "../x"}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: it has a "
        "split named '../x'; prepare it again"
    ),
    row(
        "description with: splits: [name: a, name: a]",
        description,
        {"splits": [{"name": "a"}, {"name": "a"}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: it has a "
        "split named 'a'; prepare it again"
    ),
    row(
        "description with: splits: [name: a, shardLengths: 3]",
        description,
        {"splits": [{"name": "a", "shardLengths": 3}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: the "
        "shardLengths of split 'a' are not a list of at most 100000; prepare it again"
    ),
    row(
        "description with: splits: [name: a, shardLengths: [-1]]",
        description,
        {"splits": [{"name": "a", "shardLengths": ["-1"]}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: a shard of "
        "split 'a' has '-1' examples; prepare it again"
    ),
    row(
        "description with: splits: [name: a, shardLengths: [1.5]]",
        description,
        {"splits": [{"name": "a", "shardLengths": [1.5]}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: a shard of "
        "split 'a' has 1.5 examples; prepare it again"
    ),
    row(
        "description with: splits: [name: a, shardLengths: [True]]",
        description,
        {"splits": [{"name": "a", "shardLengths": [True]}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: a shard of "
        "split 'a' has True examples; prepare it again"
    ),
    row(
        "description with: splits: [name: a, shardLengths: [9 * 30]]",
        description,
        {"splits": [{"name": "a", "shardLengths": ["9" * 30]}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: a shard of "
        "split 'a' has '999999999999999999999999999999' examples; prepare it again"
    ),
    row(
        "description with: splits: [name: a, shardLengths: [9999999999999]]",
        description,
        {"splits": [{"name": "a", "shardLengths": ["9999999999999"]}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: split 'a' "
        "has 9999999999999 examples; prepare it again"
    ),
    row(
        "description with: splits: [name: a, filepathTemplate: SPLIT]",
        description,
        {"splits": [{"name": "a", "filepathTemplate": "{SPLIT}"}]},
    ).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: the files "
        "of split 'a' are named '{SPLIT}'; allowed: {DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}; prepare it "
        "again"
    ),
    row("not a description, b''", description_in_bytes, b"").says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: Expecting "
        "value: line 1 column 1 (char 0); prepare it again"
    ),
    row("not a description, b'[]'", description_in_bytes, b"[]").says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: it is [], "
        "not an object; prepare it again"
    ),
    row("not a description, b'\\xff'", description_in_bytes, b"\xff").says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: 'utf-8' "
        "codec can't decode byte 0xff in position 0: invalid start byte; prepare it again"
    ),
    row("not a description, b'[[[[[[[[[[[[[[[[[[[[[[", description_in_bytes, b"[" * 100).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: Expecting "
        "value: line 1 column 101 (char 100); prepare it again"
    ),
    row("not a description, b'{\"name\": 1'", description_in_bytes, json.dumps({"name": 1})[:-1].encode()).says(
        "InvalidDataError: DIR/svhn_cropped/3.1.0/dataset_info.json is not a description of a dataset: Expecting "
        "',' delimiter: line 1 column 11 (char 10); prepare it again"
    ),
    row("a missing split", missing_split).says(
        "DIR/eurosat/rgb/2.0.0 has no split 'validation', but train; prepare it again"
    ),
    row(
        "a record after: length_said(1 << 60)",
        record_after_an_edit,
        length_said(1 << 60),
    ).says("DamagedShardError: record 1 is cut off: it has 1152921504606846976 bytes, and 6 are left in the file"),
    row(
        "a record after: length_said((1 << 64) - 1)",
        record_after_an_edit,
        length_said((1 << 64) - 1),
    ).says("DamagedShardError: record 1 is cut off: it has 18446744073709551615 bytes, and 6 are left in the file"),
    row("a record after: length_said(7)", record_after_an_edit, length_said(7)).says(
        "DamagedShardError: record 1 is cut off: it has 7 bytes, and 6 are left in the file"
    ),
    row(
        "a record after: record[:-1]",
        record_after_an_edit,
        lambda record: record[:-1],
    ).says("DamagedShardError: record 1 is cut off: it has 6 bytes, and 5 are left in the file"),
    row(
        "a record after: record[:13]",
        record_after_an_edit,
        lambda record: record[:13],
    ).says("DamagedShardError: record 1 is cut off: it has 6 bytes, and 0 are left in the file"),
    row(
        "a record after: record[:11]",
        record_after_an_edit,
        lambda record: record[:11],
    ).says("DamagedShardError: record 1 is cut off: the file ends within its length"),
    row(
        "a record after: b\\x07 + record[1:]",
        record_after_an_edit,
        lambda record: b"\x07" + record[1:],
    ).says("DamagedShardError: the checksum of the length of record 1 is wrong; this is no TFRecord file, or damaged"),
    row(
        "a record after: b\\x89PNG * 8",
        record_after_an_edit,
        lambda _: b"\x89PNG" * 8,
    ).says("DamagedShardError: the checksum of the length of record 1 is wrong; this is no TFRecord file, or damaged"),
    row("not an Example: example(ALL)[:-1]", features, example(ALL)[:-1]).says(
        "ValueError: the field at byte 2 goes beyond the end of its message"
    ),
    row(
        "not an Example: b\\n\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x7f",
        features,
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
    ).says("ValueError: the field at byte 10 goes beyond the end of its message"),
    row("not an Example: b\\n + b\\x80 * 10 + b\\x01", features, b"\x0a" + b"\x80" * 10 + b"\x01").says(
        "ValueError: the number at byte 1 does not end"
    ),
    row("not an Example: b\\x80", features, b"\x80").says("ValueError: the number at byte 0 does not end"),
    row("not an Example: b\\x02\\x01x", features, b"\x02\x01x").says(
        "ValueError: the field at byte 2 goes beyond the end of its message"
    ),
    row("not an Example: b\\x0b\\x0c", features, b"\x0b\x0c").says(
        "ValueError: byte 1 is not a field of an Example: wire type 3"
    ),
    row("not an Example: b\\x89PNG\\r\\n\\x1a\\n", features, b"\x89PNG\r\n\x1a\n").says(
        "ValueError: the field at byte 2 goes beyond the end of its message"
    ),
    row("not an Example: feature(b) + feature(b)", features, feature(b"") + feature(b"")).says(
        "ValueError: it has the feature 'x' twice"
    ),
    row("not an Example: feature(field(1, b) + field(3, b))", features, feature(field(1, b"") + field(3, b""))).says(
        "ValueError: its feature 'x' has several lists"
    ),
    row("not an Example: feature(field(2, field(1, b12345)))", features, feature(field(2, field(1, b"12345")))).says(
        "ValueError: a packed list of floats has a part of a float"
    ),
    row(
        "not an Example: feature(field(3, field(1, b\\x01\\x80)))", features, feature(field(3, field(1, b"\x01\x80")))
    ).says("ValueError: the number at byte 14 does not end"),
    row("not an Example: feature(field(1, b\\x08\\x01))", features, feature(field(1, b"\x08\x01"))).says(
        "ValueError: a list of kind 1 has a value of wire type 0"
    ),
    row("not an Example: feature(field(4, field(1, b)))", features, feature(field(4, field(1, b"")))).says(
        "ValueError: a list of kind 4 has a value of wire type 2"
    ),
    row(
        "not an Example: feature(field(3, field(1, b\\x01 * 65537)))",
        features,
        feature(field(3, field(1, b"\x01" * 65_537))),
    ).says("ValueError: its feature 'x' has more than 65536 values"),
    row("not an Example: field(1, field(1, b) * 1001)", features, field(1, field(1, b"") * 1001)).says(
        "ValueError: it has more than 1000 features"
    ),
    row("not an Example: feature(b\\n\\x02 * 300)", features, feature(b"\x0a\x02" * 300)).says(
        "ValueError: its feature 'x' has several lists"
    ),
    # tree
    row("root to list, ", listing, "").says(
        "--source.root is missing; give the folder or s3://bucket/prefix that holds the images"
    ),
    row("root to list, /no/such/folder", listing, "/no/such/folder").says(
        "--source.root: '/no/such/folder/' cannot be listed: No such file or directory; give a folder that this "
        "user may read"
    ),
)
def test_messages(refusal: Row, tmp_path: Path) -> None:
    refusal.check(tmp_path)
