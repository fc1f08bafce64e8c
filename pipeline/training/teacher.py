"""Distillation: a frozen teacher, whose predictions the trained model learns.

The teacher sees exactly what the model sees: the same crop, flipped, mixed and in the same order, in every step. Beyer
et al. ("Knowledge distillation: A good teacher is patient and consistent", arXiv 2106.05237) found this to matter more
than anything else about a teacher. The losses are those of big_vision (trainers/proj/distill, distances `kl` and
`hard`) and of DeiT (losses.py, `hard`; Touvron et al., arXiv 2012.12877). DeiT's `soft` is another one: it divides by
the number of logits instead of images, so its `alpha` is of another size. In a model with a distillation token, the
class token's head learns the labels and the distillation token's head learns the teacher, as in DeiT's losses.py.
Without a teacher, the mean of both heads' logits learns the labels, as when DeiT is fine-tuned (engine.py in evaluation
mode; timm's deit.py).

The teacher is no part of the engine: each rank has all its weights, whatever the ZeRO stage, and computes them without
gradients, once in each step: the second pass of SAM takes the logits of the first (gradients.py). A host reads the file
once from its disk, and its page cache serves the other ranks.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models.build import Model
from pipeline.models.config import ModelConfig
from pipeline.models.flops import num_parameters
from pipeline.models.loss import classification_loss
from pipeline.models.weights.folder import Weights, filled_model, refuse_no_head
from pipeline.ranks.world import World
from pipeline.training.kernels import set_up_blocks
from pipeline.training.settings.job import TeacherConfig, TrainingJob
from shards.class_names import class_name
from shards.config_values import shown_value
from shards.errors import UserError
from shards.output.quantities import short_count

log = logging.getLogger(__name__)
_OF_TRAINING = ("dropout", "stochastic_depth", "stochastic_depth_rates", "position_std", "head_std", "layer_scale")
_OF_SIZE = ("name", "patch", "depth", "width", "mlp_width", "num_heads", "resnet_units", "resnet_factor")


@dataclass(frozen=True, kw_only=True)
class Teacher:
    """A frozen model that is ready to predict. `config`: the teacher's own, at the size of the images that it gets.
    `columns`: the place among its classes of each of the trained model's, int64[K]. `sha256`: the digest of everything
    that determines its predictions and their meaning; see `_digest_of_settings`."""

    model: Model
    config: ModelConfig
    columns: torch.Tensor
    sha256: str

    def on(self, world: World, job: TrainingJob, *, is_compiled: bool) -> "Teacher":
        """Returns the teacher on this rank's device, in the job's precision, which must be decided."""
        plain = replace(
            job.engine,
            zero_stage=1,
            activation_checkpointing="off",
            float8="off",
            fused_mlp=False,
            cuda_graphs=False,
        )
        set_up_blocks(self.model, plain, is_compiled=is_compiled, device=world.device)
        dtype = torch.bfloat16 if job.engine.precision == "bf16" else torch.float32
        return replace(self, model=self.model.to(world.device, dtype), columns=self.columns.to(world.device))

    @torch.no_grad()
    def logits(self, images_BHW3: torch.Tensor) -> torch.Tensor:
        """Returns the teacher's logits for the trained model's classes, float32[B, K]. Images, 0 to 255, are resized to
        the size of a ViT's positions; a ResNet takes any size."""
        side = self.config.image_size
        if not self.config.is_bit and images_BHW3.shape[1:3] != (side, side):
            x_B3HW = images_BHW3.permute(0, 3, 1, 2).float()
            x_B3HW = F.interpolate(x_B3HW, (side, side), mode="bilinear", antialias=True)
            images_BHW3 = x_B3HW.permute(0, 2, 3, 1)
        logits_BK: torch.Tensor = self.model(images_BHW3)
        return logits_BK.float().index_select(1, self.columns)


def distilled_loss(logits_BK: torch.Tensor, teacher_BK: torch.Tensor, config: TeacherConfig) -> torch.Tensor:
    """Returns the mean loss over the batch against a teacher's logits: the KL divergence of the probabilities at the
    temperature t, times t squared, or the cross-entropy with the teacher's most probable class."""
    logits_BK = logits_BK.float()
    if config.target == "hard":
        return F.cross_entropy(logits_BK, teacher_BK.argmax(dim=1))
    t = config.temperature
    student_BK, teacher_BK = F.log_softmax(logits_BK / t, dim=1), F.log_softmax(teacher_BK / t, dim=1)
    return F.kl_div(student_BK, teacher_BK, reduction="batchmean", log_target=True) * t**2


