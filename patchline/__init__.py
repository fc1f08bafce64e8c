"""Pre-train Vision Transformers; use their datasets and models in your own code.

    import patchline

    digits = patchline.open_dataset("data/digits")
    batches = patchline.train_batches("data/digits", global_batch=64, image_size=32)
    model = patchline.load_model("runs/digits/weights")

help(patchline.NAME) describes each name, and docs/python.md has examples. Each name is loaded when it is first used, so
`import patchline` is fast, and reading a dataset needs no torch.

    open_dataset         the images of a packed dataset by number; to_torch() for a DataLoader
    index_tars           makes a dataset from existing WebDataset tars, without changing them
    train_batches        batches for a training loop: the same on any number of ranks, and resumable
    train_samples        the same samples by number, for a DataLoader whose workers run a transform of your own
    load_model           a trained model that predicts; .model is a torch module
    build_model          a new model from a ModelConfig
    open_weights         the tensors and the configuration in a weights folder
    recipes              functions that return whole jobs: recipes.pretrain.digits_smoke()

    DataConfig           how to shuffle, read and augment: AugmentConfig, RandAugmentConfig, MixupConfig, ReadConfig
    Sample               what a transform of your own gets
    EvaluationTransform  how images are resized when a model is scored
    SampleOrder          the order of an epoch's samples
    draw_mix             mixup and CutMix for your own loop, with mix_weights, mix_images and mix_targets
    resample_position_embeddings   fits position embeddings to another image size
    UserError            a mistake in settings or data; InvalidDataError and UnreachableError are subclasses
    TransientError       a fault outside, after which the same command continues; StorageError is a subclass
    WillNotSucceedError  the same command would end in the same way
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# There is no __all__, so that help(patchline) is the text above and not many pages about every class.
if TYPE_CHECKING:
    import jobs.recipes.finetune
    import jobs.recipes.pack
    import jobs.recipes.pretrain  # noqa: F401 - a type checker then knows recipes.STAGE
    from jobs import recipes as recipes
    from jobs.data.index import index_tars as index_tars
    from pipeline.data.config import AugmentConfig as AugmentConfig
    from pipeline.data.config import DataConfig as DataConfig
    from pipeline.data.config import MixupConfig as MixupConfig
    from pipeline.data.config import RandAugmentConfig as RandAugmentConfig
    from pipeline.data.image_dataset import open_dataset as open_dataset
    from pipeline.data.mixup import draw_mix as draw_mix
    from pipeline.data.mixup import mix_images as mix_images
    from pipeline.data.mixup import mix_targets as mix_targets
    from pipeline.data.mixup import mix_weights as mix_weights
    from pipeline.data.samples import Sample as Sample
    from pipeline.data.stream import train_batches as train_batches
    from pipeline.data.stream import train_samples as train_samples
    from pipeline.evaluation.predictor import load_model as load_model
    from pipeline.models import ModelConfig as ModelConfig
    from pipeline.models import build_model as build_model
    from pipeline.models.positions import resample_position_embeddings as resample_position_embeddings
    from pipeline.models.weights.folder import open_weights as open_weights
    from pipeline.shared_settings import EvaluationTransform as EvaluationTransform
    from shards.config import ReadConfig as ReadConfig
    from shards.errors import InvalidDataError as InvalidDataError
    from shards.errors import StorageError as StorageError
    from shards.errors import TransientError as TransientError
    from shards.errors import UnreachableError as UnreachableError
    from shards.errors import UserError as UserError
    from shards.errors import WillNotSucceedError as WillNotSucceedError
    from shards.order import SampleOrder as SampleOrder

    __version__: str

_ERRORS = (
    *("InvalidDataError", "StorageError", "TransientError"),
    *("UnreachableError", "UserError", "WillNotSucceedError"),
)
_MODULES = {
    **dict.fromkeys(("AugmentConfig", "DataConfig", "MixupConfig", "RandAugmentConfig"), "pipeline.data.config"),
    **dict.fromkeys(("mix_images", "mix_targets", "mix_weights"), "pipeline.data.mixup"),
    **dict.fromkeys(_ERRORS, "shards.errors"),
    "EvaluationTransform": "pipeline.shared_settings",
    "ModelConfig": "pipeline.models.config",
    "ReadConfig": "shards.config",
    "SampleOrder": "shards.order",
    "build_model": "pipeline.models.build",
    "draw_mix": "pipeline.data.mixup",
    "index_tars": "jobs.data.index",
    "load_model": "pipeline.evaluation.predictor",
    "open_dataset": "pipeline.data.image_dataset",
    "open_weights": "pipeline.models.weights.folder",
    "recipes": "jobs",
    "resample_position_embeddings": "pipeline.models.positions",
    "Sample": "pipeline.data.samples",
    "train_batches": "pipeline.data.stream",
    "train_samples": "pipeline.data.stream",
}
_MARK = b'\nDISTRIBUTION = "patchline"'  # in the __init__.py of each of our packages
_STAGES = ("finetune", "pack", "pretrain")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("patchline")
    if name not in _MODULES:
        raise AttributeError(f"module 'patchline' has no attribute {name!r}; it has {', '.join(__dir__())}")
    module = _MODULES[name]
    refuse_others(("shards", "pipeline", "jobs") if module.startswith("jobs") else ("shards", "pipeline"))
    if name == "recipes":
        for stage in _STAGES:
            import_module(f"jobs.recipes.{stage}")
    return getattr(import_module(module), name)


def refuse_others(packages: tuple[str, ...]) -> None:
    """Raises ImportError, with an explanation, if another package hides one of ours or has overwritten it.

    Our packages have common names, which users' folders and other distributions may have too, and pip overwrites files
    silently.
    """
    for package in packages:
        ours = Path(__file__).resolve().parent.parent / package
        init = ours / "__init__.py"
        if not init.is_file() or _MARK not in init.read_bytes():
            raise ImportError(
                f"{init} is not Patchline's: another distribution with a package {package!r} was installed over it or "
                "removed with it; use an environment for each of the two, and repair this one: "
                "python -m pip install --force-reinstall --no-deps patchline (in a checkout: git checkout)"
            )
        places = _places(package)
        if ours not in [Path(place).resolve() for place in places]:
            found = ", ".join(places) or "missing"
            raise ImportError(
                f"the package {package!r} that Python finds is not Patchline's: it is {found}, and Patchline's is "
                f"{ours}; rename the other one, or start Python where it is not found "
                "(another folder, another PYTHONPATH, or an environment with only Patchline)"
            )


def _places(package: str) -> list[str]:
    """Returns what an import of this name finds: the folders of a package, or the file of a module."""
    loaded = sys.modules.get(package)
    if loaded is not None:
        return [*map(str, getattr(loaded, "__path__", None) or [getattr(loaded, "__file__", None) or "built in"])]
    spec = import_module("importlib.util").find_spec(package)
    return [*map(str, spec.submodule_search_locations or [spec.origin])] if spec else []


def __dir__() -> list[str]:
    return sorted((*_MODULES, "__version__"))
