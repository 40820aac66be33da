"""Not written yet."""

from typing import Any

from kernels_pallas.dispatch import Unsupported


def check(*args: Any, interpret: Any, **kwargs: Any) -> None:
    """Refuse."""
    raise Unsupported("not written yet")
