"""Defines the jobs that use, score and convert weights: the settings of `evaluate`, `fewshot`, `predict`, `inspect`,
`weights`, `import` and `export`.

The module has only configurations, so that help and error messages appear without loading torch. The settings of
training are in pipeline/training/settings/job.py.
"""

from dataclasses import dataclass
from typing import Annotated

from jobs.settings import CheckedJob, Recorded
from pipeline.data.config import DataConfig
from pipeline.evaluation.config import NUM_CLASSES_SHOWN, EvaluatedData, FewshotConfig, FewshotImages
from pipeline.models.conversion.config import Change, Format, Hints
from pipeline.shared_settings import Device, LossName
from pipeline.training.settings.job import MOST_THREADS, TrainingJob
from shards.config import HeldOutConfig, SubsetConfig
from shards.config_values import Range, refuse_wrong_values
from shards.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EvaluateJob:
    """Which weights to evaluate, and on which dataset. Images are prepared as in the weights' own evaluation, unless
    flags say otherwise."""

    weights: str = ""
    """Weights to evaluate: a run (RUN), a weights folder, a timm or Hugging Face folder, or a .npz, .safetensors or
    .pth file."""
    data: EvaluatedData = EvaluatedData()
    """Dataset to evaluate on, and how its images are prepared."""
    subset: SubsetConfig = SubsetConfig()
    """Part of the dataset to evaluate on."""
    held_out: HeldOutConfig = HeldOutConfig()
    """Part to evaluate on, which a training run with these values of --data.held-out holds out of the dataset."""
    loss: LossName = TrainingJob.loss
    """Loss that the weights were trained with: softmax (one label per image) or sigmoid (any number of labels)."""
    label_weights: bool = DataConfig.label_weights
    """Use the weights that the dataset's labels were packed with as targets, as --data.label-weights does in training;
    a label of weight 0 is then no label."""
    class_map: str = ""
    """JSON file with the classes of the model that stand for each label of the dataset, as for ObjectNet: {"label":
    ["class", ...]} or {"label": "class; class"}; images of other labels do not count. Empty: labels are matched by
    name."""
    real: str = ""
    """ImageNet-ReaL's real.json: the right classes of each image of ImageNet's validation set. Empty: the dataset's
    labels are used."""
    run_dir: str = ""
    """Folder that scores.json, classes.json, examples.json and job.yaml are written to; empty: for the weights of a
    completed run, a folder in RUN/scores, and for other weights, none."""
    examples: Annotated[int, Range(0, 32)] = 8
    """Right answers, and most confident mistakes, to keep in examples.json: this number of images of each kind."""
    device: Device = TrainingJob.device
    threads: Annotated[int, Range(0, MOST_THREADS, zero="each rank's share of the cores")] = 0
    """Threads of each rank; 0: OMP_NUM_THREADS if it is set, else the rank's share of the cores."""
    json: bool = False
    """Write the scores to standard output as one JSON object, for scripts."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        given = [name for name in ("class_map", "real", "label_weights") if getattr(self, name)]
        if len(given) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise UserError(f"{flags} do not go together; give one of them")


@dataclass(frozen=True, kw_only=True)
class FewshotJob(FewshotConfig):
    """Which weights to measure, and on which images."""

    weights: str = ""
    """Weights folder to measure (RUN/weights), or the run directory."""
    data: FewshotImages = FewshotImages()
    """Images to learn the classes from and to measure on."""
    run_dir: str = ""
    """Folder that fewshot.json and job.yaml are written to; empty: nowhere."""
    device: Device = TrainingJob.device
    threads: Annotated[int, Range(0, MOST_THREADS, zero="each rank's share of the cores")] = EvaluateJob.threads
    json: bool = EvaluateJob.json


@dataclass(frozen=True, kw_only=True)
class PredictJob:
    """The weights to use, and the images to predict. Images are prepared as in the run's own evaluation."""

    weights: str = ""
    """A run (RUN), a weights folder, a timm or Hugging Face folder, or a .npz, .safetensors or .pth file."""
    images: tuple[str, ...] = ()
    """Files to predict, JPEG, PNG or WebP, and folders of such files. They may follow WEIGHTS without the flag."""
    top: Annotated[int, Range(1)] = NUM_CLASSES_SHOWN
    """Classes to show per image."""
    json: bool = False
    """Write one JSON object per line: the image, and the label and probability of each class."""
    device: Device = TrainingJob.device

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")


@dataclass(frozen=True, kw_only=True)
class InspectJob(CheckedJob):
    """Which weights to inspect, and on which images."""

    weights: str = ""
    """Weights folder (RUN/weights), or the run directory."""
    images: str = ""
    """Folder of JPEG, PNG or WebP files, also in subfolders, on which attention is shown; empty: only figures that need
    no image."""
    out: str = ""
    """Folder for the figures and inspect.json; empty: inspect/ in the run directory or weights folder."""
    max_images: Annotated[int, Range(1, 4096)] = 128
    """Number of images over which attention distances are averaged, the first in the folder by name; the paper has
    128."""
    resample_to: Annotated[int, Range(0, 16_384, zero="384/224 of the model's size")] = 0
    """Image size in pixels to show resampled position embeddings for; 0: 384/224 of the model's size."""
    device: Device = TrainingJob.device


@dataclass(frozen=True, kw_only=True)
class WeightsJob:
    """The checkpoint of a run to take weights from, and where to write them."""

    run: str = ""
    """Run directory; the run may still be training."""
    out: str = ""
    """Weights folder to write."""
    step: Annotated[int, Range(0, zero="the newest checkpoint")] = 0
    """Step of the checkpoint; 0: the newest."""
    best: bool = False
    """Take the checkpoint with the best score on the held-out dataset (RUN/best.json)."""
    raw: bool = False
    """Take the raw weights, even if the run averages them (EMA)."""
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names in the run's dataset."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if self.best and self.step:
            raise UserError(
                f"--best with --step {self.step}: the best checkpoint has a step of its own; leave out --best or --step"
            )


@dataclass(frozen=True, kw_only=True)
class ImportJob(Hints, Change):
    """Weights to convert or to change, and facts that their file does not contain."""

    path: str = ""
    """Weights to import: a published .npz file (vision_transformer's, big_vision's or big_transfer's), a timm or
    Hugging Face folder, a run (RUN) or its weights folder, or a bare .safetensors, .bin, .pth, .pth.tar, .pt or .ckpt
    file."""
    out: str = WeightsJob.out
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names in the weights, else numbers."""
    run_dir: str = Recorded.run_dir


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
    run_dir: str = Recorded.run_dir
