"""The rules that all fine-tuning recipes share, against the published files."""

import pytest

from jobs.recipes.transfer import dropout_of, warmup_steps_of


@pytest.mark.parametrize(
    ("num_images", "steps"),
    [
        pytest.param(1000, 100, id="VTAB-1k"),
        pytest.param(3680, 100, id="Pets"),
        pytest.param(19_999, 100, id="the largest small set"),
        pytest.param(20_000, 500, id="the smallest medium set"),
        pytest.param(1_281_167, 500, id="ImageNet"),
    ],
)
def test_warm_up_is_bits_rule(num_images: int, steps: int) -> None:
    assert warmup_steps_of(num_images) == steps


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        *(("vit_l16", 0.1), ("vit_h14", 0.1), ("r50_vit_b16", 0.1), ("r50_vit_l32", 0.1)),
        *(("vit_b16", 0.0), ("vit_b32", 0.0), ("vit_l32", 0.0)),
    ],
)
def test_dropout_is_that_of_the_published_models_py(name: str, rate: float) -> None:
    assert dropout_of(name) == rate
