"""A real MLflow tracking server on loopback for tests, with a database in a folder, and its answers about a run."""

import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.rigs.s3 import free_port

_NEEDS = ("mlflow", "sqlalchemy", "alembic", "flask", "flask_cors", "gunicorn")
START_SECONDS = 120.0
_POLL_SECONDS = 0.05


def missing_packages() -> list[str]:
    """What the server needs and is not installed."""
    return [name for name in _NEEDS if find_spec(name) is None]


class MlflowServer:
    """Where the server listens; it may be stopped and started again over the same database."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        words = ["--backend-store-uri", f"sqlite:///{self.folder}/runs.db"]
        words += ["--default-artifact-root", str(self.folder / "artifacts"), "--workers", "1"]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--gunicorn-opts=--timeout=60"]
        off = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        with (self.folder / "server.log").open("ab") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *words],
                stdout=said,
                stderr=said,
                env={**os.environ, **off, "HOME": str(self.folder)},
                start_new_session=True,
            )
        self._wait_until_it_answers(self.process)

    def stop(self) -> None:
        """Ends it with its workers, at once."""
        if self.process:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside, it takes connections, and answers none."""
        assert self.process
        os.killpg(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def _wait_until_it_answers(self, process: "subprocess.Popen[bytes]") -> None:
        deadline, pause = time.monotonic() + START_SECONDS, threading.Event()
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                connection.request("GET", "/health")
                connection.getresponse()
                return
            except OSError:
                pause.wait(_POLL_SECONDS)
            finally:
                connection.close()
        said = (self.folder / "server.log").read_text()[-2000:]
        self.stop()
        raise RuntimeError(f"mlflow server does not answer on port {self.port}; it said:\n{said}")

    def runs(self, experiment: str = "patchline") -> list[Any]:
        """All runs of an experiment, newest first."""
        client = self.client()
        found = client.get_experiment_by_name(experiment)
        return list(client.search_runs([found.experiment_id])) if found else []

    def points(self, run: Any, name: str) -> list[tuple[int, float]]:
        """Every point of a curve, in the order of their steps."""
        history = self.client().get_metric_history(run.info.run_id, name)
        return sorted((point.step, point.value) for point in history)

    def client(self) -> Any:
        """The library's own client."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra

        return MlflowClient(tracking_uri=self.uri)


@contextmanager
def mlflow_server(folder: Path) -> Iterator[MlflowServer]:
    """A server that ends with the block."""
    server = MlflowServer(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()
