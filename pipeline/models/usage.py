"""How weights are used: what their logits stand for, and how images are prepared for them. Kept in config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config_values import LossName, refuse_wrong_values
from pipeline.evaluation_transform import EvaluationTransform


@dataclass(frozen=True, kw_only=True)
class Usage:
    """`loss`: what the weights were trained with. The probabilities of softmax add up to 1 over all classes, those of
    sigmoid are each class's own. `transform`: the run's own evaluation. The defaults are taken for weights that do not
    say: those of other libraries, and folders from before this was written down."""

    loss: LossName = "softmax"
    transform: EvaluationTransform = EvaluationTransform()

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="usage.")
        refuse_wrong_values(self.transform, where="usage.transform.")


def usage_of(description: Mapping[str, Any]) -> Usage:
    """What a config.json says under "usage". Raises TypeError or UserError where it makes no sense."""
    said = description.get("usage")
    if said is None:
        return Usage()
    return Usage(**(said | {"transform": EvaluationTransform(**said["transform"])}))
