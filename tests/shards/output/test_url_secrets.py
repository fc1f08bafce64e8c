"""What of a URL is shown, and which are refused."""

import pytest

from shards.output.terminal import message_text
from shards.output.url_secrets import has_secret, without_secrets


@pytest.mark.parametrize(
    ("text", "shown", "is_secret"),
    [
        ("https://h/x?a=1&X-Amz-Signature=ab%2F", "https://h/x?a=***&X-Amz-Signature=***", True),
        ("'https://h/x?sig=ab'; allowed: y", "'https://h/x?sig=***'; allowed: y", True),
        ("https://h/x?sig=ab; allowed: y", "https://h/x?sig=***; allowed: y", True),
        ("s3://bucket/a?b=c.tar and https://h/?q=1", "s3://bucket/a?b=c.tar and https://h/?q=***", False),
        ("s3://bucket/a?token=ab", "s3://bucket/a?token=***", True),
        ("https://h/x#access_token=ab", "https://h/x#access_token=***", True),
        ("https://h/page.html#section", "https://h/page.html#section", False),
        ("s3://KEY:SEC/RET@bucket/x", "s3://***@bucket/x", True),
        ("https://user@h:80/x", "https://***@h:80/x", False),
        ("'https:/h/x?token=ab'", "'https:/h/x?token=***'", False),
        ("http://h:80/a@b", "http://h:80/a@b", False),
        ("'http://me:hi@den@host/x' and s3://key@bucket", "'http://***@host/x' and s3://***@bucket", True),
        ("nobody@home", "nobody@home", False),
        ("a ? b=c, no URL", "a ? b=c, no URL", False),
        ("s3://bucket/train-??.tar", "s3://bucket/train-??.tar", False),
    ],
)
def test_urls(text: str, shown: str, is_secret: bool) -> None:
    assert (without_secrets(text), has_secret(text)) == (shown, is_secret)
    assert message_text(f"error: {text}") == f"error: {shown}"


def test_a_long_text_takes_no_time() -> None:
    assert without_secrets("a" * 1_000_000 + "://") == "a" * 1_000_000 + "://"
