"""What was saved of a job by an older version has the same fields."""

import pytest

from pipeline.checkpoints.saved_job import SavedJob, position_of_format_1, saved_job_of_format_1


@pytest.mark.parametrize(
    ("later", "ema_decay", "precision"),
    [
        pytest.param({}, 0.0, "", id="the first version: nothing was averaged, the job not saved"),
        pytest.param({"average_factor": 0.9, "engine": {"precision": "bf16"}}, 0.9, "bf16", id="the old name"),
        pytest.param({"ema_decay": 0.9, "precision": "fp32"}, 0.9, "fp32", id="of a DONE marker"),
    ],
)
def test_older_versions(later: dict[str, object], ema_decay: float, precision: str) -> None:
    record = {"model": {"image_size": 32}, "loss": "softmax", "optimizer": "sgd", **later, "more": 1}
    assert SavedJob(**saved_job_of_format_1(record)) == SavedJob(
        model={"image_size": 32}, loss="softmax", optimizer="sgd", ema_decay=ema_decay, precision=precision, job={}
    )
    assert position_of_format_1(record, {"seed": 1}, step=3) == {"next_step": 3, "seed": 1, "image_size": 32}
