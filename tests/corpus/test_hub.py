"""Hugging Face datasets from this disk: saved folders, split by split, mapped and streamed."""

import datasets
import pytest

from conf.schema import CorpusSource
from corpus.hub import parse_name
from corpus.prepare import prepare
from tests.corpus.helpers import config, train_documents, write_jsonl

TEXTS = [f"row {i} of the text" for i in range(30)]


def documents(tmp_path, **fields):
    data = config(tmp_path, "unused")
    data.sources = [CorpusSource(**fields)]
    return [text.decode() for text in train_documents(prepare(data, vocab_size=257, seed=1))]


@pytest.fixture
def rows():
    return datasets.Dataset.from_dict({"text": [*TEXTS, None, ""], "n": list(range(32))})


def test_a_saved_dataset_is_read(tmp_path, rows):
    rows.save_to_disk(str(tmp_path / "saved"))
    assert documents(tmp_path, path=str(tmp_path / "saved")) == TEXTS


def test_a_saved_dataset_of_splits_takes_the_named_one(tmp_path, rows):
    datasets.DatasetDict({"train": rows, "test": rows.select(range(12))}).save_to_disk(str(tmp_path / "saved"))
    assert documents(tmp_path, path=str(tmp_path / "saved"), split="test") == TEXTS[:12]
    with pytest.raises(ValueError, match="no split 'dev'; it has train, test"):
        documents(tmp_path, path=str(tmp_path / "saved"), split="dev")
    with pytest.raises(ValueError, match="no column 'body'; it has text, n"):
        documents(tmp_path, path=str(tmp_path / "saved"), text_column="body")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_name_is_read_mapped_and_streamed(tmp_path, streaming, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "mine"
    folder.mkdir()
    for name, part in (("a", TEXTS[:5]), ("b", TEXTS[5:6]), ("c", TEXTS[6:])):
        write_jsonl(folder / f"{name}.jsonl", part)
    assert documents(tmp_path, path=f"hf:{folder}", streaming=streaming) == TEXTS
    assert documents(tmp_path, path=f"hf:{folder}", streaming=streaming, max_documents=7) == TEXTS[:7]
    with pytest.raises(ValueError, match="split=nope"):
        documents(tmp_path, path=f"hf:{folder}", streaming=streaming, split="nope")


def test_text_that_is_no_string_is_named_with_its_row(tmp_path):
    datasets.Dataset.from_dict({"text": [1, 2]}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(ValueError, match=r"saved:1: the text is int 1, not a string"):
        documents(tmp_path, path=str(tmp_path / "saved"))


def test_names_split_into_name_and_config():
    assert parse_name("hf:owner/name") == ("owner/name", None)
    assert parse_name("hf:owner/name/config-v1") == ("owner/name", "config-v1")
    assert parse_name("hf:name") == ("name", None)
    for path in ("hf:", "hf:a/b/c/d", "hf:a//b"):
        with pytest.raises(ValueError, match="write hf:OWNER/NAME"):
            parse_name(path)
