"""Which implementation of a door runs: a named one works or raises, None walks the backend's list."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.core

_LOGGER = logging.getLogger(__name__)

TUNED = Path(__file__).parent / "tuned"
IMPLEMENTATIONS = ("xla", "pallas_tpu", "pallas_gpu")
_KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}


class Unsupported(NotImplementedError):
    """A capability that does not exist (yet), named with the values that asked for it."""


def choose(
    door: str, implementation: str | None, interpret: Any, choices: Mapping[str, ModuleType], *args: Any, **kwargs: Any
) -> ModuleType:
    """The module named, or the first of the backend's list whose `check(*args, **kwargs)` does not refuse.

    `check` looks at shapes, dtypes and static values only and raises Unsupported; on "xla" there is nothing to refuse. Refusals
    are logged with their reason; if all refuse, an ExceptionGroup carries every reason.
    """
    if interpret and implementation in (None, "xla"):
        raise ValueError(f"{interpret=} needs a Pallas implementation by name, found {implementation=}")
    if implementation is not None:
        if implementation not in choices:
            raise Unsupported(f"{door} has no implementation={implementation!r}; it has {sorted(choices)}")
        _check(choices[implementation], interpret, args, kwargs)
        _check_backend(implementation, interpret, args)
        return choices[implementation]
    refusals: list[Exception] = []
    for name in preferred():
        if name not in choices:
            continue
        try:
            _check(choices[name], interpret, args, kwargs)
        except Unsupported as refusal:
            _LOGGER.info("%s: %s refused: %s", door, name, refusal)
            refusals.append(refusal)
        else:
            return choices[name]
    raise ExceptionGroup(f"no implementation of {door} accepts these arguments", refusals)


def _check(module: ModuleType, interpret: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    check: Callable[..., None] | None = getattr(module, "check", None)
    if check is not None:
        check(*args, interpret=interpret, **kwargs)


def _check_backend(implementation: str, interpret: Any, args: tuple[Any, ...]) -> None:
    """A kernel named where nothing can run it would fail far from here, in the words of its compiler.

    Under a trace it is not known yet what the program will be compiled for.
    """
    backend = jax.default_backend()
    if interpret or implementation == "xla" or _KERNELS.get(backend) == implementation:
        return
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
        raise Unsupported(
            f"{implementation=} does not run on this backend, {backend!r}: interpret=True emulates it, implementation='xla' "
            "runs anywhere"
        )


def preferred() -> tuple[str, ...]:
    """Implementations for `implementation=None`, best first.

    A kernel comes before XLA only on devices where it has been run: those with a record in `tuned/`, which
    `benchmarks/kernels.py --record` writes after it has compared the kernels with XLA there.
    """
    kernels = _KERNELS.get(jax.default_backend())
    if kernels is None:
        return ("xla",)
    kind = jax.devices()[0].device_kind
    if kind in records():
        return (kernels, "xla")
    _say_unproven(kernels, kind)
    return ("xla",)


@functools.cache
def records() -> dict[str, dict[str, Any]]:
    """What was measured, by device kind: tile sizes and the measurement that chose them."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(TUNED.glob("*.json"))]
    return {record["device_kind"]: record for record in found}


def device_kind() -> str:
    """Name of the device that is compiled for: the one a caller declares by an abstract mesh, else the first at hand."""
    return (_declared() or jax.devices()[0]).device_kind


def _declared() -> Any:
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def tuned(door: str, name: str, default: int) -> int:
    """A constant of a kernel as the record of this device has it, record[door]["constants"][name], or the default."""
    return records().get(device_kind(), {}).get(door, {}).get("constants", {}).get(name, default)


@functools.cache
def _say_unproven(kernels: str, kind: str) -> None:
    _LOGGER.warning(
        "the %s kernels compile for this backend but have not been run on a %r yet, so XLA is used; name "
        "implementation=%r to use them, or run benchmarks/kernels.py --record to prove and tune them here",
        kernels,
        kind,
        kernels,
    )
