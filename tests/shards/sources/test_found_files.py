"""Paths, patterns and folders, local and in a bucket."""

import glob
from pathlib import Path

import pytest

from shards.errors import UserError
from shards.sources.found_files import find_files
from shards.store import open_store

NAMES = ("a/1.parquet", "a/2.parquet", "a/b/3.PARQUET", "a/notes.txt", "c[1].parquet")


@pytest.mark.parametrize("where", ["folder", "bucket"])
@pytest.mark.parametrize(
    ("places", "found"),
    [
        (["a"], ["a/1.parquet", "a/2.parquet", "a/b/3.PARQUET"]),
        (["a/"], ["a/1.parquet", "a/2.parquet", "a/b/3.PARQUET"]),
        (["a/[2-9].parquet", "a/1.parquet", "a/*.parquet"], ["a/1.parquet", "a/2.parquet"]),  # sorted, each once
    ],
)
def test_what_is_found(where: str, places: list[str], found: list[str], tmp_path: Path, s3_bucket: str) -> None:
    root = str(tmp_path) if where == "folder" else f"s3://{s3_bucket}"
    for name in NAMES:
        open_store(root).write(name, b"x")
    places = [f"{root}/{place}" for place in places]
    assert [path.rstrip("/") for path in find_files(places, suffixes=(".parquet",))] == [f"{root}/{p}" for p in found]


def test_a_name_with_marks_of_patterns_is_a_name_first(tmp_path: Path) -> None:
    (tmp_path / "c[1].parquet").write_bytes(b"x")
    assert find_files([f"{tmp_path}/c[1].parquet"], suffixes=(".parquet",)) == [f"{tmp_path}/c[1].parquet"]


@pytest.mark.parametrize(
    ("where", "place", "found"),
    [
        ("folder", "photos [2024]", ["1.parquet", "sub/2.parquet"]),
        ("folder", "photos [2024]/1.parquet", ["1.parquet"]),
        ("folder", "photos [2024]/*.parquet", ["1.parquet"]),
        ("folder", "photos [2024]/**/*.parquet", ["1.parquet", "sub/2.parquet"]),
        ("folder", "photos [2024]/s*/*.parquet", ["sub/2.parquet"]),
        ("bucket", "photos [2024]", ["1.parquet", "sub/2.parquet"]),
        ("bucket", "photos [2024]/1.parquet", ["1.parquet"]),
    ],
)
def test_brackets_in_the_name_of_a_folder_are_no_pattern(
    where: str, place: str, found: list[str], tmp_path: Path, s3_bucket: str
) -> None:
    root = str(tmp_path) if where == "folder" else f"s3://{s3_bucket}/brackets"
    for name in ("photos [2024]/1.parquet", "photos [2024]/sub/2.parquet", "photos 2/3.parquet"):
        open_store(root).write(name, b"x")
    names = [f"{root}/photos [2024]/{name}" for name in found]
    assert find_files([f"{root}/{place}"], suffixes=(".parquet",)) == names


@pytest.mark.parametrize("name", ["none.parquet", "none*.parquet", "none"])
def test_a_place_without_any_is_the_users_mistake(name: str, tmp_path: Path, s3_bucket: str) -> None:
    for root in (str(tmp_path), f"s3://{s3_bucket}"):
        open_store(root).write("other.parquet", b"x")
        with pytest.raises(UserError, match=r"matches no file; give \.parquet files"):
            find_files([f"{root}/other.parquet", f"{root}/{name}"], suffixes=(".parquet",))


@pytest.mark.parametrize("pattern", ["**/*.parquet", "a/**", "**/b/*", "a/**/**/3*", "**", "**/.h/*", "*/**/*.txt"])
def test_two_stars_find_what_glob_finds(pattern: str, tmp_path: Path) -> None:
    for name in (*NAMES, "top.parquet", ".h/5.parquet", "a/.6.parquet"):
        open_store(str(tmp_path)).write(name, b"x")
    known = {path for path in glob.glob(f"{tmp_path}/{pattern}", recursive=True) if Path(path).is_file()}  # noqa: PTH207
    assert find_files([f"{tmp_path}/{pattern}"], suffixes=(".parquet",)) == sorted(known)
