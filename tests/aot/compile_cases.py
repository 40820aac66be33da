"""Compile a family's cases for one target, one after the other, and tell each result as it comes.

    python -m tests.aot.compile_cases FAMILY TARGET [--implementation NAME] [--only TEXT] [--skip ID ...] [--limit SECONDS]

Every case prints one JSON line when it begins and one when it is done, so that a compiler that aborts or hangs is known by the
last line. A case that takes longer than the limit ends the process by SIGALRM, which needs no help from a busy interpreter.
The compilers have to be importable: `compilers.environment` gives the variables.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import time
from typing import Any, Literal

import jax

from kernels_pallas import Unsupported
from tests.aot import cases, targets
from tests.aot.cases import Case
from tests.aot.targets import Target

Verdict = Literal["compiles", "no room", "refused", "fails"]


@dataclasses.dataclass
class Result:
    """What became of a case.

    verdict: "no room" where arguments and outputs alone exceed the device's memory (nothing is asked of the compiler), "refused"
        where the kernel says it cannot take these arguments, "fails" for everything that went wrong.
    seconds: to trace, lower and compile. temp, arguments, outputs: bytes on one device. donated: bytes of the arguments that the
        call gives up; aliased: bytes of outputs that lie where arguments lay.
    """

    case: str
    target: str
    verdict: Verdict
    reason: str = ""
    seconds: float = 0.0
    temp: int = 0
    arguments: int = 0
    outputs: int = 0
    donated: int = 0
    aliased: int = 0


def compile_case(case: Case, target: Target, implementation: str | None = None) -> Result:
    """Compile one case."""
    start = time.perf_counter()
    result = Result(case.id, target.name, "compiles")
    try:
        function, args, donate = case.program(target, implementation)
        needed = _bytes(args, target) + _bytes(jax.eval_shape(function, *args), target)
        result.donated = sum(_bytes(args[i], target) for i in donate)
        needed -= result.donated
        if needed > target.memory:
            reason = f"arguments and outputs of {needed / 2**30:.1f} GiB, memory of {target.memory / 2**30:.1f} GiB"
            return dataclasses.replace(result, verdict="no room", reason=reason)
        memory = targets.lower(target, function, args, donate).compile().memory_analysis()
    except Unsupported as refusal:
        return dataclasses.replace(result, verdict="refused", reason=str(refusal))
    except Exception as error:
        return dataclasses.replace(result, verdict="fails", reason=f"{type(error).__name__}: {error}"[:4000])
    result.seconds = round(time.perf_counter() - start, 2)
    result.temp, result.aliased = memory.temp_size_in_bytes, memory.alias_size_in_bytes
    result.arguments, result.outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
    return result


def _bytes(tree: Any, target: Target) -> int:
    """Bytes of a pytree of arrays (on a mesh: of one device's share, were all of it spread evenly)."""
    total = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return total // (target.mesh[0] if target.mesh else 1)


def listed(family: str, target: Target) -> tuple[Case, ...]:
    """The cases of a family that are compiled for a target."""
    return tuple(case for case in (cases.MESH_CASES if target.mesh else cases.CASES) if case.family == family)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("family")
    parser.add_argument("target", choices=sorted(targets.TARGETS))
    parser.add_argument("--implementation", help="another than the one meant for the target")
    parser.add_argument("--only", default="", help="cases whose id holds this text")
    parser.add_argument("--skip", nargs="*", default=(), help="ids of cases that are not compiled")
    parser.add_argument("--limit", type=int, default=300, help="seconds a case may take")
    options = parser.parse_args()
    target = targets.TARGETS[options.target]
    for case in listed(options.family, target):
        if case.id in options.skip or options.only not in case.id:
            continue
        print(json.dumps({"begins": case.id}), flush=True)
        signal.alarm(options.limit)
        result = compile_case(case, target, options.implementation)
        signal.alarm(0)
        print(json.dumps(dataclasses.asdict(result)), flush=True)


if __name__ == "__main__":
    main()
