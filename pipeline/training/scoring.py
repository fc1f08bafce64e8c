"""Scores on the held-out datasets while a run trains."""

import logging
from collections.abc import Mapping
from typing import cast

from pipeline.evaluation.fewshot import FewshotData, mean_and_deviation, measured, represented, transform_of
from pipeline.evaluation.scores import Scores, evaluate
from pipeline.models.build import Model
from pipeline.ranks.collectives import all_agree
from pipeline.ranks.world import World
from pipeline.training.controls import Controls
from pipeline.training.settings.job import TrainingJob
from pipeline.training.watchdog.rank_progress import Phase
from pipeline.training.watchdog.signals import StopRequest
from pipeline.training.watchdog.stopping import WaitGivenUpError
from pipeline.training.zero.engine import Engine
from shards.dataset import Dataset

log = logging.getLogger(__name__)


class HeldOut:
    """`sets`: datasets by their names, empty for the one that the best model is by. `labels`: the names of the model's
    classes. `of_others`: values of the others' scores after the step that was asked for last, few-shot scores, and at
    the end the scores of averaged weights, for the metrics. `was_given_up`: an evaluation that was due gave way to a
    stop request."""

    def __init__(
        self,
        job: TrainingJob,
        engine: Engine,
        world: World,
        *,
        sets: Mapping[str, Dataset],
        labels: tuple[str, ...],
        controls: Controls,
        fewshot: FewshotData | None = None,
    ) -> None:
        self.job, self.engine, self.world, self.labels = job, engine, world, labels
        self.fewshot = fewshot
        self.dataset, self.of_others = sets.get(""), dict[str, float]()
        self.also = {name: dataset for name, dataset in sets.items() if name}
        self.controls, self.was_given_up, self._num_batches = controls, False, 0

    def is_due(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        return self._is_scored(step) or self._is_fewshot(step)

    def _is_scored(self, step: int) -> bool:
        return self.dataset is not None and self._is_one_of(self.job.evaluation.every_steps, step)

    def _is_fewshot(self, step: int) -> bool:
        return self.fewshot is not None and self._is_one_of(self.job.fewshot.every_steps, step)

    def _is_one_of(self, every: int, step: int) -> bool:
        return step == self.job.steps or (every > 0 and step % every == 0)

    def scores(self, step: int) -> Scores | None:
        """Accuracy and loss after `step`; None if none are due, or if the evaluation was given up. Collective."""
        self.of_others = {}
        if not self.is_due(step):
            return None
        self._num_batches, scores = 0, None
        try:
            with self.controls.waiting("evaluation", "evaluating"):
                self.engine.train(False)
                if self.dataset is not None and self._is_scored(step):
                    scores = self._scores_on(self.dataset)
                    self.of_others = self._scores_on_others("")
                    if step == self.job.steps and self.engine.has_averages:
                        self.of_others |= self._averaged_scores(self.dataset)
                if self.fewshot is not None and self._is_fewshot(step):
                    self.of_others |= self._fewshot_scores(self.fewshot)
                return scores
        except WaitGivenUpError:
            self.was_given_up, self.of_others = True, {}
            return None
        finally:
            self.engine.train(True)

    def _scores_on_others(self, ending: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, dataset in self.also.items():
            found |= self._scores_on(dataset).values(f"eval/{name}/{ending}")
        return found

    def _averaged_scores(self, dataset: Dataset) -> dict[str, float]:
        """The scores of the averaged weights, which the run ends with."""
        self.engine.swap_averages()
        try:
            found = self._scores_on(dataset).values("test_ema_") | self._scores_on_others("ema_")
        except WaitGivenUpError:  # on all ranks; after any other error nothing is saved
            self.engine.swap_averages()
            raise
        self.engine.swap_averages()
        return found

    def _scores_on(self, dataset: Dataset) -> Scores:
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

    def _fewshot_scores(self, data: FewshotData) -> dict[str, float]:
        """Mean accuracy over the seeds for each number of shots, on rank 0; empty on the others."""
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

    def _begin_batch(self) -> None:
        """Raises WaitGivenUpError on all ranks if one is asked to exit. Collective."""
        self._num_batches += 1
        self.controls.stopping.progress.enters(Phase.EVALUATING, batch=self._num_batches)
        is_asked = self.controls.request() == StopRequest.SAVE_AND_EXIT
        if not all_agree(not is_asked, device=self.world.device):
            raise WaitGivenUpError("evaluating")
