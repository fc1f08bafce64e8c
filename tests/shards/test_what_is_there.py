"""Where a dataset was expected, the message says what is there and gives the command that makes a dataset of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from shards.dataset import open_dataset
from shards.errors import UserError


def files(*paths: str) -> Callable[[Path], None]:
    def make(root: Path) -> None:
        for path in paths:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(b"")

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(lambda _: None, "there is nothing at '{at}'; check the path", id="nothing"),
        pytest.param(files("my photos"), "'{at}' is a file", id="a file"),
        pytest.param(
            files("my photos/cat/0.jpg", "my photos/dog/0.JPEG"),
            "holds folders of images, not a packed dataset; pack it first:\n"
            "  patchline pack folder --source.root '{at}' --out 'data/my photos'",
            id="classes",
        ),
        pytest.param(
            files("my photos/train/cat/0.jpg", "my photos/val/cat/0.jpg"),
            "holds the splits of a collection, not a packed dataset; pack each first:\n"
            "  patchline pack folder --source.root '{at}/train' --out 'data/my photos'-train --split train\n"
            "  patchline pack folder --source.root '{at}/val' --out 'data/my photos'-validation --split validation",
            id="splits",
        ),
        pytest.param(
            files("my photos/train/cat/0.jpg", "my photos/notes.txt"),
            "is not a packed dataset; it holds folders of images in 'train': pack those first:\n"
            "  patchline pack folder --source.root '{at}/train' --out 'data/my photos'",
            id="classes one folder below",
        ),
        pytest.param(
            files("my photos/IMG_1.HEIC"),
            "holds images, not a packed dataset; pack the folder above it",
            id="one class, or flat images",
        ),
        pytest.param(files("my photos/job.yaml", "my photos/weights/x"), "is a run, not a dataset", id="run"),
        pytest.param(files("my photos/config.json", "my photos/model.safetensors"), "holds weights", id="weights"),
        pytest.param(files("my photos/plan/plan.json"), "is not packed to its end", id="an unfinished packing"),
        pytest.param(files("my photos/0.tar"), "holds tars, not a packed dataset; index them", id="tars"),
        pytest.param(files("my photos/0.parquet"), "holds Parquet files, not a packed dataset", id="Parquet files"),
        pytest.param(files("my photos/notes.txt"), "has no manifest.json, so it is not a complete", id="anything else"),
        pytest.param(files("my photos/.hidden/x"), "pack it with: patchline pack RECIPE --out '{at}'", id="hidden"),
    ],
)
def test_what_is_there_is_said(make: Callable[[Path], None], said: str, tmp_path: Path) -> None:
    make(tmp_path)
    at = str(tmp_path / "my photos")
    with pytest.raises(UserError) as caught:
        open_dataset(at)
    assert said.replace("{at}", at) in str(caught.value)
