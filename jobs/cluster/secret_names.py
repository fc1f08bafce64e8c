"""Keeps secrets out of Slurm, which stores a job's script and environment, and shows its arguments to everybody.

Secrets can have any name, so a job inherits only variables that are known to hold none: those that a shell, Python,
modules, CUDA and the training libraries need, variables with paths, and those named in `environment:` of the cluster's
settings. Even among these, a variable that looks like a secret is not passed on. A script or a command that contains a
secret is refused.
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping

from shards.errors import UserError
from shards.output.terminal import printable_name
from shards.output.url_secrets import has_secret, has_user, without_secrets

_PASSED_ON = re.compile(
    "|".join(
        (
            r"PATH|HOME|USER|LOGNAME|SHELL|PWD|OLDPWD|TERM|TZ|LANG|LANGUAGE|LC_\w+|TMP|TMPDIR|TEMP|BASH_ENV",
            r"XDG_(CACHE|CONFIG|DATA|STATE)_HOME|KRB5CCNAME",
            r"(https?|ftp|all|no)_proxy|(HTTPS?|FTP|ALL|NO)_PROXY|(SSL|REQUESTS|CURL)_(CERT|CA)_\w+",
            r"LD_\w+|\w*LIBRARY_PATH|\w*INCLUDE_PATH|CPATH|MANPATH|INFOPATH|PKG_CONFIG_PATH|CMAKE_\w+|ACLOCAL_PATH",
            r"CC|CXX|FC|C\w*FLAGS|LDFLAGS|MAX_JOBS|PERL5LIB",
            r"(PYTHON|VIRTUAL_ENV|CONDA|_CONDA|_CE_|MAMBA|PYENV)\w*",
            r"MODULE\w*|_*LMOD\w*|LOADEDMODULES|_LMFILES_\w*|_ModuleTable\w*|__MODULES\w*|FPATH",
            r"BASH_FUNC_(_?module\w*|_?ml\w*|switchml|scl|spack|_spack\w*|conda|mamba|which|\w*[lL]mod\w*)(%%|\(\))",
            r"EB(ROOT|VERSION|DEVEL)\w+|SPACK_\w+|(CRAY|PE)_\w+|CRAYPE\w*|SOFTWARE_ROOT",
            r"(CUDA|CUDNN|CUBLAS|NV|NVIDIA|NVTE|NVSHMEM|NCCL|RCCL|GLOO|UCX|UCC|FI|IB|OMPI|MPI|MPICH|I_MPI|HWLOC)_\w+",
            r"CUDA\w+|(ROCM|ROCR|HIP|HSA|MIOPEN|AMD|GPU)_\w+",
            r"(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB|ONEDNN|DNNL|ATEN|MALLOC|TCMALLOC)_\w+",
            r"(TORCH|PYTORCH|TORCHINDUCTOR|TRITON|TORCHDYNAMO|C10|DS|DEEPSPEED|XLA|TF)_\w+",
            r"(AWS|BOTO|HF|HUGGINGFACE|TRANSFORMERS|DIFFUSERS|WANDB|MLFLOW|TENSORBOARD|TFDS|WDS|PATCHLINE)_\w+",
            r"PATCHLINE|DO_NOT_TRACK|(APPTAINER|SINGULARITY)(ENV)?_\w+",
            r"(SLURM|SBATCH|SRUN|MUNGE)_\w+",
        )
    )
)
# Variables of a login, a terminal or a desktop. No job needs them, and the user is not told that they are withheld.
_OF_SESSION = re.compile(
    r"_|SHLVL|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|DISPLAY|WAYLAND_\w+|XAUTHORITY|XDG_\w+|DBUS_\w+|SSH_[A-Z_]+|SUDO_\w+|"
    r"LS_?COLORS|COLORTERM|CLICOLOR\w*|TERM_\w+|TERMCAP|LESS\w*|PAGER|EDITOR|VISUAL|MAIL|MAILCHECK|HIST\w+|PS[0-4]|"
    r"PROMPT\w*|WINDOW|WINDOWID|VTE_\w+|TMUX\w*|STY|COLUMNS|LINES|GPG_TTY|GNOME_\w+|DESKTOP_\w+|SESSION_MANAGER|"
    r"VSCODE_\w+|INVOCATION_ID|JOURNAL_STREAM|MEMORY_PRESSURE_\w+|SELINUX_\w+|which_declare|DEBUGINFOD_\w+|QT\w*_\w+|"
    r"GTK\w*|(SQUEUE|SINFO|SACCT|SCANCEL|SCONTROL)_\w+|DEBIAN_FRONTEND|MAKEFLAGS|MFLAGS|MAKELEVEL|CI|NVM_\w+|BASH_FUNC_\w+(%%|\(\))"
)
_INSIDE = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CONNECTION_?STRING|WEBHOOK|"
    r"SIGNATURE|SSHPASS|DBPASS"
)
_AS_A_WORD = re.compile(
    r"(?:^|_)(?:PASS|PWD|PW|PAT|AUTH|SAS|COOKIE|BEARER|CREDS?|JWT|DSN)(?:_|[0-9]*$)|(?:^|_)KEY_?[0-9]*$"
)
_PLAIN = ("PWD", "OLDPWD", "SSH_AUTH_SOCK")  # SSH_AUTH_SOCK is a path
# Matches the start of a literal value, such as abc, $'abc' or the abc in ${X:-abc}. A value that is read from a command
# or a file on the node does not match.
_VALUE = r"""(?:["']?[^\s"'$`;&|)]|\$["'][^"']|["']?\$\{\w+:?[-=+]["']?[^\s"'$`}])"""
_ASSIGNMENT = re.compile(rf"(?:^|[\s;&|(,=])([A-Za-z_]\w*)=(?={_VALUE})")
_CONFIGURE = re.compile(r"\bconfigure\s+set\s(.*)")  # aws configure set NAME VALUE
_NAME_AND_VALUE = re.compile(rf"([A-Za-z_]\w*)[\"']?\s+(?={_VALUE})")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks like a secret: by its name, or because its value is a URL with a password or a
    signature. A variable that names a file is not a secret (AWS_SHARED_CREDENTIALS_FILE)."""
    shouted = name.upper()
    if has_secret(value):
        return True
    if shouted in _PLAIN or shouted.endswith("_FILE"):
        return False
    return bool(_INSIDE.search(shouted) or _AS_A_WORD.search(shouted))


def is_passed_on(name: str, value: str, *, named: Collection[str] = ()) -> bool:
    """Whether jobs inherit a variable. `named` has the names in `environment:`, in which WORK_* stands for all names
    with that prefix. A variable whose value consists of existing paths is also passed on (SCRATCH), unless it belongs
    to the login session or looks like a secret."""
    if is_secret(name, value) or has_user(value):
        return False
    if _PASSED_ON.fullmatch(name) or name in named:
        return True
    if any(one.endswith("*") and name.startswith(one[:-1]) for one in named):
        return True
    if _OF_SESSION.fullmatch(name):
        return False
    return all(path.startswith("/") and os.path.exists(path) for path in value.split(":"))  # noqa: PTH110 - not a Path


def withheld(environ: Mapping[str, str], *, named: Collection[str] = ()) -> list[str]:
    """Returns the names of the variables that jobs do not inherit, sorted. Variables of the login session are left out,
    unless their names look like secrets."""
    found = [name for name, value in environ.items() if not is_passed_on(name, value, named=named)]
    return sorted(name for name in found if is_secret(name) or not _OF_SESSION.fullmatch(name))


def refuse_wrong_names(names: Iterable[str]) -> None:
    """Raises UserError for an entry of `environment:` that is not a variable's name, or looks like a secret."""
    for name in names:
        if not re.fullmatch(r"[A-Za-z_]\w*\*?", name, re.ASCII):
            shown = printable_name(name)
            raise UserError(
                f"environment has {shown!r}; allowed: names of variables, such as MY_DATA or MY_*; their values are "
                "those that they have where you submit"
            )
        if is_secret(name.removesuffix("*")):
            raise UserError(
                f"environment has {name}, which looks like a secret, and Slurm stores what jobs inherit; read it on "
                f"the node, by a line of `setup:` such as export {name.removesuffix('*')}=$(cat FILE)"
            )


def refuse_secret_lines(lines: Iterable[str], *, what: str) -> None:
    """Raises UserError for a line of shell that gives a literal value to a variable that looks like a secret, or that
    contains a URL with a password or a signature."""
    for line in lines:
        for name in _set_in(line):
            if is_secret(name):
                raise UserError(
                    f"{what} sets {name}, and would be written to scripts and shown by Slurm; keep keys of S3 in "
                    f"~/.aws/credentials (s3_profile), and read others on the node: {name}=$(cat FILE)"
                )
        if has_secret(line):
            raise UserError(
                f"{what} has a URL with a password or a signature, which would be written to scripts; leave it out"
            )


def _set_in(line: str) -> list[str]:
    """Returns the names to which a line of shell gives a literal value."""
    settings = _CONFIGURE.search(line)
    found = [*_ASSIGNMENT.finditer(line), *(_NAME_AND_VALUE.finditer(settings[1]) if settings else ())]
    return [match[1] for match in found]


def refuse_secret_words(words: Iterable[str]) -> None:
    """Raises UserError for an argument that is a URL with a password or a signature."""
    for word in words:
        if has_secret(word):
            raise UserError(
                f"{printable_name(without_secrets(word))} has a password or a signature, which Slurm would show to "
                "everybody; leave it out of the URL, and keep keys of S3 in ~/.aws/credentials (s3_profile in your "
                "cluster's settings)"
            )
