"""House rules: imports go one way, one file a library, short functions, silent imports, nothing is unpickled."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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

# Source -> its tests, if they are not in the same place: a table of recipes, or a configuration or a few names with
# their reader.
TESTED_ELSEWHERE = {
    **{
        f"jobs/recipes/{name}.py": "jobs/recipes/test_frozen.py"
        for name in ("pretrain", "finetune", "evaluate", "plan")
    },
    "jobs/recipes/verify_resume.py": "jobs/test_verify_resume.py",
    "jobs/stage.py": "jobs/test_stages.py",
    "jobs/tools.py": "jobs/test_stages.py",
    "jobs/submit.py": "slurm/test_submit.py",
    "jobs/submitted.py": "slurm/test_submit.py",
    **{f"jobs/{name}.py": "slurm/test_chain.py" for name in ("chain_checks", "chain_jobs")},
    "pipeline/config_values.py": "jobs/test_every_config.py",
    **{f"jobs/report_{name}.py": "jobs/test_report.py" for name in ("facts", "page")},
    "jobs/compare_page.py": "jobs/test_compare.py",
    "jobs/vtab_rows.py": "jobs/test_vtab.py",
    "shards/images/config.py": "shards/images/test_resize.py",
    "shards/packing/config.py": "shards/packing/test_spec.py",
    "pipeline/evaluation/config.py": "pipeline/evaluation/test_scores.py",
    "pipeline/checkpoints/attempt_record.py": "pipeline/checkpoints/test_manifest.py",
    "pipeline/checkpoints/config.py": "pipeline/checkpoints/test_checkpoint.py",
    "pipeline/checkpoints/fragment.py": "pipeline/checkpoints/test_fragments.py",
    "pipeline/checkpoints/gone.py": "pipeline/checkpoints/test_overtaken.py",
    "pipeline/checkpoints/save_work.py": "pipeline/checkpoints/test_inline_writer.py",
    "pipeline/checkpoints/slots.py": "pipeline/checkpoints/test_manifest.py",
}


def relative(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


MODULES = {relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in SOURCES}
LAYER = {
    (room, name): number for room, layers in ORDER.items() for number, layer in enumerate(layers) for name in layer
}


def place(module: str) -> tuple[str, str]:
    """A module's room, and the file or sub-room of it that the module is or is in."""
    room, _, rest = module.partition(".")
    return room, rest.partition(".")[0]


def ours(path: Path) -> set[str]:
    """The modules of the rooms that a file imports."""
    return MODULES.keys() & set(imports(path))


def imports(path: Path) -> Iterator[str]:
    """Every imported module, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}: relative imports hide the room"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_go_down(path: Path) -> None:
    room = path.relative_to(CHECKOUT).parts[0]
    for module in imports(path):
        top = module.split(".")[0]
        if top in ROOMS or top in ("tests", "benchmarks", "slurm"):
            assert top in MAY_IMPORT[room], f"{relative(path)} imports {module}: {room} may import {MAY_IMPORT[room]}"


def test_the_order_of_a_room_names_every_file_and_sub_room() -> None:
    for room, layers in ORDER.items():
        files = {path.stem for path in (CHECKOUT / room).glob("*.py")} - {"__init__"}
        names = sorted(name for layer in layers for name in layer)
        assert names == sorted(files | SUB_ROOMS[room]), f"ORDER must name each file of {room}/: add it to its layer"


@pytest.mark.parametrize("module", [one for one in MODULES if place(one)[0] in ORDER and place(one)[1]])
def test_imports_follow_the_order_of_their_room(module: str) -> None:
    room, name = place(module)
    for other in ours(MODULES[module]):
        other_room, other_name = place(other)
        if other_room != room or other_name in ("", name):
            continue
        is_below = LAYER[room, other_name] < LAYER[room, name]
        is_beside = LAYER[room, other_name] == LAYER[room, name] and not {name, other_name} & SUB_ROOMS[room]
        assert is_below or is_beside, f"{module} imports {other}, but ORDER of {room}/ has it not below {name}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_folder_imports_a_folder_inside_it(path: Path) -> None:
    """`pipeline/models/conversion/` uses the models; they do not know it."""
    inside = f"{relative(path.parent).replace('/', '.')}."
    deeper = [module for module in ours(path) if module.startswith(inside) and "." in module.removeprefix(inside)]
    assert len(path.relative_to(CHECKOUT).parts) < 3 or deeper == [], "this folder stands above"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_imports_name_what_they_use(path: Path) -> None:
    """`import shards` gives everything in it, and a name as text is found by no test."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not set(ROOMS) & {alias.name for alias in node.names}, f"line {node.lineno} imports a whole room"
        is_by_name = isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).endswith(
            ("import_module", "__import__")
        )
        assert not is_by_name or relative(path) in BY_NAME, f"line {getattr(node, 'lineno', 0)} imports by name"


def test_no_module_imports_itself_by_way_of_others() -> None:
    TopologicalSorter({module: ours(path) for module, path in MODULES.items()}).prepare()


