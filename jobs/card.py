"""`patchline card`: writes a dataset's card, one page that shows what is in it."""

import logging
from dataclasses import dataclass

from shards.card.card import CARD_PATH, MOST_TILES, gather_facts
from shards.card.card_page import render
from shards.dataset import open_dataset
from shards.errors import UserError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CardJob:
    """The dataset at `url`; `num_mosaic` of its samples are shown as pictures."""

    url: str = ""
    num_mosaic: int = 72

    def __post_init__(self) -> None:
        if not 0 <= self.num_mosaic <= MOST_TILES:
            raise UserError(f"--num-mosaic is {self.num_mosaic}; allowed are 0 to {MOST_TILES}")


def run(job: CardJob) -> int:
    """0 once the card is written; the dataset stays as it is otherwise."""
    if not job.url:
        raise UserError("the dataset's URL is missing; give a folder or s3://bucket/prefix")
    dataset = open_dataset(job.url)
    page = render(gather_facts(dataset, num_tiles=job.num_mosaic))
    dataset.store.write(CARD_PATH, page)
    log.info("%s/%s: %.1f MB, %d samples", dataset.url, CARD_PATH, len(page) / 1e6, dataset.num_samples)
    return 0
