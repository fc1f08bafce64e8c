"""Says how fast a GPU trains, from results of `patchline doctor --gpu`: by model, GPU and micro-batch.

A plan takes the first of these that says something about its job:

    --mfu           what the user says
    --measured      the user's own result
    measured/       results that are part of the package; `python -m benchmarks.scale --update` makes them of
                    benchmarks/results/
    PLANNED_MFU     what was published for another model, for what nobody has measured

A step counts for a job if both have the same sizes, precision and GPU, about the same image size, and are both eager or
both compiled. A result with a step of the same kernels counts before one without. Of a result's steps the nearest one
is taken, first by the micro-batch, then by the kernels. What differs is said. A rate becomes a share of the GPU's
nominal operations (MFU), so that a larger head only adds its operations.

The range is that of the measured rounds. If the job leaves the kernel of attention open, the range includes what the
result has for the other kernels. Kernels and micro-batches that nobody has measured widen it by `UNLIKE`.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pipeline.models.config import ModelConfig
from pipeline.models.flops import training_flops
from pipeline.planning.step_time import SLOWEST_HOST, Gpu, Speed, computed_share, gpu_named, gpu_of_device, host_seconds
from pipeline.training.settings.job import EngineConfig, OptimizerConfig, TrainingJob
from shards.config_values import Range, shown_text, shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import read_local_file
from shards.files.typed_json import Record, parse_json, record_from
from shards.output.terminal import printable_name

PACKAGED = Path(__file__).with_name("measured")
PLANNED_MFU = 0.28
"""What NVIDIA published for ViT-g/14 on nodes of H100 (NeMo: 0.27 to 0.29; 0.43 on A100)."""
UNLIKE = 0.88
"""The least share of a measured rate to expect of other kernels, and of half as many images a pass. The most to expect
of other kernels, or of more images, is the rate divided by it. Two steps of ViT-B/16 with 256 images reached 2,550 and
2,888 images/s by their kernels (gpu_h200.json). That the number of images costs as much is an assumption
[unverified]."""
KINDS = ("step", "rank", "determinism")
"""The kinds of parts of `patchline doctor --gpu` that measure a training step."""
_MOST_FILE_BYTES = 16 << 20
_NUM_CLASSES = 1000  # of the models that `patchline doctor --gpu` measures
_MENTIONED = (
    *("pooling", "registers", "dropout", "stochastic_depth", "stochastic_depth_rates", "layer_scale", "qk_norm"),
    *("gelu", "position_at", "distillation_token", "inner_norms", "norm", "patch_norm", "first_norm", "last_norm"),
)
# Settings of the engine that are said or counted apart, or that cost nothing on one rank. All others choose kernels.
_NO_KERNELS = (
    *("precision", "zero_stage", "activation_checkpointing", "compile", "skip_branches"),
    *("overlap", "reduce_bucket", "reduce_precision", "check_gradients", "allow_deepspeed"),
)
_KERNELS = tuple(each.name for each in fields(EngineConfig) if each.name not in _NO_KERNELS)
_LEFT_OPEN = {"attention", "deterministic"}  # kernels that a run may take if its job names none
_MOST_PIXELS = 2.0  # an image of a measured step has at most this many times the job's pixels, or the reverse
_GROUPS: Mapping[str, Any] = {"model": ModelConfig, "engine": EngineConfig, "optimizer": OptimizerConfig}
_RIGHT_FILE = "give the file that `patchline doctor --gpu --out FILE` wrote on your GPU"


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """A training step that was measured on one GPU. `job`: what was trained. `images_per_second`: the rates of several
    rounds. `attention`: the kernel that ran, or an empty text if that is not known. `launch_seconds`: how long the host
    took to launch the step, or None if that was not measured. `where`: the device, the version of torch and the file,
    in words."""

    gpu: Gpu
    job: TrainingJob
    micro_batch: int
    images_per_second: tuple[float, ...]
    attention: str
    launch_seconds: float | None
    where: str

    def mfu(self, images_per_second: float) -> float:
        """Returns the share of the GPU's nominal operations at this rate, with those that are computed again."""
        flops = training_flops(self.job.model, skips_branches=self.job.engine.skip_branches) * computed_share(self.job)
        return images_per_second * flops / (self.gpu.teraflops * 1e12)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Where a plan has its rates from. `mfu`: what the user says; 0: nothing. `results`: the steps of each file, in the
    order in which they count. Raises UserError for an `mfu` out of range."""

    mfu: float = 0.0
    results: tuple[tuple[MeasuredStep, ...], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.mfu <= 1:
            raise UserError(f"--mfu is {self.mfu}", allowed="0 (as measured), up to 1")


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """What a plan expects of a GPU and its host: the usual speed, the least and the most. `micro_batch`: the one that
    was measured; 0: none. `source` and `host_source`: where the GPU's and the host's speed is from, in words."""

    usual: Speed
    least: Speed
    most: Speed
    micro_batch: int
    source: str
    host_source: str


@lru_cache(maxsize=1)
def rates_from(measured: str = "", *, gpu: str = "", mfu: float = 0.0) -> Rates:
    """Returns the rates of the file `measured` (empty: none) and of the package, unless `mfu` is given. The files are
    read once. Raises UserError for a file that `patchline doctor --gpu` did not write on the GPU `gpu`."""
    if mfu:
        return Rates(mfu=mfu)
    own = [steps_in(Path(measured))] if measured else []
    if own and own[0][0].gpu != gpu_named(gpu):
        raise UserError(
            f"--measured is {measured!r}, with --gpu {gpu}, but it is from {own[0][0].where}", todo=_RIGHT_FILE
        )
    return Rates(results=(*own, *(steps_in(file) for file in sorted(PACKAGED.glob("*.json")))))


def speeds_of(job: TrainingJob, *, micro_batch: int, gpu: Gpu, name: str, rates: Rates) -> Speeds:
    """Returns the speeds of a GPU, which messages call `name`, in the job's step with this micro-batch. The job's
    precision must be decided."""
    host, slowest, host_source = _host_of(job, gpu, rates)
    step, mfus = None, []
    if steps := _measured_steps(job, gpu, rates):
        step = min(steps, key=lambda step: _distance(step, job, micro_batch))
        least, most = _least_and_most(step, job, micro_batch, steps)
        mfus, source = (
            [least, statistics.median(step.mfu(rate) for rate in step.images_per_second), most],
            _source(step, job),
        )
    elif rates.mfu:
        mfus, source = [rates.mfu], f"--mfu {rates.mfu:g}"
    else:
        mfus = [PLANNED_MFU]
        source = (
            f"nobody has measured this step of {job.model.name} on {name}; {PLANNED_MFU:.0%} of nominal operations is "
            "NVIDIA's figure for ViT-g/14 on H100 (other figures: --mfu, or --measured FILE, which `patchline doctor "
            "--gpu --out FILE` writes there)"
        )
    return Speeds(
        usual=Speed(mfu=statistics.median(mfus), host=host),
        least=Speed(mfu=min(mfus), host=slowest),
        most=Speed(mfu=max(mfus), host=host),
        micro_batch=step.micro_batch if step else 0,
        source=source,
        host_source=host_source,
    )


def _measured_steps(job: TrainingJob, gpu: Gpu, rates: Rates) -> list[MeasuredStep]:
    """Returns the steps that count for the job: those of the first result that has one with the job's kernels, or of
    the first that has any."""
    if job.optimizer.freeze_backbone:  # three passes were measured, and this job makes one
        return []
    near = [[step for step in steps if step.gpu == gpu and _is_near(step.job, job)] for steps in rates.results]
    alike = [steps for steps in near if any(not _other_kernels(step, job) for step in steps)]
    return next((steps for steps in (*alike, *near) if steps), [])


def _distance(step: MeasuredStep, job: TrainingJob, micro_batch: int) -> tuple[float, int, int, float, int]:
    """Returns how far a step is from the job's: a micro-batch of more than twice or less than half as many images comes
    first, then kernels, then the other differences."""
    doublings = abs(math.log2(step.micro_batch / micro_batch))
    differences = len(_other_kernels(step, job)), len(_differences(step, job))
    return max(1.0, doublings), *differences, doublings, step.micro_batch


def _least_and_most(
    step: MeasuredStep, job: TrainingJob, micro_batch: int, steps: list[MeasuredStep]
) -> tuple[float, float]:
    """Returns the least and the most share of nominal operations to expect of the job, by the step that is closest to
    it and those of the same result that the job may turn out to equal."""
    is_open = job.engine.attention == "auto" and not job.engine.deterministic
    open_kernels = _LEFT_OPEN if is_open else set()
    alike = [
        other
        for other in steps
        if other.micro_batch == step.micro_batch
        and _other_kernels(other, job).keys() <= open_kernels
        and _differences(other, job) == _differences(step, job)
    ]
    mfus = [one.mfu(rate) for one in (step, *alike) for rate in one.images_per_second]
    doublings = math.log2(step.micro_batch / micro_batch)
    unlike = 1 if _other_kernels(step, job) else 0
    least = min(mfus) * UNLIKE ** (unlike + max(0.0, doublings))
    most = max(mfus) / UNLIKE ** (unlike + (1 if doublings < 0 else 0))
    return least, min(1.0, most)


def _is_near(measured: TrainingJob, job: TrainingJob) -> bool:
    """Returns whether a measured job's rate says something about another job."""
    pixels = (measured.model.image_size / job.model.image_size) ** 2
    return _identity(measured) == _identity(job) and 1 / _MOST_PIXELS <= pixels <= _MOST_PIXELS


