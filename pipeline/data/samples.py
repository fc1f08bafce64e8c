"""Samples for a transform of one's own: the decoded image, the other members of the sample, and randomness keyed by it.

A transform is called in the decoding threads. It stays a pure function of (seed, epoch, sample) if it draws only from
`Sample.rng` or from torch: torch's random functions draw from a generator of the sample's while the transform runs
(`KeyedTorch`), so torchvision's transforms need no change. What draws from Python's or NumPy's global generators would
share them with all other threads; such a transform is refused when the stream is opened (`refuse_unrepeatable`). In the
worker processes of a DataLoader, all global generators are seeded for each sample instead (`seeded`).
"""

import json
import math
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pipeline.data.augment import draws_of, recoloured
from pipeline.data.config import DataConfig
from pipeline.data.decode import DecodeError, Pixels, decode_upright, image_faults
from pipeline.data.quarantine import Quarantine
from pipeline.data.randaugment import randaugment
from pipeline.data.transform import train_view
from shards.dataset import Dataset
from shards.errors import UserError, WillNotSucceedError
from shards.hashing import COLOURS, OPERATIONS, SUBSTITUTES, TRANSFORMS, hash_array
from shards.images.config import ImageLimits
from shards.orientation import UPRIGHT
from shards.reading.members import MembersError, members_of
from shards.reading.samples import RawSample, read_sample, refetched, verified

MOST_FIELD_BYTES = 1 << 28  # of one member; parsed JSON takes thirty times its size in memory
_MOST_JSON_BYTES = 4 << 20
Made = TypeVar("Made")
_MAX_SUBSTITUTES = 20
# torch's functions that draw random numbers and take a generator.
_DRAWING_FUNCTIONS = (
    *("bernoulli", "multinomial", "normal", "poisson", "rand", "randint", "randn", "randperm"),
    *("_sample_dirichlet", "_standard_gamma"),
)
_DRAWING_METHODS = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial"),
    *("normal_", "random_", "uniform_"),
)
_DRAWING = frozenset(getattr(torch, name) for name in _DRAWING_FUNCTIONS) | frozenset(
    getattr(torch.Tensor, name) for name in _DRAWING_METHODS
)
_ALIKE = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}  # these take no generator
_DROPPING = frozenset({torch.dropout, functional.dropout, functional.dropout2d, functional.alpha_dropout})
Transform = Callable[["Sample"], Any]
Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, kw_only=True)
class Draws:
    """A sample's random draws for its crop, its colours and its operations, each float64[number of draws]."""

    crop: NDArray[np.float64]
    colours: NDArray[np.float64]
    operations: NDArray[np.float64]


def sample_draws(
    sample_ids: NDArray[np.int64], epochs: NDArray[np.int64], *, seed: int, config: DataConfig
) -> list[Draws]:
    """Returns the draws of each sample. `seed` is that of their dataset."""
    num_colours, num_operations = config.augment.num_colour_draws, config.randaugment.num_draws
    each = (
        draws_of(sample_ids, epochs, seed=seed),
        draws_of(sample_ids, epochs, seed=seed, purpose=COLOURS, num_draws=num_colours),
        draws_of(sample_ids, epochs, seed=seed, purpose=OPERATIONS, num_draws=num_operations),
    )
    return [
        Draws(crop=crop, colours=colours, operations=operations)
        for crop, colours, operations in zip(*each, strict=True)
    ]


def recolour(view: Pixels, draws: Draws, *, config: DataConfig) -> None:
    """Applies 3-Augment, the colour jitter and RandAugment to uint8[size, size, 3], if they are on. Raises
    DecodeError."""
    with image_faults():
        if config.augment.num_colour_draws:
            view[...] = recoloured(view, draws.colours, config=config.augment)
        if config.randaugment.num_ops:
            view[...] = randaugment(view, draws.operations, config=config.randaugment)


def transform_seed(sample_id: int, epoch: int, *, seed: int) -> int:
    """Returns the seed of a sample's transform in an epoch, 0 to 2**63 - 1. `seed` is that of its dataset."""
    hashed = hash_array(np.array([sample_id], dtype=np.int64), key=TRANSFORMS.key(seed, epoch))
    return int(hashed[0] >> np.uint64(1))  # torch and NumPy take seeds of 63 bits


