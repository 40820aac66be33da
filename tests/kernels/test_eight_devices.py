"""The doors under shard_map on eight (fake) devices: rows of the batch on four, heads or channels on two.

In a process of its own for each implementation, because the number of devices is fixed early.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from kernels_pallas import compress, index_select, sparse_attention

implementation = sys.argv[1]
chosen = dict(implementation=implementation, interpret=implementation != "xla")
mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
rng = np.random.default_rng(0)
f = lambda *shape: rng.standard_normal(shape).astype("f")
q, rows, sink, pool = f(4, 2, 4, 16), f(4, 6, 16), f(4), f(2, 4, 9, 16)
first = np.array([[1, 2], [0, 0], [3, 4], [2, 2]], "i")
iq, w, keys = np.rint(f(4, 2, 2, 8) * 2), np.rint(f(4, 2, 2) * 2), np.rint(f(2, 4, 9, 8))
visible = np.array([[9, 4], [1, 0], [7, 8], [9, 9]], "i")
c, z = f(4, 5, 16), f(4, 5, 16)
half, phase, count = f(4, 1, 16), np.array([0, 1, 0, 1], "i"), np.array([5, 5, 3, 0], "i")
to_o = f(4, 2, 4, 16)

def everything(q, rows, sink, pool, first, iq, w, keys, visible, c, z, half, phase, count, to_o):
    selection, _ = index_select(iq, w, keys, 1, visible, topk=3, **chosen)
    attend = lambda q, rows, sink, pool: sparse_attention(q, rows, first, sink, pool, 1, selection, window=4, scale=0.3, **chosen)
    (o, lse), pull = jax.vjp(attend, q, rows, sink, pool)
    dq, drows, dsink, dpool = pull((to_o, jnp.ones_like(lse)))
    entries, *_ = compress(c, z, half, half, phase, count, ratio=2, **chosen)
    return selection, o, lse, dq, drows, dsink, dpool, entries

args = (q, rows, sink, pool, first, iq, w, keys, visible, c, z, half, phase, count, to_o)
heads = P("data", None, "model")
row, stack = P("data"), P(None, "data")
specs = (heads, row, P("model"), stack, row, row, row, stack, row, heads, heads, heads, row, row, heads)

def shard(*args):
    selection, o, lse, dq, drows, dsink, dpool, entries = everything(*args)
    # Rows are shared by the heads of both devices, the sinks by all rows of the batch.
    return selection, o, lse, dq, jax.lax.psum(drows, "model"), jax.lax.psum(dsink, "data"), jax.lax.psum(dpool, "model"), entries

out = (row, heads, heads, heads, row, P("model"), stack, heads)
sharded = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))(*args)
chosen = dict(implementation="xla")
for name, many, one in zip("selection o lse dq drows dsink dpool entries".split(), sharded, jax.jit(everything)(*args)):
    many, one = np.asarray(many), np.asarray(one)
    if name == "entries":
        for b in range(4):
            n = (phase[b] + count[b]) // 2
            np.testing.assert_allclose(many[b, :n], one[b, :n], rtol=2e-6, atol=2e-6, err_msg=name)
    elif name == "selection":
        np.testing.assert_array_equal(many, one)
    else:
        np.testing.assert_allclose(many, one, rtol=2e-5, atol=5e-6, err_msg=name)
assert len(sharded[1].sharding.device_set) == 8
print("equal")
"""


@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu", "pallas_gpu"])
def test_doors_give_the_same_on_eight_devices(implementation: str) -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "NPROC": "32"}
    result = subprocess.run(
        [sys.executable, "-c", _SCRIPT, implementation],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "equal"
