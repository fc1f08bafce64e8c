"""Defines the jobs of the stages that make and check datasets: the settings of `pack`, `index`, `verify` and `card`.

The module has only configurations, so that help and error messages appear without loading the libraries of a stage.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jobs.settings import CheckedJob, Recorded
from shards.adoption.foreign_samples import SampleRules
from shards.class_labels import LabelRules
from shards.config_values import Range, refuse_wrong_values, shown_value, whole_number
from shards.errors import UserError
from shards.images.config import ImageChecks, ImageLimits, Resize
from shards.packing.config import MOST_SEED, About, DatasetSettings, Dedup, PackSpec
from shards.sources.archives import ClassTarsSource, TarOfTarsSource
from shards.sources.kinds import DigitsSource, FlatSource, FolderSource, ManifestSource, ParquetSource, VtabSource

_MOST_PICTURES = 96  # every picture is embedded in the card
Phase = Literal["all", "scan", "plan", "shards", "merge"]


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """What to pack, and where to write it.

    `run_dir` is not in the dataset, so the dataset's bytes do not depend on who packed it.
    """

    out: str = ""
    """Folder or s3://bucket/prefix that the dataset is written to."""
    source: (
        DigitsSource
        | FolderSource
        | FlatSource
        | ParquetSource
        | ManifestSource
        | ClassTarsSource
        | TarOfTarsSource
        | VtabSource
    ) = field(default_factory=FolderSource)
    """Images to pack, and their labels."""
    split: str = DatasetSettings.split
    split_test: Annotated[float, Range(0, below=1, zero="none")] = PackSpec.split_test
    """Share of each class to set aside as the test split, such as 0.2. The test split is packed first, to OUT-test.
    Copies of an image stay in one split; the seed chooses the images."""
    labels_file: str = DatasetSettings.labels_file
    labels: LabelRules = DatasetSettings.labels
    description: str = About.description
    licence: str = About.licence
    samples_per_shard: Annotated[int, Range(1)] = PackSpec.samples_per_shard
    samples_per_block: Annotated[int, Range(1)] = DatasetSettings.samples_per_block
    seed: Annotated[int, Range(0, MOST_SEED)] = PackSpec.seed
    limits: ImageLimits = DatasetSettings.limits
    images: ImageChecks = PackSpec.images
    dedup: Dedup = PackSpec.dedup
    resize: Resize = PackSpec.resize
    unlabeled: Literal["refuse", "keep"] = PackSpec.unlabeled
    workers: Annotated[int, Range(1)] = 1
    """Worker processes."""
    phase: Phase = "all"
    """Phase to run; all: one after the other."""
    part: str = "0/1"
    """Share I/N of the phases scan and shards, I from 0 to N-1: task I of a job array of N."""
    max_quarantined: Annotated[float, Range(0, 1)] = 0.01
    """Share of images, 0 to 1, that may be refused before the job stops; duplicates do not count."""
    run_dir: str = Recorded.run_dir

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        if self.share[1] > 1 and self.phase not in ("scan", "shards"):
            raise UserError(f"--part {self.part} needs --phase scan or --phase shards; the other phases are one task")
        if self.split_test and self.split not in ("train", "test"):
            raise UserError(
                f"--split is {shown_value(self.split)} with --split-test, which makes the splits train and test; leave "
                "--split out to pack both, or give --split test for the second alone"
            )
        if self.split_test and isinstance(self.source, VtabSource):
            raise UserError(
                "--split-test is given for a task of VTAB-1k, which has a test set; pack it with --split test"
            )
        self.about()  # refuses a text that is too long before packing

    @property
    def share(self) -> tuple[int, int]:
        """`part` as two numbers, I and N."""
        first, _, count = self.part.partition("/")
        number, num_parts = whole_number(first), whole_number(count)
        if number is None or num_parts is None or number >= num_parts:
            what = f"--part is {shown_value(self.part)}"
            raise UserError(f"{what}; allowed: I/N with I from 0 to N-1, for example 0/8")
        return number, num_parts

    def about(self) -> About:
        """Returns the description and the licence, which the manifest has for readers."""
        return About(description=self.description, licence=self.licence)


@dataclass(frozen=True, kw_only=True)
class IndexJob:
    """Existing WebDataset tars, and how to read their samples."""

    url: str = ""
    """The tars: a folder or s3://bucket/prefix (all *.tar below), or a pattern such as 'DIR/train-{0000..1023}.tar'."""
    index_url: str = ""
    """Folder or s3://bucket/prefix that the index is written to; empty: beside the tars."""
    tars_file: str = ""
    """File that names the tars, one path below the URL per line; empty: all that are found."""
    split: str = DatasetSettings.split
    image_keys: tuple[str, ...] = SampleRules.image_keys
    label_key: str = SampleRules.label_key
    label_field: str = SampleRules.label_field
    """Field of the member json that is the label, or a list of labels; empty: --label-key is used."""
    unlabeled: Literal["refuse", "keep"] = SampleRules.unlabeled
    labels_file: str = DatasetSettings.labels_file
    labels: LabelRules = DatasetSettings.labels
    description: str = About.description
    licence: str = About.licence
    samples_per_block: Annotated[int, Range(1)] = DatasetSettings.samples_per_block
    limits: ImageLimits = DatasetSettings.limits
    workers: Annotated[int, Range(1)] = PackJob.workers
    max_quarantined: Annotated[float, Range(0, 1)] = PackJob.max_quarantined
    """Share of samples, 0 to 1, that may be refused before the job stops."""
    run_dir: str = Recorded.run_dir

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        self.about()

    def about(self) -> About:
        """Returns the description and the licence, which the manifest has for readers."""
        return About(description=self.description, licence=self.licence)


@dataclass(frozen=True, kw_only=True)
class VerifyJob(CheckedJob):
    """The dataset to check."""

    url: str = ""
    """Dataset to check: a folder or s3://bucket/prefix."""
    deep: bool = False
    """Decode every image as well."""
    workers: Annotated[int, Range(1)] = PackJob.workers
    run_dir: str = Recorded.run_dir


@dataclass(frozen=True, kw_only=True)
class CardJob(CheckedJob):
    """The dataset to show."""

    url: str = ""
    """Dataset to show: a folder or s3://bucket/prefix."""
    num_mosaic: Annotated[int, Range(0, _MOST_PICTURES)] = 72
    """Images shown as pictures, 0 to 96."""
