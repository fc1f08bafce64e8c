"""Loggers beside metrics.jsonl and TensorBoard: which a job has, and what one must offer.

metrics.jsonl is the record of a run; a logger follows it. It says which step it has already, gets the steps after that
once and in order, and is never waited for (logger_thread.py).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol
from urllib.parse import urlsplit

from shards.config_values import refuse_wrong_values, shown_value
from shards.errors import UserError

Settings = Mapping[str, str | int | float]
_MOST_CHARACTERS = 128  # of a project's name at W&B
_NOT_IN_WANDB = "/\\#?%:"
_PASSWORD = re.compile(r"//[^/@\s]*@")


@dataclass(frozen=True, kw_only=True)
class LoggersConfig:
    """Services that get the curves, too. Credentials are no settings: the services' own libraries take them from the
    environment or from their own files."""

    mlflow: bool = False
    """Send curves and settings to MLflow (needs the extra mlflow)."""
    mlflow_uri: str = ""
    """MLflow's tracking server, such as http://host:5000, without user and password; empty: MLFLOW_TRACKING_URI."""
    wandb: bool = False
    """Send curves and settings to Weights & Biases (needs the extra wandb); WANDB_MODE=offline keeps them in
    RUN/wandb."""
    project: str = "patchline"
    """Name of MLflow's experiment and of W&B's project."""
    name: str = ""
    """The run's name there; empty: the name of the run directory."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="loggers.")
        try:
            place = urlsplit(self.mlflow_uri)
        except ValueError as error:
            raise UserError(f"loggers.mlflow_uri is no URI ({error}); allowed: such as http://host:5000") from None
        if "@" in place.netloc:
            raise UserError(
                "loggers.mlflow_uri has a user or password in it, which would be written to RUN/job.yaml; give them as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
            )
        self._refuse_project()

    def _refuse_project(self) -> None:
        bad = sorted(set(self.project) & set(_NOT_IN_WANDB)) if self.wandb else []
        if not (0 < len(self.project) <= _MOST_CHARACTERS and self.project.isprintable()) or bad:
            but = f" and without any of {_NOT_IN_WANDB}" if self.wandb else ""
            raise UserError(
                f"loggers.project is {shown_value(self.project)}; allowed: a name of 1 to {_MOST_CHARACTERS} printable "
                f"characters{but}"
            )


class StartEnding(Enum):
    """How a start of a run ended: with all steps, to be continued, or with an error."""

    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Line:
    """The values of a step by their names in TensorBoard, and when they were written. `is_added`: more values of a step
    that was written before."""

    step: int
    values: Mapping[str, float]
    time_ms: int
    is_added: bool = False


class CurveWriter(Protocol):
    """What takes the curves of a run as it trains: metrics.jsonl and TensorBoard, and the loggers behind them."""

    def show_job(self, text: str, settings: Settings) -> None:
        """The job as YAML, and the settings that runs are compared by."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The values of a step, by their names in metrics.jsonl."""

    def amend(self, step: int, values: dict[str, float]) -> None:
        """More values of the step that was written last."""


class Logger(Protocol):
    """One service. Its methods may wait and raise as they like: a thread of its own calls them, and calls again after
    an error (`write` with the same lines)."""

    title: str

    def open(self) -> int:
        """Begins the run at the service, or continues it there; returns the last step that the service has of it, 0 if
        it has none."""

    def place(self) -> str:
        """The address at which the run can be seen; known after `open`."""

    def show_job(self, text: str, settings: Settings) -> None:
        """The job as YAML, and the settings that runs are compared by."""

    def write(self, lines: Sequence[Line]) -> None:
        """Returns once the service has the lines, which are in order."""

    def close(self, ending: StartEnding) -> None:
        """The last call."""


def without_password(text: str) -> str:
    """A message of a library, without the user and the password of any URL in it."""
    return _PASSWORD.sub("//***@", text)
