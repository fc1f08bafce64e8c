"""Which files below a folder are listed, under which names and in which order, and what reading returns."""

import logging
import os
import random
from pathlib import Path

import pytest

from shards.errors import ImageRefusedError, UserError
from shards.sources.entry import Entry, printable, too_large
from shards.sources.tree import BATCH_ROWS, Row, Tree, list_images, refused_entry, sorted_rows
from shards.store import open_store


def put(root: Path, *names: bytes) -> None:
    """Writes files whose content is their name."""
    for name in names:
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name)


def test_all_depths_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    names = [b"a-b/x.jpg", b"a.jpg", b"a/b/c/y.JPEG", b"a/x.png", b"b.tiff", "猫/\n ü.bmp".encode(), b"\xff\xe9.webp"]
    put(tmp_path, *reversed(names))
    assert [os.fsencode(path) for path, _ in list_images(str(tmp_path))] == sorted(names)


def test_a_bucket_lists_the_same(tmp_path: Path, s3_bucket: str) -> None:
    names = ["a-b/x.jpg", "a.jpg", "a/b/c/y.JPEG", "a/x.png", "notes.txt", "a/.hidden.jpg", ".trash/x.jpg", "猫/ü .gif"]
    names += ["@eaDir/a.jpg", "a/@eaDir/x.png/SYNOPHOTO_THUMB_M.jpg", "__MACOSX/a.jpg"]
    put(tmp_path, *(name.encode() for name in names))
    store = open_store(f"s3://{s3_bucket}/in/here")
    for name in names:
        store.write(name, name.encode())
    local = [path for path, _ in list_images(str(tmp_path))]
    stored = dict(list_images(f"s3://{s3_bucket}/in/here"))
    assert local == list(stored)
    assert stored["a/b/c/y.JPEG"] == len("a/b/c/y.JPEG")
    for root in (str(tmp_path), f"s3://{s3_bucket}/in/here"):
        assert list(Tree(root=root).read_many(local)) == [path.encode() for path in local]


def test_what_is_no_image_is_counted_and_hidden_files_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, b"a.jpg", b"b.txt", b"c.txt", b"noname", b"._a.jpg", b".git/x.jpg", b".jpg")
    with caplog.at_level(logging.INFO):
        assert [path for path, _ in list_images(str(tmp_path))] == ["a.jpg"]
    assert "skipped 3 files with no image suffix: 2 .txt, 1 without a suffix" in caplog.text


def test_thumbnails_and_deleted_files_of_systems_are_skipped(tmp_path: Path) -> None:
    put(tmp_path, b"a/x.jpg", b"a/@eaDir/x.jpg/SYNOPHOTO_THUMB_M.jpg", b"@eaDir/y.jpg", b"#recycle/a/x.jpg")
    put(tmp_path, b"__MACOSX/a/x.jpg", b"$RECYCLE.BIN/x.jpg", b"lost+found/x.jpg", b"lost+found.jpg")
    assert [path for path, _ in list_images(str(tmp_path))] == ["a/x.jpg", "lost+found.jpg"]


def test_links_are_followed_but_not_in_circles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, b"real/x.jpg", b"elsewhere/y.jpg")
    root = tmp_path / "root"
    root.mkdir()
    (root / "c0").symlink_to(tmp_path / "real")
    (root / "c1").symlink_to(tmp_path / "real")
    (root / "up").symlink_to(root)
    (root / "y.jpg").symlink_to(tmp_path / "elsewhere" / "y.jpg")
    (root / "lost.jpg").symlink_to(tmp_path / "nowhere")
    (root / "self.jpg").symlink_to(root / "self.jpg")
    (root / "lost-class").symlink_to(tmp_path / "nowhere")
    listed = [path for path, _ in list_images(str(root))]
    assert listed == ["c0/x.jpg", "c1/x.jpg", "lost.jpg", "self.jpg", "y.jpg"]
    assert "leads back to a folder that contains it; it is not followed" in caplog.text
    assert "lost-class is broken" in caplog.text
    images = list(Tree(root=str(root)).read_many(listed))
    assert (images[0], images[4]) == (b"real/x.jpg", b"elsewhere/y.jpg")
    assert [str(image) for image in images[2:4]] == ["No such file or directory", "Too many levels of symbolic links"]


