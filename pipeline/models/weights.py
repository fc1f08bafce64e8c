"""Our own weights folder, `model.safetensors` and `config.json`, and fitting weights to a model of another size.

Files of other libraries are read and written in conversion/. Nothing is unpickled.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from pipeline.models.build import Model, shapes_of, unfilled_model
from pipeline.models.config import Mode, ModelConfig
from pipeline.models.labels import completed_labels
from pipeline.models.pos_embed import resample_axis_embeddings, resample_position_embeddings
from pipeline.models.safetensors_stream import head_of, parts_of
from pipeline.models.usage import DEFAULT_USAGE, Usage, usage_of
from shards.errors import UserError

FORMAT = 1
CONFIG_FILE, TENSORS_FILE = "config.json", "model.safetensors"
PIXELS_FILE = "preprocessor_config.json"  # of a folder in Hugging Face's format
_CONFIG_HASH = "config_sha256"
_FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError)
POSITION, AXES = "embed.position", ("embed.position_x", "embed.position_y")
HEAD = ("head.weight", "head.bias")
REPRESENTATION = ("representation.weight", "representation.bias")
TensorByName = Callable[[str], torch.Tensor]
Shapes = Mapping[str, tuple[int, ...]]
_FOREIGN_KEYS = {"model_type", "architecture"}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights in any file: their model, the names of its classes, and each tensor under our name.

    `shapes` holds the tensors that exist: a file may have no head. `tensor` reads one tensor, float32. `assumed`:
    fields of the model that neither the file nor the user gave, with the values taken.
    """

    where: str
    config: ModelConfig
    labels: tuple[str, ...]
    shapes: Shapes
    tensor: TensorByName
    assumed: tuple[str, ...] = ()
    usage: Usage = Usage()


def save_weights(
    folder: Path, *, config: ModelConfig, labels: tuple[str, ...], tensor: TensorByName, usage: Usage = DEFAULT_USAGE
) -> None:
    """Writes a weights folder, whole or absent. The head's constant is folded into its bias.

    `labels` are made complete and unique (labels.py): a dataset may have fewer classes than the model.
    """
    named = completed_labels(labels, num_classes=config.num_classes, where=str(folder))
    model = asdict(config) | {"head_bias": 0.0}
    description = {"format": FORMAT, "model": model, "labels": list(named), "usage": asdict(usage)}
    shapes = shapes_of(config)

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in shapes:
            value = tensor(name).float()
            yield name, value + config.head_bias if name == HEAD[1] else value

    write_folder(folder, description=description, shapes=shapes, tensors=tensors())


