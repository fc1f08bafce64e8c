"""How each reader is called, by its public door, and what must hold of that which it hands over."""

import math
import re
from pathlib import Path
from typing import Any

import torch

from jobs.data.card import use_of
from jobs.data.index import run as run_index
from jobs.record import read_leaves
from jobs.resolve import file_job, stages_of
from jobs.settings.data import IndexJob
from pipeline.checkpoints.checkpoint import Fragment
from pipeline.checkpoints.manifest import CheckpointManifest
from pipeline.checkpoints.stored import read_best
from pipeline.data.decode import DecodeError, decode_stored
from pipeline.data.stream import train_batches
from pipeline.models.build import shapes_of
from pipeline.models.conversion.config import Hints
from pipeline.models.conversion.open_any import open_any
from pipeline.models.weights.folder import Weights, filled_model, open_weights
from pipeline.runs.facts import STATES, read_facts
from pipeline.shared_settings import METRICS_FILE
from pipeline.training.reporting.follower import MetricsReader
from pipeline.training.reporting.ledger import Ledger
from pipeline.training.reporting.loggers import logger_id
from pipeline.training.reporting.metrics import cut_after, read_metrics
from pipeline.training.saving.finish import Done, read_done
from pipeline.training.settings.job import TrainingJob
from pipeline.training.summary import scores_of
from shards.card.facts import gather_facts
from shards.card.page import render
from shards.dataset import Dataset, open_dataset
from shards.errors import ImageRefusedError, UserError
from shards.images.image_header import read_header
from shards.reading.samples import read_sample
from shards.sources.kinds import ClassTarsSource, ManifestSource, ParquetSource, Source, VtabSource
from shards.store import open_store
from shards.verifying.verify import verify_dataset
from tests.fuzz.valid_files import STEPS, saved_fragment
from tests.pipeline.models.conversion.random_weights import VIT
from tests.rigs.checkpoints import checkpoints_of
from tests.rigs.packing import pack_spec, planned
from tests.rigs.positions import position_at
from tests.rigs.processes import one_world

BATCH = 4
MOST_REASON = 2000  # characters


class BrokenPromiseError(Exception):
    """A reader has handed over what it should have refused."""


def require(is_kept: bool, what: str) -> None:
    """BrokenPromiseError unless it is kept."""
    if not is_kept:
        raise BrokenPromiseError(what)


def load(folder: Path) -> None:
    """Every sample of a dataset singly."""
    dataset = open_dataset(str(folder))
    faults = _read_samples(dataset)
    require(all(isinstance(name, str) for name in dataset.label_names), "a label's name is no text")
    require(len(dataset.label_names) == dataset.num_classes, "names and classes differ in number")
    require(faults < max(1, dataset.num_samples) + 1, "more faults than samples")


def _read_samples(dataset: Dataset) -> int:
    """The number of samples with a fault."""
    require(int(dataset.block_sizes.sum()) == dataset.num_samples, "the blocks hold another number of samples")
    faults = 0
    for sample_id in range(dataset.num_samples):
        sample = read_sample(dataset, sample_id)
        labels = sample.labels
        require(all(type(one) is int and 0 <= one < dataset.num_classes for one in labels), "label out of range")
        require(0 < sample.height < 1 << 16 and 0 < sample.width < 1 << 16, "height or width out of range")
        require(bool(sample.fault) == (sample.data is None), "neither bytes nor a fault")
        faults += bool(sample.fault)
    return faults


def stream(folder: Path) -> None:
    """An epoch of training batches. Damaged samples are replaced; too many of them end it."""
    with train_batches(str(folder), global_batch=BATCH, image_size=8, quarantine=folder / "q.jsonl") as batches:
        for _ in range(4):
            labels = next(batches).labels  # padded with -1
            num_classes = open_dataset(str(folder)).num_classes
            require(type(num_classes) is int, "num_classes is no number")
            require(
                not labels.numel() or -1 <= int(labels.min()) <= int(labels.max()) < num_classes, "label out of range"
            )


