"""Decides which answers are right for an image: its labels by name, the classes that a map has for its labels, or the
classes in the image's own list.

A map serves datasets with other classes than the model's (ObjectNet, Barbu et al., 2019): an answer is right if it is
one of the classes that stand for the image's label. Lists are ImageNet-ReaL's ("Are we done with ImageNet?", Beyer et
al., 2020; real.json of its repository): for each image of ImageNet's validation set, the classes that people saw in it.
Some lists are empty.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from pipeline.data.batches import Batch
from pipeline.data.evaluation import label_map
from shards.class_names import class_name
from shards.config_values import shown_value
from shards.dataset import Dataset
from shards.errors import UserError
from shards.files.local_files import read_local_file
from shards.files.typed_json import parse_json
from shards.reading.samples import locate_row

Targets = Callable[[Batch], torch.Tensor]
"""The model's classes that are right for each image of a batch: int64[B, most classes of any image], padded with -1."""
_MOST_BYTES = 64 << 20
_VALIDATION_IMAGE = re.compile(r"ILSVRC2012_val_([0-9]{8})(?![0-9])")
# The share of lists that must have the image's own label. It is 0.9 for ReaL's lists, and would be below 0.01 by
# chance.
_LEAST_AGREEMENT = 0.5
_NO_TARGETS, _ONE_PLACE = torch.empty(0, dtype=torch.int64), torch.full((1,), -1)


def by_name(dataset: Dataset, labels: Sequence[str]) -> Targets:
    """Takes an image's labels as targets, found by name among the model's classes `labels`. Raises UserError if a label
    is not among them."""
    numbers = torch.from_numpy(label_map(dataset, tuple(labels)))
    return lambda batch: torch.where(counted_labels(batch) >= 0, numbers[batch.labels.clamp(min=0)], -1)


def counted_labels(batch: Batch) -> torch.Tensor:
    """Returns the dataset's labels of a batch; -1 is padding, or a label of weight 0."""
    is_label_BL = batch.labels >= 0
    if batch.weights is not None:
        is_label_BL &= batch.weights != 0
    return torch.where(is_label_BL, batch.labels, -1)


def read_class_map(path: str) -> dict[str, tuple[str, ...]]:
    """Reads a JSON object that maps labels of the dataset to the name or names of the model's classes that stand for
    them. Raises UserError if the file holds anything else."""
    found = _read(path, "--class-map")
    if not isinstance(found, dict) or not found:
        raise UserError(f'--class-map {path} has no classes; allowed: {{"label": ["class of the model", ...], ...}}')
    named = {}
    for label, names in found.items():
        # ObjectNet's own map, objectnet_to_imagenet_1k.json, joins the names of a label with semicolons.
        given = names if isinstance(names, list) else names.split("; ") if isinstance(names, str) else [names]
        if not given or not all(isinstance(name, str) for name in given):
            raise UserError(f"--class-map {path}: {shown_value(label)} stands for {shown_value(names)}; allowed: names")
        named[label] = tuple(dict.fromkeys(given))
    return named