def _identity(job: TrainingJob) -> tuple[Any, ...]:
    """Returns what must be equal in the measured job and in the planned one."""
    model, engine = job.model, job.engine
    sizes = model.resnet if model.is_bit else (model.size, model.resnet)
    position = "rotary" if model.is_rotary else model.position if model.position == "relative" else ""
    is_eager = compiled_as(engine) == "eager"
    return sizes, model.attention, position, model.mlp, model.masked_patches, engine.precision, is_eager


def _searched(engine: EngineConfig) -> Literal["on", "tuned"]:
    return "tuned" if engine.compile == "tuned" else "on"


def _other_kernels(step: MeasuredStep, job: TrainingJob) -> dict[str, Any]:
    """Returns the job's settings that choose other kernels than those that were measured."""
    measured = {name: getattr(step.job.engine, name) for name in _KERNELS}
    own = {name: getattr(job.engine, name) for name in _KERNELS}
    if measured["attention"] == "auto" and own["attention"] != "auto":
        measured["attention"] = step.attention
    measured |= {"image_size": step.job.model.image_size, "compile": _searched(step.job.engine)}
    own |= {"image_size": job.model.image_size, "compile": _searched(job.engine)}
    return {name: value for name, value in own.items() if value != measured[name]}


def compiled_as(engine: EngineConfig) -> Literal["compiled", "compiled, tuned", "eager"]:
    """Returns how a GPU runs the model's blocks with these settings."""
    if engine.compile == "off" or (engine.compile == "auto" and engine.zero_stage == 3):
        return "eager"
    return "compiled, tuned" if engine.compile == "tuned" else "compiled"


