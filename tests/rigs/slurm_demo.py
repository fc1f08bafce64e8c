"""`make slurm-demo`: a real Slurm of two nodes on this machine, a chain of jobs on handwritten digits, and the kill of
a rank in the middle. Ends with the report of the run, and ends every process that it started.

python -m tests.rigs.slurm_demo [--folder slurm-demo-run] [--steps 150]
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.chains.state import DONE, ending, read_plan_of, read_record_of, state_folder
from jobs.output import put
from shards.files.local_files import read_tail
from shards.output.quantities import clock
from tests.rigs.slurm import SlurmCluster, SlurmConfig, missing_programs

PATCHLINE = Path(sys.executable).parent / "patchline"
DATA, RUN = "pack", "pretrain"
MOST_SECONDS, LOOK_SECONDS, STEP_LINE_SECONDS = 900.0, 0.5, 10.0
CHAIN = """\
folder: {folder}
steps:
  - {{name: pack, stage: pack, recipe: digits, flags: [--samples-per-shard=250], tasks: 4, at_once: 2}}
  - name: pretrain
    stage: pretrain
    recipe: digits_smoke
    data: pack
    nodes: 2
    flags: [--steps={steps}, --checkpoint.every-steps=25]
  - {{name: pack-test, stage: pack, recipe: digits, flags: [--split=test]}}
  - {{name: evaluate, stage: evaluate, data: pack-test, weights: pretrain}}
  - {{name: report, stage: report, run: pretrain}}
"""


class Demo:
    """One run of the demonstration."""

    def __init__(self, cluster: SlurmCluster, folder: Path, *, steps: int) -> None:
        self.cluster, self.folder, self.steps = cluster, folder, steps
        self.began = time.monotonic()
        self.told: set[str] = set()
        self.has_killed = False
        self._at, self._step = 0.0, 0

    def say(self, words: str) -> None:
        """A line with the time since the start."""
        put(f"{clock(time.monotonic() - self.began):>5}  {words}\n")

    def once(self, words: str) -> None:
        """A line that is not repeated."""
        if words not in self.told:
            self.told.add(words)
            self.say(words)

    def submit(self) -> None:
        """The chain, with two nodes of one CPU each."""
        settings, chain = self.folder / "cluster.yaml", self.folder / "chain.yaml"
        settings.write_text(f"command: [{json.dumps(str(PATCHLINE))}]\ntime_limit: 30:00\n")
        chain.write_text(CHAIN.format(folder=json.dumps(str(self.folder / "chain-of-digits")), steps=self.steps))
        self.say(f"patchline submit {chain.name} --cluster {settings.name}")
        words = [str(PATCHLINE), "submit", str(chain), f"--cluster={settings}"]
        subprocess.run(
            words, env=self.cluster.job_environment(), cwd=self.folder, check=True, stderr=subprocess.DEVNULL
        )

    def watch(self) -> str:
        """Tells what happens until the chain is over, and kills a rank on the way; how the chain ended."""
        state = self.folder / "chain-of-digits" / "chain"
        while not (ended := ending(state)) or self.cluster.command("squeue", "--noheader").strip():
            if time.monotonic() - self.began > MOST_SECONDS:
                raise TimeoutError(f"the chain is not over after {MOST_SECONDS:.0f} s\n{self.cluster.log_tail()}")
            self._tell_chain()
            self._tell_training()
            time.sleep(LOOK_SECONDS)
        self._tell_chain()
        return ended

    def _tell_chain(self) -> None:
        state = state_folder(str(self.folder / "chain-of-digits"))
        record = read_record_of(state)
        for unit in read_plan_of(state).units:
            for job in record.jobs_of(unit.name):
                tasks = f", {len(job.tasks)} tasks" if len(job.tasks) > 1 else ""
                self.once(f"{unit.name}: job {job.job} submitted{tasks}")
            if unit.name in record.complete:
                self.once(f"{unit.name}: complete, says its gate")

    def _tell_training(self) -> None:
        run_dir = self.folder / "chain-of-digits" / RUN
        for line in _lines(run_dir / "submit" / "tries.jsonl"):
            codes = ", ".join(str(code) for code in line["exit_codes"])
            self.once(f"pretrain: try {line['try'] + 1} ended: {line['end']} (exit codes {codes})")
        for line in _lines(run_dir / "metrics.jsonl"):
            self._tell_step(int(line["step"]), float(line["loss"]))

    def _tell_step(self, step: int, loss: float) -> None:
        is_new = step > self._step and time.monotonic() - self._at > STEP_LINE_SECONDS
        if is_new or (step == self.steps and step > self._step):
            self._at, self._step = time.monotonic(), step
            self.say(f"pretrain: step {step} of {self.steps}, loss {loss:.3f}")
        if step >= self.steps // 2 and not self.has_killed:
            self.has_killed = True
            pid = self._second_rank()
            os.kill(pid, signal.SIGKILL)
            self.say(f"KILLED: SIGKILL for rank 1 (process {pid}), after step {step}")

    def _second_rank(self) -> int:
        for pid in self.cluster.processes(node="n2"):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                name = Path(f"/proc/{pid}/exe").readlink().name
            except OSError:  # it has ended since
                continue
            if name.startswith("python") and b"pretrain" in words:
                return pid
        raise RuntimeError(f"no rank runs on n2\n{self.cluster.log_tail()}")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    tail = read_tail(path, most_bytes=1 << 14)
    for line in tail.data.split(b"\n")[:-1] if tail else ():
        try:
            yield json.loads(line)
        except ValueError:  # the first one may be cut
            continue


def main() -> int:
    """Runs the demonstration; 0 if the chain was done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("slurm-demo-run"))
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    if missing := missing_programs():
        sys.stderr.write(f"make slurm-demo: {', '.join(missing)} not found (Debian: apt-get install slurm-wlm munge)\n")
        return 1
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = arguments.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster:
            demo = Demo(cluster, folder, steps=arguments.steps)
            demo.say("munged, slurmctld and slurmd on n1 and n2 are up, on loopback")
            demo.submit()
            ended = demo.watch()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; all of it is ended\n")
        return 130
    run_dir = folder / "chain-of-digits" / RUN
    demo.say(f"the chain is over: {ended}; the report of its run:\n")
    words = [str(PATCHLINE), "report", str(run_dir)]
    return subprocess.run(words, check=False).returncode if ended == DONE else 1


if __name__ == "__main__":
    sys.exit(main())
