"""A rank's lines, whoever started the ranks. The lines of torchrun are those of two nodes with two ranks each."""

from pathlib import Path

import pytest

from jobs.monitor.logs import lines_of_rank, ranks_per_task
from tests.jobs.reports.test_ls import make
from tests.rigs.processes import patchline

LINES = [
    "stage.sbatch: job 1, start 0, try 0: 4 ranks on n1,n2",
    "0: W1123 18:00:00.000 7 torch/distributed/run.py:774] a word of torchrun",
    "0: [rank0]: 12:00:00 step 1",
    "1: [rank3]: 12:00:00 rank 3: a warning",
    "0: [rank1]: [rank1]: ValueError: no",
    "1: [rank2]: print",
]


def under_torchrun(run_dir: Path, *lines: str) -> Path:
    folder = run_dir / "submit" / "exits-1-0-0"
    folder.mkdir(parents=True)
    for name in ("pid-0-0", "pid-0-1", "pid-1-0", "pid-1-1", "started", "rank-0"):
        (folder / name).write_text("1\n")
    (run_dir / "submit" / "x-1.out").write_text("".join(f"{line}\n" for line in lines))
    return run_dir


@pytest.mark.parametrize(
    ("rank", "shown"), [(0, LINES[2:3]), (1, LINES[4:5]), (2, LINES[5:]), (3, LINES[3:4]), (4, [])]
)
def test_under_torchrun(tmp_path: Path, rank: int, shown: list[str]) -> None:
    run_dir = under_torchrun(make(tmp_path / "run"), *LINES)
    assert ranks_per_task(run_dir) == 2
    ended = patchline("logs", str(run_dir), f"--rank={rank}", environ={"PATH": "/nowhere"})
    assert (ended.code, ended.output.splitlines()) == (0, shown)
    assert ("no line of rank 4" in ended.errors) is (rank == 4)


def test_under_srun_the_label_is_the_rank(tmp_path: Path) -> None:
    is_wanted = lines_of_rank(2, tmp_path)
    assert [is_wanted(line) for line in (b" 2: x", b"2:", b"12: x", b"2 x", b"stage.sbatch: 2: x", b"")] == [
        *(True, True),
        *(False, False, False, False),
    ]


def test_one_rank_per_node_has_the_label_of_its_node(tmp_path: Path) -> None:
    run_dir = under_torchrun(tmp_path)
    for name in ("pid-0-1", "pid-1-1"):
        (run_dir / "submit" / "exits-1-0-0" / name).unlink()
    assert lines_of_rank(1, run_dir)(b"1: 12:00:00 x")
    assert not lines_of_rank(1, under_torchrun(tmp_path / "b"))(b"1: 12:00:00 x"), "torchrun's have names"
