"""`patchline example cluster.yaml`: prints an example file, with a comment on every setting, for you to edit."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs import exit_codes
from jobs.output import put
from jobs.settings import CheckedJob
from shards.errors import UserError

_FOLDERS = (Path(__file__).parent / "examples", Path(__file__).parents[1] / "slurm")  # in a wheel, in a checkout


@dataclass(frozen=True, kw_only=True)
class ExampleJob(CheckedJob):
    """The example file to print."""

    name: Literal["cluster.yaml", "chain.yaml"] = "cluster.yaml"
    """File to print: cluster.yaml, your cluster's settings for `submit` and `preflight`; or chain.yaml, stages that run
    one after another."""


def run(job: ExampleJob) -> int:
    """Prints the file."""
    name = job.name.replace(".yaml", ".example.yaml")
    found = next((folder / name for folder in _FOLDERS if (folder / name).is_file()), None)
    if found is None:
        raise UserError(f"{name} is missing from this installation; install patchline again")
    put(found.read_text(encoding="utf-8"))
    return exit_codes.DONE
