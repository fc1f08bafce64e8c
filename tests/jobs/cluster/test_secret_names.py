"""What looks like a secret, and what does not."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.cluster.secret_names import (
    is_passed_on,
    is_secret,
    refuse_secret_lines,
    refuse_secret_words,
    refuse_wrong_names,
    withheld,
)
from shards.errors import UserError
from shards.output.url_secrets import has_password

SECRETS = (
    *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "AWS_SESSION_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MY_PASS"),
    *("GITHUB_PAT", "PAT_2", "REGISTRY_AUTH", "GPG_PASSPHRASE", "DB_PWD", "BLOB_SAS", "mlflow_tracking_password"),
    *(
        "SESSION_COOKIE",
        "AUTH_BEARER",
        "APIKEY",
        "CREDENTIALS",
        "AZURE_STORAGE_KEY",
        "OPENAI_KEY",
        "WANDB_KEY",
        "KEY_2",
    ),
    "AZURE_STORAGE_CONNECTION_STRING",
    *("SSHPASS", "DBPASS", "ADMIN_PW", "SERVICE_CREDS", "JWT", "APP_JWT", "SLACK_WEBHOOK_URL", "SENTRY_DSN"),
)
PLAIN = (
    *("PATH", "PWD", "OLDPWD", "HOME", "AUTHOR", "COMPASS", "PATTERN", "PASSED_TESTS", "SASS_PATH", "LANG"),
    *("AWS_SHARED_CREDENTIALS_FILE", "AWS_PROFILE", "AWS_ENDPOINT_URL", "SLURM_CONF", "PATCHLINE_RETRIES", "BYPASS"),
    *("XAUTHORITY", "LD_LIBRARY_PATH", "KEYBOARD", "MONKEY", "KEY_BINDINGS", "SSH_KEY_FILE"),
)


@pytest.mark.parametrize("name", SECRETS)
def test_secrets(name: str) -> None:
    assert is_secret(name)
    assert is_secret(name.lower())


@pytest.mark.parametrize("name", PLAIN)
def test_plain_names(name: str) -> None:
    assert not is_secret(name)


@given(
    before=st.from_regex(r"([A-Z0-9]+_){0,3}", fullmatch=True),
    after=st.from_regex(r"(_[A-Z0-9]+){0,3}", fullmatch=True),
)
def test_a_secret_word_counts_wherever_it_stands(before: str, after: str) -> None:
    for word in ("PASS", "PAT", "AUTH", "SAS", "TOKEN", "PASSWORD"):
        assert is_secret(f"{before}{word}{after}") or after.endswith("_FILE")


@pytest.mark.parametrize(
    ("text", "has"),
    [
        ("http://me:word@proxy:3128", True),
        ("s3://KEY:SECRET@bucket/x", True),
        ("a postgres://:word@db and more", True),
        ("s3://KEY:SEC/RET+x@bucket/x", True),
        ("http://proxy:3128/a@b", False),
        ("https://user@host/path:with@colon", False),
        ("s3://bucket/a:b@c", False),
        ("", False),
    ],
)
def test_urls_with_passwords(text: str, has: bool) -> None:
    assert has_password(text) == has
    assert is_secret("http_proxy", text) == has


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "USER", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX"),
        *("MODULEPATH", "LOADEDMODULES", "LMOD_CMD", "__LMOD_REF_COUNT_PATH", "_ModuleTable001_", "EBROOTCUDA"),
        *("BASH_FUNC_module%%", "BASH_FUNC_ml%%", "BASH_ENV", "PYTHONPATH", "TMPDIR", "XDG_CACHE_HOME"),
        *("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR"),
        *("PYTORCH_ALLOC_CONF", "TRITON_CACHE_DIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "FI_PROVIDER", "UCX_TLS"),
        *("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SHARED_CREDENTIALS_FILE", "HF_HOME", "WANDB_MODE", "https_proxy"),
        *("PATCHLINE_RETRIES", "PATCHLINE", "SLURM_CONF", "SBATCH_ACCOUNT", "APPTAINER_BIND", "MLFLOW_TRACKING_URI"),
    ],
)
def test_what_jobs_inherit(name: str) -> None:
    assert is_passed_on(name, "x")
    assert not is_passed_on(name, "https://host/x?sig=of-mine")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SSHPASS", "word"),
        ("DBPASS", "word"),
        ("ADMIN_PW", "word"),
        ("SERVICE_CREDS", "word"),
        ("JWT", "word"),
        ("SLACK_WEBHOOK_URL", "https://hooks.example.org/services/of/mine"),
        ("SENTRY_DSN", "https://word@sentry.example.org/1"),
        ("ENTROPY", "a name that nobody knows"),
        ("INDEX", "/a word that begins with a slash"),
        ("AWS_SECRET_ACCESS_KEY", "word"),
        ("WANDB_API_KEY", "word"),
        ("WANDB_BASE_URL", "https://me:word@wandb.example.org"),
        ("HF_ENDPOINT", "https://word@hf.example.org"),
        ("AWS_ENDPOINT_URL", "https://s3.example.org/?X-Amz-Signature=word"),
        ("WORLD_SIZE", "8"),
    ],
)
def test_what_jobs_do_not_inherit(name: str, value: str) -> None:
    assert not is_passed_on(name, value)
    assert withheld({name: value, "PATH": "/bin"}) == [name]


def test_what_the_settings_name_is_inherited_unless_it_is_a_secret(tmp_path: Path) -> None:
    environ = {
        "MY_DATA": "x",
        "WORK_A": "y",
        "WORK_TOKEN": "z",
        "OTHER": "w",
        "LS_COLORS": "",
        "SCRATCH": str(tmp_path),
    }
    assert withheld(environ, named=["MY_DATA", "WORK_*"]) == ["OTHER", "WORK_TOKEN"]
    assert is_passed_on("SCRATCH", str(tmp_path)), "folders are no secrets"
    assert not is_passed_on("SCRATCH_CREDS", str(tmp_path))
    refuse_wrong_names(["MY_DATA", "MY_*"])
    for name, message in (("HF_TOKEN", "looks like a secret"), ("*", "names of variables"), ("A=b", "names of")):
        with pytest.raises(UserError, match=message):
            refuse_wrong_names([name])


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=$(cat ~/.token)",
        "export HF_TOKEN=`cat ~/.token`",
        'export HF_TOKEN="$(cat ~/.token)"',
        "export HF_TOKEN=$OTHER",
        "export HF_TOKEN=",
        "export HF_TOKEN=${OTHER}",
        "export HF_TOKEN=${OTHER:-$(cat ~/.token)}",
        "export HF_TOKEN=${OTHER:?set it first}",
        "export HF_TOKEN=${OTHER:-}",
        "aws configure set aws_secret_access_key $(cat ~/.key)",
        "aws configure set region eu-central-1",
        "unset HF_TOKEN WANDB_API_KEY",
        "unset HF_TOKEN",
        "export AWS_PROFILE=vit",
        "source /opt/env.sh",
    ],
)
def test_lines_that_read_a_secret_on_the_node_pass(line: str) -> None:
    refuse_secret_lines([line], what="setup")


def test_a_signature_is_not_echoed() -> None:
    with pytest.raises(UserError) as caught:
        refuse_secret_words(["evaluate", "https://h/x?X-Amz-Date=1&X-Amz-Signature=word"])
    assert "word" not in str(caught.value).replace("password", "")
