"""House rules: imports go one way, one file a library, short functions, silent imports, nothing is unpickled."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.rigs.faults import every_fault

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
    "patchline": {"jobs", "pipeline", "shards"},  # the front door: lazily, and nothing imports it
}

# Inside a room, a file or sub-room (a folder) imports only what stands in the layers before its own. Files of one layer
# may import each other too; sub-rooms of one layer stand side by side.
ORDER: dict[str, tuple[tuple[str, ...], ...]] = {
    "shards": (
        (
            *("errors", "config_values", "hashing", "key_purposes", "differences", "quantities", "terminal"),
            *("command_output", "command_lines", "orientation", "progress", "typed_json", "parallel", "pool"),
            *("read_config", "subset_config"),
        ),
        ("storage", "images"),
        ("store", "local_file"),
        (
            *("order", "mixing", "manifest", "index", "dataset", "samples", "windows", "read", "stream_reader"),
            *("sample_rows", "subset", "part", "single_labels"),
            *(
                "image_file",
                "record_columns",
                "checked_table",
                "parquet_pages",
                "parquet_file",
                "thrift_compact",
                "table_rules",
            ),
        ),
        ("sources",),
        ("packing",),
        ("adoption", "checking", "card"),
    ),
    "pipeline": (
        (
            *("config_values", "evaluation_transform", "bf16", "determinism", "free_port"),
            *("rank_environ", "rendezvous", "alone", "world", "collectives", "devices", "device_agreement"),
        ),
        ("data", "models"),
        ("evaluation",),
        ("inspection",),
        ("checkpoints",),
        ("training",),
    ),
    "jobs": (
        ("exit_codes", "stage", "tools", "stages", "dataset_jobs", "cluster_jobs", "model_jobs"),
        ("recipes",),
        ("yaml_tree", "fields", "field_names", "later_fields", "warmup", "record", "record_leaves"),
        (
            *("flags", "run_flags", "mistakes", "kept_sizes", "own_recipes", "resolve", "lookup", "origin"),
            "nearest_recipe",
        ),
        (  # the stages, and what several of them share
            *("pack", "index", "verify", "card", "pretrain", "finetune", "import_weights", "export_weights", "weights"),
            *(
                "evaluate",
                "fewshot",
                "predict",
                "inspect_model",
                "plan",
                "show",
                "diff",
                "demo",
                "launch",
                "placing",
                "screen",
                "interrupts",
            ),
            *("ls", "run_table", "doctor", "verify_resume", "killed_runs", "trial_verdict", "trial_report"),
            *(
                "report",
                "report_facts",
                "report_page",
                "report_plots",
                "report_curves",
                "report_worth",
                "report_scores",
            ),
            "confusion_plot",
            *(
                "compare",
                "compare_facts",
                "compare_lines",
                "compare_page",
                "compare_plots",
                "compare_scores",
                "model_card",
                "out_file",
            ),
            *("cluster", "batch_script", "slurm", "submit", "done_check", "plan_nodes", "plan_plot"),
            *(
                "queue_jobs",
                "queue_reasons",
                "array_findings",
                "status",
                "ask_run",
                "watch",
                "watch_view",
                "watch_chain",
            ),
            *("logs", "run_logs", "run_chain", "run_tries", "rank_lines", "log_signs"),
            *("run_evidence", "run_causes", "run_changes", "run_doctor", "run_end", "output_jobs"),
            *("submitted", "arrays", "chain", "chain_file", "chain_units", "chain_state", "chain_checks", "chain_jobs"),
            *("chain_changes", "chain_submit", "chain_status", "chain_sweep", "cancel", "processes"),
            *("sweep", "sweep_plan", "sweep_runs", "sweep_scores", "trials"),
            *("vtab", "vtab_rows", "vtab_seeds"),
            *(
                "preflight",
                "preflight_slurm",
                "preflight_nodes",
                "node_probe",
                "submit_checks",
                "partitions",
                "secret_names",
            ),
        ),
        ("cli", "endings", "help", "completion", "streams", "threads"),
    ),
}
SUB_ROOMS = {room: {path.parent.name for path in (CHECKOUT / room).glob("*/__init__.py")} for room in ROOMS}

# Sub-rooms of shards/ that a room above must not import: pipeline/ uses what shards/ offers at its top. The stages of
# jobs/ run packing, adoption, checking and the card, so only storage is private to them.
PRIVATE = {"pipeline": SUB_ROOMS["shards"], "jobs": {"storage"}, "patchline": SUB_ROOMS["shards"]}

# Where modules are imported by their names as text, of which the tests here see nothing: tables, for speed.
BY_NAME = (
    *("jobs/cli.py", "jobs/stages.py", "patchline/__init__.py"),
    *("pipeline/data/__init__.py", "pipeline/models/__init__.py"),
)

# Library -> where it may be imported: files or folders, relative to the checkout.
DOORS = {
    "boto3": ("shards/storage/s3_client.py",),
    "botocore": ("shards/storage/s3_client.py",),
    "webdataset": ("shards/",),
    "pyarrow": ("shards/",),
    "sklearn": ("shards/sources/digits.py",),
    "deepspeed": ("pipeline/training/engine.py", "pipeline/training/zero_state.py"),
    "tensorboard": ("pipeline/training/metrics.py",),
    "torch.utils.tensorboard": ("pipeline/training/metrics.py",),
    "mlflow": ("pipeline/training/mlflow_logger.py",),
    "wandb": ("pipeline/training/wandb_logger.py", "pipeline/training/wandb_files.py"),
    "tyro": ("jobs/cli.py",),
    "torch": ("pipeline/",),
    "simplejpeg": ("pipeline/data/",),
    "cv2": ("pipeline/data/",),
}
# shards/parallel.py passes it on to its processes.
ENVIRONMENT = ("pipeline/world.py", "jobs/cli.py", "patchline/__main__.py", "shards/parallel.py")
BANNED = {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BANNED_NAMES = {"utils.py", "common.py", "helpers.py", "core.py", "base.py", "misc.py"}
BANNED_CALLS = {"extractall", "eval", "exec", "system", "popen"} | {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")  # they unpickle
}
# What submits jobs and decides what runs next, and what describes a checkpoint for a process that has no time to import
# torch.
WITHOUT_TORCH = (
    *("jobs.submit", "jobs.chain", "jobs.status"),
    "pipeline.models.safetensors_head",
    *(
        f"pipeline.checkpoints.{name}"
        for name in (
            *(
                "assemble",
                "attempt_record",
                "attempts",
                "best",
                "config",
                "fence",
                "interval",
                "json_lines",
                "manifest",
            ),
            *("direct_file", "part_digests", "saved_job", "seal", "slots"),
            *("writer_process", "writer_messages", "writer", "save_work", "rank_report", "commit", "retention"),
            *("overtaken", "many_requests", "host_memory", "save_phase"),
        )
    ),
)
# Names of a module that change while a process runs: only what a fork or the end of the process must reach.
MODULE_STATE = {("shards/storage/fork_lock.py", "_LOCKS"), ("shards/pool.py", "_POOLS")}
MUTABLE = re.compile(
    r"\{\}|\[\]|(\w+\.)*(set|dict|list|deque|defaultdict|Counter|Lock|RLock|Event|local|Weak\w+)\(.*\)"
)
MOST_LINES = 300
MOST_FUNCTION_LINES = 40  # decorators and docstring included
LONG_FUNCTIONS: set[tuple[str, str]] = set()  # exceptions, each with its reason
LONG_FILES = {"shards/checking/s3_probe.py"}  # each probe of a store, read in the order in which they run


def relative(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


MODULES = {relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in SOURCES}
LAYER = {
    (room, name): number for room, layers in ORDER.items() for number, layer in enumerate(layers) for name in layer
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


def place(module: str) -> tuple[str, str]:
    """A module's room, and the file or sub-room of it that the module is or is in."""
    room, _, rest = module.partition(".")
    return room, rest.partition(".")[0]


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
def test_the_order_of_a_room_names_every_file_and_sub_room() -> Iterator[str]:
    for room, layers in ORDER.items():
        there = {path.stem for path in (CHECKOUT / room).glob("*.py")} - {"__init__"} | SUB_ROOMS[room]
        names = [name for layer in layers for name in layer]
        for name in sorted(there - set(names)):
            yield f"{room}/{name} is not in ORDER: add it to its layer"
        for name in sorted(set(names)):
            if name not in there:
                yield f"{room}/{name} is in ORDER, but does not exist"
            if names.count(name) > 1:
                yield f"{room}/{name} is in ORDER {names.count(name)} times"


