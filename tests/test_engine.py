"""The engine: every request gets the tokens it would get alone, whatever comes, goes, is shared or lies around."""

from __future__ import annotations

import functools
import signal
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel

from csa2_jax import Bound, Engine, Sampling, generate
from csa2_jax.engine import Event
from csa2_jax.prefixes import PrefixStore
from tests import small_models
from tests.small_models import MINI_KNOBS, Small, load_random, poisoned, quick_compilation

FEW = settings(max_examples=6, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
LONG = 160


@functools.cache
def model(fake_quant: bool = False) -> Small:
    """Ratios 3 and 1, W = 4, a decoder of two layers: the exact tail is 8 tokens."""
    loaded = load_random(MINI_KNOBS | {"draft_stages": 1, "encoder_ratios": (3,)}, fake_quant=fake_quant)
    return Small("mini", loaded, Bound.of(loaded), (1, 16, LONG))


def tokens(seed: int, length: int) -> list[int]:
    """Random ids that are not the end-of-sequence id."""
    return np.random.default_rng(seed).integers(3, model().config.vocab_size, length).tolist()


def engine(**options: Any) -> Engine:
    options = {"slots": 3, "max_length": LONG, "chunk": 16, "storage": "f32"} | options
    fake_quant = options["storage"] == "packed"
    return Engine(model(fake_quant).bound, **options)


@functools.cache
def alone(prompt: tuple[int, ...], count: int, temperature: float = 0.0, fake_quant: bool = False) -> tuple[int, ...]:
    """What a request gets that has an engine of its own, which keeps nothing."""
    storage = "packed" if fake_quant else "f32"
    with quick_compilation():
        one = engine(prefix_bytes=0, decoder="full", storage=storage)
        ticket = one.submit(prompt, max_new_tokens=count, sampling=Sampling(temperature, seed=7), stop_at_eos=False)
        return tuple(e.token for e in one.run() if e.ticket == ticket and e.token is not None)


def collected(events: Any) -> dict[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    for event in events:
        found.setdefault(event.ticket, []).append(event)
    return found


def ids(events: list[Event]) -> tuple[int, ...]:
    assert [e.index for e in events] == list(range(len(events)))
    assert all(e.finished is None for e in events[:-1])
    return tuple(e.token for e in events if e.token is not None)


@pytest.mark.parametrize("storage", ["f32", "packed"])
@pytest.mark.parametrize("speculative", [False, 0.0])
@FEW
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 60), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=7
    )
)
def test_greedy_tokens_do_not_depend_on_what_shares_the_batch(
    storage: str, speculative: Any, requests: list[tuple[int, int, int, int]]
) -> None:
    """Prompts that begin alike, of any lengths, arriving over time: tokens of a solo run without reuse or drafts."""
    with quick_compilation():
        served, tickets, events = engine(storage=storage, speculative=speculative), {}, []
        for seed, length, count, wait in requests:
            prompt = tuple(tokens(seed, 60)[:length])
            tickets[served.submit(prompt, max_new_tokens=count, stop_at_eos=False)] = (prompt, count)
            for _ in range(wait):
                events += served.step()
        events += list(served.run())
    found = collected(events)
    for ticket, (prompt, count) in tickets.items():
        assert ids(found[ticket]) == alone(prompt, 12, fake_quant=storage == "packed")[:count]
        assert found[ticket][-1].finished == "length"


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch() -> None:
    prompt = tuple(tokens(0, 20))
    rule = Sampling(1.0, seed=7)
    with quick_compilation():
        served = engine()
        others = [served.submit(tokens(s, 9 + s), max_new_tokens=9, sampling=Sampling(1.0, seed=s)) for s in range(4)]
        ticket = served.submit(prompt, max_new_tokens=10, sampling=rule, stop_at_eos=False)
        found = collected(served.run())
    assert ids(found[ticket]) == alone(prompt, 10, 1.0)
    assert len(found) == len(others) + 1


