"""Compiled programs kept between runs of the command line."""

from __future__ import annotations

import os
from pathlib import Path


def keep_programs() -> None:
    """Keep compiled programs in the user's cache folder, so that the next start takes seconds; a place that is set counts more.

    That is JAX_COMPILATION_CACHE_DIR, else csa2-jax under XDG_CACHE_HOME or ~/.cache; nothing is kept where neither can be
    written.
    """
    import jax

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "csa2-jax"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
