"""A whole chain under faults, on a real Slurm of two nodes: `python -m tests.soak.chain_faults` (or `make soak`).

The chain packs with an array of four tasks into Ceph's S3 gateway, pre-trains on two nodes, fine-tunes and evaluates.
Once it is left alone. Once the gateway is away for a minute as packing begins, a task of the array is killed, and the
training meets, one after the other: a rank killed, a node vanished (slurmd and all its steps), slurmctld killed and
started again, the gateway away for a minute, scontrol requeue, USR1, and two time limits. It must end by itself with
the losses and the weights of the chain that was left alone.

Writes tests/soak/results/chain_faults.json, with the seconds from each fault to the next new step; from a time limit,
those from the end of the job's start.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jobs.chains.state import ending, read_record_of
from jobs.output import put
from tests.rigs.ceph import CephCluster, Gateway, ceph_cluster
from tests.rigs.slurm import SlurmCluster, SlurmConfig
from tests.rigs.test_ceph import client_of
from tests.rigs.training import losses, resumed_steps

RESULT = Path(__file__).parent / "results" / "chain_faults.json"
PATCHLINE = Path(sys.executable).parent / "patchline"
STEPS, EVERY = 1000, 60  # a fault every so many steps; tests/slurm/test_chain_faults.py has fewer
CHAIN_SECONDS, AWAY_SECONDS = 1800.0, 60.0
BUCKET = "chain"
STAGES = ("pretrain", "finetune")
CHAIN = """\
folder: {folder}
steps:
  - {{name: pack, stage: pack, recipe: digits, flags: [--samples-per-shard=100, "--out={url}"], tasks: 4, at_once: 2}}
  - name: pretrain
    stage: pretrain
    recipe: digits_smoke
    data: pack
    nodes: 2
    time: 30:00
    flags: [--steps={steps}, --global-batch=256, --checkpoint.every-steps=20]
  - name: finetune
    stage: finetune
    recipe: digits_48
    data: pack
    weights: pretrain
    nodes: 2
    flags: [--steps=40, --global-batch=32, --schedule.warmup-steps=5]
  - {{name: evaluate, stage: evaluate, data: pack, weights: finetune}}