def _differences(step: MeasuredStep, job: TrainingJob) -> list[str]:
    """Returns the settings of the measured step that are different in the job and change its time a little."""
    pairs = [(name, getattr(step.job.model, name), getattr(job.model, name)) for name in _MENTIONED]
    engine, own = step.job.engine, job.engine
    pairs.append(("zero_stage", engine.zero_stage, own.zero_stage))
    pairs.append(("activation_checkpointing", engine.activation_checkpointing, own.activation_checkpointing))
    pairs.append(("optimizer", step.job.optimizer.name, job.optimizer.name))
    return [f"{name} {str(measured).lower()}" for name, measured, own in pairs if measured != own]


def _source(step: MeasuredStep, job: TrainingJob) -> str:
    engine, usual = step.job.engine, EngineConfig()
    kernels = {name: getattr(engine, name) for name in _KERNELS if getattr(engine, name) != getattr(usual, name)}
    if step.attention:
        kernels = {"attention": step.attention} | kernels
    what = [f"{step.job.model.name} {compiled_as(engine)}", *(f"{name} {value}" for name, value in kernels.items())]
    images = f"{step.micro_batch:,} images a pass"
    if differences := _differences(step, job):
        images += f", with {', '.join(differences)}"
    said = f"{', '.join(what)}, {images}, measured on {step.where}"
    if others := _other_kernels(step, job):
        said += f"; nobody has measured {', '.join(f'{name} {value}'.lower() for name, value in others.items())}"
    return said


def _host_of(job: TrainingJob, gpu: Gpu, rates: Rates) -> tuple[float, float, str]:
    """Returns how many times as long as in engine.json the host takes to launch a step, usually and at most, and where
    this is from. A host that was measured with another model takes as long for each tensor."""
    for steps in rates.results:
        timed = [
            step
            for step in steps
            if step.gpu == gpu and step.launch_seconds and compiled_as(step.job.engine) == compiled_as(job.engine)
        ]
        if timed:
            step = min(timed, key=lambda step: (_identity(step.job) != _identity(job), step.micro_batch))
            factor = (step.launch_seconds or 0.0) / host_seconds(step.job, num_ranks=1)
            return factor, factor, f"Measured for {step.job.model.name} {compiled_as(step.job.engine)} on {step.where}"
    source = (
        "The first figure was measured on a CPU, for each tensor (engine.json); the second is as an H200's host took "
        "for a tensor of eager ViT-B/16 (gpu_h200.json)"
    )
    return 1.0, SLOWEST_HOST, source


@dataclass(frozen=True, kw_only=True)
class AboutMeasured:
    """What a result of `patchline doctor --gpu` says about the machine."""

    device: Literal["cuda", "cpu"]
    name: str
    torch: str


@dataclass(frozen=True, kw_only=True)
class PartMeasured:
    """What was measured. `deterministic` and `zero_stage` are settings that older results have here."""

    kind: str
    model: str
    image_size: int
    compiled: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    deterministic: bool = False
    zero_stage: int = 1


