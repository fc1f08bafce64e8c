"""What is right for an image: class maps, and lists as ReaL's, on packed images."""

import copy
import json
import unicodedata
from pathlib import Path
from typing import Literal

import pytest
import torch

from jobs.data.pack import PackJob, run
from pipeline.data.batches import Batch
from pipeline.data.config import Share
from pipeline.data.evaluation import evaluation_batches
from pipeline.evaluation.targets import (
    Targets,
    by_class_map,
    by_lists,
    by_name,
    counted_labels,
    read_class_map,
    read_lists,
)
from pipeline.shared_settings import EvaluationTransform
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.sources.folders import FolderSource
from tests.rigs.datasets import packed_folders
from tests.rigs.images import image_bytes

CLASSES = ("c2", "other", "c0", "c1")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Images of c0, c1 and c2."""
    return open_dataset(str(packed_folders(tmp_path_factory.mktemp("targets"), images_a_class=2)))


@pytest.fixture(scope="module")
def validation(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Six images with names as ImageNet's, two of each of c0, c1 and c2: 1 and 2, 3 and 4, 5 and 6."""
    folder = tmp_path_factory.mktemp("validation")
    for number in range(6):
        synset = "_n01440764" if number == 5 else ""
        path = folder / "images" / f"c{number // 2}" / f"ILSVRC2012_val_{number + 1:08d}{synset}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image_bytes(number))
    source = FolderSource(root=str(folder / "images"))
    assert run(PackJob(out=str(folder / "packed"), source=source, samples_per_shard=4, samples_per_block=2)) == 0
    return open_dataset(str(folder / "packed"))


def found_for(dataset: Dataset, targets: Targets) -> dict[str, set[int]]:
    """The right classes of each image, by where it came from; of two batches, the last one is short."""
    share = Share(global_batch=4, rank=0, num_ranks=1)
    batches = evaluation_batches(
        dataset, batch_size=4, image_size=8, transform=EvaluationTransform(), share=share, threads=1
    )
    found: dict[str, set[int]] = {}
    for batch, mask_B in batches:
        rows = targets(batch)
        assert rows.shape[0] == 4
        assert bool((rows[~mask_B] == -1).all()), "padding has no label"
        for sample, row in zip(batch.sample_ids[mask_B], rows, strict=False):
            shard, place = divmod(int(sample), 4)
            found[dataset.source_of(shard, place)] = {int(one) for one in row if one >= 0}
    return found


def test_labels_by_name(dataset: Dataset) -> None:
    found = found_for(dataset, by_name(dataset, CLASSES))
    assert len(found) == 6
    assert all(classes == {CLASSES.index(source[:2])} for source, classes in found.items()), found


def test_labels_of_weight_zero_do_not_count() -> None:
    weights = torch.tensor([[0.5, 0.0], [1.0, 0.0]])
    labels = torch.tensor([[3, 4], [5, -1]])
    images = torch.zeros(2, 1, 1, 3, dtype=torch.uint8)
    ids = torch.arange(2)
    batch = Batch(step=0, images=images, labels=labels, sample_ids=ids, datasets=ids, weights=weights)
    assert counted_labels(batch).tolist() == [[3, -1], [5, -1]]


def test_a_class_map(dataset: Dataset, tmp_path: Path) -> None:
    """One label stands for two classes, one for one, and one is left out."""
    path = tmp_path / "map.json"
    for joined in (["other", "c2"], "other; c2"):  # the second as ObjectNet's own map has it
        path.write_text(json.dumps({"c0": joined, "c2": "c0"}))
        found = found_for(dataset, by_class_map(dataset, CLASSES, read_class_map(str(path))))
        expected = {"c0": {0, 1}, "c1": set(), "c2": {2}}
        assert all(classes == expected[source[:2]] for source, classes in found.items()), found


def test_lists_are_found_by_the_names_of_the_files(validation: Dataset) -> None:
    lists = [[2], [2, 1], [], [3], [0], [0, 3]]
    found = found_for(validation, by_lists(validation, CLASSES, lists))
    names = [f"c{n // 2}/ILSVRC2012_val_{n + 1:08d}{'_n01440764' * (n == 5)}.JPEG" for n in range(6)]
    assert found == {name: set(own) for name, own in zip(names, lists, strict=True)}


def test_a_class_that_is_repeated_counts_once(validation: Dataset, tmp_path: Path) -> None:
    """Or a short file could ask for a table of any width."""
    path = tmp_path / "file.json"
    path.write_text(json.dumps([[2], [2, 1] + [2] * 1_000_000, [], [3], [0], [0, 3]]))
    lists = read_lists(str(path))
    assert lists[:2] == [[2], [2, 1]]
    path.write_text(json.dumps({"c0": ["other", "c2", *["other"] * 1000]}))
    assert read_class_map(str(path)) == {"c0": ("other", "c2")}


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([[2], [2], [3]], r"do not match .* sample \d is 'c.*allowed: images ILSVRC2012_val_00000001 to 00000003"),
        ([[2], [2], [3], [3], [0], [4]], "the ReaL lists have class 4, and the model has 4 classes"),
        (
            [[0], [0], [0], [0], [0], []],
            "1 of 5 images have their own label among them; the model",
        ),
    ],
)
def test_lists_that_do_not_match(validation: Dataset, lists: list[list[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_lists(validation, CLASSES, lists)


def test_lists_for_images_of_other_names(dataset: Dataset) -> None:
    with pytest.raises(UserError, match="the ReaL lists do not match"):
        by_lists(dataset, CLASSES, [[0]])


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ({"c9": ("c0",)}, "the class map has the label 'c9', which .* does not have; correct or remove it"),
        (
            {"c0": ("c0", "c7"), "c1": ("c8",)},
            "has the class 'c7' for 'c0', which the model does not have; .* 2 of the map's",
        ),
    ],
)
def test_a_class_map_with_unknown_names(dataset: Dataset, classes: dict[str, tuple[str, ...]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_class_map(dataset, CLASSES, classes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "has no lists; allowed: real.json"),
        ("[]", "has no lists; allowed: real.json"),
        ("[[0], 3]", "entry 1 is 3; allowed: a list of class numbers"),
        ("[[0], [true]]", "entry 1 is .*; allowed: a list of class numbers"),
        ("[[-1]]", "entry 0 is .*; allowed: a list of class numbers"),
    ],
)
def test_files_that_are_no_lists(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "real.json").write_text(text)
    with pytest.raises(UserError, match=message):
        read_lists(str(tmp_path / "real.json"))
    with pytest.raises(UserError, match="cannot read --real"):
        read_lists(str(tmp_path / "none.json"))


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_names_are_compared_in_one_form(dataset: Dataset, form: Literal["NFC", "NFD"]) -> None:
    """An accent may be a character of its own, in the dataset as in the model and the class map."""
    accented = copy.copy(dataset)
    accented.label_names = ("caf\u00e9", "c1", "c2")
    model = [unicodedata.normalize(form, name) for name in ("c1", "caf\u00e9 ", "c2")]
    for targets in (by_name(accented, model), by_class_map(accented, model, {model[1]: [model[1]]})):
        found = found_for(accented, targets)
        assert all(classes == {1} for source, classes in found.items() if source[:2] == "c0"), found
