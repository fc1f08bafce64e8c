"""How the report names each curve."""

import pytest

from jobs.report_curves import kind_of
from jobs.report_plots import share_text


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("test_accuracy", "Accuracy on the held-out dataset"),
        ("eval/digits-test/accuracy", "Accuracy on digits-test"),
        ("eval/digits-test/ema_accuracy", "Accuracy on digits-test of the averaged weights"),
        ("fewshot/5_shots", "5-shot accuracy"),
    ],
)
def test_scores_are_shown_in_percent_beside_the_loss(name: str, title: str) -> None:
    kind = kind_of(name)
    assert (kind.title, kind.text, kind.is_cost) == (title, share_text, False)
