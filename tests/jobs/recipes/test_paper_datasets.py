"""The datasets of the paper's tables."""

import pytest

from jobs.recipes import paper_datasets
from jobs.recipes.paper_datasets import PaperDataset


@pytest.mark.parametrize(
    ("data", "num_images", "num_classes"),
    [
        pytest.param(paper_datasets.JFT, 303_000_000, 18_291, id="the paper: 303 M images, 18 k classes"),
        pytest.param(paper_datasets.IMAGENET_21K, 14_200_000, 21_843, id="the published heads' classes"),
        pytest.param(paper_datasets.IMAGENET_21K_AUGREG, 14_148_800, 21_843, id="big_vision: full[51200:]"),
        pytest.param(paper_datasets.IMAGENET_1K, 1_281_167, 1000, id="ILSVRC 2012's training set"),
    ],
)
def test_sizes(data: PaperDataset, num_images: int, num_classes: int) -> None:
    assert (data.num_images, data.num_classes) == (num_images, num_classes)
