"""What is saved of a job is plain and whole."""

import json
from dataclasses import asdict, replace

from pydantic import TypeAdapter

from jobs.recipes.pretrain import digits_smoke
from pipeline.checkpoints.saved_job import SavedJob
from pipeline.training.saved_job import saved_job

JOB = replace(digits_smoke(), ema_decay=0.9)


def test_it_survives_json_and_holds_the_whole_job() -> None:
    saved = saved_job(JOB)
    adapter = TypeAdapter(SavedJob)
    assert adapter.validate_json(adapter.dump_json(saved)) == saved
    assert saved.job == json.loads(json.dumps(asdict(JOB)))
    assert (saved.model, saved.loss, saved.optimizer, saved.ema_decay) == (saved.job["model"], "softmax", "adamw", 0.9)
