"""The valid files that cases start from, made by our own code: a folder for each entry of VALID."""

import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from safetensors.torch import save_file

from jobs.data.pack import PackJob, run
from jobs.recipes.pretrain import digits_smoke
from jobs.record import write_record
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.commit import draft_manifest
from pipeline.checkpoints.manifest import CheckpointId
from pipeline.checkpoints.stored import Best, write_best
from pipeline.models.build import shapes_of
from pipeline.models.conversion.hugging_face import save_hugging_face
from pipeline.models.conversion.npz import save_npz
from pipeline.models.weights.folder import save_weights
from pipeline.ranks.world import World
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.saving.finish import finish
from pipeline.training.saving.save import saved_job
from pipeline.training.watchdog.heartbeat_files import Beat, HeartbeatFiles
from shards.sources.kinds import FolderSource
from tests.pipeline.models.conversion.random_weights import VIT, random_model, tensors_of
from tests.rigs.checkpoints import checkpoints_of, saved_at_once
from tests.rigs.images import class_folders, image_bytes
from tests.rigs.jpegs import jpeg_of
from tests.rigs.positions import position_at
from tests.rigs.prepared import example, write_prepared

LABELS = ("cat", "dog", "Füchsin")
STEPS = (4, 8)  # of the checkpoints


def dataset(folder: Path) -> None:
    """Three shards of 4 samples; one image is refused, one is a copy."""
    images = class_folders(folder.parent / f"images of {folder.name}")
    (images / "c0" / "broken.jpg").write_bytes(b"\xff\xd8\xff no image")
    (images / "c1" / "copy.jpg").write_bytes((images / "c0" / "img 0.JPEG").read_bytes())
    job = PackJob(out=str(folder), source=FolderSource(root=str(images)))
    assert run(replace(job, samples_per_shard=4, samples_per_block=3, max_quarantined=0.5, description="Größe")) == 0


def large_dataset(folder: Path) -> None:
    """The same as a dataset of many shards and samples is packed: with shards.parquet and rows.bin."""
    with (
        patch("shards.manifest_table.MOST_LISTED_SHARDS", 0),
        patch("shards.packing.merge.LEAST_SAMPLES_WITH_ROWS", 1),
    ):
        dataset(folder)


def training_run(folder: Path, world: World) -> None:
    """A finished run: two attempts, a checkpoint of each, ledger, metrics, DONE and weights."""
    job = replace(digits_smoke(), model=VIT, run_dir=str(folder))
    folder.mkdir()
    checkpoints = checkpoints_of(folder, world)
    shapes = dict(shapes_of(VIT))
    manifest = None
    for step in STEPS:
        with patch("secrets.token_hex", lambda num_bytes: "5f" * num_bytes):  # kept cases name its folder
            assert checkpoints.begin_attempt(manifest)
        fragments = [saved_fragment(name, shape, seed=step) for name, shape in shapes.items()]
        draft = draft_manifest(
            CheckpointId(step=step, attempt=checkpoints.attempt.token),
            shapes=shapes,
            position=position_at(step),
            num_updates=step,
            job=saved_job(job),
            record={"x": 1},
        )
        manifest = saved_at_once(checkpoints, fragments, draft)
        Ledger(folder).append(folder, step=step, attempt=checkpoints.attempt.token)
    assert manifest
    finish(folder, job, manifest, store=checkpoints.store, labels=LABELS)
    place = manifest.id
    best = Best(step=place.step, checkpoint=place.folder, accuracy=0.5, loss=1.0, images=4, dataset="cd" * 32)
    write_best(folder, best)
    (folder / "loggers.json").write_text('{"id": "0123456789abcdef"}\n')
    beat = Beat(
        rank=0,
        host="ü",
        pid=1,
        attempt=place.attempt,
        phase="ended",
        step=8,
        batch=0,
        seconds=1.0,
        limit_seconds=600.0,
        unix_time=1e9,
    )
    HeartbeatFiles(folder, rank=0, attempt=place.attempt).write(beat)
    lines = [{"step": step, "loss": 2.0 / step, "learning_rate": 0.1} for step in range(1, 9)]
    lines[3] |= {"test_accuracy": 0.5, "test_loss": 1.0}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def weights(folder: Path) -> None:
    """Our own folder."""
    save_weights(folder, config=VIT, labels=LABELS, tensor=tensors_of(random_model(VIT)))


def hugging_face(folder: Path) -> None:
    """Hugging Face's folder."""
    save_hugging_face(folder, config=VIT, labels=LABELS, tensor=tensors_of(random_model(VIT)))


def model_files(folder: Path) -> None:
    """Bare files of tensors: NumPy's, PyTorch's in both formats, safetensors."""
    folder.mkdir()
    state = {name: value.detach().contiguous() for name, value in random_model(VIT).state_dict().items()}
    save_npz(folder / "w.npz", config=VIT, tensor=tensors_of(random_model(VIT)), dialect="vision_transformer")
    torch.save(state, folder / "w.pth")
    torch.save({"model": state, "epoch": 1}, folder / "old.pth", _use_new_zipfile_serialization=False)
    save_file(state, folder / "w.safetensors")


