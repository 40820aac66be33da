"""What is compiled: every operation, forward and backward, at the released sizes, as data.

Sizes of DeepSeek-V4.1-Flash: 64 heads of 512, a window of 128 rows, 512 selected entries; index queries of 32 heads of 128,
2,048 candidate blocks of 8 entries. A case says what is called with how many queries against how many pool entries, how those
are stored, and how many temporary bytes the compiled program may take. Three pools stand in a stack, so that a program that cuts
one out of it is seen to copy it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import compress, compress_entries, empty_half, formats, index_select, sparse_attention, storage
from kernels_pallas.formats import Format
from kernels_pallas.storage import LANES, Entries, Packed
from tests.aot.targets import Target, device_mesh

HEADS, WIDTH, TOPK, WINDOW = 64, 512, 512, 128
INDEX_HEADS, INDEX_WIDTH, BLOCKS, BLOCK, ROPE = 32, 128, 2048, 8, 64
K4, K64, M1 = 1 << 12, 1 << 16, 1 << 20
MIB: Final = 1 << 20

Program = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]  # function, arguments, which of them are donated


@dataclasses.dataclass(frozen=True)
class Case:
    """One call to compile.

    family: the table it belongs to, and the process that compiles it.
    call: which call of that family.
    entries: P, 0 without a pool. stack: G, 0 for three (one where that would be 64M entries and more). too_large_for: targets
        whose memory cannot hold the arguments.
    """

    family: str
    call: str
    batch: int
    tokens: int
    entries: int = 0
    storage: str = ""
    stack: int = 0
    too_large_for: tuple[str, ...] = ()

    @property
    def pools(self) -> int:
        """G."""
        return self.stack or (3 if self.batch * self.entries < 64 * M1 else 1)

    @property
    def id(self) -> str:
        """A name for processes, tables and failures."""
        parts = (self.call, f"B={self.batch}", f"T={self.tokens}")
        parts += (f"P={self.entries:,}",) if self.entries else ()
        return " ".join((*parts, self.storage)).strip()

    def program(self, target: Target, implementation: str | None = None) -> Program:
        """What to compile for the target (implementation: another than the one meant for it)."""
        return _FAMILIES[self.family](self, target, implementation or target.implementation)

    def allowed_temp(self) -> int:
        """Temporary bytes that the operation may take, whatever compiles it: see `_ALLOWED`."""
        return _ALLOWED[self.family](self)

    def expected(self, target: Target) -> str:
        """The verdict that a run has to give: see `REFUSED`."""
        if target.name in self.too_large_for:
            return "no room"
        refused = any(refusal.names(self, target) for refusal in REFUSED)
        return "refused" if refused else "compiles"


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Cases that a kernel is known to refuse, by its `check`."""

    family: str
    targets: tuple[str, ...]
    of: Callable[[Case], bool]

    def names(self, case: Case, target: Target) -> bool:
        """Whether the case is one of them."""
        return case.family == self.family and target.name in self.targets and self.of(case)


# ---- arguments ----


def _array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(jnp.bfloat16, *shape)


def _int32(*shape: int) -> jax.ShapeDtypeStruct:
    return _array(jnp.int32, *shape)


