"""Computes how many CPU cores a host of GPUs needs to feed them. All functions are pure.

    cores     images per second of the host's ranks x CPU-seconds per image, and a core for each rank's process

The CPU-seconds per image, from bytes to a view of 224 px, are those of two results in benchmarks/results. The lower
figure is of loader.json (the arm "patchline"): photographs of ImageNet, on an AMD EPYC. The upper figure is of
gpu_h200.json: generated pictures, on the host of an H200. Both were virtual machines, whose cores may be half of a
physical one. The core of a process, for the thread that launches the step, is an assumption.

The cores of known hosts are those of NVIDIA's own machines with eight GPUs, from the user guides of DGX A100, H100,
H200 and B200. Other hosts have other numbers of cores.
"""

import math
from dataclasses import dataclass

IMAGE_SECONDS = (0.519e-3, 1.04e-3)
PROCESS_IMAGES_PER_SECOND = 5_084  # the most that one process was seen to prepare (gpu_h200.json; its 16 cores)
MEASURED_PIXELS = 224
_LEAST_PIXELS = MEASURED_PIXELS // 2  # an image of fewer pixels is decoded at a lower scale, or is small itself
_DGX = {  # the machine with eight GPUs of each kind, and its cores
    "a100-40": ("DGX A100", 128),
    "a100": ("DGX A100", 128),
    "h100": ("DGX H100", 112),
    "h200": ("DGX H200", 112),
    "b200": ("DGX B200", 112),
}
_GPUS_OF_DGX = 8


@dataclass(frozen=True, kw_only=True)
class HostCores:
    """The cores that a host needs for its ranks, by the lower and the upper figure. `images_per_second`: the images of
    all ranks of the host. `known_host`: a host of eight such GPUs whose cores are known, or an empty string.
    `known_cores`: how many of its cores there are for these ranks, or 0."""

    num_ranks: int
    images_per_second: float
    least: int
    most: int
    known_host: str = ""
    known_cores: int = 0

    @property
    def is_process_slower(self) -> bool:
        """Whether a rank takes more images per second than one process was ever seen to prepare."""
        return self.images_per_second > self.num_ranks * PROCESS_IMAGES_PER_SECOND


def host_cores(images_per_second: float, *, num_ranks: int, gpu: str, image_size: int) -> HostCores | None:
    """Returns the cores that a host needs whose `num_ranks` ranks take this many images per second together. Returns
    None for images that are much smaller than the measured ones, whose cost is not known."""
    if image_size < _LEAST_PIXELS:
        return None
    least, most = (math.ceil(images_per_second * seconds) + num_ranks for seconds in IMAGE_SECONDS)
    name, cores = _DGX.get(gpu.lower(), ("", 0))
    return HostCores(
        num_ranks=num_ranks,
        images_per_second=images_per_second,
        least=least,
        most=most,
        known_host=name,
        known_cores=cores * min(num_ranks, _GPUS_OF_DGX) // _GPUS_OF_DGX,
    )
