"""Existing files in the output folder: identical ones are fine, others are refused unless --overwrite is given."""

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.output import write_to
from shards.errors import UserError


def writer(**contents: str) -> Callable[[Path], None]:
    """Writes a folder with these files."""

    def write(out: Path) -> None:
        out.mkdir(exist_ok=True)
        for name, content in contents.items():
            (out / name).write_text(content)

    return write


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param({}, "", id="an empty folder"),
        pytest.param({"config": "a", "tensors": "b"}, "", id="the same"),
        pytest.param({"config": "a"}, "", id="a part of it"),
        pytest.param({"config": "a", "tensors.part": "x"}, "", id="a part that was cut off"),
        pytest.param({"config": "other"}, "other content: config;", id="other weights"),
        pytest.param({"thesis": "years"}, "other content: thesis;", id="somebody's file"),
        pytest.param(dict.fromkeys("abcde", "x"), "other content: a, b, c and 2 more;", id="many"),
    ],
)
def test_a_folder(tmp_path: Path, before: dict[str, str], expected: str) -> None:
    out = tmp_path / "out"
    writer(**before)(out)
    write = writer(config="a", tensors="b")
    if expected:
        with pytest.raises(UserError, match=expected):
            write_to(out, write, overwrite=False)
        assert contents(out) == before
        write_to(out, write, overwrite=True)
    else:
        write_to(out, write, overwrite=False)
    assert contents(out) == {**before, "config": "a", "tensors": "b"}
    assert list(tmp_path.iterdir()) == [out]


def file_writer(content: str) -> Callable[[Path], None]:
    """Writes a file."""

    def write(out: Path) -> None:
        out.write_text(content)

    return write


def test_a_file(tmp_path: Path) -> None:
    out = tmp_path / "w.npz"
    for _ in range(2):
        write_to(out, file_writer("a"), overwrite=False)
    with pytest.raises(UserError):
        write_to(out, file_writer("b"), overwrite=False)
    assert out.read_text() == "a"
    write_to(out, file_writer("b"), overwrite=True)
    assert out.read_text() == "b"


def test_the_current_folder_is_a_folder_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thesis").write_text("years")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError):
        write_to(Path(), writer(config="a"), overwrite=False)
    assert contents(tmp_path) == {"thesis": "years"}