def verify(folder: Path) -> None:
    """`patchline verify`: what it finds nothing wrong with, the loader takes."""
    if verify_dataset(str(folder)):
        return
    dataset = open_dataset(str(folder))
    try:
        faults = _read_samples(dataset)
        load(folder)
    except UserError as error:
        raise BrokenPromiseError("verify found nothing, but the loader refuses") from error
    require(not faults, "verify found nothing, but samples are damaged")


def card(folder: Path) -> None:
    """`patchline card`."""
    facts = gather_facts(open_dataset(str(folder)), num_tiles=4)
    render(facts, use=use_of(facts))


def resume(folder: Path, *, is_authentic: bool = True) -> str:
    """The newest checkpoint that verifies, and all of its tensors: those that were saved.

    `is_authentic` False: its checksums were made again, so its tensors need only be whole. Returns its step.
    """
    torch.set_num_threads(1)
    checkpoints = checkpoints_of(folder, one_world())
    manifest = checkpoints.newest()
    if manifest is None:
        raise BrokenPromiseError("checkpoints that are there were not seen")
    for name, tensor in manifest.tensors.items():
        length = math.prod(tensor.shape)
        for slot in ("master", *manifest.moments):
            fragment = Fragment(name=name, start=0, length=length, slots={slot: torch.full((length,), torch.nan)})
            checkpoints.load(manifest, [(fragment, slot)])
            if is_authentic:
                expected = saved_fragment(name, tensor.shape, seed=manifest.id.step).slots[slot]
                require(torch.equal(fragment.slots[slot], expected), "other tensors than were saved")
    if is_authentic:
        _require_saved(manifest)
    return f"from step {manifest.id.step}"


def _require_saved(manifest: CheckpointManifest) -> None:
    step = manifest.id.step
    require(step in STEPS, "a step that was never saved")
    found = manifest.num_updates, manifest.num_samples, manifest.position.next_step, manifest.moments
    require(found == (step, step * 16, step, ("exp_avg", "exp_avg_sq")), "other counts than were saved")
    require(manifest.position == position_at(step), "another position than was saved")
    require(len(manifest.tensors) == len(shapes_of(VIT)), "other tensors than were saved")
    require(manifest.job.model.get("image_size") == VIT.image_size, "another model than was saved")


def resume_resealed(folder: Path) -> str:
    """The same of checkpoints whose checksums were made again."""
    return resume(folder, is_authentic=False)


def own_weights(folder: Path) -> None:
    """A weights folder, filled into its model."""
    _require_whole(open_weights(str(folder)))
    filled_model(open_weights(str(folder)))


def foreign_weights(folder: Path) -> None:
    """What `import` reads: a folder of Hugging Face's."""
    _require_whole(open_any(str(folder), Hints()))


def _require_whole(weights: Weights) -> None:
    require(len(weights.labels) in (0, weights.config.num_classes), "labels and classes differ in number")
    require(all(isinstance(label, str) for label in weights.labels), "a label is no text")
    for name, shape in weights.shapes.items():
        tensor = weights.tensor(name)
        require(tuple(tensor.shape) == tuple(shape) and tensor.dtype == torch.float32, "another tensor than announced")


def model_file(name: str) -> Any:
    """What `import` reads: one file of tensors."""
    hints = Hints() if name.endswith(".npz") else Hints(num_heads=VIT.num_heads)
    return lambda folder: _require_whole(open_any(str(folder / name), hints))


def job_file(name: str) -> Any:
    """`patchline pretrain FILE.yaml`."""

    def read(folder: Path) -> None:
        stages_of(str(folder / name))
        require(isinstance(file_job("pretrain", folder / name), TrainingJob), "not a job of the stage")

    return read


def ledger(folder: Path) -> None:
    """The totals that a run continues from."""
    found = Ledger(folder)
    values = found.seconds.values()
    require(all(type(one) is float and math.isfinite(one) and one >= 0 for one in values), "seconds out of range")
    found.record()


def best(folder: Path) -> None:
    """Which checkpoint of a run has the best score."""
    found = read_best(folder)
    if found:
        require(found.id.folder == found.checkpoint and found.id.step == found.step, "another checkpoint's folder")
        require(0 <= found.accuracy <= 1 and math.isfinite(found.loss), "scores out of range")


