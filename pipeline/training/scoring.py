"""Scores on the held-out datasets while a run trains.

A dataset that cannot be read does not end the run. Its scores are left out, with an alarm, until it can be read again.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeVar, cast

from pipeline.evaluation.fewshot import FewshotData, mean_and_deviation, measured, represented, transform_of
from pipeline.evaluation.scores import Scores, evaluate
from pipeline.models.build import Model
from pipeline.ranks.collectives import gather_json, launched_sums
from pipeline.ranks.streams import ReadBack, streams_of
from pipeline.training.controls import Controls
from pipeline.training.guard import add_alarm
from pipeline.training.prepare import Prepared
from pipeline.training.watchdog.heartbeat_files import Phase
from pipeline.training.watchdog.stopping import StopRequest, WaitGivenUpError
from pipeline.training.zero.engine import Engine
from shards.dataset import Dataset
from shards.errors import UserError

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class EvaluationFailedError(Exception):
    """A rank could not read its images. Raised on all ranks."""


class HeldOut:
    """Scores a model on held-out datasets while it trains. `dataset`: the dataset that decides which model is best;
    None if there is none. `also`: the other datasets by name. `labels`: the names of the model's classes. `of_others`:
    further values for the metrics of the step that `scores` was last called for: scores on the other datasets, few-shot
    scores, and at the last step the scores of the averaged weights. `was_given_up`: whether an evaluation was abandoned
    because of a stop request. `num_failed`: the number of measurements left out so far because data could not be
    read."""

    def __init__(self, prepared: Prepared, engine: Engine, controls: Controls) -> None:
        self.job, self.world, self.engine = prepared.job, prepared.world, engine
        self.labels, self.fewshot = prepared.stream.data.label_names, prepared.fewshot
        self.dataset, self.of_others = prepared.held_out.get(""), dict[str, float]()
        self.also = {name: dataset for name, dataset in prepared.held_out.items() if name}
        self.controls, self.was_given_up, self._num_batches = controls, False, 0
        self.num_failed = self._step = 0
        self._streams = streams_of(self.world.device)

    def is_due(self, step: int) -> bool:
        """Returns whether the model is evaluated after `step`."""
        return self._is_scored(step) or self._is_fewshot(step)

    def _is_scored(self, step: int) -> bool:
        return self.dataset is not None and self._is_one_of(self.job.evaluation.every_steps, step)

    def _is_fewshot(self, step: int) -> bool:
        return self.fewshot is not None and self._is_one_of(self.job.fewshot.every_steps, step)

    def _is_one_of(self, every: int, step: int) -> bool:
        return step == self.job.steps or (every > 0 and step % every == 0)

    def scores(self, step: int) -> Scores | None:
        """Evaluates the model after `step`. Returns its accuracy and loss; None if they are not due, or if the
        evaluation was given up or failed. Collective."""
        self.of_others = {}
        if not self.is_due(step):
            return None
        self._step, self._num_batches, scores = step, 0, None
        try:
            with self.controls.waiting("evaluation", "evaluating"):
                self.engine.train(False)
                if self.dataset is not None and self._is_scored(step):
                    scores = self._scores_on(self.dataset)
                    self.of_others = self._scores_on_others("")
                    if step == self.job.steps and self.engine.has_averages:
                        self.of_others |= self._averaged_scores(self.dataset)
                if self.fewshot is not None and self._is_fewshot(step):
                    data = self.fewshot
                    self.of_others |= self._tried(lambda: self._fewshot_scores(data), on=self.job.fewshot.url) or {}
                return scores
        except WaitGivenUpError:
            self.was_given_up, self.of_others = True, {}
            return None
        finally:
            self.engine.train(True)

    def _scores_on_others(self, ending: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, dataset in self.also.items():
            scores = self._scores_on(dataset)
            found |= scores.values(f"eval/{name}/{ending}") if scores else {}
        return found

    def _averaged_scores(self, dataset: Dataset) -> dict[str, float]:
        """Returns the scores of the averaged weights, which become the run's result."""
        self.engine.swap_averages()
        try:
            scores = self._scores_on(dataset)
            found = (scores.values("test_ema_") if scores else {}) | self._scores_on_others("ema_")
        except WaitGivenUpError:  # raised on all ranks; after any other error, nothing is saved
            self.engine.swap_averages()
            raise
        self.engine.swap_averages()
        return found

    def _scores_on(self, dataset: Dataset) -> Scores | None:
        def scored() -> Scores:
            scores, _ = evaluate(
                self.engine.module,
                dataset,
                self.job.evaluation,
                labels=self.labels,
                loss=self.job.loss,
                world=self.world,
                label_weights=self.job.data.label_weights,
                before_batch=self._begin_batch,
            )
            return scores

        return self._tried(scored, on=dataset.url)

    def _tried(self, measure: Callable[[], Result], *, on: str) -> Result | None:
        """Measures, and returns the result. If that fails, writes an alarm and returns None. All ranks fail alike,
        because a UserError is about images and labels, which are the same on all ranks."""
        try:
            return measure()
        except (EvaluationFailedError, UserError) as error:
            self.num_failed += 1
            if self.world.is_first:
                is_last = self._step == self.job.steps
                then = (
                    "patchline evaluate can score its weights later" if is_last else "the next evaluation tries again"
                )
                log.warning("step %d: no scores on %s, and training continues (%s); %s", self._step, on, error, then)
                add_alarm(self.job.run_dir, step=self._step, kind="evaluation_failed", reason=f"{on}: {error}")
            return None

    def _fewshot_scores(self, data: FewshotData) -> dict[str, float]:
        """Returns the mean accuracy over the seeds for each number of shots. Empty on all ranks but the first."""
        config = self.job.fewshot
        found = represented(
            cast("Model", self.engine.module),
            data,
            transform=transform_of(config.transform, self.job.evaluation.transform),
            batch_size=self.job.evaluation.batch_size,
            world=self.world,
            before_batch=self._begin_batch,
        )
        if found is None:
            return {}
        if not (found.shots.isfinite().all() and found.test.isfinite().all()):
            log.warning("the representation is not finite (NaN or infinite), so there are no few-shot scores")
            return {}
        results = measured(found, config, device=self.world.device).results
        by_name = {f"fewshot/{one.shots}_shots": one.ridge for one in results}
        by_name |= {f"fewshot/{one.shots}_shots_probe": one.probe for one in results if one.probe}
        return {name: mean_and_deviation(accuracies)[0] for name, accuracies in by_name.items()}

    def _begin_batch(self, error: Exception | None) -> Callable[[], None]:
        """Launches what the ranks agree about a batch that was read, or could not be. Returns a function that raises on
        all ranks alike: WaitGivenUpError if a rank is asked to exit, EvaluationFailedError if a rank cannot read the
        batch. Collective, except if the wait itself was given up, which happens only to a rank that runs alone."""
        if isinstance(error, WaitGivenUpError):
            raise error
        is_asked = self.controls.request() == StopRequest.SAVE_AND_EXIT
        flags = [float(is_asked), float(error is not None)]
        sums = launched_sums(flags, device=self.world.device, streams=self._streams)
        return partial(self._agree, sums, error)

    def _agree(self, sums: ReadBack, error: Exception | None) -> None:
        self._num_batches += 1
        self.controls.stopping.progress.enters(Phase.EVALUATING, batch=self._num_batches)
        num_asked, num_failed = sums.values()
        if num_asked:
            raise WaitGivenUpError("evaluating")
        if num_failed:
            told = gather_json(f"{type(error).__name__}: {error}" if error else "", device=self.world.device)
            raise EvaluationFailedError(next(filter(None, told))) from error
