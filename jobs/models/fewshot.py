"""`patchline fewshot`: measures accuracy with a few images per class on the frozen representation of a model."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jobs import exit_codes
from jobs.exit_codes import answered_in_exchanges
from jobs.output import put, write_out
from jobs.record import write_record
from jobs.settings.models import FewshotJob
from pipeline.evaluation.fewshot import (
    FewshotScores,
    chosen_data,
    mean_and_deviation,
    measured,
    open_splits,
    represented,
    transform_of,
)
from pipeline.models.conversion.open_any import open_for_use
from pipeline.models.weights.folder import filled_model
from pipeline.ranks.world import current_world, joined
from shards.errors import InvalidDataError
from shards.output.terminal import printable_name

__all__ = ["FewshotJob", "run"]


def run(job: FewshotJob) -> int:
    """Measures the accuracy. Rank 0 prints the scores as a table or, with --json, as one JSON object; with --run-dir,
    it also writes fewshot.json. Raises InvalidDataError if a representation is not finite."""
    world = current_world(job.device, threads=job.threads)
    weights = open_for_use(job.weights, say=world.is_first)
    data = chosen_data(*open_splits(job.data, group="data"), job)
    if job.run_dir and world.is_first:
        # Written first, so that a folder without write access is refused now.
        write_record(Path(job.run_dir), stage="fewshot", job=job)
    with answered_in_exchanges(), joined(world):
        model = filled_model(weights).to(world.device)
        transform = transform_of(job.data.transform, weights.usage.transform)
        found = represented(model, data, transform=transform, batch_size=job.data.batch_size, world=world)
    if found is None:
        return exit_codes.DONE
    if not (found.shots.isfinite().all() and found.test.isfinite().all()):
        raise InvalidDataError(
            f"the representations by {job.weights!r} are not finite (NaN or infinite) for some images: the values of "
            "its weights are too large, or its training failed; give other weights"
        )
    scores = measured(found, job, device=world.device)
    facts = _facts(job, scores, test_url=data.test.url)
    if job.run_dir:
        line = f"{json.dumps(facts, allow_nan=False)}\n".encode()
        write_out(Path(job.run_dir) / "fewshot.json", line, todo="give another --run-dir")
    text = json.dumps(facts, allow_nan=False) if job.json else score_table(job.weights, scores, test_url=data.test.url)
    put(f"{text}\n")
    return exit_codes.DONE


def score_table(weights: str, scores: FewshotScores, *, test_url: str) -> str:
    """Returns a table with a line for each number of shots: the mean and the deviation over seeds. With one seed there
    is no deviation."""
    is_one = any(len(one.ridge) == 1 for one in scores.results)
    has_probe = any(one.probe for one in scores.results)
    lines = [
        printable_name(f"{weights} on {test_url}"),
        f"{scores.num_classes:,} classes (chance {scores.chance:.4f}), {scores.num_test_images:,} test "
        f"images, representation of {scores.width:,}" + (" (one seed: no deviation)" if is_one else ""),
        f"{'shots':>5}  {'images':>9}  {'accuracy':>15}" + (f"{'linear probe':>17}" if has_probe else ""),
    ]
    for one in scores.results:
        cells = [f"{one.shots:>5}", f"{one.shots * scores.num_classes:>9,}", _cell(one.ridge)]
        lines.append("  ".join([*cells, *([_cell(one.probe)] if has_probe else [])]))
    return "\n".join(lines)


def _cell(accuracies: tuple[float, ...]) -> str:
    mean, deviation = mean_and_deviation(accuracies)
    return f"{mean:.4f} ± {deviation:.4f}" if len(accuracies) > 1 else f"{mean:>15.4f}"


def _facts(job: FewshotJob, scores: FewshotScores, *, test_url: str) -> dict[str, Any]:
    """Returns the content of fewshot.json: for each number of shots, the accuracy of every seed, their mean and their
    deviation."""
    facts: dict[str, Any] = asdict(scores)
    for one, result in zip(scores.results, facts["results"], strict=True):
        for kind in ("ridge", "probe"):
            if accuracies := getattr(one, kind):
                mean, deviation = mean_and_deviation(accuracies)
                result |= {f"{kind}_mean": mean, f"{kind}_deviation": deviation}
    return facts | {"l2": job.l2, "weights": job.weights, "data_url": job.data.url, "test_url": test_url}
