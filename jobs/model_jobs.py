"""The jobs of the stages around models: the settings of `evaluate`, `plan`, `import`, `export` and `demo`.

Configurations only: help and mistakes are answered without loading torch. Training has its own,
pipeline/training/config.py.
"""

from dataclasses import dataclass
from typing import Annotated

from pipeline.config_values import Device, LossName
from pipeline.evaluation.config import EvaluationConfig
from pipeline.models.config import Gelu, ResNetEpsilons
from pipeline.models.conversion.config import Change, Format
from pipeline.training.config import MOST_THREADS, TrainingJob
from shards.config_values import Range, refuse_wrong_values


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """Which weights to evaluate, and on which dataset."""

    weights: str = ""
    """Weights folder to evaluate (RUN/weights)."""
    data: EvaluationConfig = EvaluationConfig()
    """Dataset to evaluate on, and how its images are prepared."""
    loss: LossName = "softmax"
    """Loss that the weights were trained with: softmax (one label per image) or sigmoid (any number of labels)."""
    run_dir: str = ""
    """Folder that scores.json and job.yaml are written to; empty: nowhere."""
    device: Device = "auto"
    """Where to compute; auto: the GPU if there is one, else the CPU."""
    threads: Annotated[int, Range(0, MOST_THREADS, zero="each rank's share of the cores")] = 0
    """Threads of each rank; 0: OMP_NUM_THREADS if it is set, else the rank's share of the cores."""
    json: bool = False
    """Write the scores to standard output as one JSON object, for scripts."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """The job to plan, and the dataset that it is meant for."""

    recipe: str = ""
    """Name to show in the table's title."""
    training: TrainingJob = TrainingJob()
    """Training job to plan."""
    dataset: str = ""
    """Name of the dataset to show in the table."""
    num_images: Annotated[int, Range(0, zero="not known")] = 0
    """Images of the training split; 0: not known."""
    num_classes: Annotated[int, Range(0, zero="not known")] = 0
    """Classes of the training split; 0: not known."""
    days: Annotated[float, Range(above=0)] = 7.0
    """Days that the run may take."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


@dataclass(frozen=True, kw_only=True)
class ImportJob(Change):
    """Weights from elsewhere, and what their file does not say."""

    path: str = ""
    """Weights to import: a published .npz file (vision_transformer's, big_vision's or big_transfer's), a timm or
    Hugging Face folder, or a bare .safetensors, .bin, .pth or .pt file."""
    out: str = ""
    """Weights folder to write."""
    model: str = ""
    """Name of the model that the file must hold, such as vit_b16; empty: any."""
    num_heads: Annotated[int, Range(1)] | None = None
    """Attention heads per layer, if the file does not say; none: the usual value of its format."""
    gelu: Gelu | None = None
    """Form of the GELU, if the file does not say; none: the usual value of its format."""
    layer_norm_epsilon: Annotated[float, Range(above=0)] | None = None
    """Epsilon of every LayerNorm, if the file does not say; none: the usual value of its format."""
    resnet_epsilons: ResNetEpsilons | None = None
    """Epsilons of the ResNet's norms, if the file does not say; none: the usual value of its format."""
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names in the weights, else numbers."""
    run_dir: str = ""
    """Folder that job.yaml is written to; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class ExportJob(Change):
    """Weights of a run, and the format to write."""

    path: str = ""
    """Weights folder to export (RUN/weights)."""
    out: str = ""
    """File (.npz formats) or folder to write."""
    format: Format = "hugging_face"
    """vision_transformer and big_vision: an .npz file; timm, hugging_face and patchline: a folder that timm,
    transformers or patchline loads."""
    run_dir: str = ""
    """Folder that job.yaml is written to; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class DemoJob:
    """How long the demo's runs are, and on how many processes."""

    run_dir: str = "demo-run"
    """Folder for everything that the demo writes; emptied first if an earlier demo made it."""
    steps: Annotated[int, Range(1)] = 300
    """Training steps of the pre-training run."""
    finetune_steps: Annotated[int, Range(1)] = 100
    """Training steps of the fine-tuning run."""
    num_ranks: Annotated[int, Range(1)] = 2
    """Processes that train together."""
    least_accuracy: Annotated[float, Range(0, 1)] = 0.95
    """Accuracy after fine-tuning, 0 to 1, below which the demo has failed."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
