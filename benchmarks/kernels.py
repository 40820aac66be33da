"""How fast are the kernels, and do they agree with XLA?

python benchmarks/kernels.py                            on a GPU or TPU: compare with XLA, then time; on a CPU: XLA beside NumPy
python benchmarks/kernels.py --record                   on a GPU or TPU: also try tile sizes, and write kernels_pallas/tuned
python benchmarks/kernels.py --roofline v5e h200        the least times that shapes and vendors' peaks allow; runs nothing
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import kernels_cpu, kernels_measure, kernels_record, kernels_roofline
from benchmarks.kernels_calls import DOORS, Call, Door, for_cpu, released, tiny
from benchmarks.kernels_measure import Ceilings, Measurement
from kernels_pallas import dispatch

KERNELS = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
Chip = Literal["v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "b200"]


def main(
    roofline: tuple[Chip, ...] = (),
    png: Path | None = None,
    doors: tuple[Door, ...] = DOORS,
    only: str = "",
    record: bool = False,
    repeat: Annotated[int, tyro.conf.arg(help="runs of each; the median counts")] = 7,
    sizes: Literal["released", "tiny"] = "released",
    implementation: Literal["pallas_gpu", "pallas_tpu"] | None = None,
    interpret: bool = False,
    tuned: Path = dispatch.TUNED,
) -> int:
    """Compare the kernels with XLA, then time them; on a CPU, time XLA beside NumPy; or compute rooflines.

    Every table says whether it was measured or computed. Exit code 1 if anything disagrees.

    Args:
        roofline: compute the least times on these chips; nothing runs.
        png: also draw the rooflines, into this file.
        doors: which operations.
        only: calls whose name holds this text.
        record: try tile sizes and write the record of this device, if every call agrees with XLA.
        sizes: the released model's, or tiny ones.
        implementation: kernels to measure, by default those for this device.
        interpret: run kernels in the interpreter: agreement only, times mean nothing.
        tuned: folder of records.
    """
    console = Console(width=None if Console().is_terminal else 200)
    if roofline:
        return _roofline(console, _calls(doors, only, sizes, cpu=False), roofline, png)
    if png is not None:
        raise SystemExit("--png draws a roofline: say --roofline and chips as well")
    native = KERNELS.get(jax.default_backend())
    if record and (interpret or implementation not in (None, native) or sizes == "tiny" or only):
        raise SystemExit(
            "--record proves the device's own kernels at the released sizes: it goes with neither --interpret, --only, "
            f"--sizes tiny nor another implementation than {native}"
        )
    implementation = implementation or native  # type: ignore[assignment]
    if implementation is None:
        if record:
            raise SystemExit("--record needs a GPU or TPU; this is a CPU")
        return _cpu(console, _calls(doors, only, sizes, cpu=True), repeat)
    calls = _calls(doors, only, sizes, cpu=False)
    return _device(console, calls, implementation, repeat=repeat, interpret=interpret, tuned=tuned if record else None)


def _calls(doors: tuple[Door, ...], only: str, sizes: str, *, cpu: bool) -> tuple[Call, ...]:
    found = tiny(doors) if sizes == "tiny" else for_cpu(doors) if cpu else released(doors)
    if cpu:
        found = tuple(call for call in found if call.door in kernels_cpu.NUMPY and call.kind != "make")
    found = tuple(call for call in found if only in call.name)
    if not found:
        raise SystemExit(f"no call of {', '.join(doors)} has {only!r} in its name")
    return found


def _roofline(console: Console, calls: tuple[Call, ...], chips: tuple[str, ...], png: Path | None) -> int:
    console.print(kernels_roofline.peaks_table(chips))
    console.print(kernels_roofline.table(calls, chips))
    if png is not None:
        kernels_roofline.draw(calls, chips, png)
        console.print(f"drawn into {png}")
    return 0


def _cpu(console: Console, calls: tuple[Call, ...], repeat: int) -> int:
    skipped = kernels_cpu.torch_functions()[1]
    table = Table(title="Measured on this CPU, float32: median milliseconds of a call, after all were found to agree")
    table.add_column("call")
    for heading in ("xla", "numpy", "numpy / xla", "torch", "torch / xla"):
        table.add_column(heading, justify="right")
    faults = []
    for call in calls:
        seconds, wrong = kernels_cpu.compare(call, repeat=repeat)
        faults += [f"{call.name}: {who} disagrees with numpy, {what}" for who, what in wrong.items()]
        if "xla" not in seconds:
            table.add_row(call.name, "disagrees")
            continue
        cells = [f"{1e3 * seconds['xla']:.2f}"]
        for who in ("numpy", "torch"):
            known = who in seconds
            cells += [f"{1e3 * seconds[who]:.2f}", f"{seconds[who] / seconds['xla']:.2f}"] if known else ["-", "-"]
        table.add_row(call.name, *cells)
    console.print(table)
    for line in filter(None, [skipped, *faults]):
        console.print(line)
    return 1 if faults else 0


def _device(
    console: Console, calls: tuple[Call, ...], implementation: str, *, repeat: int, interpret: bool, tuned: Path | None
) -> int:
    kind = jax.devices()[0].device_kind
    others, missing = ([], []) if interpret else kernels_measure.others()
    small = {"copied": 1 << 20, "side": 64} if jax.default_backend() == "cpu" else {}
    found_ceilings = kernels_measure.ceilings(repeat=repeat, **small)
    tiles: dict[Door, dict[str, Any]] = {}
    tried: dict[Door, list[dict[str, Any]]] = {}
    if tuned is not None:
        door: Door
        for door in DOORS:
            of_door = [call for call in calls if call.door == door and call.for_tuning]
            tiles[door], tried[door] = kernels_record.choose(
                implementation, door, of_door, repeat=max(1, repeat // 2), interpret=interpret
            )
            console.print(f"{door}: {len(tried[door])} tile sizes tried, {tiles[door] or 'the defaults'} taken")
    with kernels_record.using_all(implementation, tiles):
        measurements = [
            kernels_measure.measure(call, implementation, repeat=repeat, interpret=interpret, others=others)
            for call in calls
        ]
    console.print(_table(calls, measurements, found_ceilings, f"{kind}, {implementation}", interpret=interpret))
    for line in missing:
        console.print(line)
    for m in measurements:
        if m.refused or m.fault:
            console.print(f"{m.call}: {f'refused, {m.refused}' if m.refused else m.fault}")
    if tuned is not None:
        try:
            path = kernels_record.write(tuned, kind, implementation, calls, measurements, found_ceilings, tiles, tried)
        except ValueError as error:
            console.print(str(error))
            return 1
        console.print(f"recorded in {path}")
    return 1 if any(m.wrong for m in measurements) else 0


def _table(
    calls: tuple[Call, ...], measurements: list[Measurement], found: Ceilings, title: str, *, interpret: bool
) -> Table:
    """Times and what share of the measured ceilings they are."""
    names = list(dict.fromkeys(name for m in measurements for name in m.others))
    how = "in the interpreter, where times mean nothing" if interpret else "measured here"
    table = Table(
        title=f"{title}: {how}; median microseconds of a call",
        caption=f"Ceilings measured in this run: copy {found.bytes_s / 1e9:,.0f} GB/s, bf16 product {found.flop_s / 1e12:,.1f} "
        "TFLOP/s. GB/s and TFLOP/s of a call: bytes that have to be moved and products, computed from its shape, by its measured "
        "time. The others get gathered rows and no sink.",
    )
    table.add_column("call")
    for heading in ("error", "kernel", "GB/s", "of copy", "TFLOP/s", "of product"):
        table.add_column(heading, justify="right")
    for name in names:
        table.add_column(name, justify="right")
        table.add_column(f"{name} / kernel", justify="right")
    for call, m in zip(calls, measurements, strict=True):
        if not m.proven:
            table.add_row(call.name, "refused" if m.refused else "fails" if m.fault else f"{m.error:.1e} DISAGREES")
            continue
        cost, short = call.cost(), kernels_roofline.short
        moved, multiplied = cost.bytes / m.seconds, cost.flops / m.seconds
        cells = [f"{m.error:.1e}", short(1e6 * m.seconds), short(moved / 1e9), f"{moved / found.bytes_s:.0%}"]
        cells += [f"{multiplied / 1e12:.2f}", f"{multiplied / found.flop_s:.0%}"]
        for name in names:
            other = m.others.get(name)
            cells += ["-", "-"] if other is None else [short(1e6 * other), f"{other / m.seconds:.2f}"]
        table.add_row(call.name, *cells)
    return table


if __name__ == "__main__":
    sys.exit(tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,)))
