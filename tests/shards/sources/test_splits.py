"""Names of splits among folders, files and classes: refused, where one dataset would mix them; other names are not."""

import io
import tarfile
from pathlib import Path

import pytest

from jobs.data.pack import PackJob, run
from shards.errors import UserError
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.folders import FlatSource, FolderSource
from shards.sources.splits import refuse_mixed_splits, splits_among
from shards.what_is_there import advice
from tests.rigs.images import image_bytes


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (("train", "val"), ("train", "val")),
        (("training_set", "test_set"), ("training_set", "test_set")),
        (("seg_train", "seg_test"), ("seg_train", "seg_test")),
        (("train2017", "val2017"), ("train2017", "val2017")),
        (("train_images", "val_images"), ("train_images", "val_images")),
        (("Train", "Eval"), ("Train", "Eval")),
        (("mnistTrain", "mnistTest"), ("mnistTrain", "mnistTest")),
        (("cat", "train", "val"), ("train", "val")),
        (("test",), ("test",)),
        (("train", "bus", "car"), ()),
        (("train", "unlabeled"), ("train", "unlabeled")),
        (("Test", "Extra"), ("Test", "Extra")),
        (("extra", "unlabeled"), ()),
        (("train", "extra", "car"), ()),
        (("train station", "test tube"), ()),
        (("validator", "trainer"), ()),
        (("test tube", "car"), ()),
        (("cat", "dog"), ()),
    ],
)
def test_names_that_are_splits(names: tuple[str, ...], found: tuple[str, ...]) -> None:
    assert set(splits_among(names)) == set(found)


def put(root: Path, *paths: str) -> str:
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(image_bytes(number))
    return str(root)


def tar_of(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = image_bytes(seed)
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo("a.jpg")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize(
    ("kind", "paths", "message"),
    [
        (FolderSource, ("train2017/a.jpg", "val2017/b.jpg"), "'train2017', 'val2017', which are names of splits"),
        (FolderSource, ("cat/train/a.jpg", "cat/test/b.jpg"), "lie images of the splits test .*, train"),
        (FlatSource, ("train_1.jpg", "val_2.jpg"), r"the classes 'train' \(train\), 'val' \(validation\) are names of"),
        (FlatSource, ("train/cat_1.jpg", "val/cat_2.jpg"), "lie images of the splits train .*, validation"),
    ],
)
def test_images_of_several_splits_are_refused(
    tmp_path: Path, kind: type[FolderSource | FlatSource], paths: tuple[str, ...], message: str
) -> None:
    source = kind(root=put(tmp_path / "images", *paths))
    with pytest.raises(UserError, match=message):
        run(PackJob(out=str(tmp_path / "out"), source=source))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("train.tar", "val.tar"), "are names of splits, not of classes"),
        (("train/cat.tar", "val/cat.tar"), "lie images of the splits train .*, validation"),
    ],
)
def test_tars_of_several_splits_are_refused(tmp_path: Path, names: tuple[str, ...], message: str) -> None:
    for number, name in enumerate(names):
        tar_of(tmp_path / "tars" / name, number)
    source = ClassTarsSource(root=str(tmp_path / "tars"))
    with pytest.raises(UserError, match=message):
        run(PackJob(out=str(tmp_path / "out"), source=source))


def archive_of(*members: tuple[str, bytes]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def test_a_tar_of_the_class_tars_of_several_splits_is_refused(tmp_path: Path) -> None:
    inner = archive_of(("a.jpg", image_bytes(1)))
    (tmp_path / "all.tar").write_bytes(archive_of(("train/cat.tar", inner), ("val/cat.tar", inner)))
    source = TarOfTarsSource(path=str(tmp_path / "all.tar"))
    with pytest.raises(UserError, match=r"below --source.path .* lie images of the splits train .*, validation"):
        run(PackJob(out=str(tmp_path / "out"), source=source))


def test_splits_inside_a_class_tar_are_refused(tmp_path: Path) -> None:
    images = [(name, image_bytes(number)) for number, name in enumerate(("train/0.jpg", "test/1.jpg"))]
    (tmp_path / "tars").mkdir()
    (tmp_path / "tars/cat.tar").write_bytes(archive_of(*images))
    source = ClassTarsSource(root=str(tmp_path / "tars"))
    with pytest.raises(UserError, match=r"cat.tar holds images of the splits train \(train/0.jpg\), test \(test/1"):
        run(PackJob(out=str(tmp_path / "out"), source=source))


def test_files_of_several_splits_are_refused() -> None:
    for names in (("mnistTrain.parquet", "mnistTest.parquet"), ("a/train-0.parquet", "a/val-0.parquet")):
        with pytest.raises(UserError, match=r"are of the splits train .*, (test|validation) "):
            refuse_mixed_splits(names)
    refuse_mixed_splits(("train_val.parquet", "latest.parquet", "trainer.parquet"))


def test_other_folders_are_classes_and_parts_of_them(tmp_path: Path) -> None:
    root = put(tmp_path / "images", "train/a.jpg", "bus/b.jpg", "test tube/c.jpg", "bus/testing ground/d.jpg")
    assert run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=root))) == 0


def test_splits_of_plain_images_are_packed_with_flat(tmp_path: Path) -> None:
    """As Kaggle's competitions lie: no answer sends the user back to the folder above."""
    root = put(tmp_path / "kaggle", "train/cat.1.jpg", "train/dog.2.jpg", "test/3.jpg")
    both = r"pack flat --source.root .*/test --split test .*\n.*pack flat --source.root .*/train --split train"
    with pytest.raises(UserError, match=both):
        run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=root)))
    with pytest.raises(UserError) as caught:
        run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=f"{root}/train")))
    assert "there is none; take patchline pack flat" in str(caught.value)
    assert "patchline pack flat --source.root" in advice(root)


def test_two_folders_of_one_split_become_two_datasets(tmp_path: Path) -> None:
    root = put(tmp_path / "all", "dev/cat/0.png", "eval/cat/0.png", "train/cat/0.png")
    with pytest.raises(UserError) as caught:
        run(PackJob(out=str(tmp_path / "out"), source=FolderSource(root=root)))
    for name in ("dev", "eval", "train"):
        assert f"/{name} --split {name} --out DATA/{name}" in str(caught.value)
        assert f"/{name} --out data/all-{name} --split {name}" in advice(root)
