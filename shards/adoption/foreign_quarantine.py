"""Which samples of existing tars are refused: whether labels must be integers, and when too many are refused."""

import logging
from collections import Counter

import pyarrow as pa

from shards.adoption.foreign_tar import TarFacts, adopted_path, adopted_rows
from shards.errors import UserError
from shards.packing.reasons import general_reasons
from shards.store import Store

log = logging.getLogger(__name__)

# What to try, by the beginning of a reason.
_ADVICE = (
    ("no image", "--image-keys, the suffixes of the images"),
    ("no label", "--label-key, the label's suffix, or --label-field, a field of .json"),
    ("the label", "--label-key, the label's suffix, or --label-field, a field of .json"),
    ("unknown label", "--label-key or --label-field, or another --labels-file"),
    ("label", "the names of all classes in --labels-file"),
)


def are_mostly_integers(facts: list[TarFacts]) -> bool:
    """Whether more than half of the labels, but not all, are integers: then the others are mistakes. Taken as names,
    they would turn every integer into a name too, with another id."""
    num_labels, num_integers = sum(some.num_labels for some in facts), sum(some.num_integers for some in facts)
    if num_integers == num_labels or 2 * num_integers <= num_labels:
        return False
    message = "%d samples are refused: they have a label that is not an integer, but %d of %d labels are integers"
    log.warning(message, sum(some.num_odd for some in facts), num_integers, num_labels)
    return True


def refuse_quarantine(facts: list[TarFacts], store: Store, max_quarantined: float, integers_only: bool) -> None:
    """UserError if all samples are refused, or a larger share of them than `max_quarantined`."""
    refused = sum(some.num_refused for some in facts)
    total = refused + sum(some.num_fit for some in facts)
    if refused < total and refused <= max_quarantined * total:
        return
    message, more = "no sample can be adopted", ""
    if refused < total:
        message = f"{refused} of {total} samples cannot be adopted, allowed is a share of {max_quarantined:g}"
        more = ", or raise --max-quarantined"
    worst = max(range(len(facts)), key=lambda number: facts[number].num_refused)
    if not facts[worst].num_refused:
        raise UserError(f"{message}: the tars are empty; give others")
    reason = commonest_reason(adopted_rows(store, worst, integers_only=integers_only))
    advice = next((f", or give {options}" for start, options in _ADVICE if reason.startswith(start)), "")
    where = f"{store.url}/{adopted_path(worst)}, of {facts[worst].path}"
    raise UserError(f'{message}, most often: "{reason}"; see columns reason and not_integer of {where}{advice}{more}')


def commonest_reason(table: pa.Table) -> str:
    """The most frequent reason of the most frequent kind of reason in a description."""
    reasons = table["reason"].drop_null()
    pairs = list(zip(general_reasons(reasons).to_pylist(), reasons.to_pylist(), strict=True))
    [(kind, _)] = Counter(kind for kind, _ in pairs).most_common(1)
    return str(Counter(reason for other, reason in pairs if other == kind).most_common(1)[0][0])
