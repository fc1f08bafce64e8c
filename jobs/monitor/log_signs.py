"""Lists the messages in a log that tell why a run ended: errors of Patchline and of Python, and messages of Slurm, the
kernel and libraries. `patchline doctor RUN` and `status` show the cause and the remedy."""

import re

AGAIN = "{again}"  # stands for the command that continues the run
SAME_COMMAND = "the same command, or `patchline submit`, continues it"
_LABEL = r"^ *(?:\d+: *)?(?:\[rank\d+\]: ?){0,2}"  # labels by srun, by stage.sbatch under torchrun, and by torch
OURS = re.compile(_LABEL + r"(?:\d\d:\d\d:\d\d )?(?:rank \d+: )?error: (.+)")
PYTHON = re.compile(
    _LABEL + r"(?!.*\bChildFailedError)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?)$"
)
# Messages that Slurm, the kernel and libraries write to a log when a run ends. Each row has the pattern of a message, a
# number (the lowest is the most likely cause), the cause, and what to do.
SIGNS = tuple(
    (re.compile(pattern, re.IGNORECASE), rank, found, todo)
    for pattern, rank, found, todo in (
        ("no space left on device", 10, "a disk is full", f"make room (`df -h`, and `df -i`), then {AGAIN}"),
        ("disk quota exceeded", 10, "your quota is used up", f"make room (`quota -s`, `lfs quota`), then {AGAIN}"),
        (
            r"oom[-_ ]?kill|out of memory handler|memory cgroup out of memory",
            12,
            "a rank was killed because its node's memory, or the job's share of it, ran out",
            f"lower the loader's workers or --micro-batch, or ask for more memory (`options: [--mem=0]`), then {AGAIN}",
        ),
        (
            r"CUDA out of memory|GPU of .*ran out of memory|torch\.(cuda\.)?OutOfMemoryError",
            12,
            "a GPU's memory ran out",
            f"lower --micro-batch, then {AGAIN}",
        ),
        (
            r"^[ \d:]*process \d+ waits: (a|the) disk or file server ",  # by last_resort.py
            13,
            "a disk or file server did not answer, and a rank could not go on",
            f"check the disk that the line names (`df`, `mount`), then {AGAIN}",
        ),
        (
            r"DUE TO NODE FAILURE|Node failure on|node_fail",
            14,
            "a node was lost",
            f"`sinfo -R` lists nodes and reasons; {AGAIN} on others",
        ),
        (
            "DUE TO TIME LIMIT",
            16,
            "the time limit came before the run had saved and stopped",
            f"raise margin_seconds in your cluster's settings, so that a step and a save fit, then {AGAIN}",
        ),
        ("DUE TO PREEMPTION", 18, "the job was preempted", AGAIN),
    )
)
FULL = SIGNS[:2]
