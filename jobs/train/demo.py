"""`patchline demo`: runs the whole pipeline on real images, and shows that a killed run continues bit for bit."""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jobs import exit_codes
from jobs.output import show_table
from jobs.ranks import Ranks, start_ranks
from jobs.settings.runs import DemoJob
from pipeline.ranks.host import free_port
from pipeline.runs.starts import last_step
from pipeline.training.reporting.metrics import read_metrics
from shards.errors import UserError
from shards.files.local_files import read_local_file
from shards.output.terminal import command_lines, printable_name, unescaped

__all__ = ["Comparison", "DemoJob", "compare", "last_step", "run"]

log = logging.getLogger(__name__)
_URL, _TEST_URL = "s3://demo/digits", "s3://demo/digits-test"
_MARKER = ".patchline-demo"
_SERVER_SECONDS, _MOST_BYTES = 30.0, 16 << 20
_STEPS_PAST_A_CHECKPOINT = 10  # so that the continued run repeats some steps


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A comparison of a continued run with the unbroken one: the number of losses after the continuation, and how many
    of them are bit-identical."""

    killed_at: int
    continued_from: int
    num_losses: int
    num_identical: int

    @property
    def equal(self) -> bool:
        """Whether every loss after the continuation is identical, and there is at least one."""
        return self.num_losses > 0 and self.num_losses == self.num_identical


def run(job: DemoJob, *, environ: Mapping[str, str]) -> int:
    """Runs every stage with the command that a user would type. A table at the end shows whether everything worked.
    Returns 1 if the continued run differs or the accuracy is too low, otherwise 0.

    `environ`: the environment, passed on because only the command line may read it.
    """
    began = time.monotonic()
    folder = _fresh_folder(Path(job.run_dir))
    with _s3_server(folder) as endpoint:
        console = Console(file=unescaped(sys.stderr))
        stages = _Stages(job=job, folder=folder, environ=_environment(environ, endpoint), console=console)
        comparison = _all_stages(stages)
    table, accuracy = _table(job, folder, comparison, seconds=time.monotonic() - began)
    show_table(table)
    if not comparison.equal:
        log.error("the continued run differs from the unbroken run; this is a bug")
        return exit_codes.FAULTS_FOUND
    if accuracy < job.least_accuracy:
        log.error("accuracy after fine-tuning is %.4f, below %.2f", accuracy, job.least_accuracy)
        return exit_codes.FAULTS_FOUND
    return exit_codes.DONE


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """Shows and runs the commands of the demo."""

    job: DemoJob
    folder: Path
    environ: Mapping[str, str]
    console: Console

    def title(self, text: str) -> None:
        self.console.rule(f"[bold]{text}", align="left")

    def start(self, words: list[str], *, num_ranks: int = 1) -> Ranks:
        shown = ["patchline", *words, *(["--processes", str(num_ranks)] if num_ranks > 1 else [])]
        lines = command_lines("$ ", shown, columns=self.console.width)
        self.console.print(*lines, sep="\n", style="cyan", soft_wrap=True, highlight=False, markup=False)
        return start_ranks(words, num_ranks=num_ranks, environ=self.environ, log_dir=self.folder / "logs")

    def do(self, words: list[str], *, num_ranks: int = 1) -> None:
        code = self.start(words, num_ranks=num_ranks).wait()
        if code != exit_codes.DONE:
            raise UserError(f"the demo's stage 'patchline {words[0]}' ended with code {code}; its messages are above")

    def pretrain_words(self, name: str) -> list[str]:
        words = ["pretrain", "digits_smoke", "--data.url", _URL, "--run-dir", str(self.folder / name)]
        return [*words, "--steps", str(self.job.steps), "--device", "cpu"]


def _all_stages(stages: _Stages) -> Comparison:
    folder, ranks = stages.folder, stages.job.num_ranks
    stages.title("1/6 pack real digits into WebDataset shards on S3, and verify them")
    stages.do(["pack", "digits", "--out", _URL])
    stages.do(["pack", "digits", "--split", "test", "--out", _TEST_URL])
    stages.do(["verify", _URL])
    stages.title(f"2/6 pre-train on {ranks} processes, streaming from S3: the unbroken run")
    stages.do(stages.pretrain_words("unbroken"), num_ranks=ranks)
    stages.title("3/6 the same run, killed with SIGKILL and resumed by the same command")
    killed_at = _run_and_kill(stages)
    stages.do(stages.pretrain_words("pretrain"), num_ranks=ranks)
    comparison = compare(folder / "unbroken", folder / "pretrain", killed_at=killed_at)
    stages.title("4/6 accuracy before fine-tuning")
    stages.do(_evaluate_words(folder, "pretrain"))
    stages.title("5/6 fine-tune from 32 to 48 px")
    words = ["finetune", "digits_48", "--initial.weights", str(folder / "pretrain" / "weights"), "--data.url", _URL]
    words += ["--run-dir", str(folder / "finetune"), "--steps", str(stages.job.finetune_steps), "--device", "cpu"]
    stages.do(words, num_ranks=ranks)
    stages.title("6/6 accuracy after fine-tuning")
    stages.do(_evaluate_words(folder, "finetune"))
    return comparison


def _evaluate_words(folder: Path, name: str) -> list[str]:
    words = ["evaluate", str(folder / name), "--data.url", _TEST_URL]
    return [*words, "--run-dir", str(folder / f"evaluate-{name}"), "--device", "cpu"]


def _run_and_kill(stages: _Stages) -> int:
    """Starts the run, kills all ranks more than 10 steps past the middle, and returns the last logged step. Raises
    UserError if the run ends before that."""
    run_dir = stages.folder / "pretrain"
    with stages.start(stages.pretrain_words("pretrain"), num_ranks=stages.job.num_ranks) as running:
        while running.poll():
            if last_step(run_dir) > stages.job.steps // 2 + _STEPS_PAST_A_CHECKPOINT:
                running.kill()
                killed_at = last_step(run_dir)
                stages.console.print(
                    f"\nSIGKILL to all {stages.job.num_ranks} processes at step {killed_at}", style="bold red"
                )
                return killed_at
            time.sleep(0.05)
    raise UserError("the run that was to be killed ended by itself; its messages are above")


def compare(unbroken: Path, continued: Path, *, killed_at: int) -> Comparison:
    """Compares the losses of the two runs, bit for bit, in every step after the continuation."""
    attempts = sorted((continued / "checkpoints" / "attempts").glob("*.json"))
    origin = _json_in(attempts[-1])["resumed_from"]
    start = int(origin["step"]) if origin else 0
    expected = {line["step"]: line["loss"] for line in read_metrics(unbroken)}
    found = {line["step"]: line["loss"] for line in read_metrics(continued)}
    steps = [step for step in expected if step > start]
    identical = [step for step in steps if found.get(step) == expected[step]]
    return Comparison(killed_at=killed_at, continued_from=start, num_losses=len(steps), num_identical=len(identical))


def _json_in(path: Path) -> Any:
    return json.loads(read_local_file(path, most_bytes=_MOST_BYTES))


def _table(job: DemoJob, folder: Path, comparison: Comparison, *, seconds: float) -> tuple[Table, float]:
    before = _json_in(folder / "evaluate-pretrain" / "scores.json")
    after = _json_in(folder / "evaluate-finetune" / "scores.json")
    rates = sorted(line["images_per_second"] for line in read_metrics(folder / "unbroken"))
    num_train = 1797 - before["num_images"]
    verdict = "yes" if comparison.equal else "NO"
    losses = f"{comparison.num_identical} losses bit-identical"
    if not comparison.equal:
        losses = f"{comparison.num_identical} of {comparison.num_losses} losses bit-identical"
    table = Table(title="patchline demo", show_header=False, title_justify="left")
    rows = [
        ("images", f"{num_train:,} to train, {before['num_images']} to test, real handwritten digits"),
        (
            "steps",
            f"{job.steps} to pre-train, {job.finetune_steps} to fine-tune, batches of 128, {job.num_ranks} ranks",
        ),
        ("images/s (median)", f"{rates[len(rates) // 2]:,.0f}"),
        (
            "killed / continued",
            f"SIGKILL at step {comparison.killed_at}, continued from step {comparison.continued_from}",
        ),
        ("continued run equals unbroken run", f"{verdict} ({losses})"),
        ("accuracy before fine-tuning", f"{before['accuracy']:.2%} at 32 px"),
        ("accuracy after fine-tuning", f"{after['accuracy']:.2%} at 48 px"),
        ("time", f"{seconds:,.0f} s"),
        ("runs", f"{folder}/unbroken, {folder}/pretrain, {folder}/finetune"),
        ("weights", f"{folder}/finetune/weights"),
        ("curves", f"tensorboard --logdir {folder}"),
    ]
    for name, value in rows:
        table.add_row(name, printable_name(value))
    return table, float(after["accuracy"])


def _fresh_folder(folder: Path) -> Path:
    """Returns the demo's folder, emptied if an earlier demo made it. Raises UserError if it is any other folder that is
    not empty."""
    if folder.exists() and any(folder.iterdir()):
        if not (folder / _MARKER).is_file():
            raise UserError(f"{folder} is not empty and was not made by an earlier demo; give another --run-dir")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _MARKER).touch()
    return folder


def _environment(environ: Mapping[str, str], endpoint: str) -> dict[str, str]:
    """Returns the environment with the demo's own S3 settings in place of any profile, and without a proxy for the
    server."""
    dropped = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3")
    kept = {name: value for name, value in environ.items() if name not in dropped}
    own = {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}
    return {**kept, **own, "AWS_DEFAULT_REGION": "us-east-1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@contextmanager
def _s3_server(folder: Path) -> Iterator[str]:
    """Runs an S3-compatible server with the bucket `demo` on a free loopback port, until the block ends. Yields its
    address."""
    for package, module in (("moto[server,s3]", "moto"), ("scikit-learn", "sklearn")):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"the demo needs {package}, which is not installed; run: pip install 'patchline[demo]'")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with (folder / "s3.log").open("wb") as log_file:
        command = [sys.executable, "-P", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        server = subprocess.Popen(command, stdout=log_file, stderr=log_file)
    try:
        _wait_for_server(server, endpoint, folder)
        yield endpoint
    finally:
        server.terminate()
        server.wait()


def _wait_for_server(server: subprocess.Popen[bytes], endpoint: str, folder: Path) -> None:
    """Waits until the server has created the bucket. The server does not check credentials."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _SERVER_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            direct.open(urllib.request.Request(f"{endpoint}/demo", method="PUT"), timeout=5).close()  # noqa: S310
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise UserError(f"the demo's S3 server did not start; its messages are in {folder}/s3.log")
