"""The kernel benchmark: its arithmetic, its comparisons, and that a record is written only for what agrees."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import kernels, kernels_cpu, kernels_record
from benchmarks.kernels_calls import Call, Cost, Door, entry_bytes, released, tiny
from benchmarks.kernels_measure import Ceilings, Measurement, differences, measure, repeat_call, seconds_per_call
from benchmarks.kernels_record import Tunable
from benchmarks.kernels_roofline import PEAKS, Peak, floor
from kernels_pallas import dispatch, formats
from kernels_pallas.compress import pallas_gpu as compress_gpu
from kernels_pallas.compress import tpu_plan
from kernels_pallas.index_select import pallas_gpu as select_gpu
from kernels_pallas.sparse_attention import gpu_forward, tpu_rows

ROOT = Path(__file__).resolve().parent.parent


def test_help_names_its_options_and_exits_well():
    done = subprocess.run(
        [sys.executable, "benchmarks/kernels.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in ("--roofline", "--record", "--png", "--doors", "agrees with XLA"):
        assert word in done.stdout


# ---- arithmetic ----


def test_cost_of_decoding_attention_equals_hand_count():
    """One query of 64 heads against 512 packed entries of 288 bytes and 128 window rows."""
    cost = Call("sparse_attention", 1, 1, 1 << 20, "packed").cost()
    queries_and_outputs = 2 * 64 * 512 * 2
    window = 129 * 512 * 2
    assert cost.bytes == queries_and_outputs + window + 4 * (64 + 512) + 512 * 288
    assert cost.gathered == cost.bytes
    assert cost.flops == 4 * 64 * 512 * 640


def test_cost_of_prefill_counts_shared_rows_once():
    """4,096 queries name 2M rows of a pool that has 64k."""
    cost = Call("sparse_attention", 1, 4096, 1 << 16, "bf16").cost()
    assert cost.gathered - cost.bytes == (4096 * 512 - 65536) * 1024
    assert cost.flops == 4 * 4096 * 64 * 512 * 640


def test_cost_of_training_adds_five_products_to_two():
    forward = Call("sparse_attention", 1, 64, 4096, "bf16").cost()
    both = Call("sparse_attention backward", 1, 64, 4096, "bf16").cost()
    assert 2 * both.flops == 7 * forward.flops
    assert both.bytes - forward.bytes > 4 * 4096 * 512  # the pool's f32 cotangent


def test_cost_of_scoring_equals_hand_count():
    whole = Call("index_select", 1, 1, 1 << 20, "packed", "select").cost()
    among = Call("index_select", 1, 1, 1 << 20, "packed", "among").cost()
    assert whole.flops == 2 * 32 * 128 * (1 << 20)
    assert among.flops == 2 * 32 * 128 * 16384
    fixed = 32 * 129 * 2 + 4 * 513
    assert whole.bytes == fixed + 68 * (1 << 20)
    assert among.bytes == fixed + 4 * 2048 + 68 * 16384


def test_bytes_of_an_entry_are_the_released_ones():
    assert entry_bytes(512, "packed", formats.MAIN) == 288
    assert entry_bytes(128, "packed", formats.INDEX) == 68
    assert entry_bytes(512, "bf16", formats.MAIN) == 1024


@pytest.mark.parametrize(
    ("cost", "seconds", "gathered", "memory_bound"),
    [
        (Cost(2_000_000_000, 2_000_000_000, 10**12), 0.02, 0.02, True),
        (Cost(2_000_000_000, 8_000_000_000, 10**13), 0.1, 0.1, False),
        (Cost(2_000_000_000, 20_000_000_000, 10**13), 0.1, 0.2, False),
    ],
)
def test_floor_is_the_larger_of_moving_and_multiplying(cost, seconds, gathered, memory_bound):
    found = floor(cost, Peak(gb_s=100, tflop_s=100))
    assert (found.seconds, found.gathered) == pytest.approx((seconds, gathered))
    assert found.memory_bound == memory_bound


def test_roofline_prints_every_call_and_draws(tmp_path, capsys):
    png = tmp_path / "roofline.png"
    assert kernels.main(roofline=("v5e", "h200"), png=png) == 0
    printed = capsys.readouterr().out
    assert "nothing here was measured" in printed
    for call in released():
        assert call.name in printed
    # 8 x 1,024 keys of 68 bytes each and their products: 71.3 MB at 4,800 GB/s.
    (line,) = [line for line in printed.splitlines() if "select B=1 T=1 P=1,048,576 packed" in line]
    assert f"{1e6 * 71.3e6 / (PEAKS['h200'].gb_s * 1e9):.1f} m" in line
    assert png.read_bytes().startswith(b"\x89PNG")


# ---- the comparison on a CPU ----


@pytest.fixture(scope="module")
def cpu_calls():
    return [call for call in tiny() if call.door in kernels_cpu.NUMPY and call.kind != "make"]


def test_numpy_agrees_with_xla_and_is_timed_beside_it(capsys):
    assert kernels.main(sizes="tiny", repeat=1) == 0
    printed = capsys.readouterr().out
    assert "Measured on this CPU" in printed
    assert "disagrees" not in printed
    assert "numpy / xla" in printed


@pytest.mark.parametrize("door", kernels_cpu.NUMPY)
def test_wrong_function_is_not_timed(cpu_calls, door):
    for call in (call for call in cpu_calls if call.door == door):

        def wrong(*args, call=call):
            first, *rest = call.function("xla")(*args)
            moved = jnp.roll(first, 1, axis=0) if first.shape[0] > 1 else first[:, ::-1]
            return (moved, *rest)

        seconds, faults = kernels_cpu.compare(call, repeat=1, xla=wrong)
        assert seconds == {}
        assert list(faults) == ["xla"]


def test_selection_that_repeats_an_entry_disagrees(cpu_calls):
    (call,) = [call for call in cpu_calls if call.kind == "select"]

    def repeats(*args):
        (selection,) = call.function("xla")(*args)
        return (selection.at[..., 1].set(selection[..., 0]),)

    assert "xla" in kernels_cpu.compare(call, repeat=1, xla=repeats)[1]


# ---- the comparison on a device, shown with interpreted kernels ----


def test_disagreement_is_told_from_agreement():
    x = jnp.array([1.0, -2.0], jnp.float32)
    assert differences((x,), (x * (1 + 1e-6),), exact_f32=True) == (pytest.approx(1e-6, rel=0.2), True)
    assert differences((x,), (x * 1.01,), exact_f32=True)[1] is False
    assert differences((x.at[0].set(jnp.nan),), (x,), exact_f32=True)[1] is False
    assert differences((x,), (x[:1],), exact_f32=True)[1] is False
    one = jnp.arange(4)
    assert differences((one,), (one.at[0].set(9),), exact_f32=True) == (0.25, False)


def test_repeated_calls_all_happen():
    """Ten calls take the time of ten: a callback counts them."""
    counted = []

    def function(x, last):
        jax.debug.callback(lambda: counted.append(1))
        return x + last

    result = repeat_call(function, 10)(jnp.float32(1), jnp.float32(2))
    jax.effects_barrier()
    assert (float(result), len(counted)) == (3.0, 10)


def test_time_of_a_call_grows_with_its_work():
    a, b = jnp.ones((16, 16)), jnp.ones((512, 512))
    small, large = (seconds_per_call(lambda a, b: a @ b, (x, x), repeat=3) for x in (a, b))
    assert 0 < small < large


@pytest.fixture
def broken(monkeypatch):
    """Calls of "pallas_gpu" give XLA's results, spoilt on demand: what `measure` is to see through."""
    spoil = {"by": 0.0}
    original = Call.function

    def function(self, implementation, *, interpret=False):
        f = original(self, "xla")
        if implementation == "xla":
            return f
        return lambda *args: jax.tree.map(
            lambda a: a + jnp.asarray(spoil["by"] * jnp.max(jnp.abs(a)), a.dtype), f(*args)
        )

    monkeypatch.setattr(Call, "function", function)
    return spoil


