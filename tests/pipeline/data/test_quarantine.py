"""Replaced samples are listed and counted; too many of them stop the run, and the message has the list's path."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.data.quarantine import Quarantine, quarantine_path
from shards.errors import WillNotSucceedError
from shards.reading.samples import RawSample


def sample(sample_id: int, *, fault: str = "crc") -> RawSample:
    return RawSample(
        sample_id=sample_id,
        data=None,
        fault=fault,
        height=8,
        width=8,
        orientation=1,
        labels=(0,),
        source=f"c0/{sample_id}.jpg",
        crc32=0,
    )


def test_every_replaced_sample_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path, max_share=0.5)
    quarantine.count(1000)

    def replace_one(i: int) -> None:
        quarantine.replace(sample(i, fault=f"crc of {i}"), url="data", substitute=i + 1, is_first=True)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace_one, range(200)))
    lines = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["sample_id"])
    assert lines == [
        {"url": "data", "sample_id": i, "source": f"c0/{i}.jpg", "reason": f"crc of {i}", "substitute": i + 1}
        for i in range(200)
    ]
    assert (quarantine.num_read, quarantine.num_replaced) == (1000, 200)


def test_a_sample_is_listed_once_and_counted_each_time(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.jsonl", max_share=1.0)
    quarantine.count(40)
    for _ in range(3):
        for url in ("data", "other"):
            for i in range(5):
                quarantine.replace(sample(i), url=url, substitute=i + 1, is_first=True)
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert [(line["url"], line["sample_id"]) for line in lines] == [(u, i) for u in ("data", "other") for i in range(5)]
    assert quarantine.num_replaced == 30


@pytest.mark.parametrize(
    ("num_read", "max_share", "allowed"),
    [
        pytest.param(100, 0.001, 10, id="ten are always allowed: a short run has too few to speak of shares"),
        pytest.param(20_000, 0.001, 20, id="0.1 % of 20,000"),
        pytest.param(20_000, 0.0, 10, id="no share"),
    ],
)
def test_too_many_stop_the_run(tmp_path: Path, num_read: int, max_share: float, allowed: int) -> None:
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path, max_share=max_share)
    quarantine.count(num_read)
    for i in range(allowed):
        quarantine.replace(sample(i), url="data", substitute=0, is_first=True)
    with pytest.raises(WillNotSucceedError):
        quarantine.replace(sample(allowed), url="data", substitute=0, is_first=True)
    assert len(path.read_text().splitlines()) == allowed + 1


def test_without_a_fault_there_is_no_list(tmp_path: Path) -> None:
    Quarantine(quarantine_path(tmp_path, rank=0), max_share=0.1).count(5)
    assert not list(tmp_path.iterdir())


def test_each_rank_has_a_list_of_its_own_which_later_starts_continue(tmp_path: Path) -> None:
    for num_ranks in (3, 1, 2):
        for rank in range(num_ranks):
            quarantine = Quarantine(quarantine_path(tmp_path, rank=rank), max_share=1.0)
            quarantine.count(1)
            quarantine.replace(sample(10 * num_ranks + rank), url="data", substitute=1, is_first=True)
    found = {
        path.name: [json.loads(line)["sample_id"] for line in path.read_text().splitlines()]
        for path in (tmp_path / "quarantine").iterdir()
    }
    assert found == {
        "rank-00000.jsonl": [30, 10, 20],
        "rank-00001.jsonl": [31, 21],
        "rank-00002.jsonl": [32],
    }


def test_a_run_directory_that_is_gone_stays_gone(tmp_path: Path) -> None:
    quarantine = Quarantine(quarantine_path(tmp_path / "gone", rank=0), max_share=1.0)
    with pytest.raises(FileNotFoundError):
        quarantine.replace(sample(1), url="data", substitute=1, is_first=True)


def test_substitutes_that_can_not_be_used_either_are_listed_and_not_counted(tmp_path: Path) -> None:
    quarantine = Quarantine(tmp_path / "quarantine.jsonl", max_share=1.0)
    quarantine.count(1)
    for i in range(30):
        quarantine.replace(sample(i), url="data", substitute=i + 1, is_first=i == 0)
    assert quarantine.num_replaced == 1
    assert len((tmp_path / "quarantine.jsonl").read_text().splitlines()) == 30


def test_a_list_that_cannot_be_written_is_said_once_and_written_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quarantine.jsonl"
    quarantine = Quarantine(path, max_share=1.0)
    quarantine.count(40)
    path.symlink_to("/dev/full")
    for sample_id in (1, 2):
        quarantine.replace(sample(sample_id), url="data", substitute=9, is_first=True)
    assert [one for one in caplog.messages if "cannot be written: No space left" in one] == [
        f"{path} cannot be written: No space left on device; its lines are kept until it can"
    ]
    path.unlink()
    for sample_id in (2, 3):
        quarantine.replace(sample(sample_id), url="data", substitute=9, is_first=True)
    assert [json.loads(line)["sample_id"] for line in path.read_text().splitlines()] == [1, 2, 3]
    assert quarantine.num_replaced == 4
