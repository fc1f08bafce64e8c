"""What a batch script believes of a DONE marker."""

from pathlib import Path

import pytest

from tests.rigs.processes import patchline
from tests.rigs.training import pretrain_words

pytestmark = pytest.mark.slow


def test_only_a_marker_that_vouches_for_the_last_step_counts(digits_url: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert patchline("__done", str(run_dir)).code == 1
    assert patchline(*pretrain_words(digits_url, run_dir, "--steps", "6", "--engine.precision", "fp32")).code == 0
    assert patchline("__done", str(run_dir)).code == 0
    record, weights = run_dir / "job.yaml", run_dir / "weights" / "model.safetensors"
    text, data = record.read_text(), weights.read_bytes()
    record.write_text(text.replace("steps: 6\n", "steps: 7\n"))
    longer = patchline("__done", str(run_dir))
    assert (longer.code, "is of step 6, and the run has 7 steps" in longer.errors) == (1, True), longer.errors
    record.write_text(text)
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    changed = patchline("__done", str(run_dir))
    assert (changed.code, "does not vouch for the weights" in changed.errors) == (1, True), changed.errors
    assert patchline("__done").code == 2
