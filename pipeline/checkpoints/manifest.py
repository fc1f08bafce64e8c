"""A checkpoint's manifest: its files, what is in them, and what a run needs to continue. All functions are pure.

    step-00000120/attempt-0003-5f1c2a9e/rank-00000.safetensors   fragments of logical tensors
    step-00000120/attempt-0003-5f1c2a9e/rank-00000.json          what this rank wrote, for the manifest
    step-00000120/attempt-0003-5f1c2a9e/MANIFEST.json            written last: the checkpoint exists from then on

A manifest contains its own digest (shards/files/typed_json.py), which is checked before anything in the manifest is
used. Fragments of equal length and offset in the files of consecutive ranks share one entry, so 550,000 fragments of
ViT-H/14 on 512 ranks take only 4,400 entries. Each parameter is saved with the moments that the optimiser keeps for it,
under PyTorch's names. Muon keeps different moments for the matrices of the blocks than for the remaining parameters.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pipeline.checkpoints.rank_file_out import FileRecord, file_name, rank_of
from pipeline.data.position import StreamPosition
from pipeline.models.config import ModelConfig
from pipeline.models.weights.safetensors_head import FLOAT_BYTES
from shards.config_values import shown_value
from shards.errors import UserError
from shards.files.typed_json import is_sealed, sealed, unsealed

STEPS = "steps"
MASTER = "master"
AVERAGE = "average"
FORMAT = 4
MANIFEST_NAME = "MANIFEST.json"
_MOST_DIMENSIONS = 8  # the most dimensions of a tensor
_STRICT = ConfigDict(strict=True, extra="forbid")
_FOLDER = re.compile(r"step-([0-9]{8,18})/attempt-([0-9]+-[0-9a-z]+)")
_RANK_FILE = r"rank-[0-9]{5,9}\.safetensors"
_REPORT = r"rank-[0-9]{5,9}\.json"  # a rank's report about its file (rank_file_out.py)
_FILE = re.compile(rf"{_RANK_FILE}|{_REPORT}|{re.escape(MANIFEST_NAME)}")
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Token = Annotated[str, Field(pattern="^[0-9]+-[0-9a-z]+$", max_length=200)]
RankFileName = Annotated[str, Field(pattern=f"^{_RANK_FILE}$")]
Loss = Annotated[float, Field(allow_inf_nan=False)]
Value = TypeVar("Value")
_REMEDY = "use the version of Patchline that wrote it"


@dataclass(frozen=True, kw_only=True)
class SavedJob:
    """What a manifest says about the job. `model` has the fields of the model's configuration, `job` those of the whole
    resolved job, and `optimizer` is the optimiser's name. Raises ValueError if this version cannot build the model or
    knows other fields, or if the job's `steps` is not a whole number of 1 or more."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    model: dict[str, Any]
    loss: str
    optimizer: str
    ema_decay: float
    precision: str
    job: dict[str, Any]

    def __post_init__(self) -> None:
        if others := sorted(self.model.keys() ^ {each.name for each in fields(ModelConfig)}):
            what = "the unknown field" if others[0] in self.model else "no"
            raise ValueError(f"its model has {what} {shown_value(others[0])}")
        try:
            ModelConfig(**self.model)
        except UserError as error:
            raise ValueError(f"its model cannot be used: {error}") from error
        steps = self.job.get(STEPS)
        if type(steps) is not int or steps < 1:
            raise ValueError(f"its {STEPS} is {shown_value(steps)}; allowed: a whole number, 1 or more")


@dataclass(frozen=True, kw_only=True)
class FragmentLocation:
    """Elements `start` .. `start + length - 1` of a flattened tensor, at byte `offset` of `file`, float32.

    `num_files`: the number of files of consecutive ranks that hold `length` elements at this byte. The elements of each
    file follow the elements of the file before it.
    """

    __pydantic_config__ = _STRICT

    file: RankFileName
    offset: Count
    start: Count
    length: Count
    num_files: Annotated[int, Field(ge=1, lt=1 << 31)]

    @property
    def num_elements(self) -> int:
        """The number of elements that all of its files hold together."""
        return self.num_files * self.length


