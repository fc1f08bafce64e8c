"""GPUs that a plan can name."""

import pytest

from pipeline.training.gpus import GPUS, gpu_named, gpu_of_device
from shards.errors import UserError


def test_a_gpu_is_found_in_any_case_of_letters() -> None:
    assert gpu_named("H100") is GPUS["h100"]
    assert 84e9 < gpu_named("h100").memory_bytes < 86e9


def test_an_unknown_gpu_is_answered_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"--gpu is 'v100'; known: a100-40, a100, h100, h200, b200, l40s"):
        gpu_named("v100")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe", ""),
        ("NVIDIA H200 NVL", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("Tesla V100-SXM2-16GB", ""),
    ],
)
def test_a_device_is_found_by_the_name_that_cuda_gives_it(name: str, found: str) -> None:
    assert gpu_of_device(name) is GPUS.get(found)