@pytest.mark.parametrize("room", ["shards", "pipeline"])
def test_a_room_says_its_order_in_its_docstring(room: str) -> None:
    layers = [[name for name in layer if name in SUB_ROOMS[room]] for layer in ORDER[room]]
    order = " < ".join(", ".join(layer) for layer in layers if layer)
    assert order in (CHECKOUT / room / "__init__.py").read_text()


def test_private_sub_rooms_stay_private() -> None:
    found = {
        relative(path)
        for path in SOURCES
        for module in ours(path)
        if place(module)[0] == "shards" and place(module)[1] in PRIVATE.get(path.relative_to(CHECKOUT).parts[0], ())
    }
    assert found == set(), f"PRIVATE sub-rooms of shards/: {PRIVATE}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_one_door_a_library(path: Path) -> None:
    for module in imports(path):
        assert module.split(".")[0] not in BANNED, f"{relative(path)} imports {module}: nothing is unpickled here"
        for library, doors in DOORS.items():
            if module == library or module.startswith(library + "."):
                assert relative(path).startswith(doors), f"{relative(path)} imports {module}; its door is {doors}"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_only_the_doors_read_the_environment(path: Path) -> None:
    if relative(path) in ENVIRONMENT:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            where = f"{relative(path)}:{node.lineno}"
            assert node.attr not in ("environ", "getenv", "putenv"), f"{where} reads the environment"


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_no_dangerous_call(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_model_switch = name == "eval" and isinstance(node.func, ast.Attribute)
        assert name not in BANNED_CALLS or is_model_switch, f"{relative(path)}:{node.lineno} calls {name}"
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        for argument, value in (("shell", True), ("allow_pickle", True), ("weights_only", False)):
            constant = given.get(argument)
            is_bad = isinstance(constant, ast.Constant) and constant.value is value
            assert not is_bad, f"{relative(path)}:{node.lineno} passes {argument}={value}"


def test_files_are_named_for_what_they_do_and_short() -> None:
    for path in PYTHON:
        assert path.name not in BANNED_NAMES, relative(path)
    for path in SOURCES:
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= MOST_LINES, f"{relative(path)} has {num_lines} lines; is it two rooms?"


def test_every_folder_of_python_is_a_package() -> None:
    """Or pytest could not tell two test files of one name apart; docs/ has scripts only."""
    folders = {path.parent for path in PYTHON} - {CHECKOUT / "docs"}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").exists()] == []


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_modules_have_no_state(path: Path) -> None:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and MUTABLE.fullmatch(ast.unparse(node.value)):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
            assert (relative(path), name) in MODULE_STATE, f"{relative(path)}:{node.lineno} {name} changes"


@pytest.mark.parametrize("path", [*SOURCES, *TOOLS], ids=relative)
def test_functions_are_short(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(line.lineno for line in [node, *node.decorator_list])
            num_lines = (node.end_lineno or first) + 1 - first
            is_long = num_lines > MOST_FUNCTION_LINES
            named = (relative(path), node.name) in LONG_FUNCTIONS
            assert is_long == named, f"line {first}: {node.name} has {num_lines} lines, allowed: {MOST_FUNCTION_LINES}"


def test_importing_is_silent() -> None:
    """Importing every module prints nothing, writes nothing, and changes neither environment nor process group."""
    program = (
        "import importlib, os, sys\n"
        "import cv2  # sets LD_LIBRARY_PATH by itself\n"
        "before = dict(os.environ)\n"
        f"[importlib.import_module(name) for name in {list(MODULES)!r}]\n"
        "assert dict(os.environ) == before, 'the environment changed'\n"
        "assert 'deepspeed' not in sys.modules, 'deepspeed is imported before the device is known'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=CHECKOUT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param([module for module in MODULES if place(module)[0] == "shards"], id="shards"),
        pytest.param([*WITHOUT_TORCH], id="what describes a checkpoint, and what submits"),
    ],
)
def test_these_work_without_torch(modules: list[str]) -> None:
    assert set(modules) <= MODULES.keys()
    program = (
        f"import importlib, sys\n[importlib.import_module(n) for n in {modules!r}]\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=CHECKOUT)


def test_every_source_file_has_a_test_file_in_the_same_place() -> None:
    missing = set()
    for path in SOURCES:
        test = f"{relative(path.parent)}/test_{path.name}"
        if path.name != "__init__.py" and not (CHECKOUT / "tests" / test).exists():
            missing.add(relative(path))
    assert missing == TESTED_ELSEWHERE.keys()
    assert [test for test in TESTED_ELSEWHERE.values() if not (CHECKOUT / "tests" / test).exists()] == []


@pytest.mark.parametrize("path", [path for path in SOURCES if relative(path).startswith("shards/")], ids=relative)
def test_parquet_files_are_read_without_threads(path: Path) -> None:
    """Files of ours may be Python objects, which Arrow's threads must not hold when the interpreter ends."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("read_row_group", "read_row_groups", "iter_batches"):
            threads = [word.value for word in node.keywords if word.arg == "use_threads"]
            assert [ast.unparse(value) for value in threads] == ["False"], f"line {node.lineno}"
