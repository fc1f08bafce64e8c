"""RUN/job.yaml: the resolved job, replayable with `patchline STAGE RUN/job.yaml`. Strict both ways."""

import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from shards.errors import UserError

Job = TypeVar("Job")


def write_record(run_dir: Path, *, stage: str, job: object) -> None:
    """Writes run_dir/job.yaml, whole or absent; the run directory is made readable by its owner alone.

    UserError where the folder can not be made or written to.
    """
    fields = _adapter(type(job)).dump_python(job, mode="json")
    text = yaml.safe_dump({"stage": stage, "job": fields}, sort_keys=False)
    waiting = run_dir / "job.yaml.part"
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        waiting.write_text(f"# patchline {stage} {run_dir / 'job.yaml'}\n{text}")
        waiting.replace(run_dir / "job.yaml")
    except OSError as error:
        what = f"cannot write job.yaml in {run_dir}: {error.strerror}"
        raise UserError(f"{what}; give --run-dir a folder that this user may write to") from error


def read_record(path: Path, *, stage: str, kind: type[Job]) -> Job:
    """The job in a record. UserError where it is of another stage or a field is unknown or wrong."""
    content = _content(path)
    if content["stage"] != stage:
        raise UserError(
            f"{path} is a record of the stage {content['stage']!r}; run: patchline {content['stage']} {path}"
        )
    try:
        # Through JSON, where strict mode still lets a list stand for a tuple; what YAML takes for a date was a name.
        job = _adapter(kind).validate_json(json.dumps(content["job"], default=str), strict=True)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']} (given {e['input']!r})" for e in error.errors()]
        raise UserError(f"{path}: {'; '.join(faults[:5])}") from error
    unknown = _unknown(content["job"], _adapter(kind).dump_python(job, mode="json"))
    if unknown:
        raise UserError(f"{path}: unknown fields {', '.join(unknown)}; remove them, or correct their names")
    result: Job = job
    return result


def stage_of(path: Path) -> str:
    """The stage that a record is of. UserError where it is no record."""
    return str(_content(path)["stage"])


def _content(path: Path) -> dict[str, Any]:
    """The two entries of a record, `stage` and `job`."""
    try:
        content = yaml.safe_load(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can not be read: {error.strerror}; give a recipe's name or a job.yaml") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict) or set(content) != {"stage", "job"}:
        raise UserError(f"{path} is no job record: it needs the two entries 'stage' and 'job'")
    return content


def _adapter(kind: type[Job]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _unknown(given: Any, known: Any, prefix: str = "") -> list[str]:
    """Dotted names of fields in `given` that the job does not have (pydantic drops them in plain dataclasses)."""
    if not isinstance(given, dict) or not isinstance(known, dict):
        return []
    extra = [f"{prefix}{key}" for key in given if key not in known]
    nested = [_unknown(value, known[key], f"{prefix}{key}.") for key, value in given.items() if key in known]
    return extra + [name for names in nested for name in names]
