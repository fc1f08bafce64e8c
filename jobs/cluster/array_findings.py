"""What is said about the tasks of a job array: of thousands, a few lines. Pure."""

from collections.abc import Iterable, Sequence

from jobs.cluster.arrays import tasks_in
from jobs.cluster.queue import JobFacts
from jobs.cluster.queue_reasons import Finding, finding_of
from shards.output.quantities import plural

_MOST_SHOWN = 4
_RUNS = ("RUNNING", "COMPLETING", "SUSPENDED")


def findings_of_tasks(tasks: Sequence[JobFacts], *, run_dir: str = "") -> list[Finding]:
    """Of one job its own finding. Of an array the tasks that run, at most four, then a line for each reason why others
    wait and for each way in which others ended. `run_dir`: the job's run, if it has one of its own."""
    if len(tasks) == 1:
        (job,) = tasks
        said = finding_of(job, run_dir=run_dir)
        return [Finding(words=f"job {job.job}: {said.words}", todo=said.todo)]
    running = sorted((job for job in tasks if job.state in _RUNS), key=lambda job: (len(job.job), job.job))
    waiting = [job for job in tasks if not job.is_finished and job.state not in _RUNS]
    ended = [job for job in tasks if job.is_finished]
    found = [Finding(words=f"task {job.job}: {finding_of(job).words}") for job in running[:_MOST_SHOWN]]
    if len(running) > _MOST_SHOWN:
        found.append(Finding(words=f"{plural(len(running) - _MOST_SHOWN, 'more task')} running"))
    return [*found, *_by_kind(waiting), *_by_kind(sorted(ended, key=lambda job: job.state == "COMPLETED"))]


def _by_kind(jobs: Iterable[JobFacts]) -> list[Finding]:
    """Those of one state, reason and exit code together: at most four kinds."""
    kinds: dict[tuple[str, str, str], list[JobFacts]] = {}
    for job in jobs:
        kinds.setdefault((job.state, job.reason, job.exit_code), []).append(job)
    found = []
    for alike in list(kinds.values())[:_MOST_SHOWN]:
        count = sum(num_tasks(job.job) for job in alike)
        said = finding_of(alike[0])
        such = ", such as" if len(alike) > 1 else ""
        which = f"task {alike[0].job}" if count == 1 else f"{count} tasks{such} {alike[0].job}"
        found.append(Finding(words=f"{which}: {said.words}", todo=said.todo))
    if left := sum(num_tasks(job.job) for alike in list(kinds.values())[_MOST_SHOWN:] for job in alike):
        found.append(Finding(words=f"{plural(left, 'more task')} in other states", todo="squeue --me --array"))
    return found


def num_tasks(job: str) -> int:
    """How many tasks a line of squeue stands for: 1 for `12` and `12_3`, 7 for `12_[0-3,7-9%2]`. Pure."""
    return max(1, sum(map(len, tasks_in(job))))
