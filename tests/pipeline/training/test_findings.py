"""Findings are whole lines of JSON, one after the other."""

import json
from pathlib import Path

from pipeline.training.findings import add_finding
from tests.pipeline.training.test_rewind import FOUND


def test_findings_are_appended(tmp_path: Path) -> None:
    add_finding(str(tmp_path), FOUND, action="ended")
    add_finding(str(tmp_path), FOUND, action="rewound", rewound_to=36)
    first, second = [json.loads(line) for line in (tmp_path / "guard.jsonl").read_text().splitlines()]
    assert (first["step"], first["z"], first["action"]) == (31, 47.0, "ended")
    assert second == first | {"action": "rewound", "rewound_to": 36}


def test_half_a_line_of_a_killed_process_spoils_no_other(tmp_path: Path) -> None:
    add_finding(str(tmp_path), FOUND, action="ended")
    path = tmp_path / "guard.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    add_finding(str(tmp_path), FOUND, action="rewound")
    half, whole = path.read_text().splitlines()
    assert half.startswith('{"kind"')
    assert json.loads(whole)["action"] == "rewound"
