"""A look that fails is no answer: it is repeated, or the answer before it is kept."""

import errno
import logging
import os
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from shards.files.looks import Look, RepeatedLook, is_a_file, is_a_folder, is_there, look_once, patiently
from shards.storage.retries import RetryConfig


def failing(monkeypatch: pytest.MonkeyPatch, path: Path, faults: Iterator[int]) -> None:
    """The next looks at the path have these faults; 0: none."""
    stat = Path.stat

    def faulty(self: Path, *, follow_symlinks: bool = True) -> os.stat_result:
        if self == path and (fault := next(faults, 0)):
            raise OSError(fault, os.strerror(fault), str(self))
        return stat(self, follow_symlinks=follow_symlinks)

    monkeypatch.setattr(Path, "stat", faulty)


@pytest.mark.parametrize(
    ("fault", "look"),
    [
        (0, Look.THERE),
        (errno.ENOENT, Look.MISSING),
        (errno.ENOTDIR, Look.MISSING),  # a file has the name of a folder above it
        (errno.ELOOP, Look.MISSING),
        (errno.ESTALE, Look.UNKNOWN),
        (errno.EIO, Look.UNKNOWN),
        (errno.ENOTCONN, Look.UNKNOWN),  # FUSE
        (errno.EACCES, Look.UNKNOWN),
    ],
)
def test_one_look_has_three_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int, look: Look) -> None:
    failing(monkeypatch, tmp_path, repeat(fault))
    assert look_once(tmp_path) is look


@pytest.mark.parametrize("fault", [errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ECONNABORTED, errno.EREMOTEIO])
def test_a_look_is_repeated_until_there_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    quick = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001)
    monkeypatch.setattr("shards.storage.local.RETRIES", quick)
    path = tmp_path / "STOP"
    failing(monkeypatch, path, iter([fault, fault, 0, fault, 0, fault]))
    assert not is_there(path)
    assert not is_a_file(path)
    path.touch()
    assert is_there(path)
    assert is_a_file(path)
    assert not is_a_folder(path)
    assert is_a_folder(tmp_path)


def test_a_look_that_fails_for_minutes_raises_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001, deadline_seconds=0.2)
    monkeypatch.setattr("shards.storage.local.RETRIES", quick)
    failing(monkeypatch, tmp_path, repeat(errno.ESTALE))
    with pytest.raises(OSError, match=str(tmp_path)) as caught:
        is_there(tmp_path)
    assert caught.value.errno == errno.ESTALE


def test_what_no_wait_mends_is_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, tmp_path, iter([errno.EACCES]))
    with pytest.raises(PermissionError):
        is_there(tmp_path)


def test_a_wait_of_a_minute_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick = RetryConfig(backoff_seconds=0.001, most_backoff_seconds=0.001)
    monkeypatch.setattr("shards.storage.local.RETRIES", quick)
    monkeypatch.setattr("shards.storage.retries.ALARM_SECONDS", 0.0)
    faults = iter([errno.ESTALE] * 4)

    def read() -> bytes:
        if fault := next(faults, 0):
            raise OSError(fault, os.strerror(fault))
        return b"read"

    with caplog.at_level(logging.WARNING):
        assert patiently(tmp_path, read) == b"read"
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path} cannot be read for a minute now (Stale file handle); ")


def test_a_repeated_look_keeps_its_answer_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, now = tmp_path / "STOP", 0.0
    look = RepeatedLook(path, todo="a signal stops the run", clock=lambda: now)
    assert look.status() is None
    failing(monkeypatch, path, iter([errno.ESTALE] * 4))
    with caplog.at_level(logging.WARNING):
        assert look.status() is None
        path.touch()
        now = 59.0
        assert look.status() is None
        assert caplog.messages == []
        now = 60.0
        assert look.status() is None
        assert look.status() is None
        (said,) = caplog.messages
        assert said.startswith(f"{path} cannot be looked for (Stale file handle) for 60 s now")
        assert said.endswith("; a signal stops the run")
        caplog.clear()
        assert look.status()
        assert caplog.messages == [f"{path} can be looked for again"]
        failing(monkeypatch, path, iter([errno.EIO]))
        assert look.status(), "what was seen before"
