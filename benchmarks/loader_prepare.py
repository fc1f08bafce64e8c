"""The same images in the layout of each loader: class folders, our shards, webdataset tars, tars that Energon indexed,
MDS, LitData chunks, Parquet for datasets of Hugging Face, and FFCV's file.

Layouts that exist for the same images are not made again, so an interrupted run continues where it stopped.
"""

import hashlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.packing import copy_images
from benchmarks.rounds import say

FOLDERS, PATCHLINE, WEBDATASET, MOSAICML, LITDATA = "folders", "patchline", "webdataset", "mosaicml", "litdata"
ENERGON, PARQUET, BETON = "energon", "parquet", "ffcv"
SMALL_BLOCKS = "small-blocks"  # our shards in blocks of SMALL_BLOCK images: many requests for faults to hit
SMALL_BLOCK = 8
NUM_TARS = 10  # and Parquet files: an even number, so that two workers get the same amount
_PACKING_ARMS = {PATCHLINE: "patchline, 2 workers", MOSAICML: "MDSWriter", LITDATA: "LitData, 2 workers"}


def prepare(images: Path, work: Path, count: int, *, peers: str, layouts: Sequence[str]) -> None:
    """Makes `work`/LAYOUT for each of `layouts`. Class folders come first: all others are made from them."""
    work.mkdir(parents=True, exist_ok=True)
    identity = _identity(images, count)
    for layout in (FOLDERS, *(name for name in layouts if name != FOLDERS)):
        mark = work / f"{layout}.json"
        if mark.exists() and json.loads(mark.read_text()) == identity:
            say(f"{layout} is prepared")
            continue
        mark.unlink(missing_ok=True)
        _remove(work / layout, *work.glob(f"{layout}-*"))
        began = time.monotonic()
        if layout == FOLDERS:
            copy_images(images, work / FOLDERS, count)
        else:
            _run(layout, work, count, peers=peers)
        mark.write_text(json.dumps(identity))
        say(f"{layout} prepared in {time.monotonic() - began:.1f} s")


def _identity(images: Path, count: int) -> dict[str, object]:
    files = sorted((path.name, path.stat().st_size) for path in images.glob("*.JPEG"))
    if not files:
        raise SystemExit(f"{images} holds no CLASS_anything.JPEG files; give the folder that does by --images")
    return {"count": count, "files_sha256": hashlib.sha256(json.dumps(files).encode()).hexdigest()}


def _run(layout: str, work: Path, count: int, *, peers: str) -> None:
    python = sys.executable if layout in (PATCHLINE, PARQUET, SMALL_BLOCKS) else peers
    paths = ["--images", str(work / FOLDERS), "--out", str(work / layout)]
    if layout in _OWN_LAYOUTS:
        command = [python, "-m", "benchmarks.loader_prepare", layout, *paths[1::2], str(count)]
    else:
        report = str(work / f"{layout}-report")
        command = [python, "-m", "benchmarks.packing_arms", _PACKING_ARMS[layout], *paths, "--report", report]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    _remove(*work.glob(f"{layout}-*"))  # the report and LitData's caches


def _remove(*paths: Path) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write_tars(images: str, out: str, count: str) -> None:
    """Webdataset's ShardWriter, in the peers' environment."""
    import webdataset  # noqa: PLC0415

    from benchmarks.packing_arms import samples  # noqa: PLC0415

    Path(out).mkdir()
    with webdataset.ShardWriter(f"{out}/shard-%06d.tar", maxcount=-(-int(count) // NUM_TARS), verbose=0) as writer:
        for number, (image, label) in enumerate(samples(images)):
            writer.write({"__key__": f"{number:010d}", "jpg": image, "cls": label})


def write_indexed_tars(images: str, out: str, count: str) -> None:
    """The same tars, which `energon prepare` indexes: all of them are one split."""
    write_tars(images, out, count)
    energon = Path(sys.executable).with_name("energon")
    words = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "ImageClassificationSample"]
    words += ["--field-map", json.dumps({"image": "jpg", "label": "cls"}), "--num-workers", "2", "--no-progress"]
    subprocess.run([energon, "prepare", *words, out], check=True)


def write_parquet(images: str, out: str, _: str) -> None:
    """Parquet files with embedded images, and the Arrow copy that datasets makes of them when it first loads them."""
    import datasets  # noqa: PLC0415

    from benchmarks.packing_arms import samples  # noqa: PLC0415

    columns = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    data, labels = zip(*samples(images), strict=True)
    rows = datasets.Dataset.from_dict({"image": data, "label": labels}, features=columns)
    Path(out).mkdir()
    for number in range(NUM_TARS):
        rows.shard(NUM_TARS, number, contiguous=True).to_parquet(f"{out}/{number:06d}.parquet")
    parquet_files(out, streaming=False)


def parquet_files(folder: str, *, streaming: bool) -> Any:
    """Opens the Parquet files of a folder with Hugging Face's datasets; its Arrow copy is kept in the folder."""
    import datasets  # noqa: PLC0415

    files = sorted(str(path) for path in Path(folder).glob("*.parquet"))
    cache = f"{folder}/cache"
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=streaming, cache_dir=cache)


def pack_small_blocks(images: str, out: str, _: str) -> None:
    """`patchline pack folder --samples-per-block 8`; exact duplicates are kept."""
    from jobs.data.pack import PackJob, run  # noqa: PLC0415
    from shards.packing.config import Dedup  # noqa: PLC0415
    from shards.sources.kinds import FolderSource  # noqa: PLC0415

    source, dedup = FolderSource(root=images), Dedup(duplicates="keep")
    assert run(PackJob(out=out, source=source, dedup=dedup, samples_per_block=SMALL_BLOCK)) == 0


def write_beton(images: str, out: str, _: str) -> None:
    """FFCV's DatasetWriter. Its own image field encodes pixels anew; this one stores the JPEGs as they are."""
    import simplejpeg  # noqa: PLC0415
    from ffcv.fields import IntField, RGBImageField  # noqa: PLC0415
    from ffcv.fields.rgb_image import IMAGE_MODES  # noqa: PLC0415
    from ffcv.writer import DatasetWriter  # noqa: PLC0415

    from benchmarks.packing_arms import labelled_files  # noqa: PLC0415

    class Jpeg(RGBImageField):  # type: ignore[misc]
        def encode(self, destination: Any, image: bytes, malloc: Callable[[int], tuple[int, Any]]) -> None:
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["height"], destination["width"] = simplejpeg.decode_jpeg_header(image)[:2]
            destination["data_ptr"], storage = malloc(len(image))
            storage[:] = np.frombuffer(image, dtype=np.uint8)

    class Files(list[tuple[str, int]]):
        def __getitem__(self, at: Any) -> Any:
            path, label = super().__getitem__(at)
            return Path(path).read_bytes(), label

    Path(out).mkdir()
    fields = {"image": Jpeg(), "label": IntField()}
    DatasetWriter(f"{out}/images.beton", fields, num_workers=2).from_indexed_dataset(Files(labelled_files(images)))


_OWN_LAYOUTS = {
    WEBDATASET: write_tars,
    ENERGON: write_indexed_tars,
    PARQUET: write_parquet,
    BETON: write_beton,
    SMALL_BLOCKS: pack_small_blocks,
}


if __name__ == "__main__":
    _OWN_LAYOUTS[sys.argv[1]](*sys.argv[2:])
