"""Holds the dataclasses of the jobs. These modules load no large library."""

from dataclasses import dataclass

from shards.config_values import refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class CheckedJob:
    """A job whose values are checked by the types and ranges of its fields."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
