"""What the guard found at a step: one line each in RUN/guard.jsonl, which is only ever appended to."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from shards.files.json_lines import naming

FILE_NAME = "guard.jsonl"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A bad step and its evidence. Its batch has the positions `first_position` to `end_position` - 1 of the sample
    order, those of `data_step`. `median`, `mad` and `z` are those of spikes.py. `was_skipped`: no update was made."""

    kind: Literal["spike", "non_finite"]
    step: int
    data_step: int
    first_position: int
    end_position: int
    loss: float
    median: float
    mad: float
    z: float
    grad_norm: float
    learning_rate: float
    was_skipped: bool

    def words(self) -> str:
        """In a sentence without its end."""
        if self.kind == "spike":
            history = f"z {self.z:.1f}, median {self.median:.4g}, MAD {self.mad:.3g}"
            return f"step {self.step}: the loss {self.loss:.4g} is a spike ({history})"
        return f"step {self.step}: the loss {self.loss:.4g} or its gradient (norm {self.grad_norm:.4g}) is not finite"


def add_finding(run_dir: str, finding: Finding, *, action: str, **more: int) -> None:
    """Appends a finding and what was done about it, on a line of its own even if a killed process left half a line
    before; on rank 0."""
    path = Path(run_dir) / FILE_NAME
    line = json.dumps({**asdict(finding), "action": action, **more}) + "\n"
    with naming(path), path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - 1))
        file.write((b"\n" if file.read(1) not in (b"", b"\n") else b"") + line.encode())
