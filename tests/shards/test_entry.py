"""Reading by path, and names that are not Unicode."""

import os
from pathlib import Path

from shards.entry import FileReader, printable


def test_one_unreadable_file_does_not_end_the_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "c").write_bytes(b"3")
    first, second, third = FileReader(root=tmp_path).read_many(["a", "b", "c"])
    assert (first, third) == (b"1", b"3")
    assert isinstance(second, OSError)
    assert str(second) == "No such file or directory"


def test_names_that_are_not_utf8_become_printable() -> None:
    assert printable(os.fsdecode(b"caf\xe9.jpg")) == "caf\\xe9.jpg"
    assert printable("café 猫.jpg") == "café 猫.jpg"
