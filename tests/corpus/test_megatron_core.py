"""Both ways with the `megatron-core` package itself: it reads what we write, we read what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import CorpusSource
from corpus.megatron_write import targets, write_corpus
from corpus.prepare import prepare
from tests.corpus.helpers import EOD, config, documents_of, prepared, train_documents, write_jsonl

indexed = pytest.importorskip(
    "megatron.core.datasets.indexed_dataset", reason="needs megatron-core (requirements.txt lists it)"
)
RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "prepare.py"
TEXTS = [f"document {i} " + "x" * (i % 23) for i in range(200)]


def write(prefix, documents, *, dtype=np.uint16, append_eod=True, multimodal=False):
    """As tools/preprocess_data.py does: documents are lists of sequences, one without an id has no sequence."""
    builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for document in documents:
        sequences = [list(sequence) for sequence in document if len(sequence)]
        if sequences and append_eod:
            sequences[-1].append(EOD)
        ids = [i for sequence in sequences for i in sequence]
        builder.add_document(ids, [len(sequence) for sequence in sequences], [1] * len(sequences))
    builder.finalize(f"{prefix}.idx")
    return prefix


def written(corpus, prefix):
    places = targets(
        str(prefix),
        num_sources=len(corpus.sources),
        validation=corpus.validation is not None,
        overwrite=False,
    )
    return list(write_corpus(corpus, places))


def stream(blend, source=0):
    tokens = blend.streams[source].tokens
    return tokens.read(0, len(tokens))


@given(
    documents=st.lists(st.lists(st.binary(max_size=20), max_size=3), min_size=2, max_size=30),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
)
@settings(max_examples=30)
def test_documents_it_writes_are_those_we_train_on(tmp_path_factory, documents, dtype):
    folder = tmp_path_factory.mktemp("core")
    kept = [b"".join(document) for document in documents if any(document)]
    if sum(map(len, kept)) + len(kept) < 3:
        return
    corpus = prepared(folder, write(folder / "x", documents, dtype=dtype), sequence_length=1)
    assert train_documents(corpus) == kept
    counts = corpus.sources[0].manifest["counts"]
    assert (counts["rows"], counts["documents"], counts["closed"]) == (len(documents), len(kept), len(kept))


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_it_reads_from_our_files_the_ids_of_our_streams(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "x.jsonl", ["", *TEXTS])
    fields = {"tokenizer": tokenizer, "bpe_vocab_size": 300, "vocab_size": 300, "validation_fraction": 0.2}
    corpus = prepared(tmp_path, path, **fields)
    found = written(corpus, tmp_path / "out" / "c")
    assert [w.prefix.name for w in found] == ["c_train", "c_validation"]
    for pair, blend in zip(found, (corpus.train, corpus.validation), strict=True):
        read = indexed.IndexedDataset(str(pair.prefix))
        assert np.array_equal(np.concatenate([read[i] for i in range(len(read))]), stream(blend))
        assert len(read) == pair.documents and read.document_indices.tolist() == list(range(pair.documents + 1))
        assert read.index.dtype == np.uint16
        assert all(read[i][-1] == corpus.tokenizer.eod_id for i in range(len(read)))
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "c_train.bin", "c_train.idx", "c_validation.bin", "c_validation.idx"]  # fmt: skip


def test_text_its_files_and_back_give_the_same_samples(tmp_path):
    text = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", TEXTS))
    (pair,) = written(text, tmp_path / "c")
    again = prepared(tmp_path, pair.prefix)
    assert len(again.train) == len(text.train)
    for index in range(2 * len(text.train)):
        one, two = text.train.sample(index), again.train.sample(index)
        assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.positions, two.positions)
    (third,) = written(again, tmp_path / "d")  # and its own bytes, from the mapped file
    for suffix in (".bin", ".idx"):
        assert Path(f"{third.prefix}{suffix}").read_bytes() == Path(f"{pair.prefix}{suffix}").read_bytes()


def test_its_gpt_dataset_draws_every_token_of_our_files(tmp_path):
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    corpus = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", TEXTS))
    (pair,) = written(corpus, tmp_path / "c")

    class Tokenizer:
        eod, vocab_size = EOD, 257
        unique_identifiers = {"name": "byte"}

    settings_ = GPTDatasetConfig(
        random_seed=1, sequence_length=8, blend=([str(pair.prefix)], None), split="1,0,0", tokenizer=Tokenizer(),
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
    )  # fmt: skip
    low = GPTDataset.build_low_level_dataset(str(pair.prefix), settings_)
    indices = np.arange(GPTDataset.numel_low_level_dataset(low), dtype=np.int32)
    samples = GPTDataset(low, str(pair.prefix), indices, None, Split.train, settings_)
    ours = stream(corpus.train)
    assert len(samples) == (len(ours) - 1) // 8 == len(corpus.train)
    drawn = torch.cat([samples[i]["tokens"] for i in range(len(samples))]).tolist()
    left = np.bincount(ours, minlength=257) - np.bincount(drawn, minlength=257)
    assert left.min() >= 0 and left.sum() == len(ours) - 8 * len(samples)


@pytest.mark.parametrize("split", ["969,30,1", "1,1,1", "98,2", "0.7,0.2,0.1", "100,50,0"])
def test_a_split_is_that_of_its_dataset_builder(tmp_path, split):
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    documents = [text.encode() for text in TEXTS[:197]]
    write(tmp_path / "x", [[document] for document in documents])
    data = config(tmp_path, "unused", validation_fraction=0.1)
    data.sources = [CorpusSource(path=str(tmp_path / "x"), split=split)]
    corpus = prepare(data, vocab_size=257, seed=7)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    for ends, blend in zip(matrix, (corpus.train, corpus.validation), strict=False):
        first, last = (round(end * float(len(documents))) for end in ends)  # as _build_megatron_dataset_splits
        assert documents_of(blend) == documents[first:last]


def test_its_multimodal_files_are_refused_by_name(tmp_path):
    write(tmp_path / "x", [[text.encode()] for text in TEXTS], multimodal=True)
    with pytest.raises(ValueError, match=r"x\.idx: has a mode for each sequence, so it is multimodal data"):
        prepared(tmp_path, tmp_path / "x")


def test_ids_beyond_sixteen_bits_are_written_as_it_would(tmp_path):
    import tokenizers

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({**{f"w{i}": i for i in range(70_000)}, "</s>": 70_000}, unk_token="w0")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    path = write_jsonl(tmp_path / "x.jsonl", [f"w{i} w{69_000 + i}" for i in range(50)])
    corpus = prepared(tmp_path, path, tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=70_001)
    (pair,) = written(corpus, tmp_path / "c")
    read = indexed.IndexedDataset(str(pair.prefix))
    assert read.index.dtype == np.int32 == indexed.DType.optimal_dtype(corpus.tokenizer.size)
    assert [read[i].tolist() for i in (0, 49)] == [[0, 69_000, 70_000], [49, 69_049, 70_000]]


def test_the_recipe_writes_each_source_and_refuses_what_is_there(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    write_jsonl(tmp_path / "b.jsonl", [text.upper() for text in TEXTS])

    def run(*overrides):
        sources = "data.sources=[{path: a.jsonl, weight: 3}, {path: b.jsonl}]"
        batch = "train.global_batch_size=4096"  # of a training: these files know none
        command = [sys.executable, str(RECIPE), "data.sequence_length=8", batch, sources]
        command += ["prepare.megatron=out/c", *overrides]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)

    done = run("data.validation_fraction=0.2")
    assert done.returncode == 0, done.stderr
    names = [f"c_{number}_{split}" for split in ("train", "validation") for number in (0, 1)]
    sizes = {}
    for name in names:
        read = indexed.IndexedDataset(str(tmp_path / "out" / name))
        sizes[name] = len(read)
        tokens = int(read.sequence_lengths.sum())
        assert f"out/{name}.bin and .idx: {len(read):,} documents, {tokens:,} tokens of uint16" in done.stdout
    assert sizes["c_0_train"] + sizes["c_0_validation"] == 200
    refused = run("data.validation_fraction=0.2")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: prepare.megatron=out/c: out/c_0_train.bin is there already; set prepare.overwrite=true\n"
    )
    assert run("data.validation_fraction=0.5", "prepare.overwrite=true").returncode == 0
    assert len(indexed.IndexedDataset(str(tmp_path / "out" / "c_0_train"))) < sizes["c_0_train"]
    manifests = (tmp_path / "runs" / "corpus").glob("a.jsonl-*/manifest.json")
    assert {json.loads(path.read_text())["counts"]["rows"] for path in manifests} == {200}
