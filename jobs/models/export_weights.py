"""`patchline export`: writes a run's weights for vision_transformer, big_vision, timm or Hugging Face, together with
MODEL_CARD.md.

The card has Hugging Face's layout (Mitchell et al., "Model Cards for Model Reporting", 2019): what the model is, what
it was trained on, how well it does, and how to load it. It says only what is known: its numbers come from the folder of
the run that made the weights, if that folder exists. Names from data and paths are quoted as code, so that they cannot
act as Markdown or YAML.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jobs import exit_codes
from jobs.models.import_weights import refuse_misplaced
from jobs.output import write_out, write_to
from jobs.record import leaves_of, read_record, refuse_training_run, write_record
from jobs.reports.compare_names import model_name, sizes_of
from jobs.reports.facts import methods_of
from jobs.reports.points import Point, final_run_of, point_of
from jobs.settings.models import ExportJob
from jobs.stages import job_class
from pipeline.models.config import MEAN_COLOURS, PARTS_PER_SIDE, ModelConfig
from pipeline.models.conversion.config import Format
from pipeline.models.conversion.convert import changed, save_as
from pipeline.models.conversion.hugging_face import transformers_class
from pipeline.models.conversion.open_any import open_for_use
from pipeline.models.flops import num_parameters
from pipeline.models.weights.folder import usage_at
from pipeline.models.weights.usage import Usage
from pipeline.shared_settings import RECORD_FILE
from pipeline.training.saving.finish import read_done
from shards.errors import InvalidDataError, UserError
from shards.output.quantities import flops, number
from shards.output.terminal import printable_name

log = logging.getLogger(__name__)
FILE_NAME = "MODEL_CARD.md"
IN_FOLDERS: tuple[Format, ...] = ("patchline", "timm", "hugging_face")
_LIBRARIES = {"timm": "timm", "hugging_face": "transformers"}
_PAPERS = {
    "ViT": ("2010.11929", "Dosovitskiy et al., An Image is Worth 16x16 Words, ICLR 2021"),
    "BiT": ("1912.11370", "Kolesnikov et al., Big Transfer (BiT), ECCV 2020"),
}
_LOAD = {
    "patchline": 'from patchline import load_model\n\nmodel = load_model("{name}")\nmodel.predict("photo.jpg")',
    "timm": 'import timm\n\nmodel = timm.create_model("local-dir:{name}", pretrained=True).eval()',
    "hugging_face": 'from transformers import {of_transformers}\n\nmodel = {of_transformers}.from_pretrained("{name}")',
}
_START_OF_MASKED = (  # for models of masked patch prediction, which have no classes
    "patchline fewshot {name} --data.url DATASET\n"
    "patchline finetune RECIPE --initial.weights {name} --data.url DATASET --run-dir DIR"
)
_MOST_LABELS = 12
__all__ = ["ExportJob", "run"]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written: the name, the format and the model. `num_parameters`: the number of parameters of the whole
    model. `is_changed`: whether the head, the resolution or the patch size differs from that of the original weights,
    so that their scores do not apply."""

    name: str
    written: Format
    config: ModelConfig
    labels: tuple[str, ...]
    usage: Usage
    num_parameters: int
    is_changed: bool = False


