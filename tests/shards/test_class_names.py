"""Files of class names."""

import os
from pathlib import Path

import pytest

from shards.class_names import near_equal, read_label_names
from shards.errors import UserError


def test_names_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("tench\n great white shark \n\nÜ\n", encoding="utf-8")
    assert read_label_names(str(tmp_path / "labels.txt")) == ("tench", "great white shark", "Ü")


def test_names_that_look_the_same() -> None:
    names = ["cat", "Cat", "c\u200bat", "dog", "ﬁsh", "fish", "ca t"]
    assert near_equal(names) == [("cat", "Cat", "c\u200bat"), ("ﬁsh", "fish")]
    assert near_equal(["fox", "fox\x1a", "dog"]) == [("fox", "fox\x1a")]


def test_numbers_that_are_written_in_several_ways() -> None:
    names = ["7", "007", "7.0", "7,00", "0", "00", "70", "7.5", "a7", "a07"]
    assert near_equal(names) == [("7", "007", "7.0", "7,00"), ("0", "00")]


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("tench\nshark\n", encoding="utf-8-sig")
    assert read_label_names(str(tmp_path / "labels.txt")) == ("tench", "shark")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "names no class"),
        (b"\xef\xbb\xbf", "names no class"),
        (b"a\nb\na\n", "the classes 0 and 2 are both named 'a'"),
        ("caf\u00e9\ncafe\u0301\n".encode(), "the classes 0 and 1 are both named"),
        (b"a\nb\x0cc\n", r"its label 'b.x0cc' has a line break"),
        (b"\xff\n", r"cannot be read: .*labels.txt is not UTF-8: byte 0 \(line 1\) is 0xff"),
        (b"a" * 1025, "its label is too long: 1025 characters, allowed: 1024"),
    ],
)
def test_files_that_do_not_serve(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "labels.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_label_names(str(tmp_path / "labels.txt"))


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "labels.txt"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"cannot be read: .* is not a regular file; give a file"):
        read_label_names(str(path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_label_names(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ant\n\n\nbee\n", "line 2 is empty and no class, so the class on line 4 has the id 1"),
        ("\nant\n", "line 1 is empty and no class, so the class on line 2 has the id 0"),
        ("ant\nbee\n\n", ""),
    ],
)
def test_an_empty_line_moves_the_ids_after_it(
    text: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "labels.txt").write_text(text)
    read_label_names(str(tmp_path / "labels.txt"))
    assert said in caplog.text
    assert bool(caplog.records) == bool(said)


@pytest.mark.parametrize("text", ['["cat", "dog"]', '[\n  "cat",\n  "dog"\n]\n', '{"0": "cat"}', "[\ncat\n]"])
def test_a_file_of_json_is_no_list_of_names(tmp_path: Path, text: str) -> None:
    """Its brackets and quotes would be names, and each class would have the id of the one before it."""
    (tmp_path / "labels.txt").write_text(text)
    with pytest.raises(UserError, match=r"labels\.txt' is JSON; give a text file with one class name per line"):
        read_label_names(str(tmp_path / "labels.txt"))


def test_names_in_brackets_are_names(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("[other]\ncat\n")
    assert read_label_names(str(tmp_path / "labels.txt")) == ("[other]", "cat")


@pytest.mark.parametrize(("first", "is_said"), [("name", True), ("Class", True), ("ant", False)])
def test_a_first_line_that_may_be_a_header_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: str, is_said: bool
) -> None:
    (tmp_path / "labels.txt").write_text(f"{first}\ncat\n")
    assert read_label_names(str(tmp_path / "labels.txt")) == (first, "cat")
    assert ("if it is a header, leave it out" in caplog.text) == is_said
