"""Tests of the studies of small models, of the costs of options, and of the simulation of packed images."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import step_options
from benchmarks.native_resolutions import TOKENS, fits, simulated, tokens_of
from benchmarks.small_studies import TOKENS as ARMS
from benchmarks.small_studies import Run, accuracies, folder, results, runs_with_tokens, small
from jobs.arguments import values_of, with_values
from jobs.flags import flags_of
from pipeline.planning.step_time import flops_of_steps
from pipeline.training.settings.job import TrainingJob


def changed(job: TrainingJob, *words: str) -> TrainingJob:
    """Returns the job with the flags of a command."""
    found = with_values(job, values_of(words, list(flags_of(job)), command=("pretrain", "small")))
    assert isinstance(found, TrainingJob)
    return found


def test_each_arm_has_the_operations_of_the_run_with_all_tokens() -> None:
    budget = flops_of_steps(small(), 586)
    for run in runs_with_tokens(586):
        spent, more = (
            flops_of_steps(replace(small(), steps=steps, tokens=ARMS[run.name](steps)), steps)
            for steps in (run.num_steps, run.num_steps + 1)
        )
        assert spent <= budget < more + 0.001 * budget, run
    assert [run.num_steps for run in runs_with_tokens(586)] == [586, 1104, 1227]


def test_the_flags_of_an_arm_are_those_of_its_settings() -> None:
    for run in runs_with_tokens(586):
        job = changed(small(), f"--steps={run.num_steps}", *run.more)
        assert job.tokens == ARMS[run.name](run.num_steps), run


def test_results_have_the_curves_of_all_seeds_and_their_last_accuracies(tmp_path: Path) -> None:
    arguments = argparse.Namespace(study="tokens", runs=tmp_path, seeds=2, epochs=1.5)
    run = Run(name="all tokens", recipe="small", num_steps=20)
    for seed, last in ((0, 0.5), (1, 0.25)):
        run_dir = folder(run, arguments, seed=seed)
        run_dir.mkdir()
        lines = ({"step": 10, "test_accuracy": 0.125}, {"step": 15, "loss": 2.0}, {"step": 20, "test_accuracy": last})
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert accuracies(run_dir) == {10: 0.125, 20: 0.25}
    assert results([run], arguments)["arms"]["all tokens"] == {
        "steps": 20,
        "flags": (),
        "curves": [{10: 0.125, 20: 0.5}, {10: 0.125, 20: 0.25}],
        "last": [0.5, 0.25],
    }


@pytest.mark.parametrize("name", [name for name in step_options.OPTIONS if "teacher" not in name])
def test_each_option_is_a_flag_of_the_tiny_model(name: str) -> None:
    words = [word.format(before_last=14, teacher="") for word in step_options.OPTIONS[name]]
    job = changed(step_options.tiny(), "--steps=15", *words)
    assert (job == replace(step_options.tiny(), steps=15)) == (name == step_options.PLAIN)


@pytest.mark.parametrize(
    ("tokens", "num_sequences", "found"),
    [
        ((TOKENS, TOKENS), 2, True),  # each fills a sequence
        ((600, 500, 424), 2, True),  # 600 + 424 and 500
        ((600, 500, 425), 2, True),  # 600, and 500 + 425
        ((600, 600, 600), 2, False),  # no two fit into one
    ],
)
def test_images_are_packed_largest_first(tokens: tuple[int, ...], num_sequences: int, found: bool) -> None:
    assert fits(np.array(tokens), num_sequences) is found


def test_a_simulated_batch_has_images_of_the_drawn_area_and_few_empty_tokens() -> None:
    assert tokens_of(np.array([224.0, 224.0]), np.array([1.0, 4.0])).tolist() == [196, 28 * 7]
    found = simulated(np.array([0.75, 1.0, 1.5]), 64, stratified=True)
    assert 0 < found["empty"]["mean"] < found["empty"]["most"] < 0.03
