"""Class tars and a tar of class tars: entries, images and single reads, from a folder and from a bucket."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.errors import ImageRefusedError, UserError
from shards.sources.archives import (
    MOST_OPEN_FILES,
    ClassTarsSource,
    TarOfTarsSource,
    TarReader,
    is_image_name,
    split_locator,
)
from shards.sources.entry import Entry
from shards.sources.kinds import Source
from shards.store import open_store
from tests.rigs.images import image_bytes

Put = Callable[[str, bytes], None]
MAX_BYTES = 1 << 20


def tar_of(*members: tuple[str, bytes], links: tuple[str, ...] = ()) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        for name in links:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = tarfile.SYMTYPE, "elsewhere"
            archive.addfile(info)
    return file.getvalue()


def class_tar(label: str, num_images: int, *, seed: int = 0) -> bytes:
    return tar_of(*((f"{label}_{number}.JPEG", image_bytes(seed + number)) for number in range(num_images)))


CLASSES = {"n02": class_tar("n02", 3), "n01": class_tar("n01", 4, seed=10), "n10": class_tar("n10", 2, seed=20)}
NAMES = [
    f"{label}/{label}_{number}.JPEG" for label, count in (("n01", 4), ("n02", 3), ("n10", 2)) for number in range(count)
]


@pytest.fixture(params=["folder", "bucket"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty folder or prefix, whose name has a colon as locators do."""
    if request.param == "folder":
        return str(tmp_path / "a:b")
    return f"s3://{request.getfixturevalue('s3_bucket')}/a:b"


def put_class_tars(url: str) -> ClassTarsSource:
    for label, tar in CLASSES.items():
        open_store(url).write(f"winter:21/{label}.tar", tar)
    return ClassTarsSource(root=url)


def put_tar_of_tars(url: str) -> TarOfTarsSource:
    outer = tar_of(("README.txt", b"x"), *((f"{label}.tar", tar) for label, tar in CLASSES.items()))
    open_store(url).write("ILSVRC2012_img_train.tar", outer)
    return TarOfTarsSource(path=f"{url}/ILSVRC2012_img_train.tar")


def images_of(source: Source, *, max_bytes: int = MAX_BYTES) -> list[tuple[Entry, object]]:
    return list(source.images(list(source.entries()), max_bytes=max_bytes))


@pytest.mark.parametrize(
    ("put", "labels"), [(put_class_tars, ["n01", "n02", "n10"]), (put_tar_of_tars, ["n02", "n01", "n10"])]
)
def test_entries_images_and_single_reads(url: str, put: Callable[[str], Source], labels: list[str]) -> None:
    source = put(url)
    assert not source.staged
    assert source.known_labels() is None
    entries = list(source.entries())
    assert [entry.labels for entry in entries] == [(label,) for label in labels]
    assert [(entry.num_images, entry.num_bytes) for entry in entries] == [(0, len(CLASSES[label])) for label in labels]
    images = images_of(source)
    assert sorted(entry.name for entry, _ in images) == NAMES
    for entry, image in images:
        assert isinstance(image, bytes)
        assert image == image_bytes({"n02": 0, "n01": 10, "n10": 20}[entry.labels[0]] + int(entry.name[-6]))
        assert (entry.num_images, entry.num_bytes) == (1, len(image))
    backwards = images[::-1]
    assert list(source.reader().read_many([entry.locator for entry, _ in backwards])) == [data for _, data in backwards]


def test_an_image_that_is_cut_off_is_an_error_of_its_own(url: str) -> None:
    source = put_class_tars(url)
    images = images_of(source)
    locators = [entry.locator for entry, _ in images]
    last = max((locator for locator in locators if "n10.tar" in locator), key=lambda locator: split_locator(locator)[1])
    store = open_store(url)
    path, first, _ = split_locator(last)
    store.write(path, store.read(path)[: first + 10])
    store.delete("winter:21/n02.tar")
    found = dict(zip(locators, source.reader().read_many(locators), strict=True))
    for (entry, image), read in zip(images, found.values(), strict=True):
        is_gone = entry.locator == last or entry.labels == ("n02",)
        assert isinstance(read, OSError) if is_gone else read == image


def test_more_tars_than_may_be_open(tmp_path: Path) -> None:
    num_tars = MOST_OPEN_FILES + 10
    for number in range(num_tars):
        (tmp_path / f"{number}").write_bytes(b"%03d" % number)
    locators = [f"{number % num_tars}:0:3" for number in range(2 * num_tars)]
    expected = [b"%03d" % (number % num_tars) for number in range(2 * num_tars)]
    assert list(TarReader(store=open_store(str(tmp_path))).read_many(locators)) == expected


def test_a_tar_that_became_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    [found] = TarReader(store=open_store(str(tmp_path))).read_many(["a.tar:0:3"])
    assert "is not a regular file" in str(found)
    with pytest.raises(UserError, match="does not exist"):
        list(TarOfTarsSource(path=f"{tmp_path}/a.tar").entries())


