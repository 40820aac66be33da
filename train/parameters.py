"""Which parameter is trained, and how: one table of rules, the first that matches a parameter's path decides.

Source: arXiv 2609.19969 (Muon for linear weights, split by heads for queries and keys; AdamW for norms, biases and scales;
Sinkhorn-balanced momentum for embeddings, head and n-gram tables, those with five times the rate; the router's bias outside the
optimizer).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from csa2_jax import ModelConfig

Method = Literal["muon", "adamw", "sinkhorn", "loads", "frozen"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Parameters whose dotted path matches one of `paths` (shell patterns).

    method: "muon", "adamw", "sinkhorn"; "loads": moved by expert loads, outside the optimizer; "frozen": not trained.
    rate: factor on the learning rate. decay: whether weight decay applies.
    split: name of the configuration's field that says into how many matrices the rows of a weight fall.
    """

    role: str
    paths: tuple[str, ...]
    method: Method
    rate: float = 1.0
    decay: bool = True
    split: str | None = None


RULES: Final[tuple[Rule, ...]] = (
    Rule("adapters", ("*.lora_a", "*.lora_b"), "adamw", decay=False),
    Rule("router bias", ("*.gate.bias", "*.gate.bias_vl"), "loads"),
    Rule("n-gram tables", ("engram_tables.*.weight",), "sinkhorn", rate=5.0, decay=False),
    Rule("embeddings and head", ("embed.weight", "head.weight", "draft.markov_*.weight"), "sinkhorn", decay=False),
    Rule("query heads", ("*attn.wq_b.weight",), "muon", split="num_attention_heads"),
    Rule("index query heads", ("indexers.wq_b.weight",), "muon", split="index_n_heads"),
    Rule("output groups", ("*attn.wo_a.weight",), "muon", split="o_groups"),
    Rule("norms", ("*norm.weight", "engram.q_weight", "engram.k_weight"), "adamw"),
    Rule("biases and scales", ("*.base", "*.scale", "*.attn_sink", "compressors.*.bias"), "adamw", decay=False),
    Rule("confidence head", ("draft.confidence.weight",), "adamw"),
    Rule("linear weights", ("*.weight", "*.fn"), "muon"),
)
ROLES: Final = {rule.role: rule for rule in RULES}
INDEXER: Final = ("indexers.*", "compressors.*.wk.*", "compressors.*.k_norm.*", "compressors.*.keys.*")
"""What decides selections and nothing else: trained by the index loss alone."""
DRAFT: Final = ("draft.*",)
"""The draft head: trained by its own loss alone."""


def path_name(path: Sequence[Any]) -> str:
    """A parameter's dotted path."""
    return ".".join(str(part) for part in path)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a dotted path matches one of the shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which parameters are trained, by shell patterns on dotted paths: `train` and not `freeze`.

    Stored codes (fp8, fp4, n-gram tables as they come in a checkpoint) are never trained, whatever the patterns say.
    """

    train: tuple[str, ...] = ("*",)
    freeze: tuple[str, ...] = ()

    @classmethod
    def recipe(cls, name: str) -> Choice:
        """A named choice: "everything", "frozen indexer", "indexer only", "adapters", "draft head only"."""
        if name not in RECIPES:
            raise ValueError(f"recipe={name!r} is unknown; choose from {sorted(RECIPES)}")
        return RECIPES[name]

    def rule(self, name: str, array: Any) -> Rule:
        """How one parameter is trained."""
        rule = next((r for r in RULES if matches(name, r.paths)), None)
        if rule is None:
            raise ValueError(f"no rule of RULES covers the parameter {name}: add it to one")
        chosen = matches(name, self.train) and not matches(name, self.freeze)
        # Codes are bytes or one-byte floats.
        trainable = jnp.issubdtype(array.dtype, jnp.floating) and jnp.dtype(array.dtype).itemsize > 1
        return rule if chosen and trainable else dataclasses.replace(rule, method="frozen")


RECIPES: Final[Mapping[str, Choice]] = {
    "everything": Choice(),
    "frozen indexer": Choice(freeze=INDEXER),
    "indexer only": Choice(train=INDEXER),
    "adapters": Choice(train=("*.lora_a", "*.lora_b")),
    "draft head only": Choice(train=DRAFT),
}


@dataclasses.dataclass(frozen=True)
class Parts:
    """A model's arrays in four parts, each {dotted path: array}, and how to put them together again.

    trained: what the optimizer moves. loads: router biases. frozen: the other parameters. rest: constants.
    """

    trained: dict[str, jax.Array]
    loads: dict[str, jax.Array]
    frozen: dict[str, jax.Array]

    def all(self) -> dict[str, jax.Array]:
        """All of them."""
        return self.trained | self.loads | self.frozen


def take_apart(model: nnx.Module, choice: Choice) -> tuple[Callable[[dict[str, jax.Array]], Any], Parts]:
    """(a function that makes the model from all arrays by path, its arrays in parts)."""
    graphdef, state = nnx.split(model)
    flat = {path_name(path): variable for path, variable in nnx.to_flat_state(state)}
    leaves, tree = jax.tree.flatten(state)
    by_leaf = [path_name(path) for path, _ in nnx.to_flat_state(state)]
    if len(by_leaf) != len(leaves) or any(v[...] is not a for v, a in zip(flat.values(), leaves, strict=True)):
        raise RuntimeError("the arrays of a model are not in the order of their paths")
    parts = Parts({}, {}, {})
    for name, variable in flat.items():
        array = variable[...]
        if not isinstance(variable, nnx.Param):
            parts.frozen[name] = array
            continue
        method = choice.rule(name, array).method
        {"frozen": parts.frozen, "loads": parts.loads}.get(method, parts.trained)[name] = array

    def together(arrays: dict[str, jax.Array]) -> Any:
        return nnx.merge(graphdef, jax.tree.unflatten(tree, [arrays[name] for name in by_leaf]))

    return together, parts


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table that `--dry-run` prints."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    rule: Rule
    matrices: int  # of a weight, each of which Muon orthogonalises by itself

    @property
    def numbers(self) -> int:
        """Parameters."""
        return math.prod(self.shape)


def table(arrays: Mapping[str, Any], choice: Choice, config: ModelConfig) -> list[Row]:
    """How every parameter is trained, in the order of the rules."""
    rows = []
    for name, array in arrays.items():
        if name in ("token_map", "ngram_products", "layers.ffn.by_token"):
            continue
        rule = choice.rule(name, array)
        matrices = math.prod(array.shape[:-2]) * (getattr(config, rule.split) if rule.split else 1)
        rows.append(Row(name, tuple(array.shape), str(array.dtype), rule, matrices))
    order = {rule.role: i for i, rule in enumerate(RULES)}
    return sorted(rows, key=lambda row: (order[row.rule.role], row.name))
