"""Class folders and flat folders: which files are listed, in which order, with which labels."""

import os
from pathlib import Path

import pytest

from shards.errors import ImageRefusedError
from shards.sources.entry import Entry, ImageBytes
from shards.sources.folders import FlatSource, FolderSource
from shards.store import open_store
from tests.rigs.images import class_folders, image_bytes


def listed(source: FolderSource | FlatSource) -> list[tuple[str, tuple[str, ...]]]:
    return [(entry.name, entry.labels) for entry in source.entries()]


def read(source: FolderSource | FlatSource) -> list[tuple[Entry, ImageBytes]]:
    """All images, read in the source's order, and again by locator in another order."""
    images = list(source.images(list(source.entries()), max_bytes=1 << 20))
    again = list(source.reader().read_many([entry.locator for entry, _ in reversed(images)]))
    for (_, first), second in zip(reversed(images), again, strict=True):
        assert first == second or str(first) == str(second)
    return images


def test_class_folders_are_listed_in_order_with_their_label(tmp_path: Path) -> None:
    root = class_folders(tmp_path, num_classes=2, images_a_class=2)
    (root / "c0" / "notes.txt").write_text("no image")
    (root / "c1" / "images" / "deep").mkdir(parents=True)
    (root / "c1" / "images" / "deep" / "x.jpg").write_bytes(image_bytes(1))
    (root / "stray.jpg").write_bytes(b"in no class")
    assert listed(FolderSource(root=str(root))) == [
        ("c0/img 0.JPEG", ("c0",)),
        ("c0/img 1.png", ("c0",)),
        ("c1/images/deep/x.jpg", ("c1",)),
        ("c1/img 0.JPEG", ("c1",)),
        ("c1/img 1.png", ("c1",)),
        ("stray.jpg", ()),
    ]


def test_folders_without_an_image_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = class_folders(tmp_path, num_classes=2)
    list(FolderSource(root=str(root)).entries())
    assert caplog.messages == []
    for name in ("empty", "notes", ".git"):
        (root / name).mkdir()
    (root / "notes" / "a.txt").write_text("no image")
    (root / "c0" / "empty").mkdir()
    list(FolderSource(root=str(root)).entries())
    assert caplog.messages[-1] == "2 folders without an image, so not a class: empty, notes"


def test_a_bucket_holds_the_same_images(tmp_path: Path, s3_bucket: str) -> None:
    local = FolderSource(root=str(class_folders(tmp_path)))
    stored = FolderSource(root=f"s3://{s3_bucket}/some/where")
    store = open_store(stored.root)
    for entry in local.entries():
        store.write(entry.locator, (tmp_path / entry.locator).read_bytes())
    assert listed(stored) == listed(local)
    assert [image for _, image in read(stored)] == [image for _, image in read(local)]
    assert [entry.num_bytes for entry in stored.entries()] == [len(bytes(image)) for _, image in read(local)]  # type: ignore[arg-type]


def test_odd_names_are_normal_input(tmp_path: Path) -> None:
    (tmp_path / "猫").mkdir()
    for name in (b"a.b.c.jpg", b"caf\xe9.jpg", b"new\nline.jpg", "ü ü.JPG".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path / "猫") + b"/" + name)).write_bytes(image_bytes(1))
    images = read(FolderSource(root=str(tmp_path)))
    assert {entry.name for entry, _ in images} == {
        *("猫/a.b.c.jpg", "猫/caf\\xe9.jpg", "猫/new\nline.jpg", "猫/ü ü.JPG")
    }
    assert all(entry.labels == ("猫",) for entry, _ in images)
    assert all(image == image_bytes(1) for _, image in images)


def test_what_can_not_be_read_is_there_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "dangling.jpg").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c" / "empty.jpg").write_bytes(b"")
    (tmp_path / "c" / "large.jpg").write_bytes(bytes((1 << 20) + 1))
    dangling, empty, large = FolderSource(root=str(tmp_path)).images(
        list(FolderSource(root=str(tmp_path)).entries()), max_bytes=1 << 20
    )
    assert str(dangling[1]) == "No such file or directory"
    assert empty[1] == b""
    assert isinstance(large[1], ImageRefusedError)
    assert str(large[1]) == "too large: 1048577 bytes, allowed: 1048576"


