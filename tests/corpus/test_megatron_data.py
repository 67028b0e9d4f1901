"""Megatron's indexed data as a source: the ids stay in their file, the samples are those of the same documents."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import CorpusSource
from corpus.megatron_blocks import blocks
from corpus.megatron_index import read_index
from corpus.prepare import prepare
from corpus.summary import table
from tests.corpus.helpers import EOD, config, documents_of, prepared, stream, token_file, train_documents, write_jsonl
from tests.corpus.indexed import write_indexed

DOCUMENTS = st.lists(st.lists(st.integers(0, 255), max_size=30), min_size=2, max_size=40)
TEXTS = [[i % 251, *range(i % 23), 7 + i % 3] for i in range(200)]


def closed(documents):
    return [[*document, EOD] if document else [] for document in documents]


def everything(tokens):
    return tokens.read(0, len(tokens)).tolist()


def prepared_source(tmp_path, *, vocab_size=257, cache=None, **fields):
    data = config(cache or tmp_path, "unused", **fields.pop("data", {}))
    data.sources = [CorpusSource(**{"path": str(tmp_path / "x"), **fields})]
    return prepare(data, vocab_size=vocab_size, seed=7)


@given(documents=DOCUMENTS, appended=st.booleans(), length=st.integers(1, 12), data=st.data())
@settings(max_examples=60)
def test_samples_are_those_of_the_same_documents_in_a_token_file(tmp_path_factory, documents, appended, length, data):
    folder = tmp_path_factory.mktemp("any")
    kept = [document for document in documents if document]
    expected = token_file(kept)
    if len(expected) <= length or (not appended and len({document[-1] for document in kept}) == 1):
        return
    path = write_indexed(
        folder / "x", closed(documents) if appended else documents, dtype=data.draw(st.sampled_from([3, 4, 5, 8]))
    )
    corpus = prepared(folder, path, sequence_length=length)
    (got,) = corpus.train.streams
    assert everything(got.tokens) == expected.tokens.tolist() and got.tokens.ends.tolist() == expected.ends.tolist()
    start = data.draw(st.integers(0, len(expected)))
    stop = data.draw(st.integers(start, len(expected)))
    assert got.tokens.read(start, stop).tolist() == expected.tokens[start:stop].tolist()
    same = stream(expected, sequence_length=length, seed=7)
    for index in range(2 * len(same)):
        mine, theirs = got.sample(index), same.sample(index)
        assert np.array_equal(mine.tokens, theirs.tokens) and np.array_equal(mine.positions, theirs.positions)
        assert (mine.loss_mask is None) == (theirs.loss_mask is None)
        assert mine.loss_mask is None or np.array_equal(mine.loss_mask, theirs.loss_mask)
    counts = corpus.sources[0].manifest["counts"]
    assert (counts["rows"], counts["documents"], counts["empty"]) == (
        len(documents), len(kept), len(documents) - len(kept))  # fmt: skip
    assert counts["duplicates"] == len(kept) - len({tuple(document) for document in kept})
    assert counts["closed"] == (len(kept) if appended else 0)


def test_nothing_is_copied_and_a_second_call_reads_the_index_no_more(tmp_path, monkeypatch):
    path = write_indexed(tmp_path / "x", closed(TEXTS))
    first = prepared(tmp_path, path, validation_fraction=0.2)
    names = sorted(file.name for file in first.sources[0].folder.iterdir())
    assert names == ["manifest.json", "train.ends", "train.starts", "validation.ends", "validation.starts"]

    def refuse(*_, **__):
        raise AssertionError("the documents were gone through again")

    monkeypatch.setattr("corpus.prepare.index_documents", refuse)
    second = prepared(tmp_path, path, validation_fraction=0.2)
    assert second.fingerprint == first.fingerprint
    assert everything(second.train.streams[0].tokens) == everything(first.train.streams[0].tokens)


def test_splits_are_by_content_whatever_the_type_and_whether_ends_are_stored(tmp_path):
    documents = [*TEXTS, *TEXTS[:40]]
    found = []
    for name, stored, dtype in (("a", closed(documents), 8), ("b", documents, 4), ("c", closed(documents), 5)):
        corpus = prepared(tmp_path, write_indexed(tmp_path / name, stored, dtype=dtype), validation_fraction=0.2)
        train, held_out = train_documents(corpus), documents_of(corpus.validation)
        assert not set(train) & set(held_out)
        assert sorted(train + held_out) == sorted(bytes(document) for document in documents)
        assert 20 <= len(held_out) <= 75  # 48 expected, 6.9 the standard deviation of 200 and 40 repeated ones
        found.append((train, held_out, corpus.fingerprint, corpus.sources[0].manifest["counts"]["duplicates"]))
    assert all(entry == found[0] for entry in found) and found[0][3] == 40
    write_indexed(tmp_path / "a", closed([*documents[:-1], [3, 3]]))
    assert prepared(tmp_path, tmp_path / "a", validation_fraction=0.2).fingerprint != found[0][2]


@pytest.mark.parametrize("name", ["x", "x.bin", "x.idx"])
def test_a_prefix_or_either_file_names_it(tmp_path, name):
    write_indexed(tmp_path / "x", closed(TEXTS))
    assert len(train_documents(prepared(tmp_path, tmp_path / name))) == 200


def test_documents_that_lack_their_end_get_it_and_no_other_is_doubled(tmp_path):
    write_indexed(tmp_path / "x", [[1, 2, EOD], [3, 4], [EOD], [5, EOD, 6, EOD], [7, 8, EOD, EOD]])
    corpus = prepared_source(tmp_path)
    assert everything(corpus.train.streams[0].tokens) == [1, 2, EOD, 3, 4, EOD, 5, EOD, 6, EOD, 7, 8, EOD, EOD]
    counts = corpus.sources[0].manifest["counts"]
    assert {name: counts[name] for name in ("documents", "empty", "closed", "eod_inside")} == {
        "documents": 4, "empty": 1, "closed": 3, "eod_inside": 2}  # fmt: skip
    shown = table(corpus)
    assert "at the end of 3 documents in the file, put after 1; 2 more inside documents" in shown
    assert "5 documents, left out 1 empty" in shown


def test_an_end_that_is_not_clear_is_asked_for_and_taken_as_said(tmp_path):
    write_indexed(tmp_path / "x", [[1, 2, 10], [3, 10], [4, 10]])
    with pytest.raises(
        ValueError, match=r"all 3 documents end with the id 10, .* 256; set eod_id of this entry: 10 if"
    ):
        prepared_source(tmp_path)
    assert everything(prepared_source(tmp_path, eod_id=10, data={"sequence_length": 3}).train.streams[0].tokens) == [
        1, 2, 10, 3, 10, 4, 10]  # fmt: skip
    appended = prepared_source(tmp_path, eod_id=256)
    assert everything(appended.train.streams[0].tokens) == [1, 2, 10, EOD, 3, 10, EOD, 4, 10, EOD]
    with pytest.raises(ValueError, match=r"eod_id=300 is none of the 257 ids of data.tokenizer=byte"):
        prepared_source(tmp_path, eod_id=300)


def test_ids_beyond_the_tokenizer_are_refused_with_all_numbers_as_in_case_e4(tmp_path):
    path = write_indexed(tmp_path / "x", [*closed(TEXTS), [1, 50256, 2]])
    with pytest.raises(ValueError, match=r"document 200 of .*x\.bin holds the id 50256") as caught:
        prepared(tmp_path, path, vocab_size=512)
    for words in ("data.tokenizer=byte has 257 ids", "(model.vocab_size=512)", "model.vocab_size to at least 50257"):
        assert words in str(caught.value)
    with pytest.raises(ValueError, match=r"model.vocab_size=256 is smaller than the 257 ids"):
        prepared(tmp_path, path, vocab_size=256)
    write_indexed(tmp_path / "x", [[1, 2], [3, -1]], dtype=4)
    with pytest.raises(ValueError, match=r"document 1 of .*x\.bin holds the id -1: ids are not negative"):
        prepared(tmp_path, path)


def test_megatrons_split_takes_ranges_of_the_documents(tmp_path):
    write_indexed(tmp_path / "x", closed(TEXTS))
    corpus = prepared_source(tmp_path, split="90,8,2", data={"validation_fraction": 0.1})
    assert train_documents(corpus) == [bytes(document) for document in TEXTS[:180]]
    assert documents_of(corpus.validation) == [bytes(document) for document in TEXTS[180:196]]
    counts = corpus.sources[0].manifest["counts"]
    assert (counts["documents"], counts["left_out"]) == (200, 4) and "4 of neither split" in table(corpus)
    for split, says in (
        ("validation", "write its --split, as 99,1,0"),
        ("0,0,0", "write its --split"),
        ("100", "leaves none of the 200 documents to validate on"),
        ("0,1", "leaves none of the 200 documents to train on"),
    ):
        with pytest.raises(ValueError, match=says):
            prepared_source(tmp_path, split=split, data={"validation_fraction": 0.1})
    assert len(train_documents(prepared_source(tmp_path, split="100"))) == 200


def test_megatrons_split_is_refused_where_documents_have_several_sequences(tmp_path):
    write_indexed(tmp_path / "x", closed(TEXTS[1:5]), num_marks=4, marks=[0, 1, 3, 4])
    with pytest.raises(ValueError, match=r"split=1,1 counts sequences, and document 1 has 2"):
        prepared_source(tmp_path, split="1,1", data={"validation_fraction": 0.1})
    assert len(train_documents(prepared_source(tmp_path))) == 4  # the end inside a document parts the text


def test_at_most_max_documents_are_read_however_they_are_blocked(tmp_path, monkeypatch):
    stored = closed([[], *TEXTS[:3], [], *TEXTS[3:]])
    write_indexed(tmp_path / "x", stored)
    for tokens, documents in ((1 << 22, 1 << 16), (10, 4), (1, 1)):
        monkeypatch.setattr("corpus.megatron_blocks.BLOCK_TOKENS", tokens)
        monkeypatch.setattr("corpus.megatron_blocks.BLOCK_DOCUMENTS", documents)
        corpus = prepared_source(tmp_path, max_documents=3, cache=tmp_path / f"{tokens}")
        assert train_documents(corpus) == [bytes(document) for document in TEXTS[:3]]
        counts = corpus.sources[0].manifest["counts"]
        assert (counts["rows"], counts["documents"], counts["empty"]) == (4, 3, 1)


def test_how_the_file_is_blocked_changes_nothing(tmp_path, monkeypatch):
    index = read_index(write_indexed(tmp_path / "x", closed([[], *TEXTS, []])))

    def found():
        parts = list(blocks(index, eod_id=EOD, num_ids=257, limit=None))
        arrays = {
            name: np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "lengths", "digests")
        }
        return {name: array.tolist() for name, array in arrays.items()}, sum(part.closed for part in parts)

    whole = found()
    assert len(whole[0]["starts"]) == 200 and whole[1] == 200
    for tokens in (1, 7, 100):  # 1, 7: documents longer than a block, hashed in pieces
        monkeypatch.setattr("corpus.megatron_blocks.BLOCK_TOKENS", tokens)
        assert found() == whole


def test_a_blend_with_text_draws_from_both(tmp_path):
    write_indexed(tmp_path / "x", closed(TEXTS))
    text = write_jsonl(tmp_path / "t.jsonl", ["abc" * 20] * 30)
    corpus = prepared(tmp_path, tmp_path / "x", text)
    assert [len(train_documents(corpus, source)) for source in (0, 1)] == [200, 30]
    assert json.loads((corpus.sources[0].folder / "manifest.json").read_text())["dtype"] == "<u2"


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path):
    write_indexed(tmp_path / "x", closed(TEXTS))
    write_indexed(tmp_path / "empty", [[], []])
    write_indexed(tmp_path / "one", closed([[1] * 50]))
    (tmp_path / "alone.idx").write_bytes(b"")
    (tmp_path / "nanogpt.bin").write_bytes(b"\0\0")
    for path, fields, says in (
        ("x", {"tokenizer": "bpe"}, r"data.tokenizer=bpe is trained on text, and .*x holds token ids"),
        ("empty", {}, r"empty: no token in its 2 documents"),
        ("one", {"validation_fraction": 0.1}, r"one is one document; set data.validation_fraction=0"),
        ("x", {"validation_fraction": 1e-9}, r"holds out none of the 200 documents"),
        ("alone", {}, r"alone\.bin: no such file; Megatron data is alone\.idx and alone\.bin"),
        ("nanogpt.bin", {}, r"nanogpt\.idx: no such file; Megatron data is nanogpt\.idx and nanogpt\.bin"),
        ("*.idx", {}, r"give each Megatron prefix a data.sources entry of its own: path=.*alone"),
        ("", {}, r"the folder holds no .*; Megatron data goes by its prefix: .*alone"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            prepared(tmp_path, tmp_path / path, **fields)
        assert "\n" not in str(caught.value)
    write_jsonl(tmp_path / "t.jsonl", ["text"])
    with pytest.raises(ValueError, match=r"eod_id=3: is for Megatron data only"):
        prepared_source(tmp_path, path=str(tmp_path / "t.jsonl"), eod_id=3)
