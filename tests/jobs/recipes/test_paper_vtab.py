"""VTAB's 19 tasks compared with BiT's supplementary section F and Table 4, written down independently."""

import inspect

import pytest

from jobs.recipes.paper_vtab import DATASETS, RECIPES, TABLE_9, TASKS

# task, classes, random crop, random flip
TABLE = [
    ("caltech101", 102, True, True),
    ("cifar100", 100, True, True),
    ("dtd", 47, True, True),
    ("flowers102", 102, True, True),
    ("pets", 37, True, True),
    ("sun397", 397, True, True),
    ("svhn", 10, True, True),
    ("patch_camelyon", 2, True, True),
    ("eurosat", 10, True, True),
    ("resisc45", 45, True, True),
    ("retinopathy", 5, True, True),
    ("clevr_count", 8, False, True),
    ("clevr_distance", 6, False, True),
    ("dmlab", 6, False, True),
    ("kitti_distance", 4, False, True),
    ("dsprites_location", 16, False, False),
    ("dsprites_orientation", 16, True, False),
    ("smallnorb_azimuth", 18, True, False),
    ("smallnorb_elevation", 9, True, True),
]


@pytest.mark.parametrize(("task", "num_classes", "crop", "flip"), TABLE)
def test_a_task(task: str, num_classes: int, crop: bool, flip: bool) -> None:
    job = RECIPES[f"vtab_{task}"]()
    assert (job.data.augment.crop, job.data.augment.flip) == ("resize_crop" if crop else "none", flip)
    assert (job.evaluation.transform.mode, job.evaluation.transform.short_side) == ("resize", 0)
    assert (job.steps, job.global_batch, job.schedule.learning_rate) == (2500, 512, 0.01)
    assert (job.schedule.warmup_steps, job.schedule.decay) == (100, "cosine")
    assert (job.model.name, job.model.image_size, job.model.dropout) == ("vit_b16", 384, 0.0)
    data = DATASETS[f"vtab_{task}"]
    assert (data.num_images, data.num_classes) == (1000, num_classes)


def test_there_are_19() -> None:
    assert [task.name for task in TASKS] == [row[0] for row in TABLE]
    assert len(set(RECIPES)) == 19


def test_the_means_of_table_9_are_those_of_table_2() -> None:
    assert set(TABLE_9) == {task.name for task in TASKS}
    means = [sum(column) / 19 for column in zip(*TABLE_9.values(), strict=True)]
    assert means == pytest.approx([77.63, 76.28, 72.72], abs=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_it_does(name: str) -> None:
    said = inspect.getdoc(RECIPES[name]) or ""
    augment = RECIPES[name]().data.augment
    words = f"({'no' if augment.crop == 'none' else 'random'} crop, {'random' if augment.flip else 'no'} flip)."
    assert said.splitlines()[0].endswith(words)
