"""Adapts the default job of a command to what the command names: the folder of a record and, for training, the weights,
the dataset, the batch and the number of steps.

The recipes of jobs/recipes/photos.py take their model from the weights and their steps from the dataset. Every training
recipe takes fewer lanes if their number does not divide the batch, and a shorter warm-up for a shorter run, such as one
with `--steps 3` instead of 300. Fields set by a flag are left alone. A resumed run keeps its recorded values.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.recipes.photos import FINETUNE_RECIPES, RECIPES, steps_for, with_batch, with_steps
from jobs.recipes.shorter import in_steps, scaled, with_warmup_steps
from jobs.resolve import file_job, is_file
from pipeline.models.config import ModelConfig
from pipeline.models.weights.usage import DEFAULT_USAGE
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.settings.job import TrainingJob
from shards.config_values import whole_number
from shards.errors import InvalidDataError, UnreachableError, UserError
from shards.files.looks import is_a_file
from shards.output.quantities import plural
from shards.output.terminal import printable_name

if TYPE_CHECKING:
    from pipeline.models.weights.folder import Weights

_OF_HEADS = (
    *("num_classes", "representation", "head_bias", "dropout"),
    *("stochastic_depth", "stochastic_depth_rates"),
    *("masked_patches", "masked_target", "masked_share"),
)
_MANIFEST = "manifest.json"
_WARMUP = "schedule.warmup-steps"


def fitted(
    stage: str, word: str, job: Any, values: Mapping[str, Any], *, extends: bool = False
) -> tuple[Any, list[str]]:
    """Returns the job that a command starts from, and messages that say what was chosen. `word` is the command's second
    word, `values` has the values of its flags, and `extends` says whether it continues a run with more steps.

    1. The run directory of a record is the folder that holds the record.
    2. A recipe for photographs takes its model from the weights, and its steps from the dataset.
    3. The lanes divide the batch.
    4. The warm-up fits the number of steps.
    """
    job, notes = _in_its_folder(word, job, values)
    if isinstance(job, TrainingJob):
        if type(job) is TrainingJob and (word in FINETUNE_RECIPES or word in RECIPES):  # not verify-resume's subclass
            job, chosen = _of_photos(word, job, values)
            notes += chosen
        job, chosen = _with_lanes(job, values)
        notes += chosen
    job, warmup = with_warmup(stage, job, values, extends=extends)
    return job, [message for message in ("\n".join(notes), warmup) if message]


def _in_its_folder(word: str, job: Any, values: Mapping[str, Any]) -> tuple[Any, list[str]]:
    """Sets the job's run directory to the folder that holds the run's record, since the run may have been moved or
    copied, and a relative path may have been written in another working directory."""
    if "--run-dir" in values or not getattr(job, "run_dir", ""):
        return job, []
    from jobs.record import open_job  # noqa: PLC0415 - loads YAML, which most commands do not need

    record = Path(word) if is_file(word) else Path(word) / RECORD_FILE
    if not is_a_file(record) or record.resolve().name != RECORD_FILE or not open_job(record).is_record:
        return job, []
    folder = (record.resolve() if record.is_symlink() else record).parent
    with suppress(OSError):
        if Path(job.run_dir).samefile(folder):
            return job, []
    note = f"the run is {folder}, which holds this record; the record calls it {job.run_dir}"
    return replace(job, run_dir=str(folder)), [printable_name(note)]


def _of_photos(recipe: str, job: TrainingJob, values: Mapping[str, Any]) -> tuple[TrainingJob, list[str]]:
    run_dir = values.get("--run-dir", "")
    if run_dir and is_a_file(Path(run_dir) / RECORD_FILE):
        return file_job("finetune" if recipe in FINETUNE_RECIPES else "pretrain", Path(run_dir) / RECORD_FILE), []
    notes = list[str]()
    if recipe in FINETUNE_RECIPES and (weights := values.get("--initial.weights")):
        from pipeline.models.conversion.open_any import open_for_use  # noqa: PLC0415 - loads torch, not needed for help
        from pipeline.models.weights.folder import said_of, usage_at  # noqa: PLC0415

        found = open_for_use(weights)
        job = replace(job, model=_model_of(found, values))
        size = values.get("--model.image-size", job.model.image_size)
        resized = "" if size == job.model.image_size else f" instead of {job.model.image_size}"
        notes.append(f"the model is that of the weights: {job.model.name} at {size} px{resized}")
        if found.assumed:
            notes.append(f"{said_of(found.assumed)} (others: patchline import)")
        if (transform := usage_at(found, size).transform) != DEFAULT_USAGE.transform:
            job = replace(job, evaluation=replace(job.evaluation, transform=transform))
            notes.append(
                f"images are scored as the weights say: {transform.mode.replace('_', ' ')}, {transform.filter} "
                "(--evaluation.transform.mode and others)"
            )
    if batch := values.get("--global-batch"):
        job = with_batch(job, global_batch=batch)
    if url := values.get("--data.url"):
        from shards.dataset import open_dataset  # noqa: PLC0415 - loads Arrow, not needed for help

        try:
            num_images = max(1, open_dataset(url).num_samples)
        except UnreachableError:  # for example a dry run on a laptop; the job itself fails if it cannot reach its data
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
        return is_a_file(Path(url) / _MANIFEST)
    from shards.store import open_store  # noqa: PLC0415 - loads the S3 client, which most commands do not need

    return open_store(url).exists(_MANIFEST)


def _model_of(weights: "Weights", values: Mapping[str, Any]) -> ModelConfig:
    """Returns the model of the weights, without the settings of their head and their training. If a flag asks for
    another model, loading the weights raises the error. Raises UserError if --model.image-size is not a multiple of the
    patch."""
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
    """Returns the job with a number of lanes that divides its batch. If there are fewer lanes, windows are longer, so
    that samples are shuffled over the same distance."""
    batch, lanes = values.get("--global-batch", job.global_batch), job.data.lanes
    if "--data.lanes" in values or batch < 1 or batch % lanes == 0:
        return job, []
    fitting = gcd(batch, lanes)
    window = values.get("--data.window-blocks", job.data.window_blocks * lanes // fitting)
    note = f"{plural(fitting, 'lane')} instead of {lanes}, which do not divide a batch of {batch} (--data.lanes)"
    return replace(job, data=replace(job.data, lanes=fitting, window_blocks=window)), [note]


def with_warmup(stage: str, default: Any, values: Mapping[str, Any], *, extends: bool = False) -> tuple[Any, str]:
    """Returns the job with a warm-up that fits the `values` of the flags, and a note for the user (empty if nothing
    changed). A warm-up in the flags wins; jobs without a schedule stay as they are.

    An existing run keeps its warm-up if the command has the same steps or `extends` it.
    """
    if stage == "plan":
        training, note = _scaled_by_flags(default.training, values, prefix="--training.")
        return (replace(default, training=training), note) if note else (default, "")
    if not isinstance(default, TrainingJob):
        return default, ""
    run_dir = values.get("--run-dir") or default.run_dir
    steps, warmup = _recorded(Path(run_dir) / RECORD_FILE)
    if warmup is not None and (extends or (steps or 0) == values.get("--steps")):
        return _kept(default, warmup, values, run_dir=run_dir)
    return (default, "") if extends else _scaled_by_flags(default, values)


def _scaled_by_flags(recipe: TrainingJob, values: Mapping[str, Any], *, prefix: str = "--") -> tuple[TrainingJob, str]:
    steps, flag = values.get(f"{prefix}steps"), f"{prefix}{_WARMUP}"
    if steps is None or flag in values:
        return recipe, ""
    return scaled(recipe, steps=steps, keep=f"{flag} {recipe.schedule.warmup_steps}")


def _kept(recipe: TrainingJob, warmup: int, values: Mapping[str, Any], *, run_dir: str) -> tuple[TrainingJob, str]:
    """Returns the recipe with `warmup`, which the run in `run_dir` recorded, and a note for the user."""
    own = recipe.schedule.warmup_steps
    if warmup == own or warmup >= recipe.steps or f"--{_WARMUP}" in values:
        return recipe, ""
    note = f"warm-up {in_steps(warmup)}, as the run in {run_dir} began (the recipe: {own})"
    return with_warmup_steps(recipe, warmup), note


def _recorded(path: Path) -> tuple[int | None, int | None]:
    """Returns the steps and the warm-up in a run's record; None for a value that it does not have."""
    if not is_a_file(path):
        return None, None
    from jobs.record import read_leaves  # noqa: PLC0415 - loads YAML, needed only to resume runs

    try:
        leaves = read_leaves(path)
    except (OSError, InvalidDataError):
        return None, None
    return whole_number(leaves.get("job.steps", "")), whole_number(leaves.get("job.schedule.warmup_steps", ""))