@pytest.mark.parametrize(
    ("name", "pattern", "labels"),
    [
        ("n01440764_tench.JPEG", None, ("n01440764",)),
        ("deeper_down/n01440764_tench.JPEG", None, ("n01440764",)),
        ("plain.jpg", None, ()),
        ("_.jpg", "([^_]*)_", ()),
        ("17-cat.png", r"\d+-(\w+)\.", ("cat",)),
        ("猫_1.png", None, ("猫",)),
        ("nan_1.png", None, ("nan",)),
        ("-1_1.png", None, ("-1",)),
        ("3.0_1.png", None, ("3.0",)),
        ("u\u0308_1.png", None, ("ü",)),
    ],
)
def test_flat_labels_come_from_the_name(tmp_path: Path, name: str, pattern: str | None, labels: tuple[str]) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    source = FlatSource(root=str(tmp_path))
    if pattern is not None:
        source = FlatSource(root=str(tmp_path), label_pattern=pattern)
    assert listed(source) == [(name, labels)]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["american_bulldog_12.jpg", "american_pit_bull_terrier_3.jpg"], "'american_bulldog', 'american_pit_bull_ter"),
        (["cat_front.jpg", "cat_side.jpg"], "'cat' holds 'cat_front', 'cat_side'"),
        (["b_v2a_1.jpg", "b_v2a_2.jpg", "b_v3c_1.jpg", "b_v3c_2.jpg"], "'b' holds 'b_v2a', 'b_v3c'"),
        (["n01440764_tench.JPEG", "n01440764_10026.JPEG", "n02_x_1.jpg"], ""),  # one name beside bare numbers
        (["cat_3fa9.jpg", "cat_b81c.jpg", "cat_12.jpg"], ""),  # ids
        (["Abyssinian_1.jpg", "Abyssinian_2.jpg"], ""),
    ],
)
def test_names_of_several_words_are_said(
    names: list[str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    listed(FlatSource(root=str(tmp_path)))
    assert said in caplog.text
    assert ("give --source.label-pattern '(.+)_'" in caplog.text) == bool(said)
    caplog.clear()
    listed(FlatSource(root=str(tmp_path), label_pattern="(.+)_"))
    assert caplog.text == ""


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_flat_labels_come_from_a_table(where: str, tmp_path: Path, s3_bucket: str) -> None:
    root = str(tmp_path / "images") if where == "folder" else f"s3://{s3_bucket}/images"
    for name in ("a.jpg", "b.jpg", "sub/ c d.jpg", "z-unknown.jpg"):
        open_store(root).write(name, name.encode())
    rows = [
        *("file,label", "sub/ c d.jpg,cat|dog", "./b.jpg,cat", "b.jpg,mouse", "b.jpg,cat", "gone.jpg,cat"),
        *("../outside.jpg,cat", ",cat", "a.jpg", "a.jpg,"),
    ]
    open_store(str(tmp_path / "tables")).write("labels.csv", "\n".join(rows).encode())
    source = FlatSource(root=root, labels_csv=str(tmp_path / "tables" / "labels.csv"))
    images = read(source)
    assert [(entry.name, entry.labels) for entry, _ in images] == [
        ("labels.csv row 8", ()),
        ("labels.csv row 9", ()),
        ("../outside.jpg", ("cat",)),
        ("a.jpg", ()),
        ("b.jpg", ("cat", "mouse")),
        ("gone.jpg", ("cat",)),
        ("sub/ c d.jpg", ("cat", "dog")),
        ("z-unknown.jpg", ()),
    ]
    reasons = [str(image) for _, image in images if not isinstance(image, bytes)]
    assert reasons[:2] == ["the row names no image", "the row has 1 columns, the header has 2"]
    assert "no '..'" in reasons[2]
    assert "No such file" in reasons[3] or "no object 'gone.jpg'" in reasons[3]
    assert [image for _, image in images if isinstance(image, bytes)] == [
        *(b"a.jpg", b"b.jpg", b"sub/ c d.jpg", b"z-unknown.jpg")
    ]


def test_names_that_are_not_utf8_find_their_label(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jpg")).write_bytes(b"x")
    (tmp_path / "labels.csv").write_bytes(b"id,class\ncaf\xe9.jpg,coffee\n")
    source = FlatSource(
        root=str(tmp_path), labels_csv=str(tmp_path / "labels.csv"), file_column="id", label_column="class"
    )
    ((entry, image),) = read(source)
    assert (entry.name, entry.labels, image) == ("caf\\xe9.jpg", ("coffee",), b"x")


def test_a_join_larger_than_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.tree.RUN_ROWS", 7)
    numbers = [number * 37 % 100 for number in range(100)]
    for number in numbers:
        (tmp_path / f"{number}.jpg").write_bytes(b"")
    rows = [f"{number}.jpg,{number}" for number in numbers if number % 3]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label", *rows]))
    found = listed(FlatSource(root=str(tmp_path), labels_csv=str(tmp_path / "labels.csv")))
    assert found == [(f"{n}.jpg", (str(n),) if n % 3 else ()) for n in sorted(range(100), key=lambda n: f"{n}.jpg")]


def test_real_photographs_have_their_synset_as_label(test_data: Path) -> None:
    source = FlatSource(root=str(test_data / "imagenet-sample"))
    entries = list(source.entries())
    assert len(entries) == 500
    assert len({entry.labels for entry in entries}) == 500
    assert entries[0].labels == ("n01440764",)
    assert all(isinstance(image, bytes) for _, image in source.images(entries, max_bytes=64 << 20))