def run(job: ExportJob, *, overwrite: bool = False) -> int:
    """Writes a file or a folder, completely or not at all. A folder also gets MODEL_CARD.md. `overwrite`: write even if
    --out has other content."""
    refuse_misplaced(job.path, job.out, wanted="the folder, or the .npz file,")
    if job.run_dir:
        refuse_training_run(Path(job.run_dir), stage="export")
    weights = open_for_use(job.path)
    config, tensor = changed(weights, job)
    usage = usage_at(weights, config.image_size)
    labels = () if job.new_head else weights.labels

    exported = Exported(
        name=Path(job.out).resolve().name,
        written=job.format,
        config=config,
        labels=labels,
        usage=usage,
        num_parameters=num_parameters(config),
        is_changed=job.new_head or config != weights.config,
    )
    training = training_of(job.path)

    def write(out: Path) -> None:
        save_as(job.format, out, config=config, labels=labels, tensor=tensor, usage=usage)
        if job.format in IN_FOLDERS:
            text = card_text(exported, training).encode(errors="backslashreplace")
            write_out(out / FILE_NAME, text, todo="give another --out")

    write_to(Path(job.out), write, overwrite=overwrite)
    if job.run_dir:
        write_record(Path(job.run_dir), stage="export", job=job)
    log.info("%s: %s at %d px, format %s", job.out, config.name, config.image_size, job.format)
    transform = usage.transform
    is_plain, is_area = transform.filter == "bilinear" and not transform.antialias, transform.filter == "area"
    library = {"timm": "timm", "hugging_face": "transformers"}.get(job.format)
    if (library and is_plain) or (library == "transformers" and is_area):
        log.info(
            "%s resizes images with antialiasing, and this run's evaluation %s: some predictions will differ from "
            "those of patchline evaluate",
            library,
            "without" if is_plain else "by areas",
        )
    if library and transform.border:
        log.warning(
            "%s cuts off no border, and this run's evaluation cuts off %d pixels at each side: crop images before",
            library,
            transform.border,
        )
    return exit_codes.DONE


@dataclass(frozen=True, kw_only=True)
class Training:
    """The run that the weights are from, and its job."""

    point: Point
    job: Any


def training_of(weights: str) -> Training | None:
    """Returns the run whose final weights these are (RUN or RUN/weights); None if there is no such run. Returns None
    and logs the reason if its record cannot be read, or if the run has not completed its steps with these weights."""
    folder = final_run_of(weights)
    if folder is None:
        return None
    try:
        point = point_of(folder, name=folder.resolve().name)
        job = read_record(folder / RECORD_FILE, stage=point.stage, kind=job_class(point.stage))
    except (OSError, UserError, InvalidDataError) as error:
        log.info("the card says nothing about training: %s", printable_name(str(error)))
        return None
    done = read_done(folder)
    if done is None or done.step != job.steps:
        log.info("the card says nothing about training: the weights are not those at the end of the run")
        return None
    return Training(point=point, job=job)


def card_text(exported: Exported, training: Training | None) -> str:
    """Returns the card. Equal facts give equal text."""
    parts = [f"---\n{_front_matter(exported, training)}---\n", f"# {_title(exported)}\n", _details(exported)]
    parts += ["## How to get started\n", _start(exported)]
    parts += ["## Training\n", _training(training), "## Evaluation\n", _evaluation(exported, training)]
    parts += ["## Citation\n", _paper(exported)]
    return "\n".join(parts)


def _front_matter(exported: Exported, training: Training | None) -> str:
    """Returns the YAML at the top of the card. A YAML library writes it, so that no name can break out of it."""
    task = "image-feature-extraction" if exported.config.masked_patches else "image-classification"
    facts: dict[str, Any] = {"pipeline_tag": task}
    if exported.written in _LIBRARIES:
        facts["library_name"] = _LIBRARIES[exported.written]
    facts["tags"] = [task, "bit" if exported.config.is_bit else "vision-transformer", "patchline"]
    is_known = training is not None and not exported.is_changed and not _is_of_raw_weights(training)
    if training and training.point.accuracy is not None and is_known:
        dataset = {"name": _plain(training.point.dataset) or "unnamed", "type": "image-folder"}
        metric = {"type": "accuracy", "value": round(training.point.accuracy, 6)}
        result = {"task": {"type": task}, "dataset": dataset, "metrics": [metric]}
        facts["model-index"] = [{"name": _plain(exported.name), "results": [result]}]
    return yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=1000)


def _start(exported: Exported) -> str:
    if exported.config.masked_patches:
        return f"```bash\n{_START_OF_MASKED.format(name=exported.name)}\n```\n"
    of_transformers = transformers_class(exported.config)
    return f"```python\n{_LOAD[exported.written].format(name=exported.name, of_transformers=of_transformers)}\n```\n"


def _title(exported: Exported) -> str:
    """Returns the card's title, with the sizes in which the model differs from the published model of this name."""
    name = model_name(exported.config.name, sizes_of(exported.config))
    return f"{_code(name)} at {exported.config.image_size} px"


