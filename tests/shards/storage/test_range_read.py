"""What reads of byte ranges are configured by, and which stores can be stopped."""

import threading

import pytest

from shards.errors import UserError
from shards.storage.local import LocalStore
from shards.storage.range_read import Half, Read, ReadConfig, Stoppable
from shards.storage.s3 import S3Store


@pytest.mark.parametrize("values", [{"connections": 0}, {"hedge_share": -0.1}, {"hedge_share": 1.1}])
def test_impossible_values_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"is .*; allowed (is 1 or more|are 0 \(none\) to 1)$"):
        ReadConfig(**values)  # type: ignore[arg-type]


def test_a_bucket_can_be_stopped_and_a_folder_need_not(s3_endpoint: str) -> None:
    assert isinstance(S3Store(bucket="b"), Stoppable)
    assert not isinstance(LocalStore("x"), Stoppable)


def test_each_half_is_stopped_for_itself() -> None:
    read = Read(path="x", first=0, end=1)
    read.halves += [Half(store=LocalStore("x"), is_hedge=is_hedge) for is_hedge in (False, True)]
    assert isinstance(read.halves[0].stop, threading.Event)
    read.halves[0].stop.set()
    assert not read.halves[1].stop.is_set()
