"""The loggers that a job names: checked before the run joins its ranks, and opened on rank 0."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from pipeline.training.reporting import mlflow_logger, wandb_logger
from pipeline.training.reporting.logger_thread import LoggerThread
from pipeline.training.reporting.metrics import METRICS_FILE
from pipeline.training.settings.job import TrainingJob
from pipeline.training.settings.loggers import Logger, LoggersConfig, Settings, StartEnding, logger_id, read_logger_id
from shards.errors import UserError


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
