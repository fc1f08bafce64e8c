"""A service that fails, hangs or comes back never holds up a run, and gets every line once, in order."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.training.reporting import follower
from pipeline.training.reporting.follower import (
    CurveLine,
    Follower,
    MetricsReader,
    Settings,
    StartEnding,
    end_all,
    without_password,
)
from pipeline.training.reporting.metrics import Metrics
from shards.errors import InvalidDataError

SECONDS = 60.0  # what a busy machine may take


class Book:
    """A `Logger` that keeps what it gets in memory. `has`: the last step that it has from before. `down`: while it is
    set, all calls fail; `hangs`: they wait until it is cleared."""

    title = "Book"

    def __init__(self, *, has: int = 0) -> None:
        self.has, self.rows, self.shown = has, list[CurveLine](), list[tuple[str, Settings]]()
        self.endings: list[StartEnding] = []
        self.down, self.held = threading.Event(), threading.Event()
        self.is_refusing_settings = False
        self.num_calls = 0

    def _call(self) -> None:
        self.num_calls += 1
        deadline = time.monotonic() + 2 * SECONDS
        while self.held.is_set() and time.monotonic() < deadline:
            threading.Event().wait(0.005)
        if self.down.is_set():
            raise ConnectionError("https://me:secret@book refuses\nall of it")

    def open(self) -> int:
        self._call()
        return self.has

    def place(self) -> str:
        return "in https://me:secret@book/1"

    def show_job(self, text: str, settings: Settings) -> None:
        if self.is_refusing_settings:
            raise ValueError(f"no {settings}")
        self.shown.append((text, settings))

    def write(self, lines: Sequence[CurveLine]) -> None:
        self._call()
        self.rows += lines

    def close(self, ending: StartEnding) -> None:
        self._call()
        self.endings.append(ending)

    @property
    def steps(self) -> list[int]:
        return [line.step for line in self.rows]


class Run:
    """Metrics, and a book that follows them. `job`: as YAML, and its settings."""

    def __init__(self, folder: Path, book: Book, *, step: int = 0, job: tuple[str, Settings] = ("", {})) -> None:
        self.metrics = Metrics(folder, step=step)
        self.follower = Follower(book, folder / "metrics.jsonl", job=job)
        self.book = book

    def train(self, *steps: int) -> None:
        for step in steps:
            self.metrics.write(step, {"loss": 1 / step, "epoch": 0.5})

    def end(self, ending: StartEnding = StartEnding.DONE) -> float:
        """The seconds that it took."""
        began = time.monotonic()
        end_all([self.follower], ending)
        self.metrics.close()
        return time.monotonic() - began


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def ends_within(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The most that the end of a run waits for a service, whether it answers or not."""
    monkeypatch.setattr(follower, "FAILING_SECONDS", seconds)
    monkeypatch.setattr(follower, "END_SECONDS", dict.fromkeys(follower.END_SECONDS, seconds))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(follower, "SEND_SECONDS", 0.01)
    monkeypatch.setattr(follower, "_FIRST_PAUSE", 0.01)
    ends_within(monkeypatch, SECONDS)
    caplog.set_level(logging.INFO)


def test_a_run_that_nothing_disturbs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job: tuple[str, Settings] = ("url: http://me:secret@host/d", {"steps": 3, "data.url": "http://me:secret@host/d"})
    run = Run(tmp_path, Book(), job=job)
    run.train(1, 2, 3)
    run.end()
    assert run.book.shown == [("url: http://***@host/d", {"steps": 3, "data.url": "http://***@host/d"})]
    assert run.book.steps == [1, 2, 3]
    assert run.book.rows[1].values == {"train/loss": 0.5, "train/num_epochs": 0.5}
    assert abs(run.book.rows[1].time_ms / 1000 - time.time()) < 60
    assert run.book.endings == [StartEnding.DONE]
    assert caplog.messages == ["Book: in https://***@book/1"]