@dataclass(frozen=True, kw_only=True)
class ResultMeasured:
    """The figures of a part."""

    micro_batch: Annotated[int, Range(1, 1 << 24)]
    images_per_second: tuple[Annotated[float, Range(above=0, most=1e9)], ...]
    attention: str = ""
    host_milliseconds: Annotated[float, Range(above=0, most=1e7)] | None = None


def steps_in(file: Path) -> tuple[MeasuredStep, ...]:
    """Returns the training steps in a result of `patchline doctor --gpu`. Parts that failed, or that leave out what a
    run always has, are skipped. Raises UserError for a file that cannot be read or has wrong values, for a GPU that is
    not in the table, and for a result without a step."""
    try:
        found = parse_json(read_local_file(file, most_bytes=_MOST_FILE_BYTES))
        steps = tuple(_steps(found, file))
        if not steps:
            raise ValueError("it has no training step, so it says nothing about a rate")
    except OSError as error:
        raise UserError(
            f"--measured is {str(file)!r}, which cannot be read: {error.strerror}", todo=_RIGHT_FILE
        ) from None
    except (ValueError, UserError) as error:
        wrong = error.what if isinstance(error, InvalidDataError) else str(error)
        raise UserError(f"--measured is {str(file)!r}, which no plan can use: {wrong}", todo=_RIGHT_FILE) from None
    return steps


def _steps(found: Any, file: Path) -> Iterator[MeasuredStep]:
    if not isinstance(found, dict) or not isinstance(found.get("parts"), dict):
        raise ValueError("it has no parts")
    about = _record(AboutMeasured, found.get("about"), "about")
    gpu = gpu_of_device(about.name)
    if about.device != "cuda" or gpu is None:
        raise ValueError(f"it is from {shown_value(about.name)}, which is no GPU that --gpu knows")
    where = f"{printable_name(f'{about.name} (torch {shown_text(about.torch)}): {_shown(file)}')}"
    for name, entry in found["parts"].items():
        place = f"parts.{shown_value(name)}"
        if not isinstance(entry, dict) or not isinstance(entry.get("part"), dict):
            raise ValueError(f"{place} is {shown_value(entry)}; allowed: an object with a part")
        if entry["part"].get("kind") not in KINDS or "result" not in entry:
            continue
        part = _record(PartMeasured, entry["part"], f"{place}.part")
        if part.without or any(setting.startswith("inductor.") for setting in part.settings):
            continue
        result = _record(ResultMeasured, entry["result"], f"{place}.result")
        step = MeasuredStep(
            gpu=gpu,
            job=_job_of(part, place),
            micro_batch=result.micro_batch,
            images_per_second=result.images_per_second,
            attention=shown_text(result.attention),
            launch_seconds=result.host_milliseconds and result.host_milliseconds / 1000,
            where=where,
        )
        if not step.images_per_second or step.mfu(max(step.images_per_second)) > 1:
            rates = shown_value(list(step.images_per_second))
            raise ValueError(f"{place}.result.images_per_second is {rates}; allowed: rates that the GPU can reach")
        yield step


def _shown(file: Path) -> str:
    """Returns the name of a file for its figures' source."""
    return f"Patchline's {file.name}" if file.parent == PACKAGED else str(file)


def _record(kind: type[Record], value: Any, where: str) -> Record:
    """Returns the fields of an object that a plan takes as a dataclass. Raises ValueError for a wrong value."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {shown_value(value)}; allowed: an object")
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # it is a dataclass
    return record_from(kind, {name: value[name] for name in names if name in value}, where=f"{where}.")


def _job_of(part: PartMeasured, place: str) -> TrainingJob:
    """Returns the job of a part. Raises ValueError for settings that no job has."""
    given: dict[str, dict[str, Any]] = {
        "model": {"name": part.model, "image_size": part.image_size, "num_classes": _NUM_CLASSES},
        "engine": {
            "precision": "bf16",
            "compile": "on" if part.compiled else "off",
            "deterministic": part.deterministic,
            "zero_stage": part.zero_stage,
        },
        "optimizer": {"name": "adamw"},
    }
    for setting, value in part.settings.items():
        group, _, name = setting.partition(".")
        if group not in _GROUPS or name not in {each.name for each in fields(_GROUPS[group])}:
            raise ValueError(f"{place}.part.settings has {shown_value(setting)}, which is no setting of a job")
        given[group][name] = value
    try:
        configs = {group: kind(**given[group]) for group, kind in _GROUPS.items()}
        return TrainingJob(**configs)
    except UserError as error:
        raise ValueError(f"{place}.part: {error}") from None
