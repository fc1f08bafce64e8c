"""Our own weights folder, `model.safetensors` and `config.json`, which is written whole or not at all.

Files of other libraries are read and written in conversion/. Nothing is unpickled.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.models.build import Model, shapes_of, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.models.weights.safetensors import (
    Shapes,
    TensorByName,
    open_safetensors,
    parts_of,
    refuse_misfits,
    refuse_not_finite,
)
from pipeline.models.weights.safetensors_head import head_of
from pipeline.models.weights.usage import DEFAULT_USAGE, Usage, completed_labels, usage_of
from shards.config_values import shown_value
from shards.errors import InvalidDataError, UserError
from shards.files.local_files import at_home, read_local_file
from shards.files.looks import is_a_file, is_a_folder, is_there
from shards.files.typed_json import parse_json, record_from

CONFIG_FILE, TENSORS_FILE = "config.json", "model.safetensors"
PIXELS_FILE = "preprocessor_config.json"  # only in a folder in Hugging Face's format
CONFIG_HASH = "config_sha256"  # a key in the metadata of the tensors
MOST_DESCRIPTION_BYTES = 64 << 20
_NAMES = (TENSORS_FILE, CONFIG_FILE, PIXELS_FILE)
FORMAT = 1
POSITION, AXES = "embed.position", ("embed.position_x", "embed.position_y")
HEAD = ("head.weight", "head.bias")
HEADS = (*HEAD, "head_dist.weight", "head_dist.bias")  # the second one is of the distillation token
HEAD_BIASES = HEADS[1::2]
_HUB_ID = re.compile(r"(?P<prefix>(hf[-_]hub:|hf://)?)(?P<owner>[A-Za-z0-9][\w.-]*)/(?P<name>[A-Za-z0-9][\w.-]*)")
_FOREIGN_KEYS = {"model_type", "architecture"}


def write_folder(
    folder: Path,
    *,
    description: Mapping[str, Any],
    shapes: Shapes,
    tensors: Iterable[tuple[str, torch.Tensor]],
    pixels: Mapping[str, Any] | None = None,
) -> None:
    """Writes `config.json`, `model.safetensors` and, if `pixels` is given, `preprocessor_config.json`.

    `tensors` come in the order of `shapes`, and each is written before the next is read: at most two are in memory. An
    unfinished folder has no tensors: earlier files are removed before the new ones are moved in, and the tensors, which
    record the hash of their config.json, come last. Raises UserError if the folder cannot be made or written to, and
    InvalidDataError for a tensor that is not finite.
    """
    _make_folder(folder)
    texts = {CONFIG_FILE: description} | ({PIXELS_FILE: pixels} if pixels is not None else {})
    contents = {name: (json.dumps(text, indent=1, allow_nan=False) + "\n").encode() for name, text in texts.items()}
    _refuse_long(folder, contents)
    metadata = {CONFIG_HASH: hashlib.sha256(contents[CONFIG_FILE]).hexdigest(), "format": "pt"}
    try:
        for name, content in contents.items():
            (folder / f"{name}.part").write_bytes(content)
        with (folder / f"{TENSORS_FILE}.part").open("wb") as file:
            file.writelines(parts_of(head_of(shapes, metadata=metadata), _checked(tensors, shapes, folder)))
        for name in _NAMES:
            (folder / name).unlink(missing_ok=True)
        for name in (*contents, TENSORS_FILE):
            (folder / f"{name}.part").replace(folder / name)
    except BaseException:
        for name in (*contents, TENSORS_FILE):
            with suppress(OSError):
                (folder / f"{name}.part").unlink(missing_ok=True)
        with suppress(OSError):  # the folder has other files, too
            folder.rmdir()
        raise


def _make_folder(folder: Path) -> None:
    """Makes the folder. Raises UserError if it cannot be made or written to, or if a folder has the name of one of its
    files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = [name for name in _NAMES if is_a_folder(folder / name)]
    except OSError as error:
        raise UserError(
            f"no folder can be made at {str(folder)!r}: {error.strerror}",
            todo="give another one, which this user may write to",
        ) from error
    if taken:
        raise UserError(f"{taken[0]} in {str(folder)!r} is a folder, not a file; move it away, or give another folder")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"{str(folder)!r} cannot be written to; give another one, which this user may write to")


