"""The test suite in its two parts; what `make test` runs.

    python -m tests.suite [--exhaustive] [arguments of pytest]

Compiling is most of what the tests do. Without fusion emitters and in one piece, a CPU program takes a third of the time to
compile (measured on a model of five layers: 3.2 s of CPU time instead of 10.5) and means the same. The modules that are to see
what users run (marked `optimised` by conftest.py) run first, without these flags.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

FLAGS: Final = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
NO_TESTS: Final = 5  # pytest's exit status


def main(arguments: list[str]) -> int:
    """Run both parts, whatever the first one says; the exit status of the first that failed."""
    exhaustive = "--exhaustive" in arguments
    rest = [a for a in arguments if a != "--exhaustive"]
    environment = {"JAX_PLATFORMS": "cpu"} | os.environ
    quick = environment | {"XLA_FLAGS": f"{FLAGS} {os.environ.get('XLA_FLAGS', '')}".strip()}
    if not accepted(quick):
        print(
            "this jaxlib does not know the flags that compile quickly: the suite takes about twice as long", flush=True
        )
        quick = environment
    marks = "" if exhaustive else " and not exhaustive"
    found = [run(f"optimised{marks}", rest, environment), run(f"not optimised{marks}", rest, quick)]
    if set(found) == {NO_TESTS}:
        return NO_TESTS
    return next((status for status in found if status not in (0, NO_TESTS)), 0)


def accepted(environment: dict[str, str]) -> bool:
    """Whether jaxlib starts with these flags: it aborts at one that it does not know."""
    program = [sys.executable, "-c", "import jax; jax.devices()"]
    return subprocess.run(program, env=environment, capture_output=True, check=False).returncode == 0


def run(marks: str, arguments: list[str], environment: dict[str, str]) -> int:
    """Two processes of pytest."""
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "worksteal", "-m", marks, *arguments]
    return subprocess.run(pytest, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
