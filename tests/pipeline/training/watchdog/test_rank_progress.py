"""Where a rank stands, in order and in words, and how long it may stand there."""

import pytest

from pipeline.training.settings.job import HangConfig
from pipeline.training.watchdog.heartbeat_files import Phase, Place, RankProgress, limit_seconds

HANG = HangConfig(step_seconds=10, other_seconds=100, join_seconds=30)


def test_a_rank_goes_from_place_to_place() -> None:
    progress = RankProgress()
    assert progress.place.words() == "starting"
    progress.step_begins(17)
    assert progress.place == Place(phase=Phase.WAITING_FOR_DATA, step=17, is_first=True)
    progress.enters(Phase.COMPUTING)
    progress.step_begins(18)
    progress.enters(Phase.COMPUTING)
    assert progress.place == Place(phase=Phase.COMPUTING, step=18)
    for batch in range(3):
        progress.enters(Phase.EVALUATING, batch=batch)
        assert progress.place.is_first is (batch < 2), "the first batch compiles"
    assert progress.place.words() == "step 18, evaluating batch 2"
    progress.enters(Phase.EVALUATING)
    assert not progress.place.is_first, "the second evaluation has compiled"


def test_places_are_in_the_order_of_a_step() -> None:
    places = [
        Place(phase=Phase.STARTING),
        Place(phase=Phase.JOINING),
        Place(phase=Phase.WAITING_FOR_DATA, step=3),
        Place(phase=Phase.COMPUTING, step=3),
        Place(phase=Phase.EVALUATING, step=3, batch=1),
        Place(phase=Phase.EVALUATING, step=3, batch=2),
        Place(phase=Phase.SAVING, step=3),
        Place(phase=Phase.WAITING_FOR_DATA, step=4),
    ]
    assert [place.order for place in places] == sorted({place.order for place in places})


@pytest.mark.parametrize(
    ("place", "longest_seconds", "expected"),
    [
        pytest.param(Place(phase=Phase.COMPUTING, step=2), 1.0, 10, id="a step"),
        pytest.param(Place(phase=Phase.COMPUTING, step=2), 9.0, 27, id="slow steps"),
        pytest.param(Place(phase=Phase.WAITING_FOR_DATA, step=2), 9.0, 27, id="data for slow steps"),
        pytest.param(Place(phase=Phase.COMPUTING, step=1, is_first=True), 1.0, 100, id="the first step compiles"),
        pytest.param(Place(phase=Phase.SAVING, step=2), 90.0, 100, id="a save"),
        pytest.param(Place(phase=Phase.STARTING), 0.0, 100, id="the start"),
        pytest.param(Place(phase=Phase.JOINING), 0.0, 60, id="the ranks meet, then connect"),
        pytest.param(Place(phase=Phase.FINISHING, step=2), 0.0, 100, id="the end"),
    ],
)
def test_limits(place: Place, longest_seconds: float, expected: float) -> None:
    assert limit_seconds(place, HANG, longest_seconds=longest_seconds) == expected


def test_nothing_has_a_lower_limit_than_a_step() -> None:
    config = HangConfig(step_seconds=50, other_seconds=10)
    assert limit_seconds(Place(phase=Phase.SAVING), config, longest_seconds=0) == 50
