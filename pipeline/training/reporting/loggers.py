"""Further loggers besides TensorBoard: MLflow and Weights & Biases. They get a run's curves through follower.py.

RUN/loggers.json has the id by which the services know a run, so that every start of the run continues it there. It is
written before anything is sent, so a run that is killed at any moment never appears twice.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.ranks.world import set_defaults
from pipeline.shared_settings import METRICS_FILE
from pipeline.training.reporting.follower import CurveLine, Follower, Logger, Settings, StartEnding, end_all
from pipeline.training.settings.job import LoggersConfig, TrainingJob
from shards.config_values import shown_value, whole_number
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file, write_whole
from shards.files.typed_json import read_record

if TYPE_CHECKING:
    import wandb
    from mlflow import MlflowClient

FILE_NAME = "loggers.json"
_MOST_ID_BYTES, _ID = 1 << 12, re.compile(r"[0-9a-f]{16}")
MLFLOW_STEP = "patchline/step"  # a metric whose latest value is the last step that the server has
_MLFLOW_TAG = "patchline.run"
_MOST_METRICS = 1000  # MLflow's limit per request
_MOST_NOTE_CHARACTERS = 7500  # below MLflow's limit for a tag
# The follower's thread retries, so MLflow need not. MLflow's telemetry is off, and its log goes to ours.
_MLFLOW_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_WANDB_DEFAULTS = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # W&B must not write to the terminal
_WANDB_FOLDER = "wandb"
_NOT_ONLINE = ("offline", "dryrun", "disabled")  # values of WANDB_MODE


class MlflowLogger:
    """One MLflow run for all starts of a run, found by a tag with the value `identity`. `name`: the name that people
    see.

    The server keeps a point for every value that it gets, even for a step that it already has. So each line carries its
    step as a separate metric, in the same request and transaction as its values. A request that is repeated after an
    error has the same times, by which the server recognises the points.
    """

    title = "MLflow"

    def __init__(self, config: LoggersConfig, *, identity: str, name: str) -> None:
        self._config, self._identity, self._name = config, identity, name
        self._client: MlflowClient
        self._experiment = self._run = ""
        self._last_step = 0

    @staticmethod
    def prepare(config: LoggersConfig) -> None:
        """Loads the library. Raises UserError if no server is named, because MLflow would then write into the current
        folder."""
        set_defaults(_MLFLOW_DEFAULTS)
        import mlflow  # noqa: PLC0415 - an extra

        if not (config.mlflow_uri or mlflow.tracking.is_tracking_uri_set()):
            raise UserError(
                "--loggers.mlflow needs a tracking server: give --loggers.mlflow-uri http://HOST:PORT, or set "
                "MLFLOW_TRACKING_URI"
            )

    def open(self) -> int:
        """Implements `Logger`."""
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        self._client = MlflowClient(tracking_uri=self._config.mlflow_uri or None)
        experiment = self._client.get_experiment_by_name(self._config.project)
        self._experiment = str(
            experiment.experiment_id if experiment else self._client.create_experiment(self._config.project)
        )
        which = f"tags.`{_MLFLOW_TAG}` = '{self._identity}'"
        found = self._client.search_runs([self._experiment], filter_string=which, max_results=1)
        tags = {_MLFLOW_TAG: self._identity}
        run = found[0] if found else self._client.create_run(self._experiment, run_name=self._name, tags=tags)
        self._run = run.info.run_id
        if run.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        self._last_step = int(run.data.metrics.get(MLFLOW_STEP, 0))
        return self._last_step

    def place(self) -> str:
        """Returns the address of the run's page. Without an HTTP server, returns the run's id and the tracking URI."""
        uri = self._client.tracking_uri
        is_server = urlsplit(uri).scheme in ("http", "https")
        page = f"{uri.rstrip('/')}/#/experiments/{self._experiment}/runs/{self._run}"
        return page if is_server else f"run {self._run} of {uri}"

    def show_job(self, text: str, settings: Settings) -> None:
        """Sends the settings as parameters, which MLflow never changes later, and the job as the run's description."""
        from mlflow.entities import Param, RunTag  # noqa: PLC0415 - an extra

        has = self._client.get_run(self._run).data
        missing = [Param(name, str(value)) for name, value in settings.items() if name not in has.params]
        note = f"```yaml\n{text.strip()[:_MOST_NOTE_CHARACTERS]}\n```"
        self._client.log_batch(self._run, params=missing, tags=[RunTag("mlflow.note.content", note)])

    def write(self, lines: Sequence[CurveLine]) -> None:
        """Sends the lines in as few requests as MLflow's limit allows. A line is never divided."""
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        waiting: list[Metric] = []
        last_step = self._last_step
        for line in lines:
            points = [Metric(name, value, line.time_ms, line.step) for name, value in line.values.items()]
            if line.step > last_step:
                last_step = line.step
                points.append(Metric(MLFLOW_STEP, line.step, line.time_ms, line.step))
            if waiting and len(waiting) + len(points) > _MOST_METRICS:
                self._client.log_batch(self._run, metrics=waiting)
                waiting = []
            waiting += points
        if waiting:
            self._client.log_batch(self._run, metrics=waiting)
        self._last_step = last_step

    def close(self, ending: StartEnding) -> None:
        """Sets the state that MLflow shows: FINISHED, KILLED or FAILED."""
        status = {StartEnding.DONE: "FINISHED", StartEnding.STOPPED: "KILLED", StartEnding.FAILED: "FAILED"}
        self._client.set_terminated(self._run, status=status[ending])


