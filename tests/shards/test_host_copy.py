"""One copy of a dataset's tables a host: each object is asked for once, and nothing stays behind, even after kills."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from pipeline.data.config import DataConfig
from pipeline.data.training_data import TrainingData
from pipeline.ranks.world import World
from shards import order as order_module
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.hashing import BLOCKS
from shards.host_copy import LocalRanks, one_copy, passing_copy
from shards.manifest import BLOCKS_PATH, LABELS_PATH, MANIFEST_PATH, SHARDS_PATH, index_path
from shards.part import labels_of
from tests.rigs.datasets import packed_folders
from tests.rigs.processes import run_ranks
from tests.rigs.watched import WatchedStore

CHECKOUT = Path(__file__).resolve().parent.parent.parent
TABLE = pa.table({"x": [1, 2, 3]})


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows.bin and shards.parquet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shards.packing.merge.LEAST_SAMPLES_WITH_ROWS", 1)
        patch.setattr("shards.manifest_table.MOST_LISTED_SHARDS", 1)
        return packed_folders(tmp_path_factory.mktemp("host"))


def left(temporary: Path) -> list[str]:
    return sorted(path.name for path in temporary.rglob("*") if path.is_file())


def opened_by_a_rank(world: World, url: str, temporary: str) -> tuple[list[str], str, list[int], list[int]]:
    """What a rank has asked the store for, all that its dataset says, the keys of the orders that it has made, and
    samples of the first two epochs and all labels."""
    tempfile.tempdir = temporary
    store = WatchedStore(url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shards.dataset.open_store", lambda _: store)
        ranks = LocalRanks(launch="one start", num_ranks=world.num_local_ranks)
        said = [all_of(open_dataset(url, ranks=ranks)) for _ in range(2)]
        dataset = open_dataset(url, ranks=ranks)
        ranks.is_starting = False
        made, permuted = [], order_module._permuted

        def counted(block_sizes: NDArray[np.int64], *, key: int) -> order_module.Arrays:
            made.append(key)
            return permuted(block_sizes, key=key)

        patch.setattr(order_module, "_permuted", counted)
        patch.setattr(order_module, "_LEAST_SHARED_BLOCKS", 1)
        found = samples_of_two_epochs(TrainingData(datasets=(dataset,), quotas=(1,), held_out=None))
        found += labels_of(dataset, what="a test").tolist()
    assert said[0] == said[1]
    return store.read_files, said[0], made, found


def samples_of_two_epochs(data: TrainingData) -> list[int]:
    [order] = data.orders(DataConfig(lanes=2, window_blocks=1), seed=5)
    found: list[int] = order.at(np.arange(2 * order.num_samples)).tolist()
    return found


def all_of(dataset: Dataset) -> str:
    """All that is small of a dataset, as text."""
    manifest, blocks = dataset.manifest, dataset.blocks
    assert len(manifest.shards) == len(list(manifest.shards)) == len(manifest.shards[:])
    assert manifest.shards[-1] == list(manifest.shards)[-1]
    assert all(manifest.files.get(path) == sha256 for path, sha256 in manifest.files.items())
    assert len(manifest.files) == len(dict(manifest.files))
    assert manifest.files.get("index/shard-000099.parquet") is manifest.files.get("other") is None
    fields = {name: value for name, value in vars(manifest).items() if name not in ("shards", "files")}
    fields |= {"files": dict(sorted(manifest.files.items())), "shards": [vars(shard) for shard in manifest.shards]}
    fields |= {name: column.tolist() for name, column in vars(blocks).items() if column is not None}
    fields |= {"labels": dataset.label_table.to_pylist(), "fingerprint": dataset.fingerprint}
    return json.dumps(fields | {"limits": asdict(manifest.limits)})


def test_eight_ranks_ask_for_each_object_and_make_each_order_once(packed: Path, tmp_path: Path) -> None:
    dataset = open_dataset(str(packed))
    expected = all_of(dataset)
    found = run_ranks(opened_by_a_rank, str(packed), str(tmp_path), num_ranks=8)
    assert [said == expected for _, said, _, _ in found] == [True] * 8
    asked = Counter(path for paths, _, _, _ in found for path in paths)
    indices = {index_path(shard): 1 for shard in range(4)}
    assert asked == {MANIFEST_PATH: 1, SHARDS_PATH: 1, BLOCKS_PATH: 1, LABELS_PATH: 1} | indices
    assert sorted(key for _, _, keys, _ in found for key in keys) == sorted(BLOCKS.key(5, epoch) for epoch in (0, 1))
    alone = samples_of_two_epochs(TrainingData(datasets=(dataset,), quotas=(1,), held_out=None))
    alone += labels_of(dataset, what="a test").tolist()
    assert [samples for *_, samples in found] == [alone] * 8
    assert left(tmp_path) == []


def test_a_rank_alone_writes_no_file(packed: Path, temporary: Path) -> None:
    dataset = open_dataset(str(packed), ranks=LocalRanks(launch="alone", num_ranks=1))
    assert all_of(dataset) == all_of(open_dataset(str(packed)))
    assert list(temporary.iterdir()) == []


def test_after_the_start_each_rank_reads_for_itself(temporary: Path) -> None:
    ranks = LocalRanks(launch="start", num_ranks=2)
    one_copy(ranks, "first", lambda: TABLE)
    ranks.is_starting = False
    before = left(temporary)
    assert one_copy(ranks, "second", lambda: TABLE).equals(TABLE)
    assert left(temporary) == before


@contextmanager
def rank_that(temporary: Path, *, does: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A rank of two that is `making` or `using` a table, and goes no further. It is killed at the end."""
    program = (
        "import os, sys, time\n"
        "import pyarrow as pa\n"
        "from shards.host_copy import LocalRanks, one_copy\n"
        "def there():\n"
        "    os.write(1, b'there\\n'); time.sleep(600)\n"
        f"def make():\n    {'there()' if does == 'making' else 'pass'}\n    return pa.table({{'x': [7]}})\n"
        "one_copy(LocalRanks(launch='killed', num_ranks=2), 'table', make)\n"
        "there()\n"
    )
    environ = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(CHECKOUT)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    ("does", "launch"),
    [
        ("making", "another"),
        ("using", "killed"),
        pytest.param("making", "killed", marks=pytest.mark.long),
        pytest.param("using", "another", marks=pytest.mark.long),
    ],
)
def test_what_a_killed_rank_leaves_is_neither_used_nor_kept(temporary: Path, does: str, launch: str) -> None:
    with rank_that(temporary, does=does):
        pass
    assert len(left(temporary)) == (1 if does == "making" else 2)
    found = one_copy(LocalRanks(launch=launch, num_ranks=2), "table", lambda: TABLE)
    assert found.equals(TABLE), "the data may have changed between the starts"
    assert len(left(temporary)) == 2, "this start's"
    program = (
        "import os, pyarrow as pa\n"
        "from shards.host_copy import LocalRanks, one_copy\n"
        f"found = one_copy(LocalRanks(launch={launch!r}, num_ranks=2), 'table', lambda: pa.table({{'x': [9]}}))\n"
        "print(found.column('x').to_pylist())\n"
    )
    environ = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == "[1, 2, 3]\n", "the other rank of this start has the same table"
    assert left(temporary) == []
    assert found.equals(TABLE), "still mapped"


