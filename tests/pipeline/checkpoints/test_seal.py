"""The digest of a JSON text: nothing in it can change without being noticed."""

import json

import pytest

from pipeline.checkpoints.seal import sealed, unsealed


@pytest.mark.parametrize(
    "text", [b'{"a":1}', b'{\n "a": [\n  1\n ]\n}\n', '{"a": "Größe, \\"digest\\": \\""}'.encode()]
)
def test_a_sealed_text_is_json_and_reads_back(text: bytes) -> None:
    data = sealed(text)
    assert json.loads(data) == json.loads(text) | {"digest": json.loads(data)["digest"]}
    assert json.loads(unsealed(data)) == json.loads(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b'{"a":1}', "does not end with its digest", id="without a digest"),
        pytest.param(b"", "does not end with its digest", id="empty"),
        pytest.param(sealed(b'{"a":1}').replace(b"1", b"2", 1), "does not fit", id="another value"),
        pytest.param(sealed(b'{"a":1}')[:-1], "does not fit", id="the end is missing"),
        pytest.param(sealed(b'{"a":1}') * 2, "does not fit", id="twice"),
        pytest.param(sealed(b'{"a":1}').upper(), "does not end with its digest", id="upper case"),
    ],
)
def test_what_was_changed_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unsealed(data)