def _refuse_long(folder: Path, contents: Mapping[str, bytes]) -> None:
    for name, content in contents.items():
        if len(content) > MOST_DESCRIPTION_BYTES:
            raise UserError(
                f"{name} for {str(folder)!r} has {len(content):,} bytes; allowed: {MOST_DESCRIPTION_BYTES:,}, the most "
                "that are read again; give fewer or shorter names of classes"
            )


def _checked(tensors: Iterable[tuple[str, torch.Tensor]], shapes: Shapes, folder: Path) -> Iterator[torch.Tensor]:
    """Yields the tensors. Raises ValueError for a tensor that is not the next one in `shapes` or not float32, and
    InvalidDataError for a tensor that is not finite."""
    for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
        if (given, tuple(tensor.shape), tensor.dtype) != (name, shape, torch.float32):
            raise ValueError(f"{given} is {tensor.dtype} {list(tensor.shape)}, not {name}, float32 {list(shape)}")
        yield refuse_not_finite(tensor, f"{name} for {str(folder)!r}")


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A field of the model, or the preparation of its images, and the value that is assumed because neither the file
    nor the user gave one, or because the models here cannot have the file's. `flag`: the flag of `patchline import` for
    another value; empty if there is none. `in_file`: what the file has instead; empty if it has nothing."""

    field: str
    value: str
    flag: str = ""
    in_file: str = ""

    def __str__(self) -> str:
        return f"{self.field} {self.value}" + (f" (the file: {self.in_file})" if self.in_file else "")


def said_of(assumed: Sequence[Assumption]) -> str:
    """Returns what is assumed as text, what the file does not say apart from what it says otherwise."""
    groups = {
        "assumed, as the file does not say": [str(each) for each in assumed if not each.in_file],
        "not as in the file": [str(each) for each in assumed if each.in_file],
    }
    return "; ".join(f"{title}: {', '.join(own)}" for title, own in groups.items() if own)


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights in a file of any format: their model, the names of its classes, and each tensor under our name.

    `shapes` has only the tensors that exist, since a file may have no head. `tensor` reads one tensor as float32.
    """

    where: str
    config: ModelConfig
    labels: tuple[str, ...]
    shapes: Shapes
    tensor: TensorByName
    assumed: tuple[Assumption, ...] = ()
    usage: Usage = Usage()


def save_weights(
    folder: Path, *, config: ModelConfig, labels: tuple[str, ...], tensor: TensorByName, usage: Usage = DEFAULT_USAGE
) -> None:
    """Writes a weights folder, completely or not at all. The head's constant is folded into its bias.

    `labels` are made complete and unique (usage.py): a dataset may have fewer classes than the model.
    """
    named = completed_labels(labels, num_classes=config.num_classes, where=str(folder))
    model = asdict(config) | {"head_bias": 0.0}
    description = {"format": FORMAT, "model": model, "labels": list(named), "usage": asdict(usage)}
    shapes = shapes_of(config)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in shapes:
            value = tensor(name).float()
            yield name, value + config.head_bias if name in HEAD_BIASES else value

    write_folder(folder, description=description, shapes=shapes, tensors=tensors())


