"""Lines of a job's log that tell by themselves why a run ended. Pure."""

import re
from dataclasses import dataclass

AGAIN = "the same command, or `patchline submit`, continues it"
_LABEL = r"^ *(?:\d+: *)?(?:\[rank\d+\]: ?){0,2}"  # of srun; of stage.sbatch under torchrun, and of torch itself
OURS = re.compile(_LABEL + r"(?:\d\d:\d\d:\d\d )?(?:rank \d+: )?(error: .+)")
PYTHON = re.compile(
    _LABEL + r"(?!.*\bChildFailedError)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?)$"
)


@dataclass(frozen=True, kw_only=True)
class Sign:
    """Words in a log that tell a cause by themselves."""

    pattern: re.Pattern[str]
    rank: int
    words: str
    todo: str


def _sign(pattern: str, rank: int, words: str, todo: str) -> Sign:
    return Sign(pattern=re.compile(pattern, re.IGNORECASE), rank=rank, words=words, todo=todo)


SIGNS = (
    _sign("no space left on device", 10, "a disk is full", f"make room (`df -h`, and `df -i`), then {AGAIN}"),
    _sign("disk quota exceeded", 10, "your quota is used up", f"make room (`quota -s`, `lfs quota`), then {AGAIN}"),
    _sign(
        r"oom[-_ ]?kill|out of memory handler|memory cgroup out of memory",
        12,
        "a rank was killed because its node's memory, or the job's share of it, ran out",
        f"lower the loader's workers or --micro-batch, or ask for more memory (`options: [--mem=0]`), then {AGAIN}",
    ),
    _sign(
        r"CUDA out of memory|GPU of .*ran out of memory|torch\.(cuda\.)?OutOfMemoryError",
        12,
        "a GPU's memory ran out",
        f"lower --micro-batch, then {AGAIN}",
    ),
    _sign(
        r"DUE TO NODE FAILURE|Node failure on|node_fail",
        14,
        "a node was lost",
        f"`sinfo -R` lists nodes and reasons; {AGAIN} on others",
    ),
    _sign(
        "DUE TO TIME LIMIT",
        16,
        "the time limit came before the run had saved and stopped",
        f"raise margin_seconds in your cluster's settings, so that a step and a save fit, then {AGAIN}",
    ),
    _sign("DUE TO PREEMPTION", 18, "the job was preempted", AGAIN),
)
