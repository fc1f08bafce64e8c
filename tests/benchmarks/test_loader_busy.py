"""The table of loaders beside a busy step, and its aims."""

from benchmarks.loader import RATE
from benchmarks.loader_busy import KEPT, aims, table
from benchmarks.rounds import Round, spread, values

LOADERS = ["patchline", "DALI", "SPDL"]
ROUNDS: list[Round] = [
    {
        f"{loader} x {workers}": {RATE: rate * workers, KEPT: kept / workers}
        for loader, rate, kept in (("patchline", 900.0, 0.9), ("DALI", 600.0, 0.95), ("SPDL", 300.0, 0.5))
        for workers in (1, 2)
    }
    for _ in range(2)
]


def test_ours_is_compared_with_the_best_peer_of_each_figure() -> None:
    rows = [aim.row() for aim in aims(ROUNDS, LOADERS)]
    assert [row["what"] for row in rows] == [
        "images/s, 1 workers: ours / best peer (DALI)",
        "the step's rate, 1 workers: ours / best peer (DALI)",
        "images/s, 2 workers: ours / best peer (DALI)",
        "the step's rate, 2 workers: ours / best peer (DALI)",
    ]
    assert [row["found"][1] for row in rows] == [1.5, 0.9474, 1.5, 0.9474]
    assert [row["met"] for row in rows] == [True, False, True, False]


def test_a_peer_that_failed_is_shown_but_not_compared() -> None:
    rounds: list[Round] = [one | {f"DALI x {workers}": {"failed": "no"} for workers in (1, 2)} for one in ROUNDS]
    assert all("SPDL" in aim.what for aim in aims(rounds, LOADERS))
    names = ROUNDS[0]
    arms = {name: {figure: spread(values(rounds, name, figure)) for figure in (RATE, KEPT)} for name in names}
    lines = table(arms, LOADERS).splitlines()
    assert lines[2] == "| patchline | 900 (900 to 900) | 90 (90 to 90) | 1800 (1800 to 1800) | 45 (45 to 45) |"
    assert lines[3] == "| DALI | - | - | - | - |"
