"""MLflow: one run for all starts of ours, found by a tag, with one request for the lines of about a second.

The server keeps a point for every value that it is sent, also of a step that it has already. So each line carries its
step as a metric of its own, in the same request and transaction as its values: what a killed run sent last can be read
back. A request that is sent again after an error has the same times, by which the server knows the points.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.ranks.world import set_defaults
from pipeline.training.settings.loggers import Line, LoggersConfig, Settings, StartEnding
from shards.errors import UserError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Run

STEP = "patchline/step"  # the metric; its latest value is the last step that the server has
TAG = "patchline.run"
_MOST_METRICS = 1000  # of a request, by MLflow's limit
_MOST_CHARACTERS = 7500  # of a tag, below MLflow's limit
_STATUS = {StartEnding.DONE: "FINISHED", StartEnding.STOPPED: "KILLED", StartEnding.FAILED: "FAILED"}
# It is the thread that tries again, and that may be left behind. The library's telemetry goes nowhere, its log to ours.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


def prepare(config: LoggersConfig) -> None:
    """Loads the library. UserError if nothing names a server: by itself it would write into the current folder."""
    set_defaults(_DEFAULTS)
    try:
        import mlflow  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise UserError(
            f"mlflow cannot be loaded ({error}); install it again: pip install 'patchline[mlflow]'"
        ) from error
    if not (config.mlflow_uri or mlflow.tracking.is_tracking_uri_set()):
        raise UserError(
            "--loggers.mlflow needs a tracking server: give --loggers.mlflow-uri http://HOST:PORT, or set "
            "MLFLOW_TRACKING_URI"
        )


class MlflowLogger:
    """A `Logger`. `identity` is the run's for good, `name` is for people."""

    title = "MLflow"

    def __init__(self, config: LoggersConfig, *, identity: str, name: str) -> None:
        self._config, self._identity, self._name = config, identity, name
        self._client: MlflowClient
        self._experiment = self._run = ""
        self._opened_step = 0

    def open(self) -> int:
        """Finds our run by its tag, or makes it."""
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        self._client = MlflowClient(tracking_uri=self._config.mlflow_uri or None)
        self._experiment = self._experiment_id()
        which = f"tags.`{TAG}` = '{self._identity}'"
        found = self._client.search_runs([self._experiment], filter_string=which, max_results=1)
        run = found[0] if found else self._made_run()
        self._run = run.info.run_id
        if run.info.status != "RUNNING":
            self._client.update_run(self._run, status="RUNNING")
        self._opened_step = int(run.data.metrics.get(STEP, 0))
        return self._opened_step

    def _experiment_id(self) -> str:
        project = self._config.project
        found = self._client.get_experiment_by_name(project)
        return str(found.experiment_id if found else self._client.create_experiment(project))

    def _made_run(self) -> "Run":
        return self._client.create_run(self._experiment, run_name=self._name, tags={TAG: self._identity})

    def place(self) -> str:
        """The run's page, if a server has one."""
        uri = self._client.tracking_uri
        is_server = urlsplit(uri).scheme in ("http", "https")
        page = f"{uri.rstrip('/')}/#/experiments/{self._experiment}/runs/{self._run}"
        return page if is_server else f"run {self._run} of {uri}"

    def show_job(self, text: str, settings: Settings) -> None:
        """The settings as parameters, of which MLflow keeps the first value for good, and the job as the run's
        description."""
        from mlflow.entities import Param, RunTag  # noqa: PLC0415 - an extra

        has = self._client.get_run(self._run).data
        missing = [Param(name, str(value)) for name, value in settings.items() if name not in has.params]
        note = f"```yaml\n{text.strip()[:_MOST_CHARACTERS]}\n```"
        self._client.log_batch(self._run, params=missing, tags=[RunTag("mlflow.note.content", note)])

    def write(self, lines: Sequence[Line]) -> None:
        """Sends the lines in as few requests as MLflow's limit allows; a line is never divided."""
        waiting: list[Metric] = []
        for line in lines:
            points = list(self._points(line))
            if waiting and len(waiting) + len(points) > _MOST_METRICS:
                self._client.log_batch(self._run, metrics=waiting)
                waiting = []
            waiting += points
        if waiting:
            self._client.log_batch(self._run, metrics=waiting)

    def _points(self, line: Line) -> Iterator["Metric"]:
        from mlflow.entities import Metric  # noqa: PLC0415 - an extra

        for name, value in line.values.items():
            if not (line.is_added and line.step <= self._opened_step and self._has(name, line.step)):
                yield Metric(name, value, line.time_ms, line.step)
        if not line.is_added:
            yield Metric(STEP, line.step, line.time_ms, line.step)

    def _has(self, name: str, step: int) -> bool:
        """Whether an earlier start has sent this value."""
        return any(point.step == step for point in self._client.get_metric_history(self._run, name))

    def close(self, ending: StartEnding) -> None:
        """The run's state, as MLflow shows it."""
        self._client.set_terminated(self._run, status=_STATUS[ending])
