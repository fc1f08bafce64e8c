"""Copies what the site is built from into build/docs. Each file keeps its path in the checkout, so that the links which
work on GitHub work on the site, too. Only docs/reference/flags.md is written for the site, from the code.

python -m docs.site_files    is the first half of `make docs`
"""

import re
import shutil
from pathlib import Path

from docs import flags_page

CHECKOUT = Path(__file__).resolve().parent.parent
FLAGS = "docs/reference/flags.md"
# Pages, their pictures, and other files that they link to. tests/test_docs_site.py names what else they come to need.
_PATTERNS = (
    *("*.md", "slurm/README.md", "docs/**/*.md", "docs/*.svg", "docs/*.png", "docs/site/*.css", "docs/site/*.js"),
    *("benchmarks/results/*.json", "tests/soak/results/*.json", "tests/fuzz/results/*.json", "tests/long/*.json"),
    *("shards/hashing.py", "pipeline/planning/cluster_plan.py", "pipeline/planning/step_time.py"),
    "pipeline/planning/measured/*.json",
)


def stage(folder: Path) -> None:
    """Makes the folder anew."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in (path for pattern in _PATTERNS for path in CHECKOUT.glob(pattern)):
        copy = folder / path.relative_to(CHECKOUT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            copy.write_text(for_site(path.read_text()))
        else:
            shutil.copyfile(path, copy)
    (folder / FLAGS).write_text(flags_page.page())


def for_site(page: str) -> str:
    """The page with `a|b` for the `a\\|b` that GitHub needs in a table's code."""
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), page)


if __name__ == "__main__":
    stage(CHECKOUT / "build" / "docs")
