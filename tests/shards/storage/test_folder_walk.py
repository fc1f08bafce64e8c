"""Links in circles, links that multiply, and folders without end."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.errors import UserError
from shards.sources.found_files import find_files
from shards.sources.tree import list_images
from shards.storage.folder_walk import MOST_DEPTH, MOST_WAYS
from shards.store import open_store

Walk = Callable[[Path], list[str]]


def of_store(root: Path) -> list[str]:
    return list(open_store(str(root)).list())


def of_images(root: Path) -> list[str]:
    return [path for path, _ in list_images(str(root))]


def of_pattern(root: Path) -> list[str]:
    found = find_files([f"{root}/**/*.jpg"], suffixes=(".jpg",))
    return [path.removeprefix(f"{root}/") for path in found]


WALKS = pytest.mark.parametrize("walk", [of_store, of_images, of_pattern])


@WALKS
def test_a_link_to_its_own_folder_is_not_followed(walk: Walk, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each was followed 40 times, until the system gave up."""
    (tmp_path / "x.jpg").touch()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "y.jpg").touch()
    for name, target in (("here", "."), ("a/up", ".."), ("a/here\x1b[2J", ".")):
        (tmp_path / name).symlink_to(target)
    with caplog.at_level(logging.WARNING):
        assert walk(tmp_path) == ["a/y.jpg", "x.jpg"]
    assert f"{tmp_path}/here" in caplog.text
    assert "leads back to a folder that contains it; it is not followed" in caplog.text
    assert "\x1b" not in caplog.text


@WALKS
def test_links_that_meet_again_and_again_do_not_multiply(walk: Walk, tmp_path: Path) -> None:
    """Of 40 folders, each has two links to the next: a trillion paths."""
    for number in range(40):
        (tmp_path / "all" / str(number)).mkdir(parents=True)
        for name in "ab" if number < 39 else "":
            (tmp_path / "all" / str(number) / name).symlink_to(f"../{number + 1}")
    (tmp_path / "all" / "39" / "x.jpg").touch()
    (tmp_path / "start").symlink_to("all/0")
    begin = time.process_time()
    assert len([path for path in walk(tmp_path) if path.startswith("start/")]) == 0, "reached first in all/"
    assert time.process_time() - begin < 20


@WALKS
def test_several_links_may_lead_to_one_folder(walk: Walk, tmp_path: Path) -> None:
    """As where two classes are one."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "x.jpg").touch()
    root = tmp_path / "root"
    root.mkdir()
    for number in range(MOST_WAYS + 2):
        (root / f"{number:02d}").symlink_to(tmp_path / "real")
    assert walk(root) == [f"{number:02d}/x.jpg" for number in range(MOST_WAYS)]


@WALKS
def test_folders_are_nested_to_a_bound(walk: Walk, tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * MOST_DEPTH)
    deep.mkdir(parents=True)
    (deep / "x.jpg").touch()
    assert walk(tmp_path) == ["d/" * MOST_DEPTH + "x.jpg"]
    (deep / "d").mkdir()
    with pytest.raises(UserError, match=f"nested more than {MOST_DEPTH} folders deep; allowed: {MOST_DEPTH}; move it"):
        walk(tmp_path)


def test_a_folder_that_is_removed_meanwhile_is_empty(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        open_store(str(tmp_path)).write(f"{name}/x", b"")
    found = open_store(str(tmp_path)).list()
    assert next(found) == "a/x"
    (tmp_path / "b" / "x").unlink()
    os.rmdir(tmp_path / "b")  # noqa: PTH106
    assert list(found) == ["c/x"]
