"""Draws docs/architecture.svg: the rooms with their folders, and the four paths of docs/architecture.md."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 830, 806
INK, FAINT, EDGE = "#1f2328", "#57606a", "#b3bcc7"
SANS = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
X_WEIGHTS, X_JOB, X_SAVED, X_RESUMED, X_READ, X_BYTES = 149.0, 272.0, 448.0, 476.0, 588.0, 706.0
Y_LOOP, Y_STORES = 344.0, 738.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle, its name, and short lines below the name; `indent` moves both to the right."""

    name: str
    left: float
    top: float
    width: float
    height: float
    lines: tuple[str, ...] = ()
    indent: float = 9.0


@dataclass(frozen=True, kw_only=True)
class Route:
    """One path: `calls` go down from top to bottom, `results` come back up. Each stop is a file at a height.

    `labels_left`: the files of the calls are named on the left."""

    letter: str
    title: str
    colour: str  # after Okabe and Ito; the letters are for readers who cannot tell the colours apart
    x: float
    calls: tuple[float, float]
    stops: tuple[tuple[str, float], ...]
    back_x: float = 0.0
    results: tuple[float, float] | None = None
    back_stops: tuple[tuple[str, float], ...] = ()
    labels_left: bool = False


ROOMS = (
    Box(name="slurm/", left=10, top=62, width=810, height=54, lines=("processes on nodes",)),
    Box(name="jobs/", left=10, top=128, width=810, height=116, lines=("the command line,", "stages, recipes")),
    Box(name="pipeline/", left=10, top=256, width=810, height=262, lines=("tensors", "in motion")),
    Box(name="shards/", left=10, top=530, width=810, height=186, lines=("bytes at rest,", "without torch")),
)
FOLDERS = (
    Box(name="stage.sbatch, pack.sbatch", left=136, top=72, width=318, height=34),
    Box(
        name="models/",
        left=136,
        top=138,
        width=106,
        height=96,
        lines=("import, export,", "evaluate, predict"),
        indent=8,
    ),
    Box(name="cli.py, train/", left=250, top=138, width=204, height=96, lines=("flags, help,", "training"), indent=100),
    Box(name="recipes/", left=466, top=138, width=344, height=44, lines=("functions that return a whole job",)),
    Box(
        name="data/ reports/ monitor/ chains/",
        left=466,
        top=190,
        width=344,
        height=44,
        lines=("the other stages; cluster/ is Slurm",),
    ),
    Box(
        name="training/",
        left=250,
        top=266,
        width=560,
        height=114,
        lines=("zero, saving, fitting,", "reporting, watchdog"),
        indent=100,
    ),
    Box(name="models/", left=136, top=266, width=106, height=114, indent=24),
    Box(name="evaluation/", left=136, top=388, width=91, height=36, lines=("scores",)),
    Box(name="inspection/", left=235, top=388, width=91, height=36, lines=("figures",)),
    Box(name="ranks/ runs/", left=136, top=430, width=190, height=36, lines=("the ranks; run directories",)),
    Box(name="machine/ planning/", left=136, top=472, width=190, height=36, lines=("checks; what a run will cost",)),
    Box(name="checkpoints/", left=334, top=388, width=158, height=120, lines=("save, verify",)),
    Box(name="data/", left=500, top=388, width=310, height=120, lines=("decode,", "augment")),
    Box(name="packing/", left=250, top=586, width=108, height=38, lines=("new datasets",)),
    Box(name="adoption/", left=136, top=586, width=106, height=38, lines=("others' tars",)),
    Box(name="verifying/", left=136, top=540, width=106, height=38, lines=("verify",)),
    Box(name="card/", left=250, top=540, width=108, height=38, lines=("HTML page",)),
    Box(name="sources/", left=136, top=632, width=106, height=74, lines=("folders, tars,", "Parquet, lists")),
    Box(name="images/", left=250, top=632, width=108, height=74, lines=("headers, copies,", "hashes")),
    Box(name="reading/", left=370, top=540, width=440, height=84, lines=("order,", "index,", "windows"), indent=118),
    Box(name="storage/", left=370, top=632, width=440, height=74, lines=("folders,", "S3"), indent=118),
)
STORES = (
    Box(name="images as found", left=136, top=Y_STORES, width=222, height=44),
    Box(name="checkpoints", left=370, top=Y_STORES, width=122, height=44),
    Box(name="dataset: tars, index, manifest", left=506, top=Y_STORES, width=304, height=44),
)
ROUTES = (
    Route(
        letter="a",
        title="a job",
        colour="#0072b2",
        x=X_JOB,
        calls=(106, Y_LOOP - 10),
        stops=(("jobs/cli.py", 172), ("jobs/train/pretrain.py", 206), ("pipeline/training/run.py", 300)),
    ),
    Route(
        letter="b",
        title="a position in the data",
        colour="#d55e00",
        x=X_SAVED,
        calls=(Y_LOOP + 10, Y_STORES - 4),
        stops=(
            ("pipeline/training/saving/save.py", 368),
            ("pipeline/checkpoints/saves.py", 438),
            ("pipeline/checkpoints/commit.py", 462),
            ("pipeline/checkpoints/manifest.py", 486),
        ),
        labels_left=True,
        back_x=X_RESUMED,
        results=(Y_STORES - 6, Y_LOOP + 12),
        back_stops=(("pipeline/training/saving/may_continue.py", 368),),
    ),
    Route(
        letter="c",
        title="the bytes of an image",
        colour="#007a55",
        x=X_READ,
        calls=(Y_LOOP + 10, Y_STORES - 4),
        stops=(
            ("pipeline/data/stream.py", 446),
            ("pipeline/data/batches.py", 486),
            ("shards/reading/read.py", 562),
            ("shards/reading/windows.py", 602),
            ("shards/storage/ranges.py", 650),
            ("shards/storage/s3.py", 680),
        ),
        back_x=X_BYTES,
        results=(Y_STORES - 6, 496),
        back_stops=(("shards/reading/samples.py", 582), ("pipeline/data/transform.py", 486)),
    ),
    Route(
        letter="d",
        title="a weights file",
        colour="#8f3d76",
        x=X_WEIGHTS,
        calls=(206, 376),
        stops=(
            ("pipeline/models/conversion/open_any.py", 300),
            ("pipeline/models/conversion/sizes.py", 321),
            ("pipeline/models/conversion/layout.py", 342),
            ("pipeline/models/weights/folder.py", 363),
        ),
    ),
)
LOOP = "pipeline/training/loop.py"


