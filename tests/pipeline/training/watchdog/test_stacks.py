"""The file of a rank's stacks."""

import threading
from pathlib import Path

import pytest

from pipeline.training.watchdog.hang import stacks_path, write_stacks


def wait_for_bytes(begun: threading.Event, gate: threading.Event) -> None:
    begun.set()
    gate.wait(60)


def test_the_stacks_of_all_threads_are_written(tmp_path: Path) -> None:
    begun, gate = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_for_bytes, name="reader", args=(begun, gate))
    thread.start()
    begun.wait(60)
    path = stacks_path(tmp_path, rank=3, attempt="0001-abc")
    write_stacks(path, words="rank 3 stood there")
    gate.set()
    thread.join()
    assert path == tmp_path / "stacks" / "rank-00003-attempt-0001-abc.txt"
    text = path.read_text()
    assert text.startswith("rank 3 stood there\n")
    assert "in wait_for_bytes" in text
    identity = f"Thread 0x{thread.ident:016x}"
    assert f"{identity} (most recent call first)" in text
    assert f"{identity} is reader\n" in text
    assert "in test_the_stacks_of_all_threads_are_written" in text


def test_a_start_without_an_attempt_has_a_file_too(tmp_path: Path) -> None:
    assert stacks_path(tmp_path, rank=0, attempt="").name == "rank-00000-attempt-starting.txt"


def test_a_run_directory_that_is_gone_stays_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_stacks(stacks_path(tmp_path / "gone", rank=0, attempt=""), words="")