def open_weights(path: str) -> Weights:
    """Opens a weights folder. `path`: the folder, or the run that contains it (RUN/weights or RUN).

    Raises UserError if there is none, if it is another library's, or if its two files do not fit together. Reading a
    tensor raises InvalidDataError if it is not finite.
    """
    try:
        folder = _folder_at(path)
    except OSError as error:
        raise UserError(
            f"no weights at {path!r}: {error.strerror}", todo="give a folder that this user may read"
        ) from error
    with _readable(f"the weights at {path!r}"):
        content = read_local_file(folder / CONFIG_FILE, most_bytes=MOST_DESCRIPTION_BYTES)
        description = parse_json(content)
    _refuse_foreign(description, path)
    with _readable(f"the weights at {path!r}"):
        config, labels, usage = _described(description)
        file = open_safetensors(folder / TENSORS_FILE)
    _refuse_layers_without_tensors(path, config, num_tensors=len(file.places))
    shapes = shapes_of(config)
    refuse_misfits(path, found=file.shapes, wanted=shapes)
    written_with = file.metadata.get(CONFIG_HASH)
    if written_with not in (None, hashlib.sha256(content).hexdigest()):  # None: the file has no hash
        raise UserError(
            f"{CONFIG_FILE} at {path!r} is not the one that {TENSORS_FILE} was written with: it was changed, or the "
            "two are of different exports; export them again"
        )

    def tensor(name: str) -> torch.Tensor:
        with _readable(f"{name} at {path!r}"):
            value = file.read(name)
        if not value.is_floating_point():
            raise UserError(
                f"{name} in the weights at {path!r} is of type {value.dtype}; allowed: floating-point numbers: whole "
                "numbers are quantised weights, whose scale is not applied here; export them again"
            )
        return refuse_not_finite(value.float(), f"{name} in the weights at {path!r}")

    return Weights(where=path, config=config, labels=labels, shapes=shapes, tensor=tensor, usage=usage)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, UserError) as error:
        raise InvalidDataError(f"{what} cannot be read ({error})", todo="export them again") from error


def _folder_at(path: str) -> Path:
    """Returns the folder with the two files: `path`, or weights/ in it. Raises a UserError that says what is there
    instead."""
    given = Path(at_home(path))
    folder = next((f for f in (given, given / "weights") if is_a_file(f / CONFIG_FILE)), given)
    if is_a_file(folder / CONFIG_FILE) and is_a_file(folder / TENSORS_FILE):
        return folder
    run = given.parent if given.name == "weights" else given
    if is_a_folder(run / "checkpoints") and not is_a_file(run / "DONE"):
        raise UserError(
            f"no weights at {path!r}: the run in {str(run)!r} is not finished, and weights are written at its end; "
            "run its command again to continue it, or take those of a checkpoint with patchline weights"
        )
    if is_a_file(given):
        raise UserError(
            f"no weights at {path!r}: it is a file, and a weights folder holds config.json and model.safetensors; "
            "make one of it with patchline import"
        )
    if not is_there(given):
        refuse_hub_id(path)
    what = f"it has no {CONFIG_FILE} with {TENSORS_FILE}" if is_there(given) else "there is no such file or folder"
    raise UserError(
        f"no weights at {path!r}: {what}; give a finished run (RUN or RUN/weights), or weights that patchline import "
        "reads: a timm or Hugging Face folder, or a .npz, .safetensors or .pth file"
    )


def refuse_hub_id(path: str) -> None:
    """Raises UserError, with the command that fetches the weights, if a path that does not exist has the form of a
    model's id on the Hugging Face hub: OWNER/NAME, where OWNER is no folder, or with a prefix of timm's."""
    found = _HUB_ID.fullmatch(path)
    if found and (found["prefix"] or not is_a_folder(Path(found["owner"]))):
        name, repository = found["name"], f"{found['owner']}/{found['name']}"
        is_id = "it is" if found["prefix"] else "if it is"
        raise UserError(
            f"no weights at {path!r}: there is no such file or folder; {is_id} a model on the Hugging Face hub, give "
            f"the folder {name} that this makes (pip install huggingface_hub):\n"
            f"hf download {repository} --local-dir {name}"
        )


