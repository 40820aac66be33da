"""`csa2 convert`: the release's safetensors become a sharded Orbax checkpoint; or the plan of that, without weights."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import tyro

from csa2_jax.config import ModelConfig
from csa2_jax.sharding import parse_mesh

if TYPE_CHECKING:
    from csa2_jax.conversion.budget import Budget
    from csa2_jax.conversion.converted import Weights

Dtype = Literal["stored", "bf16", "f32"]
_WEIGHTS: Final[dict[str, Weights]] = {"stored": "stored", "bf16": "bfloat16", "f32": "float32"}
_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]


def main(
    source: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[SRC]", help_behavior_hint="")] = None,
    target: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DST]", help_behavior_hint="")] = None,
    dtype: Dtype = "stored",
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "",
    host: int = 0,
    hosts: int = 1,
    plan: _File = None,
    device_memory: float = 80.0,
    json: _File = None,
) -> int:
    """Convert SRC, a release checkpoint, into DST, an Orbax checkpoint of our stacked parameters.

    Needs little memory whatever the size: tensors stream through in pieces of 64 MiB. Stop it when you like, or pull the plug:
    the same command goes on where it was. DST appears when it is whole; until then it is called DST.partial.

    With --plan nothing is read but a config.json: prints where every tensor would go, and what each device would hold.

    Args:
        source: Directory with config.json and safetensors, named as the release names them or as the port in transformers does.
        target: Directory to make.
        dtype: Keep fp8 and fp4 as stored, or dequantise them, exactly, to bf16 or f32.
        mesh: Axis sizes of the mesh that will read it, as data=2,model=8: files end where its devices' parts do, but for tables.
        host: Which of several processes this is, when they write one DST together.
        hosts: How many they are; each writes the parts of its own devices.
        plan: A config.json to plan for, instead of converting.
        device_memory: GB of one device, for the verdict of the plan.
        json: With --plan, write one record per tensor into this file.
    """
    sizes = parse_mesh(mesh) if mesh else {}
    if plan is not None:
        if source is not None:
            raise ValueError("--plan takes a config.json and no directories")
        return _plan(plan, _WEIGHTS[dtype], sizes, device_memory, json)
    if source is None or target is None:
        raise ValueError("name SRC and DST, or --plan CONFIG.json")
    if json is not None:
        raise ValueError("--json belongs to --plan")
    from csa2_jax.conversion.convert import convert

    done = convert(source, target, weights=_WEIGHTS[dtype], mesh=sizes, host=host, hosts=hosts)
    resumed = f", {done.resumed_bytes / 1e9:.2f} GB of them there already" if done.resumed_bytes else ""
    if not done.complete:
        print(
            f"host {host} of {hosts} has written its {done.nbytes / 1e9:.2f} GB{resumed}; the last to finish makes {target}"
        )
        return 0
    share = f" (host {host}'s share)" if hosts > 1 else ""
    print(f"{target}: {done.tensors:,} tensors, {done.nbytes / 1e9:.2f} GB{share}{resumed}")
    return 0


def _plan(path: Path, weights: Weights, mesh: dict[str, int], device_memory: float, json: Path | None) -> int:
    if not device_memory > 0:
        raise ValueError(f"--device-memory {device_memory:g} must be a number of GB above 0")
    from csa2_jax.conversion.budget import budget

    found = budget(ModelConfig.from_hf(path), weights=weights, mesh=mesh)
    if json is not None:
        json.write_text("[\n" + ",\n".join(map(json_module.dumps, found.rows())) + "\n]\n", encoding="utf-8")
    _print(found, device_memory)
    if json is not None:
        print(f"{len(found.tensors):,} records: {json}")
    return 0


def _print(found: Budget, device_memory: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 160)
    table = Table(title=f"Parameters of {len(found.tensors):,} tensors" + (f" on {_mesh(found)}" if found.mesh else ""))
    for name, justify in (("parameter", "left"), ("tensors", "right"), ("shape", "left"), ("dtype", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("bytes", justify="right")
    table.add_column("split over")
    table.add_column("a device", justify="right")
    for p in found.parameters:
        if not p.built:
            continue
        split = ", ".join(
            f"{axis or i}: {'+'.join(names)}"
            for i, (axis, names) in enumerate(zip(p.axes, p.partition, strict=True))
            if names
        )
        table.add_row(
            p.stack.path,
            f"{p.tensors:,}",
            " x ".join(map(str, p.stack.shape)),
            p.stack.dtype.name,
            f"{p.stack.nbytes:,}",
            split or "-",
            f"{p.device_bytes:,}",
        )
    if carried := [p for p in found.parameters if not p.built]:
        nbytes = sum(p.stack.nbytes for p in carried)
        table.add_row("the image tower", f"{len(carried):,}", "", "", f"{nbytes:,}", "carried along, not loaded", "")
    console.print(table)
    print(f"release   {len(found.tensors):,} tensors, {found.source_bytes:,} bytes")
    print(f"converted {len(found.parameters):,} arrays, {found.target_bytes:,} bytes")
    each, room = found.device_bytes, device_memory * 1e9
    left = f"fits into {device_memory:g} GB, which leaves {(room - each) / 1e9:.1f} GB for cache and activations"
    verdict = left if each < room else f"does not fit into {device_memory:g} GB"
    print(f"a device  {each:,} bytes of {found.devices} device{'s' * (found.devices > 1)}: {verdict}")
    tables = sum(p.device_bytes for p in found.parameters if p.stack.path.startswith("engram_tables."))
    if tables:
        print(
            f"          {each - tables:,} bytes with the n-gram tables in host memory (load_checkpoint(..., engram='host'))"
        )


def _mesh(found: Budget) -> str:
    return ",".join(f"{name}={size}" for name, size in found.mesh.items())
