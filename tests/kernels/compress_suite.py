"""What every implementation of compression must do; a test module subclasses it with an implementation's name.

The reference is plain NumPy in float64, one entry at a time over a whole sequence: it knows no chunks and no carried rows. Rows
that are not real are NaN everywhere here, so that whatever reads one shows.

"Exact" inputs have weights of 1 and 1/2, small whole values and rotations by powers of two: every product and sum is exact in
f32, so results must agree bit for bit however a compiler contracts or orders them.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from csa2_jax import formats, rope
from csa2_jax.layers import inverse_rms
from csa2_jax.numerics import Numerics
from kernels_pallas import Compressed, compress, compress_entries, empty_half, storage

EPS = 1e-20
Halves = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way of compressing: m, overlap, slot bias."""

    ratio: int
    overlap: bool = False
    biased: bool = False

    @property
    def lead(self) -> int:
        return self.ratio if self.overlap else 0

    @property
    def options(self) -> dict[str, Any]:
        return {"ratio": self.ratio, "overlap": self.overlap}

    def rows(self, width: int) -> int:
        """Channels of a row of C."""
        return width * (2 if self.overlap else 1)


CSA2, CSA, HCA = Kind(2), Kind(4, overlap=True, biased=True), Kind(128, biased=True)
KINDS = {"m=2": CSA2, "m=4 overlap": CSA, "m=128": HCA}


def pool_reference(
    c: np.ndarray, z: np.ndarray, kind: Kind, bias: np.ndarray | None, width: int, before: tuple | None = None
) -> np.ndarray:
    """Entries [P, H] float64 of one sequence that starts at a group's first token; `before` is (C, Z) of the group before it."""
    m = kind.ratio
    c, z = np.asarray(c, np.float64), np.asarray(z, np.float64)
    if bias is not None:
        z = z + np.resize(np.asarray(bias, np.float64), z.shape)
    entries = []
    for j in range(len(c) // m):
        values, logits = c[j * m : (j + 1) * m], z[j * m : (j + 1) * m]
        if kind.overlap:
            values, logits = values[:, width:], logits[:, width:]
            if j:
                previous = c[(j - 1) * m : j * m, :width], z[(j - 1) * m : j * m, :width]
            else:
                previous = (np.zeros((m, width)), np.full((m, width), -np.inf)) if before is None else before
            values, logits = np.concatenate([previous[0], values]), np.concatenate([previous[1], logits])
        entry = np.empty(width)
        for h in range(width):
            p = np.exp(logits[:, h] - logits[:, h].max())
            entry[h] = p @ values[:, h] / p.sum()
        entries.append(entry)
    return np.array(entries).reshape(-1, width)


def bits(a: Any) -> np.ndarray:
    """The bits of an array, so that -0 and NaN count as what they are."""
    a = np.asarray(a)
    return a.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize])


def assert_same_bits(found: Any, expected: Any, where: np.ndarray | None = None) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        a, b = bits(a), bits(b)
        if where is not None:
            a, b = (x.reshape(*where.shape, -1)[where] for x in (a, b))
        np.testing.assert_array_equal(a, b)


