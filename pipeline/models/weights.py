"""Weights in and out: a folder with `model.safetensors` and `config.json`; nothing is unpickled."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipeline.models.build import Model, shapes_of, unfilled_model
from pipeline.models.config import ModelConfig
from pipeline.models.pos_embed import resample_position_embeddings
from shards.errors import UserError

FORMAT = 1
POSITION, HEAD = "embed.position", ("head.weight", "head.bias")
REPRESENTATION = ("representation.weight", "representation.bias")
TensorByName = Callable[[str], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """A weights folder: what model it is of, what its classes are called, and where its tensors lie."""

    folder: Path
    config: ModelConfig
    labels: tuple[str, ...]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, float32, read on its own."""
        with safe_open(self.folder / "model.safetensors", framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name).float()
        return tensor


def save_weights(folder: Path, *, config: ModelConfig, labels: tuple[str, ...], tensor: TensorByName) -> None:
    """Writes a weights folder, whole or absent. The head's constant is folded into its bias."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor(name).float().contiguous() for name in shapes_of(config)}
    tensors["head.bias"] = tensors["head.bias"] + config.head_bias
    description = {"format": FORMAT, "model": asdict(config) | {"head_bias": 0.0}, "labels": list(labels)}
    waiting = folder / "model.safetensors.part"
    save_file(tensors, waiting, metadata={"format": "pt"})
    (folder / "config.json.part").write_text(json.dumps(description, indent=1) + "\n")
    (folder / "config.json.part").replace(folder / "config.json")
    waiting.replace(folder / "model.safetensors")


def open_weights(path: str) -> Weights:
    """The weights folder at `path`. Raises UserError where there is none, or its two files do not fit together."""
    folder = Path(path)
    if not (folder / "config.json").is_file() or not (folder / "model.safetensors").is_file():
        raise UserError(
            f"no weights at {path!r}: a weights folder holds config.json and model.safetensors; "
            "give the weights/ folder of a finished run (RUN/weights)"
        )
    try:
        description = json.loads((folder / "config.json").read_text())
        config = ModelConfig(**description["model"])
        weights = Weights(folder=folder, config=config, labels=tuple(description["labels"]))
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (ValueError, KeyError, TypeError, SafetensorError) as error:
        raise UserError(f"the weights at {path!r} can not be read ({error}); export them again") from error
    _refuse_misfits(path, found=found, wanted=dict(shapes_of(config)))
    return weights


def load_model(weights: Weights) -> Model:
    """The model with these weights, float32, ready for evaluation."""
    with torch.device("meta"):
        model = unfilled_model(weights.config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.tensor(name))
    return model.eval()


def fit_weights(weights: Weights, target: ModelConfig, *, initial: TensorByName, new_head: bool) -> TensorByName:
    """Tensor by name for the model `target` from weights of another size (fine-tuning, section 3.2 of the paper).

    Position embeddings are resampled to the target's grid. With `new_head`, head and hidden pre-training layer are
    dropped and the target's head is `initial` (zero). Raises UserError listing every tensor that does not fit.
    """
    wanted = dict(shapes_of(target))
    found = dict(shapes_of(weights.config))
    replaced = (*HEAD, *REPRESENTATION) if new_head else ()
    skip = {*replaced, POSITION} if wanted[POSITION][2] == found[POSITION][2] else set(replaced)
    _refuse_misfits(
        str(weights.folder),
        found={name: shape for name, shape in found.items() if name not in skip},
        wanted={name: shape for name, shape in wanted.items() if name not in skip},
    )

    def tensor(name: str) -> torch.Tensor:
        if name in replaced:
            return initial(name)
        value = weights.tensor(name)
        if name != POSITION:
            return value
        return resample_position_embeddings(
            value[0],
            from_grid=weights.config.grid,
            to_grid=target.grid,
            num_prefix_tokens=target.num_prefix_tokens,
        )[None]

    return tensor


def _refuse_misfits(where: str, *, found: dict[str, tuple[int, ...]], wanted: dict[str, tuple[int, ...]]) -> None:
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
        raise UserError(
            f"the weights at {where!r} do not fit the model: {listed}. "
            "Give the model the sizes of the weights (--model.name, --model.width, ...), or other weights"
        )