@pytest.mark.parametrize("call", [tiny()[0], tiny()[2], tiny()[5]], ids=lambda call: call.door)
def test_wrong_kernel_is_seen_and_not_timed(broken, call):
    assert measure(call, "pallas_gpu", repeat=1).proven
    broken["by"] = 1.0
    found = measure(call, "pallas_gpu", repeat=1)
    assert (found.proven, found.seconds, found.others) == (False, 0.0, {})


def _record(tmp_path, calls, changes=None):
    measurements = [Measurement(call.name, "pallas_gpu", 1e-3, 0.0, True) for call in calls]
    measurements = [dataclasses.replace(m, **(changes or {}).get(i, {})) for i, m in enumerate(measurements)]
    tiles: dict[Door, dict[str, int]] = {"sparse_attention": {"rows": 32}, "index_select": {"stages": 2}}
    ceilings = Ceilings(1e12, 1e14)
    return kernels_record.write(tmp_path, "NVIDIA H200", "pallas_gpu", calls, measurements, ceilings, tiles, {})


def test_record_is_read_by_dispatch(tmp_path, monkeypatch):
    path = _record(tmp_path, tiny())
    assert path.name == "nvidia_h200.json"
    monkeypatch.setattr(dispatch, "TUNED", tmp_path)
    dispatch.records.cache_clear()
    try:
        (record,) = dispatch.records().values()
        assert record["device_kind"] == "NVIDIA H200"
        assert record["sparse_attention"] == {"forward": {"rows": 32}}
        assert record["index_select"] == {"constants": {"stages": 2}}
        assert len(record["measurements"]) == len(tiny())
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [type("Device", (), {"device_kind": "NVIDIA H200"})])
        assert dispatch.preferred() == ("pallas_gpu", "xla")
    finally:
        dispatch.records.cache_clear()


