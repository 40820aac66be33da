"""Run the compiling processes and read what they tell: a process that dies or hangs costs its case, not the others."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

from tests.aot import compilers, targets
from tests.aot.cases import Case
from tests.aot.compile_cases import Result, listed
from tests.aot.targets import Target

FAMILIES = ("sparse_attention", "sparse_attention backward", "index_select", "compress")
RUNS = tuple(
    (family, target)
    for target in (*targets.SINGLE, *targets.MESHES)
    for family in FAMILIES
    if listed(family, target)  # not every family has a case on a mesh
)
_PROCESS_LIMIT = 1800  # seconds, for all cases of one process; a single case has its own limit there

Command = Callable[[Sequence[str]], list[str]]  # ids to skip -> command line


def compile_family(family: str, target: Target, *options: str) -> list[Result]:
    """Results of a family's cases for one target, in the order of the list."""

    def command(skip: Sequence[str]) -> list[str]:
        call = [sys.executable, "-m", "tests.aot.compile_cases", family, target.name, *options]
        return [*call, "--skip", *skip]

    return collect(command, target)


def collect(command: Command, target: Target) -> list[Result]:
    """Run until every case has a result: after the death of a process, a new one goes on behind the case that killed it."""
    results: list[Result] = []
    while True:
        found, unfinished = _run(command([result.case for result in results]), target)
        results += found
        if unfinished is None:
            return results
        results.append(unfinished)


def _run(command: list[str], target: Target) -> tuple[list[Result], Result | None]:
    """Results that a process told, and one for the case in whose midst it ended."""
    try:
        done = subprocess.run(
            command,
            cwd=compilers.ROOT,
            env=compilers.environment(target.platform),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROCESS_LIMIT,
            check=False,
        )
        output, errors, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        output, errors, code = _text(late.stdout), _text(late.stderr), -signal.SIGALRM
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    results = [Result(**line) for line in lines if "begins" not in line]
    if code == 0:
        return results, None
    begun = lines[-1].get("begins") if lines else None
    if begun is None:
        raise RuntimeError(f"{' '.join(command)} ended with {code} between cases:\n{errors[-2000:]}")
    reason = "took too long" if code == -signal.SIGALRM else f"the compiling process died with {code}"
    return results, Result(begun, target.name, "fails", f"{reason}: {_last_words(errors)}")


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _last_words(errors: str) -> str:
    return " | ".join([line for line in errors.splitlines() if line.strip()][-6:])[-1500:]


def faults(cases: Sequence[Case], results: Sequence[Result], expected: Callable[[Case], str]) -> list[str]:
    """What is wrong with a family's results, a line each; nothing if all is well.

    A case has to be there, with the expected verdict, temporary bytes within what it is allowed, donated arguments updated in
    place, and no more temporary bytes at a larger pool than the difference of what both are allowed.
    """
    found = []
    by_id = {result.case: result for result in results}
    for case in cases:
        result = by_id.get(case.id)
        if result is None:
            found.append(f"{case.id}: no result")
        elif result.verdict != expected(case):
            found.append(f"{case.id}: {result.verdict} where it should be {expected(case)!r}: {result.reason}")
        elif result.verdict == "compiles" and result.temp > case.allowed_temp():
            found.append(f"{case.id}: {result.temp:,} temporary bytes, {case.allowed_temp():,} allowed")
        elif result.verdict == "compiles" and result.aliased < result.donated:
            found.append(f"{case.id}: {result.aliased:,} of {result.donated:,} donated bytes updated in place")
    for small, large in _pairs(cases):
        a, b = by_id.get(small.id), by_id.get(large.id)
        if a is None or b is None or {a.verdict, b.verdict} != {"compiles"}:
            continue
        grown, allowed = b.temp - a.temp, large.allowed_temp() - small.allowed_temp()
        if grown > allowed + _SLACK:
            found.append(f"{large.id}: {grown:,} temporary bytes more than {small.id}; {allowed:,} would be right")
    return found


_SLACK = 1 << 20  # bytes of padding and of another tiling


def _pairs(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Cases that differ in the size of the pool alone, next larger ones."""
    alike: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        key = (case.family, case.call, case.batch, case.tokens, case.storage)
        alike.setdefault(key, []).append(case)
    ordered = [sorted(group, key=lambda case: case.entries) for group in alike.values()]
    return [pair for group in ordered for pair in itertools.pairwise(group)]
