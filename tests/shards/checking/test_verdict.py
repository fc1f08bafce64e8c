"""A verdict says what was found; what is allowed and what to do may be empty."""

from shards.checking.verdict import Verdict


def test_nothing_is_to_be_done_unless_it_is_said() -> None:
    found = Verdict(name="partition", status="ok", value="gpu")
    assert (found.allowed, found.todo) == ("", "")
