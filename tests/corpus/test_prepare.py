"""Preparing: nothing lost, built once however many processes ask, repaired when damaged, refused in one clear line."""

import fcntl
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import BadLine, CorpusSource
from corpus.prepare import prepare
from corpus.summary import table
from corpus.tokenise import pieces
from corpus.tokenizer import load_tokenizer, train_bpe
from tests.corpus.helpers import EOD, config, prepared, stream_text, train_documents, write_jsonl

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [f"document {i} " + "x" * (i % 23) for i in range(200)]


def validation_documents(corpus):
    return stream_text(corpus.validation.streams[0].tokens.tokens)


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.is_dir())


def test_every_document_is_in_one_split_once_and_in_order(tmp_path):
    corpus = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", TEXTS), validation_fraction=0.2)
    train, held_out = train_documents(corpus), validation_documents(corpus)
    order = [text.encode() for text in TEXTS]
    assert train == [text for text in order if text in set(train)]
    assert held_out == [text for text in order if text in set(held_out)]
    assert sorted(train + held_out) == sorted(order)
    assert 20 <= len(held_out) <= 60  # 40 expected, 5.7 the standard deviation
    splits = corpus.sources[0].manifest["splits"]
    for split, texts in (("train", train), ("validation", held_out)):
        assert splits[split] == {
            "documents": len(texts),
            "tokens": sum(len(text) + 1 for text in texts),
            "text_bytes": sum(len(text) for text in texts),
        }


def test_equal_documents_are_never_on_both_sides(tmp_path):
    corpus = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", TEXTS[:40] * 5), validation_fraction=0.3)
    assert not set(train_documents(corpus)) & set(validation_documents(corpus))


def test_odd_text_comes_through_unchanged(tmp_path):
    texts = ["nul \0 inside", "emoji \U0001f9d1\u200d\U0001f680", "a\r\nb\r\n", " ", "\ufeffinner", "y" * 5_000_000]
    corpus = prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", texts))
    assert train_documents(corpus) == [text.encode() for text in texts]


@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=30), workers=st.integers(1, 3))
@settings(max_examples=25)
def test_the_stream_is_the_documents_in_order_whatever_they_hold(tmp_path_factory, texts, workers):
    folder = tmp_path_factory.mktemp("any")
    kept = [text.encode() for text in texts if text]
    if sum(map(len, kept)) + len(kept) < 2:
        return
    path = write_jsonl(folder / "x.jsonl", texts)
    corpus = prepared(folder, path, sequence_length=1, num_workers=workers)
    assert train_documents(corpus) == kept
    counts = corpus.sources[0].manifest["counts"]
    assert counts["rows"] == len(texts) == counts["documents"] + counts["empty"]


def test_a_single_document_is_cut_at_a_line_end(tmp_path):
    text = "".join(f"line {i}\n" for i in range(500))
    (tmp_path / "x.txt").write_text(text)
    corpus = prepared(tmp_path, tmp_path / "x.txt", validation_fraction=0.1)
    (train,), (held_out,) = train_documents(corpus), validation_documents(corpus)
    assert (train + held_out).decode() == text
    assert train.endswith(b"\n") and 0.09 < len(held_out) / len(text) < 0.12


@given(text=st.text(alphabet="ab \n\t", max_size=200), size=st.integers(1, 30))
@settings(max_examples=100)
def test_pieces_join_to_the_document(text, size):
    parts = list(pieces(text, split="train", size=size))
    assert "".join(part.text for part in parts) == text
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    assert all(len(part.text) <= size for part in parts)


def test_a_long_document_in_pieces_has_the_ids_of_the_whole(tmp_path):
    text = Path(os.__file__).read_text()
    train_bpe([text], size=500).save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    (whole,) = tokenizer.encode([text])
    parts = tokenizer.encode([part.text for part in pieces(text, split="train", size=8000)])
    assert len(parts) > 4
    assert np.array_equal(np.concatenate(parts), whole)


def test_the_number_of_workers_changes_nothing(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS * 20)
    fields = {"tokenizer": "bpe", "bpe_vocab_size": 300, "vocab_size": 300}
    prints = {prepared(tmp_path / str(n), path, num_workers=n, **fields).fingerprint for n in (1, 2, 5)}
    assert len(prints) == 1


