"""Many users at once on one model: fixed slots, requests that come and go, prompts filled in between decode steps.

    engine = Engine(model, slots=8, max_length=32768, tokenizer=tokenizer)
    ticket = engine.submit(ids, max_new_tokens=256, sampling=Sampling(temperature=0.7, seed=1))
    for event in engine.stream(ticket): ...            # or engine.step() in a loop of your own

A step admits waiting requests to free slots, appends one piece of the oldest unfinished prompt, and lets every row that has its
prompt decode (one token, or with drafts as many as are accepted). Shapes are few and known beforehand: `warm_up` compiles them
all. A request's tokens do not depend on what shares the batch: all rows run in one shape, each with its own seed, and no row
reads another. What a request leaves behind is kept for requests that begin alike (`prefixes`), within a bound of bytes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from csa2_jax import slots
from csa2_jax import speculative as drafting
from csa2_jax.answers import Answer, Finish
from csa2_jax.bound import Bound
from csa2_jax.decoding import Decoder
from csa2_jax.generation import check_request
from csa2_jax.model import Model
from csa2_jax.prefilling import Route, skipped_tokens
from csa2_jax.prefixes import Node, PrefixStore
from csa2_jax.sampling import Sampling
from csa2_jax.state import Storage, init_cache, positive
from csa2_jax.streams import Event, Stream, uninterrupted

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SMALLEST_PIECE: Final = 16
_PIECE_STEP: Final = 4  # each size of piece is so many times the one below


@dataclasses.dataclass
class _Request:
    ticket: int
    prompt: np.ndarray
    answer: Answer
    sampling: Sampling
    slot: int = -1
    filled: int = 0  # prompt tokens the cache holds
    fed: list[int] = dataclasses.field(default_factory=list)  # all that was made, also behind a stop

    @property
    def prefilling(self) -> bool:
        return self.filled < len(self.prompt)


class Engine:
    """See the module.

    Args:
        slots: rows that decode together. max_length: tokens a request may have, prompt and answer.
        storage: of the cache, see `init_cache`.
        chunk: prompt tokens per piece (shorter pieces are padded to 16, 64, ...); decoding rows wait for one piece at most.
        decoder: of prompts, see `prefill`.
        speculative: draft and verify (True, or the confidence drafts need); needs a draft head.
        prefix_bytes: how much to keep for requests that begin alike; 0 keeps nothing.
        tokenizer: turns tokens into text; needed for stop strings.
    """

    def __init__(
        self,
        model: Model | Bound,
        *,
        slots: int = 8,
        max_length: int = 4096,
        storage: Storage | None = None,
        chunk: int = 256,
        decoder: Route = "exact",
        speculative: bool | float = False,
        prefix_bytes: int = 1 << 28,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.bound = model if isinstance(model, Bound) else Bound.of(model)
        self.tokenizer = tokenizer
        self.max_length, self.chunk = positive("max_length", max_length), positive("chunk", chunk)
        longest = self.bound.config.max_position_embeddings
        if self.max_length > longest:
            raise ValueError(f"{max_length=} exceeds max_position_embeddings={longest}")
        self.sizes = _sizes(self.chunk)
        self.route: Route = decoder
        skipped_tokens(self.bound.config, np.zeros(1, int), _route(decoder), self.chunk)
        batch = positive("slots", slots)
        drafts, threshold = drafting.requested(speculative)
        self._new_cache = functools.partial(
            init_cache, self.bound.config, batch, self._capacity(), storage, draft=drafts
        )
        self._steps = Decoder(self.bound, self._new_cache(), speculative=drafts, threshold=threshold)
        block = self._block()
        self.prefixes = PrefixStore(block, prefix_bytes if block <= self._capacity() else 0)
        self._waiting: collections.deque[_Request] = collections.deque()
        self._rows: list[_Request | None] = [None] * batch
        self._requests: dict[int, _Request] = {}
        self._events: list[Event] = []
        self._next_ticket = 0
        self._lock = threading.RLock()
        self._programs_before = 0
        self._programs_before = self.programs()

    # ---- for users ----

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] | str = (),
        stop_at_eos: bool = True,
    ) -> int:
        """Queue a request; returns its ticket.

        Raises ValueError for what could never run, and then nothing is queued: empty prompts, ids outside the vocabulary, more
        tokens than max_length, stop strings without a tokenizer.
        """
        sampling = sampling or Sampling()
        if not isinstance(sampling, Sampling):
            raise ValueError(f"{sampling=} must be a Sampling")
        tokens, _, needed = check_request(self.bound.config, [prompt], max_new_tokens=max_new_tokens)
        if needed > self.max_length:
            raise ValueError(
                f"{tokens.shape[1]} prompt tokens with {max_new_tokens=} need {needed} places, this engine has {self.max_length=}"
            )
        eos = self.bound.config.eos_token_id if stop_at_eos else None
        answer = Answer(self.tokenizer, tokens[0].tolist(), int(max_new_tokens), stop, eos)
        with self._lock:
            ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
            request = _Request(ticket, tokens[0].astype(np.int32), answer, sampling)
            self._requests[ticket] = request
            self._waiting.append(request)
        return ticket

    def cancel(self, ticket: int) -> bool:
        """End a request where it is; whether it was still running. Its slot is free for the next step."""
        with self._lock:
            request = self._requests.get(ticket)
            if request is None:
                return False
            if request in self._waiting:
                self._waiting.remove(request)
            self._finish(request, "cancelled")
            self._events.append(Event(ticket, request.answer.made, None, None, None, "cancelled"))
            return True

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running, or an event has not been handed out."""
        return bool(self._requests or self._events)

    @property
    def acceptance(self) -> drafting.Acceptance:
        """How many drafts were tried and kept, by place."""
        return self._steps.acceptance

    def step(self) -> list[Event]:
        """One round for everybody; what it brought.

        Ctrl-C waits until the round is over, because one that is cut short loses the cache it consumed. If a round fails, every
        request that had a slot ends with `finished="error"` in the next step, waiting ones go on, and the error is raised.
        """
        with self._lock:
            self._round()
            events, self._events = self._events, []
            return events

    def stream(self, ticket: int) -> Stream:
        """Events of one request, stepping the engine; closing the iterator early cancels the request.

        Events of others that come meanwhile are kept for their own streams.
        """
        return Stream(self, ticket)

    def run(self) -> Iterator[Event]:
        """Step until nothing is left to do."""
        while self.busy:
            yield from self.step()

    def warm_up(self, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compile everything that requests may need, by running it on a slot that is free; returns the number of programs.

        Raises RuntimeError while requests are running.
        """
        with self._lock:
            if self._requests:
                raise RuntimeError("warm_up needs an engine without requests")
            return self._warm_up(on_progress)

    def _warm_up(self, on_progress: Callable[[int, int], None] | None) -> int:
        jobs: list[Callable[[], Any]] = []
        for size in self.sizes:
            for full in (True, False) if self.route != "full" else (True,):
                jobs.append(functools.partial(self._append, 0, np.zeros(size, np.int32), size, full=full))
        jobs += [self._warm_decoder(width) for width in self._widths()]
        if self.prefixes.limit > 0:
            jobs.append(self._warm_slots)
        for done, job in enumerate(jobs, 1):
            job()
            if on_progress is not None:
                on_progress(done, len(jobs))
        self._clear(0)
        return self.programs()

    def programs(self) -> int:
        """Programs compiled since this engine was made, for it or for others."""
        from csa2_jax import decoding

        jitted: list[Any] = [
            slots.fill,
            decoding._jit_decode,
            decoding._jit_draw,
            drafting._jit_begin,
            drafting._jit_advance,
        ]
        jitted += [slots.clear, slots.cut_block, slots.put_block, slots.cut_snapshot, slots.put_snapshot]
        return sum(f._cache_size() for f in jitted) - self._programs_before

    @property
    def buckets(self) -> int:
        """At most so many programs are ever compiled for this engine, whatever is asked of it."""
        routes = 1 if self.route == "full" else 2
        return len(self.sizes) * routes + len(self._widths()) + 7

    def close(self) -> None:
        """End every request and forget what was kept."""
        with self._lock:
            for ticket in list(self._requests):
                self.cancel(ticket)
            self.prefixes.clear()

    # ---- a step ----

    def _round(self) -> None:
        with uninterrupted():
            try:
                self._admit()
                self._fill()
                self._decode()
            except Exception:
                self._recover()
                raise

    def _recover(self) -> None:
        """After an error nothing that a round touched is trusted: a fresh cache, and an end for the requests that had slots."""
        self._steps.reset(self._new_cache())
        self.prefixes.clear()
        for request in [r for r in self._rows if r is not None]:
            self._finish(request, "error")
            self._events.append(Event(request.ticket, request.answer.made, None, None, None, "error"))

    def next_events(self, ticket: int) -> list[Event]:
        """Events of one request, by a round if none is there yet; none at all if the request is unknown or over."""
        with self._lock:
            mine = self.take(ticket)
            while not mine and ticket in self._requests:
                self._round()
                mine = self.take(ticket)
            return mine

    def _admit(self) -> None:
        for slot, holder in enumerate(self._rows):
            if holder is None and self._waiting:
                request = self._waiting.popleft()
                request.slot = slot
                self._rows[slot] = request
                self._clear(slot)
                self._restore(request)

    def _fill(self) -> None:
        """One piece of the prompt that was submitted first."""
        request = min((r for r in self._rows if r is not None and r.prefilling), key=lambda r: r.ticket, default=None)
        if request is None:
            return
        length, start = len(request.prompt), request.filled
        skip = self._skipped(request)
        full = start >= skip
        block = self.prefixes.block
        count = min((length if full else skip) - start, self.chunk, block - start % block)  # pieces end where blocks do
        logits = self._append(request.slot, request.prompt[start : start + count], count, full=full)
        request.filled += count
        first = None
        if not request.prefilling:
            assert logits is not None
            first = self._steps.start([request.slot], [request.sampling], logits)
        if request.filled % block == 0 or request.filled == length:
            self._keep(request.slot, request.prompt[: request.filled])
        if first is not None:
            self._add(request, int(first[0][0]), float(first[1][0]))

    def _decode(self) -> None:
        limit = np.array([0 if r is None or r.prefilling else r.answer.left for r in self._rows])
        if not limit.any():
            return
        made = self._steps.step(limit)
        for slot, request in enumerate(self._rows):
            if request is None or not limit[slot]:
                continue
            count = int(made.counts[slot])
            tokens = made.tokens[slot, :count].tolist()
            request.fed += tokens
            for token, logprob in zip(tokens, made.logprobs[slot, :count].tolist(), strict=True):
                if not request.answer.finished:
                    self._add(request, token, logprob, fed=True)

    def _add(self, request: _Request, token: int, logprob: float, *, fed: bool = False) -> None:
        if not fed:
            request.fed.append(token)
        index = request.answer.made
        text = request.answer.add(token)
        finished = request.answer.finished
        self._events.append(Event(request.ticket, index, token, logprob, text, finished))
        if finished:
            self._finish(request, finished)

    def _finish(self, request: _Request, why: Finish) -> None:
        request.answer.finished = why
        self._requests.pop(request.ticket, None)
        slot, request.slot = request.slot, -1
        if slot < 0:
            return
        self._rows[slot] = None
        if why not in ("cancelled", "error"):
            held = int(self._steps.cache.lengths()[slot])
            self._keep(slot, np.concatenate([request.prompt, np.array(request.fed, np.int32)])[:held])

    def take(self, ticket: int) -> list[Event]:
        """Events of one request that are there already."""
        with self._lock:
            mine = [event for event in self._events if event.ticket == ticket]
            self._events = [event for event in self._events if event.ticket != ticket]
            return mine

    # ---- rows ----

    def _append(self, slot: int, tokens: np.ndarray, count: int, *, full: bool) -> jax.Array | None:
        size = next(s for s in self.sizes if s >= count)
        padded = np.zeros((1, size), np.int32)
        padded[0, :count] = tokens
        steps, bound = self._steps, self.bound
        feed = bound.feed if steps.cache.draft_window_LBWH is not None else None
        lengths = steps.cache.lengths()
        logits, cache = slots.fill(
            *(bound.structure, feed and feed[0], bound.state, feed and feed[1]),
            *(steps.cache, jnp.int32(slot), padded, np.array([count], np.int32)),
            full=full,
        )
        lengths[slot] += count
        steps.cache = cache.with_mirror(lengths)
        return logits

    def _clear(self, slot: int) -> None:
        lengths = self._steps.cache.lengths()
        lengths[slot] = 0
        self._steps.cache = slots.clear(self._steps.cache, jnp.int32(slot)).with_mirror(lengths)

    def _skipped(self, request: _Request) -> int:
        """Prompt tokens, reused ones included, that pass the encoder alone."""
        new = np.array([len(request.prompt) - request.filled])
        return request.filled + int(skipped_tokens(self.bound.config, new, self.route, 1)[0])

    def _restore(self, request: _Request) -> None:
        """Start from what is kept of an earlier request that begins alike."""
        node = self.prefixes.find(request.prompt, functools.partial(self._usable, len(request.prompt)))
        if node is None:
            return
        cache, row = self._steps.cache, jnp.int32(request.slot)
        lengths = cache.lengths()
        for part in node.chain():
            cache = slots.put_block(cache, row, jnp.int32(part.start), part.block)
        cache = slots.put_snapshot(cache, row, node.snapshot)
        lengths[request.slot] = request.filled = node.end
        self._steps.cache = cache.with_mirror(lengths)

    def _usable(self, length: int, node: Node) -> bool:
        """Whether a prompt can go on from a snapshot: its decoder windows are whole there, or nothing will read them."""
        tail = length - int(skipped_tokens(self.bound.config, np.array([length]), self.route, 1)[0])
        whole = node.decoder_from == 0 or node.end - node.decoder_from >= self._tail()
        return whole or node.end <= length - tail

    def _tail(self) -> int:
        """Tokens after which decoder windows are as good as the route makes them."""
        far = np.array([1 << 30])
        return (1 << 30) - int(skipped_tokens(self.bound.config, far, self.route, 1)[0]) if self.route != "full" else 0

    def _keep(self, slot: int, tokens: np.ndarray) -> None:
        whole = -(-len(tokens) // self.prefixes.block) * self.prefixes.block
        if self.prefixes.limit <= 0 or len(tokens) == 0 or whole > self._steps.cache.max_length:
            return
        cache, row = self._steps.cache, jnp.int32(slot)
        snapshot = slots.cut_snapshot(cache, row)
        cut = functools.partial(slots.cut_block, cache, row, tokens=self.prefixes.block)
        self.prefixes.add(tokens, lambda start: cut(jnp.int32(start)), snapshot, int(snapshot.decoder_from_B[0]))

    def _block(self) -> int:
        multiple = slots.block_multiple(self.bound.config.plan.ratios, self._steps.cache)
        return max(self.chunk // multiple, 1) * multiple

    def _capacity(self) -> int:
        """Room for whole blocks and for the drafts behind the last token."""
        block = self.chunk * 4
        return min(-(-self.max_length // block) * block, self.bound.config.max_position_embeddings)

    # ---- warming up ----

    def _widths(self) -> tuple[int, ...]:
        return drafting.widths(self.bound.config) if self._steps.speculative else (1,)

    def _warm_decoder(self, width: int) -> Callable[[], Any]:
        def run() -> None:
            steps = self._steps
            steps.start([0], [Sampling()], jnp.zeros((1, self.bound.config.vocab_size)))
            steps.compile(width)

        return run

    def _warm_slots(self) -> None:
        cache, row = self._steps.cache, jnp.int32(0)
        lengths = cache.lengths()
        block = slots.cut_block(cache, row, jnp.int32(0), tokens=self.prefixes.block)
        snapshot = slots.cut_snapshot(cache, row)
        cache = slots.put_block(cache, row, jnp.int32(0), block)
        self._steps.cache = slots.put_snapshot(cache, row, snapshot).with_mirror(lengths)


def _sizes(chunk: int) -> tuple[int, ...]:
    """Sizes of pieces: from 16 up to the chunk."""
    sizes, size = [], SMALLEST_PIECE
    while size < chunk:
        sizes.append(size)
        size *= _PIECE_STEP
    return (*sizes, chunk)


def _route(decoder: Any) -> Literal["exact", "replay", "full"]:
    if decoder not in ("exact", "replay", "full"):
        raise ValueError(f"{decoder=} must be 'exact', 'replay' or 'full'")
    return decoder
