"""`.ci/run` on a clean clone of the last commit, as on a slow machine: `make time-ci`.

The CPU is told to do without AVX-512 and bf16. The seconds go to tests/long/clean_clone.json.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.rigs.outcome import circumstances

CHECKOUT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "clean_clone.json"
SLOW_CPU = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def main() -> int:
    """Clones, runs, and writes the seconds beside the commit and the CPU."""
    os.environ.update(SLOW_CPU)
    os.environ.setdefault("PATCHLINE_TEST_DATA", str(CHECKOUT.parent / "shared" / "data"))
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "patchline"
        subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(clone)], check=True)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True)
        commit = {"commit": head.stdout.strip()}
        began = time.monotonic()
        done = subprocess.run(["bash", ".ci/run"], cwd=clone, check=False, env={**os.environ, "CI": "true"})
        seconds = round(time.monotonic() - began)
    record = {"command": "make time-ci", **circumstances(), **commit, "exit_code": done.returncode, "seconds": seconds}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    print(f"exit code {done.returncode} after {seconds} s")  # noqa: T201
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
