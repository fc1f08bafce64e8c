"""Defines the jobs of the stages that make and check datasets: the settings of `pack`, `index`, `verify` and `card`.

The module has only configurations, so that help and error messages appear without loading the libraries of a stage.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from jobs.settings import CheckedJob
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

    `run_dir` is not in the dataset, so its bytes do not depend on who packed it.
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
    split: str = "train"
    """Name of the split, such as train or test."""
    split_test: Annotated[float, Range(0, below=1, zero="none")] = 0.0
    """Share of each class to set aside as the test split, such as 0.2. The test split is packed first, to OUT-test.
    Copies of an image stay in one split; the seed chooses the images."""
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names found, sorted."""
    labels: LabelRules = field(default_factory=LabelRules)
    """How labels are read that could be meant two ways."""
    description: str = ""
    """Description of the dataset, for its manifest and card; can also be added after packing."""
    licence: str = ""
    """Licence of the images, for the manifest and card; can also be added after packing."""
    samples_per_shard: Annotated[int, Range(1)] = PackSpec.samples_per_shard
    """Images per shard (a tar file)."""
    samples_per_block: Annotated[int, Range(1)] = DatasetSettings.samples_per_block
    """Images per block, which training reads in one request; 8 to 16 MB suit most stores."""
    seed: Annotated[int, Range(0, MOST_SEED)] = 0
    """Seed for the order of the images in the shards."""
    limits: ImageLimits = field(default_factory=ImageLimits)
    """Largest images that are accepted; others are quarantined."""
    images: ImageChecks = field(default_factory=ImageChecks)
    """Damaged images to leave out."""
    dedup: Dedup = field(default_factory=Dedup)
    """Duplicates to leave out."""
    resize: Resize = field(default_factory=Resize)
    """Images to store as smaller copies."""
    unlabeled: Literal["refuse", "keep"] = "refuse"
    """Whether images without a label are quarantined, or packed. Scores then leave them out, as ImageNet-ReaL does."""
    workers: Annotated[int, Range(1)] = 1
    """Worker processes."""
    phase: Phase = "all"
    """Phase to run; all: one after the other."""
    part: str = "0/1"
    """Share I/N of the phases scan and shards, I from 0 to N-1: task I of a job array of N."""
    max_quarantined: Annotated[float, Range(0, 1)] = 0.01
    """Share of images, 0 to 1, that may be refused before the job stops; duplicates do not count."""
    run_dir: str = ""
    """Folder that job.yaml is written to; empty: nowhere."""

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
        """Returns the texts for people in the manifest."""
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
    split: str = "train"
    """Name of the split, such as train or test."""
    image_keys: tuple[str, ...] = SampleRules.image_keys
    """Suffixes of a sample's image; the first one found is used."""
    label_key: str = SampleRules.label_key
    """Suffix of the member whose text is the label, an integer or a name."""
    label_field: str = ""
    """Field of the member json that is the label, or a list of labels; empty: --label-key is used."""
    labels_file: str = ""
    """File with one class name per line, in the order of their ids; empty: the names found, sorted."""
    labels: LabelRules = field(default_factory=LabelRules)
    """How labels are read that could be meant two ways."""
    description: str = ""
    """Description of the dataset, for its manifest and card; can also be added after packing."""
    licence: str = ""
    """Licence of the images, for the manifest and card; can also be added after packing."""
    samples_per_block: Annotated[int, Range(1)] = DatasetSettings.samples_per_block
    """Images per block, which training reads in one request; 8 to 16 MB suit most stores."""
    limits: ImageLimits = field(default_factory=ImageLimits)
    """Largest images that are accepted; others are quarantined."""
    workers: Annotated[int, Range(1)] = 1
    """Worker processes."""
    max_quarantined: Annotated[float, Range(0, 1)] = 0.01
    """Share of samples, 0 to 1, that may be refused before the job stops."""
    run_dir: str = ""
    """Folder that job.yaml is written to; empty: nowhere."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="")
        self.about()

    def about(self) -> About:
        """Returns the texts for people in the manifest."""
        return About(description=self.description, licence=self.licence)


@dataclass(frozen=True, kw_only=True)
class VerifyJob(CheckedJob):
    """The dataset to check."""

    url: str = ""
    """Dataset to check: a folder or s3://bucket/prefix."""
    deep: bool = False
    """Decode every image as well."""
    workers: Annotated[int, Range(1)] = 1
    """Worker processes."""
    run_dir: str = ""
    """Folder that job.yaml is written to; empty: nowhere."""


@dataclass(frozen=True, kw_only=True)
class CardJob(CheckedJob):
    """The dataset to show."""

    url: str = ""
    """Dataset to show: a folder or s3://bucket/prefix."""
    num_mosaic: Annotated[int, Range(0, _MOST_PICTURES)] = 72
    """Images shown as pictures, 0 to 96."""
