"""Lines as srun, stage.sbatch, torch and patchline write them; test_run_causes.py has the signs of Slurm."""

import pytest

from jobs.log_signs import OURS, PYTHON, SIGNS


@pytest.mark.parametrize("label", ["", "0: ", " 3: ", "1: [rank3]: ", "1: [rank3]: [rank3]: "])
def test_a_line_with_and_without_labels(label: str) -> None:
    ours = OURS.match(f"{label}12:00:00 rank 3: error: no dataset in 'd'")
    python = PYTHON.match(f"{label}torch.cuda.OutOfMemoryError: no")
    assert ours
    assert python
    assert (ours[1], python[1]) == ("error: no dataset in 'd'", "torch.cuda.OutOfMemoryError: no")


@pytest.mark.parametrize("line", ["0: torch.x.ChildFailedError: ", "0: an error: no", "0: all is well", "error"])
def test_what_is_no_cause(line: str) -> None:
    assert not OURS.match(line)
    assert not PYTHON.match(line)
    assert not any(sign.pattern.search(line) for sign in SIGNS)
