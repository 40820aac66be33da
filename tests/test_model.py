"""The model as an object: random initialisation, gradients, what a call returns and refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csa2_jax import Bound, Model, ModelConfig, Numerics, Unsupported, forward, init_cache, init_model, load_checkpoint
from csa2_jax.layers import Linear, ParamFactory, dequantise, linear
from tests.golden_sets import materialise

TOY_MAP = (np.arange(256) // 2).astype(np.int32)


@pytest.fixture(scope="module")
def config():
    return dataclasses.replace(ModelConfig.from_hf("configs/v41_tiny.json"), quantized=False)


@pytest.fixture(scope="module")
def model(config):
    return init_model(config, seed=3, compute_dtype="float32", fake_quant=False, token_map=TOY_MAP)


def test_init_is_reproducible_and_refuses_quantised_storage(config, model):
    again = init_model(config, seed=3, compute_dtype="float32", fake_quant=False, token_map=TOY_MAP)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(model, nnx.Param), nnx.state(again, nnx.Param))
    assert all(jax.tree.leaves(same))
    weight = np.asarray(model.layers.attn.wq_a.weight[...])
    assert weight.shape == (8, 64, 64)
    assert 0.018 < weight.std() < 0.022
    make = ParamFactory(jnp.dtype("bfloat16"), True, key=jax.random.key(0))
    with pytest.raises(ValueError, match="cannot be initialised at random"):
        Linear(4, 32, make, storage="fp8")


def test_released_configuration_has_abstract_parameters():
    # Shapes at full size, without a byte of weights: 40 layers in 60 arrays.
    released = ModelConfig.from_hf("configs/v41_flash.json")
    state = nnx.state(nnx.eval_shape(lambda: Model(released, numerics=Numerics())), nnx.Param)
    layers, head = 40, 64 * 512
    assert state["layers"]["attn"]["wq_b"]["weight"].shape == (layers, head, 1280)
    assert state["layers"]["ffn"]["experts"]["w1"]["weight"].shape == (layers, 384, 2304, 2560)
    assert state["layers"]["ffn"]["experts"]["w1"]["scale"].shape == (layers, 384, 2304, 160)
    assert state["compressors"]["m2"]["wkv"]["weight"].shape == (3, 512, 5120)
    assert state["compressors"]["m1"]["wk"]["weight"].shape == (1, 128, 512)
    assert "wgate" not in state["compressors"]["m1"]


def test_state_keeps_f32_where_the_numerics_need_it():
    loaded = load_checkpoint(materialise("tiny8_bf16"), compute_dtype="bfloat16")
    census = {
        ".".join(map(str, path)): leaf.get_value().dtype
        for path, leaf in nnx.to_flat_state(nnx.state(loaded, nnx.Param))
    }
    f32 = {name for name, dtype in census.items() if dtype == jnp.float32}
    expected = ("hc_attn", "hc_ffn", "attn_sink", "gate.weight", "gate.bias", "confidence", "m2.wkv", "m2.wgate")
    assert f32 == {name for name in census if any(part in name for part in expected)}


@pytest.mark.smoke
def test_gradients_reach_every_part_that_the_loss_depends_on(model):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 21)))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def gradient(params):
        def loss(params):
            out, _ = nnx.merge(graphdef, params, rest)(tokens, None, jnp.array([21, 18]))
            return -jnp.mean(jax.nn.log_softmax(out.logits[:, :-1])[:, :, 7])

        return jax.grad(loss)(params)

    grads = {".".join(map(str, k)): np.asarray(v.get_value()) for k, v in nnx.to_flat_state(gradient(params))}
    assert all(np.isfinite(g).all() for g in grads.values())
    # Selections have no gradient, so nothing reaches the indexer or the index keys; the draft head takes no part.
    without = ("indexers.", ".wk.", ".k_norm.", "draft.", "gate.bias")
    for name, g in grads.items():
        assert g.any() != any(part in name for part in without), name


def test_quantised_linear_passes_gradients_straight_through():
    rng = np.random.default_rng(1)
    weight = jnp.asarray(rng.standard_normal((40, 64)), jnp.float8_e4m3fn)
    scale = jnp.asarray(rng.integers(120, 130, (2, 2)), jnp.uint8)
    x = jnp.asarray(rng.standard_normal((3, 64)), jnp.float32)
    plain = dequantise(weight, scale, jnp.dtype("float32"))
    for fake_quant in (True, False):
        numerics = Numerics("float32", fake_quant)
        g = jax.grad(lambda x, n=numerics: linear(x, weight, scale, n)[1, 5])(x)
        np.testing.assert_array_equal(g, np.zeros((3, 64)) + np.eye(3)[:, 1:2] * np.asarray(plain)[5])


def test_operands_are_rounded_whatever_holds_the_weights():
    # Dequantising the weights must not change what is computed: the rounding of the operand belongs to the model.
    directory, tokens = materialise("tiny8_fp8"), np.arange(16)[None] * 7
    stored, plain = (
        np.asarray(forward(load_checkpoint(directory, compute_dtype="float32", weights=w), tokens).logits)
        for w in ("stored", "float32")
    )
    error = np.linalg.norm(plain - stored, axis=-1) / np.linalg.norm(stored, axis=-1)
    assert np.median(error) < 1e-5
    # Without the rounding the same weights compute something else, so the comparison above could fail.
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    weight = np.eye(64, dtype=np.float32)
    rounded, exact = (linear(x, weight, None, Numerics("float32", True), flag) for flag in (True, False))
    assert np.abs(np.asarray(rounded) - np.asarray(exact)).max() > 1e-3


def test_forward_inside_a_users_jit(model):
    tokens = np.arange(16)[None] * 5
    doubled = jax.jit(lambda scale: forward(model, tokens).logits * scale)(2.0)
    np.testing.assert_allclose(doubled, 2 * np.asarray(forward(model, tokens).logits), atol=1e-5)
    with pytest.raises(ValueError, match=r"tokens is traced.*call the model itself"):
        jax.jit(lambda t: forward(model, t).logits)(jnp.asarray(tokens))
    with pytest.raises(ValueError, match=r"the cache is traced.*call the model itself"):
        jax.jit(lambda cache: forward(model, tokens, cache)[0].logits)(init_cache(model.config, 1, 32))


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        ([[1, 2], [3]], "must be rectangular"),
        ([1, 2, 3], r"must be \[B, T\]"),
        ([[1.0, 2.0]], "must be integers, found float64"),
        ([[True]], "must be integers, found bool"),
        (np.zeros((1, 0), int), "at least one row and one token"),
        ([[2**40]], f"token id {2**40} at row 0, position 0"),
        (np.zeros((1, 97), int), "97 tokens exceed max_position_embeddings=96"),
    ],
)
def test_forward_refuses_tokens_that_are_none(model, tokens, words):
    with pytest.raises(ValueError, match=words):
        forward(model, tokens)


def test_lengths_follow_the_cache_they_belong_to(config):
    cache = init_cache(config, 1, 32)
    cache.lengths()[0] = 31  # a copy
    assert cache.lengths().tolist() == [0]
    moved = dataclasses.replace(cache, length_B=jnp.array([14], jnp.int32))
    assert moved.lengths().tolist() == [14]
    assert jax.tree.map(lambda a: a, moved).lengths().tolist() == [14]


def test_bound_model_gives_the_numbers_of_the_model(model):
    tokens = np.arange(16)[None] * 5
    np.testing.assert_array_equal(forward(model, tokens).logits, forward(Bound.of(model), tokens).logits)


def test_output_tells_what_to_ask_for(model):
    out = forward(model, np.arange(16)[None])
    with pytest.raises(ValueError, match="capture=\\('selections',\\)"):
        _ = out.selections
    with pytest.raises(ValueError, match=r"capture=\['nonsense'\] is unknown"):
        forward(model, np.arange(16)[None], capture=("nonsense",))


def test_last_logits_are_those_of_each_rows_last_real_token(model):
    tokens, lengths = np.arange(32).reshape(2, 16), np.array([16, 9])
    every = np.asarray(forward(model, tokens, None, lengths).logits)
    last = np.asarray(forward(model, tokens, None, lengths, all_logits=False).logits)
    np.testing.assert_allclose(last, every[[0, 1], lengths - 1], rtol=1e-5, atol=1e-6)


def test_text_of_a_multimodal_checkpoint_runs_and_an_image_is_refused():
    loaded = load_checkpoint(materialise("tiny8_vl_f32_noqat"), compute_dtype="float32", fake_quant=False)
    text = np.random.default_rng(5).integers(0, 249, (1, 16))
    assert np.isfinite(np.asarray(forward(loaded, text).logits)).all()
    text[0, 4] = loaded.config.image_token_id
    with pytest.raises(Unsupported, match="position 4 of the call is an image token"):
        forward(loaded, text)
    # Behind a row's real tokens anything may stand.
    forward(loaded, text, None, [3])


def test_caches_are_refused_with_reasons(config):
    for arguments, words in (
        ({"batch": 0, "max_length": 8}, "batch=0 must be a whole number"),
        ({"batch": 1, "max_length": 97}, "exceeds max_position_embeddings=96"),
        ({"batch": 1, "max_length": 8, "storage": "fp16"}, "must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            init_cache(config, **arguments)
    with pytest.raises(ValueError, match="head_dim=40 is no multiple"):
        init_cache(dataclasses.replace(config, head_dim=40), 1, 8, "packed")
    with pytest.raises(ValueError, match="no draft head"):
        init_cache(
            dataclasses.replace(
                config,
                num_nextn_predict_layers=0,
                dspark_target_layer_ids=(),
                compress_ratios=config.compress_ratios[:8],
            ),
            1,
            8,
            draft=True,
        )


def test_roundings_refuse_widths_their_groups_do_not_divide(config):
    with pytest.raises(ValueError, match="index_head_dim=16 must be a multiple of 32"):
        Model(dataclasses.replace(config, index_head_dim=16), numerics=Numerics("float32", True))