class WandbLogger:
    """One W&B run, with the id `identity`, for all starts of a run: online or, with WANDB_MODE=offline, in files in
    RUN/wandb.

    W&B takes each step once, and only in order. Online, its server says with which step a run continues. Offline, W&B
    does not resume (with version 0.31, a second start begins at step 0). Each start then writes a separate file, and
    RUN/wandb/last-step-ID has the last step in the files of starts that were not killed. A killed start loses some of
    its last lines, so the next start writes all of its lines again.
    """

    title = "W&B"

    def __init__(self, config: LoggersConfig, *, identity: str, name: str, run_dir: Path) -> None:
        self._config, self._identity, self._name, self._run_dir = config, identity, name, run_dir
        self._mark = run_dir / _WANDB_FOLDER / f"last-step-{identity}"
        self._run: wandb.Run
        self._opened_step = self._last_step = 0

    @staticmethod
    def prepare(_config: LoggersConfig) -> None:
        """Loads the library."""
        set_defaults(_WANDB_DEFAULTS)
        import wandb  # noqa: F401, PLC0415 - an extra

    def open(self) -> int:
        """Implements `Logger`."""
        import wandb  # noqa: PLC0415 - an extra

        is_offline = wandb.setup().settings.mode in _NOT_ONLINE
        if not is_offline and not wandb.login(prompt=False, verify=False):
            raise ValueError("no API key: set WANDB_API_KEY, run wandb login, or set WANDB_MODE=offline")
        self._run = wandb.init(
            project=self._config.project,
            name=self._name,
            id=self._identity,
            dir=str(self._run_dir.resolve()),
            resume=None if is_offline else "allow",
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",  # W&B must not write to the terminal
                disable_code=True,
                disable_git=True,
                stop_on_fatal_error=False,
            ),
        )
        self._opened_step = self._offline_step() if is_offline else max(0, self._run.starting_step - 1)
        self._last_step = self._opened_step
        return self._opened_step

    def _offline_step(self) -> int:
        """Returns the last step that the files of earlier starts have; 0 if it is not known."""
        try:
            return whole_number(read_local_file(self._mark, most_bytes=_MOST_ID_BYTES).decode().strip()) or 0
        except (OSError, ValueError, InvalidDataError):
            return 0

    def place(self) -> str:
        """Returns the URL of the run's page or, offline, the command that uploads the run."""
        if self._run.disabled:
            return "switched off by WANDB_MODE"
        if self._run.offline:
            return f"offline; wandb sync {self._run_dir / _WANDB_FOLDER} uploads it"
        return str(self._run.url)

    def show_job(self, text: str, settings: Settings) -> None:
        """Sends the settings as the run's configuration, and the job as text in it."""
        self._run.config.update({**settings, "job": text}, allow_val_change=True)

    def write(self, lines: Sequence[CurveLine]) -> None:
        """Hands the lines to W&B's own process. Values added to a step of an earlier start appear only in the run's
        summary, without a point on the curve."""
        for line in lines:
            if line.step <= self._opened_step:
                self._run.summary.update(dict(line.values))
            else:
                self._run.log(dict(line.values), step=line.step)
        self._last_step = max(self._last_step, lines[-1].step)

    def close(self, ending: StartEnding) -> None:
        """Sets the state that W&B shows: finished, preempted or failed."""
        if ending is StartEnding.STOPPED:
            self._run.mark_preempting()
        codes = {StartEnding.DONE: 0, StartEnding.STOPPED: 75, StartEnding.FAILED: 1}
        self._run.finish(exit_code=codes[ending])
        if self._run.offline and not self._run.disabled:
            write_whole(self._mark, f"{self._last_step}\n".encode())


