"""A service that fails, hangs or comes back never holds up a run, and gets every step once, in order."""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.training.reporting import logger_thread
from pipeline.training.reporting.logger_choice import Loggers
from pipeline.training.reporting.logger_thread import LoggerThread
from pipeline.training.reporting.metrics import Metrics
from pipeline.training.settings.loggers import Line, Settings, StartEnding

SECONDS = 60.0  # what a busy machine may take


class Book:
    """A `Logger` that keeps what it gets in memory. `has`: the last step that it has from before. `down`: while it is
    set, all calls fail; `hangs`: they wait until it is cleared."""

    title = "Book"

    def __init__(self, *, has: int = 0) -> None:
        self.has, self.rows, self.shown = has, list[Line](), list[tuple[str, Settings]]()
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

    def write(self, lines: Sequence[Line]) -> None:
        self._call()
        self.rows += lines

    def close(self, ending: StartEnding) -> None:
        self._call()
        self.endings.append(ending)

    @property
    def steps(self) -> list[int]:
        return [line.step for line in self.rows]


class Run:
    """Metrics with the thread of a book behind them."""

    def __init__(self, folder: Path, book: Book, *, step: int = 0) -> None:
        self.metrics = Metrics(folder, step=step)
        self.thread = LoggerThread(book, folder / "metrics.jsonl", step=step)
        self.metrics.follower = self.thread
        self.book = book

    def train(self, *steps: int) -> None:
        for step in steps:
            self.metrics.write(step, {"loss": 1 / step, "epoch": 0.5})

    def end(self, ending: StartEnding = StartEnding.DONE) -> float:
        """The seconds that it took."""
        began = time.monotonic()
        self.thread.end(ending)
        self.thread.join(ending)
        self.metrics.close()
        return time.monotonic() - began


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline
        threading.Event().wait(0.005)


def ends_within(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The most that the end of a run waits for a service, whether it answers or not."""
    monkeypatch.setattr(logger_thread, "FAILING_SECONDS", seconds)
    monkeypatch.setattr(logger_thread, "END_SECONDS", dict.fromkeys(StartEnding, seconds))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(logger_thread, "SEND_SECONDS", 0.01)
    monkeypatch.setattr(logger_thread, "_FIRST_PAUSE", 0.01)
    ends_within(monkeypatch, SECONDS)
    caplog.set_level(logging.INFO)


def test_a_run_that_nothing_disturbs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path, Book())
    run.metrics.show_job("url: http://me:secret@host/d", {"steps": 3, "data.url": "http://me:secret@host/d"})
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
    """More than the memory for waiting lines holds: the file has them."""
    monkeypatch.setattr(logger_thread, "MOST_WAITING", 5)
    monkeypatch.setattr(logger_thread, "_MOST_AT_ONCE", 7)
    run = Run(tmp_path, Book())
    run.train(1)
    until(lambda: run.book.steps == [1])
    run.book.down.set()
    run.train(*range(2, 50))
    until(lambda: run.book.num_calls > 4)
    assert len(run.thread._waiting) <= 5
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
    until(lambda: not run.thread._thread.is_alive())
    assert book.rows == [], "left behind, it sends nothing: another start may"


def test_services_that_hang_are_waited_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a run is no later for a second one."""
    ends_within(monkeypatch, 1.0)
    books = [Book() for _ in range(70)]
    for book in books:
        book.held.set()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    loggers = Loggers([LoggerThread(book, tmp_path / "metrics.jsonl", step=1) for book in books])
    began = time.monotonic()
    loggers.close(StartEnding.DONE)
    assert 1.0 <= time.monotonic() - began < SECONDS, "not a second for each"
    for book in books:
        book.held.clear()


_REASONS = {"down": " (ConnectionError: https://***@book refuses all of it)", "held": ""}


def test_settings_that_are_refused_cost_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    book = Book()
    book.is_refusing_settings = True
    run = Run(tmp_path, book)
    run.metrics.show_job("steps: 3", {"steps": 3})
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


def test_a_thread_whose_file_stays_away_ends_with_the_run_in_peace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    thread = LoggerThread(Book(), tmp_path / "metrics.jsonl", step=3)
    until(lambda: any("waits for lines of" in message for message in caplog.messages))
    thread.write(4, {"loss": 1.0})
    thread.end(StartEnding.FAILED)
    thread.join(StartEnding.FAILED)
    assert not thread._thread.is_alive()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_lines_of_other_hands_are_left_out(tmp_path: Path) -> None:
    texts = ['{"loss": 1, "step": 1}', "{}", '{"step": 2, "loss": "x", "test_loss": 2}', '{"step": 3, "lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(texts))
    book = Book()
    thread = LoggerThread(book, tmp_path / "metrics.jsonl", step=9)
    thread.end(StartEnding.DONE)
    thread.join(StartEnding.DONE)
    assert [(line.step, line.values) for line in book.rows] == [(1, {"train/loss": 1.0}), (2, {"val/loss": 2.0})]
    assert json.dumps(book.endings[0].value) == '"done"'


def test_a_file_that_cannot_be_read_for_a_while_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes meanwhile is read from it, too."""
    monkeypatch.setattr(logger_thread, "_LONGEST_PAUSE", 0.01)
    path, book = tmp_path / "metrics.jsonl", Book()
    run = Run(tmp_path, book)
    run.train(1, 2)
    until(lambda: book.steps == [1, 2])
    path.rename(tmp_path / "aside")
    path.mkdir()  # what is read is no file
    run.thread._is_behind = True
    run.train(3, 4)
    num_waits: list[Exception] = []
    monkeypatch.setattr(run.thread, "_is_to_read_again", counted(run.thread._is_to_read_again, num_waits))
    until(lambda: len(num_waits) > 2)
    assert book.steps == [1, 2]
    path.rmdir()
    (tmp_path / "aside").rename(path)
    until(lambda: book.steps == [1, 2, 3, 4])
    run.end()
    assert book.endings == [StartEnding.DONE]


def counted(call: Callable[[Exception], bool], calls: list[Exception]) -> Callable[[Exception], bool]:
    """The same function, which adds to `calls`."""

    def called(error: Exception) -> bool:
        calls.append(error)
        return call(error)

    return called
