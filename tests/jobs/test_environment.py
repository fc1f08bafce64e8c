"""Real commands whose standard streams are closed, full, without a reader or not UTF-8: one end each, no traceback."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rigs.forks import ONE_THREAD
from tests.rigs.images import class_folders
from tests.rigs.training import losses, pretrain_words

COMMAND = [sys.executable, "-m", "jobs.cli"]
RESULTS = [  # what writes its result to standard output
    pytest.param(["--help"], id="help"),
    pytest.param(["--version"], id="version"),
    pytest.param(["show", "digits_smoke"], id="show"),
    pytest.param(["plan", "vit_h14_jft"], id="plan"),
    pytest.param(["completion", "bash"], id="completion"),
]
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NO_READER = 141  # 128 + SIGPIPE, as other tools end


def run(
    words: list[str], *, close: tuple[int, ...] = (), environ: dict[str, str] | None = None, **streams: int
) -> "subprocess.CompletedProcess[str]":
    """A command of its own; `close`: numbers of standard streams that are closed when it starts."""

    def closed() -> None:
        for number in close:
            os.close(number)

    environment = {**os.environ, **ONE_THREAD, **(environ or {})}
    return subprocess.run(
        [*COMMAND, *words],
        env=environment,
        stdout=streams.get("stdout", subprocess.PIPE),
        stderr=streams.get("stderr", subprocess.PIPE),
        text=True,
        check=False,
        timeout=300,
        preexec_fn=closed,
    )


def deaf(use: Callable[[int], "subprocess.CompletedProcess[str]"]) -> "subprocess.CompletedProcess[str]":
    """Calls it with a pipe whose reader has gone."""
    ear, mouth = os.pipe()
    os.close(ear)
    try:
        return use(mouth)
    finally:
        os.close(mouth)


@pytest.mark.parametrize("words", RESULTS)
def test_a_result_that_nobody_reads_ends_quietly(words: list[str]) -> None:
    ended = deaf(lambda pipe: run(words, stdout=pipe))
    is_help = words[0].startswith("--")
    assert (ended.returncode, ended.stderr) == (0 if is_help else NO_READER, "")


@pytest.mark.parametrize("words", RESULTS)
def test_a_result_on_a_full_disk_ends_in_one_line(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = run(words, stdout=full.fileno())
    assert ended.returncode == 74
    assert ended.stderr.startswith("error: No space left on device; make room, and run the same command")
    assert ended.stderr.count("\n") == 1


CLOSED = [(0,), (1,), (2,), (0, 1, 2)]


def closing_changes_nothing(words: list[str], close: tuple[int, ...]) -> None:
    ended = run(words, close=close)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert bool(ended.stdout) == (1 not in close)


@pytest.mark.parametrize("close", CLOSED)
def test_closed_streams_change_nothing_else(close: tuple[int, ...]) -> None:
    closing_changes_nothing(["completion", "bash"], close)


@pytest.mark.long
@pytest.mark.parametrize("words", RESULTS)
@pytest.mark.parametrize("close", CLOSED)
def test_closed_streams_change_nothing_else_of_any_command(words: list[str], close: tuple[int, ...]) -> None:
    closing_changes_nothing(words, close)


def test_a_mistake_is_2_whatever_standard_error_is() -> None:
    assert run(["nonsense"], close=(2,)).returncode == 2
    assert run(["verify", "/nowhere"], close=(0, 1, 2)).returncode == 2
    assert deaf(lambda pipe: run(["nonsense"], stderr=pipe)).returncode == 2
    with Path("/dev/full").open("w") as full:
        assert run(["nonsense"], stderr=full.fileno()).returncode == 2


@pytest.mark.parametrize(
    "stream", [*(pytest.param(name, marks=pytest.mark.long) for name in ("closed", "without a reader")), "full"]
)
def test_work_continues_if_nobody_reads_the_log(tmp_path: Path, stream: str) -> None:
    words = ["pack", "digits", "--out", str(tmp_path / "d"), "--workers", "2"]
    if stream == "closed":
        ended = run(words, close=(0, 1, 2))
    elif stream == "full":
        with Path("/dev/full").open("w") as full:
            ended = run(words, stdout=full.fileno(), stderr=full.fileno())
    else:
        ended = deaf(lambda pipe: run(words, stdout=pipe, stderr=pipe))
    assert ended.returncode == 0
    again = run(["verify", str(tmp_path / "d")])
    assert (again.returncode, "no fault found" in again.stderr) == (0, True)


@pytest.mark.parametrize(
    "more",
    [pytest.param((), id="alone"), pytest.param(("--processes", "2"), id="two ranks", marks=pytest.mark.long)],
)
def test_training_continues_if_nobody_reads_its_log(digits_url: str, tmp_path: Path, more: tuple[str, ...]) -> None:
    words = pretrain_words(digits_url, tmp_path / "run", "--steps", "4", *more)
    ended = deaf(lambda pipe: run(words, stdout=pipe, stderr=pipe))
    assert ended.returncode == 0
    assert (tmp_path / "run" / "DONE").exists()
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]


def test_names_in_any_script_are_read_in_an_ascii_locale(tmp_path: Path) -> None:
    class_folders(tmp_path / "bilder_ü", images_a_class=2)
    (tmp_path / "bilder_ü" / "é").mkdir()
    for image in list((tmp_path / "bilder_ü").rglob("*.*"))[:2]:
        image.rename(tmp_path / "bilder_ü" / "é" / f"猫{image.name}")
    out = str(tmp_path / "größe")
    packed = run(["pack", "folder", "--source.root", str(tmp_path / "bilder_ü"), "--out", out], environ=ASCII)
    assert packed.returncode == 0, packed.stderr
    verified = run(["verify", out], environ=ASCII)
    assert (verified.returncode, "gr\\xf6\\xdfe: no fault found" in verified.stderr) == (0, True), verified.stderr


def test_help_in_an_ascii_locale_or_stream() -> None:
    for environ in (ASCII, {"PYTHONIOENCODING": "ascii"}):
        ended = run(["pretrain", "digits_smoke", "--help-all"], environ=environ)
        assert (ended.returncode, ended.stdout.isascii(), ended.stderr) == (0, True, "")


def test_a_current_folder_that_was_deleted_is_said(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from jobs.cli import entry\n"
        f"os.mkdir({str(tmp_path / 'gone')!r})\n"
        f"os.chdir({str(tmp_path / 'gone')!r})\n"
        f"os.rmdir({str(tmp_path / 'gone')!r})\n"
        "sys.argv = ['patchline', 'pack', 'digits', '--out', '/nowhere/x']\n"
        "entry()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    message = "error: the current folder is unusable (No such file or directory); change to another one with cd\n"
    assert (ended.returncode, ended.stderr) == (2, message)


def test_an_argument_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    ended = run(["pretrain", "digits_smoke", "--run-dir", os.fsdecode(os.fsencode(tmp_path) + b"/\xff")])
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: the argument '")
    assert "\\udcff' is not UTF-8; allowed: UTF-8." in ended.stderr
