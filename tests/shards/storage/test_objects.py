"""What all stores share: paths, errors, and counters of reads."""

import pickle
import threading

import pytest

from shards.storage.objects import MissingObjectError, Traffic, TrafficCounts, checked_path, folder_prefix


@pytest.mark.parametrize("path", ["a", "a/b.tar", "a b/ü.json", "..a/b..", "a/.hidden"])
def test_plain_relative_paths_are_taken_as_they_are(path: str) -> None:
    assert checked_path(path) == path


def test_missing_object_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(MissingObjectError("a/b", url="s3://x")))  # noqa: S301
    assert error.path == "a/b"


@pytest.mark.parametrize(("folder", "prefix"), [("", ""), ("/", ""), ("a", "a/"), ("a/b/", "a/b/")])
def test_what_is_below_a_folder_begins_with_its_name_and_a_slash(folder: str, prefix: str) -> None:
    assert folder_prefix(folder) == prefix


def test_counts_add_up_and_are_taken_apart() -> None:
    traffic = Traffic()
    traffic.add(TrafficCounts(requests=2, bytes=10, seconds=0.5))
    before = traffic.counts()
    traffic.add(TrafficCounts(requests=1, retries=3, wasted_bytes=7))
    assert traffic.counts() == TrafficCounts(requests=3, bytes=10, seconds=0.5, retries=3, wasted_bytes=7)
    assert traffic.counts() - before == TrafficCounts(requests=1, retries=3, wasted_bytes=7)


def test_every_count_is_named() -> None:
    assert {"requests", "bytes", "retries", "broken_bodies", "throttled", "hedges", "wasted_bytes"} <= set(
        vars(TrafficCounts())
    )


def test_threads_count_together() -> None:
    traffic = Traffic()

    def count() -> None:
        for _ in range(500):
            traffic.add(TrafficCounts(requests=1, bytes=2))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert traffic.counts() == TrafficCounts(requests=2000, bytes=4000)


def test_another_process_counts_for_itself() -> None:
    traffic = Traffic()
    traffic.add(TrafficCounts(requests=1))
    assert pickle.loads(pickle.dumps(traffic)).counts() == TrafficCounts()  # noqa: S301


def test_who_asks_is_told_of_throttling_while_he_lives() -> None:
    class Listener:
        def __init__(self) -> None:
            self.told = 0

        def tell(self) -> None:
            assert traffic.counts().throttled
            self.told += 1

    traffic, listener, gone = Traffic(), Listener(), Listener()
    traffic.on_throttle(gone.tell)
    traffic.on_throttle(listener.tell)
    traffic.add(TrafficCounts(requests=1))
    assert listener.told == 0
    del gone
    traffic.add(TrafficCounts(throttled=1))
    assert listener.told == 1