@pytest.mark.parametrize("decoder", ["exact", "full"])
def test_reuse_is_exact_at_any_cut(decoder: Any) -> None:
    """A long prompt, then prompts that share its first c tokens for every c, then turns that go on behind its answer.

    The cuts pass every residue of the groups of 3 and the borders of blocks.
    """
    base = tokens(1, 100)
    with quick_compilation():
        served = engine(decoder=decoder)
        first = served.submit(base, max_new_tokens=7, stop_at_eos=False)
        answer = ids(collected(served.run())[first])
        for cut in (1, 2, 3, 4, 15, 16, 17, 31, 33, 47, 48, 50, 98, 99, 100):
            prompt = tuple(base[:cut] + tokens(50 + cut, 30))
            ticket = served.submit(prompt, max_new_tokens=4, stop_at_eos=False)
            assert ids(collected(served.run())[ticket]) == alone(prompt, 4), cut
        before = served.prefixes.reused_tokens
        follow_up = tuple(base + list(answer) + tokens(2, 11))
        ticket = served.submit(follow_up, max_new_tokens=4, stop_at_eos=False)
        assert ids(collected(served.run())[ticket]) == alone(follow_up, 4)
        assert served.prefixes.reused_tokens - before == len(base) + len(answer) - 1  # the last token was never fed


def test_second_request_of_a_prompt_reuses_all_it_can() -> None:
    base = tokens(1, 100)
    with quick_compilation():
        served = engine()
        for _ in range(2):
            served.submit(base, max_new_tokens=1)
            list(served.run())
    assert served.prefixes.hits == 1
    assert served.prefixes.reused_tokens >= 80


def test_what_is_kept_stays_within_its_bytes() -> None:
    with quick_compilation():
        served = engine(prefix_bytes=60_000)
        sizes = []
        for seed in range(12):
            served.submit(tokens(seed, 70), max_new_tokens=2)
            list(served.run())
            sizes.append(served.prefixes.nbytes)
        kept = sum(a.nbytes for a in _arrays(served))
        assert served.prefixes.nbytes == kept
    assert max(sizes) <= 60_000
    assert len(served.prefixes) > 0
    served.close()
    assert (served.prefixes.nbytes, len(served.prefixes)) == (0, 0)


def _arrays(served: Engine) -> list[Any]:
    nodes = list(served.prefixes._all())
    return [leaf for node in nodes for leaf in jax.tree.leaves((node.block, node.snapshot))]


def test_prompts_that_part_inside_a_block_share_nothing_of_it() -> None:
    """Equal for a whole block and some tokens, then different: reuse stops at the last kept place before the difference."""
    base = tokens(1, 60)
    other = (*base[:20], *tokens(9, 40))
    with quick_compilation():
        served = engine(decoder="full")
        served.submit(base, max_new_tokens=1)
        list(served.run())
        ticket = served.submit(other, max_new_tokens=5, stop_at_eos=False)
        assert ids(collected(served.run())[ticket]) == alone(other, 5)
    assert served.prefixes.reused_tokens <= 20


@pytest.mark.parametrize("storage", ["f32", "packed"])
def test_poison_in_every_unused_slot_changes_nothing(storage: str) -> None:
    """NaN wherever no row may look, before every step, with requests that come and go and reuse one another."""
    results = []
    for poison in (False, True):
        with quick_compilation():
            served = engine(storage=storage, speculative=0.0)
            for seed in (0, 1, 0, 2, 1):
                served.submit(tokens(seed, 40), max_new_tokens=6, stop_at_eos=False)
            events = []
            while served.busy:
                if poison:
                    cache = served._steps.cache
                    served._steps.cache = poisoned(model().config, cache).with_mirror(cache.lengths())
                events += served.step()
            results.append({t: ids(e) for t, e in collected(events).items()})
    assert results[0] == results[1]


def test_cancelled_requests_end_at_once_and_leave_others_alone() -> None:
    prompts = [tuple(tokens(s, 30)) for s in range(5)]
    with quick_compilation():
        served = engine(slots=2)
        tickets = [served.submit(p, max_new_tokens=8, stop_at_eos=False) for p in prompts]
        events = served.step()
        assert served.cancel(tickets[0])  # being filled
        assert served.cancel(tickets[3])  # waiting
        for _ in range(4):
            events += served.step()
        assert served.cancel(tickets[1])  # decoding
        assert not served.cancel(tickets[1])
        assert not served.cancel(999)
        events += list(served.run())
    found = collected(events)
    for i, ticket in enumerate(tickets):
        if i in (0, 1, 3):
            assert found[ticket][-1].finished == "cancelled"
        else:
            assert ids(found[ticket]) == alone(prompts[i], 8)
    assert not served.busy


