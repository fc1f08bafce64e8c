"""MLflow against its own server on loopback: one run over kills and outages, and every step once."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.training.reporting.follower import CurveLine, StartEnding
from pipeline.training.reporting.loggers import MLFLOW_STEP, MlflowLogger
from pipeline.training.reporting.metrics import read_metrics, tag_of
from pipeline.training.settings.job import LoggersConfig
from tests.rigs.kills import run_and_kill, sent_after_a_checkpoint
from tests.rigs.mlflow_server import MlflowServer, missing_packages, mlflow_server
from tests.rigs.processes import patchline
from tests.rigs.training import AT_ONCE, STEPS, pretrain_words, resumed_steps

pytestmark = pytest.mark.skipif(
    bool(missing_packages()),
    reason=f"the packages of MLflow's server are not installed: {', '.join(missing_packages())} (extra test)",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as running:
        yield running


def lines(*steps: int, time_ms: int = 1000) -> list[CurveLine]:
    return [
        CurveLine(step=step, values={"train/loss": 1 / step, "perf/z": math.nan}, time_ms=time_ms) for step in steps
    ]


def logger(server: MlflowServer, project: str, *, identity: str = "0123456789abcdef") -> MlflowLogger:
    config = LoggersConfig(mlflow=True, mlflow_uri=server.uri, project=project)
    MlflowLogger.prepare(config)
    return MlflowLogger(config, identity=identity, name="digits")


@pytest.mark.long
def test_a_killed_run_is_one_run_with_every_step_once(server: MlflowServer, digits_url: str, tmp_path: Path) -> None:
    run_dir, steps = tmp_path / "run", 300
    more = ("--steps", str(steps), "--checkpoint.every-steps", "1000", "--loggers.name", "seven")
    words = pretrain_words(digits_url, run_dir, *AT_ONCE, *more, "--loggers.mlflow", "--loggers.mlflow-uri", server.uri)

    def last_sent() -> int:
        return max((int(run.data.metrics.get(MLFLOW_STEP, 0)) for run in server.runs()), default=0)

    moment = sent_after_a_checkpoint(last_sent)
    assert run_and_kill(words, run_dir, moment=moment, num_ranks=1, log_dir=tmp_path), "the run ended first"
    ended = patchline(*words)
    assert (ended.code, ended.output) == (0, ""), ended.errors
    found = re.search(r"MLflow: .* \(continues after step (\d+)\)\n", ended.errors)
    assert found, ended.errors
    assert 20 <= resumed_steps(run_dir)[-1] < int(found[1]) < steps, "steps were sent, and trained again"
    (run,) = server.runs()
    assert (run.info.status, run.info.run_name) == ("FINISHED", "seven")
    assert run.data.params["schedule.learning_rate"] == "0.001"
    assert "global_batch: 32" in run.data.tags["mlflow.note.content"]
    written = read_metrics(run_dir)
    assert [line["step"] for line in written] == list(range(1, steps + 1))
    for name in ("loss", "grad_norm", "learning_rate", "epoch", "step_seconds"):
        points = server.points(run, tag_of(name))
        assert [step for step, _ in points] == [line["step"] for line in written if name in line], name
        if name != "step_seconds":  # the same bits on both sides of the kill, whichever start sent them
            assert [value for _, value in points] == [line[name] for line in written], name


def test_an_unreachable_server_costs_a_run_one_warning(digits_url: str, tmp_path: Path) -> None:
    """Port 9 of loopback: nothing listens there."""
    uri = ("--loggers.mlflow", "--loggers.mlflow-uri", "http://127.0.0.1:9")
    ended = patchline(*pretrain_words(digits_url, tmp_path / "run", *uri))
    assert ended.code == 0, ended.errors
    assert len(read_metrics(tmp_path / "run")) == STEPS
    (first, last) = [line for line in ended.errors.splitlines() if "MLflow" in line and "waiting" not in line]
    assert "MLflow does not answer" in first
    assert "training continues" in first
    assert f"MLflow has not taken the last {STEPS} lines of the run" in last


def test_a_server_that_hangs_gets_all_steps_later(server: MlflowServer, digits_url: str, tmp_path: Path) -> None:
    """The limit for a request is the user's."""
    project = ("--loggers.project", "hung")
    words = pretrain_words(digits_url, tmp_path, "--loggers.mlflow", "--loggers.mlflow-uri", server.uri, *project)
    with server.suspended():
        hung = patchline(*words, environ={"MLFLOW_HTTP_REQUEST_TIMEOUT": "1"})
    assert hung.code == 0, hung.errors
    assert f"MLflow has not taken the last {STEPS} lines of the run (MlflowException" in hung.errors
    more = patchline(*words, "--steps", str(STEPS + 2), "--extend", "--schedule.warmup-steps", "2")
    assert more.code == 0, more.errors
    (run,) = server.runs("hung")
    expected = [(line["step"], line["loss"]) for line in read_metrics(tmp_path)]
    assert server.points(run, "train/loss") == expected
    assert len(expected) == STEPS + 2


def test_lines_that_are_sent_again_are_no_new_points(server: MlflowServer) -> None:
    """As after an error whose request had arrived; NaN, too."""
    one = logger(server, "again")
    assert one.open() == 0
    one.write(lines(1, 2))
    one.write(lines(1, 2, 3))
    (run,) = server.runs("again")
    assert server.points(run, "train/loss") == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
    values = [value for _, value in server.points(run, "perf/z")]
    assert len(values) == 3
    assert all(map(math.isnan, values))
    one.close(StartEnding.STOPPED)
    assert server.runs("again")[0].info.status == "KILLED"
    assert logger(server, "again").open() == 3
    assert server.runs("again")[0].info.status == "RUNNING"


def test_more_lines_than_a_request_takes(server: MlflowServer) -> None:
    one = logger(server, "many")
    one.open()
    one.write(lines(*range(1, 1001)))
    (run,) = server.runs("many")
    assert [step for step, _ in server.points(run, "train/loss")] == list(range(1, 1001))
    assert logger(server, "many").open() == 1000


def test_values_are_added_to_a_step(server: MlflowServer) -> None:
    """By the same start, and by a later one."""
    one = logger(server, "added")
    one.open()
    one.write([*lines(1, 2), CurveLine(step=2, values={"eval/accuracy": 0.5}, time_ms=2000)])
    continued = logger(server, "added")
    assert continued.open() == 2
    continued.write([CurveLine(step=2, values={"eval/loss": 1.0}, time_ms=3000)])
    (run,) = server.runs("added")
    assert server.points(run, "eval/accuracy") == [(2, 0.5)]
    assert server.points(run, "eval/loss") == [(2, 1.0)]
    assert server.points(run, MLFLOW_STEP) == [(1, 1.0), (2, 2.0)]


def test_settings_that_changed_and_runs_that_were_deleted(server: MlflowServer) -> None:
    """MLflow keeps the first value of a parameter, and refuses a request with another one."""
    one = logger(server, "deleted")
    one.open()
    one.show_job("steps: 5", {"steps": 5})
    continued = logger(server, "deleted")
    continued.open()
    continued.show_job("steps: 9", {"steps": 9, "seed": 1})
    (run,) = server.runs("deleted")
    assert (run.data.params, run.data.tags["mlflow.note.content"]) == (
        {"steps": "5", "seed": "1"},
        "```yaml\nsteps: 9\n```",
    )
    one.write(lines(1))
    server.client().delete_run(run.info.run_id)
    assert logger(server, "deleted").open() == 0, "a new run, which gets all lines"
    assert logger(server, "deleted", identity="fedcba9876543210").open() == 0
    assert len(server.runs("deleted")) == 2
