"""One file of a dataset changed, its hash made to fit: loader, card and verify refuse what cannot be right."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from shards.manifest import BLOCKS_PATH, LABELS_PATH, MANIFEST_PATH, QUARANTINE_PATH, index_path, shard_path
from shards.packing.plan import PLAN_PATH
from shards.store import Store, open_store
from shards.tables import table_bytes
from shards.verifying.verify import verify_dataset
from tests.rigs.datasets import packed_folders
from tests.rigs.hostile_datasets import Change, cell, change_table, refusals, rehash, with_column, write_manifest
from tests.rigs.tables import read_table

INT32, INT64, TEXT = pa.int32(), pa.int64(), pa.string()
LISTS = pa.list_(INT32)
INDEX = index_path(1)
ALL, ONLY_VERIFY = ("loader", "card"), ()


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed_folders(Path(tmp_path_factory.mktemp("refused")))


@pytest.fixture
def store(packed: Path, tmp_path: Path) -> Store:
    """Four shards of 4, 4, 4 and 3 samples of 3 classes, in blocks of 3 and 1."""
    return open_store(str(shutil.copytree(packed, tmp_path / "packed")))


def assert_refused(store: Store, *, by: tuple[str, ...], what: str) -> None:
    found = refusals(store.url)
    assert what in found.pop("verify")
    for reader, message in found.items():
        assert (what in message) == (reader in by), (reader, message)


def test_an_intact_dataset_is_refused_by_nobody(store: Store) -> None:
    assert refusals(store.url) == {"loader": "", "card": "", "verify": ""}


@pytest.mark.parametrize(
    ("path", "change", "by", "what"),
    [
        (INDEX, cell("labels", 1, [-5]), ALL, "column labels has -5; allowed: 0 to 16,777,215"),
        (INDEX, cell("labels", 1, [3]), ALL, "row 1 has label 3; allowed: 0 to 2"),
        (INDEX, cell("labels", 2, [None]), ALL, "null in a list"),
        (INDEX, with_column("labels", [[0], [0], [0], [0]], pa.list_(INT64)), ALL, "column labels is of type"),
        (INDEX, with_column("labels", ["0"] * 4, TEXT), ALL, "allowed: list<"),
        (INDEX, lambda table: table.drop_columns("labels"), ALL, "column labels is missing"),
        (INDEX, lambda table: table.drop_columns("weights"), ALL, "column weights is missing"),
        (INDEX, cell("weights", 0, [1.0, 2.0]), ALL, "row 0 has 2 weights; allowed: 1, or none"),
        (INDEX, cell("weights", 0, [float("nan")]), ALL, "column weights has nan"),
        (INDEX, cell("weights", 0, [-1.0]), ALL, "column weights has -1.0; allowed: 0 or more"),
        (INDEX, cell("offset", 0, None), ALL, "column offset is null in row 0"),
        (INDEX, cell("offset", 0, -1), ALL, "column offset has -1"),
        (INDEX, cell("offset", 3, 1 << 62), ALL, "column offset has 4611686018427387904; allowed: 0 to"),
        (INDEX, cell("offset", 3, 1 << 40), ALL, "ends at byte"),
        (INDEX, cell("offset", 3, 100), ALL, "row 3 has offset 100, inside or before the image of row 2"),
        (INDEX, with_column("offset", ["1"] * 4, TEXT), ALL, "column offset is of type 'string'; allowed: int64"),
        (INDEX, cell("size", 0, 0), ALL, "column size has 0; allowed: 1 to 2,147,483,647"),
        (INDEX, cell("height", 0, 0), ALL, "column height has 0"),
        (INDEX, cell("width", 3, -7), ALL, "column width has -7"),
        (INDEX, cell("orientation", 0, 9), ALL, "column orientation has 9; allowed: 1 to 8"),
        (INDEX, cell("orientation", 0, 0), ALL, "column orientation has 0"),
        (INDEX, with_column("crc32", [1] * 4, INT64), ALL, "column crc32 is of type 'int64'; allowed: uint32"),
        (INDEX, lambda table: table.slice(1), ALL, "it has 3 rows; allowed: 4, as the manifest says"),
        (INDEX, lambda table: pa.concat_tables([table] * 2), ALL, "it has 8 rows; allowed: 4"),
        (INDEX, lambda table: table.append_column("size", table["size"]), ALL, "column size is there twice"),
        (INDEX, cell("row", 2, 1), ONLY_VERIFY, "row 2 has row 1; allowed: 2"),
        (INDEX, cell("shard", 2, 0), ONLY_VERIFY, "row 2 has shard 0; allowed: 1"),
        (INDEX, cell("ext", 0, "../x"), ONLY_VERIFY, "row 0 has ext '../x'; allowed: jpg, png, webp"),
        (INDEX, cell("key", 0, "a/b"), ONLY_VERIFY, "row 0 has key 'a/b'; allowed: ten digits or more"),
        (INDEX, cell("key", 0, "0000000004\n"), ONLY_VERIFY, "row 0 has key '0000000004\\n'"),
        (INDEX, cell("source", 0, None), ONLY_VERIFY, "column source is null in row 0"),
        (BLOCKS_PATH, lambda table: table.drop_columns("end_byte"), ALL, "column end_byte is missing; allowed"),
        (BLOCKS_PATH, cell("end_byte", 2, None), ALL, "column end_byte is null in row 2"),
        (BLOCKS_PATH, cell("end_byte", 2, 0), ALL, "block 2 is bytes"),
        (BLOCKS_PATH, cell("end_byte", 2, 1 << 40), ALL, "block 2 is bytes"),
        (BLOCKS_PATH, cell("first_byte", 1, 0), ALL, "block 1 is bytes 0 to"),
        (BLOCKS_PATH, cell("first_byte", 2, 1 << 62), ALL, "column first_byte has 4611686018427387904"),
        (BLOCKS_PATH, cell("first_sample_id", 1, 2), ALL, "row 1 has first_sample_id 2; allowed: 3"),
        (BLOCKS_PATH, cell("num_samples", 0, 4), ALL, "row 0 has num_samples 4; allowed: 3"),
        (BLOCKS_PATH, cell("num_samples", 0, -3), ALL, "column num_samples has -3"),
        (BLOCKS_PATH, cell("shard", 3, 0), ALL, "row 3 has shard 0; allowed: 1"),
        (BLOCKS_PATH, lambda table: table.slice(0, 6), ALL, "it has 6 blocks; allowed: 7"),
        (BLOCKS_PATH, with_column("num_samples", ["3"] * 7, TEXT), ALL, "column num_samples is of type 'string'"),
        (LABELS_PATH, lambda table: table.slice(0, 2), ALL, "it has 2 rows; allowed: 3, the classes of the manifest"),
        (LABELS_PATH, cell("name", 1, None), ALL, "column name is null in row 1"),
        (LABELS_PATH, cell("name", 1, "c0"), ALL, "the class 'c0' is there twice"),
        (LABELS_PATH, cell("label", 1, 2), ALL, "row 1 has label 2; allowed: 1"),
        (LABELS_PATH, cell("num_samples", 1, -1), ALL, "column num_samples has -1"),
        (LABELS_PATH, with_column("name", [1, 2, 3], INT32), ALL, "column name is of type 'int32'; allowed: string"),
        (QUARANTINE_PATH, lambda table: table.drop_columns("kind"), ("card",), "column kind is missing"),
        (QUARANTINE_PATH, with_column("distance", [], TEXT), ("card",), "column distance is of type 'string'"),
    ],
)  # fmt: skip
def test_tables(store: Store, path: str, change: Change, by: tuple[str, ...], what: str) -> None:
    change_table(store, path, change)
    assert_refused(store, by=by, what=what)


def bytes_of(length: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:length]


@pytest.mark.parametrize("path", [INDEX, BLOCKS_PATH, LABELS_PATH])
@pytest.mark.parametrize(
    "change",
    [bytes_of(0), bytes_of(50), lambda data: data[:-8] + b"\xff" * 8, lambda data: bytes(1000) + data[1000:]],
    ids=["empty", "cut off", "footer", "pages"],
)
def test_damaged_parquet(store: Store, path: str, change: Callable[[bytes], bytes]) -> None:
    rehash(store, path, change(store.read(path)))
    found = refusals(store.url)
    for reader, message in found.items():
        assert f"{path}" in message, reader
        assert "Traceback" not in message


def field(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest | {name: value}


def without(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: {key: value for key, value in manifest.items() if key != name}


def shard(name: str, value: object) -> Callable[[dict[str, Any]], object]:
    def change(manifest: dict[str, Any]) -> object:
        manifest["shards"][1][name] = value
        return manifest

    return change


def file(path: str, sha256: object) -> Callable[[dict[str, Any]], object]:
    return lambda manifest: manifest | {"files": manifest["files"] | {path: sha256}}


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda _: [1], "not a manifest: it is [1]; allowed: an object"),
        (lambda _: 7, "allowed: an object"),
        (field("format_version", "2"), "format version '2', this version reads 2"),
        (field("format_version", True), "format version True"),
        (without("num_classes"), "num_classes is missing"),
        (without("shards"), "shards is missing"),
        (field("more", 1), "'more' is not a field"),
        (field("num_samples", "15"), "num_samples is '15'; allowed: a whole number"),
        (field("num_samples", None), "num_samples is None"),
        (field("num_samples", 16), "its shards hold another number"),
        (field("num_samples", 1 << 62), "num_samples is 4611686018427387904; allowed: 0 to"),
        (field("num_classes", -1), "num_classes is -1; allowed: 0 to 16,777,216"),
        (field("num_classes", 1e300), "num_classes is 1e+300"),
        (field("samples_per_block", 0), "samples_per_block is 0; allowed: 1 to"),
        (field("split", 5), "split is 5; allowed: a text"),
        (field("split", "x" * (1 << 17)), "allowed: at most 65,536 characters"),
        (field("plan_hash", "ab"), "plan_hash is 'ab'; allowed: 64 hex digits"),
        (field("adopted", "yes"), "adopted is 'yes'; allowed: true and false"),
        (field("shards_url", ["s3://x/y"]), "shards_url is ['s3://x/y']; allowed: a text"),
        (field("shards_url", "http://x/y"), "cannot open 'http://x/y'"),
        (field("shards_url", "a\0b"), "shards_url is 'a\\x00b'"),
        (field("shards", {}), "shards is {}; allowed: a list"),
        (field("shards", [1]), "shards.0 is 1; allowed: an object with"),
        (field("shards", [{}]), "shards.0 is {}"),
        (shard("path", "../x.tar"), "the path of a shard is '../x.tar'; allowed: plain relative paths"),
        (shard("path", "/etc/passwd"), "the path of a shard is '/etc/passwd'"),
        (shard("path", "a\0b"), "the path of a shard is 'a\\x00b'"),
        (shard("path", "a/\ud800"), "the path of a shard is 'a/\\ud800'"),
        (shard("path", 7), "shards.1.path is 7; allowed: a text"),
        (shard("path", shard_path(0)), f"the shard '{shard_path(0)}' is there twice"),
        (shard("first_sample_id", 5), "is 5; allowed: 4, the number of samples before it"),
        (shard("num_samples", -4), "shards.1.num_samples is -4"),
        (shard("num_samples", 4.0), "shards.1.num_samples is 4.0; allowed: a whole number"),
        (shard("num_bytes", 0), "shards.1.num_bytes is 0; allowed: 1 to"),
        (shard("num_bytes", 1 << 62), "shards.1.num_bytes is 4611686018427387904"),
        (shard("sha256", "x" * 64), "the sha256 of a shard is"),
        (shard("sha256", 7), "shards.1.sha256 is 7; allowed: a text"),
        (field("files", []), "files is []; allowed: an object"),
        (file("../x", "ab" * 32), "the path of a file is '../x'"),
        (file("x", 5), "the sha256 of 'x' is 5"),
        (file("x", "AB" * 32), "the sha256 of a file is 'ABAB"),
    ],
)  # fmt: skip
def test_manifests(store: Store, change: Callable[[dict[str, Any]], object], what: str) -> None:
    write_manifest(store, change(json.loads(store.read(MANIFEST_PATH))))
    found = refusals(store.url)
    assert all(what in message and MANIFEST_PATH in message for message in found.values()), found
    (fault,) = verify_dataset(store.url)
    assert fault.where == MANIFEST_PATH


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a": 1, "a": 2}', b'{"num_samples": NaN}', b"\xff\xfe", b""])
def test_manifests_that_are_no_json(store: Store, data: bytes) -> None:
    store.write(MANIFEST_PATH, data)
    assert all(MANIFEST_PATH in message for message in refusals(store.url).values())


def test_a_file_that_the_manifest_does_not_list_is_found(store: Store) -> None:
    manifest = json.loads(store.read(MANIFEST_PATH))
    del manifest["files"][BLOCKS_PATH]
    write_manifest(store, manifest)
    found = refusals(store.url)
    assert f"has no sha256 of {BLOCKS_PATH}" in found["verify"]
    assert f"{BLOCKS_PATH} is damaged: its sha256 is not the manifest's" in found["loader"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda _: [1], "not a plan: it has no format_version"),
        (without("settings"), "settings is missing"),
        (field("label_names", 7), "label_names is 7; allowed: a list"),
        (field("label_names", [1]), "label_names.0 is 1; allowed: a text"),
        (field("num_samples", -1), "num_samples is -1"),
        (field("num_samples", 1 << 62), "num_samples is 4611686018427387904"),
        (field("settings", []), "settings is []; allowed: an object"),
        (field("files", {"../x": 1}), "files.'../x' is 1"),
        (field("evaluation_sets", {"a": 1}), "evaluation_sets.'a' is 1"),
    ],
)
def test_plans(store: Store, change: Callable[[dict[str, Any]], object], what: str) -> None:
    rehash(store, PLAN_PATH, json.dumps(change(json.loads(store.read(PLAN_PATH)))).encode())
    assert_refused(store, by=("card",), what=what)


def test_blocks_that_say_less_than_the_index_are_not_exceeded(store: Store) -> None:
    """The memory that a loader may take follows from the block table alone."""
    first_byte = read_table(store.read(BLOCKS_PATH))["first_byte"][2].as_py()
    change_table(store, BLOCKS_PATH, cell("end_byte", 2, first_byte + 9))
    found = refusals(store.url)
    assert "those of their block" in found["loader"]
    assert "the block table does not fit its index" in found["verify"]


def test_tables_of_the_plan(store: Store) -> None:
    path = "plan/samples-00000.parquet"
    rehash(store, path, table_bytes(read_table(store.read(path)).drop_columns(["mode", "position"])))
    found = refusals(store.url)
    assert "column mode is missing" in found["card"]
    assert f"{path} cannot be read: column position is missing" in found["verify"]


def test_a_pipe_in_place_of_a_file_is_refused_at_once(store: Store) -> None:
    for path in (INDEX, shard_path(2)):
        (Path(store.url) / path).unlink()
        os.mkfifo(Path(store.url) / path)
    found = refusals(store.url)
    assert "is not a regular file" in found["verify"]
    assert "is not a regular file" in found["loader"]