@every_fault
def test_imports_follow_the_order_of_their_room() -> Iterator[str]:
    for module, path in MODULES.items():
        if (own := place(module)) not in LAYER:
            continue
        for one in parsed(path).imports:
            for other in sorted({place(other) for other in one.ours} & LAYER.keys() - {own}):
                is_below = LAYER[other] < LAYER[own]
                is_beside = LAYER[other] == LAYER[own] and not {own[1], other[1]} & SUB_ROOMS[own[0]]
                if other[0] == own[0] and not (is_below or is_beside):
                    yield f"{parsed(path).at(one.line)}: imports {'/'.join(other)}, which ORDER has not below {own[1]}"


@every_fault
def test_no_folder_imports_a_folder_inside_it() -> Iterator[str]:
    """`pipeline/models/conversion/` uses the models; they do not know it."""
    for source in sources():
        folder = source.name.rpartition("/")[0]
        if "/" not in folder:
            continue  # a room's own files, which ORDER has in layers with its folders
        inside = f"{folder.replace('/', '.')}."
        for one in source.imports:
            for module in sorted(one.ours):
                if module.startswith(inside) and "." in module.removeprefix(inside):
                    yield f"{source.at(one.line)}: imports {module}, from a folder inside its own"


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
def test_a_room_says_its_order_in_its_docstring() -> Iterator[str]:
    for room in ("shards", "pipeline"):
        layers = [[name for name in layer if name in SUB_ROOMS[room]] for layer in ORDER[room]]
        order = " < ".join(", ".join(layer) for layer in layers if layer)
        if order not in parsed(CHECKOUT / room / "__init__.py").text:
            yield f"{room}/__init__.py does not say: {order}"