def test_stream_yields_one_request_and_cancels_it_when_closed_early() -> None:
    prompts = [tuple(tokens(s, 12)) for s in range(2)]
    with quick_compilation():
        served = engine()
        first, second = (served.submit(p, max_new_tokens=8, stop_at_eos=False) for p in prompts)
        stream = served.stream(first)
        seen = [next(stream) for _ in range(3)]
        stream.close()
        assert ids(seen) == alone(prompts[0], 8)[:3]
        assert ids(list(served.stream(second))) == alone(prompts[1], 8)
        with pytest.raises(ValueError, match="unknown"):
            next(served.stream(first))
        third = served.stream(served.submit(prompts[0], max_new_tokens=8))
        third.close()  # before it was asked for anything
    assert not served.busy


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [[1]]}, "prompts must be"),
        ({"prompt": [1.5]}, "integers"),
        ({"prompt": [10**6]}, "outside"),
        ({"prompt": [-1]}, "outside"),
        ({"prompt": "text"}, "integers"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": LONG}, "max_length=160"),
        ({"sampling": {"temperature": 1}}, "must be a Sampling"),
        ({"stop": "x"}, "needs a tokenizer"),
        ({"stop": ["", "x"]}, "not empty"),
        ({"stop": [3]}, "must be strings"),
    ],
)
def test_requests_that_could_never_run_are_refused_and_not_queued(wrong: dict[str, Any], words: str) -> None:
    served = idle()
    with pytest.raises(ValueError, match=words):
        served.submit(**({"prompt": [5, 6, 7]} | wrong))
    assert not served.busy


@functools.cache
def idle() -> Engine:
    return engine()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"slots": 0}, "slots=0"),
        ({"max_length": -1}, "max_length=-1"),
        ({"max_length": 10**9}, "max_position_embeddings"),
        ({"chunk": 0}, "chunk=0"),
        ({"decoder": "half"}, "'half'"),
        ({"storage": "int8"}, "storage='int8'"),
        ({"speculative": 5.0}, "confidence from 0 to 1"),
        ({"speculative": None}, "confidence from 0 to 1"),
    ],
)
def test_engines_that_cannot_be_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        engine(**wrong)


def word_tokenizer() -> Tokenizer:
    """One character per token: id i is a letter, so that stop strings straddle tokens."""
    size = model().config.vocab_size
    tokenizer = Tokenizer(WordLevel({chr(0x4E00 + i): i for i in range(size)}, unk_token=chr(0x4E00)))
    tokenizer.decoder = Fuse()
    return tokenizer


def test_packed_engine_of_a_model_without_roundings_is_refused() -> None:
    with pytest.raises(ValueError, match="fake_quant=False"):
        Engine(model().bound, storage="packed", max_length=LONG)