@dataclass(frozen=True, kw_only=True)
class LogicalTensor:
    """A parameter as the model knows it, and where the fragments of its slots (master, moments, average) are."""

    __pydantic_config__ = _STRICT

    shape: Annotated[tuple[Count, ...], Field(max_length=_MOST_DIMENSIONS)]
    dtype: Literal["float32"]
    slots: dict[str, tuple[FragmentLocation, ...]]

    def locations(self, slot: str) -> tuple[FragmentLocation, ...]:
        """Returns the locations of a slot's fragments. For the average of a tensor that has none, returns the
        master's."""
        return self.slots[MASTER if slot == AVERAGE and AVERAGE not in self.slots else slot]


@dataclass(frozen=True, kw_only=True)
class CheckpointId:
    """Identifies a checkpoint: its step and the attempt that wrote it."""

    __pydantic_config__ = _STRICT

    step: Count
    attempt: Token

    @property
    def folder(self) -> str:
        """The checkpoint's path, relative to the root of the checkpoints."""
        return f"step-{self.step:08d}/attempt-{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """Everything that a run needs to continue. `position`: the position of the stream of batches. `job`: what
    determines which jobs may continue the run. `losses`: the latest losses, by which the guard judges the next ones.
    `record` is for people and reports; a run that continues takes only the micro-batch, the attention kernel and the
    seconds so far from it."""

    __pydantic_config__ = _STRICT

    format: int
    id: CheckpointId
    tensors: dict[str, LogicalTensor]
    files: dict[RankFileName, FileRecord]
    moments: tuple[str, ...]
    num_updates: Count
    num_samples: Count
    position: StreamPosition
    job: SavedJob
    losses: tuple[Loss, ...]
    record: dict[str, Any]

    def __post_init__(self) -> None:
        if self.position.next_step != self.id.step:
            raise ValueError(f"the checkpoint is of step {self.id.step}, its position of {self.position.next_step}")


class OtherFormatError(ValueError):
    """Another version of Patchline wrote the checkpoint. It is not damaged."""


@dataclass(frozen=True, kw_only=True)
class _Format:
    """The format of a manifest, which is read before anything else."""

    format: int


_MANIFEST = TypeAdapter(CheckpointManifest)

_FORMAT = TypeAdapter(_Format)


def manifest_to_json(manifest: CheckpointManifest) -> bytes:
    """Returns a manifest as UTF-8 JSON that contains its own digest."""
    return sealed(_MANIFEST.dump_json(manifest))


def manifest_from_json(data: bytes) -> CheckpointManifest:
    """Returns a stored manifest. Raises OtherFormatError if it is intact but cannot be used. Since a commit reads its
    own manifest back first, another version wrote such a one. Raises ValueError if the JSON is broken or does not match
    its digest."""
    is_intact = is_sealed(data)
    try:
        found = _validated(_FORMAT, data).format
        if found == FORMAT:
            return own_manifest_from_json(data)
    except ValueError as error:
        if not is_intact:
            raise
        said = f"its manifest is intact, but of another version of Patchline ({error}); {_REMEDY}"
        raise OtherFormatError(said) from error
    kind = OtherFormatError if is_intact else ValueError  # the damage may be in the format itself
    raise kind(f"its manifest has format {found}, this version reads {FORMAT}; {_REMEDY}")


def own_manifest_from_json(data: bytes) -> CheckpointManifest:
    """Returns a manifest that this version wrote. Raises ValueError if the JSON is broken, does not match its digest,
    or contradicts itself."""
    manifest = _validated(_MANIFEST, unsealed(data))
    _refuse_contradictions(manifest)
    return manifest


def _validated(adapter: TypeAdapter[Value], data: bytes) -> Value:
    """Returns JSON as the adapter's type. Raises ValueError, which names the first wrong field."""
    try:
        return adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        at = f"{'.'.join(map(str, first['loc']))}: " if first["loc"] else ""
        raise ValueError(f"not a manifest: {at}{first['msg']}") from error


def draft_from_json(data: bytes) -> CheckpointManifest:
    """Returns a draft: a manifest of this version without its files. Raises ValueError if the JSON is not a
    manifest."""
    return _MANIFEST.validate_json(unsealed(data))