def is_our_description(description: Mapping[str, Any]) -> bool:
    """Returns whether a config.json belongs to a weights folder of ours and not to another library's folder."""
    return not _FOREIGN_KEYS & description.keys() and "model" in description


def _refuse_foreign(description: Any, path: str) -> None:
    """Raises UserError if config.json is timm's or Hugging Face's."""
    if isinstance(description, dict) and _FOREIGN_KEYS & description.keys():
        raise UserError(
            f"the weights at {path!r} are in the format of timm or Hugging Face; make a weights folder of them with "
            "patchline import"
        )


def _described(description: Any) -> tuple[ModelConfig, tuple[str, ...], Usage]:
    """Returns the model that a config.json describes, the names of its classes, and its usage.

    Raises ValueError or UserError if a field is missing or wrong, the names are not one per class, or the format is
    another one.
    """
    if not isinstance(description, dict):
        raise ValueError(f"config.json is {shown_value(description)}; allowed: an object")
    if description.get("format", FORMAT) != FORMAT:
        said = shown_value(description["format"])
        raise UserError(f"its format is {said}, allowed: {FORMAT}: it is of another version")
    for field in ("model", "labels"):
        if field not in description:
            raise ValueError(f"{field!r} is missing in config.json")
    config, labels = record_from(ModelConfig, description["model"], where="model."), description["labels"]
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError(f"labels is {shown_value(labels)}; allowed: a list of texts")
    if len(labels) != config.num_classes or len(set(labels)) != len(labels):
        raise UserError(
            f"it has {len(labels)} labels, {len(set(labels))} different ones, for {config.num_classes} classes"
        )
    return config, tuple(labels), usage_of(description)


def _refuse_layers_without_tensors(path: str, config: ModelConfig, *, num_tensors: int) -> None:
    """Raises InvalidDataError if there are more layers than tensors, before any layer is built."""
    num_layers = sum(config.resnet.units if config.resnet else ()) + (0 if config.is_bit else config.num_blocks)
    if num_layers > num_tensors:
        raise InvalidDataError(
            f"the weights at {path!r} do not fit together: {CONFIG_FILE} says {num_layers} layers, {TENSORS_FILE} has "
            f"{num_tensors} tensors; export them again"
        )


def refuse_no_classifier(weights: Weights) -> None:
    """Raises UserError for weights of masked patch prediction, whose classes are colours of patches."""
    if weights.config.masked_patches:
        raise UserError(
            f"the weights at {weights.where!r} predict the colours of masked patches and classify no images; "
            "fine-tune them first (patchline finetune), or measure them with patchline fewshot"
        )


def filled_model(weights: Weights) -> Model:
    """Builds the model with these weights, float32, ready for evaluation. Weights without a head get one of zeros."""
    config = weights.config
    with torch.device("meta"):
        model = unfilled_model(config if config.num_classes else replace(config, num_classes=1))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_missing = name in HEADS and name not in weights.shapes
            parameter.copy_(torch.zeros(()) if is_missing else weights.tensor(name))
    return model.eval()


def usage_at(weights: Weights, image_size: int) -> Usage:
    """Returns how the weights are used if their model gets another image size: the crop stays the same share of the
    image."""
    usage, own = weights.usage, weights.config.image_size
    if image_size == own or not usage.transform.short_side:
        return usage
    short_side = max(1, round(usage.transform.short_side * image_size / own))
    return replace(usage, transform=replace(usage.transform, short_side=short_side))


def refuse_no_head(weights: Weights) -> None:
    """Raises UserError for weights that classify no images, because they have no head or predict masked patches."""
    refuse_no_classifier(weights)
    if not weights.config.num_classes or any(name not in weights.shapes for name in HEAD):
        raise UserError(
            f"{weights.where!r} has no head ({HEAD[0]} is not there), so it classifies no images; fine-tune the "
            "weights first (patchline finetune), or measure them with patchline fewshot"
        )
