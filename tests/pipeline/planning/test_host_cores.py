"""The cores that a host of GPUs needs: computed from measured results, and told from those that known hosts have."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.planning.scaling import cores_of_host
from pipeline.data.config import DataConfig, RandAugmentConfig
from pipeline.models.config import ModelConfig
from pipeline.planning.host_cores import IMAGE_SECONDS, PROCESS_IMAGES_PER_SECOND, host_cores
from pipeline.training.settings.job import TrainingJob
from tests.rigs.processes import patchline

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def test_the_figures_are_those_of_the_committed_results() -> None:
    loader = json.loads((RESULTS / "loader.json").read_text())["arms"]["patchline"]["cpu_seconds_per_1000"]
    on_h200 = json.loads((RESULTS / "gpu_h200.json").read_text())["parts"]["loader"]["result"]
    assert pytest.approx((loader[1] / 1000, on_h200["cpu_seconds_per_1000"] / 1000), rel=1e-3) == IMAGE_SECONDS
    assert round(sorted(on_h200["images_per_second"])[2]) == PROCESS_IMAGES_PER_SECOND


def training(image_size: int) -> TrainingJob:
    return TrainingJob(model=ModelConfig(name="vit_b16", image_size=image_size, num_classes=10))


@pytest.mark.parametrize(
    ("rate", "ranks", "gpu", "expected"),
    [
        pytest.param(28_000, 8, "h200", (23, 38, 112), id="8 ranks of ViT-B/16: 15 to 30 cores decode, 8 launch"),
        pytest.param(3_500, 1, "h200", (3, 5, 14), id="one rank has an eighth of the host"),
        pytest.param(3_500, 1, "L40S", (3, 5, 0), id="no host is known"),
        pytest.param(56_000, 16, "b200", (46, 75, 112), id="a larger host than is known has no more than that"),
        pytest.param(0.5, 8, "A100", (9, 9, 128), id="the smallest need is a whole core"),
    ],
)
def test_a_host_needs_cores_that_decode_and_one_for_each_rank(
    rate: float, ranks: int, gpu: str, expected: tuple[int, int, int]
) -> None:
    found = host_cores(rate, num_ranks=ranks, gpu=gpu, image_size=224)
    assert found is not None
    assert (found.least, found.most, found.known_cores) == expected


def test_the_cost_of_much_smaller_images_is_not_known() -> None:
    assert host_cores(1e6, num_ranks=8, gpu="h200", image_size=32) is None
    assert cores_of_host(None, training(32)).startswith("not known: decoding was measured at 224 px")


@pytest.mark.parametrize(
    ("rate", "job", "told", "untold"),
    [
        pytest.param(28_000, training(224), "A DGX H100 has 112 for 8 GPUs.", "few", id="enough"),
        pytest.param(
            120_000, training(224), "has 112 for 8 GPUs: perhaps too few; pack smaller", "TOO FEW", id="perhaps"
        ),
        pytest.param(300_000, training(224), "has 112 for 8 GPUs: TOO FEW; pack smaller", "perhaps", id="too few"),
        pytest.param(28_000, training(384), "Measured at 224 px: 384 px cost more.", "few", id="larger images"),
        pytest.param(
            48_000, training(224), "No process has yet prepared more than 5,084 images/s", "few", id="a busy process"
        ),
        pytest.param(
            *(28_000, replace(training(224), data=DataConfig(randaugment=RandAugmentConfig(num_ops=2)))),
            *("Measured with crops and flips: this recipe's augmentation costs more.", "few"),
            id="RandAugment",
        ),
        pytest.param(200, training(224), "9 for 200 images/s", " to ", id="a range of one number"),
    ],
)
def test_the_plan_says_clearly_where_a_host_is_short(rate: float, job: TrainingJob, told: str, untold: str) -> None:
    said = cores_of_host(host_cores(rate, num_ranks=8, gpu="h100", image_size=job.model.image_size), job)
    said = said.replace(" to 1.04", "")  # a range of its own
    assert told in said
    assert untold not in said


def test_the_row_and_the_tables_have_the_same_cores() -> None:
    words = ("vit_b16_i21k", "--gpu", "h200")
    alone = json.loads(patchline("plan", *words, "--json").output)["forecast"]["cores"]
    on_nodes = json.loads(patchline("plan", *words, "--nodes", "1", "2", "--json").output)["nodes"]
    assert on_nodes[0]["cores"] == alone
    assert on_nodes[1]["cores"]["num_ranks"] == 8
    assert on_nodes[1]["cores"]["images_per_second"] == pytest.approx(on_nodes[1]["images_per_second"] / 2)
    shown = " ".join(patchline("plan", *words, "--nodes", "1", "2").output.split())
    assert f"Cores of a host: {alone['least']} to {alone['most']} for" in shown