class Sample:
    """One sample, as a transform gets it. The image is decoded when it is first asked for.

    data        the image's bytes as packed
    labels      the numbers of its classes, among the classes of all datasets of the stream
    fields      its other members that were asked for, by suffix: text of .txt, parsed .json, an array of .npy, an int
                or text of .cls, otherwise bytes
    sample_id   its number in its dataset
    seed        an integer that the stream's seed, the epoch and the sample determine, 0 to 2**63 - 1
    """

    def __init__(
        self,
        raw: RawSample,
        *,
        labels: tuple[int, ...],
        fields: Mapping[str, Any],
        draws: Draws,
        seed: int,
        image_size: int,
        config: DataConfig,
        limits: ImageLimits,
    ) -> None:
        self.labels, self.fields, self.sample_id, self.seed = labels, fields, raw.sample_id, seed
        # No cached_property: before Python 3.12, it holds one lock for all samples, so only one would be decoded.
        self._pixels: Pixels | None = None
        self._crop: Pixels | None = None
        self._rng: np.random.Generator | None = None
        self._raw, self._draws, self._size, self._config, self._limits = raw, draws, image_size, config, limits

    @property
    def data(self) -> bytes:
        """The image's bytes as packed."""
        return bytes(self._raw.data or b"")

    @property
    def label(self) -> int:
        """The number of its first class, or -1 if it has none."""
        return self.labels[0] if self.labels else -1

    @property
    def pixels(self) -> Pixels:
        """The whole image, uint8[height, width, 3] RGB, upright. Raises DecodeError for a damaged one: let it pass, and
        the stream replaces the sample."""
        if self._pixels is None:
            raw = self._raw
            self._pixels = decode_upright(
                self.data,
                height=raw.height,
                width=raw.width,
                orientation=raw.orientation if self._config.augment.exif else UPRIGHT,
                limits=self._limits,
            )
        return self._pixels

    @property
    def image(self) -> Image.Image:
        """The whole image for Pillow, RGB and upright."""
        return Image.fromarray(self.pixels)

    @property
    def crop(self) -> Pixels:
        """The view that the stream would give without a transform: uint8[image_size, image_size, 3], cropped, resized
        and augmented by the stream's configuration. It decodes no more than it needs."""
        if self._crop is None:
            view = np.empty((self._size, self._size, 3), dtype=np.uint8)
            augment = self._config.augment
            train_view(self._raw, self._draws.crop, config=augment, out=view, limits=self._limits, use_library=True)
            recolour(view, self._draws, config=self._config)
            self._crop = view
        return self._crop

    @property
    def rng(self) -> np.random.Generator:
        """A generator of NumPy's that is seeded with `seed`."""
        if self._rng is None:
            self._rng = np.random.Generator(np.random.Philox(key=self.seed))
        return self._rng

    def __repr__(self) -> str:
        fields = f", fields {', '.join(self.fields)}" if self.fields else ""
        size = f"{self._raw.height} x {self._raw.width} px"
        return f"Sample({self.sample_id}, {size}, labels {list(self.labels)}{fields})"


def usable(
    dataset: Dataset,
    sample: RawSample,
    make: Callable[[Dataset, RawSample], Made],
    *,
    seed: int,
    quarantine: Quarantine,
    check_open: Callable[[], None] = lambda: None,
) -> tuple[RawSample, Made]:
    """Returns a sample, or its substitute, and what `make` makes of it. `make` raises DecodeError for an unusable
    sample, which is then replaced by a substitute that depends only on `seed`, the stream's, and the sample's id.
    Raises WillNotSucceedError if _MAX_SUBSTITUTES in a row are unusable. `check_open` is called before each of them."""
    original = sample.sample_id
    for number in range(_MAX_SUBSTITUTES + 1):
        sample, made = _tried(dataset, sample, make)
        if made is not None:
            return sample, made[0]
        if number == _MAX_SUBSTITUTES:
            break
        check_open()
        substitute = SUBSTITUTES.key(seed, original, number) % dataset.num_samples
        was, now = dataset.packed_ids(np.array([sample.sample_id, substitute])).tolist()
        named = replace(sample, sample_id=was)
        is_lost = dataset.has_lost(sample.sample_id)
        quarantine.replace(named, url=dataset.url, substitute=now, is_first=number == 0, is_lost=is_lost)
        sample = read_sample(dataset, substitute)
    raise WillNotSucceedError(
        f"{_MAX_SUBSTITUTES} substitutes in a row could not be used in {dataset.url}, the last because of: "
        f"{sample.fault}; run: patchline verify {dataset.url} --deep"
    )


