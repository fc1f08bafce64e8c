"""Evaluation recipes of earlier versions: `patchline evaluate RECIPE --weights WEIGHTS`. `patchline evaluate WEIGHTS`
prepares images as the weights' own evaluation does, and takes other transforms as flags."""

from collections.abc import Callable

from jobs.recipes.paper_views import INCEPTION_448
from jobs.settings.models import EvaluateJob
from pipeline.evaluation.config import EvaluatedData
from pipeline.shared_settings import EvaluationTransform


def resize() -> EvaluateJob:
    """Direct resize to the model's size, as the paper's own code evaluates fine-tuned models; for square datasets
    (digits, CIFAR) too.

    Images are upright; add --data.transform.no-exif for weights of the papers' recipes, as their authors evaluate.
    Source: vision_transformer's input pipeline.
    Command: patchline evaluate RUN --data.url URL --data.transform.mode resize
    """
    return EvaluateJob(data=EvaluatedData(transform=EvaluationTransform(mode="resize")))


def central_crop() -> EvaluateJob:
    """Short side to 256/224 of the model's size by areas, then the central crop, as big_vision evaluates pre-training.

    Images are upright; add --data.transform.no-exif for weights of the papers' recipes, as their authors evaluate.
    Source: big_vision's resize_small(256) and central_crop(224).
    Command: patchline evaluate RUN --data.url URL --data.transform.mode central_crop --data.transform.filter area
    """
    return EvaluateJob(data=EvaluatedData(transform=EvaluationTransform(mode="central_crop", filter="area")))


def transfer_448() -> EvaluateJob:
    """Short side to 448 px by areas, then the central crop, as big_vision evaluates weights fine-tuned at 384 px.

    Images as they are stored. Source: big_vision's configs/transfer.py: resize_small(448) and central_crop(384).
    Command: patchline evaluate RUN --data.url URL --data.transform.mode central_crop --data.transform.filter area
    --data.transform.short-side 448 --data.transform.no-exif
    """
    return EvaluateJob(data=EvaluatedData(transform=INCEPTION_448.evaluation))


RECIPES: dict[str, Callable[[], EvaluateJob]] = {
    "resize": resize,
    "central_crop": central_crop,
    "transfer_448": transfer_448,
}
