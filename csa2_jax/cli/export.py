"""`csa2 export`: a converted checkpoint back in the release's layout."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro


def main(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", help_behavior_hint="")],
    target: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST", help_behavior_hint="")],
    dtype: Literal["stored", "bf16"] = "stored",
    shard_gb: float | None = None,
) -> int:
    """Write DIR, a converted checkpoint, into DST in the release's layout: same names, dtypes and files.

    What was converted as it was stored comes back bit for bit. Weights that were dequantised, or trained since, are quantised
    again to fp8 and fp4 with scales that are powers of two; --dtype bf16 leaves them unquantised.

    Args:
        source: Converted directory.
        target: Directory to make; it appears when it is whole.
        dtype: As the configuration says, or bf16 throughout.
        shard_gb: GB of a file, instead of the files that the release had.
    """
    from csa2_jax.conversion.export import export

    if shard_gb is not None and shard_gb <= 0:
        raise ValueError(f"--shard-gb {shard_gb:g} must be more than 0")
    done = export(
        source,
        target,
        weights="stored" if dtype == "stored" else "bfloat16",
        shard_bytes=None if shard_gb is None else max(int(shard_gb * 1e9), 1),
    )
    print(
        f"{target}: {done.tensors:,} tensors, {done.nbytes / 1e9:.2f} GB in {done.files} file{'s' * (done.files > 1)}"
    )
    return 0