def metrics(folder: Path) -> None:
    """What a start and the last lines of a run read of the curves."""
    scores_of(folder)
    read_metrics(folder)
    cut_after(folder / METRICS_FILE, step=6)
    lines = read_metrics(folder)
    require(all(line["step"] <= 6 for line in lines), "a line of a later step is left")
    sent = [line for some in MetricsReader(folder / METRICS_FILE, has=2).read() for line in some]
    require(all(2 < line.step <= 6 for line in sent), "a line of another step is sent")
    require(all(type(value) is float for line in sent for value in line.values.values()), "no number is sent")


def loggers(folder: Path) -> None:
    """The name of a run at other loggers."""
    found = logger_id(folder)
    require(re.fullmatch("[0-9a-f]{16}", found) is not None, "not an id of ours")


def run_facts(folder: Path) -> None:
    """What `patchline ls` reads of a run: it refuses nothing, and says what is wrong."""
    found = read_facts(folder, num_steps=8, is_scored=True)
    require(found.state in STATES, "no state")
    require(found.step is None or (type(found.step) is int and found.step >= 0), "step out of range")
    require(found.accuracy is None or isinstance(found.accuracy, float), "the accuracy is no number")
    require(found.goodput is None or 0 <= found.goodput <= 1, "goodput out of range")
    require(all(isinstance(one, str) and len(one) < MOST_REASON for one in found.reasons), "an endless reason")


def record_leaves(folder: Path) -> None:
    """What `patchline ls` reads of a record."""
    leaves = read_leaves(folder / "job.yaml")
    require(all(isinstance(one, str) for pair in leaves.items() for one in pair), "not a text")


def done(folder: Path) -> None:
    """The marker of a finished run."""
    found = read_done(folder)
    require(found is None or isinstance(found, Done), "no marker")


def index(folder: Path) -> None:
    """`patchline index`: what it writes, verifies."""
    run_index(IndexJob(url=str(folder), index_url=f"{folder}-index", max_quarantined=1.0))
    _require_no_faults(f"{folder}-index")


def index_json(folder: Path) -> None:
    """The same, with labels out of the JSON members."""
    run_index(IndexJob(url=str(folder), index_url=f"{folder}-index", label_field="labels", max_quarantined=1.0))
    _require_no_faults(f"{folder}-index")


def _require_no_faults(url: str) -> None:
    faults = verify_dataset(url)
    require(not faults, f"the dataset that it made has faults, such as: {faults[0].what if faults else 'none'}")


def pack(source: Any) -> Any:
    """The scan and the plan of a source, made for a folder."""

    def read(folder: Path) -> None:
        made: Source = source(folder)
        plan = planned(open_store(f"{folder}-packed"), pack_spec(made))
        require(all(isinstance(name, str) for name in plan.label_names), "a label's name is no text")
        require(plan.num_samples > 0, "an empty plan")

    return read


def embedded(folder: Path) -> Source:
    """Images in a Parquet file."""
    return ParquetSource(files=(str(folder / "embedded.parquet"),))


def listed(name: str) -> Any:
    """Images listed in a table."""
    return lambda folder: ManifestSource(
        files=(str(folder / name),), weights_column="weights" if name.endswith("parquet") else ""
    )


def class_tars(folder: Path) -> Source:
    """A tar per class."""
    return ClassTarsSource(root=str(folder / "tars"))


def prepared(folder: Path) -> Source:
    """A test set that TFDS has prepared."""
    return VtabSource(task="kitti_distance", root=str(folder), split="test")


def image_header(folder: Path) -> None:
    """Each image's header, and its pixels by that."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        try:
            header = read_header(data)
        except ImageRefusedError:
            continue
        require(header.height > 0 and header.width > 0 and 1 <= header.orientation <= 8, "header out of range")
        if header.height * header.width < 1 << 22:
            try:
                pixels = decode_stored(data, height=header.height, width=header.width)
            except DecodeError:
                continue
            require(pixels.shape == (header.height, header.width, 3), "pixels of another size")
