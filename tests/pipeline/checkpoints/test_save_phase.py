"""What sums decide in each phase of a save."""

import pytest

from pipeline.checkpoints.save_phase import COMMITTED, FAILED, NAMES, OVERTAKEN, WRITTEN, Phase, Verdict, verdict


@pytest.mark.parametrize(
    ("phase", "sums", "expected"),
    [
        pytest.param(Phase.NOTHING, {WRITTEN: 3, FAILED: 1}, Verdict.OPEN, id="late flags of the save before"),
        pytest.param(Phase.WRITING, {WRITTEN: 2}, Verdict.OPEN, id="one still writes"),
        pytest.param(Phase.WRITING, {WRITTEN: 3}, Verdict.WRITTEN, id="all have written"),
        pytest.param(
            Phase.WRITING, {WRITTEN: 1, FAILED: 1}, Verdict.OPEN, id="one failed, one may still read its copy"
        ),
        pytest.param(Phase.WRITING, {WRITTEN: 2, FAILED: 1}, Verdict.FAILED, id="one failed"),
        pytest.param(Phase.WRITING, {WRITTEN: 1, FAILED: 1, OVERTAKEN: 1}, Verdict.OVERTAKEN, id="the end comes first"),
        pytest.param(Phase.COMMITTING, {WRITTEN: 3}, Verdict.OPEN, id="late flags of the phase before"),
        pytest.param(Phase.COMMITTING, {COMMITTED: 1}, Verdict.COMMITTED, id="rank 0 has committed"),
        pytest.param(Phase.COMMITTING, {FAILED: 1}, Verdict.FAILED, id="the manifest could not be written"),
        pytest.param(Phase.COMMITTING, {OVERTAKEN: 1}, Verdict.OVERTAKEN, id="a later attempt was found"),
    ],
)
def test_what_the_sums_decide(phase: Phase, sums: dict[str, float], expected: Verdict) -> None:
    assert verdict(phase, dict.fromkeys(NAMES, 0.0) | sums, num_ranks=3) is expected
