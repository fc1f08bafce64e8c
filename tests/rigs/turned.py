"""A dataset of images that are stored rotated, and its twin of the same images stored upright."""

import io
from pathlib import Path

from PIL import Image

from jobs.data.pack import PackJob, run
from shards.sources.kinds import FolderSource
from tests.rigs.images import image_bytes

NUM_TURNED = 16  # each orientation twice
_UNDO = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def packed_twins(folder: Path) -> tuple[Path, Path]:
    """(upright, turned): both look the same, sample by sample and bit by bit, since they are lossless."""
    return _packed(folder / "upright", is_turned=False), _packed(folder / "turned", is_turned=True)


def _packed(folder: Path, *, is_turned: bool) -> Path:
    for number in range(NUM_TURNED):
        target = folder / "images" / f"c{number % 2}" / f"{number:02d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        orientation = 1 + number // 2 if is_turned else 1
        target.write_bytes(_stored(image_bytes(number, height=24, width=40, image_format="PNG"), orientation))
    source = FolderSource(root=str(folder / "images"))
    out = folder / "packed"
    assert run(PackJob(out=str(out), source=source, samples_per_shard=8, samples_per_block=3)) == 0
    return out


def _stored(upright: bytes, orientation: int) -> bytes:
    """The PNG that this orientation turns upright."""
    exif, file, how = Image.Exif(), io.BytesIO(), _UNDO[orientation]
    exif[0x0112] = orientation
    with Image.open(io.BytesIO(upright)) as image:
        (image if how is None else image.transpose(how)).save(file, format="PNG", exif=exif)
    return file.getvalue()