def _tried(
    dataset: Dataset, sample: RawSample, make: Callable[[Dataset, RawSample], Made]
) -> tuple[RawSample, tuple[Made] | None]:
    """Checks a sample, and returns it with what `make` makes of it. If that raises DecodeError, the sample's bytes are
    read again once. An unusable sample is returned with a `fault` and None."""
    sample = verified(dataset, sample)
    for is_second in (False, True):
        if sample.data is None:
            break
        try:
            return sample, (make(dataset, sample),)
        except DecodeError as error:
            sample = replace(sample, fault=f"decode: {error}") if is_second else refetched(dataset, sample)
    return sample, None


@dataclass(frozen=True, kw_only=True)
class Hook:
    """What a stream does with each sample beyond its view.

    `fields`: the members that are read, by suffix; with a mapping, its values stand in for members that are missing.
    `transform`: makes what the batch has instead of the view. `collate`: makes the batch from a list of these.
    """

    fields: Sequence[str] | Mapping[str, Any] = ()
    transform: Transform | None = None
    collate: Collate | None = None

    def __post_init__(self) -> None:
        if isinstance(self.fields, str):
            raise UserError(f"fields is {self.fields!r}; give a tuple of suffixes, for example ({self.fields!r},)")
        if self.collate and not self.transform:
            raise UserError(
                "collate is given without transform, which makes what it collates; "
                "give transform, too, for example transform=lambda sample: (sample.crop, sample.label)"
            )

    def read(self, members: Mapping[str, bytes | memoryview]) -> dict[str, Any]:
        """Returns the decoded fields of a sample with these members. Raises DecodeError if a required one is missing or
        one is damaged."""
        found = {}
        for field in self.fields:
            if field in members:
                found[field] = decoded_field(field, members[field])
            elif isinstance(self.fields, Mapping):
                found[field] = self.fields[field]
            else:
                known = ", ".join(sorted(members)) or "none"
                todo = f"fields={{{field!r}: VALUE}} gives samples without it this value"
                raise DecodeError(f"it has no member {field!r}; its members are {known}; {todo}")
        return found

    def read_from(self, dataset: Dataset, sample_id: int) -> dict[str, Any]:
        """Reads the members of one sample, and returns its decoded fields. Raises DecodeError, as `read` does."""
        try:
            return self.read(members_of(dataset, sample_id)) if self.fields else {}
        except MembersError as error:
            raise DecodeError(str(error)) from error

    def made(self, sample: Sample, *, is_seeded: bool = False) -> Any:
        """Returns what the transform makes of a sample, or the sample without one. An error gets a note that names the
        sample. `is_seeded`: torch's default generator was seeded for this sample (`seeded`), so it draws what
        `KeyedTorch` would, which would cost time at each of torch's functions."""
        try:
            with nullcontext() if is_seeded else KeyedTorch(sample.seed):
                return self.transform(sample) if self.transform else sample
        except DecodeError:
            raise
        except Exception as error:
            error.add_note(f"the transform failed for {sample!r}")
            raise

    def collated(self, results: list[Any]) -> Any:
        """Makes the batch of the transform's results. Raises UserError if torch's default cannot."""
        if self.collate:
            return self.collate(results)
        try:
            return torch.utils.data.default_collate(results)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the results of transform do not make a batch: {error}; let it return tensors, arrays, numbers or "
                "text, each of one shape, or make the batch yourself: collate=..., which gets the list of results"
            ) from error


