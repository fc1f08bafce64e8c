"""House rules: imports go one way, one file a library, silent imports, nothing is unpickled."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.rigs.faults import every_fault
from tests.rigs.forks import PRELOADED

CHECKOUT = Path(__file__).resolve().parent.parent
ROOMS = ("shards", "pipeline", "jobs", "patchline")
SOURCES = sorted(path for room in ROOMS for path in (CHECKOUT / room).rglob("*.py"))
TOOLS = sorted(path for folder in ("benchmarks", "docs", "tests/rigs") for path in (CHECKOUT / folder).rglob("*.py"))

PYTHON = [*SOURCES, *(path for folder in ("benchmarks", "docs", "tests") for path in (CHECKOUT / folder).rglob("*.py"))]

# A room may import itself and the rooms below it.
MAY_IMPORT = {
    "shards": {"shards"},
    "pipeline": {"pipeline", "shards"},
    "jobs": {"jobs", "pipeline", "shards"},
    "patchline": {"patchline", "jobs", "pipeline", "shards"},  # the front door: lazily, and no other room imports it
}

# The floor plan. The places of a folder that has folders in it are its files and those folders, level by level from the
# top: what stands on one level imports only from the levels below it.
OPEN = "pipeline/training"  # its own files and folders are places of pipeline/: planning/ stands among them
ORDER = {
    "jobs": (
        "models monitor",
        "chains reports",
        "cli train",
        "completion example fitted submittable",
        "origin",
        "data resolve",
        "cluster",
        "record",
        "help planning",
        "arguments",
        "mistakes ranks recipes",
        "exit_codes",
        "environment flags output settings stages",
    ),
    "pipeline": (
        "training/run",
        "training/rewind",
        "training/loop",
        "training/scoring",
        "training/guard training/saving training/start",
        "training/step",
        "training/controls training/prepare",
        "machine runs training/summary",
        "training/reporting",
        "planning training/decisions",
        "training/fitting training/gradients",
        "training/teacher training/watchdog training/zero",
        "training/kernels",
        "inspection training/settings",
        "checkpoints evaluation",
        "data models",
        "ranks",
        "shared_settings",
    ),
    "pipeline/checkpoints": (
        "writer",
        "saves",
        "checkpoint",
        "shares",
        "commit rank_file_in stored",
        "attempts",
        "manifest writer_messages",
        "config rank_file_out",
    ),
    "pipeline/models": (
        "conversion",
        "weights",
        "build float8 fused_mlp recompute",
        "activations vit",
        "flops masked",
        "positions resnet",
        "layers",
        "attention bias_sums config loss patches residuals",
        "packed_attention",
    ),
    "shards": (
        "adoption card verifying",
        "packing part",
        "reading",
        "dataset",
        "what_is_there",
        "manifest_table",
        "index",
        "sample_rows",
        "manifest sources tables",
        "class_labels",
        "class_names images",
        "store",
        "files host_copy",
        "storage",
        "config parquet_pieces",
        "config_values order pages pool",
        "errors hashing orientation ulimits",
        "output",
    ),
}

# Folders of shards/ that a room above must not import. Stages of jobs/ run packing, adoption, verifying and the card.
PRIVATE = {
    "pipeline": {"adoption", "card", "packing", "parquet_pieces", "sources", "storage", "verifying"},
    "jobs": {"storage"},
    "patchline": {"adoption", "card", "images", "packing", "parquet_pieces", "sources", "storage", "verifying"},
}

# Where modules are imported by their names as text, of which the tests here see nothing: tables, for speed.
BY_NAME = (
    *("jobs/cli.py", "jobs/stages.py", "patchline/__init__.py"),
    "pipeline/models/__init__.py",
)

# Library -> where it may be imported: files or folders, relative to the checkout.
DOORS = {
    "boto3": ("shards/storage/s3_client.py",),
    "botocore": ("shards/storage/s3_client.py",),
    "webdataset": ("shards/",),
    "pyarrow": ("shards/",),
    "sklearn": ("shards/sources/digits.py",),
    "deepspeed": tuple(f"pipeline/training/zero/{name}.py" for name in ("engine", "sam", "stage_3", "state", "update")),
    "tensorboard": ("pipeline/training/reporting/board.py",),
    "torch.utils.tensorboard": ("pipeline/training/reporting/board.py",),
    "mlflow": ("pipeline/training/reporting/loggers.py",),
    "wandb": ("pipeline/training/reporting/loggers.py",),
    "torch": ("pipeline/",),
    "torchao": ("pipeline/models/float8.py",),
    "quack": ("pipeline/models/fused_mlp.py",),
    "cudnn": ("pipeline/models/packed_attention.py",),
    "simplejpeg": ("pipeline/data/", "shards/images/damage.py"),
    "cv2": ("pipeline/data/",),
}
# shards/reading/parallel.py passes it on to its processes.
ENVIRONMENT = ("pipeline/ranks/world.py", "jobs/cli.py", "patchline/__main__.py", "shards/reading/parallel.py")
# Rooms that decide by looks at a run's folder, and the files of these rooms that look at nothing but this machine, or
# only for what people read.
LOOKS_AT_RUNS = (
    *("pipeline/training/", "pipeline/checkpoints/", "jobs/chains/", "jobs/monitor/", "jobs/reports/"),
    "jobs/cluster/questions.py",
)
LOOKS_ELSEWHERE = (
    *("pipeline/training/saving/save.py", "pipeline/training/summary.py", "jobs/chains/status.py"),
    *("jobs/monitor/gpu_trial.py", "jobs/monitor/logs.py", "jobs/monitor/evidence.py", "jobs/reports/worth.py"),
    "jobs/reports/run_scores.py",  # scores whose age cannot be read are left out
    "jobs/reports/ls.py",  # a folder that cannot be looked at is listed as unreadable
    "pipeline/training/watchdog/heartbeat_files.py",  # a look that fails is silence, and must not wait
)
# Files that read only Patchline's own code and pages, or paths of the kernel that they are given.
READS_OWN_FILES = (
    *("jobs/cluster/batch_script.py", "jobs/example.py", "jobs/flags.py", "patchline/__init__.py"),
    *("pipeline/data/crop_decoder.py", "pipeline/training/prepare.py", "shards/pages/page.py"),
    *("pipeline/machine/checks.py", "pipeline/ranks/host.py", "pipeline/training/saving/save.py"),
    "pipeline/training/watchdog/last_resort.py",
)
KERNEL = re.compile(r"""Path\(f?['"]/(proc|sys)/""")  # files of the kernel
READ_MODE = re.compile(r"""['"]r?b?['"]""")
BANNED = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_NAMES = {"utils.py", "common.py", "helpers.py", "core.py", "base.py", "misc.py"}
LOCAL_TIMES = {"strptime", "mktime", "fromisoformat", "fromtimestamp", "utcnow"}
BANNED_CALLS = {"extractall", "eval", "exec", "system", "popen"} | {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")  # they unpickle
}
# What submits jobs and decides what runs next, and the process that writes a checkpoint: they have no time to import
# torch, and neither has what they import.
WITHOUT_TORCH = (
    *("jobs.chains.submit", "jobs.chains.advance", "jobs.monitor.status", "pipeline.models.weights.safetensors_head"),
    *("pipeline.checkpoints.writer.client", "pipeline.checkpoints.writer.process", "pipeline.checkpoints.stored"),
)
# Names of a module that change while a process runs: only what a fork or the end of the process must reach.
MODULE_STATE = {("shards/storage/fork_lock.py", "_LOCKS"), ("shards/pool.py", "_POOLS")}
MUTABLE = re.compile(
    r"\{\}|\[\]|(\w+\.)*(set|dict|list|deque|defaultdict|Counter|Lock|RLock|Event|local|Weak\w+)\(.*\)"
)


def relative(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


MODULES = {relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in SOURCES}
LEVEL = {
    folder: {name: number for number, names in enumerate(levels) for name in names.split()}
    for folder, levels in ORDER.items()
}


@dataclass(frozen=True, kw_only=True)
class Import:
    """`import a.b`, or `from a import b`, whose name may be a module or not."""

    line: int
    modules: tuple[str, ...]

    @property
    def ours(self) -> set[str]:
        """The modules of the rooms that it imports."""
        return MODULES.keys() & set(self.modules)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A Python file, which is parsed once for all rules."""

    name: str
    room: str
    text: str
    tree: ast.Module
    nodes: tuple[ast.AST, ...]
    imports: tuple[Import, ...]

    def at(self, line: int) -> str:
        """A place as editors and terminals open it."""
        return f"{self.name}:{line}"


@cache
def parsed(path: Path) -> Source:
    text = path.read_text()
    tree = ast.parse(text)
    nodes = tuple(ast.walk(tree))
    name = relative(path)
    return Source(
        name=name, room=name.partition("/")[0], text=text, tree=tree, nodes=nodes, imports=tuple(imports(nodes))
    )


@pytest.fixture(scope="module", autouse=True)
def _trees_of_this_file() -> Iterator[None]:
    """Frees all trees, more than 100 MB, after the last rule."""
    yield
    parsed.cache_clear()


def sources() -> Iterator[Source]:
    """Every file of the rooms."""
    return map(parsed, SOURCES)


def imports(nodes: tuple[ast.AST, ...]) -> Iterator[Import]:
    """Every import, those inside functions included."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield Import(line=node.lineno, modules=tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield Import(line=node.lineno, modules=(module, *(f"{module}.{alias.name}" for alias in node.names)))


def place(module: str, folder: str) -> str | None:
    """The place of the folder in which the module is: a file or a folder. None if it is elsewhere."""
    inside = f"{folder.replace('/', '.')}."
    if not module.startswith(inside):
        return None
    names = module.removeprefix(inside).split(".")
    if f"{folder}/{names[0]}" == OPEN:
        return "/".join(names[:2]) if len(names) > 1 else None
    return names[0]


@every_fault
def test_no_import_is_relative() -> Iterator[str]:
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{source.at(node.lineno)}: a relative import hides the room"


@every_fault
def test_imports_go_down() -> Iterator[str]:
    for source in sources():
        allowed = MAY_IMPORT[source.room]
        for one in source.imports:
            tops = {module.partition(".")[0] for module in one.modules} & {*ROOMS, "tests", "benchmarks", "slurm"}
            for top in sorted(tops - allowed):
                yield f"{source.at(one.line)}: imports {top}/; {source.room}/ may import {', '.join(sorted(allowed))}"


@every_fault
def test_the_order_of_a_folder_names_every_place() -> Iterator[str]:
    packages = {relative(path.parent) for path in SOURCES if path.name == "__init__.py"}
    for folder in sorted({package.rpartition("/")[0] for package in packages} - {"", OPEN} - ORDER.keys()):
        yield f"{folder}/ has folders in it, but no entry in ORDER"
    for folder, levels in ORDER.items():
        there = {place(module, folder) for module in MODULES} - {None}
        names = " ".join(levels).split()
        for name in sorted(map(str, there - set(names))):
            yield f"{folder}/{name} is not in ORDER: add it to its level"
        for name in sorted(set(names)):
            if name not in there:
                yield f"{folder}/{name} is in ORDER, but does not exist"
            if names.count(name) > 1:
                yield f"{folder}/{name} is in ORDER {names.count(name)} times"


@every_fault
def test_imports_go_down_the_floor_plan() -> Iterator[str]:
    for module, path in MODULES.items():
        for folder, level in LEVEL.items():
            own = place(module, folder)
            for one in parsed(path).imports if own else ():
                others = {place(other, folder) for other in one.ours} & level.keys() - {own}
                for other in sorted(map(str, others)):
                    if level[other] <= level.get(str(own), -1):
                        yield f"{parsed(path).at(one.line)}: imports {folder}/{other}, which ORDER has not below {own}"


@every_fault
def test_no_whole_room_is_imported() -> Iterator[str]:
    """`import shards` gives everything in it."""
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Import) and (rooms := {alias.name for alias in node.names} & set(ROOMS)):
                yield f"{source.at(node.lineno)}: imports the whole of {', '.join(sorted(rooms))}"


@every_fault
def test_nothing_is_imported_by_name() -> Iterator[str]:
    """No test finds what is imported by a name as text."""
    for source in sources():
        for node in source.nodes:
            name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
            if name.endswith(("import_module", "__import__")) and source.name not in BY_NAME:
                yield f"{source.at(getattr(node, 'lineno', 0))}: imports by name, with {name}"


@every_fault
def test_no_module_imports_itself_by_way_of_others() -> Iterator[str]:
    graph = {module: {other for one in parsed(path).imports for other in one.ours} for module, path in MODULES.items()}
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            cycle = error.args[1]  # each is imported by the next
            yield " imports ".join(reversed(cycle))
            graph[cycle[1]].remove(cycle[0])  # to find further cycles
        else:
            return


@every_fault
def test_private_sub_rooms_stay_private() -> Iterator[str]:
    for source in sources():
        private = PRIVATE.get(source.room, set())
        for one in source.imports:
            for name in sorted(private & {place(module, "shards") for module in one.ours}):
                yield f"{source.at(one.line)}: imports shards/{name}/, which is private to shards/"


@every_fault
def test_nothing_that_unpickles_is_imported() -> Iterator[str]:
    for source in sources():
        for one in source.imports:
            for name in sorted({module.partition(".")[0] for module in one.modules} & BANNED):
                yield f"{source.at(one.line)}: imports {name}; nothing is unpickled here"


@every_fault
def test_one_door_a_library() -> Iterator[str]:
    for source in sources():
        for one in source.imports:
            for library, doors in DOORS.items():
                is_imported = any(f"{module}.".startswith(f"{library}.") for module in one.modules)
                if is_imported and not source.name.startswith(doors):
                    yield f"{source.at(one.line)}: imports {library}, which only {', '.join(doors)} may import"


@every_fault
def test_only_the_doors_read_the_environment() -> Iterator[str]:
    for source in sources():
        for node in source.nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                is_environment = node.attr in ("environ", "getenv", "putenv")
                if is_environment and source.name not in ENVIRONMENT:
                    yield f"{source.at(node.lineno)}: reads the environment (os.{node.attr})"


@every_fault
def test_no_dangerous_call() -> Iterator[str]:
    for source in sources():
        for node in source.nodes:
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_model_switch = name == "eval" and isinstance(node.func, ast.Attribute)
            if name in LOCAL_TIMES:
                yield f"{source.at(node.lineno)}: calls {name}; an hour of local time may exist twice: keep Unix time"
            if name in BANNED_CALLS and not is_model_switch:
                yield f"{source.at(node.lineno)}: calls {name}"
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for argument, value in (("shell", True), ("allow_pickle", True), ("weights_only", False)):
                constant = given.get(argument)
                if isinstance(constant, ast.Constant) and constant.value is value:
                    yield f"{source.at(node.lineno)}: passes {argument}={value}"


@every_fault
def test_shared_storage_is_looked_at_by_honest_functions() -> Iterator[str]:
    """`Path.exists` ends a run if a look fails once; shards/files/looks.py looks again, or says that it cannot tell."""
    for source in sources():
        for node in source.nodes if source.name.startswith(LOOKS_AT_RUNS) else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.args:
                continue
            if (
                node.func.attr in ("exists", "is_file", "is_dir", "stat", "lstat")
                and source.name not in LOOKS_ELSEWHERE
            ):
                yield f"{source.at(node.lineno)}: calls {node.func.attr}; use shards/files/looks.py"


@every_fault
def test_files_are_read_within_bounds() -> Iterator[str]:
    """`Path.read_text` waits forever for a pipe in the file's place, and reads a file of any size."""
    for source in sources():
        constants = [node for node in source.tree.body if isinstance(node, ast.Assign)]
        of_kernel = [node for node in constants if KERNEL.search(ast.unparse(node.value))]
        names = {each.id for node in of_kernel for each in ast.walk(node) if isinstance(each, ast.Name)}
        for node in source.nodes if source.name not in READS_OWN_FILES else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            what = ast.unparse(node.func.value)
            is_read = node.func.attr in ("read_text", "read_bytes") or ast.unparse(node.func) == "json.load"
            mode = ast.unparse(node.args[0]) if node.args else ""
            is_read |= node.func.attr == "open" and READ_MODE.fullmatch(mode) is not None
            if is_read and what not in names and not KERNEL.search(what):
                yield f"{source.at(node.lineno)}: calls {node.func.attr}; use shards/files/local_files.py"


@every_fault
def test_files_are_named_for_what_they_do() -> Iterator[str]:
    for path in PYTHON:
        if path.name in BANNED_NAMES:
            yield f"{relative(path)}: name it for what it does"


@every_fault
def test_what_the_fork_server_loads_exists() -> Iterator[str]:
    """It passes over other names in silence, and every fork would load all by itself."""
    for name in PRELOADED:
        if find_spec(name) is None:
            yield f"{name} does not exist"


@every_fault
def test_a_class_name_exists_once() -> Iterator[str]:
    """So that a search for it finds one thing."""
    places: dict[str, list[str]] = {}
    for source in sources():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.at(node.lineno))
    for name, found in places.items():
        if len(found) > 1:
            yield f"{name} is defined in {', '.join(found)}"


@every_fault
def test_every_folder_of_python_is_a_package() -> Iterator[str]:
    """Or pytest could not tell two test files of one name apart; docs/ has scripts only."""
    for folder in sorted({path.parent for path in PYTHON} - {CHECKOUT / "docs"}):
        if not (folder / "__init__.py").exists():
            yield f"{relative(folder)}/ has no __init__.py"


@every_fault
def test_modules_have_no_state() -> Iterator[str]:
    for source in sources():
        for node in source.tree.body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not node.value:
                continue
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            if MUTABLE.fullmatch(ast.unparse(node.value)) and (source.name, name) not in MODULE_STATE:
                yield f"{source.at(node.lineno)}: {name} can change; a module has no state"


def written_by(program: str) -> list[str]:
    """The lines that a program in a fresh Python writes: nothing but faults, or the traceback that ends it."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    lines = (done.stdout + done.stderr).splitlines()
    return lines or [f"exit code {done.returncode}"] * (done.returncode != 0)


@every_fault
def test_importing_is_silent() -> Iterator[str]:
    """Importing every module prints nothing, writes nothing, and changes neither environment nor process group."""
    program = (
        "import importlib, os, sys\n"
        "import cv2  # sets LD_LIBRARY_PATH by itself\n"
        "before = dict(os.environ)\n"
        f"[importlib.import_module(name) for name in {list(MODULES)!r}]\n"
        "assert dict(os.environ) == before, 'the environment changed'\n"
        "assert 'deepspeed' not in sys.modules, 'deepspeed is imported before the device is known'\n"
    )
    yield from written_by(program)


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param([module for module in MODULES if module.partition(".")[0] == "shards"], id="shards"),
        pytest.param([*WITHOUT_TORCH], id="what describes a checkpoint, and what submits"),
    ],
)
@every_fault
def test_these_work_without_torch(modules: list[str]) -> Iterator[str]:
    for module in sorted(set(modules) - MODULES.keys()):
        yield f"{module} does not exist"
    program = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} imports torch')\n"
    )
    yield from written_by(program)


@every_fault
def test_parquet_files_are_read_without_threads() -> Iterator[str]:
    """Files of ours may be Python objects, which Arrow's threads must not hold when the interpreter ends."""
    for source in sources():
        if source.room != "shards":
            continue
        for node in source.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ("read_row_group", "read_row_groups", "iter_batches"):
                threads = [word.value for word in node.keywords if word.arg == "use_threads"]
                if [ast.unparse(value) for value in threads] != ["False"]:
                    yield f"{source.at(node.lineno)}: {node.func.attr} must be given use_threads=False"
