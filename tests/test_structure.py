"""A module taken apart for jit and put together again."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from csa2_jax import Model, ModelConfig, Numerics, init_model
from csa2_jax.structure import SMALL, Structure

TINY = ModelConfig.from_hf("configs/v41_tiny.json")
TOKEN_MAP = np.arange(TINY.vocab_size, dtype=np.int32) // 2


def test_a_module_comes_back_bit_for_bit_from_fewer_arrays():
    model = init_model(TINY, compute_dtype="float32", token_map=TOKEN_MAP)
    structure, arrays = Structure.split(model)
    before, after = (jax.tree.leaves_with_path(nnx.state(m)) for m in (model, structure.merge(arrays)))
    assert [path for path, _ in before] == [path for path, _ in after]
    for (path, a), (_, b) in zip(before, after, strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))
    assert len(jax.tree.leaves(arrays)) < len(before)
    assert all(a.shape[0] > 1 and a.ndim == 2 for a in arrays.joined)


def test_equal_modules_share_a_program_and_others_do_not():
    one, same, other = (
        Structure.split(init_model(TINY, seed=seed, compute_dtype=dtype, token_map=TOKEN_MAP))[0]
        for seed, dtype in ((0, "float32"), (1, "float32"), (0, "bfloat16"))
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other


def test_abstract_arrays_stay_abstract():
    model = nnx.eval_shape(lambda: Model(TINY, numerics=Numerics("float32", True)))
    _, arrays = Structure.split(model)
    assert arrays.joined
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(arrays))


class _Vectors(nnx.Module):
    def __init__(self, arrays: dict[str, jax.Array]) -> None:
        for name, a in arrays.items():
            setattr(self, name, nnx.Param(a))


def _joined(**arrays: jax.Array) -> int:
    structure, made = Structure.split(_Vectors(arrays))
    for name, a in arrays.items():
        np.testing.assert_array_equal(getattr(structure.merge(made), name)[...], a)
    return len(arrays) - len(made.alone)


def test_what_travels_together():
    assert _joined(a=jnp.ones((3, 4)), b=jnp.arange(18.0).reshape(3, 2, 3)) == 2
    assert _joined(a=jnp.ones((3, 4)), b=jnp.ones((2, 4))) == 0  # other layers
    assert _joined(a=jnp.ones((3, 4)), b=jnp.ones((3, 4), jnp.bfloat16)) == 0  # another dtype
    assert _joined(a=jnp.ones((3, 4)), b=jnp.ones((3, SMALL // 3 + 1))) == 0  # large
    assert _joined(a=jnp.ones((3, 4), jnp.int32), b=jnp.ones((3, 4), jnp.int32)) == 0  # not weights
    assert _joined(a=jnp.ones(3), b=jnp.ones(3)) == 0  # not of layers
