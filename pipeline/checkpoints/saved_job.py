"""The job of a run as its checkpoints and its DONE marker hold it: what decides whether another job continues it. Pure.

A checkpoint's `record` holds more, for people and reports, and the micro-batch that a run on as many ranks keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from pipeline.models.config import ModelConfig
from shards.errors import UserError
from shards.schema.config_values import shown_value

STEPS = "steps"


@dataclass(frozen=True, kw_only=True)
class SavedJob:
    """`model` and `job` are the fields of the model's configuration and of the whole resolved job; `optimizer` is its
    name. Older versions left `precision` empty in DONE markers and did not save `job`. ValueError for a model that this
    version cannot build."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    model: dict[str, Any]
    loss: str
    optimizer: str
    ema_decay: float
    precision: str
    job: dict[str, Any]

    def __post_init__(self) -> None:
        try:
            ModelConfig(**self.model)
        except (TypeError, UserError) as error:  # TypeError: a field of a later version
            raise ValueError(f"its model cannot be used: {error}") from error
        steps = self.job.get(STEPS, 1)
        if type(steps) is not int or steps < 1:
            raise ValueError(f"its {STEPS} is {shown_value(steps)}; allowed: a whole number, 1 or more")


def saved_job_of_format_1(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SavedJob from a manifest's record, or a DONE marker's job, of the first format."""
    return {
        "model": record["model"],
        "loss": record["loss"],
        "optimizer": record["optimizer"],
        "ema_decay": record.get("ema_decay", record.get("average_factor", 0.0)),  # the name in older versions
        "precision": record.get("precision", record.get("engine", {}).get("precision", "")),
        "job": record.get("job", {}),
    }


def position_of_format_1(record: Mapping[str, Any], data_state: Mapping[str, Any], *, step: int) -> dict[str, Any]:
    """The fields of StreamPosition, which the first format did not hold as one."""
    return {"next_step": step, **data_state, "image_size": record["model"]["image_size"]}
