"""What a fresh process pays: compiling the programs of a prompt and of a decode step, and the most memory of a prompt.

Each in a process of its own that keeps no compiled programs. Compiling is the first call less the second, for a prompt of two
chunks or one step. Memory is the process's own (Linux's resident set): with the model made, then the most until a whole prompt
has been read, compilers included, and the most of reading it once more with everything compiled.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from typing import Any, Final

from benchmarks.inference_child import Job
from benchmarks.inference_models import DECODERS, ROOT, Bench
from benchmarks.inference_report import RELEASED_BF16, RELEASED_F32, RELEASED_ON, Report, Target, number, table

CHILD: Final = "benchmarks/inference_child.py"
GB: Final = 1e9


def measure(bench: Bench) -> Report:
    """One process for each route of a prompt, one for a decode step."""
    at, large, chunk = bench.sizes.at, bench.sizes.large, bench.sizes.chunk
    config = bench.config.to_hf()
    jobs = {f"prefill {d}": Job(config, d, at, chunk) for d in DECODERS} | {"decode": Job(config, "", large, chunk)}
    found: dict[str, dict[str, Any]] = {}
    for name, job in jobs.items():
        bench.note(f"{name} in a process of its own")
        found[name] = _process(job)
    report = Report(figures={"tokens": at, "decode_context": large, **found})
    compiling = table(
        "Compiling from nothing, s",
        f"program (prompts into a cache for {at:,} tokens, a step at {large:,})",
        *("first call", "second call", "difference", "of it XLA"),
    )
    memory = table(
        f"Memory of a process that reads {at:,} tokens, GB",
        "route",
        *("model made", "most", "more than before", "most when compiled"),
    )
    for name, f in found.items():
        if "unsupported" in f:
            report.lines.append(f"{name}: {f['unsupported']}")
            continue
        compiling.add_row(name, *(number(f[key], 1) for key in ("first_s", "second_s", "compile_s", "xla_s")))
        if "most_bytes" in f:
            cells = (
                f["before_bytes"],
                f["most_bytes"],
                f["most_bytes"] - f["before_bytes"],
                f["most_when_compiled_bytes"],
            )
            memory.add_row(name, *(number(cell / GB, 2) for cell in cells))
    for baseline in (RELEASED_F32, RELEASED_BF16):
        if at in baseline.peak_bytes:
            memory.add_row(baseline.what, "-", number(baseline.peak_bytes[at] / GB, 2), "-", "-")
    report.lines.append(RELEASED_ON)
    report.tables = [compiling, memory]
    most = [f["most_bytes"] for f in found.values() if "most_bytes" in f]
    text = f"most memory of a process that reads {at:,} tokens, of any route"
    report.targets = [Target(text, "<=", 2.0, max(most) / GB if most else None, " GB", refused="no route is built")]
    return report


def _process(job: Job) -> dict[str, Any]:
    """What the process printed; RuntimeError with its last words if it failed."""
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    command = [sys.executable, CHILD, json.dumps(dataclasses.asdict(job))]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{CHILD} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
