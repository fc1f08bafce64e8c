"""`patchline doctor`: what of this machine a run needs, and what to do about what is missing; or of a run, what went
wrong with it (jobs/monitor/run_doctor.py)."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from jobs import exit_codes
from jobs.monitor.run_doctor import look_at
from jobs.output import put
from jobs.settings.models import DoctorJob
from pipeline.machine.checks import STATUSES, Check, local_checks
from pipeline.machine.probing import Probe, run_probes
from shards.errors import UserError
from shards.output.quantities import plural
from shards.output.terminal import columns_of, printable_name, wrapped

__all__ = ["DoctorJob", "run"]

_PIPE_COLUMNS = 120
_WHERE = {"ok": "ok", "warning": "warning", "fault": "FAULT"}
_TORCH = Probe(
    name="torch",
    words=("torch",),
    todo="import torch by hand to see more; for a driver that hangs, see `nvidia-smi` and `dmesg`, or give more "
    "--seconds to a machine that is slow to start",
)
_DECODER = Probe(name="JPEG decoder", words=("decoder",), todo="run `make setup` again")


def run(job: DoctorJob, *, environ: Mapping[str, str]) -> int:
    """Prints the table, or one JSON object; 0 if there is no fault, else 1."""
    if job.run:
        return look_at(Path(job.run), environ, as_json=job.json)
    if job.s3_url and not job.s3_url.startswith("s3://"):
        raise UserError(f"--s3-url is {job.s3_url!r}; give s3://bucket/prefix, and a folder as --folder")
    probes = [_TORCH, _DECODER, Probe(name="disk", words=("disk", job.folder), todo="mount it again, or give --folder")]
    if job.s3_url:
        todo = "correct AWS_ENDPOINT_URL, or start the server; see docs/troubleshooting.md#storage"
        probes.append(Probe(name="S3", words=("s3", job.s3_url), todo=todo))
    checks = [*local_checks(), *run_probes(probes, seconds=job.seconds)]
    counts = {status: sum(one.status == status for one in checks) for status in STATUSES}
    if job.json:
        found = {"checks": [asdict(one) for one in checks], "counts": counts}
        put(json.dumps(found, allow_nan=False) + "\n")
    else:
        put(table_of(checks, columns=columns_of(sys.stdout) or _PIPE_COLUMNS))
        put(f"\n{plural(counts['fault'], 'fault')}, {plural(counts['warning'], 'warning')}\n")
    return exit_codes.FAULTS_FOUND if counts["fault"] else exit_codes.DONE


def arranged(words: Sequence[str]) -> list[str]:
    """The words with a run, which may stand first, behind --run; without one it is about this machine."""
    return ["--run", *words] if words and words[0][:1] not in ("", "-") else [*words]


def table_of(checks: Sequence[Check], *, columns: int) -> str:
    """A line for each check, and below it what to do."""
    name_width = max(len(one.name) for one in checks)
    status_width = max(len(word) for word in _WHERE.values())
    indent = " " * (name_width + status_width + 4)
    lines = []
    for one in checks:
        head = f"{_WHERE[one.status]:{status_width}}  {printable_name(one.name):{name_width}}  "
        lines.append(wrapped(head + printable_name(one.found), columns, indent=indent))
        if one.todo:
            lines.append(wrapped(f"{indent}> {printable_name(one.todo)}", columns, indent=indent))
    return "".join(f"{line}\n" for line in lines)
