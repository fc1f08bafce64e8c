"""What is known of the runs that a command starts. That they run is tested in test_sweep.py and test_vtab.py."""

from pathlib import Path

from jobs.trials import Trial, score_of
from tests.jobs.test_ls import make


def test_what_a_folder_says(tmp_path: Path) -> None:
    def trial(name: str) -> Trial:
        return Trial(folder=tmp_path / name, values=(), words=())

    assert score_of(trial("none")).state == "never started"
    run_dir = make(tmp_path / "half", step=10)
    (run_dir / "metrics.jsonl").open("a").write('{"step": 10, "test_accuracy": 0.5}\n')
    found = score_of(trial("half"))
    assert found.state != "done"
    assert found.accuracy is None, "of an unfinished run"
