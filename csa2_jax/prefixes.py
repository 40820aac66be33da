"""Prefix reuse: what earlier requests computed for the tokens that a new one begins with.

Pool entries are kept in blocks of tokens, each under a hash of all tokens up to its end, so that requests share the blocks of
what they have in common and of nothing else. At some places a `Snapshot` (all of a row but its pools) is kept as well; a new
request starts from the longest snapshot whose tokens are a prefix of its own, and computes on from there: exact at any cut.

    root -- block 0 -- block 1 -- block 2          whole blocks, shared
                  \\         \\-- [part of a block]   a leaf that ends inside a block: the end of a prompt or of an answer
                   \\-- block 1' ...

Bytes are bounded: the leaf that was used longest ago goes first. Nothing here looks into arrays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(eq=False)
class Node:
    """Tokens from `start` to `end` behind those of the parents, what they left in the pools, and perhaps all else at `end`."""

    start: int
    tokens: np.ndarray
    parent: Node | None
    block: Any
    snapshot: Any = None
    decoder_from: int = 0  # of the snapshot: the first position whose decoder window rows are valid
    used: int = 0
    children: dict[bytes, Node] = dataclasses.field(default_factory=dict)

    @property
    def end(self) -> int:
        """Tokens up to here."""
        return self.start + len(self.tokens)

    def chain(self) -> list[Node]:
        """From the first block to this node."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixStore:
    """A tree of blocks of `block` tokens, bounded to `limit` bytes."""

    def __init__(self, block: int, limit: int) -> None:
        self.block, self.limit, self.nbytes = block, limit, 0
        self.root = Node(0, np.zeros(0, np.int32), None, None)
        self._clock = itertools.count(1)
        self.hits = self.misses = self.reused_tokens = 0

    def find(self, tokens: np.ndarray, usable: Callable[[Node], bool]) -> Node | None:
        """The longest node with a usable snapshot that ends before the last of `tokens`, whose tokens begin with the node's."""
        best = None
        for node in self._along(tokens):
            self._touch(node)
            if node.snapshot is not None and node.end < len(tokens) and usable(node):
                best = node
        if best is None:
            self.misses += 1
        else:
            self.hits += 1
            self.reused_tokens += best.end
        return best

    def add(self, tokens: np.ndarray, cut_block: Callable[[int], Any], snapshot: Any, decoder_from: int) -> None:
        """Keep what `tokens` left: blocks that are missing (`cut_block(start)` makes one) and the snapshot at their end."""
        if self.limit <= 0:
            return
        node = self.root
        for start in range(0, len(tokens), self.block):
            piece = np.asarray(tokens[start : start + self.block], np.int32)
            key = _key(piece)
            child = node.children.get(key)
            if child is None:
                child = Node(start, piece.copy(), node, cut_block(start))  # not a view of the whole prompt
                node.children[key] = child
                self.nbytes += _nbytes(child.block)
            self._touch(child)
            node = child
        if node is self.root:
            return
        if (
            node.snapshot is None or decoder_from < node.decoder_from
        ):  # one that has seen more of the decoder serves more prompts
            self.nbytes += _nbytes(snapshot) - _nbytes(node.snapshot)
            node.snapshot, node.decoder_from = snapshot, decoder_from
        self._shrink(keep=node)

    def clear(self) -> None:
        """Forget everything."""
        self.root.children.clear()
        self.nbytes = 0

    def __len__(self) -> int:
        return sum(1 for _ in self._all())

    def _along(self, tokens: np.ndarray) -> Iterator[Node]:
        """Nodes whose tokens `tokens` begin with: the whole blocks in order, and the leaves that end inside the next one."""
        node = self.root
        while True:
            rest = tokens[node.end :]
            for child in list(node.children.values()):
                if len(child.tokens) < self.block and np.array_equal(child.tokens, rest[: len(child.tokens)]):
                    yield child
            whole = node.children.get(_key(rest[: self.block])) if len(rest) >= self.block else None
            if whole is None or not np.array_equal(whole.tokens, rest[: self.block]):
                return
            yield whole
            node = whole

    def _touch(self, node: Node) -> None:
        node.used = next(self._clock)

    def _all(self) -> Iterator[Node]:
        """Every node but the root."""
        nodes = list(self.root.children.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def _shrink(self, keep: Node) -> None:
        """Drop what was unused longest until the bytes fit: leaves, and snapshots inside chains; the newest end goes last."""
        last: Node | None = keep
        while self.nbytes > self.limit:
            dear = [n for n in self._all() if n is not last and (not n.children or n.snapshot is not None)]
            node = min(dear, key=lambda n: n.used, default=last)
            if node is None:
                return
            if node is last:
                last = None  # the chain alone is too long: it goes from its end on
            self.nbytes -= _nbytes(node.snapshot)
            node.snapshot = None
            if not node.children and node.parent is not None:
                self.nbytes -= _nbytes(node.block)
                del node.parent.children[_key(node.tokens)]


def _key(tokens: np.ndarray) -> bytes:
    """Of one block's tokens; its place in the tree stands for all before them."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32).tobytes(), digest_size=16).digest()


def _nbytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