def test_each_file_is_read_or_says_why_not(tmp_path: Path) -> None:
    put(tmp_path, b"root/good.jpg", b"root/empty.jpg", b"root/folder.jpg/inside.txt", b"outside.jpg")
    (tmp_path / "root" / "empty.jpg").write_bytes(b"")
    os.mkfifo(tmp_path / "root" / "pipe.jpg")
    cases = {
        "good.jpg": b"root/good.jpg",
        "empty.jpg": b"",
        "folder.jpg": OSError("a folder"),
        "pipe.jpg": OSError("not a regular file"),
        "gone.jpg": OSError("No such file or directory"),
        "good.jpg/x.jpg": OSError("Not a directory"),
        "../outside.jpg": ImageRefusedError("no '..'"),
        str(tmp_path / "outside.jpg"): ImageRefusedError("not absolute"),
        "a\0b.jpg": ImageRefusedError("not a path"),
        "": ImageRefusedError("not a path"),
        refused_entry("x", "for this reason").locator: ImageRefusedError("for this reason"),
        "x" * 300: OSError("File name too long"),
    }
    for root in (tmp_path / "root", f"{tmp_path}/root/"):
        for image, expected in zip(Tree(root=str(root)).read_many(list(cases)), cases.values(), strict=True):
            assert type(image) is type(expected)
            assert image == expected or str(expected) in str(image)


def test_too_large_is_refused_by_size(tmp_path: Path, s3_bucket: str) -> None:
    put(tmp_path, b"12345.jpg")
    open_store(f"s3://{s3_bucket}").write("12345.jpg", b"12345.jpg")
    for root in (str(tmp_path), f"s3://{s3_bucket}"):
        for num_bytes in (0, 9):  # with the size in the listing, and without
            entry = Entry(locator="12345.jpg", name="", num_bytes=num_bytes)
            ((_, fits),) = Tree(root=root).images([entry], max_bytes=9)
            assert fits == b"12345.jpg"
            ((_, image),) = Tree(root=root).images([entry], max_bytes=8)
            assert isinstance(image, ImageRefusedError)
            assert str(image).startswith("too large: ")


def test_a_bucket_tells_missing_objects_from_a_missing_bucket(s3_bucket: str) -> None:
    open_store(f"s3://{s3_bucket}").write("a.jpg", b"1")
    one, two, three = Tree(root=f"s3://{s3_bucket}").read_many(["gone.jpg", "a.jpg", "a//b.jpg"])
    assert isinstance(one, OSError)
    assert two == b"1"
    assert isinstance(three, ImageRefusedError)
    with pytest.raises(UserError, match="create the bucket"):
        list(Tree(root=f"s3://{s3_bucket}-no").read_many(["a.jpg"]))


@pytest.mark.parametrize(
    ("num_rows", "run_rows"),
    [
        (0, 10),
        (1, 10),
        (9, 10),  # in memory
        (10, 10),  # one run, exactly full
        (11, 10),
        (5000, 4000),  # two runs of several batches
        (3000, BATCH_ROWS),
        (100, 1),
    ],
)
def test_rows_sorted_in_runs_come_sorted(num_rows: int, run_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.tree.RUN_ROWS", run_rows)
    rng = random.Random(num_rows)
    rows: list[Row] = [(rng.randbytes(rng.randrange(4)), b"%d" % number) for number in range(num_rows)]
    assert list(sorted_rows(iter(rows))) == sorted(rows, key=lambda row: row[0])


def test_a_sort_that_stops_early_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.tree.RUN_ROWS", 10)
    rows = sorted_rows((b"%d" % number,) for number in range(100))
    assert next(rows) == (b"0",)
    rows.close()  # type: ignore[attr-defined]


def test_names_that_are_not_utf8_become_printable() -> None:
    assert printable(os.fsdecode(b"caf\xe9.jpg")) == "caf\\xe9.jpg"
    assert printable("café 猫.jpg") == "café 猫.jpg"


def test_a_refusal_says_how_many_bytes_there_are_and_may_be() -> None:
    assert str(too_large(5, max_bytes=4)) == "too large: 5 bytes, allowed: 4"
