"""The parts of a start on record."""

from pathlib import Path

from pipeline.training.start_parts import START_PARTS, StartParts, read_start_parts
from pipeline.training.starts import FILE_NAME, left_behind, read_starts
from tests.rigs.training import FinishedRuns


def test_a_start_is_on_record_once_with_all_its_parts(tmp_path: Path) -> None:
    parts = StartParts()
    parts.ends("data")
    for attempt in ("1", "2"):  # the second after a rewind
        parts.has_begun(tmp_path, attempt=attempt)
    (line,) = read_start_parts(tmp_path)
    assert (line["attempt"], tuple(line["parts"])) == ("1", START_PARTS)
    assert line["parts"]["imports"] > 0
    assert line["parts"]["load"] == 0


def test_half_a_line_and_other_lines_are_left_out(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(
        '{"attempt": "0"}\n{"attempt": "1", "parts": {"imports": -1}}\n{"attempt": "2", "u'
    )
    StartParts().has_begun(tmp_path, attempt="3")
    assert [line["attempt"] for line in read_start_parts(tmp_path)] == ["3"]


def test_each_start_of_a_run_has_both_lines(finished_runs: FinishedRuns) -> None:
    run_dir = finished_runs.get(1)
    starts, parts = read_starts(run_dir), read_start_parts(run_dir)
    assert [start.attempt for start in starts] == [line["attempt"] for line in parts]
    assert starts[0].left == left_behind(run_dir.parent / "none")
    assert sum(parts[0]["parts"].values()) > 0
