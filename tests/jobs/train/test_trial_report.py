"""The table, the lines and the JSON of `verify-resume`."""

import json
from dataclasses import replace

import pytest
from rich.console import Console

from jobs.settings.runs import VerifyResumeJob
from jobs.train.resume_verdict import ResumeOutcome, as_json, explanations, outcome_table
from tests.jobs.train.test_resume_verdict import A_TENSOR, outcome

JOB = VerifyResumeJob(recipe="digits\x1b[2J", steps=10)


def shown(one: ResumeOutcome) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(outcome_table(JOB, [one], folder="/tmp/kept\n"))  # noqa: S108 - a name
    text = captured.get()
    assert "\x1b[2J" not in text
    return text


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (outcome(), ("all 10 the same bits", "all 30 the same bits, in 2 checkpoints", "exact")),
        (outcome((1.0, 1.5), num_different=2), ("1 of 10 differ, by 3.3e-01", "2 of 30 differ in step 8", "DIFFERS")),
        (outcome((1.0, 1.0 + 1e-6), limit=1e-5), ("equal to rounding (up to 1e-05)",)),
        (outcome((1.0, None)), ("by an unknown amount at most", "DIFFERS")),
    ],
)
def test_the_table(one: ResumeOutcome, words: tuple[str, ...]) -> None:
    text = shown(one)
    for word in (*words, "2 ranks, ZeRO-1", r"kept\n"):
        assert word in text


def test_the_first_step_and_tensor_are_named() -> None:
    assert explanations([outcome()]) == []
    assert explanations([outcome((1.0, 1.5), (1.0, None), num_different=2)]) == [
        "2 ranks, ZeRO-1: the first loss that differs is that of step 5: 1.0 unbroken, 1.5 continued; the largest "
        "difference is an unknown amount, in step 6",
        "2 ranks, ZeRO-1: the first checkpoint that differs is that of step 8; those saved before are the same: the "
        "master of head.bias is the first of 2 tensors out of 30; element 1 is 1.0 unbroken and 1.5 continued",
    ]
    assert explanations([outcome((1.0, 1.0 + 1e-6), (1.0, 1.5), limit=1e-5, num_different=1)]) == [
        "2 ranks, ZeRO-1: the first loss that differs above rounding is that of step 6: 1.0 unbroken, 1.5 continued; "
        "the largest difference is 3.3e-01, in step 6",
        "2 ranks, ZeRO-1: of the 30 tensors in step 8, the master of head.bias differs most, by 2.5e-01 of its norm",
    ]


def test_json_has_no_infinity() -> None:
    tensor = replace(A_TENSOR, relative=float("inf"))
    one = outcome((1.0, float("nan")), num_different=1)
    one = replace(one, checkpoint=replace(one.checkpoint, first=tensor, largest=tensor))
    found = json.loads(json.dumps(as_json(JOB, [one], folder=None), allow_nan=False))
    (run,) = found["runs"]
    assert run["first_loss"] == {"step": 5, "expected": 1.0, "found": None, "relative": None}
    assert (run["first_tensor"]["relative"], run["first_tensor"]["name"]) == (None, "head.bias")
    assert (found["same"], found["steps"], run["right"]) == (False, 10, False)
