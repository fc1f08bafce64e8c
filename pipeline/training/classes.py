"""How many classes a run's model has, and the warning if its data has fewer."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from pipeline.data.evaluation import label_map
from pipeline.data.training_data import TrainingData
from pipeline.models.weights.folder import open_weights
from pipeline.training.settings.job import TrainingJob
from shards.dataset import Dataset
from shards.errors import UserError
from shards.schema.config_values import shown_value

log = logging.getLogger(__name__)


def with_classes(job: TrainingJob, data: TrainingData, held_out: Sequence[Dataset], *, say: bool) -> TrainingJob:
    """The job with the data's number of classes, unless it has its own; more than the data has are a warning (`say`:
    log it). UserError for fewer, and for held-out datasets with other labels."""
    if job.model.masked_patches:
        return job  # its classes are colours
    wanted = job.model.num_classes or data.num_classes
    if data.num_classes > wanted:
        raise UserError(
            f"{data.url} has {data.num_classes} classes, the model has {wanted}; "
            f"set --model.num-classes {data.num_classes}, or 0 to take the dataset's"
        )
    for each in held_out:
        label_map(each, data.label_names)
    if say and data.num_classes < wanted:
        log.warning(unused_classes(data.num_classes, wanted))
    return replace(job, model=replace(job.model, num_classes=wanted))


def refuse_other_head(job: TrainingJob, data: TrainingData) -> None:
    """UserError if the job keeps the head of the weights that it starts from, but that head's classes are not the
    data's, in number or by name. A head without names (imported ones may have none) is taken as it is."""
    if job.initial.new_head or job.model.masked_patches:
        return
    labels, num_classes = open_weights(job.initial.weights).labels, job.model.num_classes
    others = [
        (number, was, now)
        for number, (was, now) in enumerate(zip(labels, data.label_names, strict=False))
        if was not in (now, f"unnamed {number}")
    ]
    if len(labels) == num_classes and not others:
        return
    what = f"has {len(labels)} classes, the model {num_classes}"
    if others:
        number, was, now = others[0]
        what = f"calls class {number} {shown_value(was)}, {data.url} {shown_value(now)} ({len(others)} differ)"
    raise UserError(
        f"the head of the weights at {job.initial.weights!r}, which --initial.no-new-head keeps, {what}; "
        "give --initial.new-head, or a dataset of the same classes"
    )


def unused_classes(of_data: int, of_model: int) -> str:
    """What a user should know of a model with more classes than its data has."""
    unused = f"{of_model - of_data} of its outputs never {'has' if of_model - of_data == 1 else 'have'} an image"
    return f"the data has {of_data} classes, the model {of_model}: {unused}; --model.num-classes 0 takes the data's"
