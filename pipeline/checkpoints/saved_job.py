"""The job of a run as its checkpoints and its DONE marker hold it: what decides whether another job continues it. Pure.

A checkpoint's `record` holds more, for people and reports, and the micro-batch that a run on as many ranks keeps.
"""

from dataclasses import dataclass, fields
from typing import Any

from pydantic import ConfigDict

from pipeline.models.config import ModelConfig
from shards.config_values import shown_value
from shards.errors import UserError

STEPS = "steps"


@dataclass(frozen=True, kw_only=True)
class SavedJob:
    """`model` and `job` are the fields of the model's configuration and of the whole resolved job; `optimizer` is its
    name. ValueError for a model that this version cannot build, or that lacks fields."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    model: dict[str, Any]
    loss: str
    optimizer: str
    ema_decay: float
    precision: str
    job: dict[str, Any]

    def __post_init__(self) -> None:
        if others := sorted(self.model.keys() ^ {each.name for each in fields(ModelConfig)}):
            what = "the unknown field" if others[0] in self.model else "no"
            raise ValueError(f"its model has {what} {shown_value(others[0])}: it is of another version of Patchline")
        try:
            ModelConfig(**self.model)
        except UserError as error:
            raise ValueError(f"its model cannot be used: {error}") from error
        steps = self.job.get(STEPS)
        if type(steps) is not int or steps < 1:
            raise ValueError(f"its {STEPS} is {shown_value(steps)}; allowed: a whole number, 1 or more")
