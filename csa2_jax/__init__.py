"""csa2-jax: DeepSeek-V4.1-Flash in JAX and Flax, with CSA2 compressed sparse attention.

The public door: `ModelConfig`, `load_checkpoint`, `init_model`, `init_cache`, `forward`, `draft`, `generate`.
"""
