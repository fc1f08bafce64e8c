"""The jobs that the matrix of faults (cluster.py) disturbs: a training run, an evaluation, packing, and a chain."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self
from unittest.mock import patch

import boto3

from jobs.data import pack
from jobs.recipes.pack import digits
from shards.store import open_store
from tests.rigs.cutting_proxy import cutting_proxy
from tests.rigs.datasets import file_hashes
from tests.rigs.s3 import moto_server
from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.rigs.training import losses

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "stage.sbatch"
PATCHLINE = Path(sys.executable).parent / "patchline"
STEPS, SAVE_STEPS, EVALUATION_STEPS, EARLY_STEP = 160, 20, 40, 25
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
BUCKET, KEYS = "soak", {"AWS_ACCESS_KEY_ID": "soak", "AWS_SECRET_ACCESS_KEY": "soak", "AWS_REGION": "us-east-1"}
_WRONG_SECONDS = 4_000_000_000


@dataclass(frozen=True)
class Expected:
    """The result of an undisturbed job, and how long it takes."""

    digest: str
    seconds: float


class Shared:
    """The store, and the results of undisturbed jobs, each of which runs once."""

    def __init__(self, folder: Path, endpoint: str) -> None:
        self.folder, self.endpoint = folder, endpoint
        self.url = f"s3://{BUCKET}/digits"
        # The ranks of each node see a host name of their own.
        self.command = folder / "patchline"
        inner = f'hostname "rig-$SLURMD_NODENAME"; exec {PATCHLINE} "$@"'
        self.command.write_text(f"#!/bin/sh\nexec unshare --uts sh -c '{inner}' patchline \"$@\"\n")
        self.command.chmod(0o755)
        self._lock = threading.RLock()  # an evaluation needs the weights of the training
        self._expected: dict[type[Work], Expected] = {}

    @property
    def weights(self) -> Path:
        """The weights of the undisturbed training run."""
        self.expected(Training)
        return self.folder / "Training" / "run" / "weights"

    def expected(self, kind: "type[Work]") -> Expected:
        """Returns the result of an undisturbed job of this kind."""
        with self._lock:
            if kind not in self._expected:
                self._expected[kind] = self._undisturbed(kind)
        return self._expected[kind]

    def _undisturbed(self, kind: "type[Work]") -> Expected:
        folder = self.folder / kind.__name__
        folder.mkdir()
        config = SlurmConfig(num_nodes=3, cpus_per_node=1, first_job=30_000)
        with SlurmCluster(config) as cluster, kind(cluster, self, folder) as work:
            began = time.monotonic()
            work.submit()
            while not work.is_over():
                time.sleep(0.3)
            if not work.digest():
                raise RuntimeError(f"the undisturbed job failed: {work.log()}")
            return Expected(work.digest(), time.monotonic() - began)


@contextmanager
def shared_by_all(folder: Path) -> Iterator[Shared]:
    """Starts a store, and packs the dataset into it."""
    with moto_server() as endpoint, patch.dict(os.environ, KEYS, AWS_ENDPOINT_URL=endpoint):
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        shared = Shared(folder, endpoint)
        pack.run(replace(digits(), out=shared.url))
        yield shared


class Work(ABC):
    """A job in its own folder, with its own proxy in front of the store."""

    def __init__(self, cluster: SlurmCluster, shared: Shared, folder: Path) -> None:
        self.cluster, self.shared, self.folder, self.run_dir = cluster, shared, folder, folder / "run"
        self.log_path = folder / "run" / "submit" / "log"
        self.jobs: list[int] = []
        self.environ: dict[str, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.proxy = self._stack.enter_context(cutting_proxy(self.shared.endpoint))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def own_url(self) -> str:
        """A URL in the store that only this job uses."""
        return f"s3://{BUCKET}/{self.folder.parent.name}-{self.folder.name}"

    @abstractmethod
    def words(self) -> list[str]:
        """Returns the stage and its flags."""

    def options(self) -> list[str]:
        """Returns the options of sbatch."""
        return ["--nodes=1"]

    def submit(self) -> None:
        """Submits the job, or submits it again."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        environ = {
            "PATCHLINE": str(self.shared.command),
            "AWS_ENDPOINT_URL": self.proxy.endpoint,
            "PATCHLINE_STATE": str(self.folder),
            **self.environ,
        }
        options = [f"--output={self.log_path}", *self.options()]
        self.jobs.append(self.cluster.sbatch(SCRIPT, *self.words(), options=options, env=environ))

    def submit_by_patchline(self, *words: str) -> None:
        """Runs `patchline submit` with these words and the cluster's settings."""
        keys, settings_path = self.folder / "keys", self.folder / "cluster.yaml"
        keys.touch(mode=0o600)
        keys.write_text("[soak]\naws_access_key_id=soak\naws_secret_access_key=soak\n")
        settings = {
            "command": [str(self.shared.command)],
            "s3_endpoint": self.proxy.endpoint,
            "s3_profile": "soak",
            "setup": [f"export AWS_SHARED_CREDENTIALS_FILE={keys}"],
        }
        settings_path.write_text(json.dumps(settings))  # JSON is YAML
        done = subprocess.run(
            [str(PATCHLINE), "submit", *words, f"--cluster={settings_path}"],
            env=self.cluster.job_environment() | {"AWS_SHARED_CREDENTIALS_FILE": str(keys)},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        if done.returncode:
            raise RuntimeError(done.stderr)

    def has_jobs(self) -> bool:
        """Whether any of our jobs is in the queue. Returns True if the controller does not answer."""
        try:
            return bool(self.cluster.command("squeue", "--noheader", "--me").strip())
        except (RuntimeError, subprocess.TimeoutExpired):
            return True

    def turn_clock(self, node: str) -> None:
        """Makes the shells of this node see a time that is wrong by decades."""
        path = self.folder / "environment"
        is_there = f"[[ ${{SLURMD_NODENAME-}} == {node} ]]"
        path.write_text(f"if {is_there}; then unset EPOCHREALTIME; EPOCHREALTIME={_WRONG_SECONDS}.5; fi\n")
        self.environ["BASH_ENV"] = str(path)

    @abstractmethod
    def is_at(self, moment: str, how: str) -> bool:
        """Whether the moment has come. `how`: "early" (just before the moment) or "now"."""

    def is_over(self) -> bool:
        """Whether the job has ended for good. Returns False if the controller does not answer."""
        try:
            return self.cluster.squeue_state(self.jobs[-1]) in ENDED
        except (RuntimeError, subprocess.TimeoutExpired):
            return False

    def end(self) -> str:
        """Returns the job's last state and its exit code, or "done"."""
        job = self.cluster.job(self.jobs[-1])
        return "done" if job["JobState"] == "COMPLETED" else f"{job['JobState']} {job['ExitCode']}"

    def batch_host(self) -> str:
        """Returns the node on which the batch script runs."""
        return self.cluster.job(self.jobs[-1])["BatchHost"]

    @abstractmethod
    def digest(self) -> str:
        """Returns a hash of what the job made; empty if it is not complete."""

    def message(self) -> str:
        """Returns what the operator reads: the last line of the script, or the output of `patchline status`."""
        words = [line for line in self.log().splitlines() if line.startswith("stage.sbatch: ")]
        if words and "not tried again" in words[-1]:
            return words[-1]
        done = subprocess.run(
            [str(PATCHLINE), "status", str(self.run_dir)],
            env=self.cluster.job_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return (done.stdout + done.stderr).strip()

    def log(self) -> str:
        """Returns the log of all its jobs."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""


class Training(Work):
    """Two ranks on two nodes, which save, evaluate, and read their images from S3."""

    def words(self) -> list[str]:
        return [
            *("pretrain", "digits_smoke", f"--run-dir={self.run_dir}", f"--data.url={self.shared.url}"),
            *(f"--steps={STEPS}", "--global-batch=64", "--schedule.warmup-steps=5"),
            *(f"--checkpoint.every-steps={SAVE_STEPS}", f"--evaluation.every-steps={EVALUATION_STEPS}"),
            *(f"--evaluation.url={self.shared.url}", "--hang.step-seconds=20", "--hang.other-seconds=40"),
        ]

    def options(self) -> list[str]:
        return ["--nodes=2"]

    def is_at(self, moment: str, how: str) -> bool:
        if moment == "start":
            return True
        step = self._step()
        if how == "early":
            return step >= EARLY_STEP
        if moment == "mid-save":
            return self._is_saving()
        if moment == "evaluation":
            return step % EVALUATION_STEPS == 0
        return step == STEPS if moment == "end" else step % SAVE_STEPS not in (0, 1)

    def _step(self) -> int:
        """Returns the last step in metrics.jsonl, or 0."""
        with suppress(OSError, ValueError, IndexError):
            with (self.run_dir / "metrics.jsonl").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 8192))
                lines = file.read().split(b"\n")[:-1]
            return max(int(json.loads(line)["step"]) for line in lines[-3:] if b'"loss"' in line)
        return 0

    def _is_saving(self) -> bool:
        newest = max((self.run_dir / "checkpoints").glob("step-*"), default=None)
        return newest is not None and not any(newest.glob("*/MANIFEST.json"))

    def digest(self) -> str:
        if not (self.run_dir / "DONE").exists():
            return ""
        weights = (self.run_dir / "weights" / "model.safetensors").read_bytes()
        return hashlib.sha256(json.dumps(losses(self.run_dir)).encode() + weights).hexdigest()


class StoredTraining(Training):
    """The same training, with its checkpoints in the store."""

    def words(self) -> list[str]:
        return [*super().words(), f"--checkpoint.url={self.own_url}"]

    def _is_saving(self) -> bool:
        return self._step() % SAVE_STEPS <= 1


class RecordedTraining(Training):
    """The same training, submitted by `patchline submit`."""

    def submit(self) -> None:
        self.submit_by_patchline(*self.words(), *self.options())

    def is_over(self) -> bool:
        return not self.has_jobs()

    def end(self) -> str:
        return "done" if (self.run_dir / "DONE").exists() else "it has no job left"

    def log(self) -> str:
        paths = (self.run_dir / "submit").glob("*.out")
        return "\n".join(path.read_text(errors="replace") for path in paths)


class Evaluation(Work):
    """Scores the weights of the undisturbed training run on one node."""

    def words(self) -> list[str]:
        scores = f"--run-dir={self.run_dir}"
        return ["evaluate", str(self.shared.weights), f"--data.url={self.shared.url}", scores, "--data.batch-size=4"]

    def is_at(self, moment: str, how: str) -> bool:
        return moment == "start" or how == "early" or len(self.proxy.ranges) > 1

    def digest(self) -> str:
        path = self.run_dir / "scores.json"
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


class Packing(Work):
    """Packs digits into a folder."""

    def words(self) -> list[str]:
        return ["pack", "digits", f"--out={self._out}", "--samples-per-shard=50"]

    @property
    def _out(self) -> str:
        return f"{self.folder}/out"

    def is_at(self, moment: str, how: str) -> bool:
        return moment == "start" or how == "early" or any((self.folder / "out").rglob("*.tar"))

    def digest(self) -> str:
        out = self.folder / "out"
        return json.dumps(file_hashes(out), sort_keys=True) if (out / "manifest.json").exists() else ""

    def message(self) -> str:
        return self.log().strip().splitlines()[-1]


class StoredPacking(Packing):
    """Packs digits into the store."""

    @property
    def _out(self) -> str:
        return self.own_url

    def is_at(self, moment: str, how: str) -> bool:
        return moment == "start" or how == "early" or self.proxy.num_requests > 5

    def digest(self) -> str:
        store = open_store(self.own_url)
        if not store.exists("manifest.json"):
            return ""
        return json.dumps({name: hashlib.sha256(store.read(name)).hexdigest() for name in sorted(store.list(""))})


class Chain(Work):
    """A chain that packs and then trains, with a gate in between."""

    def words(self) -> list[str]:
        return [f"{self.folder}/chain.yaml"]

    def __init__(self, cluster: SlurmCluster, shared: Shared, folder: Path) -> None:
        super().__init__(cluster, shared, folder)
        self.run_dir = folder / "chain"

    def submit(self) -> None:
        steps = [
            {"name": "pack", "stage": "pack", "recipe": "digits", "flags": self.pack_flags()},
            {
                "name": "pretrain",
                "stage": "pretrain",
                "recipe": "digits_smoke",
                "data": "pack",
                "flags": ["--steps=10", "--global-batch=32", "--schedule.warmup-steps=2"],
            },
        ]
        (self.folder / "chain.yaml").write_text(json.dumps({"folder": str(self.run_dir), "steps": steps}))
        self.submit_by_patchline(*self.words())

    def pack_flags(self) -> list[str]:
        """Returns the flags that say where the dataset goes. By default, it goes into the chain's folder."""
        return []

    def is_at(self, moment: str, how: str) -> bool:  # noqa: ARG002 - a gate is there for a moment
        return True

    def is_over(self) -> bool:
        state = self.run_dir / "chain"
        if any((state / name).exists() for name in ("done", "gave-up")):
            return True
        return not self.has_jobs()

    def end(self) -> str:
        state = self.run_dir / "chain"
        return next((name for name in ("done", "gave-up") if (state / name).exists()), "it has no job left")

    def batch_host(self) -> str:
        running = self.cluster.command("squeue", "--noheader", "--me", "--states=RUNNING", "--format=%B").split()
        return running[0] if running else "n1"

    def digest(self) -> str:
        path = self.run_dir / "pretrain" / "weights" / "model.safetensors"
        return hashlib.sha256(path.read_bytes()).hexdigest() if self.end() == "done" and path.exists() else ""

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in (self.run_dir / "chain" / "jobs").glob("*.out"))


class StoredChain(Chain):
    """The same chain, with the dataset in the store."""

    def pack_flags(self) -> list[str]:
        return [f"--out={self.own_url}"]


_KINDS: dict[str, tuple[type[Work], type[Work]]] = {
    "writer": (Training, StoredTraining),
    "gate": (Chain, StoredChain),
    "evaluation": (Evaluation, Evaluation),
    "packing task": (Packing, StoredPacking),
}


def kind_of(place: str, *, is_stored: bool, is_recorded: bool) -> type[Work]:
    """Returns the kind of job for a place of the matrix. `is_stored`: whether it writes to the store. `is_recorded`:
    whether `patchline submit` records it."""
    kind = _KINDS.get(place, (Training, Training))[is_stored]
    return RecordedTraining if is_recorded and kind is Training else kind