@pytest.mark.parametrize("where", ["fill", "start", "keep"])
def test_whatever_fails_in_a_step_no_wrong_token_comes(where: str) -> None:
    """The requests with slots end in error, the waiting one gets its tokens, and slots are free again."""
    prompts = [tuple(tokens(s, 20)) for s in range(3)]
    with quick_compilation():
        served = engine(slots=2)
        tickets = [served.submit(p, max_new_tokens=8, stop_at_eos=False) for p in prompts]
        owner, name = {"fill": (served, "_append"), "start": (served._steps, "start"), "keep": (served, "_keep")}[where]
        right = getattr(owner, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("device")

        setattr(owner, name, fails)
        events: list[Event] = []
        with pytest.raises(RuntimeError, match="device"):
            events += served.run()
        setattr(owner, name, right)
        events += list(served.run())
    found = collected(events)
    assert [found[t][-1].finished for t in tickets] == ["error", "error", "length"]
    assert all(e.finished is None for t in tickets for e in found[t][:-1])
    assert ids(found[tickets[2]]) == alone(prompts[2], 8)
    assert not served.busy


def test_numpy_seeds_are_seeds() -> None:
    prompt = tuple(tokens(0, 9))
    with quick_compilation():
        served = engine()
        pair = [served.submit(prompt, max_new_tokens=5, sampling=Sampling(1.0, seed=s)) for s in (np.int64(5), 5)]  # type: ignore[arg-type]
        found = collected(served.run())
    assert [e.token for e in found[pair[0]]] == [e.token for e in found[pair[1]]]


def test_a_long_chain_stays_within_its_bytes_and_keeps_its_end() -> None:
    """One conversation that grows: its blocks share, old snapshots go first, the newest end can be found."""
    block, limit, snapshot, whole = (
        np.zeros(10, np.uint8),
        3000,
        np.zeros(200, np.uint8),
        np.arange(1600, dtype=np.int32),
    )
    store = PrefixStore(4, limit)
    for end in range(4, 401, 4):
        store.add(whole[:end], lambda start: block, snapshot, 0)
        assert store.nbytes <= limit
        found = store.find(whole[: end + 1], lambda node: True)
        assert found is not None
        assert found.end == end
    for end in range(804, 1601, 16):  # blocks alone pass the limit: nothing is kept beyond it, and nothing breaks
        store.add(whole[:end], lambda start: block, snapshot, 0)
        assert store.nbytes <= limit
    deep = PrefixStore(1, 1 << 30)
    deep.add(whole, lambda start: block, snapshot, 0)
    assert len(deep) == 1600
    assert deep.nbytes == 1600 * 10 + 200


def test_stop_strings_end_an_answer_and_are_not_part_of_it() -> None:
    prompt = tuple(tokens(0, 20))
    expected = alone(prompt, 12)
    text = "".join(chr(0x4E00 + t) for t in expected)
    stop = text[4:7]
    end = text.find(stop)
    with quick_compilation():
        served = engine(tokenizer=word_tokenizer())
        ticket = served.submit(prompt, max_new_tokens=12, stop=[stop, "never"], stop_at_eos=False)
        events = collected(served.run())[ticket]
        whole = served.submit(prompt, max_new_tokens=12, stop=text[4:6] + "x", stop_at_eos=False)
        unstopped = collected(served.run())[whole]
    assert "".join(e.text or "" for e in events) == text[:end]
    assert events[-1].finished == "stop"
    assert len(events) == end + len(stop)
    assert "".join(e.text or "" for e in unstopped) == text


def test_programs_are_no_more_than_buckets_and_all_compiled_by_warming_up() -> None:
    """40 random lengths, the largest and a prime among them; then nothing is compiled any more."""
    with quick_compilation():
        served = engine(slots=2, chunk=64, speculative=0.0)
        seen: list[tuple[int, int]] = []
        assert served.warm_up(lambda *progress: seen.append(progress)) <= served.buckets
        assert seen[-1][0] == seen[-1][1] == len(seen)
        before = served.programs()
        rng = np.random.default_rng(0)
        lengths = [1, 149, 150, *rng.integers(1, 150, 37).tolist()]
        for n in lengths:
            served.submit(tokens(n, n), max_new_tokens=int(rng.integers(1, 9)))
        list(served.run())
        assert served.programs() == before
        served.submit([5], max_new_tokens=2)
        with pytest.raises(RuntimeError, match="without requests"):
            served.warm_up()


def test_an_interrupt_waits_for_the_end_of_the_step() -> None:
    """Ctrl-C in the middle of a step loses nothing, not the tokens of that step either."""
    prompt = tuple(tokens(0, 10))
    with quick_compilation():
        served = engine()
        ticket = served.submit(prompt, max_new_tokens=8, stop_at_eos=False)
        fill, events = served._fill, []

        def interrupted() -> None:
            fill()
            signal.raise_signal(signal.SIGINT)

        served._fill = interrupted  # type: ignore[method-assign]
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores the signal
        try:
            with pytest.raises(KeyboardInterrupt):
                served.step()
        finally:
            signal.signal(signal.SIGINT, before)
        served._fill = fill  # type: ignore[method-assign]
        events += list(served.run())
    assert ids([e for e in events if e.ticket == ticket]) == alone(prompt, 8)


def test_a_failing_device_ends_what_was_running_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [tuple(tokens(s, 20)) for s in range(3)]
    with quick_compilation():
        served = engine(slots=2)
        tickets = [served.submit(p, max_new_tokens=8, stop_at_eos=False) for p in prompts]
        events = served.step()
        events += served.step()
        step = served._steps.step

        def fails(limit: Any) -> Any:
            step(limit)
            for leaf in jax.tree.leaves(served._steps.cache):
                leaf.delete()
            raise RuntimeError("out of memory")

        served._steps.step = fails  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="out of memory"):
            events += served.run()
        served._steps.step = step  # type: ignore[method-assign]
        events += list(served.run())
    found = collected(events)
    assert [found[t][-1].finished for t in tickets] == ["error", "error", "length"]
    assert ids(found[tickets[2]]) == alone(prompts[2], 8)


def test_engine_tokens_are_those_of_generate() -> None:
    prompt = tokens(3, 25)
    with quick_compilation():
        expected = [e.token for e in generate(model().bound, [prompt], max_new_tokens=10, stop_at_eos=False)]
    assert alone(tuple(prompt), 10) == tuple(expected)


def test_small_models_room_is_enough() -> None:
    """The fixture rule: selections drop entries and candidates drop blocks in these prompts."""
    config = small_models.mini().config
    assert config.index_topk < 60 // 4
    assert config.candidate_topk_blocks < 60 // config.candidate_block_size
