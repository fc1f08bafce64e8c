"""A whole chain whose training is requeued again and again, as in test_chain_faults.py: it ends by itself as if nothing
had happened. A file of its own, because each takes minutes and `make test-long` divides files."""

from pathlib import Path

import pytest

from tests.slurm.test_chain_faults import ends_as_if_nothing_had_happened
from tests.soak.chain_faults import interrupt

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.mark.timeout(1500)
def test_it_ends_by_itself_however_often_it_is_requeued(tmp_path: Path) -> None:
    """During the training, the job is requeued, gets USR1, and reaches its time limit twice."""
    ends_as_if_nothing_had_happened(tmp_path, interrupt, steps=280, num_packed=1)
