"""Whether a run needs another job, before `patchline submit` has one wait in the queue: one that is done, or that its
file STOP keeps stopped, needs none."""

import shlex
from dataclasses import asdict, replace
from pathlib import Path

from jobs.train.trials import run_changes
from pipeline.training.settings.job import TrainingJob
from shards.errors import UserError
from shards.output.terminal import printable_name


def refuse_stopped(job: object) -> None:
    """UserError if a file STOP keeps the run of a job of training stopped."""
    if isinstance(job, TrainingJob) and (stop := Path(job.run_dir) / "STOP").exists():
        shown, todo = printable_name(str(stop)), printable_name(f"rm {shlex.quote(str(stop))}")
        raise UserError(f"{shown} keeps the run stopped, so its job would end at once; to continue it, first: {todo}")


def has_ended(job: object, *, extend: bool) -> bool:
    """Whether the run of a job of training is done: RUN/DONE vouches for its weights, at the last step of this job.
    UserError if it finished with other values, as training itself would say. If its data differs, training decides."""
    if not isinstance(job, TrainingJob) or not (Path(job.run_dir) / "DONE").exists():
        return False
    from pipeline.training.saving.finish import read_done  # noqa: PLC0415 - loads torch
    from pipeline.training.saving.same_run import refuse_changes  # noqa: PLC0415

    done = read_done(Path(job.run_dir))
    if done is None or (extend and done.step != job.steps):  # the extended run keeps a warm-up that is not known here
        return False
    own_classes = job.model.num_classes or done.job.model.get("num_classes", 0)  # 0: those of the data
    job = replace(job, model=replace(job.model, num_classes=own_classes))
    is_done = done.step == job.steps
    begin = replace(done.position, seed=job.seed, global_batch=job.global_batch, image_size=job.model.image_size)
    refuse_changes(done.job, done.position, job=job, start=begin, is_done=is_done, extend=extend)
    return is_done and not run_changes(done.job.job, asdict(job), is_done=True, extends=extend)