def _stored(case: Case, target: Target, width: int, fmt: Format) -> Any:
    """A stack of pools as the target holds it: TPUs in rows of 128 numbers or units of 512 bytes, wherever rows are gathered."""
    lead = (case.pools, case.batch)
    on_tpu = target.platform == "tpu"
    if case.storage == "bf16":
        if on_tpu and width > LANES:
            return _bf16(*lead, case.entries, width // LANES, LANES)
        return _bf16(*lead, case.entries, width)
    codes, scales = case.entries * width // 2, case.entries * width // fmt.group
    if on_tpu:
        unit = storage.UNIT
        shapes = ((*lead, codes // unit, 4, LANES), (*lead, scales // unit, 4, LANES))
    else:
        shapes = ((*lead, case.entries, width // 2), (*lead, case.entries, width // fmt.group))
    return Packed(_array(jnp.uint8, *shapes[0]), _array(jnp.uint8, *shapes[1]), width, fmt)  # type: ignore[arg-type]


def _attention_args(case: Case, target: Target) -> tuple[Any, ...]:
    b, t = case.batch, case.tokens
    args = (_bf16(b, t, HEADS, WIDTH), _bf16(b, WINDOW + t, WIDTH), _int32(b, t), _array(jnp.float32, HEADS))
    if not case.entries:
        return args
    return (*args, _stored(case, target, WIDTH, formats.MAIN), _int32(), _int32(b, t, TOPK))


def _index_args(case: Case, target: Target) -> tuple[Any, ...]:
    b, t = case.batch, case.tokens
    args = (_bf16(b, t, INDEX_HEADS, INDEX_WIDTH), _bf16(b, t, INDEX_HEADS))
    return (*args, _stored(case, target, INDEX_WIDTH, formats.INDEX), _int32(), _int32(b, t))


# ---- programs ----


def _attention(case: Case, target: Target, implementation: str) -> Program:
    attend = functools.partial(
        sparse_attention,
        window=WINDOW,
        scale=WIDTH**-0.5,
        causal=case.call != "draft block",
        implementation=implementation,
    )
    args = _attention_args(case, target)
    if target.mesh is not None:
        return _sharded_attention(attend, args, target)
    if case.call == "write, attend":
        return _written(attend), (*args, _new_entries(args[4], case), _int32()), (4,)
    return attend, args, ()


def _backward(case: Case, target: Target, implementation: str) -> Program:
    attend = functools.partial(
        sparse_attention, window=WINDOW, scale=WIDTH**-0.5, causal=True, implementation=implementation
    )

    def cotangents(do_BTNH: jax.Array, dlse_BTN: jax.Array, *args: Any) -> tuple[Any, ...]:
        q, window, first, sink, *pool = args
        if not pool:
            vjp = jax.vjp(lambda q, window, sink: attend(q, window, first, sink), q, window, sink)[1]
            return vjp((do_BTNH, dlse_BTN))
        if isinstance(pool[0], Packed):  # packed entries have no gradient
            vjp = jax.vjp(lambda q, window, sink: attend(q, window, first, sink, *pool), q, window, sink)[1]
        else:
            vjp = jax.vjp(
                lambda q, window, sink, entries: attend(q, window, first, sink, entries, *pool[1:]),
                *(q, window, sink, pool[0]),
            )[1]
        return vjp((do_BTNH, dlse_BTN))

    args = _attention_args(case, target)
    given = (args[0], _array(jnp.float32, *args[0].shape[:3]))
    if case.call == "backward, added up":

        def accumulate(total: jax.Array, *rest: Any) -> tuple[Any, ...]:
            dq, dwindow, dsink, dpool = cotangents(*rest)
            return total + dpool.astype(jnp.float32), dq, dwindow, dsink

        return accumulate, (_array(jnp.float32, *args[4].shape), *given, *args), (0,)
    return cotangents, (*given, *args), ()


def _index(case: Case, target: Target, implementation: str) -> Program:
    options: dict[str, Any] = {"topk": TOPK, "implementation": implementation}
    args = _index_args(case, target)
    if case.call == "make candidates":
        options |= {"block_size": BLOCK, "make_candidates": BLOCKS}
    if case.call != "among candidates":
        select = functools.partial(index_select, **options)
        return _sharded_index(select, args, target) if target.mesh is not None else (select, args, ())

    def among(candidates_BTC: jax.Array, *args: Any) -> Any:
        return index_select(*args, block_size=BLOCK, candidates_BTC=candidates_BTC, **options)[0]

    return among, (_int32(case.batch, case.tokens, BLOCKS), *args), ()


def _compress(case: Case, target: Target, implementation: str) -> Program:
    """ "pool m=2": values only; "entries m=4 overlap": on to the entry as it is stored; "gradient": what training adds."""
    del target
    what, ratio_text, *rest = case.call.split()
    ratio, overlap = int(ratio_text.removeprefix("m=")), "overlap" in rest
    b, t, f32 = case.batch, case.tokens, jnp.float32
    width = WIDTH * (2 if overlap else 1)
    if ratio == 1:
        arrays: tuple[Any, ...] = (_bf16(b, t, width), None, None, None, _int32(b), _int32(b))
    else:
        half = jax.eval_shape(lambda: empty_half(b, WIDTH, ratio, overlap))
        rows = _array(f32, b, t, width)
        arrays = (rows, rows, *half, _int32(b), _int32(b))
    options: dict[str, Any] = {"ratio": ratio, "overlap": overlap, "implementation": implementation}
    if what == "pool":
        return functools.partial(compress, **options), arrays, ()
    options |= {"eps": 1e-20, "dtype": jnp.bfloat16, "storage": {"packed": "packed", "bf16": "rounded"}[case.storage]}
    bias = () if ratio < 4 else (_array(f32, ratio, width),)
    turns = _array(f32, b, -(-t // ratio), ROPE // 2)
    norm = _array(jnp.bfloat16, WIDTH)

    def entries(
        c: Any,
        z: Any,
        c_half: Any,
        z_half: Any,
        phase: Any,
        count: Any,
        norm: Any,
        cos: Any,
        sin: Any,
        bias: Any = None,
    ) -> Any:
        return compress_entries(c, z, c_half, z_half, phase, count, norm, (cos, sin), bias_MH=bias, **options)

    if what == "entries":
        return entries, (*arrays, norm, turns, turns, *bias), ()

    def gradient(c: Any, z: Any, *rest: Any) -> Any:
        made, pull = jax.vjp(lambda c, z: entries(c, z, *rest)[:2], c, z)
        return pull(jax.tree.map(jnp.ones_like, made))

    return gradient, (*arrays, norm, turns, turns, *bias), ()


def _new_entries(pool: Any, case: Case) -> Any:
    """One new entry per row and query, in the shape of the pool's own pieces (packed: as many whole units as they take)."""
    if isinstance(pool, Packed):
        return tuple(_array(a.dtype, 1, case.batch, 1, *a.shape[3:]) for a in (pool.codes, pool.scales))
    return (_array(pool.dtype, 1, case.batch, 1, *pool.shape[3:]),)


def _written(attend: Callable[..., Any]) -> Callable[..., Any]:
    """A step as a cache sees it: new entries go into the donated pool, and the queries read it."""

    def step(q: Any, window: Any, first: Any, sink: Any, pool: Entries, group: Any, selection: Any, new: Any, at: Any):
        def put(a: jax.Array, piece: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(a, piece, (group, 0, at) + (0,) * (a.ndim - 3))

        if isinstance(pool, Packed):
            pool = dataclasses.replace(pool, codes=put(pool.codes, new[0]), scales=put(pool.scales, new[1]))
        else:
            pool = put(pool, new[0])
        return pool, attend(q, window, first, sink, pool, group, selection)

    return step


# ---- many devices: rows over "data", heads over "model"; every device runs the kernel on its share ----


def _place(target: Target, args: tuple[Any, ...], specs: tuple[Any, ...]) -> tuple[Any, ...]:
    mesh = device_mesh(target)
    return tuple(
        jax.tree.map(
            lambda x, spec=spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), arg
        )
        for arg, spec in zip(args, specs, strict=True)
    )


def _sharded_attention(attend: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Program:
    q, rows = P("data", None, "model", None), P("data")
    specs = (q, rows, rows, P("model"), P(None, "data"), P(), rows)
    function = jax.shard_map(
        attend, mesh=device_mesh(target), in_specs=specs, out_specs=(q, P("data", None, "model")), check_vma=False
    )
    return function, _place(target, args, specs), ()


def _sharded_index(select: Callable[..., Any], args: tuple[Any, ...], target: Target) -> Program:
    """Every score sums over all index heads, so those stay together: rows alone are spread."""
    rows = P("data")
    specs = (rows, rows, P(None, "data"), P(), rows)
    function = jax.shard_map(
        lambda *args: select(*args)[0], mesh=device_mesh(target), in_specs=specs, out_specs=rows, check_vma=False
    )
    return function, _place(target, args, specs), ()


_FAMILIES: Final[dict[str, Callable[[Case, Target, str], Program]]] = {
    "sparse_attention": _attention,
    "sparse_attention backward": _backward,
    "index_select": _index,
    "compress": _compress,
}


# ---- temporary bytes ----


def _queries(case: Case) -> int:
    """Bytes of a call's bf16 queries, which is also what its outputs take."""
    return 2 * case.batch * case.tokens * HEADS * WIDTH


def _allowed_attention(case: Case) -> int:
    # Queries or outputs in another layout, partial results of the heads of few queries. Nothing of the pool: P does not occur.
    return 24 * MIB + _queries(case)


def _allowed_backward(case: Case) -> int:
    # The same, and cotangents of the whole stack, which are summed in f32 before they are rounded to the stack's bf16. They alone
    # grow with P.
    return 32 * MIB + _queries(case) + 4 * case.pools * case.batch * case.entries * WIDTH


def _allowed_index(case: Case) -> int:
    # What several programs found before their finds are merged, a few times K (and C) per query: score and number of each. It
    # grows with P for the few queries that are spread over a whole device, as far as one score and number per entry.
    kept = TOPK + (BLOCKS if case.call == "make candidates" else 0)
    return 64 * MIB + 32 * case.batch * case.tokens * kept + 8 * case.batch * min(case.tokens, 4) * case.entries


def _allowed_compress(case: Case) -> int:
    # The gradient pools again, in XLA.
    rows = 4 * case.batch * case.tokens * WIDTH
    return 8 * MIB + (4 * rows if case.call.startswith("gradient") else 0)


_ALLOWED: Final[dict[str, Callable[[Case], int]]] = {
    "sparse_attention": _allowed_attention,
    "sparse_attention backward": _allowed_backward,
    "index_select": _allowed_index,
    "compress": _allowed_compress,
}


# ---- the list ----

REFUSED: Final[tuple[Refusal, ...]] = ()


def _list() -> tuple[Case, ...]:
    attention = functools.partial(Case, "sparse_attention")
    backward = functools.partial(Case, "sparse_attention backward")
    index = functools.partial(Case, "index_select")
    pooling = functools.partial(Case, "compress")
    both = ("bf16", "packed")
    return (
        *(attention("attend", 1, 1, p, s) for p, s in ((K4, "bf16"), (M1, "bf16"), (M1, "packed"))),
        attention("attend", 64, 1, K4, "packed"),
        attention("attend", 64, 1, M1, "bf16", too_large_for=("v5e", "v6e")),
        attention("attend", 64, 1, M1, "packed", too_large_for=("v5e",)),
        *(attention("write, attend", 64, 1, K64, s) for s in both),
        *(attention("attend", 1, 4096, p, s) for p, s in ((K64, "bf16"), (M1, "packed"))),
        attention("attend", 64, 64, K64, "packed"),
        *(attention("window only", b, t) for b, t in ((64, 1), (1, 4096))),
        attention("draft block", 64, 5),
        backward("backward", 1, 4096, M1, "bf16", stack=1),
        backward("backward", 64, 64, K4, "bf16", stack=1),
        backward("backward, added up", 1, 4096, K64, "bf16"),
        backward("backward", 1, 4096),
        *(index("select", 1, 1, p, s) for p, s in ((K4, "bf16"), (M1, "bf16"), (M1, "packed"))),
        index("select", 64, 1, K64, "bf16"),
        index("select", 1, 4096, K64, "bf16"),
        index("make candidates", 1, 1, M1, "packed"),
        index("make candidates", 64, 1, K64, "bf16"),
        index("make candidates", 1, 4096, M1, "packed"),
        *(index("among candidates", 1, 1, M1, s) for s in both),
        *(index("among candidates", 64, 1, p, s) for p, s in ((K64, "bf16"), (M1, "packed"))),
        index("among candidates", 1, 4096, M1, "packed"),
        pooling("pool m=2", 1, 4096),
        pooling("entries m=2", 64, 1, storage="packed"),
        pooling("entries m=2", 64, 64, storage="bf16"),
        pooling("entries m=2", 1, 4096, storage="packed"),
        pooling("entries m=1", 1, 4096, storage="packed"),
        pooling("entries m=4 overlap", 1, 4096, storage="bf16"),
        pooling("entries m=128", 1, 4096, storage="bf16"),
        pooling("gradient m=2", 1, 4096, storage="bf16"),
    )


CASES: Final = _list()
MESH_CASES: Final = (
    Case("sparse_attention", "attend", 256, 1, K64, "bf16"),
    Case("sparse_attention", "attend", 256, 1, K64, "packed"),
    Case("index_select", "select", 256, 1, K64, "packed"),
)