def jobs(folder: Path) -> None:
    """A record and a user's file."""
    job = digits_smoke()
    write_record(folder, stage="pretrain", job=job)
    (folder / "own.yaml").write_text(
        json.dumps({"recipe": "digits_smoke", "steps": 9, "model": {"depth": 2}}, indent=1)
    )
    (folder / "record.yaml").write_text(json.dumps({"stage": "pretrain", "job": asdict(job)}, indent=1))


def foreign_tars(folder: Path) -> None:
    """WebDataset tars of others: labels in .cls and in .json, PAX headers."""
    folder.mkdir()
    for number in range(2):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for sample in range(3):
                about = json.dumps({"label": sample, "labels": [sample, 1], "caption": "ü", "a": {"b": [1]}})
                members = {
                    "jpg": image_bytes(10 * number + sample),
                    "cls": f"{sample}".encode(),
                    "json": about.encode(),
                }
                for suffix, data in members.items():
                    info = tarfile.TarInfo(f"sample ü {sample}.{suffix}")
                    info.size, info.mtime = len(data), 1.5
                    tar.addfile(info, io.BytesIO(data))
        (folder / f"train-{number}.tar").write_bytes(file.getvalue())


def sources(folder: Path) -> None:
    """Tables of images: embedded in Parquet, listed in Parquet and in CSV; class tars."""
    class_folders(folder / "images", num_classes=2, images_a_class=3)
    paths = sorted(path.relative_to(folder).as_posix() for path in (folder / "images").rglob("*.*"))
    labels = [number % 2 for number in range(len(paths))]
    images = [{"bytes": (folder / path).read_bytes(), "path": path} for path in paths]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"image": pa.array(images, kind), "label": labels})
    names = {"info": {"features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["a", "b"]}}}}
    table = table.replace_schema_metadata({"huggingface": json.dumps(names)})
    pq.write_table(table, folder / "embedded.parquet", row_group_size=4)
    lists = [[f"c{label}", "both"] for label in labels]
    weights_of = [[0.5, 1.0] for _ in labels]
    pq.write_table(pa.table({"path": paths, "label": lists, "weights": weights_of}), folder / "listed.parquet")
    rows = [f"{path},c{label}|both,0.5|1" for path, label in zip(paths, labels, strict=True)]
    (folder / "listed.csv").write_text("\n".join(["path,label,weights", *rows]) + "\n")
    (folder / "tars").mkdir()
    for name in ("c0", "c1"):
        with tarfile.open(folder / "tars" / f"{name}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted((folder / "images" / name).iterdir()):
                tar.add(path, arcname=path.name)


def prepared_datasets(folder: Path) -> None:
    """A dataset of streets, as TFDS prepares it; its test set has three shards of two."""
    streets = [
        example(
            {
                "image": [image_bytes(number, image_format="PNG")],
                "image/file_name": [f"{number:06d}.png".encode()],
                "objects/type": [number % 4, 1],
                "objects/location": [0.5, 1.5, 9.0 * number, -0.5, 1.0, 30.0],
            }
        )
        for number in range(6)
    ]
    write_prepared(folder, "kitti", {"train": streets, "validation": streets, "test": streets}, version="3.3.0")


def images(folder: Path) -> None:
    """One image of each kind."""
    folder.mkdir()
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6
    for suffix in ("png", "webp", "gif", "tif", "bmp", "jpg"):
        pixels.save(folder / f"plain.{suffix}")
        pixels.save(folder / f"turned.{suffix}", exif=exif)
    pixels.convert("P").save(folder / "palette.png")
    pixels.convert("RGBA").save(folder / "alpha.webp", lossless=True)
    pixels.save(folder / "animated.webp", save_all=True, append_images=[pixels.rotate(90)])
    for kind in ("progressive", "420", "Gray", "restart rows"):
        (folder / f"{kind}.jpg").write_bytes(jpeg_of(kind, height=24, width=32))


VALID: dict[str, Callable[[Path], None]] = {
    one.__name__.replace("_", " "): one
    for one in (
        *(dataset, large_dataset, weights, hugging_face, model_files, jobs),
        *(foreign_tars, sources, prepared_datasets, images),
    )
}


def make_valid(root: Path, world: World) -> None:
    """All folders below `root`."""
    for name, make in VALID.items():
        make(root / name)
    training_run(root / "training run", world)


def saved_fragment(name: str, shape: tuple[int, ...], *, seed: int) -> Fragment:
    """A whole tensor with its moments, as the checkpoint of step `seed` has them."""
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.Size(shape).numel())
    slots = {slot: torch.randn(length, generator=generator) for slot in ("master", "exp_avg", "exp_avg_sq")}
    return Fragment(name=name, start=0, length=length, slots=slots)
