"""The cost of a run, compared with numbers worked out by hand and with the paper's Table 6."""

from dataclasses import replace
from typing import Any

import pytest

from jobs.recipes import finetune, paper_datasets, pretrain
from pipeline.planning.forecast import cost_of
from shards.errors import UserError

JFT: dict[str, Any] = {"num_images": paper_datasets.JFT.num_images, "num_classes": paper_datasets.JFT.num_classes}


@pytest.mark.parametrize(
    ("name", "exaflops"),
    [
        ("vit_h14_jft", 4262),
        ("vit_l16_jft", 1567),
        ("vit_l16_jft_7ep", 783),
        ("vit_b16_jft", 224),
        ("vit_l32_jft", 196),
    ],
)
def test_the_papers_table_6(name: str, exaflops: int) -> None:
    cost = cost_of(pretrain.RECIPES[name](), **JFT, days=7)
    assert cost.total_exaflops == pytest.approx(exaflops, rel=2.1e-3)


def test_vit_h14_on_jft() -> None:
    cost = cost_of(pretrain.RECIPES["vit_h14_jft"](), **JFT, days=10)
    assert cost.num_parameters == 655_835_251
    assert cost.num_head_parameters == 655_835_251 - 630_764_800
    assert cost.train_flops == 3 * cost.forward_flops
    assert cost.num_images_seen == cost.num_steps * 4096 == 1_035_645 * 4096
    assert cost.num_epochs == pytest.approx(14, abs=1e-5)
    assert cost.images_per_second == pytest.approx(cost.num_images_seen / 864_000)
    assert cost.teraflops_per_second * 864_000 / 1e6 == pytest.approx(cost.total_exaflops)


def test_the_jobs_own_classes_win() -> None:
    job = finetune.RECIPES["imagenet_518_h14"]()
    assert cost_of(job, num_images=0, num_classes=1000, days=1).num_parameters == 633_470_440
    own = replace(job, model=replace(job.model, num_classes=1000))
    assert cost_of(own, num_images=0, num_classes=7, days=1).num_parameters == 633_470_440


@pytest.mark.parametrize("name", ["vit_b16_jft", "r50_vit_b16_jft", "bit_r50x1_jft"])
def test_what_is_not_known_is_left_out(name: str) -> None:
    cost = cost_of(pretrain.RECIPES[name](), num_images=0, num_classes=0, days=1)
    assert (cost.num_epochs, cost.num_head_parameters) == (None, 0)
    assert cost.num_parameters < cost_of(pretrain.RECIPES[name](), **JFT, days=1).num_parameters


@pytest.mark.parametrize("change", [{"num_images": -1}, {"num_classes": -1}, {"days": 0.0}, {"days": -2.0}])
def test_values_that_make_no_run_are_refused(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"num_images": 10, "num_classes": 10, "days": 1.0}
    with pytest.raises(UserError, match=r"allowed: images and classes of 0 .* more than 0 days"):
        cost_of(pretrain.RECIPES["digits_smoke"](), **(fields | change))