def write_folder(
    folder: Path,
    *,
    description: Mapping[str, Any],
    shapes: Shapes,
    tensors: Iterable[tuple[str, torch.Tensor]],
    pixels: Mapping[str, Any] | None = None,
) -> None:
    """`config.json`, `model.safetensors` and, if `pixels` is given, `preprocessor_config.json`.

    `tensors` come in the order of `shapes`, and each is written before the next is read: at most two are in memory.
    Whole or absent: earlier files are removed first, and the tensors, which know their config.json by its hash, come
    last. A folder that is left half-way has no tensors. Raises UserError if it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no folder can be made at {str(folder)!r}: {error.strerror}; give another one, "
            "which this user may write to"
        ) from error
    texts = {CONFIG_FILE: description} | ({PIXELS_FILE: pixels} if pixels is not None else {})
    contents = {name: (json.dumps(text, indent=1) + "\n").encode() for name, text in texts.items()}
    metadata = {_CONFIG_HASH: hashlib.sha256(contents[CONFIG_FILE]).hexdigest(), "format": "pt"}
    try:
        for name, content in contents.items():
            (folder / f"{name}.part").write_bytes(content)
        with (folder / f"{TENSORS_FILE}.part").open("wb") as file:
            file.writelines(parts_of(head_of(shapes, metadata=metadata), _checked(tensors, shapes)))
    except BaseException:
        for name in (*contents, TENSORS_FILE):
            (folder / f"{name}.part").unlink(missing_ok=True)
        with suppress(OSError):  # there was more in it
            folder.rmdir()
        raise
    for name in (TENSORS_FILE, CONFIG_FILE, PIXELS_FILE):
        (folder / name).unlink(missing_ok=True)
    for name in (*contents, TENSORS_FILE):
        (folder / f"{name}.part").replace(folder / name)


def _checked(tensors: Iterable[tuple[str, torch.Tensor]], shapes: Shapes) -> Iterator[torch.Tensor]:
    """The tensors, each of which must be the one that the head of the file announces."""
    for (name, shape), (given, tensor) in zip(shapes.items(), tensors, strict=True):
        if (given, tuple(tensor.shape), tensor.dtype) != (name, shape, torch.float32):
            raise ValueError(f"{given} is {tensor.dtype} {list(tensor.shape)}, not {name}, float32 {list(shape)}")
        yield tensor


def open_weights(path: str) -> Weights:
    """The weights folder at `path`, or that of the run directory there (RUN or RUN/weights).

    Raises UserError if there is none, it is another library's, or its two files do not fit together.
    """
    folder = _folder_at(path)
    _refuse_foreign(folder, path)

    def tensor(name: str) -> torch.Tensor:
        try:
            with safe_open(folder / TENSORS_FILE, framework="pt") as file:
                value: torch.Tensor = file.get_tensor(name).float()
        except _FILE_ERRORS as error:
            raise UserError(f"{name} at {path!r} cannot be read ({error}); export the weights again") from error
        return value

    try:
        content = (folder / CONFIG_FILE).read_bytes()
        config, labels, usage = _described(json.loads(content))
        with safe_open(folder / TENSORS_FILE, framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            written_with = (file.metadata() or {}).get(_CONFIG_HASH)
    except (*_FILE_ERRORS, UserError) as error:
        raise UserError(f"the weights at {path!r} cannot be read ({error}); export them again") from error
    shapes = shapes_of(config)
    refuse_misfits(path, found=found, wanted=shapes)
    if written_with not in (None, hashlib.sha256(content).hexdigest()):  # None: written before there was a hash
        raise UserError(
            f"{CONFIG_FILE} at {path!r} is not the one that {TENSORS_FILE} was written with: it was changed, or the "
            "two are of different exports; export them again"
        )
    return Weights(where=path, config=config, labels=labels, shapes=shapes, tensor=tensor, usage=usage)


def _folder_at(path: str) -> Path:
    """The folder with the two files: `path`, or weights/ in it. The UserError says what is there instead."""
    given = Path(path)
    folder = next((f for f in (given, given / "weights") if (f / CONFIG_FILE).is_file()), given)
    if (folder / CONFIG_FILE).is_file() and (folder / TENSORS_FILE).is_file():
        return folder
    run = given.parent if given.name == "weights" else given
    if (run / "checkpoints").is_dir() and not (run / "DONE").is_file():
        raise UserError(
            f"no weights at {path!r}: the run in {str(run)!r} is not finished, and weights are written at its end; "
            "run its command again to continue it"
        )
    if given.is_file():
        raise UserError(
            f"no weights at {path!r}: it is a file, and a weights folder holds config.json and model.safetensors; "
            "make one of it with patchline import"
        )
    raise UserError(
        f"no weights at {path!r}: a weights folder holds config.json and model.safetensors; "
        "give a finished run (RUN or RUN/weights), or make a folder of other files with patchline import"
    )


def _refuse_foreign(folder: Path, path: str) -> None:
    """UserError if config.json is timm's or Hugging Face's. If it cannot be read, its reader says why."""
    try:
        is_foreign = bool(_FOREIGN_KEYS & json.loads((folder / CONFIG_FILE).read_bytes()).keys())
    except _FILE_ERRORS:
        return
    if is_foreign:
        raise UserError(
            f"the weights at {path!r} are in the format of timm or Hugging Face; make a weights folder of them with "
            "patchline import"
        )


def _described(description: dict[str, Any]) -> tuple[ModelConfig, tuple[str, ...], Usage]:
    """The model, the names of its classes and its usage. UserError if the names are not one per class, or the format is
    newer."""
    if description.get("format", FORMAT) != FORMAT:
        raise UserError(f"its format is {description['format']!r}, allowed: {FORMAT}: it is of another version")
    config, labels = ModelConfig(**description["model"]), tuple(description["labels"])
    if len(labels) != config.num_classes or len(set(labels)) != len(labels):
        raise UserError(
            f"it has {len(labels)} labels, {len(set(labels))} different ones, for {config.num_classes} classes"
        )
    return config, labels, usage_of(description)


def filled_model(weights: Weights) -> Model:
    """The model with these weights, float32, ready for evaluation."""
    with torch.device("meta"):
        model = unfilled_model(weights.config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.tensor(name))
    return model.eval()


def fit_weights(
    weights: Weights, target: ModelConfig, *, initial: TensorByName, new_head: bool, mode: Mode = "paper"
) -> TensorByName:
    """Tensor by name for the model `target` from weights of another size (fine-tuning, section 3.2 of the paper).

    Position embeddings are resampled to the target's grid by `mode`. With `new_head`, the head and the hidden
    pre-training layer are dropped and the target's head is `initial` (zero). Raises UserError with every tensor that
    does not fit, and if the same tensors would compute something else (heads, GELU, epsilons).
    """
    wanted, found = shapes_of(target), weights.shapes
    replaced = (*HEAD, *REPRESENTATION) if new_head else ()
    places = [name for name in (POSITION, *AXES) if name in wanted and name in found]
    skip = {*replaced, *(name for name in places if wanted[name][-1] == found[name][-1])}
    refuse_misfits(
        weights.where,
        advice=_advice(weights.config, target),
        found={name: shape for name, shape in found.items() if name not in skip},
        wanted={name: shape for name, shape in wanted.items() if name not in skip},
    )
    _refuse_other_arithmetic(weights, target)

    def tensor(name: str) -> torch.Tensor:
        if name in replaced:
            return initial(name)
        value = weights.tensor(name)
        if name == POSITION:
            from_grid, num_prefix_tokens = weights.config.grid, target.num_prefix_tokens
            return resample_position_embeddings(
                value[0], from_grid=from_grid, to_grid=target.grid, mode=mode, num_prefix_tokens=num_prefix_tokens
            )[None]
        if name in AXES:
            return resample_axis_embeddings(value, length=wanted[name][0], mode=mode)
        return value

    return tensor


def refuse_misfits(where: str, *, found: Shapes, wanted: Shapes, advice: str = "") -> None:
    """UserError with the tensors that have another shape, are missing or unexpected; `advice`: what to do about it."""
    missing = [f"{name} {list(wanted[name])} is not there" for name in wanted if name not in found]
    extra = [f"{name} {list(found[name])} is not in the model" for name in found if name not in wanted]
    shapes = [
        f"{name} is {list(found[name])}, the model needs {list(shape)}"
        for name, shape in wanted.items()
        if name in found and found[name] != shape
    ]
    if missing or extra or shapes:
        faults = shapes + missing + extra
        listed = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        default = "Give the model the sizes of the weights (--model.name, --model.width, ...), or other weights"
        raise UserError(f"the weights at {where!r} do not fit the model: {listed}. {advice or default}")


def _advice(source: ModelConfig, target: ModelConfig) -> str:
    """The flags that give the model the parts of the weights; empty if both have the same."""
    names = ("pooling", "position")
    flags = [
        f"--model.{name} {getattr(source, name)}" for name in names if getattr(source, name) != getattr(target, name)
    ]
    return f"Give {' '.join(flags)}, or other weights" if flags else ""


def _refuse_other_arithmetic(weights: Weights, target: ModelConfig) -> None:
    """UserError for fields that change what the same tensors compute without changing a shape."""
    source = weights.config
    pairs: list[tuple[str, Any, Any]] = [("resnet_epsilons", source.resnet_epsilons, target.resnet_epsilons)]
    if target.resnet is None:
        pairs = []
    if not target.is_bit:
        pairs += [(field, getattr(source, field), getattr(target, field)) for field in ("gelu", "layer_norm_epsilon")]
        pairs += [("num_heads", source.size.num_heads, target.size.num_heads)]
    differing = [pair for pair in pairs if pair[1] != pair[2]]
    if differing:
        listed = ", ".join(f"model.{field} {was} (the model here has {now})" for field, was, now in differing)
        flags = " ".join(f"--model.{field.replace('_', '-')} {was}" for field, was, _ in differing)
        raise UserError(f"the weights at {weights.where!r} were made with {listed}; give {flags}, or other weights")