@contextmanager
def following(job: TrainingJob, *, text: str, settings: Settings, is_done: Callable[[], bool]) -> Iterator[None]:
    """Makes the job's loggers follow metrics.jsonl inside the `with` block. Called on rank 0. `text`: the job as YAML.
    `settings`: the settings by which runs are compared. `is_done`: called at the end; returns whether all steps of the
    run are done."""
    path = Path(job.run_dir) / METRICS_FILE
    followers = [Follower(logger, path, job=(text, settings)) for logger in _chosen(job)]
    ending = StartEnding.FAILED
    try:
        yield
        ending = StartEnding.DONE if is_done() else StartEnding.STOPPED
    finally:
        end_all(followers, ending)


def _chosen(job: TrainingJob) -> list[Logger]:
    config, run_dir = job.loggers, Path(job.run_dir)
    if not (config.mlflow or config.wandb):
        return []
    identity, name = logger_id(run_dir), config.name or run_dir.resolve().name
    found: list[Logger] = []
    if config.mlflow:
        found.append(MlflowLogger(config, identity=identity, name=name))
    if config.wandb:
        found.append(WandbLogger(config, identity=identity, name=name, run_dir=run_dir))
    return found


def refuse_unusable_loggers(config: LoggersConfig, run_dir: Path, *, opens: bool) -> None:
    """Raises UserError if a library is missing or RUN/loggers.json is damaged. With `opens`, on the rank that opens the
    loggers, also loads the libraries, and raises UserError if MLflow's server is not named. Call it on the main thread,
    because it sets environment variables that the libraries read."""
    for library, is_on, logger in (("mlflow", config.mlflow, MlflowLogger), ("wandb", config.wandb, WandbLogger)):
        if not is_on:
            continue
        if find_spec(library) is None:
            raise UserError(
                f"--loggers.{library} needs the package {library}, which is not installed: pip install "
                f"'patchline[{library}]', or leave out --loggers.{library}"
            )
        read_logger_id(run_dir)
        try:
            if opens:
                logger.prepare(config)
        except ImportError as error:
            raise UserError(
                f"{library} cannot be loaded ({error}); install it again: pip install 'patchline[{library}]'"
            ) from error


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The content of RUN/loggers.json. Raises ValueError if the id is not 16 hexadecimal digits."""

    id: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id):
            raise ValueError(f"id is {shown_value(self.id)}; allowed: 16 digits of 0 to 9 and a to f")


def read_logger_id(run_dir: Path) -> str:
    """Returns the run's id at its services; empty if it has none yet. Raises InvalidDataError if the file is
    damaged."""
    path = run_dir / FILE_NAME
    try:
        return read_record(_Record, read_local_file(path, most_bytes=_MOST_ID_BYTES)).id
    except FileNotFoundError:
        return ""
    except (ValueError, InvalidDataError, IsADirectoryError) as error:
        raise InvalidDataError(
            f"{path} is damaged ({error}); it names the run at MLflow and W&B: restore it, or move it away to begin a "
            "new run there, which gets all of metrics.jsonl"
        ) from error


def logger_id(run_dir: Path) -> str:
    """Returns the run's id at its services. Makes one if the run has none yet."""
    found = read_logger_id(run_dir)
    if not found:
        found = secrets.token_hex(8)
        write_whole(run_dir / FILE_NAME, json.dumps({"id": found}).encode() + b"\n")
    return found
