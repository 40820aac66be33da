"""kill -9 at sixty random moments: whatever finishes is the same, and nothing unfinished is ever seen under the final name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conversion.test_round_trip import written

ROOT = Path(__file__).resolve().parents[2]
KILLS = 60


def test_killed_conversions_go_on_and_end_alike(tmp_path: Path) -> None:
    source = written("fp8", tmp_path / "source", shards=3)
    command = [sys.executable, "-m", "tests.conversion.kill_loop", str(source), str(tmp_path), str(KILLS)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["kills"] >= KILLS
    assert found["finished"] >= 1
    assert found["most_kills_of_one"] >= 3
    assert (found["distinct"], found["exposed"]) == (1, 0)