def by_class_map(dataset: Dataset, labels: Sequence[str], classes: Mapping[str, Sequence[str]]) -> Targets:
    """Takes the classes that stand for an image's labels as targets. Labels that the map leaves out have no classes, so
    that their images do not count. Raises UserError if the map has labels or classes that do not exist."""
    numbers = {class_name(name): number for number, name in enumerate(labels)}
    classes = {class_name(label): tuple(map(class_name, names)) for label, names in classes.items()}
    known = set(dataset.label_names)
    strange = [label for label in classes if label not in known]
    if strange:
        raise UserError(
            f"the class map has the label {strange[0]!r}, which {dataset.url} does not have; correct or remove it"
        )
    unknown = [(label, name) for label, names in classes.items() for name in names if name not in numbers]
    if unknown:
        label, name = unknown[0]
        raise UserError(
            f"the class map has the class {name!r} for {label!r}, which the model does not have; it has, for example, "
            f"{labels[0]!r}; {len(unknown)} of the map's names are unknown"
        )
    most = max(len(names) for names in classes.values())
    table = torch.full((len(dataset.label_names) + 1, most), -1)  # the last row is for padding
    for row, label in enumerate(dataset.label_names):
        own = [numbers[name] for name in classes.get(label, ())]
        table[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
    return lambda batch: table[counted_labels(batch)].flatten(start_dim=1)


def read_lists(path: str) -> list[list[int]]:
    """Reads a JSON list with a list of class numbers for each image. A number counts once in a list. Raises UserError
    if the file holds anything else."""
    found = _read(path, "--real")
    if not isinstance(found, list) or not found:
        raise UserError(f"--real {path} has no lists; allowed: real.json of ImageNet-ReaL, [[65], [970, 795], [], ...]")
    for number, own in enumerate(found):
        if not isinstance(own, list) or not all(type(one) is int and 0 <= one < 1 << 20 for one in own):
            raise UserError(f"--real {path}: entry {number} is {shown_value(own)}; allowed: a list of class numbers")
    return [list(dict.fromkeys(own)) for own in found]


def by_lists(dataset: Dataset, labels: Sequence[str], lists: Sequence[Sequence[int]]) -> Targets:
    """Takes the classes in an image's list as targets. The list is found by the number in the name of the image's file.

    Raises UserError if the lists belong to other images or classes: if a class or the number of an image is missing or
    out of range, or if less than half of the non-empty lists have the image's own label.
    """
    highest = max((number for own in lists for number in own), default=-1)
    if highest >= len(labels):
        raise UserError(
            f"the ReaL lists have class {highest}, and the model has {len(labels):,} classes; they are of ImageNet's "
            "1,000"
        )
    numbers, num_same, num_listed = label_map(dataset, tuple(labels)), 0, 0
    rows = list[torch.Tensor]()
    for sample in range(dataset.num_samples):
        shard, row = locate_row(dataset, sample)
        own = lists[_place(dataset.source_of(shard, row), len(lists), where=f"{dataset.url}: sample {sample}")]
        rows.append(torch.tensor(own, dtype=torch.int64))
        num_listed += bool(own)
        num_same += any(int(numbers[label]) in own for label in dataset.sample_rows(shard).labels_of(row))
    if num_same < _LEAST_AGREEMENT * num_listed:
        raise UserError(
            f"the ReaL lists do not match {dataset.url}: {num_same} of {num_listed} images have their own label among "
            "them; the model's classes must be in ImageNet's order, that of their WordNet ids"
        )

    def targets(batch: Batch) -> torch.Tensor:
        found = [rows[sample] if sample >= 0 else _NO_TARGETS for sample in batch.sample_ids.tolist()]
        return torch.nn.utils.rnn.pad_sequence([*found, _ONE_PLACE], batch_first=True, padding_value=-1)[:-1]

    return targets


def _place(source: str, num_lists: int, *, where: str) -> int:
    found = _VALIDATION_IMAGE.search(source)
    if found is None or not 1 <= int(found[1]) <= num_lists:
        raise UserError(
            f"the ReaL lists do not match {where} is {source!r}; allowed: images ILSVRC2012_val_00000001 to "
            f"{num_lists:08d}"
        )
    return int(found[1]) - 1


def _read(path: str, flag: str) -> object:
    try:
        return parse_json(read_local_file(Path(path), most_bytes=_MOST_BYTES))
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {flag} {path}: {error}", todo="give a JSON file") from error


def answers(logits_BK: torch.Tensor, targets_BL: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns for each image the class with the highest logit, whether the image has a target (`targets_BL` is padded
    with -1), and whether that class is right."""
    # argmax takes the first of equal logits; topk may take any of them.
    said_B, is_scored_B = logits_BK.argmax(dim=1), (targets_BL >= 0).any(dim=1)
    return said_B, is_scored_B, (said_B[:, None] == targets_BL).any(dim=1) & is_scored_B