def draw() -> str:
    """The SVG."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="{SANS}" role="img" aria-label="Patchline\'s four rooms, and four paths through them">'
    )
    elements = [
        head,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
        *(_box(room, fill="#f3f5f8", size=15.5, mono=False) for room in ROOMS),
        *(_box(folder, fill="#ffffff", size=12, mono=True) for folder in FOLDERS),
        *map(_cylinder, STORES),
        *(line for route in ROUTES for line in _lines(route)),
        _loop(),
        *(stop for route in ROUTES for stop in _stops(route)),
        *_legend(),
    ]
    return "\n".join(elements) + "\n</svg>\n"


def _box(box: Box, *, fill: str, size: float, mono: bool) -> str:
    corners = f'x="{box.left}" y="{box.top}" width="{box.width}" height="{box.height}" rx="5"'
    x, y = box.left + box.indent, box.top + (17.5 if mono else 22)
    name = _text(box.name, x, y, size=size, family=MONO if mono else SANS, weight=600)
    lines = [_text(line, x, y + 14 * number, size=11.5, fill=FAINT) for number, line in enumerate(box.lines, 1)]
    return f'<rect {corners} fill="{fill}" stroke="{EDGE}"/>{name}{"".join(lines)}'


def _cylinder(store: Box) -> str:
    radius, rise, bottom = store.width / 2, 6, store.top + store.height
    side = f"M{store.left},{store.top} V{bottom} a{radius},{rise} 0 0 0 {store.width},0 V{store.top}"
    look = 'fill="#fff8e6" stroke="#c9a227"'
    lid = f'<ellipse cx="{store.left + radius}" cy="{store.top}" rx="{radius}" ry="{rise}" {look}/>'
    return f'<path d="{side}" {look}/>{lid}' + _text(
        store.name, store.left + radius, store.top + 30, size=12.5, anchor="middle"
    )


def _lines(route: Route) -> Iterable[str]:
    yield _arrow(route.x, route.calls, colour=route.colour, stroke='stroke-width="3.5"')
    if route.results:
        yield _arrow(route.back_x, route.results, colour=route.colour, stroke='stroke-width="2" stroke-dasharray="6 4"')


def _arrow(x: float, ends: tuple[float, float], *, colour: str, stroke: str) -> str:
    """A vertical line with a head at its second end."""
    begin, end = ends
    back = -8 if end > begin else 8
    head = f'<path d="M{x - 5.5},{end + back} L{x + 5.5},{end + back} L{x},{end} z" fill="{colour}"/>'
    return f'<line x1="{x}" y1="{begin}" x2="{x}" y2="{end + back}" stroke="{colour}" {stroke}/>{head}'


def _loop() -> str:
    """The station where one path ends and two begin."""
    left, right = X_JOB - 16, X_READ + 16
    corners = f'x="{left}" y="{Y_LOOP - 11}" width="{right - left}" height="22" rx="11"'
    name = _text(Path(LOOP).name, (left + right) / 2, Y_LOOP + 4.5, size=12.5, family=MONO, anchor="middle", weight=600)
    does = _text("read, update, evaluate, save", right + 12, Y_LOOP + 4, size=11.5, fill=FAINT)
    return f'<rect {corners} fill="#ffffff" stroke="{INK}" stroke-width="2"/>{name}{does}'


def _stops(route: Route) -> Iterable[str]:
    for x, stops, is_left in ((route.x, route.stops, route.labels_left), (route.back_x, route.back_stops, False)):
        for file, y in stops:
            circle = f'<circle cx="{x}" cy="{y}" r="5.5" fill="#ffffff" stroke="{route.colour}" stroke-width="2.5"/>'
            anchor, beside = ("end", x - 11) if is_left else ("start", x + 11)
            yield circle + _text(Path(file).name, beside, y + 4.5, size=12, family=MONO, anchor=anchor)


def _legend() -> Iterable[str]:
    """The letters, once above and once on each path."""
    for route, x in zip(ROUTES, (20.0, 108.0, 292.0, 468.0), strict=True):
        yield _badge(route, x + 9, 20) + _text(route.title, x + 25, 24.5, size=13)
        yield _badge(route, route.x, {"a": 122.0, "b": 524.0, "c": 524.0, "d": 250.0}[route.letter])
    yield '<line x1="20" y1="46" x2="50" y2="46" stroke="#57606a" stroke-width="3.5"/>'
    yield _text("calls go down", 58, 50.5, size=13)
    yield '<line x1="172" y1="46" x2="202" y2="46" stroke="#57606a" stroke-width="2" stroke-dasharray="6 4"/>'
    yield _text("data comes back", 210, 50.5, size=13)


def _badge(route: Route, x: float, y: float) -> str:
    circle = f'<circle cx="{x}" cy="{y}" r="9" fill="{route.colour}"/>'
    return circle + _text(route.letter, x, y + 4.5, size=13, fill="#ffffff", anchor="middle", weight=700)


def _text(
    words: str,
    x: float,
    y: float,
    *,
    size: float,
    fill: str = INK,
    family: str = SANS,
    anchor: str = "start",
    weight: int = 400,
) -> str:
    style = f'font-size="{size}" font-family="{family}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'