def learned_loss(
    job: TrainingJob,
    logits_BK: torch.Tensor,
    targets: torch.Tensor,
    taught_BK: torch.Tensor | None,
    *,
    distilled_BK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mean loss of a micro-batch with labels. `taught_BK`: the teacher's logits; None without a teacher.
    `distilled_BK`: the logits that learn from it (the distillation token's); None: those that learn from labels."""
    share = job.teacher.share
    if taught_BK is None:
        return classification_loss(logits_BK, targets, name=job.loss, smoothing=job.label_smoothing)
    student_BK = logits_BK if distilled_BK is None else distilled_BK
    distilled = share * distilled_loss(student_BK, taught_BK, job.teacher)
    if share == 1:
        return distilled
    labelled = classification_loss(logits_BK, targets, name=job.loss, smoothing=job.label_smoothing)
    return distilled + (1 - share) * labelled


def teacher_config(job: TrainingJob) -> ModelConfig | None:
    """Returns the configuration of the job's teacher, at the size of the images that it gets; None if the job has none.
    Reads no tensors. Raises UserError if there are no such weights."""
    return _at_size(_opened(job.teacher.weights, say=False).config, job) if job.teacher.weights else None


def _at_size(config: ModelConfig, job: TrainingJob) -> ModelConfig:
    """Returns the configuration with the size of the images that the teacher sees."""
    return replace(config, image_size=job.model.image_size) if config.is_bit else config


def open_teacher(job: TrainingJob, names: Sequence[str], *, say: bool) -> Teacher | None:
    """Reads the job's teacher; None if it has none. `names`: the names of the data's classes. `say`: whether to log
    what it is. Raises UserError if its classes are not the trained model's, or if it has another digest than the job
    names."""
    config = job.teacher
    if not config.weights:
        return None
    weights = _opened(config.weights, say=say)
    refuse_no_head(weights)
    columns = columns_of(weights, names, num_classes=job.model.num_classes)
    digest = _digest_of_settings(weights.config, weights.labels)

    def tensor(name: str) -> torch.Tensor:
        value = weights.tensor(name).float().contiguous()
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
        digest.update(value.numpy().data)
        return value

    model = filled_model(replace(weights, tensor=tensor)).requires_grad_(False)
    found = digest.hexdigest()
    if config.sha256 not in ("", found):
        raise UserError(
            f"the teacher at {config.weights!r} is not the one that teacher.sha256 {config.sha256} names: its "
            f"sha256 is {found}, so its tensors, its model's settings (GELU, heads, ...) or its classes differ",
            todo='give the weights that the run began with as --teacher.weights, or --teacher.sha256 "" in a new run',
        )
    teacher = Teacher(model=model, config=_at_size(weights.config, job), columns=columns, sha256=found)
    if say:
        log.info("%s", words_of(teacher, job))
    return teacher


def _digest_of_settings(config: ModelConfig, labels: Sequence[str]) -> "hashlib._Hash":
    """Returns the sha256 of a teacher, to which its tensors are still to be added, in fp32 and by our names. It begins
    with the model's configuration and the names of its classes in order. Left out are settings that only training or
    initial values depend on, and the image size of a BiT ResNet, which takes any; sizes count as they are, whether the
    name or a field gives them. So the digest is the same in any folder and run. An export that folds LayerScale, the
    head's constant or positions into other tensors is another teacher. Means and deviations of pixels are part of the
    tensors (conversion/)."""
    left_out = (*_OF_TRAINING, *_OF_SIZE, *(("image_size",) if config.is_bit else ()))
    fields = {name: value for name, value in asdict(config).items() if name not in left_out}
    fields |= {
        "size": None if config.is_bit else asdict(config.size),
        "resnet": config.resnet and asdict(config.resnet),
    }
    return hashlib.sha256(json.dumps([fields, list(labels)], sort_keys=True).encode())


def _opened(path: str, *, say: bool) -> Weights:
    """Opens weights of any format. A job without a teacher does not load the readers of other libraries' formats."""
    from pipeline.models.conversion.open_any import open_for_use  # noqa: PLC0415

    try:
        return open_for_use(path, say=say)
    except UserError as error:
        what = f"--teacher.weights: {error.what}"
        raise UserError(what, allowed=error.allowed, todo=error.todo, flags=error.flags) from error


def columns_of(weights: Weights, names: Sequence[str], *, num_classes: int) -> torch.Tensor:
    """Returns the place among the teacher's classes of each of the data's, found by name: int64[K]. Raises UserError
    unless they are the same classes."""
    places = {class_name(label): place for place, label in enumerate(weights.labels)}
    known = [class_name(name) for name in names]
    if len(known) == num_classes == len(weights.labels) and all(name in places for name in known):
        return torch.tensor([places[name] for name in known])
    missing = next((name for name in known if name not in places), None)
    what = f"lacks {shown_value(missing)}" if missing is not None else f"has {len(weights.labels)} classes"
    raise UserError(
        f"the teacher at {weights.where!r} {what}; the model has {num_classes} classes, of which the data has "
        f"{len(known)}: {', '.join(map(shown_value, known[:3]))}, ...",
        allowed="a teacher with exactly the data's classes",
        todo="fine-tune it on this data first, or name its classes with patchline import --labels-file",
    )


def words_of(teacher: Teacher, job: TrainingJob) -> str:
    """Returns a line about the teacher and what is learned from it."""
    config, side = job.teacher, teacher.config.image_size
    learned = "its probabilities" if config.target == "soft" else "its most probable class"
    if config.target == "soft" and config.temperature != 1:
        learned += f" at temperature {config.temperature:g}"
    resized = ""
    if not teacher.config.is_bit and side != job.model.image_size:
        resized = f", for which images are resized to {side} px"
    size = short_count(num_parameters(teacher.config))
    return (
        f"teacher: {teacher.config.name}, {size} parameters, of {config.weights}{resized}; {learned} "
        f"{'are' if config.target == 'soft' else 'is'} {100 * config.share:g} % of the loss"
        f"{', learned by the distillation token' if job.model.distillation_token else ''}"
    )