@every_fault
def test_private_sub_rooms_stay_private() -> Iterator[str]:
    for source in sources():
        private = PRIVATE.get(source.room, set())
        for one in source.imports:
            names = {name for room, name in map(place, one.ours) if room == "shards"}
            for name in sorted(names & private):
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
            if name in BANNED_CALLS and not is_model_switch:
                yield f"{source.at(node.lineno)}: calls {name}"
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            for argument, value in (("shell", True), ("allow_pickle", True), ("weights_only", False)):
                constant = given.get(argument)
                if isinstance(constant, ast.Constant) and constant.value is value:
                    yield f"{source.at(node.lineno)}: passes {argument}={value}"


@every_fault
def test_files_are_named_for_what_they_do() -> Iterator[str]:
    for path in PYTHON:
        if path.name in BANNED_NAMES:
            yield f"{relative(path)}: name it for what it does"


@every_fault
def test_files_are_short() -> Iterator[str]:
    for source in sources():
        if (num_lines := len(source.text.splitlines())) > MOST_LINES and source.name not in LONG_FILES:
            yield f"{source.name}: has {num_lines} lines, allowed: {MOST_LINES}; is it two rooms?"


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


@every_fault
def test_functions_are_short() -> Iterator[str]:
    for source in map(parsed, (*SOURCES, *TOOLS)):
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min(line.lineno for line in [node, *node.decorator_list])
                num_lines = (node.end_lineno or first) + 1 - first
                is_named = (source.name, node.name) in LONG_FUNCTIONS
                if is_named != (num_lines > MOST_FUNCTION_LINES):
                    more = "; take it out of LONG_FUNCTIONS" * is_named
                    yield f"{source.at(first)}: {node.name} has {num_lines} lines, allowed: {MOST_FUNCTION_LINES}{more}"


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
        pytest.param([module for module in MODULES if place(module)[0] == "shards"], id="shards"),
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
