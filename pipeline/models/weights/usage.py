"""Describes how weights are used: what their logits mean, how images are prepared for them, and what their classes are
called.

config.json has all three. Names are made unique and complete: ImageNet's own list has two cranes, a bird and a machine.
Evaluation and fine-tuning find classes by their names, so images of two classes with one name would be counted wrong.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.shared_settings import EvaluationTransform, LossName
from shards.class_names import listed
from shards.config_values import refuse_wrong_values, shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.typed_json import record_from

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """How to read logits and prepare images. Weights of other libraries that do not say this get the defaults."""

    loss: LossName = "softmax"
    """Loss of the training: with softmax, probabilities add up to 1 over all classes; with sigmoid, each class has its
    own."""
    transform: EvaluationTransform = EvaluationTransform()
    """How the run's own evaluation prepares images."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="usage.")


DEFAULT_USAGE = Usage()


def usage_of(description: Mapping[str, Any]) -> Usage:
    """Returns what a config.json says under "usage". Raises ValueError or UserError if it is invalid."""
    said = description.get("usage")
    if said is None:
        return Usage()
    try:
        return record_from(Usage, said, where="usage.")
    except UserError as error:
        raise UserError(f"usage.{error}") from error


def unique_labels(labels: tuple[str, ...], *, where: str) -> tuple[str, ...]:
    """Returns the names made unique: a repeated name gets the number of its class in brackets, and a warning is logged.
    The order does not change."""
    taken = set(labels)
    seen: set[str] = set()
    named = []
    for number, label in enumerate(labels):
        name = label
        while name in seen or (name != label and name in taken):
            name = f"{name} ({number})"
        seen.add(name)
        named.append(name)
    again = [name for name, label in zip(named, labels, strict=True) if name != label]
    if again:
        log.warning("%s: %d names are of a class before, too; they have ids: %s", where, len(again), listed(again))
    return tuple(named)


def texts_of(names: Sequence[object], *, where: str) -> tuple[str, ...]:
    """Returns the names of classes in a config.json as texts. Whole numbers are allowed, too; raises InvalidDataError
    for anything else."""
    for number, name in enumerate(names):
        if type(name) is not str and type(name) is not int:
            raise InvalidDataError(
                f"the name of class {number} in config.json beside {where!r} is {shown_value(name)}; allowed: a text"
            )
    return tuple(str(name) for name in names)


def completed_labels(labels: tuple[str, ...], *, num_classes: int, where: str) -> tuple[str, ...]:
    """Returns one name per class: if the dataset has fewer names, the other classes are called "unnamed 12"."""
    unnamed = tuple(f"unnamed {number}" for number in range(len(labels), num_classes))
    return unique_labels((*labels[:num_classes], *unnamed), where=where)
