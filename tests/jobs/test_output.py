"""Lines that fit a terminal, and files that --out names: whole or absent, with one message where they cannot be."""

import errno
import io
import os
import time
from pathlib import Path

import pytest
from rich.cells import cell_len

from jobs import output
from jobs.output import fitted, has_no_reader, refuse_no_page, table_of_checks, wrapped, write_out, write_page
from shards.errors import Finding, UserError


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("tabby cat, Füchsin, 猫", "tabby cat, Füchsin, 猫", id="letters of any script stay"),
        pytest.param("a\x1b[31mred", r"a\x1b[31mred", id="colours"),
        pytest.param("a\nb\r\tc", r"a\nb\r\tc", id="lines and tabs"),
        pytest.param("a\u202eb", r"a\u202eb", id="the other direction"),
        pytest.param("a\udcffb", r"a\udcffb", id="a byte that is no UTF-8"),
    ],
)
def test_nothing_acts(text: str, shown: str) -> None:
    assert fitted(text) == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("0123456789", "0123456789", id="as long as the line"),
        pytest.param("0123456789a", "0123…6789a", id="one more"),
        pytest.param("猫" * 6, "猫猫…猫猫", id="two columns each"),
        pytest.param("\x1b" * 3, r"\x1b…b\x1b", id="escapes count"),
    ],
)
def test_the_middle_of_a_long_name_is_left_out(text: str, shown: str) -> None:
    assert fitted(text, 10) == shown
    assert cell_len(shown) <= 10


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        pytest.param("0123456789", ["0123456789"], id="as long as the line"),
        pytest.param("one two three", ["one", "    two", "    three"], id="by words"),
        pytest.param("x" * 13, ["xxxxxx", "    xxxxxx", "    x"], id="no words"),
        pytest.param(
            "one two three four five", ["one", "    two", "    three…"], id="the end of a long one is left out"
        ),
        pytest.param("a\nb\x1b", [r"a\nb\x1b"], id="lines and escapes"),
        pytest.param("猫猫猫猫猫猫", ["猫…猫"], id="two columns each: one word"),
        pytest.param("", [""], id="nothing"),
    ],
)
def test_a_long_text_is_wrapped(text: str, lines: list[str]) -> None:
    assert wrapped(text, 10, most_lines=3) == lines


def test_a_text_of_megabytes_is_fitted_at_once() -> None:
    began = time.process_time()
    shown = fitted(f"first{'x' * 3_000_000}last", 40)
    assert (shown[:5], shown[-4:], cell_len(shown)) == ("first", "last", 40)
    assert time.process_time() - began < 0.5


def test_a_pipe_without_a_reader() -> None:
    ear, mouth = os.pipe()
    with os.fdopen(mouth, "w") as stream:
        assert not has_no_reader(stream)
        os.close(ear)
        assert has_no_reader(stream)
    assert not has_no_reader(None)
    assert not has_no_reader(io.StringIO())


def test_a_table_of_checks_fits_and_nothing_in_it_acts() -> None:
    found = "a\x1b[2J\n" + "word " * 40
    long = Finding(name="GPU 0", status="fault", found=found, allowed="2", todo="do " * 60)
    text = table_of_checks([long, Finding(name="shared memory", found="8 GB")], columns=80)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    assert text.splitlines()[0].startswith("FAULT    GPU 0          a")
    assert text.splitlines()[-3:] == ["ok       shared memory  8 GB", "", "1 fault, 0 warnings"]


def test_a_page_is_whole_and_replaces_the_one_before(tmp_path: Path) -> None:
    for page in (b"first", b"second"):
        refuse_no_page(tmp_path / "a.html", name="a.html")
        write_page(tmp_path / "a.html", page)
        assert (tmp_path / "a.html").read_bytes() == page
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


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
