"""`csa2 verify`: do two checkpoints hold the same?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import tyro


def main(
    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A", help_behavior_hint="")],
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B", help_behavior_hint="")],
    digests: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None,
) -> int:
    """Compare two checkpoints by content, each in the release's layout or converted; exit status 1 if they differ.

    Names, shapes, dtypes and every value are compared while they stream past, bit for bit where both store a tensor alike, by
    value where one side is dequantised. Also the configuration and the tokenizer's compressed map.

    Args:
        a: One checkpoint.
        b: The other.
        digests: Write a BLAKE2b digest of every tensor of A into this JSON file.
    """
    from csa2_jax.conversion.verify import report, verify

    if digests is not None and not digests.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"{digests.absolute().parent} does not exist: create it, or name another file for --digests"
        )
    found = verify(a, b, digests=digests is not None)
    print("\n".join(report(found, a, b)))
    if digests is not None:
        digests.write_text(json.dumps(found.digests, indent=1) + "\n", encoding="utf-8")
    return 1 if found.differences else 0
