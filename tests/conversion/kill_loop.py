"""Kill a conversion, again and again, at random moments; go on each time; compare what comes out. Run as a program.

    python -m tests.conversion.kill_loop SOURCE WORKPLACE KILLS

Every attempt is a process of its own (a fork of this one, so that nothing is imported sixty times), ended by SIGKILL after a
random time unless it was faster. Prints a JSON line: kills, finished conversions, distinct results, and whether an unfinished
output was ever seen under the final name.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from csa2_jax.conversion.convert import convert
from csa2_jax.conversion.converted import MARKER

PIECE_BYTES = 2500


def attempt(source: Path, target: Path) -> int:
    """Start a conversion in a child; its process id."""
    child = os.fork()
    if child:
        return child
    try:
        convert(source, target, piece_bytes=PIECE_BYTES, workers=2)
        os._exit(0)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def digest(directory: Path) -> str:
    """Of all files and their names, but for the two of Orbax that hold the time."""
    total = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name not in ("_CHECKPOINT_METADATA", "commit_success.txt"):
            total.update(f"{path.relative_to(directory)}\n".encode() + path.read_bytes())
    return total.hexdigest()


def main(source: Path, workplace: Path, kills: int) -> None:
    """Kill until `kills` attempts were killed, and some conversion has finished after being killed several times."""
    rng, target = random.Random(0), workplace / "out"
    begin = time.monotonic()
    os.waitpid(attempt(source, target), 0)
    whole = time.monotonic() - begin
    results, killed, finished, exposed, most = [digest(target)], 0, 0, 0, 0
    shutil.rmtree(target)
    since = 0  # kills since the conversion began
    while killed < kills or since:
        child = attempt(source, target)
        # Shorter and shorter lives find early moments, a few long ones the commit; none is so short for ever that nothing ends.
        time.sleep(rng.uniform(0, whole * (1.2 if killed >= kills else rng.choice((0.1, 0.4, 1.0)))))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            killed, since = killed + 1, since + 1
        elif os.WEXITSTATUS(status):
            raise SystemExit("an attempt failed by itself")
        if target.exists():
            exposed += not (target / MARKER).is_file()
            results.append(digest(target))
            most = max(most, since)
            shutil.rmtree(target)
            shutil.rmtree(workplace / "out.partial", ignore_errors=True)
            finished, since = finished + 1, 0
    print(
        json.dumps(
            {
                "kills": killed,
                "finished": finished,
                "distinct": len(set(results)),
                "exposed": exposed,
                "most_kills_of_one": most,
                "seconds_unhurt": round(whole, 3),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
