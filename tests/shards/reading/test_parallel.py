"""Results are the same in one process and in several."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shards.errors import UserError
from shards.reading.parallel import _uninterrupted, run_tasks

WAIT_SECONDS = 60


def square(number: int) -> tuple[int, int]:
    """The workers' task: the square, and the process that computed it."""
    return number * number, os.getpid()


def refuse_three(number: int) -> int:
    """Fails once."""
    if number == 3:
        raise UserError("three is not allowed")
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_is_done_once(workers: int) -> None:
    done = list(run_tasks(square, range(11), workers=workers))
    assert sorted(value for value, _ in done) == [number * number for number in range(11)]
    assert (os.getpid() in {pid for _, pid in done}) == (workers == 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_workers_error_ends_the_work_as_it_is(workers: int) -> None:
    drawn = []

    def tasks() -> Iterator[int]:
        for number in range(1000):
            drawn.append(number)
            yield number

    with pytest.raises(UserError, match="three is not allowed"):
        list(run_tasks(refuse_three, tasks(), workers=workers))
    assert len(drawn) < 50, "tasks are drawn as workers get free"


def setting(_: int) -> str | None:
    """The environment as a worker sees it."""
    return os.environ.get("PATCHLINE_TEST_SETTING")


def test_workers_have_the_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("first", "second"):
        monkeypatch.setenv("PATCHLINE_TEST_SETTING", value)
        assert set(run_tasks(setting, range(4), workers=2)) == {value}


def test_one_task_needs_no_other_process() -> None:
    assert list(run_tasks(square, [3], workers=2)) == [(9, os.getpid())]


def say_and_wait(path: Path) -> None:
    """Writes down the process, atomically, and outlives the test."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").replace(path)
    time.sleep(10 * WAIT_SECONDS)


def test_workers_end_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script, said = tmp_path / "script.py", [tmp_path / "first", tmp_path / "second"]
    script.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from shards.reading.parallel import _uninterrupted, run_tasks\n"
        "from tests.shards.reading.test_parallel import say_and_wait\n"
        "if __name__ == '__main__':\n    list(run_tasks(say_and_wait, map(Path, sys.argv[1:]), workers=2))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen([sys.executable, str(script), *map(str, said)], env=environment)
    wait_until(lambda: all(path.exists() for path in said))
    process.kill()
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{path.read_text()}").exists() for path in said))


def wait_until(is_so: Callable[[], bool]) -> None:
    """AssertionError if it takes too long."""
    end = time.monotonic() + WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_long(folder: str) -> None:
    """Writes that it has started."""
    (Path(folder) / str(os.getpid())).touch()
    threading.Event().wait(WAIT_SECONDS)


def test_an_interrupt_does_not_wait_for_what_is_under_way(tmp_path: Path) -> None:
    pause = threading.Event()

    def interrupt() -> None:
        while not any(tmp_path.iterdir()):
            pause.wait(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(run_tasks(wait_long, [str(tmp_path)] * 4, workers=2))
    thread.join()
    assert time.monotonic() - began < WAIT_SECONDS / 2
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name), 0)


def test_a_signal_in_a_protected_place_comes_behind_it() -> None:
    reached = []

    def protected() -> None:
        with _uninterrupted():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")

    with pytest.raises(KeyboardInterrupt):
        protected()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
