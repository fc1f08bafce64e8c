"""What one check of a cluster or a store found: a line of the table of `patchline preflight`."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`value`: what was found; `allowed`: what would be right, and `todo`: what to do, both empty if all is well."""

    name: str
    status: Status
    value: str
    allowed: str = ""
    todo: str = ""