@dataclasses.dataclass
class Sequences:
    """Whole sequences [B, L] of one kind, and calls cut out of them."""

    kind: Kind
    width: int
    c: np.ndarray
    z: np.ndarray
    bias: np.ndarray | None

    @classmethod
    def random(cls, seed: int, kind: Kind, batch: int, length: int, width: int) -> Sequences:
        rng = np.random.default_rng(seed)
        shape = (batch, length, kind.rows(width))
        c, z = (2 * rng.standard_normal((2, *shape))).astype(np.float32)
        bias = rng.standard_normal((kind.ratio, shape[2])).astype(np.float32) if kind.biased else None
        return cls(kind, width, c, z, bias)

    @classmethod
    def exact(cls, seed: int, kind: Kind, batch: int, length: int, width: int) -> Sequences:
        """One slot of each group and channel wins, without overlap sometimes two."""
        made = cls.random(seed, kind, batch, length, width)
        rng = np.random.default_rng(seed)
        made.c = rng.integers(-8, 9, made.c.shape).astype(np.float32) / 4
        groups = -(-length // kind.ratio)
        order = rng.random((batch, groups, kind.ratio, made.c.shape[2])).argsort(axis=2).argsort(axis=2)
        winners = 1 if kind.overlap else rng.integers(1, 3, (batch, groups, 1, made.c.shape[2]))
        z = np.where(order < winners, 0, -256).astype(np.float32)
        made.z = z.reshape(batch, -1, made.c.shape[2])[:, :length]
        if made.bias is not None:
            made.bias = rng.integers(-9, 10, made.bias.shape).astype(np.float32) / 4
            made.z -= np.resize(made.bias, (groups * kind.ratio, made.c.shape[2]))[:length]
        return made

    @functools.cached_property
    def biased_z(self) -> np.ndarray:
        return self.z if self.bias is None else self.z + np.resize(self.bias, self.z.shape[1:])

    def halves(self, at: np.ndarray) -> Halves:
        """What is carried after `at` tokens of each row; NaN where nothing real is."""
        out = tuple(np.array(a) for a in empty_half(len(at), self.width, **self.kind.options))
        for full, half in zip((self.c, self.biased_z), out, strict=True):
            for b, position in enumerate(at):
                open_from = position - position % self.kind.ratio
                half[b, self.kind.lead :] = np.nan
                for row in range(half.shape[1]):
                    t = open_from - self.kind.lead + row
                    if 0 <= t < position:
                        half[b, row] = full[b, t]
        return out

    def chunk(self, at: np.ndarray, count: np.ndarray, tokens: int) -> Halves:
        """C and Z of the next `count` tokens; NaN behind them."""
        out = np.full((2, len(at), tokens, self.c.shape[2]), np.nan, np.float32)
        for b, (start, n) in enumerate(zip(at, count, strict=True)):
            out[0, b, :n], out[1, b, :n] = self.c[b, start : start + n], self.z[b, start : start + n]
        return tuple(out)

    def entries(self) -> np.ndarray:
        """All entries [B, P, H] of the reference."""
        return np.stack(
            [pool_reference(c, z, self.kind, self.bias, self.width) for c, z in zip(self.c, self.z, strict=True)]
        )


def tables(seed: int, batch: int, entries: int, pairs: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin that are powers of two of either sign: products with them are exact."""
    rng = np.random.default_rng(seed)
    cos, sin = rng.choice(np.array([-2, -1, -0.5, 0.25, 0.5, 1, 2], np.float32), (2, batch, entries, pairs))
    return cos, sin


# name: kind, tokens in a call, width, rotated channels, compute dtype, storage, dtype of stored numbers
FINISHES: dict[str, tuple[Kind, int, int, int, str, str, str]] = {
    "CSA2, packed": (CSA2, 7, 32, 16, "bfloat16", "packed", "bfloat16"),
    "m=1, packed": (Kind(1), 5, 48, 48, "bfloat16", "packed", "bfloat16"),
    "CSA, rounded": (CSA, 9, 32, 16, "bfloat16", "rounded", "float32"),
    "CSA step in f32, packed": (CSA, 1, 32, 8, "float32", "packed", "float32"),
    "HCA in f32, unrounded": (HCA, 200, 16, 8, "float32", "plain", "bfloat16"),
}


@functools.cache
def fused(finish: str, implementation: str, interpret: Any) -> Any:
    """`compress_entries` as FINISHES has it, compiled once for each shape."""
    kind, *_, dtype, kept, entry_dtype = FINISHES[finish]
    static = {"eps": EPS, "dtype": dtype, "storage": kept, "entry_dtype": entry_dtype, **kind.options}
    return jax.jit(functools.partial(compress_entries, **static, implementation=implementation, interpret=interpret))


@functools.cache
def separate(finish: str) -> Any:
    """(latent, new carried rows, entries of a latent that is given) by the XLA door and the model's own pieces."""
    kind, *_, dtype, kept, entry_dtype = FINISHES[finish]
    numerics = Numerics(compute_dtype=dtype, fake_quant=True)

    @jax.jit
    def steps(
        c: Any, z: Any, c_half: Any, z_half: Any, phase: Any, count: Any, norm: Any, turn: Any, bias: Any, given: Any
    ):
        state = (c, z, c_half, z_half, phase, count)
        pooled, *halves = compress(*state, **kind.options, bias_MH=bias, implementation="xla")
        x = numerics.cast(pooled).astype(jnp.float32)
        latent = numerics.cast(x * inverse_rms(x, EPS) * norm)
        entry = rope.rotate(given, turn)
        if kept == "packed":
            return latent, halves, storage.pack(entry[None], formats.MAIN)
        if kept == "rounded":
            entry = formats.fake_quantise(entry, formats.MAIN)
        return latent, halves, formats.round_to(entry, jnp.dtype(entry_dtype))

    return steps


class CompressSuite:
    implementation = ""
    interpret: Any = False

    @functools.cached_property
    def chosen(self) -> dict[str, Any]:
        return {"implementation": self.implementation, "interpret": self.interpret}

    # --- pooling --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("name", "tokens"),
        [(n, t) for n, k in KINDS.items() for t in ("1", "m-1", "m", "m+1", "2m+1") if k.ratio > 2 or t != "m-1"]
        + [("m=16 overlap", "1"), ("m=16 overlap", "2m+1")],
    )
    def test_compress_from_any_phase_with_any_count_equals_float64(self, name: str, tokens: str) -> None:
        """Every phase and count (of m = 128 some) is a row of one call; rows begin in their first, second or third group."""
        kind = KINDS.get(name) or Kind(16, overlap=True, biased=True)  # longer than slots are held
        m, size = kind.ratio, {"1": 1, "m-1": kind.ratio - 1, "m": kind.ratio}.get(tokens)
        size = size or (m + 1 if tokens == "m+1" else 2 * m + 1)
        phases = range(m) if m <= 8 else (0, 1, m // 2, m - 1)
        counts = range(size + 1) if m <= 8 else sorted({0, 1, size // 2, size})
        phase, count = np.array([(p, n) for p in phases for n in counts], np.int32).T
        at = phase + m * (np.arange(len(phase)) % 3)
        sequences = Sequences.random(m, kind, len(at), int((at + count).max()), 4)
        halves = sequences.halves(at)
        f = jax.jit(functools.partial(compress, bias_MH=sequences.bias, **kind.options, **self.chosen))
        entries, *new_halves = f(*sequences.chunk(at, count, size), *halves, phase, count)
        assert entries.shape == (len(at), -(-size // m), 4)
        expected, expected_halves = sequences.entries(), sequences.halves(at + count)
        for b in range(len(at)):
            done, complete = at[b] // m, (phase[b] + count[b]) // m
            found = np.asarray(entries)[b, :complete]
            np.testing.assert_allclose(found, expected[b, done : done + complete], rtol=2e-5, atol=2e-6)
            held = kind.lead + (phase[b] + count[b]) % m
            for new, half in zip(new_halves, expected_halves, strict=True):
                np.testing.assert_array_equal(new[b, :held], half[b, :held])

    def test_compress_of_single_tokens_returns_them_and_needs_no_logits(self) -> None:
        c = np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
        count = np.array([3, 1], np.int32)
        entries, *halves = jax.jit(functools.partial(compress, ratio=1, **self.chosen))(
            c, None, None, None, 0 * count, count
        )
        assert halves == [None, None]
        np.testing.assert_array_equal(entries, c)

    # --- all steps ------------------------------------------------------------------------------------------------

    def finish(self, finish: str, *arrays: Any, bias: np.ndarray | None) -> Compressed:
        return fused(finish, self.implementation, self.interpret)(*arrays, bias_MH=bias)

    @pytest.mark.parametrize("finish", FINISHES)
    @pytest.mark.parametrize("exact", [True, False], ids=["exact", "random"])
    def test_compress_entries_equals_the_separate_steps_bit_for_bit(self, finish: str, exact: bool) -> None:
        """From random values the pooled entry may differ in its last bits, but all that follows the latent may not."""
        kind, tokens, width, turned, dtype, *_ = FINISHES[finish]
        m = kind.ratio
        at, count = np.array([m - 1, 2 * m - 1, m]), np.array([tokens, tokens, tokens - 1], np.int32)
        make = Sequences.exact if exact else Sequences.random
        sequences = make(3, kind, 3, 2 * m + tokens, width)
        c, z = sequences.chunk(at, count, tokens)
        halves = sequences.halves(at)
        if m == 1:
            c, z, halves = jnp.asarray(c, dtype), None, (None, None)
        phase = (at % m).astype(np.int32)
        norm = np.linspace(0.5, 1.5, width).astype(np.float32)
        rotation = tables(4, 3, -(-tokens // m), turned // 2)
        arrays = (c, z, *halves, phase, count, norm, rotation)
        found = self.finish(finish, *arrays, bias=sequences.bias)
        complete = np.arange(found.latent_BEH.shape[1]) < ((phase + count) // m)[:, None]
        assert complete.any()
        latent, new_halves, entries = separate(finish)(*arrays, sequences.bias, found.latent_BEH)
        assert_same_bits(found[2:], new_halves)
        assert_same_bits(found.entries_BEH, entries, complete)
        if exact:
            assert_same_bits(found.latent_BEH, latent, complete)
        else:
            close = 2**-7 if dtype == "bfloat16" else 1e-5
            a, b = (np.asarray(x, np.float32)[complete] for x in (found.latent_BEH, latent))
            np.testing.assert_allclose(a, b, rtol=close, atol=close / 10)

    @pytest.mark.parametrize("name", ["m=2", "m=4 overlap"])
    def test_entries_made_chunk_by_chunk_equal_those_of_one_call(self, name: str) -> None:
        """Token by token and in uneven ragged chunks, from the first token on, through the state that each call returns."""
        kind = KINDS[name]
        m, width, lengths = kind.ratio, 32, np.array([3 * kind.ratio + 1, 2 * kind.ratio])
        finish = {"m=2": "CSA2, packed", "m=4 overlap": "CSA, rounded"}[name]
        sequences = Sequences.exact(5, kind, 2, int(lengths.max()), width)
        norm, longest = np.full(width, 0.75, np.float32), -(-int(lengths.max()) // m)
        rotation = tables(6, 2, longest, 8)
        start = np.zeros(2, np.int32)
        empty = tuple(np.array(a) for a in empty_half(2, width, **kind.options))

        def call(at: np.ndarray, count: np.ndarray, tokens: int, halves: Any) -> Compressed:
            rows = at[:, None] // m + np.arange(-(-tokens // m))
            turns = [np.take_along_axis(a, rows.clip(0, longest - 1)[:, :, None], axis=1) for a in rotation]
            chunk = sequences.chunk(at, count.astype(np.int32), tokens)
            phase = (at % m).astype(np.int32)
            return self.finish(finish, *chunk, *halves, phase, count.astype(np.int32), norm, turns, bias=sequences.bias)

        def rows_of(made: Compressed) -> list[np.ndarray]:
            leaves = jax.tree.leaves((made.latent_BEH, made.entries_BEH))
            return [bits(a).reshape(*made.latent_BEH.shape[:2], -1) for a in leaves]

        whole = rows_of(call(start, lengths, int(lengths.max()), empty))
        for tokens in (1, m + 1):
            at, halves, rng = start, empty, np.random.default_rng(tokens)
            while (at < lengths).any():
                count = np.minimum(rng.integers(0, tokens + 1, 2), lengths - at)
                made = call(at, count, tokens, halves)
                halves = made[2:]
                for found, expected in zip(rows_of(made), whole, strict=True):
                    for b in range(2):
                        first, complete = at[b] // m, (at[b] % m + count[b]) // m
                        np.testing.assert_array_equal(found[b, :complete], expected[b, first : first + complete])
                at = at + count

    def test_latent_equals_float64(self) -> None:
        """The whole route against the formula, with true angles, f32 and no rounding."""
        kind, tokens, width = CSA, 9, 32
        at, count = np.array([3, 6]), np.array([9, 9], np.int32)
        sequences = Sequences.random(8, kind, 2, 16, width)
        norm, angle = np.linspace(0.5, 1.5, width), np.random.default_rng(9).uniform(0, 6, (2, 3, 4))
        rotation = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
        f = functools.partial(compress_entries, eps=1e-6, dtype="float32", storage="plain", bias_MH=sequences.bias)
        arrays = (*sequences.chunk(at, count, tokens), *sequences.halves(at), (at % 4).astype(np.int32), count)
        found = jax.jit(functools.partial(f, **kind.options, **self.chosen))(*arrays, norm.astype(np.float32), rotation)
        for b in range(2):
            complete = (at[b] % 4 + count[b]) // 4
            latent, entry = finish_reference(sequences.entries()[b], norm, 1e-6, angle[b], int(at[b] // 4), complete)
            np.testing.assert_allclose(found.latent_BEH[b, :complete], latent, rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(found.entries_BEH[b, :complete], entry, rtol=2e-5, atol=5e-6)

    # --- gradients ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", GRADIENTS := {"m=2": Kind(2), "overlap": Kind(2, overlap=True, biased=True)})
    def test_gradients_equal_float64_finite_differences(self, name: str) -> None:
        """Of C, Z, the carried rows, bias and norm, through latent, entry and the new carried rows; NaN where nothing is real."""
        kind, width, tokens, pairs = self.GRADIENTS[name], 4, 5, 1
        at, count = np.array([3, 4]), np.array([4, 5], np.int32)
        sequences = Sequences.random(11, kind, 2, 12, width)
        rng = np.random.default_rng(12)
        angle = rng.uniform(0, 6, (2, 3, pairs))
        given = dict(zip(("c", "z"), sequences.chunk(at, count, tokens), strict=True))
        given |= dict(zip(("c_half", "z_half"), sequences.halves(at), strict=True))
        given |= {"norm": np.linspace(0.5, 1.5, width).astype(np.float32)}
        given |= {"bias": sequences.bias} if kind.biased else {}
        weights = [rng.standard_normal((2, 3, width)) for _ in range(2)]
        weights += [rng.standard_normal(given["c_half"].shape) for _ in range(2)]

        def outputs(given: dict[str, Any]) -> Compressed:
            rotation = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
            arrays = [given[n] for n in ("c", "z", "c_half", "z_half")]
            state = (*arrays, (at % kind.ratio).astype(np.int32), count, given["norm"], rotation)
            options = kind.options | {"bias_MH": given.get("bias")} | self.chosen
            return compress_entries(*state, eps=1e-6, dtype="float32", storage="plain", **options)

        real = [np.arange(3) < ((at % kind.ratio + count) // kind.ratio)[:, None]] * 2
        real += [np.arange(given["c_half"].shape[1]) < (kind.lead + (at + count) % kind.ratio)[:, None]] * 2

        @jax.jit
        def gradients(given: dict[str, Any]) -> dict[str, Any]:
            out, pull = jax.vjp(outputs, given)
            # What is unspecified may come back with any cotangent.
            cotangents = [np.where(r[:, :, None], w, np.nan) for r, w in zip(real, weights, strict=True)]
            return pull(Compressed(*(jnp.asarray(w, o.dtype) for w, o in zip(cotangents, out, strict=True))))[0]

        def loss(given: dict[str, np.ndarray]) -> float:
            total = 0.0
            for b in range(2):
                phase, lead = int(at[b] % kind.ratio), kind.lead
                held = lead + phase
                rows = [np.concatenate([given[n + "_half"][b, lead:held], given[n][b, : count[b]]]) for n in "cz"]
                bias = np.zeros_like(rows[1])
                if kind.biased:
                    bias[phase:] = np.resize(given["bias"], rows[1].shape)[phase:]
                before = [given[n + "_half"][b, :lead, :width] for n in "cz"] if kind.overlap else None
                pooled = pool_reference(rows[0], rows[1] + bias, kind, None, width, before)
                made = finish_reference(pooled, given["norm"], 1e-6, angle[b], 0, len(pooled))
                first = len(pooled) * kind.ratio
                for n, (row, weight) in enumerate(zip((rows[0], rows[1] + bias), weights[2:], strict=True)):
                    full = np.concatenate([given["cz"[n] + "_half"][b, :lead], row])[first:]
                    total += (full * weight[b, : len(full)])[np.isfinite(full)].sum()
                total += sum((a * w[b, : len(pooled)]).sum() for a, w in zip(made, weights[:2], strict=True))
            return total

        found = gradients({n: jnp.asarray(a) for n, a in given.items()})
        exact = {n: a.astype(np.float64) for n, a in given.items()}
        for n, a in exact.items():
            expected = np.zeros_like(a)
            for i in np.ndindex(a.shape):
                if not np.isfinite(a[i]):
                    continue  # not real, or no previous group: no gradient
                ends = []
                for step in (1e-6, -1e-6):
                    moved = a.copy()
                    moved[i] += step
                    ends.append(loss(exact | {n: moved}))
                expected[i] = (ends[0] - ends[1]) / 2e-6
            np.testing.assert_allclose(found[n], expected, rtol=3e-4, atol=3e-5, err_msg=n)
            assert np.abs(expected).max() > 0.01, n

    def test_rounding_is_passed_straight_through_and_packed_entries_take_no_gradient(self) -> None:
        sequences = Sequences.random(13, CSA2, 2, 4, 32)
        start, count = np.zeros(2, np.int32), np.array([4, 4], np.int32)
        arrays = (*sequences.halves(start), start, count, np.ones(32, np.float32), tables(14, 2, 2, 8))
        c, z = sequences.chunk(start, count, 4)
        cotangent = np.random.default_rng(15).standard_normal((2, 2, 2, 32)).astype(np.float32)

        def pull(kept: str, c: jax.Array) -> Any:
            f = functools.partial(compress_entries, eps=EPS, dtype="float32", storage=kept, ratio=2, **self.chosen)
            return jax.vjp(lambda c: f(c, z, *arrays)[: 1 if kept == "packed" else 2], c)[1]

        @jax.jit
        def gradients(c: jax.Array) -> list[jax.Array]:
            plain = pull("plain", c)
            both, latent = (cotangent[0], cotangent[1]), (cotangent[0], 0 * cotangent[1])
            return [pull("rounded", c)(both)[0], plain(both)[0], pull("packed", c)(both[:1])[0], plain(latent)[0]]

        rounded, plain, packed, latent_only = gradients(c)
        np.testing.assert_array_equal(rounded, plain)
        np.testing.assert_array_equal(packed, latent_only)
        assert np.abs(np.asarray(plain) - np.asarray(latent_only)).max() > 0.1


def finish_reference(
    pooled: np.ndarray, norm: np.ndarray, eps: float, angle: np.ndarray, first: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """(latent, rotated) float64 of `count` entries from `first`; entry e turns its last pairs by angle[e] [R/2]."""
    latents, entries = [], []
    for e in range(count):
        x = pooled[first + e]
        x = x / np.sqrt((x**2).mean() + eps) * norm
        turned = x.copy()
        for pair, a in enumerate(angle[e]):
            i = len(x) - 2 * angle.shape[1] + 2 * pair
            turned[i], turned[i + 1] = x[i] * np.cos(a) - x[i + 1] * np.sin(a), x[i] * np.sin(a) + x[i + 1] * np.cos(a)
        latents.append(x)
        entries.append(turned)
    return np.array(latents), np.array(entries)
