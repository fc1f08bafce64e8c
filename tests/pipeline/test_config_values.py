"""Fields of configurations hold what their types say, or the message says what is allowed."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest

from pipeline.config_values import refuse_wrong_values
from pipeline.models.config import ModelConfig
from pipeline.training.config import OptimizerConfig, TrainingJob
from pipeline.training.schedule import ScheduleConfig
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Example:
    count: int = 1
    most: int | None = None
    share: float = 0.5
    word: Literal["a", "b"] = "a"
    flag: bool = False
    name: str = ""
    units: tuple[int, ...] | None = None
    inner: ModelConfig = ModelConfig()


@pytest.mark.parametrize(
    "fields",
    [
        {"count": -3, "share": 1, "word": "b", "flag": True, "name": "x"},
        {"most": 3, "units": (1, 2)},
        {"most": None, "units": None, "share": -1e300},
        {"inner": "not looked at"},
    ],
)
def test_values_of_their_type_pass(fields: dict[str, Any]) -> None:
    refuse_wrong_values(Example(**fields), where="x.")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 1.0}, "x.count is 1.0; allowed is a whole number"),
        ({"count": True}, "x.count is True; allowed is a whole number"),
        ({"count": None}, "x.count is None; allowed is a whole number"),
        ({"most": "3"}, "x.most is '3'; allowed is a whole number, or none"),
        ({"share": math.nan}, "x.share is nan; allowed is a finite number"),
        ({"share": math.inf}, "x.share is inf; allowed is a finite number"),
        ({"share": False}, "x.share is False; allowed is a finite number"),
        ({"share": 10**400}, "x.share is 1000.*; allowed is a finite number"),
        ({"word": "c"}, "x.word is 'c'; allowed are a, b"),
        ({"word": ["a"]}, r"x.word is \['a'\]; allowed are a, b"),
        ({"flag": 1}, "x.flag is 1; allowed are true and false"),
        ({"name": 3}, "x.name is 3; allowed is a text"),
        ({"units": (1, 2.0)}, r"x.units is \(1, 2.0\); allowed are whole numbers, or none"),
        ({"units": 3}, "x.units is 3; allowed are whole numbers"),
    ],
)
def test_other_values_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        refuse_wrong_values(Example(**fields), where="x.")


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (ModelConfig(), {"image_size": 224.0}, "model.image_size is 224.0"),
        (ModelConfig(), {"num_classes": True}, "model.num_classes is True"),
        (ModelConfig(), {"layer_norm_epsilon": math.nan}, "model.layer_norm_epsilon is nan"),
        (ModelConfig(), {"head_bias": math.nan}, "model.head_bias is nan"),
        (ModelConfig(), {"position_std": math.inf}, "model.position_std is inf"),
        (ModelConfig(), {"pooling": "mean"}, "model.pooling is 'mean'; allowed are token, average"),
        (ScheduleConfig(), {"learning_rate": math.nan}, "schedule.learning_rate is nan"),
        (ScheduleConfig(), {"final_learning_rate": math.inf}, "schedule.final_learning_rate is inf"),
        (ScheduleConfig(), {"warmup_steps": 1.5}, "schedule.warmup_steps is 1.5"),
        (ScheduleConfig(), {"decay": "step"}, "schedule.decay is 'step'; allowed are linear, cosine, constant"),
        (OptimizerConfig(), {"name": "rmsprop"}, "optimizer.name is 'rmsprop'; allowed are adamw, sgd"),
        (OptimizerConfig(), {"decay": "some"}, "optimizer.decay is 'some'; allowed are kernels, all"),
        (OptimizerConfig(), {"weight_decay": math.inf}, "optimizer.weight_decay is inf"),
        (OptimizerConfig(), {"epsilon": math.nan}, "optimizer.epsilon is nan"),
        (OptimizerConfig(), {"head_decay": math.nan}, "optimizer.head_decay is nan"),
        (TrainingJob(), {"clip_norm": math.nan}, "^clip_norm is nan"),
        (TrainingJob(), {"label_smoothing": math.nan}, "label_smoothing is nan"),
        (TrainingJob(), {"ema_decay": math.inf}, "ema_decay is inf"),
        (TrainingJob(), {"steps": 1e3}, "^steps is 1000.0; allowed is a whole number"),
    ],
)
def test_every_configuration_of_a_run_is_checked(config: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replace(config, **fields)
