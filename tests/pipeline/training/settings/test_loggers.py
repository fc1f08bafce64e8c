"""Which settings of loggers are refused, and that no password passes."""

import pytest

from pipeline.training.settings.loggers import LoggersConfig, without_password
from shards.errors import UserError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            {"mlflow_uri": "https://me:secret@host:5000"},
            "loggers.mlflow_uri has a user or password in it, which would be written to RUN/job.yaml; give them as "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment",
            id="a password",
        ),
        pytest.param(
            {"mlflow_uri": "http://[::1"},
            "loggers.mlflow_uri is no URI (Invalid IPv6 URL); allowed: such as http://host:5000",
            id="no URI",
        ),
        pytest.param(
            {"project": ""},
            "loggers.project is ''; allowed: a name of 1 to 128 printable characters",
            id="no project",
        ),
        pytest.param(
            {"project": "a\nb"},
            "loggers.project is 'a\\nb'; allowed: a name of 1 to 128 printable characters",
            id="two lines",
        ),
        pytest.param(
            {"project": "team/vit", "wandb": True},
            "loggers.project is 'team/vit'; allowed: a name of 1 to 128 printable characters and without any of "
            "/\\#?%:",
            id="W&B allows no slash",
        ),
    ],
)
def test_refused(fields: dict[str, str | bool], message: str) -> None:
    with pytest.raises(UserError) as caught:
        LoggersConfig(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_allowed() -> None:
    LoggersConfig(mlflow=True, mlflow_uri="databricks", project="/Users/me/vit")
    LoggersConfig(mlflow_uri="https://host/path@2?x=1", wandb=True, project="ViT runs")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot reach https://me:secret@host:5000/api", "cannot reach https://***@host:5000/api"),
        ("http://token@a and http://b@c", "http://***@a and http://***@c"),
        ("http://host/a@b, mail me@host", "http://host/a@b, mail me@host"),
    ],
)
def test_messages_have_no_password(text: str, shown: str) -> None:
    assert without_password(text) == shown
