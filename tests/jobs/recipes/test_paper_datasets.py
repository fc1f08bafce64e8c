"""Recipes of JFT and ImageNet-21k are read once by any number of ranks from 8 to 512, within a host's memory."""

from collections.abc import Iterator

import numpy as np

from jobs.recipes.pretrain import RECIPES
from pipeline.training.zero.batch_plan import shared_lanes, times_read
from shards.order import SampleOrder
from shards.reading.windows import window_bound_bytes
from shards.sample_rows import BlockTable
from tests.rigs.faults import every_fault

IMAGE_BYTES, BLOCK = 110_000, 64
NUM_BLOCKS = 20_000  # 1.3 million images: more of them need no more memory


@every_fault
def test_recipes_of_large_datasets_serve_8_to_512_ranks() -> Iterator[str]:
    sizes = np.full(NUM_BLOCKS, BLOCK)
    ends = np.cumsum(sizes * IMAGE_BYTES)
    blocks = BlockTable(
        shard=np.zeros(NUM_BLOCKS, dtype=np.int64),
        first_byte=ends - sizes * IMAGE_BYTES,
        end_byte=ends,
        first_sample_id=np.cumsum(sizes) - sizes,
        num_samples=sizes,
        read_bytes=sizes * IMAGE_BYTES,
    )
    bounds = dict[tuple[int, int, int, int], int]()
    for name in (name for name in RECIPES if "_jft" in name or "_i21k" in name):
        job = RECIPES[name]()
        data, batch = job.data, job.global_batch
        if data.lanes * data.window_blocks < 256:
            yield f"{name} shuffles {data.lanes * data.window_blocks} blocks, fewer than by default"
        for num_ranks in (8, 16, 32, 64, 128, 256, 512):
            if shared_lanes(data.lanes, data.window_blocks, num_ranks=num_ranks):
                yield f"{name} is refused on {num_ranks} ranks"
            if times_read(data.lanes, num_ranks=num_ranks) > 1.12:
                yield f"{name} is read {times_read(data.lanes, num_ranks=num_ranks)} times by {num_ranks} ranks"
            key = (data.lanes, data.window_blocks, batch, num_ranks)
            if key not in bounds:
                order = SampleOrder(sizes, seed=1, lanes=data.lanes, window_blocks=data.window_blocks)
                bounds[key] = window_bound_bytes(
                    blocks, order, batch_size=batch, num_ranks=num_ranks, batches_in_use=data.steps_ahead
                )
            if 8 * bounds[key] > data.memory_limit_bytes:
                yield f"{name} may read ahead {8 * bounds[key] / 1e9:.1f} GB on a host of 8 of {num_ranks} ranks"