"""


class Run:
    """One chain in a folder."""

    def __init__(
        self,
        cluster: SlurmCluster,
        storage: CephCluster,
        keys: Gateway,
        folder: Path,
        *,
        steps: int = STEPS,
        every: int = EVERY,
    ) -> None:
        self.cluster, self.folder, self.began = cluster, folder, time.monotonic()
        self.storage, self.keys, self.steps, self.every = storage, keys, steps, every
        self.pretrain = folder / "chain" / "pretrain"
        self.faults: list[dict[str, Any]] = []

    def say(self, words: str) -> None:
        put(f"{self.folder.name} {time.monotonic() - self.began:6.1f} s  {words}\n")

    def submit(self) -> None:
        self.folder.mkdir()
        keys = self.folder / "keys"
        keys.touch(mode=0o600)
        secret = f"aws_access_key_id={self.keys.access_key}\naws_secret_access_key={self.keys.secret_key}\n"
        keys.write_text(f"[chain]\n{secret}")
        settings = {
            "command": [str(PATCHLINE)],
            "margin_seconds": 30,
            "s3_endpoint": self.keys.endpoint,
            "s3_profile": "chain",
            "setup": [f"export AWS_SHARED_CREDENTIALS_FILE={keys}"],
        }
        (self.folder / "cluster.yaml").write_text(json.dumps(settings))  # JSON is YAML
        url = f"s3://{BUCKET}/{self.folder.name}"
        text = CHAIN.format(folder=json.dumps(str(self.folder / "chain")), steps=self.steps, url=url)
        (self.folder / "chain.yaml").write_text(text)
        words = [str(PATCHLINE), "submit", str(self.folder / "chain.yaml"), f"--cluster={self.folder}/cluster.yaml"]
        environ = self.cluster.job_environment() | {"AWS_SHARED_CREDENTIALS_FILE": str(keys)}
        done = subprocess.run(words, env=environ, check=False, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stderr)

    def step(self) -> int:
        """The last step of pre-training so far."""
        path = self.pretrain / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        while not is_so():
            state = self.folder / "chain" / "chain"
            if time.monotonic() - self.began > CHAIN_SECONDS or (state / "gave-up").exists():
                logs = "\n".join(path.read_text()[-3000:] for path in self.folder.rglob("*.out"))
                raise RuntimeError(f"{what} has not happened\n{logs}\n{self.cluster.log_tail()}")
            time.sleep(0.2)

    def job(self, unit: str) -> int:
        """The newest job of a unit."""
        self.wait(lambda: bool(self.jobs(unit)), f"a job of {unit}")
        return self.jobs(unit)[-1]

    def jobs(self, unit: str) -> list[int]:
        """All jobs of a unit."""
        state = self.folder / "chain" / "chain"
        found = read_record_of(state).jobs if state.exists() else ()
        return [job.job for job in found if (job.unit, job.kind) == (unit, "job")]

    def strike(self, name: str, fault: Callable[[], float | None], *, restarts: bool = True) -> None:
        """Waits for the next step at which there is a fault, and measures the time from it, which the fault may return,
        to the next new step."""
        at = self.every * (len(self.faults) + 1)
        self.wait(lambda: self.step() >= at, f"step {at}")
        num_starts, began = len(resumed_steps(self.pretrain)), time.monotonic()
        began = fault() or began
        self.say(f"{name}, after step {self.step()}")
        if restarts:
            self.wait(lambda: len(resumed_steps(self.pretrain)) > num_starts, f"a start after {name}")
        step = self.step()
        self.wait(lambda: self.step() > step, f"a step after {name}")
        self.faults.append({"fault": name, "step": step, "seconds": round(time.monotonic() - began, 1)})
        self.say(f"goes on after {self.faults[-1]['seconds']} s")

    def finish(self) -> str:
        state = self.folder / "chain" / "chain"
        self.wait(lambda: bool(ending(state)), "the end of the chain")
        self.say(f"ended: {ending(state)}")
        return ending(state)


def ranks_on(cluster: SlurmCluster, node: str) -> list[int]:
    found = []
    for pid in cluster.processes(node=node):
        try:
            words, name = Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/exe").readlink().name
        except OSError:
            continue
        if name.startswith("python") and b"\0pretrain\0" in words:
            found.append(pid)
    return found


def kill_a_rank(run: Run) -> None:
    os.kill(max(ranks_on(run.cluster, "n2")), signal.SIGKILL)


def lose_a_node(run: Run) -> None:
    """It comes back once Slurm has noticed."""
    run.cluster.kill_node("n2")
    run.wait(lambda: "down" in run.cluster.command("sinfo", "--noheader", "--nodes=n2", "--format=%T"), "n2 is down")
    run.cluster.start_node("n2")


def restart_the_controller(run: Run) -> None:
    run.cluster.kill_controller()
    time.sleep(5)
    run.cluster.start_controller()


def reach_the_limit(run: Run) -> float:
    """Sets the limit of the running job to the next whole minute: Slurm sends its signal, and ends what is left. The
    next start has its time again: on a busy machine it may need more than such a minute until it saves."""
    job = run.job("pretrain")
    hours, minutes, _ = (int(part) for part in run.cluster.job(job)["RunTime"].split(":"))
    run.cluster.scontrol("update", f"JobId={job}", f"TimeLimit={hours * 60 + minutes + 1}")
    starts = run.cluster.job(job)["Restarts"]
    run.wait(lambda: run.cluster.job(job)["Restarts"] != starts, "the job is requeued")
    began = time.monotonic()
    run.cluster.scontrol("update", f"JobId={job}", "TimeLimit=30")
    return began


def lose_the_storage(run: Run) -> float:
    """For a minute."""
    run.storage.kill_gateway()
    time.sleep(AWAY_SECONDS)
    run.storage.start_gateway()
    return time.monotonic()


def requeue(run: Run) -> None:
    run.cluster.scontrol("requeue", str(run.job("pretrain")))


def signal_the_script(run: Run) -> None:
    run.cluster.command("scancel", "--batch", "--signal=USR1", str(run.job("pretrain")))


def break_things(run: Run) -> None:
    """A task, a rank, a node, the controller and the storage are lost, one after the other."""
    array = run.job("pack.shards")
    run.wait(lambda: "RUNNING" in run.cluster.squeue_state(array), "packing runs")
    run.cluster.command("scancel", f"{array}_0")
    run.say("task 0 of the packing array is killed")
    run.strike("SIGKILL of a rank", lambda: kill_a_rank(run))
    run.strike("a node vanishes, and comes back", lambda: lose_a_node(run))
    run.strike("slurmctld is killed, and starts again", lambda: restart_the_controller(run), restarts=False)
    run.strike("S3 is away for a minute", lambda: lose_the_storage(run), restarts=False)


def interrupt(run: Run) -> None:
    """The training is requeued by hand, by a signal and by two time limits, one after the other."""
    run.strike("scontrol requeue", lambda: requeue(run))
    run.strike("scancel --batch --signal=USR1", lambda: signal_the_script(run))
    run.strike("the time limit", lambda: reach_the_limit(run))
    run.strike("the time limit again", lambda: reach_the_limit(run))


def weights(run_dir: Path) -> str:
    return hashlib.sha256((run_dir / "weights" / "model.safetensors").read_bytes()).hexdigest()


def main() -> int:
    """0 if the disturbed chain equals the other one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULT)
    out = parser.parse_args().out
    with (
        tempfile.TemporaryDirectory() as name,
        SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster,
        ceph_cluster(Path(name) / "ceph") as storage,
    ):
        keys = storage.gateway()
        client_of(keys, secret_key=keys.secret_key).create_bucket(Bucket=BUCKET)
        left_alone = Run(cluster, storage, keys, Path(name) / "alone")
        disturbed = Run(cluster, storage, keys, Path(name) / "disturbed")
        left_alone.submit()
        ends = [left_alone.finish()]
        disturbed.began = time.monotonic()
        disturbed.submit()
        lose_the_storage(disturbed)
        disturbed.say("the storage was away as packing began")
        break_things(disturbed)
        interrupt(disturbed)
        ends.append(disturbed.finish())
        pairs = [(left_alone.folder / "chain" / name, disturbed.folder / "chain" / name) for name in STAGES]
        tries = (disturbed.pretrain / "submit" / "tries.jsonl").read_text().splitlines()
        are_equal = {
            "losses": all(losses(one) == losses(other) for one, other in pairs),
            "weights": all(weights(one) == weights(other) for one, other in pairs),
        }
        result = {
            "command": "python -m tests.soak.chain_faults",
            "ends": ends,
            "steps": {other.name: len(losses(other)) for _, other in pairs},
            "equal": are_equal,
            "arrays_of_packing": len(disturbed.jobs("pack.shards")),
            "tries_of_pretraining": [json.loads(line)["end"] for line in tries],
            "seconds_from_fault_to_next_step": disturbed.faults,
        }
    put(json.dumps(result, indent=1) + "\n")
    out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if ends == ["done", "done"] and all(are_equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
