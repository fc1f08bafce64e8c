"""Patchline in your own code: `from patchline import train_batches`. Names are loaded on first use.

`import patchline` loads nothing else and is therefore fast; torch is loaded with the first name that needs it.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.data.index import index_tars
    from pipeline.data import (
        AugmentConfig,
        DataConfig,
        MixupConfig,
        RandAugmentConfig,
        ReadConfig,
        mix_images,
        mix_targets,
        mix_weights,
        train_batches,
    )
    from pipeline.data.image_dataset import open_dataset
    from pipeline.evaluation.predictor import load_model
    from pipeline.models import ModelConfig, build_model
    from shards.order import SampleOrder

    __version__: str

__all__ = [
    "AugmentConfig",
    "DataConfig",
    "MixupConfig",
    "ModelConfig",
    "RandAugmentConfig",
    "ReadConfig",
    "SampleOrder",
    "__version__",
    "build_model",
    "index_tars",
    "load_model",
    "mix_images",
    "mix_targets",
    "mix_weights",
    "open_dataset",
    "train_batches",
]

_MODULES = {
    **dict.fromkeys(("AugmentConfig", "DataConfig", "MixupConfig", "RandAugmentConfig"), "pipeline.data.config"),
    **dict.fromkeys(("mix_images", "mix_targets", "mix_weights"), "pipeline.data.mixup"),
    "ReadConfig": "shards.config",
    "ModelConfig": "pipeline.models.config",
    "SampleOrder": "shards.order",
    "build_model": "pipeline.models.build",
    "index_tars": "jobs.data.index",
    "load_model": "pipeline.evaluation.predictor",
    "open_dataset": "pipeline.data.image_dataset",
    "train_batches": "pipeline.data.stream",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("patchline")
    if name not in _MODULES:
        raise AttributeError(f"module 'patchline' has no attribute {name!r}; it has {', '.join(__all__)}")
    module = _MODULES[name]
    _refuse_others(module.partition(".")[0])
    return getattr(import_module(module), name)


def _refuse_others(package: str) -> None:
    """Raises an ImportError with an explanation if another package has the name of one of ours."""
    spec = import_module("importlib.util").find_spec(package)
    found = list(spec.submodule_search_locations or [spec.origin]) if spec else []
    if Path(__file__).resolve().parent.parent / package not in [Path(str(path)).resolve() for path in found]:
        where = ", ".join(map(str, found)) or "nothing"
        message = f"patchline's package {package!r} is hidden by {where}, which comes earlier on sys.path"
        raise ImportError(f"{message}; rename that, or start Python in another folder")


def __dir__() -> list[str]:
    return list(__all__)
