"""A prepared dataset is found by its name and version; its description is checked before it is believed."""

import json
from pathlib import Path

import pytest

from shards.errors import InvalidDataError, UserError
from shards.tfds.prepared import DatasetKey, ShardSlice, open_prepared
from tests.rigs.prepared import write_prepared

SVHN = DatasetKey(name="svhn_cropped", majors=(3,))
EUROSAT = DatasetKey(name="eurosat", config="rgb", majors=(2,))


SPLITS = {"train": [b"x"] * 7, "test": [b"x"] * 2}


def write(root: Path, version: str = "3.1.0", info: dict[str, object] | None = None) -> Path:
    return write_prepared(root, "svhn_cropped", SPLITS, version=version, info=info)


def test_slices_of_a_split_go_over_its_shards(tmp_path: Path) -> None:
    folder = write(tmp_path)
    prepared = open_prepared(str(tmp_path), SVHN)
    assert (prepared.num_examples("train"), prepared.num_examples("test")) == (7, 2)
    path = "svhn_cropped/3.1.0/svhn_cropped-train.tfrecord-{:05d}-of-00003"  # the shards have 2, 2 and 3 examples
    whole = [
        ShardSlice(path=path.format(number), first=0, count=length, length=length)
        for number, length in enumerate((2, 2, 3))
    ]
    assert list(prepared.slices("train", 0, 7)) == whole
    assert list(prepared.slices("train", 1, 5)) == [
        ShardSlice(path=path.format(0), first=1, count=1, length=2),
        whole[1],
        ShardSlice(path=path.format(2), first=0, count=1, length=3),
    ]
    assert list(prepared.slices("train", 4, 4)) == []
    in_folder = open_prepared(str(folder), SVHN)
    assert [one.path for one in in_folder.slices("test", 0, 1)] == ["svhn_cropped-test.tfrecord-00001-of-00003"]


def test_the_newest_version_that_is_accepted_is_taken(tmp_path: Path) -> None:
    for version in ("3.0.0", "3.10.0", "3.9.1", "4.0.0", "2.0.0"):
        write(tmp_path, version)
    assert open_prepared(f"{tmp_path}/", SVHN).folder == "svhn_cropped/3.10.0"


def test_names_of_classes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert open_prepared(str(tmp_path), SVHN).class_names("label") == ()
    (folder / "label.labels.txt").write_text("zero\n one \n\n")
    assert open_prepared(str(tmp_path), SVHN).class_names("label") == ("zero", "one")
    (folder / "label.labels.txt").write_bytes(b"\xff\n")
    with pytest.raises(InvalidDataError, match=r"label\.labels\.txt is not UTF-8"):
        open_prepared(str(tmp_path), SVHN).class_names("label")


def test_one_message_if_it_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--source\.root is missing; give the data folder of TensorFlow Datasets"):
        open_prepared("", SVHN)
    with pytest.raises(UserError, match=r"has no svhn_cropped/VERSION/dataset_info\.json; .* tfds build svhn_cropped"):
        open_prepared(str(tmp_path), SVHN)
    write(tmp_path, "2.0.0")
    with pytest.raises(UserError, match=r"has only version 2\.0\.0; wanted: version 3\.\*\.\*"):
        open_prepared(str(tmp_path), SVHN)


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"name": "mnist"}, r"describes 'mnist:3\.1\.0'; wanted: svhn_cropped of version 3"),
        ({"configName": "x"}, r"describes 'svhn_cropped/x:3\.1\.0'; wanted"),
        ({"version": "4.0.0"}, r"describes 'svhn_cropped:4\.0\.0'; wanted"),
        ({"version": None}, r"describes 'svhn_cropped:None'; wanted"),
        ({"fileFormat": "array_record"}, r"in 'array_record' files; allowed: tfrecord; .* --file_format=tfrecord"),
        ({"splits": {}}, "it has no list of splits"),
        ({"splits": [3]}, "a split named None"),
        ({"splits": [{"name": "../x"}]}, r"a split named '\.\./x'"),
        ({"splits": [{"name": "a"}, {"name": "a"}]}, "a split named 'a'"),
        ({"splits": [{"name": "a", "shardLengths": 3}]}, "shardLengths of split 'a' are no list"),
        ({"splits": [{"name": "a", "shardLengths": ["-1"]}]}, "a shard of split 'a' has '-1' examples"),
        ({"splits": [{"name": "a", "shardLengths": [1.5]}]}, r"a shard of split 'a' has 1\.5 examples"),
        ({"splits": [{"name": "a", "shardLengths": [True]}]}, "a shard of split 'a' has True examples"),
        ({"splits": [{"name": "a", "shardLengths": ["9" * 30]}]}, "a shard of split 'a' has '9"),
        ({"splits": [{"name": "a", "shardLengths": ["9999999999999"]}]}, "split 'a' has 9999999999999 examples"),
        ({"splits": [{"name": "a", "filepathTemplate": "{SPLIT}"}]}, r"are named '\{SPLIT\}'; allowed: \{DATASET\}-"),
    ],
)
def test_one_message_for_each_wrong_description(info: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = write(tmp_path, info=info)
    with pytest.raises(UserError, match=message):
        open_prepared(str(folder), SVHN)


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b"[" * 100, json.dumps({"name": 1})[:-1].encode()])
def test_what_is_no_description_is_refused(data: bytes, tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "dataset_info.json").write_bytes(data)
    with pytest.raises(InvalidDataError, match=r"dataset_info\.json is no description of a dataset"):
        open_prepared(str(tmp_path), SVHN)


def test_a_split_that_is_missing_is_named(tmp_path: Path) -> None:
    write_prepared(tmp_path, "eurosat", {"train": [b"x"]}, version="2.0.0", config="rgb")
    with pytest.raises(UserError, match=r"eurosat/rgb/2\.0\.0 has no split 'validation', but train"):
        open_prepared(str(tmp_path), EUROSAT).num_examples("validation")
