"""Results that are there already, but of other settings than those of a chain's step: its words were changed, and the
chain was submitted again. A training run or a dataset is refused, as the stage itself does; scores are made again."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs.data.pack import spec_of
from jobs.record import read_record
from jobs.record_leaves import read_leaves
from jobs.train.run_changes import run_changes
from pipeline.checkpoints.saved_job import STEPS
from pipeline.training.saving.same_run import WARMUP
from shards.dataset import open_dataset
from shards.errors import InvalidDataError, UnreachableError, UserError
from shards.local_file import read_local_text
from shards.packing.plan import read_plan
from shards.schema.differences import differences
from shards.store import open_store

_MOST_BYTES = 1 << 20
_MOST_SHOWN = 8
_NOT_OF_SCORES = ("run_dir", "device", "threads", "json")


def refuse_changed(stage: str, words: Sequence[str], job: Any) -> None:
    """UserError if what the step would make is complete, or planned, with other values."""
    if stage == "pack":
        read_plan(open_store(job.out), spec_of(job))
    if stage in ("pretrain", "finetune") and (Path(job.run_dir) / "DONE").exists():
        refuse_other_run(job, extends="--extend" in words)


def refuse_other_run(job: Any, *, extends: bool) -> None:
    """UserError if the run that is done in the job's folder was of other values, or of another length. `extends`:
    whether it may become longer. A damaged marker or record is no run that is done."""
    from pipeline.training.saving.finish import done_from_json  # noqa: PLC0415 - loads torch

    run_dir = Path(job.run_dir)
    try:
        done = done_from_json(read_local_text(run_dir / "DONE", most_bytes=_MOST_BYTES))
        num_steps = int(read_leaves(run_dir / "job.yaml").get("job.steps", "0"))
    except (OSError, ValueError, InvalidDataError):
        return
    found = run_changes(done.job.job | {STEPS: num_steps}, asdict(job), is_done=True, extends=extends)
    found = [each for each in found if each.field != "data.url" or not _holds(each.now, done.position.dataset)]
    lengths = [each for each in found if each.field == STEPS]  # is said first, without the warm-up, which follows it
    found = lengths + [each for each in found if each.field != STEPS and not (lengths and each.field == WARMUP)]
    if found:
        hint = "; to continue it with more steps, add --extend" if lengths and job.steps > num_steps else ""
        raise UserError(
            f"{job.run_dir} holds a run that finished with other values: {'; '.join(map(str, found[:_MOST_SHOWN]))}. "
            f"Use the same values, move it away, or give another --run-dir{hint}"
        )


def is_scored_by(stage: str, job: Any, run_dir: Path) -> bool:
    """Whether the record of an evaluation is that of this job, apart from where and how it is computed."""
    try:
        recorded = read_record(run_dir / "job.yaml", stage=stage, kind=type(job))
    except (OSError, UserError):
        return False
    return all(each.field in _NOT_OF_SCORES for each in differences(asdict(recorded), asdict(job)))


def _holds(url: str, fingerprint: str | tuple[str, ...]) -> bool:
    """Whether the dataset at the URL is the one with this fingerprint."""
    try:
        return bool(url) and open_dataset(url).fingerprint == fingerprint
    except UnreachableError:
        raise
    except UserError:
        return False
