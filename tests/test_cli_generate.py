"""`csa2 generate`: ids without a tokenizer, streamed text with one, clear words for what cannot be done."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers import decoders as token_decoders

from csa2_jax import generate, load_checkpoint
from csa2_jax.cli import main
from csa2_jax.tokenizer import TextStream
from tests.golden_sets import materialise

PROMPT = [3, 14, 15, 92, 65, 35]


def _ids(text: str) -> list[int]:
    return [int(word) for word in text.split()]


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(materialise("tiny8_f32_noqat"), compute_dtype="float32", fake_quant=False)


@pytest.mark.smoke
def test_generate_prints_the_ids_that_the_door_yields(model, capsys):
    directory = str(materialise("tiny8_f32_noqat"))
    flags = ["--compute-dtype", "float32", "--no-fake-quant", "--max-new-tokens", "8"]
    assert main(["generate", "--model", directory, "--prompt-ids", "3,14, 15 92 65 35", *flags]) == 0
    printed = capsys.readouterr()
    made = _ids(printed.out)
    assert len(made) == 8
    assert "8 new" in printed.err
    assert made == [e.token for e in generate(model, [PROMPT], max_new_tokens=8)]
    assert "tokens/s" in printed.err


def _rows(model, prompts, **options):
    """Tokens of each prompt; two prompts in chunks of 8, so that all tests share two compiled shapes."""
    rows: list[list[int]] = [[] for _ in prompts]
    for event in generate(model, prompts, chunk=8, **{"max_new_tokens": 6, "stop_at_eos": False} | options):
        rows[event.row].append(event.token)
    return rows


def test_generate_samples_alike_from_equal_seeds(model):
    def draw(seed, temperature):
        return _rows(model, [PROMPT, PROMPT[:3]], temperature=temperature, seed=seed)

    first = draw(1, 1.5)
    assert first == draw(1, 1.5)
    assert first != draw(2, 1.5)
    assert draw(1, 0.0) == draw(2, 0.0)
    assert [len(row) for row in first] == [6, 6]


def test_generate_stops_at_the_end_token(model):
    eos = model.config.eos_token_id
    options = {"temperature": 30.0, "max_new_tokens": 60}
    for seed in range(20):
        whole = _rows(model, [PROMPT, PROMPT[:3]], seed=seed, **options)
        if any(eos in row for row in whole):
            break
    else:
        pytest.fail("no seed draws the end token, so nothing was tested")
    stopped = _rows(model, [PROMPT, PROMPT[:3]], seed=seed, stop_at_eos=True, **options)
    for row, until in zip(whole, stopped, strict=True):
        assert until == (row[: row.index(eos) + 1] if eos in row else row)


def test_generate_takes_ragged_prompts_in_chunks(model):
    long = (PROMPT * 4)[:21]  # three chunks, the last one short
    prompts = [PROMPT, PROMPT[:1], long]
    alone = [_rows(model, [p, PROMPT[:2]])[0] for p in prompts]
    assert _rows(model, [PROMPT, long]) == [alone[0], alone[2]]
    assert _rows(model, [long, PROMPT[:1]]) == [alone[2], alone[1]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--prompt", "hello"], "no tokenizer.json"),
        ([], "either --prompt TEXT or --prompt-ids"),
        (["--prompt-ids", "1,2", "--prompt", "x"], "either --prompt TEXT or --prompt-ids"),
        (["--prompt-ids", "1,two"], "'two' is not a token id"),
        (["--prompt-ids", "1,256"], "token id 256 at row 0, position 1"),
        (["--prompt-ids", "-1"], "token id -1"),
        (["--prompt-ids", ""], "at least one token"),
        (["--prompt-ids", "1", "--max-new-tokens", "97"], "at most 96 new tokens fit"),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], "max_new_tokens=0"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature=-1.0"),
    ],
)
def test_generate_refuses_with_one_line(arguments, words, capsys):
    directory = str(materialise("tiny8_f32_noqat"))
    flags = [f"{a}={b}" for a, b in zip(arguments[::2], arguments[1::2], strict=True)]
    assert main(["generate", "--model", directory, "--compute-dtype", "float32", "--no-fake-quant", *flags]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "Traceback" not in error


def _byte_tokenizer(path):
    """A tokenizer of 256 single bytes, as byte-level BPE spells them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = token_decoders.ByteLevel()
    tokenizer.save(str(path))
    return tokenizer


def test_generate_streams_text_when_a_tokenizer_lies_beside_the_model(tmp_path, capsys):
    source = materialise("tiny8_f32_noqat")
    shutil.copy(source / "model.safetensors", tmp_path)
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = _byte_tokenizer(tmp_path / "tokenizer.json")
    # The map that the recording was made with; a tokenizer of bytes would compress to another vocabulary.
    np.save(tmp_path / "token_map.npy", (np.arange(256) // 2).astype(np.int32))
    flags = ["--compute-dtype", "float32", "--no-fake-quant", "--max-new-tokens", "6", "--quiet"]
    assert main(["generate", "--model", str(tmp_path), "--prompt", "né!", *flags]) == 0
    text = capsys.readouterr().out.removesuffix("\n")
    ids = [0, *tokenizer.encode("né!").ids]
    model = load_checkpoint(tmp_path, compute_dtype="float32", fake_quant=False)
    made = [e.token for e in generate(model, [ids], max_new_tokens=6)]
    made = made[: made.index(1)] if 1 in made else made
    whole = tokenizer.decode(ids + made, skip_special_tokens=False)
    assert whole.endswith(text)
    assert text == "".join([*map((stream := TextStream(tokenizer, ids)).add, made), stream.finish()])


def test_text_stream_holds_back_half_a_character(tmp_path):
    tokenizer = _byte_tokenizer(tmp_path / "tokenizer.json")
    first, second = tokenizer.encode("é").ids
    stream = TextStream(tokenizer, tokenizer.encode("a").ids)
    assert stream.add(first) == ""
    assert stream.add(second) == "é"
    assert stream.add(first) == ""
    assert stream.finish() == "\ufffd"
