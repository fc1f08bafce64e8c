"""What looks like a secret, and what does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs.cluster.secret_names import has_password, is_secret, refuse_secret_lines, refuse_secret_words, withheld
from shards.errors import UserError

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


def test_what_jobs_do_not_inherit() -> None:
    environ = {"MY_PASS": "x", "PATH": "/bin", "https_proxy": "http://a:b@c", "A_FILE": "/x", "PWD": "/y"}
    assert withheld(environ) == ["MY_PASS", "https_proxy"]


@pytest.mark.parametrize(
    "line",
    [
        "export AWS_SECRET_ACCESS_KEY=abc",
        "module load cuda; HF_TOKEN='abc' other",
        'DB_PASS="x y"',
        "export A=1 WANDB_API_KEY=abc",
        "curl https://me:word@host/x",
        "export HF_TOKEN=$'abc'",
        'export HF_TOKEN=$"abc"',
        "export HF_TOKEN=${X:-abc}",
        'export HF_TOKEN="${HF_TOKEN-abc}"',
        "export HF_TOKEN=${X:='abc'}",
        "aws configure set aws_secret_access_key abc",
        "aws configure set --profile vit profile.vit.aws_secret_access_key 'abc'",
    ],
)
def test_lines_that_carry_a_secret_are_refused(line: str) -> None:
    with pytest.raises(UserError, match=r"setup .*would be written to scripts"):
        refuse_secret_lines(["module load x", line], what="setup")


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


def test_words_of_a_command() -> None:
    refuse_secret_words(["pretrain", "x", "--data.url=s3://bucket/x", "--run-dir", "/a:b@c"])
    with pytest.raises(UserError, match=r"--data.url=s3://\.\.\.@bucket/x has a password.*leave it out of the URL"):
        refuse_secret_words(["pretrain", "--data.url=s3://KEY:word@bucket/x"])
