"""Evaluation recipes: which transform a dataset is evaluated with."""

from collections.abc import Callable

from jobs.model_jobs import EvaluateJob
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation_transform import EvaluationTransform


def resize() -> EvaluateJob:
    """Direct resize to the model's size, as the paper's own code evaluates fine-tuned models; for square datasets
    (digits, CIFAR) too.

    Source: vision_transformer's input pipeline.
    Command: patchline evaluate resize --weights RUN/weights --data.url URL
    """
    return EvaluateJob(data=EvaluationConfig(transform=EvaluationTransform(mode="resize")))


def central_crop() -> EvaluateJob:
    """Short side to 256/224 of the model's size, then the central crop, as big_vision evaluates pre-training.

    Source: big_vision's resize_small(256) and central_crop(224).
    Command: patchline evaluate central_crop --weights RUN/weights --data.url URL
    """
    return EvaluateJob(data=EvaluationConfig(transform=EvaluationTransform(mode="central_crop")))


RECIPES: dict[str, Callable[[], EvaluateJob]] = {"resize": resize, "central_crop": central_crop}
