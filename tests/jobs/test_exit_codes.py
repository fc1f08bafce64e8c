"""Scripts, Slurm sites and the batch script depend on these numbers."""

import re
from pathlib import Path

from jobs import exit_codes

CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_numbers_are_the_documented_ones() -> None:
    codes = {name: value for name, value in vars(exit_codes).items() if name.isupper()}
    assert codes == {
        "DONE": 0,
        "FAULTS_FOUND": 1,
        "USER_MISTAKE": 2,
        "OUR_BUG": 70,
        "CRASH": 74,
        "CONTINUE": 75,
        "WILL_NOT_SUCCEED": 78,
        "INTERRUPTED": 130,
    }


def test_the_batch_script_has_the_same_numbers() -> None:
    script = (CHECKOUT / "slurm" / "stage.sbatch").read_text()
    found = dict(re.findall(r"\b(USER_ERROR|CONTINUE|HOPELESS)=(\d+)", script))
    assert found == {"USER_ERROR": "2", "CONTINUE": "75", "HOPELESS": "78"}


def test_the_page_of_exit_codes_lists_them() -> None:
    page = (CHECKOUT / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", page, flags=re.MULTILINE)
    listed = {int(code) for row in rows for code in row.split(", ")}
    assert listed == {0, 1, 2, 70, 74, 75, 78, 130, 138, 140, 141, 143}
