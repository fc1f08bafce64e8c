"""What looks like a secret, and must not reach Slurm: it stores the environment that a job inherits and its script, and
shows a command's arguments to everybody."""

import re
from collections.abc import Iterable, Mapping

from shards.errors import UserError
from shards.output.terminal import printable_name

_INSIDE = re.compile(
    r"SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CONNECTION_?STRING"
)
_AS_A_WORD = re.compile(r"(?:^|_)(?:PASS|PWD|PAT|AUTH|SAS|COOKIE|BEARER)(?:_|[0-9]*$)|(?:^|_)KEY_?[0-9]*$")
_PLAIN = ("PWD", "OLDPWD")
_PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:(?![0-9]{1,5}(?:/|$))[^\s@]+@")  # no port
# A value that is written there, such as abc, $'abc' or the abc of ${X:-abc}: not one that a command or a file gives on
# the node.
_VALUE = r"""(?:["']?[^\s"'$`;&|)]|\$["'][^"']|["']?\$\{\w+:?[-=+]["']?[^\s"'$`}])"""
_ASSIGNMENT = re.compile(rf"(?:^|[\s;&|(,=])([A-Za-z_]\w*)=(?={_VALUE})")
_CONFIGURE = re.compile(r"\bconfigure\s+set\s(.*)")  # aws configure set NAME VALUE
_NAME_AND_VALUE = re.compile(rf"([A-Za-z_]\w*)[\"']?\s+(?={_VALUE})")


def is_secret(name: str, value: str = "") -> bool:
    """Whether a variable looks like a secret: by its name, or because its value is a URL with a password. The name of a
    file is none (AWS_SHARED_CREDENTIALS_FILE)."""
    shouted = name.upper()
    if has_password(value):
        return True
    if shouted in _PLAIN or shouted.endswith("_FILE"):
        return False
    return bool(_INSIDE.search(shouted) or _AS_A_WORD.search(shouted))


def has_password(text: str) -> bool:
    """Whether there is a URL such as https://user:password@host in it."""
    return bool(_PASSWORD_IN_URL.search(text))


def withheld(environ: Mapping[str, str]) -> list[str]:
    """The variables that jobs do not inherit, sorted."""
    return sorted(name for name, value in environ.items() if is_secret(name, value))


def refuse_secret_lines(lines: Iterable[str], *, what: str) -> None:
    """UserError for a line of shell that sets a variable that looks like a secret to a value that is written there."""
    for line in lines:
        for name in _set_in(line):
            if is_secret(name):
                raise UserError(
                    f"{what} sets {name}, and would be written to scripts and shown by Slurm; keep keys of S3 in "
                    f"~/.aws/credentials (s3_profile), and read others on the node: {name}=$(cat FILE)"
                )
        if has_password(line):
            raise UserError(f"{what} has a URL with a password, which would be written to scripts; leave it out")


def _set_in(line: str) -> list[str]:
    """The names that a line of shell sets to a value that is written there."""
    settings = _CONFIGURE.search(line)
    found = [*_ASSIGNMENT.finditer(line), *(_NAME_AND_VALUE.finditer(settings[1]) if settings else ())]
    return [match[1] for match in found]


def refuse_secret_words(words: Iterable[str]) -> None:
    """UserError for a word of a command with a password in a URL."""
    for word in words:
        if has_password(word):
            shown = printable_name(_PASSWORD_IN_URL.sub("://...@", word))
            raise UserError(
                f"{shown} has a password, which Slurm would show to everybody; leave it out of the URL, and keep keys "
                "of S3 in ~/.aws/credentials (s3_profile in your cluster's settings)"
            )
