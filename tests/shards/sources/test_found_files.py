"""Files are found by name, pattern or folder; footers that cannot be true are refused before anything is allocated."""

import glob
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shards.errors import InvalidDataError, UserError
from shards.parquet_pieces import ParquetPieces
from shards.sources.found_files import MOST_GROUP_IMAGES, find_files, refuse_groups
from shards.sources.parquets import ParquetSource
from shards.sources.tables import read_rows
from shards.store import open_store

NAMES = ("a/1.parquet", "a/2.parquet", "a/b/3.PARQUET", "a/notes.txt", "c[1].parquet")
COLUMNS = {"path-column": "image", "label-column": "label"}
BOUND = "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "


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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": [b"x" * 50] * 20, "label": list(range(20))}), path, row_group_size=10)
    return path


def varint(number: int) -> bytes:
    """A whole number as Thrift's compact protocol writes it."""
    number, data = number << 1, bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def with_number(path: Path, old: int, new: int) -> None:
    """Replace the number wherever the footer has it."""
    data = path.read_bytes()
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    footer = data[begin:-8].replace(varint(old), varint(new))
    assert footer != data[begin:-8]
    path.write_bytes(data[:begin] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


def numbers_of(path: Path) -> Iterator[tuple[str, int]]:
    group = pq.ParquetFile(path).metadata.row_group(1)
    yield "rows", group.num_rows
    yield "bytes", group.column(0).total_compressed_size
    yield "offset", group.column(0).data_page_offset


@pytest.mark.parametrize("what", ["rows", "bytes", "offset"])
def test_a_number_of_2_to_the_40_is_refused(what: str, file: Path) -> None:
    with_number(file, dict(numbers_of(file))[what], 1 << 40)
    for read in (
        lambda: list(ParquetSource(files=(str(file),)).entries()),
        lambda: list(read_rows(str(file), COLUMNS)),
    ):
        with pytest.raises(InvalidDataError, match=r"a\.parquet .*: its footer is damaged: row group .* 1099511627776"):
            read()


def test_a_true_footer_passes(file: Path) -> None:
    with ParquetPieces(pa.OSFile(str(file)), ours=False) as opened:
        refuse_groups(opened, ["image", "label"], most_rows=10)
        with pytest.raises(ValueError, match="row group 0 has 10 rows, allowed: 0 to 9"):
            refuse_groups(opened, ["image", "label"], most_rows=9)


@pytest.mark.parametrize("use_dictionary", [True, False])
@pytest.mark.parametrize("compression", ["none", "zstd", "snappy"])
def test_large_dictionaries_pass(tmp_path: Path, use_dictionary: bool, compression: str) -> None:
    """They come before the data of their column, and may be most of the file."""
    table = pa.table({"image": [random.Random(n).randbytes(20_000) for n in range(30)], "label": [0] * 30})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=10, use_dictionary=use_dictionary, compression=compression)
    source = ParquetSource(files=(str(path),))
    found = [image for _, image in source.images(list(source.entries()), max_bytes=1 << 20)]
    assert found == table.column("image").to_pylist()
    assert len(list(read_rows(str(path), COLUMNS))) == 30


def test_row_groups_add_up_to_the_file(file: Path) -> None:
    with_number(file, 10, 12)
    with pytest.raises(InvalidDataError, match="its footer is damaged: it says 20 rows, its row groups have 24"):
        list(ParquetSource(files=(str(file),)).entries())


def test_rows_that_are_missing_are_not_lost_in_silence(file: Path) -> None:
    source = ParquetSource(files=(str(file),))
    first, _ = source.entries()
    found = [image for _, image in source.images([replace(first, num_images=12)], max_bytes=1 << 20)]
    assert [isinstance(image, bytes) for image in found] == [True] * 10 + [False] * 2
    assert "it has 10 rows, the footer says 12" in str(found[-1])


@pytest.mark.parametrize("seed", range(3))
def test_damaged_footers_have_one_message_and_a_bound(seed: int, file: Path) -> None:
    """In a child process with 3 GiB, since Arrow's memory is not Python's."""
    data, draw = file.read_bytes(), random.Random(seed)
    begin = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for number in range(60):
        damaged = bytearray(data)
        for _ in range(draw.choice([1, 2, 4])):
            damaged[draw.randrange(begin, len(data) - 8)] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
        (file.parent / f"{number}.parquet").write_bytes(damaged)
    program = (
        f"{BOUND}import sys; from pathlib import Path; from itertools import islice\n"
        "from shards.errors import UserError; from shards.sources.parquets import ParquetSource\n"
        "from shards.sources.tables import read_rows\n"
        "for path in map(str, Path(sys.argv[1]).glob('[0-9]*.parquet')):\n"
        "    source = ParquetSource(files=(path,))\n"
        "    for read in (lambda: source.images(list(source.entries()), max_bytes=1 << 20),\n"
        f"                 lambda: read_rows(path, {COLUMNS})):\n"
        "        try: list(islice(read(), 100_000))\n"
        "        except UserError as error: assert path in str(error), error\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(file.parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_most_images_of_a_row_group_are_many() -> None:
    assert MOST_GROUP_IMAGES > 1 << 20, "what pyarrow writes by default"
