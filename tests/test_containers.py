"""The two container definitions have the same steps, and install what the project needs."""

import re
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
DOCKERFILE = (CHECKOUT / "containers" / "Dockerfile").read_text()
DEFINITION = (CHECKOUT / "containers" / "patchline.def").read_text()
PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
SOURCE = "/opt/patchline/source"
DEBIANS_PYTHON = {"bookworm": "3.11"}


def one(pattern: str, text: str) -> str:
    (found,) = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    return str(found)


def joined(text: str) -> str:
    """Without comments, and with continued lines in one."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ")


def docker_copies() -> list[str]:
    """The files and folders that are copied into SOURCE."""
    return [name for line in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]


def docker_steps() -> list[str]:
    """The commands of each RUN but the last, which makes the user: Apptainer runs as whoever starts it."""
    runs = re.findall(r"^RUN (.+)$", joined(DOCKERFILE), re.MULTILINE)[:-1]
    steps = [step for run in runs for step in run.split(" && ")]
    return [re.sub(r"\$\{(\w+)\}", r"{{ \1 }}", " ".join(step.split())) for step in steps]


def test_both_have_the_same_base_arguments_files_and_steps() -> None:
    assert one(r"^FROM (\S+)$", DOCKERFILE) == one(r"^From: (\S+)$", DEFINITION)
    arguments = re.findall(r"^ARG (\w+=\S+)$", DOCKERFILE, re.MULTILINE)
    assert arguments == one(r"^%arguments\n(.*?)\n\n", DEFINITION).split()
    copied = docker_copies()
    files = [line.split() for line in one(r"^%files\n(.*?)\n\n", DEFINITION).splitlines()]
    assert files == [[name, f"{SOURCE}/{name}"] for name in copied]
    assert f"WORKDIR {SOURCE}\n" in DOCKERFILE
    post = [" ".join(line.split()) for line in joined(one(r"^%post\n(.*?)\n\n", DEFINITION)).splitlines()]
    assert [line for line in post if line not in ("set -eu", f"cd {SOURCE}")] == docker_steps()


def test_they_have_what_the_wheel_is_built_from() -> None:
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    hook = "hatch_build.py"
    needed = {
        "pyproject.toml",
        "constraints.txt",
        hook,
        PROJECT["project"]["readme"],
        *PROJECT["project"]["license-files"],
    }
    needed |= {*wheel["packages"], *(path.partition("/")[0] for path in wheel["force-include"])}
    assert {*docker_copies()} == needed


def test_torch_python_and_packages_are_those_that_are_tested() -> None:
    makefile, ci = (CHECKOUT / "Makefile").read_text(), (CHECKOUT / ".ci" / "run").read_text()
    torch = one(r"^TORCH \?= (\S+)$", makefile)
    assert f"ARG TORCH={torch}\n" in DOCKERFILE
    assert f"{torch}\n" in (CHECKOUT / "constraints.txt").read_text()
    python = DEBIANS_PYTHON[one(r"^FROM debian:(\w+)-slim$", DOCKERFILE)]
    assert f"Programming Language :: Python :: {python}" in PROJECT["project"]["classifiers"]
    extras = one(r"^ARG EXTRAS=(\S+)$", DOCKERFILE).split(",")
    assert [name for name in extras if name not in PROJECT["project"]["optional-dependencies"]] == []
    packages = one(r"--no-install-recommends (.+?) &&", " ".join(DOCKERFILE.replace("\\\n", " ").split())).split()
    assert packages == sorted(packages)
    assert {"g++", "libjpeg62-turbo-dev"} <= {*packages} & {*re.findall(r"[\w+.-]+", ci)}


def test_nothing_runs_as_root_and_no_secret_is_an_argument() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)[-1] == "1000:1000"
    names = re.findall(r"^(?:ARG|ENV) (\w+)|(?<= )(\w+)=", DOCKERFILE, re.MULTILINE)
    assert [name for pair in names for name in pair if re.search("KEY|TOKEN|SECRET|PASSWORD", name)] == []
