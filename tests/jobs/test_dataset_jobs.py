"""The jobs of datasets refuse bad values as soon as they are made."""

from typing import Any

import pytest

from jobs.dataset_jobs import IndexJob, PackJob
from shards.errors import UserError


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (PackJob, {"workers": 0}, "workers is 0; allowed: 1 or more"),
        (PackJob, {"samples_per_shard": 0}, "samples_per_shard is 0; allowed: 1 or more"),
        (PackJob, {"samples_per_block": -1}, "samples_per_block is -1; allowed: 1 or more"),
        (PackJob, {"seed": -1}, "seed is -1; allowed: 0 to"),
        (PackJob, {"seed": 2**63}, "seed is 9223372036854775808; allowed: 0 to"),
        (PackJob, {"max_quarantined": 1.5}, "max_quarantined is 1.5; allowed: 0 to 1"),
        (PackJob, {"part": "8/8"}, "--part is '8/8'; allowed: I/N with I from 0 to N-1"),
        (PackJob, {"part": f"0/{'9' * 5000}"}, "...; allowed: I/N with I from 0 to N-1"),
        (PackJob, {"part": "0/8"}, "--part 0/8 needs --phase scan or --phase shards"),
        (IndexJob, {"workers": 0}, "workers is 0; allowed: 1 or more"),
        (IndexJob, {"max_quarantined": -1.0}, "max_quarantined is -1.0; allowed: 0 to 1"),
    ],
)
def test_bad_values_are_refused(kind: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as raised:
        kind(**fields)
    assert message in str(raised.value)


def test_a_share_is_numbers() -> None:
    assert PackJob(part="3/8", phase="scan").share == (3, 8)
