"""Which implementation of a door runs: a named one works or raises, None walks the backend's list."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

_LOGGER = logging.getLogger(__name__)

# Best first. Hardware kernels join their backend's list once they are proven there.
_ORDER: Mapping[str, Sequence[str]] = {"cpu": ("xla",), "gpu": ("xla",), "tpu": ("xla",)}


class Unsupported(NotImplementedError):
    """A capability that does not exist (yet), named with the values that asked for it."""


def run(
    door: str, implementation: str | None, choices: Mapping[str, Callable[..., Any]], *args: Any, **kwargs: Any
) -> Any:
    """Call the implementation named, or the first of the backend's list that does not refuse.

    Each refusal is logged with its reason; if all refuse, an ExceptionGroup carries every reason.
    """
    if implementation is not None:
        if implementation not in choices:
            raise Unsupported(f"{door} has no implementation={implementation!r}; it has {sorted(choices)}")
        return choices[implementation](*args, **kwargs)
    refusals: list[Exception] = []
    for name in _ORDER.get(jax.default_backend(), ("xla",)):
        if name not in choices:
            continue
        try:
            return choices[name](*args, **kwargs)
        except Unsupported as refusal:
            _LOGGER.info("%s: %s refused: %s", door, name, refusal)
            refusals.append(refusal)
    raise ExceptionGroup(f"no implementation of {door} accepts these arguments", refusals)
