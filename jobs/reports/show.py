"""`patchline show [STAGE] RECIPE|FILE|RUN [--any.field VALUE ...]`: the job with every field, as YAML for its stage.

It takes the flags of the stage. Does not load torch.
"""

import sys
from collections.abc import Callable
from typing import Any

from jobs import exit_codes
from jobs.lookup import job_of, split_stage, stages_found
from jobs.output import put
from jobs.record import record_text
from shards.errors import UserError

USAGE = "patchline show [STAGE] RECIPE|FILE.yaml|FILE.py:FUNCTION|RUN [--any.field VALUE ...]"
Override = Callable[[Any, list[str], str], Any]  # a job, flags, the words before them -> the job with the flags' values


def run(words: list[str], *, override: Override) -> int:
    """Prints the job and returns the exit code. UserError if the words mean no job, or jobs of several stages."""
    stage, rest = split_stage(words)
    if not rest or rest[0].startswith("-"):
        is_requested = not {"-h", "--help"}.isdisjoint(rest)
        (sys.stdout if is_requested else sys.stderr).write(f"usage: {USAGE}\n")
        return exit_codes.DONE if is_requested else exit_codes.USER_MISTAKE
    word, flags = rest[0], rest[1:]
    stage = stage or _only_stage(word)
    job = override(job_of(word, stage), flags, f"patchline show {stage} {word}")
    put(record_text(stage, job))
    return exit_codes.DONE


def _only_stage(word: str) -> str:
    stages = stages_found(word)
    if len(stages) > 1:
        commands = ", or: ".join(f"patchline show {stage} {word}" for stage in stages)
        raise UserError(f"{word!r} fits the stages {' and '.join(stages)}; run: {commands}")
    return stages[0]
