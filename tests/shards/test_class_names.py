"""Files of class names."""

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


@pytest.mark.parametrize(
    "text",
    [
        "class_id,class_name\n0,cat\n1,dog\n2,owl\n",
        "2,ant\n0,bee\n1,cat\n",
        "ant\t1\nbee\t2\n",
        "id\tname\n0\tant\n1\tbee\n",
        "1 polar bear\n0 cat\n",
        "# all classes\n0 polar bear\n1 cat\n",
        "ant;0\nbee;1\n",
    ],
)
def test_a_table_of_numbers_and_names_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.csv").write_text(text)
    with pytest.raises(UserError, match=r"has a number on each line, such as .*; give one class name per line"):
        read_label_names(str(tmp_path / "labels.csv"))


@pytest.mark.parametrize(
    "text",
    [
        "grade 0\ngrade 1\n",
        "0\n1\n2\n",
        "7 up\n8 ball\n",
        "nobody\n1 person\n2 persons\n",
        "1 person\n2 persons\n",
        "0 dogs\n1 dog\n",
        "tench, Tinca\ncock, 1\n",
    ],
)
def test_names_with_numbers_are_names(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.txt").write_text(text)
    assert read_label_names(str(tmp_path / "labels.txt")) == tuple(text.splitlines())


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
