"""Every Python example of the documents runs as it stands: copied into a file, beside the dataset that it names."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
DEADLINE_SECONDS = 120.0


def python_blocks(document: str) -> list[str]:
    """The examples of a document, in order."""
    return re.findall(r"^```python\n(.*?)^```$", (CHECKOUT / "docs" / document).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("document", ["streaming.md"])
def test_examples_run(document: str, digits_url: str, tmp_path: Path) -> None:
    """One after the other in a folder where the dataset is called `digits`; they say nothing and leave no list of
    replaced samples."""
    blocks = python_blocks(document)
    assert blocks, f"docs/{document} has no ```python block"
    (tmp_path / "digits").symlink_to(digits_url)
    for number, block in enumerate(blocks):
        program = tmp_path / f"example_{number}.py"
        program.write_text(block)
        done = subprocess.run(
            [sys.executable, program.name],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_SECONDS,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), block
    assert not (tmp_path / "quarantine.jsonl").exists()


def test_no_number_is_still_to_do() -> None:
    for page in sorted((CHECKOUT / "docs").glob("*.md")):
        assert "TODO" not in page.read_text(), f"{page.name} has a place that waits for a number"
