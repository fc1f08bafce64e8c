"""The tars that an address names."""

import os
from pathlib import Path

import pytest

from shards.adoption.tar_lists import ListedTar, expanded, find_tars, split_pattern
from shards.errors import UserError
from shards.store import open_store


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{8..11}.tar", ["a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"]),
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{b,a}/{0..1}.tar", ["b/0.tar", "b/1.tar", "a/0.tar", "a/1.tar"]),
        ("{a,}.tar", ["a.tar", ".tar"]),
    ],
)
def test_patterns(pattern: str, names: list[str]) -> None:
    assert list(expanded(pattern)) == names


@pytest.mark.parametrize(
    "pattern",
    [
        "{a}",
        "{}",
        "{3..1}",
        "{a..c}",
        "a{",
        "a}b",
        "{a,{b,c}}",
        "{0..99999999}",
        f"{{0..{'9' * 5000}}}",
        "{0..9999}{0..9999}",
    ],
)
def test_what_is_no_pattern(pattern: str) -> None:
    with pytest.raises(UserError):
        list(expanded(pattern))


@pytest.mark.parametrize(
    ("url", "store", "pattern"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b", ""),
        ("s3://bucket/a/t-{0..9}.tar", "s3://bucket/a", "t-{0..9}.tar"),
        ("s3://bucket/{a,b}/t.tar", "s3://bucket", "{a,b}/t.tar"),
        ("t-{0..9}.tar", ".", "t-{0..9}.tar"),
        ("/{0..9}.tar", "/", "{0..9}.tar"),
    ],
)
def test_the_store_of_a_pattern(url: str, store: str, pattern: str) -> None:
    assert split_pattern(url) == (store, pattern)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    store = open_store(str(tmp_path))
    passed_over = (".Trash-1000/e.tar", "#recycle/f.tar")
    for number, name in enumerate(("b.tar", "a/c.tar", "a/notes.txt", "._b.tar", "d.TAR", *passed_over)):
        store.write(name, bytes(number))
    (tmp_path / "list.txt").write_text("b.tar\n\na/c.tar\n")
    return str(tmp_path)


def test_all_tars_below_a_folder(folder: str) -> None:
    found = find_tars(folder)
    assert found == [
        ListedTar(path="a/c.tar", num_bytes=1),
        ListedTar(path="b.tar", num_bytes=0),
        ListedTar(path="d.TAR", num_bytes=4),
    ]


def test_tars_by_name_keep_their_order(folder: str) -> None:
    assert [tar.path for tar in find_tars(folder, pattern="{b,a/c}.tar")] == ["b.tar", "a/c.tar"]
    assert [tar.path for tar in find_tars(folder, tars_file=f"{folder}/list.txt")] == ["b.tar", "a/c.tar"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "{b,x}.tar"}, "x.tar is not below"),
        ({"pattern": "{x,y,b}.tar"}, "x.tar and 1 more are not below"),
        ({"pattern": "{b,b}.tar"}, "names 1 tars twice"),
        ({"tars_file": "/nowhere"}, "--tars-file '/nowhere' cannot be read"),
        ({"pattern": "{b,c}.tar", "tars_file": "list"}, "give one of them"),
    ],
)
def test_names_that_do_not_serve(folder: str, arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_tars(folder, **arguments)


@pytest.mark.parametrize("names", [("train-0.tar", "val-0.tar"), ("train/0.tar", "test/0.tar")])
def test_tars_of_several_splits_are_refused_unless_they_are_listed(tmp_path: Path, names: tuple[str, ...]) -> None:
    store = open_store(str(tmp_path))
    for name in names:
        store.write(name, b"x")
    with pytest.raises(UserError, match=r"are of the splits .*train \(1 tar: train.0.tar\).* one dataset; index each"):
        find_tars(str(tmp_path))
    with pytest.raises(UserError, match="are of the splits"):
        find_tars(str(tmp_path), pattern=f"{{{','.join(names)}}}")
    (tmp_path / "list.txt").write_text("\n".join(names))
    assert len(find_tars(str(tmp_path), tars_file=str(tmp_path / "list.txt"))) == 2


def test_no_tar_or_a_compressed_one_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no \*.tar is below"):
        find_tars(str(tmp_path))
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    with pytest.raises(UserError, match="is compressed"):
        find_tars(str(tmp_path))


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_list_without_an_end_is_refused_at_once(folder: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "endless.txt"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"--tars-file .* cannot be read: .* is not a regular file"):
        find_tars(folder, tars_file=str(path))