def test_record_of_a_disagreement_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"sparse_attention B=2 T=3 P=16 f32: error 0\.5"):
        _record(tmp_path, tiny(), {0: {"agrees": False, "error": 0.5}})
    assert list(tmp_path.iterdir()) == []


def test_record_without_a_proven_call_of_every_door_is_not_written(tmp_path):
    with pytest.raises(ValueError, match="no proven call of compress"):
        _record(tmp_path, tiny(), {len(tiny()) - 1: {"refused": "too small", "agrees": False}})
    with pytest.raises(ValueError, match="no proven call of index_select"):
        _record(tmp_path, tiny(("sparse_attention",)))
    assert list(tmp_path.iterdir()) == []


def test_refused_call_does_not_stand_in_the_way(tmp_path):
    select = next(i for i, call in enumerate(tiny()) if call.kind == "make")
    assert _record(tmp_path, tiny(), {select: {"refused": "too many", "agrees": False}}).exists()


@pytest.fixture
def tunable():
    """(what is tuned, how a kernel would see the size in force)."""
    found = Tunable("compress", "constants", ({"K4": 16}, {"K4": 32}, {"K4": 64}))
    return found, lambda: dispatch.tuned("compress", "K4", 16)


def test_tile_sizes_are_chosen_by_time_among_those_that_agree(tunable, monkeypatch):
    """Of three sizes the fastest is wrong; the default comes back afterwards."""
    found, in_force = tunable
    monkeypatch.setitem(kernels_record.CANDIDATES, ("pallas_gpu", "compress"), found)

    def measured(call, implementation, **_):
        return Measurement(call.name, implementation, seconds=1 / in_force(), agrees=in_force() != 64)

    monkeypatch.setattr(kernels_record, "measure", measured)
    chosen, tried = kernels_record.choose("pallas_gpu", "compress", tiny(("compress",)), repeat=1)
    assert chosen == {"K4": 32}
    assert [("fault" in entry) for entry in tried] == [False, False, True]
    assert in_force() == 16
    with kernels_record.using_all("pallas_gpu", {"compress": chosen}):
        assert in_force() == 32


def test_call_that_fails_is_a_fault_and_not_the_end(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("shared memory exhausted")

    monkeypatch.setattr(Call, "function", lambda *_, **__: fails)
    found = measure(tiny()[0], "pallas_gpu", repeat=1)
    assert (found.wrong, found.proven) == (True, False)
    assert "shared memory exhausted" in found.fault


def test_record_needs_a_device():
    with pytest.raises(SystemExit, match="this is a CPU"):
        kernels.main(record=True)


def test_unknown_call_is_an_error():
    with pytest.raises(SystemExit, match="no call"):
        kernels.main(only="nonsense")


def test_device_table_shows_shares_of_measured_ceilings(broken, capsys):
    """The whole way of a device run, with XLA's results in the place of the kernels'."""
    run = functools.partial(
        kernels.main, sizes="tiny", implementation="pallas_gpu", interpret=True, repeat=1, only="index_select select"
    )
    assert run() == 0
    printed = capsys.readouterr().out
    assert "index_select select B=2 T=3 P=32 f32" in printed
    assert "Ceilings measured in this run" in printed
    broken["by"] = 1.0
    assert run() == 1
    assert "DISAGREES" in capsys.readouterr().out


# Where a kernel takes a constant from, and its default there.
DEFAULTS = {
    ("pallas_gpu", "index_select"): {"stages": select_gpu._STAGES, "programs": select_gpu._PROGRAMS},
    ("pallas_gpu", "compress"): {"block_entries": compress_gpu.BLOCK_ENTRIES, "warps": compress_gpu.WARPS},
    ("pallas_tpu", "sparse_attention"): {"unroll": tpu_rows.UNROLL},
    ("pallas_tpu", "compress"): {"block_bytes": tpu_plan.BLOCK_BYTES},
}


def test_candidates_are_tiles_or_constants_whose_default_is_among_them():
    for (implementation, door), tunable in kernels_record.CANDIDATES.items():
        assert any(call.for_tuning for call in released((door,)))
        if tunable.key == "constants":
            assert DEFAULTS[implementation, door] in tunable.choices
        else:
            assert all(gpu_forward.Tiles(**chosen) for chosen in tunable.choices)


@pytest.mark.parametrize(("implementation", "door"), DEFAULTS)
def test_kernels_ask_for_every_constant_that_is_tuned(implementation, door, monkeypatch):
    asked = set()

    def tuned(about, name, default):
        asked.add((about, name))
        return default

    for room in (select_gpu, compress_gpu, tpu_rows, tpu_plan):
        monkeypatch.setattr(room, "tuned", tuned)
    jax.clear_caches()
    for call in tiny((door,)):
        function = call.function(implementation, interpret=True)
        jax.eval_shape(function, *call.inputs(0))
    assert asked >= {(door, name) for name in DEFAULTS[implementation, door]}
