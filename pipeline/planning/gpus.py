"""Memory, speed and connections of the GPUs that a plan can name.

Memory: what CUDA reports as the total capacity, a little less than the name says; of A100, L40S and RTX 4090 from
out-of-memory messages of PyTorch in public issues, of the others [unverified]. Speed: dense bf16 without sparsity, from
NVIDIA's data sheets (H100 SXM, B200 on a HGX board). What kernels reach of it is the MFU. Bus bandwidth of eight on one
node: of H100 as measured by nccl-tests (NVIDIA/nccl-tests, issue 290); of the others [unverified]: in proportion to the
rate of their NVLink, or PCIe 4 without NVLink.
"""

import re
from dataclasses import dataclass

from shards.errors import UserError

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """`teraflops`: nominal TFLOP/s in bf16, which all of these compute natively. `bus_gigabytes`: GB/s of collectives
    on one node, as nccl-tests counts them."""

    memory_gib: float
    teraflops: float
    bus_gigabytes: float

    @property
    def memory_bytes(self) -> int:
        """The device's memory, as CUDA reports it."""
        return int(self.memory_gib * _GIB)


GPUS = {
    "a100-40": Gpu(memory_gib=39.4, teraflops=312, bus_gigabytes=317),
    "a100": Gpu(memory_gib=79.1, teraflops=312, bus_gigabytes=317),
    "h100": Gpu(memory_gib=79.1, teraflops=989, bus_gigabytes=476),
    "h200": Gpu(memory_gib=139.0, teraflops=989, bus_gigabytes=476),
    "b200": Gpu(memory_gib=178.0, teraflops=2250, bus_gigabytes=952),
    "l40s": Gpu(memory_gib=44.4, teraflops=362, bus_gigabytes=20),
    "rtx4090": Gpu(memory_gib=23.5, teraflops=165, bus_gigabytes=10),
}

_NAMES = {  # what CUDA reports, [unverified] for those that nothing here has run on
    r"NVIDIA A100-(SXM4|PCIE)-40GB": "a100-40",
    r"NVIDIA A100[- ](SXM4[- ]|SXM[- ]|PCIe[- ]|PCIE[- ])?80GB( PCIe)?": "a100",
    r"NVIDIA H100 80GB HBM3": "h100",
    r"NVIDIA H200": "h200",
    r"NVIDIA B200": "b200",
    r"NVIDIA L40S": "l40s",
    r"NVIDIA GeForce RTX 4090": "rtx4090",
}


def gpu_named(name: str) -> Gpu:
    """UserError for a name that is not in the table, with those that are."""
    if name.lower() not in GPUS:
        raise UserError(f"--gpu is {name!r}; known: {', '.join(GPUS)}")
    return GPUS[name.lower()]


def gpu_of_device(name: str) -> Gpu | None:
    """The GPU that CUDA calls `name`; None if it is not in the table, as are the slower ones of the same family (H100
    PCIe, H200 NVL, RTX 4090 Laptop)."""
    found = [gpu for pattern, gpu in _NAMES.items() if re.fullmatch(pattern, name)]
    return GPUS[found[0]] if found else None
