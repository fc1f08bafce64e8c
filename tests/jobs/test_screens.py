"""Whole commands on a real terminal of 80 and of 120 columns: no line is joined to another, too long, or repeated."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from jobs import exit_codes
from tests.rigs.screens import Screen
from tests.rigs.terminal_commands import patchline_on
from tests.rigs.training import STEPS, pretrain_words

pytestmark = pytest.mark.slow

TIME = re.compile(r"\d\d:\d\d:\d\d ")
LIVE = re.compile(r"(step )?\d[\d,]*/\d[\d,]*  loss ")
CONTINUATION = re.compile(r"^ {9}")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A path that fits into a line of 80 columns."""
    with TemporaryDirectory(prefix="s-") as folder:
        yield Path(folder).resolve()


@pytest.fixture(params=[80])
def screen(request: pytest.FixtureRequest) -> Iterator[Screen]:
    """A terminal of `columns` columns."""
    screen = Screen(request.param)
    yield screen
    screen.close()


def checked(screen: Screen) -> list[str]:
    """The lines without their times, after checking that none is too long or holds two messages."""
    lines = [line for line in screen.read() if line]
    assert screen.controls == ""
    assert screen.num_wrapped == 0, lines
    for line in lines:
        assert not any(found.start() for found in TIME.finditer(line)), f"glued: {line}"
        assert not any(found.start() for found in LIVE.finditer(line)), f"glued: {line}"
    return [TIME.sub("", line, count=1) for line in lines]


@pytest.mark.parametrize("screen", [80, pytest.param(120, marks=pytest.mark.long)], indirect=True)
def test_packing_ends_in_a_summary(screen: Screen, tmp_path: Path) -> None:
    out = str(tmp_path / "d")
    assert patchline_on(screen, "pack", "digits", "--split", "test", "--out", out) == 0
    plan = "plan: 359 images of 10 classes (0, 1, 2, 3, 4, 5, 6, 7, 8, 9) into 2 shards"
    summary = r"359 images of 10 classes in 2 shards, 1\.1 MB, in .* s"
    text = " ".join(" ".join(checked(screen)).split())
    assert re.fullmatch(f"{re.escape(plan)} {re.escape(out)}: {summary}", text), text


@pytest.mark.parametrize("screen", [120], indirect=True)
def test_training_shows_a_line_above_which_its_events_stand(screen: Screen, digits_url: str, tmp_path: Path) -> None:
    seen: list[str] = []
    words = pretrain_words(digits_url, tmp_path / "r", "--evaluation.url", digits_url, "--evaluation.every-steps", "8")
    assert patchline_on(screen, *words, act=lambda now: seen.append(now.lines[-1])) == 0
    lines = checked(screen)
    assert [line.split(":")[0] for line in lines if line.startswith("step ")] == ["step 8", f"step {STEPS}"]
    assert re.fullmatch(r"step 8: test accuracy 0\.\d{3}, loss \d\.\d\d", next(x for x in lines if x[:5] == "step "))
    (closing,) = [number for number, line in enumerate(lines) if line.startswith(f"done: {STEPS} steps in ")]
    rest = "".join(line.removeprefix(" " * 9) for line in lines[closing + 1 :])
    for word in ("test accuracy 0.", "weights: ", "curves: tensorboard --logdir", "next: patchline predict"):
        assert word in rest
    live = [line for line in seen if LIVE.match(line)]
    assert live
    assert all(" left" in line and " images/s" in line and "learning rate" in line for line in live), live
    assert not any(LIVE.match(line) for line in lines), "the live line vanishes at the end"


def test_a_run_that_is_interrupted_says_so_once(screen: Screen, digits_url: str, tmp_path: Path) -> None:
    typed: list[str] = []

    def interrupt(now: Screen) -> None:
        if LIVE.match(now.lines[-1]) and not typed:
            typed.append(now.lines[-1])
            now.type("\x03")

    words = pretrain_words(digits_url, tmp_path / "run", "--steps", "4000", "--checkpoint.every-steps", "4000")
    assert patchline_on(screen, *words, act=interrupt) == exit_codes.CONTINUE
    lines = checked(screen)
    assert len([line for line in lines if LIVE.match(line)]) <= 1
    assert not any(LIVE.match(line) and "^C" in line for line in lines)
    assert any("continue" in line for line in lines)
    assert not any("Traceback" in line for line in lines)


def test_an_error_in_the_middle_stands_below_the_last_live_line(
    screen: Screen, digits_url: str, tmp_path: Path
) -> None:
    words = pretrain_words(
        digits_url, tmp_path / "run", "--schedule.learning-rate", "1e30", "--max-skipped-updates", "2"
    )
    code = patchline_on(screen, *words, "--engine.precision", "fp32", "--clip-norm", "0")
    assert code == exit_codes.WILL_NOT_SUCCEED
    lines = checked(screen)
    (live,) = [number for number, line in enumerate(lines) if LIVE.match(line)]
    assert lines[live + 1].startswith("error: ")
    assert "step" in lines[live - 1]


def test_an_error_cannot_move_the_cursor(screen: Screen, tmp_path: Path) -> None:
    weights = str(tmp_path / "a\x1b[2J\rb")
    assert patchline_on(screen, "evaluate", "--weights", weights, "--data.url", "x") == exit_codes.USER_MISTAKE
    assert "a\\x1b[2J\\rb" in " ".join(checked(screen))
