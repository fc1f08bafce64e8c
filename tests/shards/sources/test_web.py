"""Fetching from servers that answer well, badly, late or with too much data; addresses with secrets are not shown."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler

import pytest

from shards.errors import ImageRefusedError
from shards.sources.web import fetch_url, is_address, is_web, secret_reason, shown_address
from tests.rigs.web import WebServer, web_server


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr("shards.sources.web.BACKOFF_SECONDS", 0.001)
    with web_server() as served:
        yield served


def test_a_body_comes_whole_and_odd_characters_are_quoted(web: WebServer) -> None:
    body = bytes(range(256)) * 1000
    web.serve("/a%20%E7%8C%AB%25.jpg?x=1", body)
    assert fetch_url(f"{web.url}/a 猫%25.jpg?x=1", max_bytes=1 << 20) == body


@pytest.mark.parametrize(
    ("status", "times"),
    [
        (404, 1),  # retrying would not help
        (403, 1),
        (503, 3),
        (429, 3),
    ],
)
def test_what_the_server_answers_is_the_reason(web: WebServer, status: int, times: int) -> None:
    result = fetch_url(web.serve("/x", b"no", status=status), max_bytes=100)
    assert isinstance(result, OSError)
    assert f"the server answers {status}" in str(result)
    assert web.asked["/x"] == times


def test_a_fault_that_passes_is_survived(web: WebServer) -> None:
    web.serve("/bad", b"", status=500)
    web.serve("/short", b"half", headers={"Content-Length": "8"})
    web.serve("/good", b"whole")
    assert fetch_url(web.serve_in_turn("/x", "/bad", "/short", "/good"), max_bytes=100) == b"whole"
    assert web.asked["/x"] == 3


def test_a_body_that_breaks_off_every_time_is_no_image(web: WebServer) -> None:
    result = fetch_url(web.serve("/x", b"half", headers={"Content-Length": "8"}), max_bytes=100)
    assert isinstance(result, OSError)
    assert str(result) == "the body broke off at byte 4 of 8"


@pytest.mark.parametrize("length", ["1" + "0" * 30, "9" * 5000])
def test_lengths_beyond_all_numbers_are_too_large(web: WebServer, length: str) -> None:
    result = fetch_url(web.serve("/x", b"x", headers={"Content-Length": length}), max_bytes=100)
    assert isinstance(result, ImageRefusedError)
    assert str(result).startswith("too large: 1000" if length[0] == "1" else "too large: 9999")
    assert len(str(result)) < 250


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "5"}, {"Content-Length": ""}])
def test_too_large_is_refused_whatever_the_server_promises(web: WebServer, headers: dict[str, str]) -> None:
    result = fetch_url(web.serve("/x", b"x" * 500_000, headers=headers), max_bytes=4)
    assert isinstance(result, ImageRefusedError)
    assert str(result).startswith("too large")


def test_redirects_lead_to_web_servers_only(web: WebServer) -> None:
    web.serve("/to", b"found")
    assert fetch_url(web.serve("/from", b"", status=302, headers={"Location": "/to"}), max_bytes=100) == b"found"
    for target in ("file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x"):
        result = fetch_url(web.serve("/bad", b"", status=302, headers={"Location": target}), max_bytes=10_000)
        assert isinstance(result, OSError), target
    endless = fetch_url(web.serve("/again", b"", status=302, headers={"Location": "/again"}), max_bytes=100)
    assert isinstance(endless, OSError)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "https:///x.jpg",
        "http://127.0.0.1:port/x.jpg",
        "http://name:sesame@127.0.0.1:port/x.jpg",
        "http://[::1/x.jpg",
        "http://127.0.0.1:1/refuses.jpg",
        "http://name.invalid/x.jpg",
        "file:///etc/passwd",
    ],
)
def test_addresses_that_lead_nowhere_are_an_error_of_their_own(web: WebServer, url: str) -> None:
    result = fetch_url(url, max_bytes=100)
    assert isinstance(result, OSError | ImageRefusedError)
    assert str(result)
    assert "sesame" not in str(result)


def test_an_address_with_a_password_is_not_asked(web: WebServer) -> None:
    result = fetch_url(web.serve("/x", b"1").replace("//", "//me:sesame@"), max_bytes=100)
    assert isinstance(result, ImageRefusedError)
    assert "contains a user name or password" in str(result)
    assert not web.asked


def test_where_a_server_leads_is_not_told(web: WebServer) -> None:
    result = fetch_url(web.serve("/x", b"", status=302, headers={"Location": "file:///sesame"}), max_bytes=100)
    assert isinstance(result, OSError)
    assert str(result) == "the server answers 302 Found"


def test_room_is_asked_for_before_a_body_is_read(web: WebServer) -> None:
    asked: list[int] = []
    assert fetch_url(web.serve("/x", b"x" * 100_000), max_bytes=1 << 20, hold=asked.append) == b"x" * 100_000
    assert asked[0] == asked[-1] == 100_000


def test_a_trickle_ends(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shards.sources.web.FETCH_SECONDS", -1.0)
    result = fetch_url(web.serve("/x", b"x" * 10), max_bytes=100)
    assert isinstance(result, OSError)
    assert "not complete after" in str(result)


@pytest.mark.parametrize("part", ["status", "header", "length of a chunk", "redirects"])
def test_a_trickle_before_the_body_ends(web: WebServer, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """A byte now and then: only the body had a deadline."""
    monkeypatch.setattr("shards.sources.web.FETCH_SECONDS", 0.2)
    begins = {
        "status": b"HTTP/1.1 200",
        "header": b"HTTP/1.1 200 OK\r\nX: ",
        "length of a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0000",
        "redirects": b"HTTP/1.1 302 Found\r\nLocation: /x\r\nX: ",
    }
    is_over = threading.Event()

    def answer(request: BaseHTTPRequestHandler) -> None:
        with suppress(OSError):
            request.wfile.write(begins[part])
            while not is_over.wait(0.02):
                request.wfile.write(b"0" if part == "length of a chunk" else b" ")

    web.pages["/x"] = answer
    begin = time.monotonic()
    result = fetch_url(f"{web.url}/x", max_bytes=100)
    is_over.set()
    assert time.monotonic() - begin < 60
    assert isinstance(result, OSError)
    assert str(result) == "not complete after 0 s"


def test_only_web_addresses_are_fetched() -> None:
    assert is_web("http://a/b")
    assert is_web("HTTPS://a/b")
    assert not any(is_web(location) for location in ("a/http://", "httpx://a", "s3://b/k", "/http://", "http:/a"))


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
