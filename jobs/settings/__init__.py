"""Holds the dataclasses of the jobs. These modules load no large library.

A job composes settings. A setting's default, sentence and range are in the dataclass of the room that obeys it. A job
takes the default of a single setting (`seed: int = PackSpec.seed`), or a whole dataclass as a group (`data:
DataConfig`).
"""

from dataclasses import dataclass
from typing import Annotated

from shards.config_values import Range, refuse_wrong_values

NumNodes = Annotated[int, Range(1, 100_000)]  # that a job asks for
NumLinks = Annotated[int, Range(1, 1000)]  # jobs in a row that continue a run


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The setting of jobs that are recorded only on request."""

    run_dir: str = ""
    """Folder that job.yaml is written to; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """A job whose values are checked by the types and ranges of its fields."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