def _details(exported: Exported) -> str:
    config, transform = exported.config, exported.usage.transform
    labels = ", ".join(map(_code, exported.labels[:_MOST_LABELS]))
    labels += ", ..." if len(exported.labels) > _MOST_LABELS else ""
    output = f"{config.num_classes:,} logits; probabilities by {exported.usage.loss}"
    if config.masked_patches:
        predicted = {
            "mean": f"{output} over its mean colours",
            "parts": f"{output} over the {MEAN_COLOURS} mean colours of each of its {PARTS_PER_SIDE**2} parts",
            "pixels": f"the {config.num_classes:,} values of its pixels, scaled to -1 to 1",
        }[config.masked_target]
        output = f"for each patch, {predicted} (masked patch prediction, no classes of images)"
    rows = [
        ("Parameters", number(exported.num_parameters)),
        ("Images", f"{config.image_size} x {config.image_size} pixels in RGB, scaled to -1 to 1"),
        ("Preparation", f"{transform.mode.replace('_', ' ')}, as in the run's own evaluation"),
        ("Output", output),
    ]
    rows += [("Classes", labels)] if labels and not config.masked_patches else []
    return "## Model details\n\n" + "".join(f"- {name}: {value}\n" for name, value in rows)


def _training(training: Training | None) -> str:
    if training is None:
        why = "the run that made these weights was not there when they were exported, or they are not its final ones"
        return f"Not known: {why}.\n"
    point, job = training.point, training.job
    rate = f"learning rate {job.schedule.learning_rate:g} ({job.schedule.decay})"
    included = ", pre-training included" if point.stage == "finetune" else ""
    alone = f"{flops(point.own_exaflops)} of this run; that of {' and '.join(point.uncounted)} is not known"
    cost = alone if point.exaflops is None else f"{flops(point.exaflops)}{included}"
    rows = [
        ("Data", f"{_code(_dataset(job.data.url) if job.data.url else 'a mix of datasets')}"),
        ("Stage", "fine-tuning" if point.stage == "finetune" else "pre-training"),
        ("Steps", f"{point.step:,} of {job.global_batch:,} images"),
        ("Optimiser", f"{job.optimizer.name}, {rate}, weight decay {job.optimizer.weight_decay:g}"),
        *methods_of(leaves_of(job), quoted=_code),
        ("Loss", job.loss),
        ("Compute", cost),
    ]
    if point.num_images is not None:
        rows.insert(1, ("Images of pre-training", f"{point.num_images:,}"))
    return "".join(f"- {name}: {value}\n" for name, value in rows)


def _evaluation(exported: Exported, training: Training | None) -> str:
    if training is None or (training.point.accuracy is None and not training.point.fewshot):
        return "The run was not scored.\n"
    if exported.is_changed:
        return "Not known: the head, the resolution or the patch size was changed after the run.\n"
    point, job = training.point, training.job
    rows = []
    if point.accuracy is not None:
        on = _code(point.dataset) + ("" if job.data.held_out.is_none else ", which was not trained on")
        raw = " of the raw weights, not of these averaged ones," if _is_of_raw_weights(training) else ""
        rows.append((f"Accuracy{raw} on {on}", f"{100 * point.accuracy:.2f} %"))
    raw = " of the raw weights, not of these averaged ones" if job.ema_decay else ""
    rows += [(f"{shots}-shot accuracy{raw}", f"{100 * value:.2f} %") for shots, value in point.fewshot.items()]
    return "".join(f"- {name}: {value}\n" for name, value in rows)


def _is_of_raw_weights(training: Training) -> bool:
    """Whether the accuracy is that of the raw weights although the exported weights are averaged."""
    return bool(training.job.ema_decay) and not training.point.is_averaged


def _paper(exported: Exported) -> str:
    arxiv, words = _PAPERS["BiT" if exported.config.is_bit else "ViT"]
    return f"The architecture is from [{words}](https://arxiv.org/abs/{arxiv}). Trained with Patchline.\n"


def _dataset(url: str) -> str:
    """Returns the last part of the URL. The other parts are left out because they may name machines, people or
    buckets."""
    return _plain(url.rstrip("/").rpartition("/")[2]) or "unnamed"


def _plain(text: str) -> str:
    return printable_name(text)[:80]


def _code(text: str) -> str:
    """Returns the text as inline code, so that Markdown in it has no effect."""
    return f"`{_plain(text).replace('`', chr(39))}`"