def test_a_second_call_reads_no_text_and_gives_the_same_samples(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    fields = {"tokenizer": "bpe", "bpe_vocab_size": 300, "vocab_size": 300, "validation_fraction": 0.1}
    first = prepared(tmp_path, path, **fields)

    def refuse(*_, **__):
        raise AssertionError("text was read again")

    monkeypatch.setattr("corpus.prepare.tokenise", refuse)
    monkeypatch.setattr("corpus.prepare.train_bpe", refuse)
    second = prepared(tmp_path, path, **fields)
    assert second.fingerprint == first.fingerprint
    assert all(np.array_equal(first.train.sample(i).tokens, second.train.sample(i).tokens) for i in range(50))


def test_other_text_tokenizer_or_settings_make_other_files(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    prepared(tmp_path, path)
    prepared(tmp_path, path, validation_fraction=0.1)
    prepared(tmp_path, path, bad_lines=BadLine.skip)
    prepared(tmp_path, path, tokenizer="bpe", bpe_vocab_size=300, vocab_size=300)
    assert len(cached(tmp_path)) == 5  # four corpora, one BPE
    prepared(tmp_path, path, sequence_length=16, num_workers=1)  # these two do not touch the tokens
    assert len(cached(tmp_path)) == 5
    write_jsonl(path, [*TEXTS, "one more"])
    assert len(train_documents(prepared(tmp_path, path))) == len(TEXTS) + 1


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "manifest", "half"])
def test_a_damaged_cache_is_rebuilt_with_the_same_ids_and_a_message(tmp_path, damage):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    before = np.array(prepared(tmp_path, path).train.streams[0].tokens.tokens)
    (folder,) = (tmp_path / "cache" / name for name in cached(tmp_path))
    tokens = folder / "train.bin"
    if damage == "truncate":
        os.truncate(tokens, tokens.stat().st_size // 2)
    elif damage == "flip":
        content = bytearray(tokens.read_bytes())
        content[1000] ^= 1
        tokens.write_bytes(content)
    elif damage == "remove":
        (folder / "train.ends").unlink()
    elif damage == "manifest":
        (folder / "manifest.json").write_text("{")
    else:  # a builder was killed before its manifest
        (folder / "manifest.json").unlink()
        (folder.parent / f"{folder.name}.partial-999999").mkdir()
    lines = []
    corpus = prepare(config(tmp_path, path), vocab_size=257, seed=7, progress=lines.append)
    assert np.array_equal(corpus.train.streams[0].tokens.tokens, before)
    assert any("is damaged" in line and str(folder) in line for line in lines)
    assert cached(tmp_path) == [folder.name]


FOUR_BUILDERS = """
import os, sys
from conf.schema import CorpusSource, DataConfig
from corpus import prepare as module
data = DataConfig(sources=[CorpusSource(path=sys.argv[1])], cache_dir=sys.argv[2], num_workers=1)
children = []
for _ in range(4):
    child = os.fork()
    if child == 0:
        builds, tokenise = [], module.tokenise
        module.tokenise = lambda *args, **fields: builds.append(1) or tokenise(*args, **fields)
        corpus = module.prepare(data, vocab_size=257, seed=1)
        os.write(1, f"{len(builds)} {corpus.fingerprint}\\n".encode())
        os._exit(0)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] for child in children))
"""


def test_four_processes_with_an_empty_cache_build_one_five_times_over(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS * 50)
    prints = set()
    for attempt in range(5):
        cache = tmp_path / f"cache{attempt}"
        command = [sys.executable, "-c", FOUR_BUILDERS, str(path), str(cache)]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120, check=True)
        said = [line.split() for line in done.stdout.splitlines()]
        assert len(said) == 4 and sum(int(builds) for builds, _ in said) == 1
        assert len([entry for entry in cache.iterdir() if entry.is_dir()]) == 1
        prints |= {fingerprint for _, fingerprint in said}
    assert len(prints) == 1


def test_two_filesystems_are_both_built_and_agree(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    one, two = prepared(tmp_path / "node1", path), prepared(tmp_path / "node2", path)
    assert one.fingerprint == two.fingerprint
    assert cached(tmp_path / "node1") == cached(tmp_path / "node2")


def _hold(path, ready):
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 4 on elsewhere\nhalf of it is done")
        lock.flush()
        ready.set()
        time.sleep(60)


def test_a_held_lock_is_waited_for_up_to_the_limit_and_a_dead_holder_does_not_block(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    prepared(tmp_path, path)
    (name,) = cached(tmp_path)
    (tmp_path / "cache" / name / "train.bin").unlink()
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path / "cache" / f"{name}.lock"), ready))
    holder.start()
    assert ready.wait(30)
    lines: list[str] = []
    try:
        with pytest.raises(ValueError, match=r"data.wait_timeout_s=0.3 passed while process 4 on elsewhere prepares"):
            prepare(config(tmp_path, path, wait_timeout_s=0.3), vocab_size=257, seed=7, progress=lines.append)
    finally:
        holder.kill()
        holder.join()
    assert lines == ["half of it is done"]
    assert len(train_documents(prepared(tmp_path, path, wait_timeout_s=5))) == len(TEXTS)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ValueError, match=r"data.cache_dir=.*cache cannot be written"):
        prepared(tmp_path, path)


