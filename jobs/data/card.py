"""`patchline card`: writes a dataset's card, an HTML page that shows what is in it."""

import logging
import shlex
import sys

from jobs import exit_codes
from jobs.settings.data import CardJob
from shards.card.facts import CARD_PATH, CardFacts, gather_facts
from shards.card.page import Use, render, title_of
from shards.dataset import open_dataset
from shards.output.quantities import size
from shards.pages.page import shown

__all__ = ["CardJob", "run"]

log = logging.getLogger(__name__)


def run(job: CardJob) -> int:
    """Writes the card and changes nothing else; returns 0."""
    dataset = open_dataset(job.url)
    facts = gather_facts(dataset, num_tiles=job.num_mosaic)
    page = render(facts, use=use_of(facts))
    dataset.store.write(CARD_PATH, page)
    log.info("%s/%s: %s, %d samples", dataset.url, CARD_PATH, size(len(page)), dataset.num_samples)
    return exit_codes.DONE


def use_of(facts: CardFacts) -> Use | None:
    """Returns the command that trains on the dataset if it is a training split, otherwise the one that evaluates on it.
    Returns None if no sample has a label."""
    if not facts.class_counts.any():
        return None
    # A URL that cannot be shown as it is cannot be copied either.
    url = facts.url if shown(facts.url, most=sys.maxsize) == facts.url else "URL"
    run_dir = f"runs/{shown(title_of(facts.url).removesuffix(f'-{facts.manifest.split}'))}"
    source = facts.plan.settings.get("source")
    is_digits = isinstance(source, dict) and source.get("kind") == "digits"
    if facts.manifest.split == "train":
        recipe = "digits_smoke" if is_digits else "photos_smoke"
        words = ["pretrain", recipe, "--data.url", url, "--run-dir", run_dir]
        about = "A small model, trained in minutes on any machine. Larger ones are listed by: patchline pretrain"
        return _use("Train on it", about, words + ["--loss", "sigmoid"] * facts.tally.is_multi_label)
    about = "This evaluates the weights that a training run wrote."
    return _use("Evaluate on it", about, ["evaluate", run_dir, "--data.url", url])


def _use(title: str, about: str, words: list[str]) -> Use:
    return Use(title=title, about=about, command=shlex.join(["patchline", *words]))
