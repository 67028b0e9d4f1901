"""Tokenizers: sizes that count added tokens, ends of documents that text cannot forge, the same BPE each time."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from corpus.tokenizer import END_OF_DOCUMENT, ByteTokenizer, load_tokenizer, require_vocabulary, train_bpe
from tests.corpus.helpers import EOD, prepared, train_documents, write_jsonl

TEXTS = ["def f(x):\n    return x + 1\n" * 20, "naïve café \U0001f600 \0 end\r\n", "import os\n" * 30]


@pytest.fixture
def bpe_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_bpe(TEXTS, size=300).save(str(path))
    return path


def byte_level(*added):
    """256 byte ids, then `added` tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(list(added))
    return tokenizer


@given(text=st.text())
@settings(max_examples=50)
def test_bytes_come_back_as_the_text(text):
    tokenizer = ByteTokenizer()
    (ids,) = tokenizer.encode([text])
    assert list(ids) == list(text.encode()) and tokenizer.decode([*ids, tokenizer.eod_id]) == text
    assert (tokenizer.size, tokenizer.eod_id) == (257, EOD)


def test_bpe_comes_back_as_the_text_and_is_the_same_each_time(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    assert [tokenizer.decode(ids) for ids in tokenizer.encode(TEXTS)] == TEXTS
    assert max(int(ids.max()) for ids in tokenizer.encode(TEXTS)) < tokenizer.size <= 300
    assert train_bpe(TEXTS, size=300).to_str() == train_bpe(iter(TEXTS), size=300).to_str()
    assert sum(map(len, tokenizer.encode(TEXTS))) < sum(len(text.encode()) for text in TEXTS) / 2


def test_text_cannot_forge_an_end_of_document(bpe_file):
    tokenizer = load_tokenizer(str(bpe_file))
    text = f"a {END_OF_DOCUMENT} b"
    (ids,) = tokenizer.encode([text])
    assert tokenizer.eod_id not in ids and tokenizer.decode(ids) == text


def test_a_tokenizer_larger_than_the_vocabulary_is_refused_with_both_numbers_as_in_case_e4(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_level("<pad>", "</s>", "<mask>").save(str(path))
    corpus = write_jsonl(tmp_path / "x.jsonl", ["some text"] * 9)
    with pytest.raises(ValueError, match=r"model.vocab_size=256 is smaller than the 259 ids"):
        prepared(tmp_path, corpus, tokenizer=str(path), vocab_size=256)
    assert not (tmp_path / "cache").exists()
    got = prepared(tmp_path, corpus, tokenizer=str(path), vocab_size=259)
    assert (got.tokenizer.size, got.tokenizer.eod_id) == (259, 257)
    with pytest.raises(ValueError, match=r"257 ids of data\.tokenizer=byte"):
        require_vocabulary(ByteTokenizer(), vocab_size=256)


def test_a_folder_of_transformers_is_taken_with_its_own_end_token(tmp_path):
    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level("</s>", "<stop>"), eos_token="<stop>")
    fast.save_pretrained(tmp_path / "folder")
    tokenizer = load_tokenizer(str(tmp_path / "folder"))
    assert (tokenizer.size, tokenizer.eod_id) == (258, 257)
    assert tokenizer.decode(tokenizer.encode(["été <stop>"])[0]) == "été <stop>"
    assert list(tokenizer.encode(["été"])[0]) == fast("été", add_special_tokens=False)["input_ids"]


def test_a_tokenizer_without_an_end_token_is_refused_with_a_remedy(tmp_path):
    byte_level("<pad>").save(str(tmp_path / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=byte_level("<pad>")).save_pretrained(tmp_path / "folder")
    for name in (tmp_path / "tokenizer.json", tmp_path / "folder"):
        with pytest.raises(ValueError, match=r"names no end-of-document token; set eos_token"):
            load_tokenizer(str(name))


def test_names_that_cannot_be_loaded_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("./none.json", "no such file or folder"),
        (str(tmp_path / "bad.json"), "is not a tokenizer.json"),
        (str(tmp_path / "empty"), "cannot be loaded"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            load_tokenizer(name)
        assert "\n" not in str(caught.value) and name in str(caught.value)


def test_a_bpe_smaller_than_the_bytes_is_refused():
    with pytest.raises(ValueError, match=r"data.bpe_vocab_size=256 must be at least 257"):
        train_bpe(TEXTS, size=256)


def test_a_bpe_is_trained_on_the_training_part_only(tmp_path):
    texts = [f"word{i} " * 50 for i in range(60)]
    path = write_jsonl(tmp_path / "x.jsonl", texts)
    fields = {"tokenizer": "bpe", "bpe_vocab_size": 400, "validation_fraction": 0.3, "vocab_size": 400}
    first = prepared(tmp_path, path, **fields)
    assert first.tokenizer.size <= 400
    split = prepared(tmp_path, path, validation_fraction=0.3)
    training = [text.decode() for text in train_documents(split)]
    assert 0 < len(training) < 60
    expected = train_bpe(training, size=400)
    assert [list(ids) for ids in first.tokenizer.encode(texts)] == [
        expected.encode(text, add_special_tokens=False).ids for text in texts
    ]


def test_a_tokenizer_in_pure_python_is_taken_too(tmp_path):
    slow = ByT5Tokenizer()
    slow.save_pretrained(tmp_path / "byt5")
    tokenizer = load_tokenizer(str(tmp_path / "byt5"))
    text = "café </s> x"
    (ids,) = tokenizer.encode([text])
    assert list(ids) == [byte + 3 for byte in text.encode()]  # ByT5: three special ids, then the bytes
    assert tokenizer.eod_id == slow.eos_token_id == 1 and tokenizer.size == len(slow)
    assert tokenizer.decode(ids) == text
    path = write_jsonl(tmp_path / "x.jsonl", [text, "more text"])
    corpus = prepared(tmp_path, path, tokenizer=str(tmp_path / "byt5"), vocab_size=len(slow))
    assert list(corpus.train.streams[0].tokens.tokens).count(1) == 2
