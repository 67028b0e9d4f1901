"""Masked language modelling: whole documents packed and framed, BERT's masking rule, the same under every plan."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, BertTokenizerFast, PreTrainedTokenizerFast

from conf.schema import Objective
from corpus.batches import IGNORED, StepBatches, batch, evaluation_batches, micro_batches
from corpus.corpora import prepare_corpus
from corpus.mask_tokens import MaskTokens, mask_tokens
from corpus.masked_stream import MaskedStream
from corpus.masking import masked
from corpus.packed_documents import PackedDocuments, write_packed
from corpus.prepare import PreparedCorpus, prepare
from corpus.tokenizer import ByteTokenizer, load_tokenizer
from corpus.tokenizer_folder import write_tokenizer
from tests.corpus.helpers import Plan, config, token_file, train_documents, write_jsonl

MASKS = MaskTokens(mask_id=257, begin=(), end_id=256, special=(256, 257), size=258)
FRAMED = MaskTokens(mask_id=257, begin=(300,), end_id=301, special=(256, 257, 300, 301), size=302)
TEXTS = [f"document {n} " + "abcdefghij"[: n % 7] * (n % 5) for n in range(60)]


def stream_of(folder: Path, documents: list[list[int]], *, masks: MaskTokens = MASKS, **fields: Any) -> MaskedStream:
    tokens = token_file(documents)
    values: dict[str, Any] = {"sequence_length": 16, "seed": 3, "shuffle": True, "mask_documents": True} | fields
    write_packed(tokens.ends, folder, split="train", sequence_length=values["sequence_length"], frame=masks.frame)
    return MaskedStream(tokens, PackedDocuments.open(folder, split="train"), masks=masks, **values)


def mlm(folder: Path, *, vocab_size: int = 258, **fields: Any) -> PreparedCorpus:
    path = folder / "text.jsonl"
    if not path.exists():
        write_jsonl(path, TEXTS)
    data = config(folder, path, **({"sequence_length": 32, "validation_fraction": 0.2} | fields))
    return prepare_corpus(data, vocab_size=vocab_size, seed=7, objective=Objective.mlm)


DOCUMENTS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@settings(max_examples=60)
@given(lengths=DOCUMENTS, framed=st.booleans(), size=st.integers(4, 20))
def test_every_token_is_in_one_sample_and_a_document_that_fits_is_never_split(
    lengths: list[int], framed: bool, size: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    documents = [[n] * length for n, length in enumerate(lengths)]
    masks = FRAMED if framed else MASKS
    folder = tmp_path_factory.mktemp("packed")
    samples = stream_of(folder, documents, masks=masks, sequence_length=size)
    room, seen = size - masks.frame, Counter()
    for number in range(len(samples)):
        tokens, positions, is_text = samples.whole(number)
        assert tokens.shape == positions.shape == (size,)
        place, runs = 0, samples.packed.pieces(number)
        for start, stop in runs:
            before, body = len(masks.begin), stop - start
            assert tuple(tokens[place : place + before]) == masks.begin
            text = tokens[place + before : place + before + body]
            assert len(set(text)) == 1 and is_text[place + before : place + before + body].all()
            assert tokens[place + before + body] == masks.end_id
            if lengths[text[0]] <= room:
                assert body == lengths[text[0]], "split although it fits"
            else:
                assert body == room or body == lengths[text[0]] % room, "pieces fill samples, and a rest"
            seen[int(text[0])] += body
            assert positions[place : place + before + body + 1].tolist() == list(range(before + body + 1))
            place += before + body + 1
        assert (tokens[place:] == masks.end_id).all() and not is_text[place:].any()
        assert positions[place:].tolist() == list(range(size - place))
    assert seen == Counter(dict(enumerate(lengths)))


def test_without_masked_documents_positions_run_on_and_only_padding_is_apart(tmp_path: Path) -> None:
    samples = stream_of(tmp_path, [[1, 2], [3, 4, 5]], mask_documents=False, shuffle=False, sequence_length=10)
    tokens, positions, _ = samples.whole(0)
    assert tokens.tolist() == [3, 4, 5, 256, 1, 2, 256, 256, 256, 256]
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2]


def test_fifteen_percent_are_chosen_and_become_the_mask_another_token_or_stay() -> None:
    """Counts of 60,000 chosen within five standard deviations of 80, 10 and 10 %."""
    random = np.random.default_rng(1)
    tokens, text = random.integers(0, 256, 1000), np.arange(1000) % 50 < 48
    kinds, others, chosen = Counter(), Counter(), np.zeros(1000)
    for key in range(420):
        inputs, labels = masked(tokens, is_text=text, masks=MASKS, key=key)
        at = labels != IGNORED
        assert at.sum() == round(0.15 * text.sum()) and not (at & ~text).any()
        assert np.array_equal(labels[at], tokens[at]) and np.array_equal(inputs[~at], tokens[~at])
        kinds["mask"] += int((inputs[at] == 257).sum())
        kinds["kept"] += int((inputs[at] == tokens[at]).sum())
        replaced = at & (inputs != 257) & (inputs != tokens)
        others.update(inputs[replaced].tolist())
        kinds["another"] += int(replaced.sum())
        chosen += at
    total = sum(kinds.values())
    share = {kind: count / total for kind, count in kinds.items()}
    by_chance = 0.1 / 256  # another token that is the same one
    for kind, wanted in (("mask", 0.8), ("another", 0.1 - by_chance), ("kept", 0.1 + by_chance)):
        assert abs(share[kind] - wanted) < 5 * (wanted * (1 - wanted) / total) ** 0.5, kind
    assert set(others) == set(range(256)), "any token but special ones"
    expected = 420 * 0.15
    assert abs(chosen[text] - expected).max() < 5.5 * (expected * 0.85) ** 0.5 and not chosen[~text].any()


def test_a_sample_of_one_token_has_one_label_and_one_of_none_has_none() -> None:
    one = np.array([5, 256, 256])
    inputs, labels = masked(one, is_text=np.array([True, False, False]), masks=MASKS, key=4)
    assert labels.tolist() == [5, IGNORED, IGNORED] and inputs[1:].tolist() == [256, 256]
    inputs, labels = masked(one, is_text=np.zeros(3, bool), masks=MASKS, key=4)
    assert (labels == IGNORED).all() and np.array_equal(inputs, one)


def test_masks_are_drawn_anew_each_epoch_and_are_the_same_whenever_they_are_asked_for(tmp_path: Path) -> None:
    corpus = mlm(tmp_path)
    stream, size = corpus.train.streams[0], len(corpus.train.streams[0])
    by_epoch = []
    for epoch in range(3):
        draws = range(epoch * size, (epoch + 1) * size)
        assert sorted(stream.sample_id(index) for index in draws) == list(range(size))
        by_epoch.append({stream.sample_id(index): stream.sample(index) for index in draws})
        for index in draws:
            again = mlm(tmp_path).train.streams[0].sample(index) if index % 7 == 0 else stream.sample(index)
            assert np.array_equal(again.inputs, by_epoch[-1][stream.sample_id(index)].inputs)
    for sample in range(size):
        places = [tuple(np.flatnonzero(epoch[sample].labels != IGNORED)) for epoch in by_epoch]
        assert len(set(places)) > 1, "the same tokens in three epochs"
    assert corpus.validation is not None
    first, later = (evaluation_batches(corpus.validation, plan=Plan(2, 1, 1), data_rank=0, num_samples=99)  # type: ignore[arg-type]
                    for _ in range(2))  # fmt: skip
    assert all(torch.equal(a.tokens_BS, b.tokens_BS) for a, b in zip(first, later, strict=True))


@pytest.mark.parametrize(("micro_batch_size", "data_parallel_size"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_the_global_batch_is_the_same_under_every_plan_and_after_a_resume(
    micro_batch_size: int, data_parallel_size: int, tmp_path: Path
) -> None:
    corpus = mlm(tmp_path)
    number = 4 // (micro_batch_size * data_parallel_size)
    plan: Any = Plan(micro_batch_size, data_parallel_size, number)
    first = len(corpus.train) - 2  # over the end of an epoch
    whole = batch(corpus.train, indices=range(first, first + 4))
    parts = [micro_batches(corpus.train, plan=plan, first_sample=first, data_rank=r) for r in range(data_parallel_size)]
    rows = [part[m] for m in range(number) for part in parts]
    assert torch.equal(torch.cat([row.tokens_BS for row in rows]), whole.tokens_BS)
    assert torch.equal(torch.cat([row.labels_BS for row in rows]), whole.labels_BS)
    with closing(StepBatches(corpus.train, plan=plan, data_rank=0, first_sample=first - 4)) as steps:
        next(steps)
        _, resumed = next(steps)
    assert all(torch.equal(a.tokens_BS, b.tokens_BS) for a, b in zip(resumed, parts[0], strict=True))
    assert (whole.labels_BS != IGNORED).any(1).all()
    shown = whole.labels_BS != IGNORED
    assert (whole.labels_BS[shown] < 256).all()


def test_masked_runs_share_the_token_files_of_causal_runs_whose_fingerprints_stay(tmp_path: Path) -> None:
    causal = prepare(config(tmp_path, write_jsonl(tmp_path / "text.jsonl", TEXTS), sequence_length=32,
                            validation_fraction=0.2), vocab_size=257, seed=7)  # fmt: skip
    folders = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()}
    corpus = mlm(tmp_path)
    added = {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} - folders
    assert len(added) == 1 and "text.jsonl-packed-" in next(iter(added)), "tables beside the token files"
    assert corpus.sources[0].folder == causal.sources[0].folder
    assert (corpus.tokenizer.fingerprint, corpus.tokenizer.size) == (ByteTokenizer.fingerprint, 257)
    assert corpus.fingerprint != causal.fingerprint
    assert corpus.fingerprint == mlm(tmp_path).fingerprint != mlm(tmp_path, mask_documents=False).fingerprint
    (note,) = corpus.notes
    long = sum(len(text) > 31 for text in train_documents(causal))
    assert f"% padding; {long} longer than a sample were cut into pieces" in note and long > 0


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "document", "a", "b", "##c", *map(str, range(9))]


def bert_folder(folder: Path) -> Path:
    """As google-bert's: a vocabulary of word pieces."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    BertTokenizerFast(vocab={word: n for n, word in enumerate(WORDS)}).save_pretrained(folder)
    return folder


