"""Documents, their packing, and an order that can be taken up again."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csa2_jax import ModelConfig
from train.data import Batches, DataSettings, Rows, held_out_batches, pack, split
from train.documents import DataError, Store, find_files, open_store, read_documents, text_encoder

CONFIG = ModelConfig.from_hf(Path(__file__).parents[2] / "configs" / "train_tiny.json")


def make_store(lengths: list[int]) -> Store:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = (np.arange(offsets[-1]) % 250 + 3).astype(np.int32)
    return Store(tokens, np.ones(len(tokens), np.uint8), offsets)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=60), align=st.sampled_from([1, 2, 8]))
@pytest.mark.smoke
def test_packing_keeps_every_token_once_aligned_and_in_order(lengths: list[int], align: int) -> None:
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows = pack(offsets, np.arange(len(lengths)), 32, align)
    seen = np.zeros(offsets[-1], int)
    for row in rows:
        end = 0
        for piece in row:
            assert piece.column % align == 0
            assert piece.column >= end
            end = piece.column + piece.end - piece.start
            assert end <= 32
            seen[piece.start : piece.end] += 1
    # A last piece of one token has nothing to predict and is left out.
    alone = [offsets[i + 1] - 1 for i, n in enumerate(lengths) if n % 32 == 1]
    expected = np.ones(offsets[-1], int)
    expected[alone] = 0
    np.testing.assert_array_equal(seen, expected)


def test_short_documents_share_rows() -> None:
    offsets = np.arange(0, 101 * 8, 8)
    assert len(pack(offsets, np.arange(100), 32, 8)) == 25


def test_rows_predict_within_documents_alone() -> None:
    store = make_store([5, 20, 3])
    row = Rows(store, np.arange(3), CONFIG, 64)[0]
    for number in range(3):
        here = np.flatnonzero(row["segment"] == number)
        assert (np.diff(here) == 1).all()
        assert (row["origin"][here] == here[0]).all()
        assert here[0] % CONFIG.document_alignment == 0
        np.testing.assert_array_equal(row["targets"][here[:-1]], row["tokens"][here[1:]])
        np.testing.assert_array_equal(row["weight"][here], [*[1.0] * (len(here) - 1), 0.0])
    assert (row["tokens"][row["segment"] < 0] == CONFIG.pad_token_id).all()
    assert row["weight"][row["segment"] < 0].sum() == 0


def test_batches_go_on_where_their_state_was_taken() -> None:
    rows = Rows(make_store([50] * 40), np.arange(40), CONFIG, 64)
    data = DataSettings(train=("x",), tokens=64, rows=2, micro_batches=3, seed=4)
    first = Batches(rows, data)
    for _ in range(4):  # into the second epoch of 40 rows, 6 at a time
        next(first)
    state = first.state()
    expected = [next(first) for _ in range(8)]
    again = Batches(rows, data)
    again.restore(json.loads(json.dumps(state)))
    for batch in expected:
        found = next(again)
        assert batch.tokens.shape == (3, 2, 64)
        for field in dataclasses.fields(batch):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(batch, field.name))
    other = Batches(rows, dataclasses.replace(data, seed=5))
    assert not np.array_equal(next(other).tokens, next(Batches(rows, data)).tokens)


def test_held_out_documents_are_not_trained_on_and_fill_up_with_empty_rows() -> None:
    store = make_store([50] * 10)
    documents, (same, out) = split(store, None, 5)
    assert same is store
    assert sorted([*documents, *out]) == list(range(10))
    assert list(out) == [4, 9]
    data = DataSettings(train=("x",), tokens=64, rows=8)
    (batch,) = held_out_batches(Rows(store, out, CONFIG, 64), data, 3)
    assert batch.tokens.shape == (8, 64)
    assert (batch.segment[2:] == -1).all()
    assert batch.weight[2:].sum() == 0
    with pytest.raises(DataError, match=r"3 documents are too few to hold out every 5th"):
        split(make_store([5, 5, 5]), None, 5)


def test_texts_lines_and_datasets_become_the_same_tokens(tmp_path: Path) -> None:
    texts = ["first text", "zweiter Text: äöü", "third"]
    (tmp_path / "a.txt").write_text(texts[0], encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text(texts[1], encoding="utf-8")
    (tmp_path / "sub" / "ignored.bin").write_bytes(b"\xff\xfe")
    lines = [{"text": texts[2]}, {"prompt": "why? ", "completion": "because"}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n", encoding="utf-8")
    files = find_files(["*.txt", "sub", "c.jsonl"], tmp_path)
    assert [f.name for f in files] == ["a.txt", "b.md", "c.jsonl"]
    store = open_store(tmp_path / "store", files, "text", "bytes", CONFIG)
    assert len(store) == 4
    encode = text_encoder("bytes", CONFIG)
    for i, text in enumerate([*texts, "why? because"]):
        ids = store.tokens[store.offsets[i] : store.offsets[i + 1]]
        assert list(ids) == [CONFIG.bos_token_id, *encode(text), CONFIG.eos_token_id]
    flags = store.predict[store.offsets[3] : store.offsets[4]]
    assert list(flags) == [0] * 6 + [1] * 8  # the prompt is read, the completion and its end are predicted
    datasets = pytest.importorskip("datasets", reason="optional: pip install datasets")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "hf"))
    assert [d.text for d in read_documents(find_files(["hf"], tmp_path)[0], "text")] == texts


def test_a_store_is_made_once_and_again_when_its_data_change(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    told: list[int] = []

    def make() -> Store:
        files = find_files(["a.txt"], tmp_path)
        return open_store(tmp_path / "store", files, "text", "bytes", CONFIG, lambda done, files: told.append(done))

    make()
    make()
    assert told == [1]
    (tmp_path / "a.txt").write_text("other text")
    assert len(make().tokens) == 12
    assert told == [1, 1]
    assert not list((tmp_path / "store").glob("*.part"))


def test_data_that_cannot_be_used_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'nothing' names no data: give a text or .jsonl file"):
        find_files(["nothing"], tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    with pytest.raises(DataError, match=r"bad.jsonl, line 2, is not JSON"):
        list(read_documents(tmp_path / "bad.jsonl", "text"))
    (tmp_path / "other.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match=r"line 1, has the fields \['body'\]: a text is wanted in 'text'"):
        list(read_documents(tmp_path / "other.jsonl", "text"))
    (tmp_path / "latin.txt").write_bytes("\xe4".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt is not UTF-8"):
        list(read_documents(tmp_path / "latin.txt", "text"))
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty.txt: no text in 1 files"):
        open_store(tmp_path / "store", [tmp_path / "empty.txt"], "text", "bytes", CONFIG)
    with pytest.raises(DataError, match=r"needs vocab_size >= 259, the model has 200"):
        text_encoder(
            "bytes",
            dataclasses.replace(
                CONFIG, vocab_size=200, engram_compressed_vocab_size=100, engram_layer_ids=(), engram_num_embeddings=()
            ),
        )
    rows = Rows(make_store([50] * 3), np.arange(3), CONFIG, 64)
    with pytest.raises(
        DataError, match=r"the data fills 3 rows of 64 tokens, a step takes data.rows \* data.micro_batches = 8"
    ):
        Batches(rows, DataSettings(train=("x",), tokens=64, rows=8))
