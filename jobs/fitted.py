"""Fits the default of a command to what it names: the folder of its record; for training, the weights, the dataset and
the batch.

The recipes of jobs/recipes/photos.py take their model from the weights and their steps from the dataset. Every training
recipe takes fewer lanes if its own do not divide the batch. What a flag gives is left alone, and so is a run that is
continued: it goes on as it was recorded.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.recipes.photos import FINETUNE_RECIPES, RECIPES, steps_for, with_batch, with_steps
from jobs.resolve import file_job, is_file
from pipeline.models.config import ModelConfig
from pipeline.models.weights.usage import DEFAULT_USAGE
from pipeline.training.settings.job import TrainingJob
from shards.errors import UnreachableError, UserError
from shards.output.quantities import plural
from shards.output.terminal import printable_name

if TYPE_CHECKING:
    from pipeline.models.weights.folder import Weights

_OF_HEADS = (
    *("num_classes", "representation", "head_bias", "dropout", "stochastic_depth"),
    *("masked_patches", "masked_target", "masked_share"),
)
_MANIFEST = "manifest.json"


def fitted(recipe: str, default: Any, values: Mapping[str, Any]) -> tuple[Any, str]:
    """The job that a command with these flags starts from, and a line for each choice, none if nothing was chosen.
    `recipe`: the command's second word, which may also be a run or its record."""
    default, notes = _in_its_folder(recipe, default, values)
    if not isinstance(default, TrainingJob):
        return default, "\n".join(notes)
    if type(default) is TrainingJob and (recipe in FINETUNE_RECIPES or recipe in RECIPES):  # not a trial of resuming
        default, chosen = _of_photos(recipe, default, values)
        notes += chosen
    job, said = _with_lanes(default, values)
    return job, "\n".join([*notes, *said])


def _in_its_folder(word: str, job: Any, values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """The job of a run's record with the folder that holds the record as its run directory: the run may have been moved
    or copied, and a relative path may be of another working directory."""
    if "--run-dir" in values or not getattr(job, "run_dir", ""):
        return job, []
    from jobs.record import open_job  # noqa: PLC0415 - YAML, which most commands do without

    record = Path(word) if is_file(word) else Path(word) / "job.yaml"
    if not record.is_file() or record.resolve().name != "job.yaml" or not open_job(record).is_record:
        return job, []
    folder = (record.resolve() if record.is_symlink() else record).parent
    with suppress(OSError):
        if Path(job.run_dir).samefile(folder):
            return job, []
    note = f"the run is {folder}, which holds this record; the record calls it {job.run_dir}"
    return replace(job, run_dir=str(folder)), [printable_name(note)]


def _of_photos(recipe: str, job: TrainingJob, values: Mapping[str, Any]) -> tuple[TrainingJob, list[str]]:
    run_dir = values.get("--run-dir", "")
    if run_dir and (Path(run_dir) / "job.yaml").is_file():
        return file_job("finetune" if recipe in FINETUNE_RECIPES else "pretrain", Path(run_dir) / "job.yaml"), []
    notes = list[str]()
    if recipe in FINETUNE_RECIPES and (weights := values.get("--initial.weights")):
        from pipeline.models.conversion.open_any import open_for_use  # noqa: PLC0415 - torch, not for help
        from pipeline.models.weights.folder import usage_at  # noqa: PLC0415

        found = open_for_use(weights)
        job = replace(job, model=_model_of(found, values))
        notes.append(f"the model is that of the weights: {job.model.name} at {job.model.image_size} px")
        if found.assumed:
            assumed = ", ".join(map(str, found.assumed))
            notes.append(f"assumed, as the file does not say: {assumed} (others: patchline import)")
        size = values.get("--model.image-size", job.model.image_size)
        if (transform := usage_at(found, size).transform) != DEFAULT_USAGE.transform:
            job = replace(job, evaluation=replace(job.evaluation, transform=transform))
            notes.append(
                f"images are scored as the weights say: {transform.mode.replace('_', ' ')}, {transform.filter} "
                "(--evaluation.transform.mode and others)"
            )
    if batch := values.get("--global-batch"):
        job = with_batch(job, global_batch=batch)
    if url := values.get("--data.url"):
        from shards.dataset import open_dataset  # noqa: PLC0415 - Arrow, which help can do without

        try:
            num_images = max(1, open_dataset(url).num_samples)
        except UnreachableError:  # a dry run on a laptop; where the job runs, this is an error of the data
            return job, [*notes, f"{url} is not reachable from here: the steps follow its images where the job runs"]
        steps = values.get("--steps") or steps_for(recipe, num_images=num_images, global_batch=job.global_batch)
        job = with_steps(job, steps=steps)
        if "--data.lanes" not in values and num_images < job.data.lanes:  # each lane needs an image
            fewer = max(each for each in range(1, num_images + 1) if job.global_batch % each == 0)
            job = replace(job, data=replace(job.data, lanes=fewer))
        epochs = job.steps * job.global_batch / num_images
        notes.append(
            f"{plural(job.steps, 'step')} of {job.global_batch} images, {epochs:.3g} epochs of "
            f"{plural(num_images, 'image')}, at a learning rate of "
            f"{values.get('--schedule.learning-rate', job.schedule.learning_rate):g} (--steps, --global-batch, "
            "--schedule.learning-rate)"
        )
        test = f"{url.rstrip('/')}-test"
        is_given = any(flag.startswith(("--evaluation.url", "--data.held-out")) for flag in values)
        if not is_given and _is_dataset(test):
            job = replace(job, evaluation=replace(job.evaluation, url=test))
            notes.append(f"scored on {test} (--evaluation.url)")
    return job, notes


def _is_dataset(url: str) -> bool:
    """Whether there is a dataset in a folder or on S3."""
    if "://" not in url:
        return (Path(url) / _MANIFEST).is_file()
    from shards.store import open_store  # noqa: PLC0415 - S3's client, which most commands do without

    return open_store(url).exists(_MANIFEST)


def _model_of(weights: "Weights", values: Mapping[str, Any]) -> ModelConfig:
    """The model of the weights, without what belongs to their head and their training. The note of a flag that says
    otherwise is the error of the weights, which no longer fit."""
    found, plain = weights.config, ModelConfig()
    size = values.get("--model.image-size")
    if size and not found.is_bit and "--model.patch" not in values and size % found.stride:
        lower = max(1, size // found.stride) * found.stride
        raise UserError(
            f"--model.image-size is {size}, and a patch of the weights at {weights.where!r} is {found.stride} px: take "
            f"{lower} or {lower + found.stride}"
        )
    own = {field.name for field in fields(ModelConfig)}
    return replace(found, **{name: getattr(plain, name) for name in _OF_HEADS if name in own} | {"num_classes": 0})


def _with_lanes(job: TrainingJob, values: Mapping[str, Any]) -> tuple[TrainingJob, list[str]]:
    """The job with lanes that divide its batch, and with windows that are longer by as much as the lanes are fewer: the
    shuffle reaches as far."""
    batch, lanes = values.get("--global-batch", job.global_batch), job.data.lanes
    if "--data.lanes" in values or batch < 1 or batch % lanes == 0:
        return job, []
    fitting = gcd(batch, lanes)
    window = values.get("--data.window-blocks", job.data.window_blocks * lanes // fitting)
    note = f"{plural(fitting, 'lane')} instead of {lanes}, which do not divide a batch of {batch} (--data.lanes)"
    return replace(job, data=replace(job.data, lanes=fitting, window_blocks=window)), [note]
