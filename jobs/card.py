"""`patchline card`: writes a dataset's card, one page that shows what is in it."""

import logging

from jobs.dataset_jobs import CardJob
from shards.card.card import CARD_PATH, MOST_TILES, gather_facts
from shards.card.card_page import render
from shards.dataset import open_dataset
from shards.errors import UserError

__all__ = ["CardJob", "run"]

log = logging.getLogger(__name__)


def run(job: CardJob) -> int:
    """0 once the card is written; the dataset stays as it is otherwise."""
    if not 0 <= job.num_mosaic <= MOST_TILES:
        raise UserError(f"--num-mosaic is {job.num_mosaic}; allowed are 0 to {MOST_TILES}")
    if not job.url:
        raise UserError("the dataset's URL is missing; give a folder or s3://bucket/prefix")
    dataset = open_dataset(job.url)
    page = render(gather_facts(dataset, num_tiles=job.num_mosaic))
    dataset.store.write(CARD_PATH, page)
    log.info("%s/%s: %.1f MB, %d samples", dataset.url, CARD_PATH, len(page) / 1e6, dataset.num_samples)
    return 0
