"""The loggers that a job names: checked before the run joins its ranks, and opened on rank 0.

RUN/loggers.json has the id by which the services know a run, so that every start of it continues the same one. It is
written before anything is sent: killed at any moment, a run leaves no second one behind.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pipeline.training.reporting import mlflow_logger, wandb_logger
from pipeline.training.reporting.logger_thread import LoggerThread
from pipeline.training.reporting.metrics import METRICS_FILE
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.loggers import Logger, LoggersConfig, Settings, StartEnding
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file, write_whole
from shards.files.typed_json import read_record
from shards.schema.config_values import shown_value

FILE_NAME = "loggers.json"
_MOST_BYTES = 1 << 12
_ID = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, kw_only=True)
class _Record:
    """ValueError if the id is none of ours."""

    id: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"id is {shown_value(self.id)}; allowed: 16 digits of 0 to 9 and a to f")


def read_logger_id(run_dir: Path) -> str:
    """The run's id at its services; empty if it has none yet. InvalidDataError if the file is damaged."""
    path = run_dir / FILE_NAME
    try:
        return read_record(_Record, read_local_file(path, most_bytes=_MOST_BYTES)).id
    except FileNotFoundError:
        return ""
    except (ValueError, InvalidDataError, IsADirectoryError) as error:
        raise InvalidDataError(
            f"{path} is damaged ({error}); it names the run at MLflow and W&B: restore it, or move it away to begin a "
            "new run there, which gets all of metrics.jsonl"
        ) from error


def logger_id(run_dir: Path) -> str:
    """The run's id at its services, made and written down if it has none yet."""
    found = read_logger_id(run_dir)
    if found:
        return found
    made = secrets.token_hex(8)
    write_whole(run_dir / FILE_NAME, json.dumps({"id": made}).encode() + b"\n")
    return made


class Loggers:
    """The threads of all loggers of a run; there may be none. `is_done`: all steps of the run are done."""

    def __init__(self, threads: list[LoggerThread]) -> None:
        self.threads, self.is_done = threads, False

    def show_job(self, text: str, settings: Settings) -> None:
        """The job of this start."""
        for thread in self.threads:
            thread.show_job(text, settings)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """A line that metrics.jsonl has now."""
        for thread in self.threads:
            thread.write(step, values)

    def amend(self, step: int, values: dict[str, float]) -> None:
        """More values of the last line, which metrics.jsonl has now."""
        for thread in self.threads:
            thread.amend(step, values)

    def close(self, ending: StartEnding) -> None:
        """Waits for all of them at once, for a bounded time."""
        began = time.monotonic()
        for thread in self.threads:
            thread.end(ending)
        for thread in self.threads:
            thread.join(ending, began=began)


@contextmanager
def open_loggers(job: TrainingJob, *, step: int) -> Iterator[Loggers]:
    """A run's loggers from `step` on; metrics.jsonl has the lines before. On rank 0."""
    run_dir = Path(job.run_dir)
    loggers = Loggers([LoggerThread(one, run_dir / METRICS_FILE, step=step) for one in _chosen(job.loggers, run_dir)])
    ending = StartEnding.FAILED
    try:
        yield loggers
        ending = StartEnding.DONE if loggers.is_done else StartEnding.STOPPED
    finally:
        loggers.close(ending)


def _chosen(config: LoggersConfig, run_dir: Path) -> list[Logger]:
    found: list[Logger] = []
    if not (config.mlflow or config.wandb):
        return found
    identity = logger_id(run_dir)
    name = config.name or run_dir.resolve().name
    if config.mlflow:
        found.append(mlflow_logger.MlflowLogger(config, identity=identity, name=name))
    if config.wandb:
        found.append(wandb_logger.WandbLogger(config, identity=identity, name=name, run_dir=run_dir))
    return found


def refuse_unusable_loggers(config: LoggersConfig, run_dir: Path, *, opens: bool) -> None:
    """UserError if a library is missing or RUN/loggers.json is damaged, and on the rank that `opens` the loggers also
    if MLflow's server is not named. On its main thread: what the libraries read from the environment is set here."""
    if config.mlflow:
        _refuse_missing("mlflow", flag="--loggers.mlflow")
    if config.wandb:
        _refuse_missing("wandb", flag="--loggers.wandb")
    if config.mlflow or config.wandb:
        read_logger_id(run_dir)
    if config.mlflow and opens:
        mlflow_logger.prepare(config)
    if config.wandb and opens:
        wandb_logger.prepare()


def _refuse_missing(library: str, *, flag: str) -> None:
    if find_spec(library) is None:
        raise UserError(
            f"{flag} needs the package {library}, which is not installed: pip install 'patchline[{library}]', or leave "
            f"out {flag}"
        )
