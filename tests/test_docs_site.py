"""The documentation as a site: it builds, its links lead somewhere, and a browser needs nothing else to show it."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from docs.site_files import CHECKOUT, FLAGS, stage
from jobs.arguments import shown_run_flags
from jobs.flags import flags_of
from jobs.resolve import default_job
from jobs.stages import COMMANDS, STAGES, recipes_of
from tests.rigs.browser import BROKEN_FLAGS, CHROMIUM, browser
from tests.rigs.faults import every_fault

pytest.importorskip("zensical", reason="the extra `docs` is not installed")
LINK = re.compile(r'<(\w+)[^>]*?\s(?:href|src)="([^"]*)"')
ANCHOR = re.compile(r'\sid="([^"]+)"')
LOADED = ("script", "link", "img")  # what a browser fetches to show a page; a link is followed by its reader
# What GitHub and the site must show alike. `code` and `p` are left out: highlighting and loose lists differ.
SHOWN = ("h2", "h3", "table", "tr", "td", "ul", "ol", "li", "pre", "img")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the site in `site`, and what it was built from in `build/docs`."""
    folder = tmp_path_factory.mktemp("docs")
    stage(folder / "build" / "docs")
    shutil.copy(CHECKOUT / "mkdocs.yml", folder)
    words = ["zensical", "build", "--strict"]
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def shown(built: Path) -> list[Path]:
    """The pages of the site. Only a server shows the page of errors, whose links begin at its root."""
    return sorted(path for path in (built / "site").rglob("*.html") if path.name != "404.html")


def html_of(built: Path, page: Path) -> Path:
    """The file of the site that shows a page."""
    path = page.relative_to(built / "build" / "docs")
    return built / "site" / (path.with_name("index.html") if path.name == "README.md" else path.with_suffix(".html"))


@every_fault
def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(built: Path) -> Iterator[str]:
    """Links to other sites are not followed: tests use no network."""
    texts = {path: path.read_text() for path in shown(built)}
    anchors = {path: set(ANCHOR.findall(text)) for path, text in texts.items()}
    assert len(texts) > 30
    for path, text in texts.items():
        for tag, link in LINK.findall(text):
            target, _, anchor = unescape(link).partition("#")
            place = (path.parent / target).resolve() if target else path
            if ":" in target or target.startswith("//"):
                if tag in LOADED or not target.startswith("https://"):
                    yield f"{path.name}: <{tag}> has {link}"
            elif not place.exists():
                yield f"{path.name}: {link} is not on the site"
            elif anchor and anchor not in anchors[place]:
                yield f"{path.name}: {link}: the page has no such section"


def test_the_style_sheets_load_nothing_from_elsewhere(built: Path) -> None:
    sheets = [path.read_text() for path in (built / "site").rglob("*.css")]
    assert sheets
    assert [
        found for text in sheets for found in re.findall(r"(?:url\(|@import)[\s\"']*(?:https?:)?//[^)]*", text)
    ] == []


@every_fault
def test_the_navigation_has_every_page_once(built: Path) -> Iterator[str]:
    pages = built / "build" / "docs"
    nav = (built / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    named = re.findall(r": (\S+\.md)$", nav, re.MULTILINE)
    for path in (page.relative_to(pages).as_posix() for page in pages.rglob("*.md")):
        if named.count(path) != 1:
            yield f"the navigation in mkdocs.yml names {path} {named.count(path)} times"


@every_fault
def test_the_site_shows_what_github_shows(built: Path) -> Iterator[str]:
    """The two read Markdown a little differently. Another number of tables or items tells that a page relies on it."""
    github = MarkdownIt("commonmark").enable("table")
    for page in sorted((built / "build" / "docs").rglob("*.md")):
        there = github.render(page.read_text())
        here = html_of(built, page).read_text().partition("<article")[2].partition("</article>")[0]
        for tag in SHOWN:
            numbers = [len(re.findall(rf"<{tag}\b", html)) for html in (there, here)]
            if numbers[0] != numbers[1]:
                yield f"{page.name} has {numbers[0]} <{tag}> on GitHub, and {numbers[1]} on the site"


@every_fault
def test_the_page_of_flags_has_every_command_and_flag(built: Path) -> Iterator[str]:
    page = (built / "build" / "docs" / FLAGS).read_text()
    sections = dict(re.findall(r"^## patchline (\S+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    for name, stage_of in STAGES.items():
        recipe = next(iter(recipes_of(name))) if stage_of.recipes else ""
        shared = sections["pretrain"] if "takes all flags of [patchline pretrain]" in sections[name] else ""
        for flag in (*flags_of(default_job(name, recipe)), *shown_run_flags(name)):
            short = flag.name.replace("--training.", "--")
            if f"| `{flag.name}` |" not in sections[name] and f"| `{short}` |" not in shared:
                yield f"the section of {name} has no {flag.name}"


@pytest.mark.parametrize("word", ["resume", "--checkpoint.keep-newest", "SIGKILL"])
def test_the_search_knows(built: Path, word: str) -> None:
    index = (built / "site" / "search.js").read_text()
    assert word in index
    assert json.loads(index.partition("=")[2].rstrip(";\n"))["items"]


@pytest.mark.long
@pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")
def test_every_page_fits_a_screen_and_asks_nobody(built: Path, tmp_path: Path) -> None:
    """Every page as wide as a laptop and a telephone, light and dark, opened from its folder."""
    with browser(tmp_path) as chromium:
        for page in shown(built):
            for width, is_dark in ((1280, False), (420, True)):
                seen = chromium.open(page, width=width, is_dark=is_dark, asks=(BROKEN_FLAGS,))
                where = f"{page.name} at {width} px"
                assert [url for url in seen.requests if not url.startswith("file:")] == [], where
                assert (seen.console, seen.answers) == ([], [[]]), where
                assert seen.scroll_width <= seen.width, where
                assert (seen.background == "rgb(255, 255, 255)") is not is_dark, where