def test_what_is_no_image_is_passed_over_and_what_is_unsafe_refused(tmp_path: Path) -> None:
    jpeg = image_bytes(1)
    members = [
        ("notes.txt", b"x"),
        ("._a.jpg", b"x"),
        ("./d/b.JPG", jpeg),
        ("n01/c.png", jpeg),
        ("big.gif", bytes(9000)),
    ]
    (tmp_path / "n01.tar").write_bytes(tar_of(*members, ("../up.jpg", jpeg), links=("link.jpg",)))
    (tmp_path / "._n01.tar").write_bytes(b"x")
    (tmp_path / "wordnet.txt").write_bytes(b"x")
    found = [
        (entry.name, image if isinstance(image, bytes) else str(image))
        for entry, image in images_of(ClassTarsSource(root=str(tmp_path)), max_bytes=8000)
    ]
    assert found == [
        ("n01/d/b.JPG", jpeg),
        ("n01/c.png", jpeg),
        ("n01/big.gif", "too large: 9000 bytes, allowed: 8000"),
        ("n01/../up.jpg", "a path with a '..' part"),
        ("n01/link.jpg", "a symbolic link, not a file"),
    ]


@pytest.mark.parametrize("change", ["cut off", "gone", "no tar"])
def test_a_damaged_class_tar_does_not_end_the_others(url: str, change: str) -> None:
    source = put_class_tars(url)
    entries = list(source.entries())
    store = open_store(url)
    tar = CLASSES["n02"]
    if change == "gone":
        store.delete("winter:21/n02.tar")
    else:
        store.write("winter:21/n02.tar", tar[:1000] if change == "cut off" else b"x" * len(tar))
    found = list(source.images(entries, max_bytes=MAX_BYTES))
    bad = [(entry, image) for entry, image in found if not isinstance(image, bytes)]
    assert [entry for entry, _ in bad] == [entry for entry in entries if entry.labels == ("n02",)]
    assert isinstance(bad[0][1], OSError if change == "gone" else ImageRefusedError)
    assert [entry.name for entry, image in found if isinstance(image, bytes)] == [n for n in NAMES if "n02" not in n]


def test_the_outer_archive_is_listed_by_its_headers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inner tars of 10 GiB, made of holes only, are listed at once."""
    with (tmp_path / "all.tar").open("wb") as file:
        for number in range(5):
            info = tarfile.TarInfo(f"n{number}.tar")
            info.size = 10 << 30
            file.write(info.tobuf(tarfile.GNU_FORMAT))
            file.seek(info.size, io.SEEK_CUR)
        file.write(bytes(1024))
    monkeypatch.chdir(tmp_path)
    entries = list(TarOfTarsSource(path="all.tar").entries())
    assert [(entry.name, entry.num_bytes) for entry in entries] == [(f"n{n}.tar", 10 << 30) for n in range(5)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("a.JPEG", True), ("b/a.b.webp", True), ("图.tiff", True), (" .jpg", True)),
        *(("a", False), ("a.txt", False), (".jpg", False), ("d/.jpg", False), ("d.jpg/a", False), ("._a.jpg", False)),
    ],
)
def test_image_names(name: str, expected: bool) -> None:
    assert is_image_name(name) is expected


@pytest.mark.parametrize("path", ["a.tar", "a:b/c:1:2.tar", ":"])
def test_locators_of_any_path(path: str) -> None:
    assert split_locator(f"{path}:512:33") == (path, 512, 33)


def test_real_images_in_class_tars(test_data: Path, tmp_path: Path) -> None:
    folder = test_data / "imagenet-sample"
    images = sorted(path for path in folder.rglob("*") if is_image_name(path.name))[:20]
    if not images:
        pytest.skip(f"no images below {folder}")
    with tarfile.open(tmp_path / "n01.tar", "w") as archive:
        for path in images:
            archive.add(path, arcname=path.name)
    source = ClassTarsSource(root=str(tmp_path))
    assert [image for _, image in images_of(source)] == [path.read_bytes() for path in images]


@pytest.mark.parametrize("tar", [tar_of(), tar_of(("a.txt", b"x"), ("._a.jpg", b"x"))], ids=["empty", "no image"])
def test_a_tar_without_an_image_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, tar: bytes) -> None:
    (tmp_path / "n01.tar").write_bytes(tar)
    assert images_of(ClassTarsSource(root=str(tmp_path))) == []
    assert "n01.tar has no image, so 'n01' is not a class" in caplog.text


def test_members_that_are_not_called_images_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("a.jpg", "b.jfif", "c", "d.jpg.1", "._e.jpg", "LICENSE.txt")
    tar = tar_of(*((name, image_bytes(number)) for number, name in enumerate(names)))
    (tmp_path / "n01.tar").write_bytes(tar)
    found = images_of(ClassTarsSource(root=str(tmp_path)))
    assert [entry.name for entry, _ in found] == ["n01/a.jpg", "n01/b.jfif"]
    [line] = [record.getMessage() for record in caplog.records]
    assert "skipped 3 members with no image suffix, the first of them c" in line


@pytest.mark.parametrize(
    ("name", "beside", "is_refused"),
    [
        ("train-000000", "cls", True),
        ("cats", "cls", True),
        ("00012", "json", True),
        ("cats", "json", False),  # a class's tar with notes
        ("00012", "", False),
    ],
)
def test_shards_of_webdataset_are_no_classes(tmp_path: Path, name: str, beside: str, is_refused: bool) -> None:
    members = [("a/0001.jpg", image_bytes(1)), ("a/0002.jpg", image_bytes(2))]
    members += [(f"a/000{number}.{beside}", b"7") for number in (1, 2) if beside]
    (tmp_path / f"{name}.tar").write_bytes(tar_of(*sorted(members)))
    source = ClassTarsSource(root=str(tmp_path))
    if is_refused:
        with pytest.raises(UserError, match=rf"is a WebDataset shard, with a \.{beside} .* patchline index"):
            images_of(source)
    else:
        assert len(images_of(source)) == 2
