"""YAML is read with line numbers and original spelling; anything that could expand, execute or be lost is refused."""

import os
from pathlib import Path

import pytest

from jobs.record import MOST_BYTES, MOST_DEPTH, Fields, Items, Scalar, read_tree
from shards.errors import UserError

LAUGHS = "a: &a [x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


def read(folder: Path, text: str | bytes) -> object:
    path = folder / "a.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_tree(path)


def test_values_keep_their_spelling_and_their_lines(tmp_path: Path) -> None:
    tree = read(tmp_path, "# first\nrate: 1e-3\non: [010, 'yes']\nempty:\n")
    assert tree == Fields(
        entries={
            "rate": Scalar(text="1e-3", is_plain=True, line=2),
            "on": Items(
                items=(Scalar(text="010", is_plain=True, line=3), Scalar(text="yes", is_plain=False, line=3)), line=3
            ),
            "empty": Scalar(text="", is_plain=True, line=4),
        },
        lines={"rate": 2, "on": 3, "empty": 4},
        line=2,
    )


@pytest.mark.parametrize(
    ("text", "is_nothing"),
    [("~", True), ("null", True), ("", True), ("'null'", False), ("''", False), ("none", False)],
)
def test_what_is_nothing(tmp_path: Path, text: str, is_nothing: bool) -> None:
    tree = read(tmp_path, f"a: {text}\n")
    assert isinstance(tree, Fields)
    assert isinstance(tree.entries["a"], Scalar)
    assert tree.entries["a"].is_nothing is is_nothing


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(LAUGHS, r"line 2: the alias \*a; write out what it stands for", id="billion laughs"),
        pytest.param("a: &a [*a]\n", r"the alias \*a", id="a list in itself"),
        pytest.param("a: !!python/object/apply:os.getcwd []\n", "line 1: the tag tag:yaml.org,2002:python", id="code"),
        pytest.param("a: !!str 3\n", "the tag tag:yaml.org,2002:str; leave it out", id="a harmless tag"),
        pytest.param("a: 1\nb: 2\na: 3\n", "line 3: a is given on line 1 already; remove one", id="twice"),
        pytest.param("a: {b: 1, b: 2}\n", "line 1: b is given on line 1 already", id="twice in a group"),
        pytest.param("[1, 2]: 3\n", "line 1: a field's name is a word", id="a list for a name"),
        pytest.param("[" * 100_000, f"line 1: nested deeper than {MOST_DEPTH} levels", id="too deep"),
        pytest.param("- " * 20 + "x", "nested deeper than", id="too deep in blocks"),
        pytest.param("a: [1\nb: 2\n", "is not YAML that a job can be read from: line 2: ", id="broken"),
        pytest.param("a: 1\n---\nb: 2\n", "line 2: but found another document", id="two documents"),
        pytest.param(b"\xff\xd8\xff\xe0\x00", "is not YAML", id="an image"),
        pytest.param(
            "#" * (MOST_BYTES + 1),
            "is larger than 262,144 bytes.*; a job is a YAML file",
            id="too large",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_has_no_end_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.yaml"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"a\.yaml is not a regular file; give a file, .*; a job is a YAML file"):
        read_tree(path)


def test_an_empty_file_is_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "# nothing yet\n") == Scalar(text="", is_plain=True, line=1)