def test_a_single_character_cannot_be_split_in_two(tmp_path):
    with pytest.raises(ValueError, match=r"data.validation_fraction=0.5 leaves no document"):
        prepared(tmp_path, write_jsonl(tmp_path / "x.jsonl", ["x"]), validation_fraction=0.5)


def test_a_failed_build_leaves_nothing_and_the_next_one_works(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a long enough text"}\n{"text": 5}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl:2"):
        prepared(tmp_path, path)
    assert cached(tmp_path) == []
    assert len(train_documents(prepared(tmp_path, path, bad_lines=BadLine.skip))) == 1


@pytest.mark.parametrize(
    ("lines", "fields", "says"),
    [
        ([], {}, "no text in 0 rows of 1 files"),
        (["", "", None], {}, r"no text in 3 rows of 1 files \(2 empty, 1 without text, 0 broken\)"),
        (["abc"], {}, r"4 tokens are fewer than one sample of data.sequence_length=8 \+ 1; add text"),
        (TEXTS, {"validation_fraction": 1.0}, "data.validation_fraction=1.0 must be"),
        (TEXTS, {"validation_fraction": 1e-9}, r"holds out none of the 200 documents of .*; set 0\.0"),
        (TEXTS, {"num_workers": -1}, "data.num_workers=-1"),
        (TEXTS, {"sequence_length": 0}, "data.sequence_length=0"),
        (TEXTS, {"sources": []}, "data.sources is empty"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_line(tmp_path, lines, fields, says):
    data = config(tmp_path, write_jsonl(tmp_path / "x.jsonl", lines), **({} if "sources" in fields else fields))
    if "sources" in fields:
        data.sources = []
    with pytest.raises(ValueError, match=says) as caught:
        prepare(data, vocab_size=257, seed=1)
    assert "\n" not in str(caught.value)


def test_the_fraction_that_a_refusal_names_works(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS)
    with pytest.raises(ValueError, match="holds out none") as caught:
        prepared(tmp_path, path, validation_fraction=1e-9)
    enough = float(str(caught.value).split("; set ")[1].split()[0])
    assert len(validation_documents(prepared(tmp_path, path, validation_fraction=enough))) >= 1


def test_a_blend_draws_by_weight_from_both_sources(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", ["a" * 50] * 40)
    two = write_jsonl(tmp_path / "two.jsonl", ["b" * 50] * 40)
    data = config(tmp_path, one, two)
    data.sources[0].weight = 3.0
    corpus = prepare(data, vocab_size=257, seed=1)
    letters = [97 in corpus.train.sample(i).tokens for i in range(400)]
    assert sum(letters) == 300
    assert [len(train_documents(corpus, source)) for source in (0, 1)] == [40, 40]


def test_the_manifest_and_the_table_report_every_row(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"text": "some text"}] * 20 + [{"text": ""}, {"text": None}, {"id": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    corpus = prepared(tmp_path, path, bad_lines=BadLine.skip)
    manifest = json.loads((corpus.sources[0].folder / "manifest.json").read_text())
    counts = manifest["counts"]
    assert (counts["rows"], counts["documents"], counts["empty"], counts["absent"], counts["bad"]) == (24, 20, 1, 2, 1)
    assert manifest["source_files"] == [[str(path), path.stat().st_size, path.stat().st_mtime_ns]]
    assert manifest["tokenizer"]["fingerprint"] == corpus.tokenizer.fingerprint and manifest["eod_id"] == EOD
    shown = table(corpus)
    assert "24 rows, left out 1 empty, 2 without text, 1 broken" in shown and f"{path}:24" in shown
    assert all(len(line) < 400 for line in shown.splitlines())


def test_the_standard_library_is_prepared_whole(tmp_path):
    corpus = prepare(config(tmp_path, "stdlib", validation_fraction=0.02), vocab_size=257, seed=1)
    splits = corpus.sources[0].manifest["splits"]
    total = sum(part["text_bytes"] for part in splits.values())
    assert total > 5_000_000 and splits["validation"]["documents"] >= 1
    assert all(part["tokens"] == part["text_bytes"] + part["documents"] for part in splits.values())
    assert isinstance(config(tmp_path, "stdlib").sources[0], CorpusSource)
