"""The gate several times in a row with busy loops beside it: `make test-flaky N=5 LOAD=2`."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "load.json"
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """Runs processes that compute all the time. They end with the block, or with this process."""
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
        if ended := [loop.returncode for loop in loops if loop.poll() is not None]:
            raise RuntimeError(f"busy loops ended with {ended}")
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def one_run(load: int) -> dict[str, Any]:
    """Runs `make test` once beside the load and returns its outcome."""
    with tempfile.TemporaryDirectory() as folder, busy_loops(load):
        path = Path(folder) / "outcome.json"
        command = ["make", "--no-print-directory", "test", f"ARGS=--outcome={path}"]
        done = subprocess.run(command, cwd=CHECKOUT, check=False)
        outcome: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {**outcome, "exit_code": done.returncode}


def row_so_far(load: int, times: int) -> list[dict[str, Any]]:
    """Returns the runs of an earlier call that was interrupted: all passed, beside the same load, fewer than asked."""
    if not RESULTS.exists():
        return []
    kept = json.loads(RESULTS.read_text())
    runs: list[dict[str, Any]] = kept["runs"]
    is_open = kept["load"] == load and len(runs) < times and all(run["exit_code"] == 0 for run in runs)
    return runs if is_open else []


def main() -> int:
    """Runs the gate until it has passed so many times in a row, and writes each outcome as soon as it is known.

    A row takes hours, so a later call goes on with the row of an earlier one. A run that fails ends it.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="runs in a row")
    parser.add_argument("--load", type=int, default=2, help="busy loops beside each run")
    options = parser.parse_args()
    command = f"make test-flaky N={options.times} LOAD={options.load}"
    runs = row_so_far(options.load, options.times)
    while len(runs) < options.times:
        runs.append(one_run(options.load))
        RESULTS.write_text(json.dumps({"command": command, "load": options.load, "runs": runs}, indent=1) + "\n")
        ended = f"exit code {runs[-1]['exit_code']} after {runs[-1].get('seconds')} s"
        print(f"run {len(runs)} of {options.times}: {ended}", flush=True)  # noqa: T201
        if runs[-1]["exit_code"] != 0:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