def test_berts_tokenizer_frames_each_document_and_its_special_tokens_are_never_masked(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert")
    path = write_jsonl(tmp_path / "t.jsonl", ["document 1 a b", "document 2 bc zzz", "a b a b", "1 2 3"] * 5)
    data = config(tmp_path, path, tokenizer=str(folder), sequence_length=24)
    corpus = prepare_corpus(data, vocab_size=len(WORDS), seed=1, objective=Objective.mlm)
    theirs = AutoTokenizer.from_pretrained(folder)
    stream, seen = corpus.train.streams[0], []
    for number in range(len(stream)):
        tokens, positions, is_text = stream.whole(number)
        starts = np.flatnonzero(positions == 0)
        seen += [tuple(part) for part in np.split(tokens, starts[1:]) if part[0] == theirs.cls_token_id]
        assert not is_text[np.isin(tokens, theirs.all_special_ids)].any()
    expected = [tuple(theirs("document 2 bc zzz")["input_ids"]), tuple(theirs("1 2 3")["input_ids"])]
    assert all(seen.count(one) == 5 for one in expected) and len(seen) == 20
    for index in range(50):
        sample = corpus.train.sample(index)
        assert not np.isin(sample.labels, theirs.all_special_ids).any()
        changed = sample.inputs[(sample.labels != IGNORED) & (sample.inputs != sample.labels)]
        assert not np.isin(changed, [0, 1, 2, 3]).any() and theirs.mask_token_id in set(changed) | {4}


def test_a_lone_tokenizer_json_names_its_mask_by_its_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:5])
    roles = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=roles)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = mask_tokens(load_tokenizer(str(tmp_path / "tokenizer.json")))
    assert (found.mask_id, found.begin, found.end_id, found.special) == (4, (2,), 3, (0, 1, 2, 3, 4))


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_the_exported_tokenizer_has_the_mask_that_the_run_was_trained_with(name: str, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", TEXTS)
    data = config(tmp_path, path, tokenizer=name, bpe_vocab_size=300, sequence_length=32)
    corpus = prepare_corpus(data, vocab_size=400, seed=1, objective=Objective.mlm)
    masks = corpus.train.streams[0].masks
    (tmp_path / "out").mkdir()
    write_tokenizer(data, tmp_path / "out", objective=Objective.mlm)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (theirs.mask_token_id, len(theirs)) == (masks.mask_id, masks.size) == (corpus.tokenizer.size, masks.size)
    assert theirs("ab[MASK]c")["input_ids"].count(masks.mask_id) == 1
    again = mask_tokens(load_tokenizer(str(tmp_path / "out")))
    assert (again.mask_id, again.begin, again.end_id) == (masks.mask_id, masks.begin, masks.end_id)


def test_what_cannot_be_masked_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"model.vocab_size=257 is smaller than the 258 ids .* set model.vocab_size=258"
    ):
        mlm(tmp_path, vocab_size=257)
    with pytest.raises(ValueError, match="sequence_length=1 has no room for a token beside the 1 that frame a text"):
        mlm(tmp_path, sequence_length=1)
    plain = Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="a"))
    plain.add_special_tokens(["<eos>"])
    plain.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokenizer.json names no mask token, which objective=mlm needs; set"):
        mlm(tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>").save_pretrained(tmp_path / "gpt")
    assert "mask_token" not in json.loads((tmp_path / "gpt" / "tokenizer_config.json").read_text())
    with pytest.raises(ValueError, match="gpt names no mask token, which objective=mlm needs"):
        mlm(tmp_path, tokenizer=str(tmp_path / "gpt"))
