"""Recipes of `patchline pack`: where images come from. Every field can be overridden on the command line."""

from jobs.pack import PackJob
from shards.sources import DigitsSource, FlatSource, FolderSource, ParquetSource

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
    """Class folders, ImageNet style: ROOT/CLASS/*.JPEG; labels are the folders' names in sorted order.

    Result: one dataset at URL. Command:
    `patchline pack folder --source.root DIR --out URL --samples-per-shard 1000 --workers 8`
    """
    return PackJob(source=FolderSource())


def flat() -> PackJob:
    """One folder of images whose names begin with the label: n01440764_tench.JPEG.

    Result: one dataset at URL. Command: `patchline pack flat --source.root DIR --out URL`
    """
    return PackJob(source=FlatSource())


def parquet() -> PackJob:
    """Parquet files with embedded images, the layout of Hugging Face datasets (image: bytes, path; label).

    Result: one dataset at URL. Command:
    `patchline pack parquet --source.files 'DIR/train-*.parquet' --out URL`
    """
    return PackJob(source=ParquetSource())


def digits() -> PackJob:
    """Scikit-learn's handwritten digits, enlarged to 32x32 PNG; nothing is downloaded.

    Result: 1,438 training samples of 10 classes, or 359 test samples with `--split test`. Commands:
    `patchline pack digits --out URL` and `patchline pack digits --split test --out URL-test`
    """
    return PackJob(source=DigitsSource(), samples_per_shard=256, samples_per_block=32)


def cifar10() -> PackJob:
    """CIFAR-10 (Krizhevsky 2009) from its Parquet files; {split} in the path becomes train or test.

    Result: 50,000 training samples of 10 classes, or 10,000 test samples with `--split test`. Command:
    `patchline pack cifar10 --source.files 'DIR/{split}.parquet' --split test --out URL-test`
    """
    return PackJob(source=ParquetSource(label_names=CIFAR10_CLASSES))


RECIPES = {"folder": folder, "flat": flat, "parquet": parquet, "digits": digits, "cifar10": cifar10}
