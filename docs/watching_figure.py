"""Draws docs/status.svg and docs/watch.svg: a real run on a real Slurm of two nodes, one of which is drained.

python -m docs.watching_figure      # needs tmux and Debian's slurm-wlm and munge; about two minutes on two cores
"""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from docs.terminal_figure import draw
from tests.rigs.slurm import SlurmCluster, SlurmConfig

DOCS = Path(__file__).resolve().parent
PATCHLINE = Path(sys.executable).parent / "patchline"
COLUMNS, ROWS = 80, 24
FIRST_STEP, DEADLINE_SECONDS = 150, 240.0
SUBMIT = "submit pretrain digits_smoke --cluster cluster.yaml --nodes 2 --time 10 --data.url data/digits"


def main() -> None:
    """Runs the cluster, the run and both commands, and writes the pictures."""
    with SlurmCluster(SlurmConfig(num_nodes=2, cpus_per_node=1)) as cluster:
        folder, environ = cluster.folder, cluster.job_environment()
        (folder / "cluster.yaml").write_text(f"partition: main\ncommand: [{PATCHLINE}]\n")
        for words in ("pack digits --out data/digits", f"{SUBMIT} --run-dir runs/digits --steps 3000"):
            subprocess.run([PATCHLINE, *words.split()], cwd=folder, env=environ, check=True)
        metrics = folder / "runs" / "digits" / "metrics.jsonl"
        _wait(lambda: metrics.exists() and f'"step": {FIRST_STEP},' in metrics.read_text(), "the run's first steps")
        cluster.scontrol("update", "NodeName=n2", "State=drain", "Reason=bad disk")
        for name, mark in (("status", "State=resume"), ("watch", "State=resume")):
            screen = _screen(folder, environ, name, mark)
            picture = draw(screen, title=f"patchline {name} runs/digits", columns=COLUMNS)
            (DOCS / f"{name}.svg").write_text(picture)


def _screen(folder: Path, environ: dict[str, str], name: str, mark: str) -> str:
    """The screen of `patchline NAME runs/digits`, with its colours, once the mark is on it."""
    tmux = ["tmux", "-L", folder.name]  # a server of our own
    shown = f"printf '$ patchline {name} runs/digits\\n'; '{PATCHLINE}' {name} runs/digits; sleep 60"
    size = ["-x", str(COLUMNS), "-y", str(ROWS), "-c", str(folder)]
    own = environ | {"TERM": "xterm-256color", "LANG": "C.UTF-8"}
    subprocess.run([*tmux, "-f", "/dev/null", "new-session", "-d", *size, shown], env=own, check=True)
    try:
        _wait(lambda: mark in _captured(tmux), f"the screen of {name}")
        return _captured(tmux, "-e")
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)


def _captured(tmux: list[str], *more: str) -> str:
    return subprocess.run([*tmux, "capture-pane", "-p", *more], check=True, capture_output=True, text=True).stdout


def _wait(is_there: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not is_there():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come in {DEADLINE_SECONDS:.0f} s")
        time.sleep(0.3)


if __name__ == "__main__":
    main()
