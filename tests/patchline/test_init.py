"""`import patchline` loads nothing before it is used, and its names are those of the packages below it."""

import ast
import pydoc
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import webdataset

import patchline
from jobs.recipes.pretrain import digits_smoke
from pipeline.data.image_dataset import open_dataset
from pipeline.data.stream import train_batches
from pipeline.evaluation.predictor import load_model
from pipeline.models import ModelConfig, build_model
from shards.errors import UserError
from shards.order import SampleOrder
from tests.rigs.images import image_bytes

CHECKOUT = Path(__file__).resolve().parent.parent.parent


def python(program: str, *, cwd: Path = CHECKOUT) -> str:
    command = [sys.executable, "-c", f"import sys\nsys.path.append({str(CHECKOUT)!r})\n{program}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd)
    return done.stdout.strip()


def test_the_names_are_those_of_the_packages() -> None:
    assert patchline.train_batches is train_batches
    assert patchline.ModelConfig is ModelConfig
    assert patchline.build_model is build_model
    assert patchline.load_model is load_model
    assert patchline.open_dataset is open_dataset
    assert patchline.SampleOrder is SampleOrder
    assert patchline.__version__[0].isdecimal()
    assert patchline.recipes.pretrain.digits_smoke is digits_smoke
    assert not hasattr(patchline, "nothing")
    assert not hasattr(patchline.recipes, "nothing")


def test_the_names_are_those_that_a_type_checker_sees_and_help_describes() -> None:
    tree = ast.parse(Path(patchline.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = [alias.asname for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert dir(patchline) == sorted([*map(str, seen), "__version__"])
    assert [name for name in dir(patchline) if getattr(patchline, name) is None] == []
    described = re.findall(r"\w+", str(patchline.__doc__))
    assert [name for name in dir(patchline) if name not in {*described, "__version__"}] == []


@pytest.mark.parametrize("thing", [patchline, open_dataset, train_batches], ids=["patchline", "open", "train"])
def test_its_help_fits_a_screen(thing: object) -> None:
    lines = pydoc.plain(pydoc.render_doc(thing)).splitlines()
    assert 8 <= len(lines) <= 50
    assert [line for line in lines if len(line) > 124 and "(url: str" not in line] == []


def test_importing_loads_nothing_else_and_configurations_no_torch() -> None:
    said = python(
        "before = set(sys.modules)\n"
        "import patchline\n"
        "new = set(sys.modules) - before\n"
        "print(len(new), [name for name in new if name.partition('.')[0] in ('shards', 'pipeline', 'jobs')])\n"
        "from patchline import ModelConfig, SampleOrder, open_dataset\n"
        "print('torch' in sys.modules)\n"
    )
    assert int(said.split()[0]) < 60
    assert said.split("\n") == [f"{said.split()[0]} []", "False"]


def test_tars_of_others_are_trained_on_from_python_alone(tmp_path: Path) -> None:
    names = [("cat", "dog")[number % 2] for number in range(16)]
    with webdataset.TarWriter(str(tmp_path / "photos-000000.tar")) as tar:
        for number, name in enumerate(names):
            tar.write({"__key__": f"{number:04}", "png": image_bytes(number), "cls": name})
    with pytest.raises(UserError, match="patchline index"):
        patchline.open_dataset(str(tmp_path))
    patchline.index_tars(str(tmp_path))
    photos = patchline.open_dataset(str(tmp_path))
    assert (photos.classes, [photo.names[0] for photo in photos]) == (("cat", "dog"), names)
    batches = patchline.train_batches(
        str(tmp_path), global_batch=8, image_size=32, config=patchline.DataConfig(lanes=2)
    )
    found = [int(label) for batch in islice(batches, 2) for label in batch.labels[:, 0]]
    assert sorted(found) == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("theirs", "name", "before"),
    [
        ("pipeline/__init__.py", "ModelConfig", ""),
        ("shards.py", "train_batches", ""),  # which the first module of ours does not import itself
        ("jobs/__init__.py", "recipes", ""),
        ("pipeline.py", "open_dataset", "import pipeline, os; os.remove('pipeline.py')"),  # loaded, found no longer
    ],
)
def test_a_package_that_hides_one_of_ours_is_named(tmp_path: Path, theirs: str, name: str, before: str) -> None:
    file = tmp_path / theirs
    file.parent.mkdir(exist_ok=True)
    file.write_text("" if before else "raise RuntimeError('not ours')\n")
    package = theirs.partition("/")[0].removesuffix(".py")
    said = python(
        f"{before}\nimport patchline\ntry:\n    patchline.{name}\nexcept ImportError as e:\n    print(e)", cwd=tmp_path
    )
    found = file.parent if file.name == "__init__.py" else file
    assert said.startswith(
        f"the package {package!r} that Python finds is not Patchline's: it is {found}, "
        f"and Patchline's is {CHECKOUT / package}; rename the other one, or start Python where it is not found"
    )


def test_a_user_whose_jobs_are_no_package_of_ours_reads_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("raise RuntimeError('not ours')\n")
    assert python("import patchline\nprint(patchline.DataConfig().lanes)", cwd=tmp_path) == "64"
