"""Lists the stages that `patchline submit` can submit, and what a job of each stage needs."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jobs.arguments import take_run_flags
from jobs.flags import flags_of
from jobs.mistakes import refuse_missing, refuse_secrets, similar
from jobs.resolve import default_job, file_of
from jobs.stages import STAGES
from shards.config_values import shown_value
from shards.errors import UserError

Override = Callable[[Any, list[str], tuple[str, str]], Any]
SECOND = "the second word"
SUBMIT_FOLDER = "submit"


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A stage that can be submitted. `has_ranks`: a job has one process per GPU on all nodes; otherwise it has one
    process. `takes`: what a chain's step may take from an earlier step (data, weights, run) -> the flag that receives
    it. `out`: the flag of the folder that the job writes."""

    has_ranks: bool = False
    takes: Mapping[str, str] = field(default_factory=dict)
    out: str = ""
    gives: str = ""
    """What a later step of a chain may take from this stage: `data`, or `run`, which also has weights."""


SUBMITTED = {
    "pack": Submitted(out="--out", gives="data"),
    "verify": Submitted(takes={"data": SECOND}),
    "pretrain": Submitted(has_ranks=True, takes={"data": "--data.url"}, out="--run-dir", gives="run"),
    "finetune": Submitted(
        has_ranks=True, takes={"data": "--data.url", "weights": "--initial.weights"}, out="--run-dir", gives="run"
    ),
    "evaluate": Submitted(has_ranks=True, takes={"data": "--data.url", "weights": SECOND}, out="--run-dir"),
    "fewshot": Submitted(has_ranks=True, takes={"data": "--data.url", "weights": SECOND}, out="--run-dir"),
    "report": Submitted(takes={"run": SECOND}),
}


def submitted_stage(stage: str) -> Submitted:
    """Returns the table's row for a stage. Raises UserError if the stage cannot be submitted."""
    if stage not in SUBMITTED:
        if stage.startswith("-"):
            raise UserError(f"the stage comes first, then its flags: patchline submit STAGE RECIPE {stage} ...")
        near = similar(stage, list(SUBMITTED))
        meant = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{shown_value(stage)} is no stage that submit knows; {meant}allowed: {', '.join(SUBMITTED)}")
    return SUBMITTED[stage]


def job_of_words(words: list[str], override: Override) -> Any:
    """Returns the job that a command's words describe. The first word is the stage. Raises UserError for words that the
    stage itself would refuse."""
    stage, second = words[:2]
    word = file_of(second) if STAGES[stage].recipes else second
    fields, _ = take_run_flags(stage, words[2:])
    job = override(default_job(stage, word), fields, (stage, second))
    refuse_missing(list(flags_of(job)), STAGES[stage].required)
    refuse_secrets(list(flags_of(job)))
    return job


def comment_of(work: list[str]) -> str:
    """Returns the name by which jobs are found in the queue. It is a hash of the words that identify their work."""
    return f"patchline-{hashlib.sha256(json.dumps(work).encode()).hexdigest()[:16]}"


def submit_folder(run_dir: str, stage: str) -> Path:
    """Returns the folder of the script and the log: RUN/submit, or ./patchline-STAGE for a stage without a run
    directory. Links and `..` in the path are resolved, so that a folder has one name."""
    return (Path(run_dir) / SUBMIT_FOLDER if run_dir else Path(f"patchline-{stage}")).resolve()


def run_name(run_dir: str) -> str:
    """Returns the name by which a run's jobs are found in the queue."""
    return comment_of([str(submit_folder(run_dir, ""))])


def output_name(out: str) -> str:
    """Returns the name by which the job that writes a whole folder or URL is found in the queue, for a stage without a
    run directory."""
    return comment_of(["output", place_of(out)])


def work_name(words: Sequence[str], job: Any) -> str:
    """Returns the name by which a command's job is found in the queue. It is made from the run directory if there is
    one, else from the output (and, if only one phase is packed, the phase and the part), else from the job's fields and
    the current folder. It does not depend on how the command is spelled."""
    if run_dir := getattr(job, "run_dir", ""):
        return run_name(run_dir)
    flag = submitted_stage(words[0]).out
    if out := getattr(job, flag.removeprefix("--"), "") if flag else "":
        return output_name(out) if job.phase == "all" else comment_of(["output", place_of(out), job.phase, job.part])
    fields = json.dumps(asdict(job), sort_keys=True, default=str)
    return comment_of([str(submit_folder("", words[0])), fields])


def place_of(path: str) -> str:
    """Returns the same string for a folder or a URL, even if the path is spelled differently."""
    return path.rstrip("/") if "://" in path else str(Path(path).resolve())
