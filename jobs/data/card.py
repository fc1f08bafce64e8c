"""`patchline card`: writes a dataset's card, an HTML page that shows what is in it."""

import logging
import shlex
import sys

from jobs import exit_codes
from jobs.settings.data import CardJob
from shards.card.facts import CARD_PATH, CardFacts, gather_facts
from shards.card.page import Use, render, title_of
from shards.dataset import Dataset, open_dataset
from shards.errors import UserError
from shards.manifest import MANIFEST_PATH
from shards.output.quantities import size
from shards.pages.page import shown
from shards.store import open_store

__all__ = ["CardJob", "run"]

log = logging.getLogger(__name__)
_SMALL = "A small model, trained in minutes on any machine. Larger ones are listed by: patchline pretrain"
_TUNED = (
    "Published weights, fine-tuned: the best start for a few hundred images. WEIGHTS is an .npz file, a folder of timm "
    "or Hugging Face, or a run."
)
_TUNED_DIGITS = "That model, fine-tuned at a higher resolution."
_UNSCORED = (
    "Neither command measures an accuracy, since no test set is beside this dataset: pack one, and give its URL as "
    "--evaluation.url."
)


def run(job: CardJob) -> int:
    """Writes the card and changes nothing else; returns 0."""
    dataset = open_dataset(job.url)
    facts = gather_facts(dataset, num_tiles=job.num_mosaic)
    page = render(facts, use=use_of(facts, has_test=_has_test(dataset)))
    dataset.store.write(CARD_PATH, page)
    log.info("%s/%s: %s, %d samples", dataset.url, CARD_PATH, size(len(page)), dataset.num_samples)
    return exit_codes.DONE


def _has_test(dataset: Dataset) -> bool:
    """Whether the test split is beside the dataset, at URL-test, as `patchline pack --split-test` writes it."""
    try:
        return open_store(_test_of(dataset.url)).exists(MANIFEST_PATH)
    except UserError:  # for example a bucket that hides what one may not read
        return False


def _test_of(url: str) -> str:
    return f"{url.rstrip('/')}-test"


def use_of(facts: CardFacts, *, has_test: bool = False) -> Use | None:
    """Returns the commands that train on the dataset if it is a training split, otherwise the one that evaluates on it.
    Returns None if no sample has a label. `has_test`: whether a dataset is at URL-test."""
    if not facts.class_counts.any():
        return None
    # A URL that cannot be shown as it is cannot be copied either.
    url = facts.url if shown(facts.url, most=sys.maxsize) == facts.url else "URL"
    run_dir = f"runs/{shown(title_of(facts.url).removesuffix(f'-{facts.manifest.split}'))}"
    if facts.manifest.split != "train":
        about = "This evaluates the weights that a training run wrote."
        return Use(title="Evaluate on it", commands=((about, _command("evaluate", run_dir, "--data.url", url)),))
    source = facts.plan.settings.get("source")
    is_digits = isinstance(source, dict) and source.get("kind") == "digits"
    data = ["--data.url", url, *(["--evaluation.url", _test_of(url)] if has_test else [])]
    data += ["--loss", "sigmoid"] * facts.tally.is_multi_label
    recipe, tuning, weights, tuned = "photos_smoke", "photos", "WEIGHTS", _TUNED
    if is_digits:
        recipe, tuning, weights, tuned = "digits_smoke", "digits_48", f"{run_dir}/weights", _TUNED_DIGITS
    small = _SMALL if has_test else f"{_SMALL}. {_UNSCORED}"
    return Use(
        title="Train on it",
        commands=(
            (small, _command("pretrain", recipe, *data, "--run-dir", run_dir)),
            (tuned, _command("finetune", tuning, "--initial.weights", weights, *data, "--run-dir", f"{run_dir}-tuned")),
        ),
    )


def _command(*words: str) -> str:
    return shlex.join(["patchline", *words])