def _refuse_contradictions(manifest: CheckpointManifest) -> None:
    """Raises ValueError unless the parts of a manifest agree with each other."""
    step, num_samples = manifest.id.step, manifest.id.step * manifest.position.global_batch
    if manifest.num_updates > step:
        raise ValueError(f"num_updates is {manifest.num_updates}; allowed: 0 to its step, {step}")
    if manifest.num_samples != num_samples:
        raise ValueError(f"num_samples is {manifest.num_samples}; allowed: {num_samples}, its step x the batch")
    slots = sorted({MASTER, *manifest.moments})
    if len(slots) != 1 + len(manifest.moments):
        raise ValueError(f"moments are {shown_value(manifest.moments)}; allowed: each once, and no {MASTER}")
    sizes = _FileSizes(manifest.files)
    for name, tensor in manifest.tensors.items():
        found, is_trained = set(tensor.slots), len(tensor.slots) > 1
        if not {MASTER} <= found <= set(slots) or (is_trained and AVERAGE in slots and AVERAGE not in found):
            raise ValueError(f"{shown_value(name)} has {shown_value(sorted(tensor.slots))}; allowed: {slots}")
        for slot, locations in tensor.slots.items():
            fault = _wrong_cover(locations, num_elements=math.prod(tensor.shape), sizes=sizes)
            if fault:
                raise ValueError(f"{slot} of {shown_value(name)}: {fault}")


class _FileSizes:
    """The sizes of a checkpoint's files by rank. Raises ValueError if a file's name does not fit its rank."""

    def __init__(self, files: Mapping[str, FileRecord]) -> None:
        for name in files:
            if name != file_name(rank_of(name)):
                raise ValueError(f"a file is named {name}; allowed: {file_name(rank_of(name))}")
        self._ranks = sorted(map(rank_of, files))
        self._sizes = [files[file_name(rank)].num_bytes for rank in self._ranks]
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self._found: dict[tuple[int, int], int] = {}

    def smallest(self, location: FragmentLocation) -> int:
        """Returns the size of the smallest of a location's files; -1 if one of them is not in the checkpoint."""
        first, end = rank_of(location.file), rank_of(location.file) + location.num_files
        if (first, end) not in self._found:
            low = self._places.get(first, len(self._ranks))
            high = low + location.num_files
            is_there = high <= len(self._ranks) and self._ranks[high - 1] == end - 1
            self._found[first, end] = min(self._sizes[low:high]) if is_there else -1
        return self._found[first, end]


def _wrong_cover(locations: Iterable[FragmentLocation], *, num_elements: int, sizes: _FileSizes) -> str:
    """Returns what is wrong if fragments do not hold each element exactly once, inside their files; empty if nothing
    is."""
    end = 0
    for location in sorted(locations, key=lambda each: (each.start, each.num_elements)):
        smallest = sizes.smallest(location)
        if smallest < 0:
            more = f" or one of the {location.num_files - 1} files after it" if location.num_files > 1 else ""
            return f"{location.file}{more} is not among the checkpoint's files"
        if location.offset + location.length * FLOAT_BYTES > smallest:
            return f"element {location.start} begins beyond the end of {location.file}, at byte {location.offset}"
        if location.start != end:
            return f"element {min(end, location.start)} is held {'twice' if location.start < end else 'nowhere'}"
        end += location.num_elements
    return "" if end == num_elements else f"its fragments hold {end} elements; allowed: {num_elements}"


def id_from_path(path: str) -> CheckpointId | None:
    """Returns the checkpoint whose manifest is at `path` (relative to the root of the checkpoints), or None for any
    other file."""
    folder, _, name = path.rpartition("/")
    found = _FOLDER.fullmatch(folder)
    if found is None or name != MANIFEST_NAME:
        return None
    checkpoint = CheckpointId(step=int(found[1]), attempt=found[2])
    return checkpoint if checkpoint.folder == folder else None


def is_checkpoint_file(path: str) -> bool:
    """Returns whether a path belongs to a file of a checkpoint, committed or not. Files with other names are not
    Patchline's and are never deleted."""
    folder, _, name = path.rpartition("/")
    return bool(_FOLDER.fullmatch(folder) and _FILE.fullmatch(name))


def overlapping(
    locations: tuple[FragmentLocation, ...], *, start: int, length: int
) -> list[tuple[FragmentLocation, int, int]]:
    """Returns where the elements [start, start + length) lie, as (location, first element, number of elements), in
    rising order."""
    end = start + length
    found = []
    for location in locations:
        low, high = max(start, location.start), min(end, location.start + location.num_elements)
        if low < high:
            found.append((location, low, high - low))
    return sorted(found, key=lambda item: item[1])
