"""Which samples of existing tars are refused: whether labels must be integers, and when too many are refused."""

import logging
from collections import Counter

import pyarrow as pa

from shards.adoption.foreign_samples import Cause
from shards.adoption.foreign_tar import TarFacts, adopted_path, adopted_rows
from shards.errors import UserError
from shards.packing.reasons import general_reasons
from shards.store import Store

log = logging.getLogger(__name__)

_LABEL = "--label-key, the label's suffix, or --label-field, a field of .json"
_ADVICE = {
    Cause.NO_IMAGE: "--image-keys, the suffixes of the images",
    Cause.NO_LABEL: _LABEL,
    Cause.UNKNOWN_LABEL: "--label-key or --label-field, or another --labels-file",
    Cause.NOT_INTEGER: "the names of all classes in --labels-file",
}


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
        message = f"{refused} of {total} samples cannot be adopted, more than the allowed share of {max_quarantined:g}"
        more = ", or raise --max-quarantined"
    worst = max(range(len(facts)), key=lambda number: facts[number].num_refused)
    if not facts[worst].num_refused:
        raise UserError(f"{message}: the tars are empty; give others")
    reason, cause = commonest_reason(adopted_rows(store, worst, integers_only=integers_only))
    advice = f", or give {_ADVICE[Cause(cause)]}" if cause else ""
    where = f"{store.url}/{adopted_path(worst)}, of {facts[worst].path}"
    raise UserError(f'{message}, most often: "{reason}"; see columns reason and not_integer of {where}{advice}{more}')


def commonest_reason(table: pa.Table) -> tuple[str, str | None]:
    """Of the kind of reason that most refused samples of a description have, the most frequent one and its cause."""
    refused = table.filter(table["reason"].is_valid())
    columns = (general_reasons(refused["reason"]), refused["reason"], refused["cause"])
    rows = list(zip(*(column.to_pylist() for column in columns), strict=True))
    [(kind, _)] = Counter(kind for kind, *_ in rows).most_common(1)
    [(commonest, _)] = Counter((reason, cause) for other, reason, cause in rows if other == kind).most_common(1)
    return commonest
