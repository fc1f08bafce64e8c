"""The fence lets through what the latest attempt's line wrote."""

from dataclasses import replace

import pytest

from pipeline.checkpoints.attempts import Attempt, next_attempt, next_token, standing_checkpoints
from pipeline.checkpoints.manifest import CheckpointId
from pipeline.data.position import StepRange
from tests.pipeline.checkpoints.test_manifest import MANIFEST
from tests.rigs.positions import position_at


def c(step: int, attempt: str) -> CheckpointId:
    return CheckpointId(step=step, attempt=attempt)


def a(token: str, origin: CheckpointId | None = None) -> Attempt:
    return Attempt(token=token, resumed_from=origin, skipped=())


def test_tokens_count_up() -> None:
    assert next_token([], nonce="aa") == "0001-aa"
    assert next_token([a("0002-x"), a("0010-y"), a("0003-z")], nonce="bb") == "0011-bb"


def skips(*pairs: tuple[int, int]) -> tuple[StepRange, ...]:
    return tuple(StepRange(first=first, end=end) for first, end in pairs)


@pytest.mark.parametrize(
    ("saved", "recorded", "skip", "expected"),
    [
        pytest.param((), [(), ()], None, (), id="nothing was skipped"),
        pytest.param(skips((3, 5)), [(), ()], None, skips((3, 5)), id="what the checkpoint left out"),
        pytest.param((), [(), skips((41, 45))], None, skips((41, 45)), id="a rewind that was killed before a save"),
        pytest.param(
            skips((3, 5)),
            [skips((3, 5)), skips((3, 5), (60, 64))],
            StepRange(first=70, end=78),
            skips((3, 5), (60, 64), (70, 78)),
            id="another rewind to the same checkpoint",
        ),
        pytest.param((), [skips((41, 45)), ()], None, (), id="only the latest attempt counts: it knows those before"),
        pytest.param((), [(), skips((20, 30))], None, (), id="the checkpoint has seen what the record leaves out"),
    ],
)
def test_an_attempt_leaves_out_what_those_before_left_out(
    saved: tuple[StepRange, ...],
    recorded: list[tuple[StepRange, ...]],
    skip: StepRange | None,
    expected: tuple[StepRange, ...],
) -> None:
    before = [replace(a(f"000{number}-x"), skipped=skipped) for number, skipped in enumerate(recorded, start=1)]
    lost = Attempt(token="0003-z", resumed_from=None, skipped=(), is_unreadable=True)
    origin = replace(MANIFEST, id=c(40, "0001-x"), position=position_at(0).at(40, skipped=saved))
    found = next_attempt([*before[::-1], lost], token="0004-w", origin=origin, skip=skip)
    assert found == Attempt(token="0004-w", resumed_from=c(40, "0001-x"), skipped=expected)
    assert next_attempt([], token="0001-x", origin=None, skip=None) == a("0001-x")


ONE, TWO, THREE = a("0001-x"), a("0002-y", c(20, "0001-x")), a("0003-z", c(40, "0002-y"))
LOST = Attempt(token="0002-y", resumed_from=None, skipped=(), is_unreadable=True)


@pytest.mark.parametrize(
    ("committed", "attempts", "expected"),
    [
        pytest.param([], [], [], id="nothing yet"),
        pytest.param([], [ONE], [], id="started, nothing saved"),
        pytest.param([c(10, "0001-x"), c(20, "0001-x")], [ONE], [c(20, "0001-x"), c(10, "0001-x")], id="scratch"),
        pytest.param(
            [c(20, "0001-x"), c(40, "0002-y"), c(50, "0003-z")],
            [ONE, TWO, THREE],
            [c(50, "0003-z"), c(40, "0002-y"), c(20, "0001-x")],
            id="a chain of resumptions",
        ),
        pytest.param(
            [c(20, "0001-x"), c(30, "0001-x"), c(40, "0002-y")],
            [ONE, TWO],
            [c(40, "0002-y"), c(20, "0001-x")],
            id="a zombie went on after the next attempt had resumed from an older checkpoint",
        ),
        pytest.param(
            [c(20, "0001-x"), c(30, "0001-x")],
            [ONE, TWO],
            [c(20, "0001-x")],
            id="the zombie's is newer than anything that stands",
        ),
        pytest.param(
            [c(10, "0001-x"), c(20, "0001-x"), c(5, "0002-y")],
            [ONE, a("0002-y")],
            [c(5, "0002-y")],
            id="a later attempt from scratch: all before it is ignored",
        ),
        pytest.param([c(10, "0001-x")], [ONE, a("0002-y")], [], id="from scratch, and nothing saved yet"),
        pytest.param(
            [c(20, "0001-x"), c(40, "0002-y"), c(30, "0003-z")],
            [ONE, TWO, a("0003-z", c(20, "0001-x"))],
            [c(30, "0003-z"), c(20, "0001-x")],
            id="two attempts from one checkpoint: the later one counts",
        ),
        pytest.param(
            [c(40, "0002-y"), c(60, "0003-z")],
            [TWO, THREE],
            [c(60, "0003-z"), c(40, "0002-y")],
            id="the first attempt's record was deleted",
        ),
        pytest.param([c(20, "0009-q")], [ONE], [], id="written by an attempt that left no record"),
        pytest.param([c(20, "0009-q"), c(40, "0002-y")], [], [c(40, "0002-y"), c(20, "0009-q")], id="copied here"),
        pytest.param(
            [c(20, "0009-q"), c(40, "0009-q"), c(60, "0001-x")],
            [a("0001-x", c(20, "0009-q"))],
            [c(60, "0001-x"), c(20, "0009-q")],
            id="continued from a copy",
        ),
        pytest.param(
            [c(20, "0001-x"), c(30, "0001-x")],
            [ONE, LOST],
            [c(30, "0001-x"), c(20, "0001-x")],
            id="the latest record is damaged and nothing was saved since: the attempt before it counts",
        ),
        pytest.param(
            [c(20, "0001-x"), c(90, "0001-x"), c(40, "0002-y"), c(60, "0002-y")],
            [ONE, LOST],
            [c(60, "0002-y"), c(40, "0002-y"), c(20, "0001-x")],
            id="a damaged record: what a zombie saved later does not come before what the attempt saved",
        ),
        pytest.param(
            [c(20, "0001-x"), c(30, "0001-x"), c(40, "0002-y"), c(50, "0003-z")],
            [ONE, LOST, THREE],
            [c(50, "0003-z"), c(40, "0002-y"), c(30, "0001-x"), c(20, "0001-x")],
            id="a damaged record in the middle of the line",
        ),
        pytest.param([c(5, "0002-y")], [LOST], [c(5, "0002-y")], id="the only record is damaged"),
    ],
)
def test_the_fence(committed: list[CheckpointId], attempts: list[Attempt], expected: list[CheckpointId]) -> None:
    assert standing_checkpoints(committed, attempts) == expected
    assert standing_checkpoints(committed[::-1], attempts[::-1]) == expected, "in whatever order they are listed"