def decoded_field(suffix: str, data: bytes | memoryview) -> Any:
    """Returns the value of a member, by the last part of its suffix (caption.txt is a txt). Raises DecodeError if it is
    damaged or too large. Nothing is unpickled."""
    if len(data) > MOST_FIELD_BYTES:
        raise DecodeError(f"member {suffix!r} has {len(data)} bytes; allowed: {MOST_FIELD_BYTES}")
    kind, data = suffix.rpartition(".")[2], bytes(data)
    try:
        if kind in ("txt", "text", "transcript", "cls"):
            text = data.decode()
            return int(text) if kind == "cls" and text.strip().isdecimal() else text
        if kind == "json":
            if len(data) > _MOST_JSON_BYTES:
                raise DecodeError(f"member {suffix!r} has {len(data)} bytes; allowed: {_MOST_JSON_BYTES}")
            return json.loads(data)
        if kind == "npy":
            return _array(data)
    except DecodeError:
        raise
    except Exception as error:  # parsers raise nearly anything for hostile bytes: NumPy's has a tokenizer's errors
        raise DecodeError(f"member {suffix!r} is damaged: {error}") from error
    return data


def _array(data: bytes) -> NDArray[Any]:
    """Reads an .npy file. `numpy.load` would allocate what a hostile header declares."""
    file = BytesIO(data)
    version = npy.read_magic(file)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"its .npy version is {version}; allowed: 1.0 and 2.0")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, kind = read(file)
    if kind.hasobject:
        raise ValueError(f"its type is {kind}, which would be unpickled")
    values = np.frombuffer(data, dtype=kind, offset=file.tell())
    return values.reshape(shape, order="F" if is_fortran else "C").copy()


class KeyedTorch(TorchFunctionMode):
    """A context in which torch's random functions draw from a new CPU generator with this seed, in this thread alone.
    torch's global generator is neither used nor changed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generator: torch.Generator | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALIKE:
            like = args[0]
            func, args = _ALIKE[func], (like.shape, *args[1:])
            kwargs = {"dtype": like.dtype, "device": like.device, **kwargs}
            kwargs.pop("memory_format", None)
        if func in _DRAWING and kwargs.get("generator") is None:
            if self._generator is None:
                self._generator = torch.Generator().manual_seed(self._seed)
            kwargs = {**kwargs, "generator": self._generator}
        elif func in _DROPPING:
            raise UserError("transform calls dropout, which always draws from torch's default generator; leave it out")
        return func(*args, **kwargs)


def use_one_torch_thread() -> None:
    """Makes torch's operations in this thread use this thread alone. The threads that they would start compete with the
    other decoding threads, and wait by spinning. All other threads keep their number."""
    num_threads = torch.get_num_threads()
    if num_threads > 1:
        torch.set_num_threads(1)  # which is then the number of every thread that begins later, too
        restore = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
        restore.start()
        restore.join()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the global generators of Python, NumPy and torch (on the CPU) inside the block, and restores them after it.
    They belong to the whole process, so no other thread may draw meanwhile."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would start CUDA in a worker
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def refuse_unrepeatable(make: Callable[[], object], *, is_seeded: bool = False) -> None:
    """Calls `make` twice, for the same sample. Raises UserError if it drew from a generator that all threads share,
    which is then restored, or if the results differ. `is_seeded`: `make` seeds these generators itself."""
    with seeded(0):
        before = _global_states()
        first, second = make(), make()
        after = before if is_seeded else _global_states()
    drawn = [name for name, state in before.items() if after[name] != state]
    if not drawn and not _are_equal(first, second):
        raise UserError(
            "transform made two different results of one sample, so no run could be resumed; seed what it draws from "
            "with sample.seed, or draw from sample.rng"
        )
    if drawn:
        raise UserError(
            f"transform drew from {' and '.join(drawn)}, which all decoding threads share, so its results would differ "
            "from run to run; draw from sample.rng or from torch's random functions on the CPU, or run it in the "
            "workers of a DataLoader: train_samples(...), which seeds every generator for each sample"
        )


def _are_equal(first: Any, second: Any) -> bool:
    """Returns whether two results are equal. Objects of other types than those of usual results are not compared."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(first), np.asarray(second), equal_nan=np.asarray(first).dtype.kind in "fc")
    if isinstance(first, Mapping):
        return first.keys() == second.keys() and all(_are_equal(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_are_equal, first, second))
    if isinstance(first, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    return not isinstance(first, int | str | bytes) or first == second


def _global_states() -> dict[str, Any]:
    numpy_state = np.random.get_state(legacy=False)
    return {
        "the module random": random.getstate(),
        "numpy.random": repr(numpy_state),
        "torch's default generator": torch.get_rng_state().numpy().tobytes(),
    }
