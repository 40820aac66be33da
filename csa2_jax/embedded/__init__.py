"""The model that comes with the package, so that everything can be tried without a download.

A miniature of the released pattern: every layer mode, both compression ratios, candidates, n-gram tables and a draft head. It has
read the sources of Python's library and questions that their docstrings answer, and knows nothing else. `train.corpus` and
configs/train_default.toml made it; benchmarks/default_model.py measures it.
"""

from __future__ import annotations

from pathlib import Path


def default_model() -> Path:
    """Its directory, in the release's layout: config.json, model.safetensors and tokenizer.json."""
    return Path(__file__).parent
