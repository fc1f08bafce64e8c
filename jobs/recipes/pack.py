"""Recipes of `patchline pack`, one for each kind of source. Flags override any field."""

from collections.abc import Mapping

from jobs.recipes import recipes_in
from jobs.settings.data import PackJob
from shards.packing.config import Dedup
from shards.sources.kinds import (
    ClassTarsSource,
    DigitsSource,
    FlatSource,
    FolderSource,
    ManifestSource,
    ParquetSource,
    TarOfTarsSource,
    VtabSource,
)

# The flags of each recipe's commands in help.
COMMAND_FLAGS: Mapping[str, tuple[str, ...]] = {
    "folder": ("--source.root ROOT --out URL --samples-per-shard 1000 --workers 8",),
    "flat": ("--source.root ROOT --out URL", "--source.root ROOT --source.labels-csv labels.csv --out URL"),
    "class_tars": ("--source.root ROOT --out URL --workers 8",),
    "tar_of_tars": ("--source.path ILSVRC2012_img_train.tar --out URL --workers 8",),
    "parquet": ("--source.files 'DIR/train-*.parquet' --out URL",),
    "manifest": ("--source.files images.csv --source.weights-column weights --out URL --workers 8",),
    "digits": ("--out URL", "--split test --out URL-test"),
    "cifar10": ("--source.files 'DIR/{split}.parquet' --split test --out URL-test",),
    "vtab": (
        "--source.task svhn --source.root DIR --out URL/svhn",
        "--source.task svhn --source.root DIR --split test --out URL/svhn-test",
    ),
}
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)


def folder() -> PackJob:
    """Class folders, ImageNet style: ROOT/CLASS/*.JPEG; the labels are the sorted names of the folders.

    ROOT is a folder or s3://bucket/prefix; images may be deeper in a class folder. Result: one dataset at URL.
    """
    return PackJob(source=FolderSource())


def flat() -> PackJob:
    """One folder of images with the label in their names (n01440764_tench.JPEG) or in a CSV.

    ROOT is a folder or s3://bucket/prefix. Result: one dataset at URL.
    """
    return PackJob(source=FlatSource())


def class_tars() -> PackJob:
    """A folder with one tar per class, as in ImageNet-21k's winter 2021 release: ROOT/n01440764.tar and 19,166 more.

    ROOT is a folder or s3://bucket/prefix; nothing is unpacked. Result: one dataset at URL.
    """
    return PackJob(source=ClassTarsSource())


def tar_of_tars() -> PackJob:
    """One tar of class tars, such as ILSVRC2012_img_train.tar, at a path or s3://bucket/key; nothing is unpacked.

    Result: one dataset at URL, 1,281,167 samples of 1,000 classes for ILSVRC 2012.
    """
    return PackJob(source=TarOfTarsSource())


def parquet() -> PackJob:
    """Parquet files with embedded images, the layout of Hugging Face datasets (image: bytes, path; label).

    --source.files takes files, folders or patterns, local or on s3://. Result: one dataset at URL.
    """
    return PackJob(source=ParquetSource())


def manifest() -> PackJob:
    """A CSV or Parquet file that lists images by path or URL with a label, or with several and their weights (JFT).

    Columns: path, label (in a CSV: LABEL or LABEL|LABEL) and, optionally, weights; other names are set by flags.
    `--source.keep-copies` fetches no URL twice. Result: one dataset at URL.
    """
    return PackJob(source=ManifestSource())


def digits() -> PackJob:
    """Scikit-learn's handwritten digits, enlarged to 32x32 PNG; nothing is downloaded.

    Result: 1,438 training samples of 10 classes, or 359 test samples with `--split test`.
    """
    return PackJob(source=DigitsSource(), samples_per_shard=256, samples_per_block=32)


def cifar10() -> PackJob:
    """CIFAR-10 (Krizhevsky 2009) from its Parquet files; {split} in the path becomes train or test.

    Result: 50,000 training samples of 10 classes, or 10,000 test samples with `--split test`; duplicates are
    kept, since published results are measured on all of them.
    """
    return PackJob(source=ParquetSource(label_names=CIFAR10_CLASSES), dedup=Dedup(duplicates="keep"))


def vtab() -> PackJob:
    """A task of VTAB-1k (Zhai et al., 2019), from the files of TensorFlow Datasets (TFDS) or from the originals.

    DIR is the data folder of `tfds build`. Source of parts and labels: github.com/google-research/task_adaptation.
    Result: 1,000 training samples, their parts with `--split train800` and `--split val200`, or the test set;
    duplicates are kept, since published results are measured on all of them.
    """
    return PackJob(source=VtabSource(), dedup=Dedup(duplicates="keep"))


RECIPES = recipes_in(globals())