@pytest.mark.parametrize(
    ("has", "sent"),
    [
        pytest.param(0, [1, 2, 3, 4, 5, 6], id="a new service gets all that metrics.jsonl has"),
        pytest.param(2, [3, 4, 5, 6], id="away before the kill: what it missed, too"),
        pytest.param(4, [5, 6], id="as far as the checkpoint"),
        pytest.param(5, [6], id="steps after the checkpoint were sent, and are trained again"),
        pytest.param(9, [], id="all of them"),
    ],
)
def test_a_continued_run_sends_what_the_service_has_not(tmp_path: Path, has: int, sent: list[int]) -> None:
    first = Run(tmp_path, Book())
    first.train(1, 2, 3, 4, 5)
    first.end(StartEnding.STOPPED)
    continued = Run(tmp_path, Book(has=has), step=4)
    continued.train(5, 6)
    continued.end()
    assert continued.book.steps == sent


def test_a_service_that_comes_back_gets_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(follower, "_MOST_AT_ONCE", 7)
    run = Run(tmp_path, Book())
    run.train(1)
    until(lambda: run.book.steps == [1])
    run.book.down.set()
    run.train(*range(2, 50))
    until(lambda: run.book.num_calls > 4)
    run.book.down.clear()
    until(lambda: len(run.book.rows) == 49)
    run.train(50)
    run.end()
    assert run.book.steps == list(range(1, 51))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == [
        "Book does not answer: ConnectionError: https://***@book refuses all of it; training continues, and what it "
        "misses is sent once it answers"
    ]
    assert caplog.messages.count("Book answers") == 1


