"""Files that --out names: whole or absent, and one message where they cannot be."""

import errno
from pathlib import Path

import pytest

from jobs import output
from jobs.output import refuse_no_page, write_out, write_page
from shards.errors import UserError


def test_a_page_is_whole_and_replaces_the_one_before(tmp_path: Path) -> None:
    for page in (b"first", b"second"):
        refuse_no_page(tmp_path / "a.html", name="a.html")
        write_page(tmp_path / "a.html", page)
        assert (tmp_path / "a.html").read_bytes() == page
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "--out is the folder .*; give the name of a file, such as .*report.html"),
        ("nowhere/a.html", "and there is no folder .*nowhere'; make it first"),
        ("notes.txt", "which is there and is no .html file; give another name"),
    ],
)
def test_what_is_no_place_for_a_page(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=message):
        refuse_no_page(tmp_path / name, name="report.html")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_mistake_says_what_to_do_and_a_full_disk_is_a_fault_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot write .*gone/a.json.: No such file or directory; give another --out"):
        write_out(tmp_path / "gone" / "a.json", b"{}", todo="give another --out")

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, f"no room for {len(data)} bytes of {path}")

    monkeypatch.setattr(output, "write_whole", full)
    with pytest.raises(OSError, match="no room"):
        write_out(tmp_path / "a.json", b"{}", todo="")
