"""metrics.jsonl (one object a line with `step` and `loss`) and TensorBoard, written by rank 0."""

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter


class Metrics:
    """A run's curves. Opened at `step`, it cuts away what a lost continuation had written beyond it."""

    def __init__(self, run_dir: Path, *, step: int) -> None:
        self._path = run_dir / "metrics.jsonl"
        cut_after(self._path, step=step)
        self._file = self._path.open("a", buffering=1)
        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line and one point a curve. Floats are written so that they read back bit for bit."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def amend(self, step: int, values: dict[str, float]) -> None:
        """More values of a step that has its line, the last, already."""
        lines = self._path.read_text().splitlines()
        before = json.loads(lines.pop()) if lines and _step_of(lines[-1]) == step else {"step": step}
        self._file.close()
        cut_after(self._path, step=step - 1)
        self._file = self._path.open("a", buffering=1)
        self._file.write(json.dumps(before | values) + "\n")
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes and closes both."""
        self._file.close()
        self._board.close()


def cut_after(path: Path, *, step: int) -> None:
    """Drops the lines of steps above `step`, and a half-written last line."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
    waiting = path.with_suffix(".part")
    waiting.write_text("".join(line + "\n" for line in kept))
    waiting.replace(path)


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete line of a run's metrics.jsonl."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if _step_of(line) >= 0 and _is_complete(line)]


def _is_complete(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


def _step_of(line: str) -> float:
    if not _is_complete(line):
        return float("inf")
    return float(json.loads(line)["step"])
