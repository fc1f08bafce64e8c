"""Describes the container in which the ranks of jobs run: pyxis (a plugin of srun that starts enroot's containers), or
Apptainer. Turns it into options of srun and a command, as pure functions.

pyxis: https://github.com/NVIDIA/pyxis; Apptainer: https://apptainer.org/docs/user/latest/bind_paths_and_mounts.html

Only ranks run in the container. The batch script, the gates of a chain and jobs of one process call Slurm's programs,
which an image does not have, so they run the `command` of the cluster's settings on the node itself.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal

from jobs.cluster.secret_names import refuse_secret_lines
from shards.config_values import refuse_wrong_values, shown_value
from shards.errors import UserError

# pyxis writes mounts into a shell script of enroot, and commas, colons and spaces separate them.
_PATH = re.compile(r"/[A-Za-z0-9_./@=%+-]*")
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9_./@=%+:#-]*")
_URL = re.compile(r"[a-z][a-z-]*://.+")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*(=[A-Za-z0-9_./@=%+:,-]+)?")
_PYXIS = re.compile(r"--(no-)?container-.*")
_OURS = ("container-image", "container-mounts", "container-workdir", "container-mount-home", "container-entrypoint")
_OURS_OF_APPTAINER = ("bind", "no-home", "nv", "pwd", "cwd", "home")
# Variables of the host's modules would make the image's Python look for packages outside it.
_WITHOUT_HOSTS_PYTHON = ("env", "-u", "PYTHONPATH", "-u", "PYTHONHOME")


@dataclass(frozen=True, kw_only=True)
class ContainerConfig:
    """The container in which the ranks of jobs run. Without an image, they run on the node itself."""

    image: str = ""
    """The image: a file on storage that the nodes share, or a name in a registry."""
    system: Literal["pyxis", "apptainer", "singularity"] = "pyxis"
    """What starts the container: pyxis, by options of srun; or the program apptainer or singularity on the nodes."""
    mounts: tuple[str, ...] = ()
    """Folders of the nodes that the container has: SOURCE or SOURCE:TARGET; :ro at the end makes one read-only.
    `scratch` is mounted by itself."""
    home: bool = False
    """Whether the container has the home folder, whose Python packages and caches then mix with those of the image."""
    command: tuple[str, ...] = ("patchline",)
    """The command that runs patchline in the container."""
    options: tuple[str, ...] = ()
    """More options of srun for the container (--container-...), or of `apptainer exec`, such as --rocm."""

    def __post_init__(self) -> None:
        refuse_wrong_values(self, where="container.")
        if not self.image:
            if self.mounts or self.home or self.options:
                raise UserError("container has settings, but no image; give container.image, or leave out the others")
            return
        self._refuse_wrong_image()
        for mount in self.mounts:
            if not all(map(_PATH.fullmatch, _parts(mount))):
                raise UserError(
                    f"container.mounts has {shown_value(mount)}; allowed: SOURCE, SOURCE:TARGET and :ro at the end, "
                    "both absolute paths of letters, digits and _./@=%+-, such as /shared or /data/jft:/data:ro"
                )
        for word in self.command:
            if not word or not word.isprintable():
                raise UserError(f"container.command has {shown_value(word)}; allowed: words of printable characters")
        if not self.command:
            raise UserError("container.command is empty; give the words that run patchline in the image")
        for option in self.options:
            self._refuse_wrong_option(option)
        refuse_secret_lines((self.image, *self.command, *self.options), what="container")

    def _refuse_wrong_image(self) -> None:
        is_path, is_file = self.image.startswith("/"), self.image.endswith((".sqsh", ".sif", ".squashfs"))
        is_name = not is_path and not is_file and (self.system == "pyxis") != bool(_URL.fullmatch(self.image))
        if not _IMAGE.fullmatch(self.image) or not (is_path or is_name):
            name = "REGISTRY#IMAGE:TAG, such as nvcr.io#nvidia/pytorch:25.01-py3"
            name = name if self.system == "pyxis" else "a URL, such as docker://registry.example.org/patchline:1"
            shown = shown_value(self.image)
            raise UserError(
                f"container.image is {shown}; allowed for {self.system}: the absolute path of a file, or {name}"
            )

    def _refuse_wrong_option(self, option: str) -> None:
        if not _OPTION.fullmatch(option) or (self.system == "pyxis" and not _PYXIS.fullmatch(option)):
            kind = "--container-NAME" if self.system == "pyxis" else "--NAME"
            raise UserError(
                f"container.options has {shown_value(option)}; allowed for {self.system}: {kind} or {kind}=VALUE, "
                "without spaces"
            )
        name = option.removeprefix("--").partition("=")[0]
        if name.removeprefix("no-") in _OURS or (self.system != "pyxis" and name in _OURS_OF_APPTAINER):
            raise UserError(
                f"container.options has {shown_value(option)}, which patchline sets itself, from `image`, `mounts` and "
                "`home`; leave it out"
            )

    @property
    def folders(self) -> list[tuple[str, str]]:
        """The source and the target of each mount."""
        return [(parts[0], parts[-1]) for parts in map(_parts, self.mounts)]


def _parts(mount: str) -> list[str]:
    """Returns the source and the target in a mount, or only the source if it names no target."""
    return mount.removesuffix(":ro").split(":", 1)


def words_in_container(
    container: ContainerConfig, *, workdir: str, scratch: str = "", has_gpus: bool = False
) -> tuple[list[str], list[str]]:
    """Returns the options of srun and the command of a rank that runs in the container. `workdir`: the folder that
    relative paths start from. `scratch`: the folder for temporary files. Pure."""
    whole = [mount if ":" in mount.removesuffix(":ro") else _with_target(mount) for mount in container.mounts]
    if scratch and not is_mounted(scratch, container):
        whole.append(_with_target(scratch))
    mounts, inside = ",".join(whole), [*_WITHOUT_HOSTS_PYTHON, *container.command]
    if container.system == "pyxis":
        options = [f"--container-image={container.image}"]
        options += [f"--container-mounts={mounts}"] if mounts else []
        options += [f"--container-workdir={workdir}"]
        options += ["--container-mount-home" if container.home else "--no-container-mount-home"]
        options += ["--no-container-entrypoint", *container.options]
        return options, inside
    words = [container.system, "exec"]
    words += ["--nv"] if has_gpus else []
    words += [] if container.home else ["--no-home"]
    words += ["--bind", mounts] if mounts else []
    words += ["--pwd", workdir, *container.options, container.image]
    return [], words + inside


def _with_target(mount: str) -> str:
    source, is_read_only = mount.removesuffix(":ro"), mount.endswith(":ro")
    return f"{source}:{source}" + (":ro" if is_read_only else "")


def is_mounted(path: str, container: ContainerConfig, *, home: str = "") -> bool:
    """Whether the container has a path of the node, under the same path. `home`: the home folder. Pure."""
    same = [source for source, target in container.folders if PurePosixPath(source) == PurePosixPath(target)]
    return any(PurePosixPath(path).is_relative_to(one) for one in same + ([home] if container.home and home else []))


def unmounted_in(words: Iterable[str], container: ContainerConfig, *, home: str) -> Iterator[str]:
    """Yields the absolute paths among the arguments of a command that the container does not have. Pure."""
    for word in words:
        value = word.partition("=")[2] if word.startswith("--") else word
        if value.startswith("/") and not is_mounted(value, container, home=home):
            yield value