@pytest.mark.parametrize("how", ["down", "held"])
def test_the_end_waits_for_a_bounded_time(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_within(monkeypatch, 0.4)
    book = Book()
    event: threading.Event = getattr(book, how)
    event.set()
    run = Run(tmp_path, book)
    began = time.monotonic()
    run.train(*range(1, 101))
    assert time.monotonic() - began < SECONDS, "training does not wait"
    assert run.end() < SECONDS
    event.clear()
    assert (
        f"Book has not taken the last 100 lines of the run{_REASONS[how]}; {tmp_path}/metrics.jsonl has them"
        in (caplog.messages[-1])
    )
    until(lambda: not run.follower.is_alive)
    assert book.rows == [], "left behind, it sends nothing: another start may"


def test_services_that_hang_are_waited_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run is no later for a second one."""
    ends_within(monkeypatch, 1.0)
    books = [Book() for _ in range(70)]
    for book in books:
        book.held.set()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    followers = [Follower(book, tmp_path / "metrics.jsonl", job=("", {})) for book in books]
    began = time.monotonic()
    end_all(followers, StartEnding.DONE)
    assert 1.0 <= time.monotonic() - began < SECONDS, "not a second for each"
    for book in books:
        book.held.clear()


_REASONS = {"down": " (ConnectionError: https://***@book refuses all of it)", "held": ""}


def test_settings_that_are_refused_cost_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    book.is_refusing_settings = True
    run = Run(tmp_path, book, job=("steps: 3", {"steps": 3}))
    run.train(1, 2)
    run.end()
    assert book.steps == [1, 2]
    assert "Book did not take the settings: ValueError: no {'steps': 3}" in caplog.messages


@pytest.mark.parametrize("waits", [pytest.param(True, id="sent before"), pytest.param(False, id="sent with it")])
def test_added_values_come_once(tmp_path: Path, waits: bool) -> None:
    """The line may be read from the file, which has them already."""
    book = Book()
    if not waits:
        book.held.set()
    run = Run(tmp_path, book)
    run.train(1, 2)
    if waits:
        until(lambda: book.steps == [1, 2])
    run.metrics.amend(2, {"test_accuracy": 0.5})
    book.held.clear()
    run.end()
    of_step_2 = [name for line in book.rows if line.step == 2 for name in line.values]
    assert sorted(of_step_2) == ["train/loss", "train/num_epochs", "val/accuracy"]


def test_values_added_by_a_later_start_are_sent(tmp_path: Path) -> None:
    """Such as the scores of the last step, if its evaluation gave way to a stop request."""
    first = Run(tmp_path, Book())
    first.train(1, 2)
    first.end(StartEnding.STOPPED)
    book = Book(has=2)
    book.held.set()
    second = Run(tmp_path, book, step=2)
    second.metrics.amend(2, {"test_accuracy": 0.5})
    book.held.clear()
    second.end()
    assert [(line.step, line.values) for line in book.rows] == [(2, {"val/accuracy": 0.5})]
    third = Run(tmp_path, Book(has=2), step=2)
    third.end()
    assert third.book.rows == []


def test_a_thread_whose_file_stays_away_ends_with_the_run_in_peace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = Follower(Book(), tmp_path / "metrics.jsonl", job=("", {}))
    end_all([one], StartEnding.FAILED)
    assert not one.is_alive
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_file_that_cannot_be_read_for_a_while_is_read_again(tmp_path: Path) -> None:
    """What comes meanwhile is read from it, too."""
    path, book = tmp_path / "metrics.jsonl", Book()
    run = Run(tmp_path, book)
    run.train(1, 2)
    until(lambda: book.steps == [1, 2])
    path.rename(tmp_path / "aside")
    path.mkdir()  # what is read is no file
    run.train(3, 4)  # to the file that is open
    threading.Event().wait(0.1)
    assert book.steps == [1, 2]
    path.rmdir()
    (tmp_path / "aside").rename(path)
    until(lambda: book.steps == [1, 2, 3, 4])
    run.end()
    assert book.endings == [StartEnding.DONE]


@pytest.mark.parametrize(
    ("has", "steps"),
    [
        pytest.param(0, [[1, 2, 3], [4, 5, 6], [7]], id="all"),
        pytest.param(4, [[5, 6, 7]], id="after one"),
        pytest.param(7, [], id="none"),
        pytest.param(9, [], id="the service is ahead"),
    ],
)
def test_which_lines(tmp_path: Path, has: int, steps: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "_MOST_AT_ONCE", 3)
    metrics = Metrics(tmp_path, step=0)
    for step in range(1, 8):
        metrics.write(step, {"loss": 1 / step, "data/bytes": 3.0})
    reader = MetricsReader(tmp_path / "metrics.jsonl", has=has)
    found = list(reader.read())
    assert [[line.step for line in some] for some in found] == steps
    for line in (line for some in found for line in some):
        assert line.values == {"train/loss": 1 / line.step, "work/data/bytes": 3.0}
    assert list(reader.read()) == []
    metrics.amend(7, {"test_loss": 1.0})
    metrics.write(10, {"loss": 0.1})
    metrics.close()
    added = [(7, {"val/loss": 1.0})] if has <= 7 else []
    later = [(line.step, line.values) for some in reader.read() for line in some]
    assert later == [*added, (10, {"train/loss": 0.1})]
    assert list(reader.read()) == []


def test_what_is_no_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    bad = ['{"step": 1, "loss": 1}x', '{"step": true}', '{"step": -1}', "[1]", "NaN", "{}", "\xff"]
    good = ['{"step": 2, "loss": "1"}', '{"step": 5, "loss": NaN, "name": [], "far": 1' + "0" * 400 + "}"]
    path.write_text("\n".join([*bad, *good, '{"loss": 1, "step": 7}', '{"step": 8, "loss": 1']))
    reader = MetricsReader(path, has=0)
    (some,) = reader.read()
    assert [(line.step, list(line.values)) for line in some] == [(2, []), (5, ["train/loss"]), (7, ["train/loss"])]
    assert list(reader.read()) == []
    with path.open("a") as file:
        file.write("}\n")
    ((last,),) = reader.read()
    assert (last.step, last.values) == (8, {"train/loss": 1.0})


def test_a_file_that_was_written_anew_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\nno line\n{"step": 2, "loss": 1}\n')
    reader = MetricsReader(path, has=0)
    assert [line.step for some in reader.read() for line in some] == [1, 2]
    path.write_text('{"step": 1, "loss": 1}\n{"step": 2, "loss": 1}\n{"step": 3, "loss": 1}\n')
    assert [line.step for some in reader.read() for line in some] == [3]


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(InvalidDataError):
        list(MetricsReader(tmp_path / "metrics.jsonl", has=0).read())


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach https://me:secret@host:5000/api", "cannot reach https://***@host:5000/api"),
        ("http://token@a and http://b@c", "http://***@a and http://***@c"),
        ("http://host/a@b, mail me@host", "http://host/a@b, mail me@host"),
    ],
)
def test_messages_have_no_password(text: str, shown: str) -> None:
    assert without_password(text) == shown
