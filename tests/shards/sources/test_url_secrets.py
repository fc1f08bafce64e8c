"""Addresses with passwords and signatures are recognised and never shown."""

import pytest

from shards.sources.url_secrets import is_address, secret_reason, shown_address


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://bob:SESAME@host/a.jpg", "http://***@host/a.jpg"),
        ("HTTP://SESAME@host:80/a.jpg", "HTTP://***@host:80/a.jpg"),
        ("http://bob:SES AME@host", "http://***@host"),
        ("http://bob:SE@SAME@host/x", "http://***@host/x"),
        ("http://bob:SES/AME@host/x", "http://***"),
        ("s3://id:SESAME@bucket/key", "s3://***@bucket/key"),
        ("ftp://bob:SESAME@host/x", "ftp://***@host/x"),
        ("https://h/a.jpg?X-Amz-Credential=me&X-Amz-Signature=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg?w=1&x-goog-signature=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg?AWSAccessKeyId=me&Signature=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg?sv=1&sig=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg?Policy=x&Key-Pair-Id=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg?access_token=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg#token=SESAME", "https://h/a.jpg"),
        ("https://h/a.jpg;token=SESAME", "https://h/a.jpg"),
        ("https://h?api%5Fkey=SESAME", "https://h"),
        ("https://h/proxy?url=https%3A%2F%2Fb%2Fx%3FX-Amz-Signature%3DSESAME", "https://h/proxy"),
        ("below/a.jpg?sig=SESAME", "below/a.jpg"),
    ],
)
def test_secrets_are_known_and_not_shown(address: str, shown: str) -> None:
    reason = secret_reason(address)
    assert "or a public URL" in reason
    assert "SESAME" not in reason
    assert shown_address(address) == shown


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("https://h/a@b.jpg", "https://h/a@b.jpg"),
        ("https://h:8080/a b%20c.jpg?w=640&v=2&author=x", "https://h:8080/a b%20c.jpg"),
        ("http://[::1]:80/tokens/key=1/x.jpg", "http://[::1]:80/tokens/key=1/x.jpg"),
        ("http://h/a;b=c.jpg", "http://h/a;b=c.jpg"),
        ("s3://bucket/a:b@c/k", "s3://bucket/a:b@c/k"),
        ("sub/x.jpg", "sub/x.jpg"),
    ],
)
def test_addresses_without_are_left_alone(address: str, shown: str) -> None:
    assert secret_reason(address) == ""
    assert shown_address(address) == shown


@pytest.mark.parametrize(
    ("location", "found"), [("s3://a/b", True), ("FTP://x", True), ("a/http://", False), ("/a", False)]
)
def test_addresses_begin_with_a_scheme(location: str, *, found: bool) -> None:
    assert is_address(location) is found
