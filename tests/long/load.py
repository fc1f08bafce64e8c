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


def main() -> int:
    """Runs the gate and writes each outcome to the results as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=5, help="runs in a row")
    parser.add_argument("--load", type=int, default=2, help="busy loops beside each run")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for number in range(options.times):
        runs.append(one_run(options.load))
        command = f"make test-flaky N={options.times} LOAD={options.load}"
        RESULTS.write_text(json.dumps({"command": command, "load": options.load, "runs": runs}, indent=1) + "\n")
        ended = f"exit code {runs[-1]['exit_code']} after {runs[-1].get('seconds')} s"
        print(f"run {number + 1} of {options.times}: {ended}", flush=True)  # noqa: T201
    return int(any(run["exit_code"] != 0 for run in runs))


if __name__ == "__main__":
    sys.exit(main())
