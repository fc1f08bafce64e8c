"""The picture of a plan over its nodes."""

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from jobs.planning.plot import write_plot
from jobs.planning.scaling import node_rows
from jobs.resolve import default_job
from pipeline.planning.forecast import cost_of
from tests.rigs.browser import CHROMIUM, browser

JOB = replace(default_job("plan", "vit_h14_jft"), gpu="h200", nodes=(1, 8, 16), price=2.5)
DOCS = Path(__file__).resolve().parents[3] / "docs"


def drawn(out: Path, **changes: object) -> str:
    job = replace(JOB, out=str(out), **changes)
    cost = cost_of(job.training, num_images=job.num_images, num_classes=job.num_classes, days=job.days)
    write_plot(job, node_rows(job, cost))
    return out.read_text()


def test_the_svg_is_whole_and_follows_light_and_dark(tmp_path: Path) -> None:
    text = drawn(tmp_path / "a.svg")
    ET.fromstring(text)  # noqa: S314 - our own
    words = set(re.findall(r">([^<>]+)</text>", text))
    assert {"Goodput, % of the wall time", "Days (log scale)", "GPU-hours; right: cost at 2.5 each", "RSC-2"} <= words
    assert "prefers-color-scheme: dark" in text
    assert text == drawn(tmp_path / "b.svg"), "the same plan gives the same bytes"


@pytest.mark.parametrize("nodes", [(1,), tuple(2**power for power in range(9))], ids=["one", "many"])
def test_few_and_many_nodes(tmp_path: Path, nodes: tuple[int, ...]) -> None:
    assert "<svg" in drawn(tmp_path / "a.svg", nodes=nodes, price=0.0)


def test_names_are_only_text_in_the_page(tmp_path: Path) -> None:
    text = drawn(tmp_path / "a.html", recipe="<script>x</script>")
    assert "<script" not in text
    assert "&lt;script&gt;" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_page_loads_nothing_and_fits(tmp_path: Path) -> None:
    drawn(tmp_path / "a.html")
    with browser(tmp_path / "profile") as opened:
        light, dark = (opened.open(tmp_path / "a.html", width=900, is_dark=is_dark) for is_dark in (False, True))
    assert (light.requests, light.console, light.scroll_width) == ([], [], light.width)
    assert light.background != dark.background


def test_the_picture_of_the_docs_is_that_of_its_command() -> None:
    text = (DOCS / "plan.svg").read_text()
    assert "GPU-hours; right: cost at 2.5 each" in text
    assert "docs/plan.svg" in (DOCS / "training.md").read_text()
