"""The startup benchmark: its arms are commands that answer, and its aims are met or not."""

from benchmarks.startup import BARE, COMMANDS, IMPORT, STARTING, aims, arms, measured, results, table
from jobs.stages import STAGES


def test_every_stage_is_measured_and_a_start_is_a_time() -> None:
    assert {words[0] for words in COMMANDS if words and words[0] in STAGES} == set(STAGES)
    assert len(arms()) == len(set(arms())) == len(COMMANDS) + 3
    report = measured("patchline --version")
    assert 0 < report["cpu_seconds"] < 60
    assert report["wall_seconds"] > 0


def test_training_is_measured_until_it_says_that_it_starts() -> None:
    assert 0 < measured(" ".join(("patchline", *STARTING)))["wall_seconds"] < 60


def test_aims_are_beyond_the_interpreters_own_start() -> None:
    figures = {name: {"wall_seconds": 0.3, "cpu_seconds": 0.2} for name in arms()}
    one = {
        **figures,
        BARE: {"wall_seconds": 0.1, "cpu_seconds": 0.1},
        IMPORT: {"wall_seconds": 0.4, "cpu_seconds": 0.2},
    }
    slowest, imported, starting = (aim.row() for aim in aims([one]))
    assert [round(row["found"][1], 6) for row in (slowest, imported, starting)] == [0.2, 0.3, 0.3]
    assert (slowest["met"], imported["met"], starting["met"]) == (True, False, True)
    kept = results([one], 1)
    assert kept["command"].startswith("python -m benchmarks.startup --rounds 1 --out")
    assert "| `patchline --help` | 0.30 | 0.20 |" in table(kept["arms"])