def test_a_table_that_cannot_be_made_is_one_error_and_leaves_nothing(temporary: Path) -> None:
    def make() -> pa.Table:
        raise error

    for error in (UserError("damaged"), OSError("the store is away")):
        with pytest.raises(type(error), match=str(error)):
            one_copy(LocalRanks(launch="fails", num_ranks=2), "table", make)
    assert [name for name in left(temporary) if not name.endswith(".lock")] == []


def test_a_folder_of_others_is_not_used(temporary: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = LocalRanks(launch="first", num_ranks=2)
    one_copy(ranks, "table", lambda: TABLE)
    (folder,) = temporary.iterdir()
    folder.chmod(0o777)
    before = left(temporary)
    assert one_copy(LocalRanks(launch="second", num_ranks=2), "table", lambda: TABLE).equals(TABLE)
    assert "ranks of this host cannot share a table" in caplog.text
    assert left(temporary) == before


def test_a_rank_that_stands_still_holds_no_other_up(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The others then arrive where all meet, and name the one that is missing."""
    monkeypatch.setattr("shards.host_copy._MOST_WAIT_SECONDS", 0.2)
    ranks = LocalRanks(launch="killed", num_ranks=2)
    with rank_that(temporary, does="making"):
        before = left(temporary)
        assert one_copy(ranks, "table", lambda: TABLE).equals(TABLE)
        assert passing_copy(ranks, "another", lambda: TABLE).equals(TABLE)
    assert caplog.text.count("has not finished reading a table for 0 s, so this one reads its own") == 1
    assert left(temporary) == before, "it waits for no other table either"


def test_a_new_process_with_the_number_of_a_dead_one_is_another(temporary: Path) -> None:
    one_copy(LocalRanks(launch="start", num_ranks=2), "table", lambda: pa.table({"x": [9]}))
    (lock,) = temporary.rglob("*.lock")
    mark = lock.read_text().strip()
    assert mark.startswith(f"{os.getpid()}-")
    lock.write_text(f"{mark}0\n")  # it began at another time
    assert one_copy(LocalRanks(launch="start", num_ranks=2), "table", lambda: TABLE).equals(TABLE)


def test_a_host_without_a_folder_for_temporary_files(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(temporary / "none")])
    assert one_copy(LocalRanks(launch="start", num_ranks=2), "table", lambda: TABLE).equals(TABLE)
    assert "(No usable temporary directory found in" in caplog.text
