"""Conversations: ids and masks are transformers' own, odd rows are named, and the counts of the manifest add up."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from conf.schema import BadLine, CorpusSource, DataConfig, DataFormat
from corpus.batches import batch
from corpus.chat_tokenizer import load_chat_tokenizer
from corpus.conversations import counted_tokens
from corpus.corpora import prepare_corpus
from corpus.packing import packed
from corpus.prepare import PreparedCorpus
from corpus.tokenizer import ByteTokenizer

# Templates as they are found: with marks, ChatML without, Llama 2's, and one that drops what an earlier turn said.
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
LLAMA_2 = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{{ '...' if m['role'] == 'assistant' and not loop.last else m['content'] }}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHAT = [
    {"role": "user", "content": "Hallo, wie geht's?"},
    {"role": "assistant", "content": "  Gut \U0001f642\u200d danke\n"},
    {"role": "user", "content": "مرحبا 你好"},
    {"role": "assistant", "content": "<|im_end|> ist kein Ende?"},
]
TEXTS = ["Hallo, wie geht's? Gut danke", "ist kein Ende <|x|> system user assistant [INST]", "aa bb cc dd ee"] * 20


def byte_level(*, trims: bool) -> tokenizers.Tokenizer:
    """GPT-2's kind; trims: its offsets leave spaces out, as some published ones do."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece() -> tokenizers.Tokenizer:
    """Llama 2's kind: spaces as underscores, bytes for what is not known, a beginning of text before."""
    letters = sorted(set("".join(TEXTS) + "▁"))
    vocab = {token: n for n, token in enumerate(["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *letters])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


KINDS = {
    "gpt2": lambda: byte_level(trims=False),
    "trimming": lambda: byte_level(trims=True),
    "sentencepiece": sentencepiece,
}


def save_tokenizer(folder: Path, kind: str, template: str | None) -> Path:
    fast = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    fast.chat_template = template
    fast.save_pretrained(folder / kind)
    return folder / kind


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepared(folder: Path, *paths: Path, **fields: Any) -> PreparedCorpus:
    named = {key: fields.pop(key) for key in ("messages_column", "prompt_column", "completion_column") if key in fields}
    data = DataConfig(
        sources=[CorpusSource(path=str(path), **named) for path in paths], format=DataFormat.conversations,
        cache_dir=str(folder / "cache"), **({"sequence_length": 256, "validation_fraction": 0.0} | fields),
    )  # fmt: skip
    return prepare_corpus(data, vocab_size=1000, seed=3)


def only_conversation(corpus: PreparedCorpus) -> tuple[list[int], list[bool]]:
    """(ids, whether each is to be predicted) of a corpus of one."""
    assert len(corpus.train) == 1
    ((ids, counts),) = corpus.train.streams[0].file.conversations(0)  # type: ignore[attr-defined]
    return ids.tolist(), counts.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_mask_of_a_marked_template_are_transformers_own(kind: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, kind, MARKED)
    corpus = prepared(tmp_path, write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer=str(tokenizer))
    ids, counts = only_conversation(corpus)
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer).apply_chat_template(
        CHAT, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids == theirs["input_ids"]
    if kind == "trimming":  # transformers' mask leaves out the spaces that those offsets leave out
        assert all(ours >= mask for ours, mask in zip(counts, theirs["assistant_masks"], strict=True))
    else:
        assert counts == [bool(mask) for mask in theirs["assistant_masks"]]


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_find_what_marks_would_and_stop_behind_the_end_of_turn(kind: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}])
    marked = prepared(tmp_path, rows, tokenizer=str(save_tokenizer(tmp_path / "m", kind, MARKED)))
    plain = prepared(tmp_path, rows, tokenizer=str(save_tokenizer(tmp_path / "p", kind, CHATML)))
    assert only_conversation(plain) == only_conversation(marked)
    ids, counts = only_conversation(plain)
    end = PreTrainedTokenizerFast.from_pretrained(tmp_path / "p" / kind).convert_tokens_to_ids("<|im_end|>")
    ends = [place for place, token in enumerate(ids) if token == end]
    assert [counts[place] for place in ends] == [False, True, False, True, True]  # one is the assistant's own text
    assert not counts[ends[1] + 1] and not counts[-1]


def test_llama_2_templates_count_the_answer_and_the_end_of_the_sequence(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "sentencepiece", LLAMA_2)
    chat = [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "bb"}]
    corpus = prepared(tmp_path, write_rows(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer=str(tokenizer))
    ids, counts = only_conversation(corpus)
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    assert counted_text(fast, ids, counts) == "bb</s>"
    assert ids.count(fast.bos_token_id) == 1


def test_a_template_that_changes_what_it_wrote_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "gpt2", FORGETFUL)
    with pytest.raises(ValueError, match=r"a\.jsonl:1: the chat template does not keep .* message 2, .* generation"):
        prepared(tmp_path, write_rows(tmp_path / "a.jsonl", [{"messages": CHAT}]), tokenizer=str(tokenizer))
    once = prepared(tmp_path, write_rows(tmp_path / "b.jsonl", [{"messages": CHAT[:2]}]), tokenizer=str(tokenizer))
    assert any(only_conversation(once)[1])


@pytest.mark.parametrize("kind", ["gpt2", "sentencepiece"])
def test_prompt_and_completion_are_one_text_with_its_ends_once(kind: str, tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, kind, None)
    fast = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for prompt, completion in (("aa bb", " cc dd"), ("<s>aa bb", " cc dd</s>")):
        row = {"question": prompt, "answer": completion, "other": 5}
        corpus = prepared(
            tmp_path, write_rows(tmp_path / "a.jsonl", [row]), tokenizer=str(tokenizer), prompt_column="question",
            completion_column="answer",
        )  # fmt: skip
        ids, counts = only_conversation(corpus)
        begins = [fast.bos_token_id] * (kind == "sentencepiece" or prompt.startswith("<s>"))
        assert ids == [*begins, *fast("aa bb cc dd", add_special_tokens=False)["input_ids"], fast.eos_token_id]
        assert counted_text(fast, ids, counts) == "ccdd</s>"


def counted_text(tokenizer: Any, ids: list[int], counts: list[bool]) -> str:
    """What is learnt, without spaces, which each kind writes in its own way."""
    text = "".join(tokenizer.convert_ids_to_tokens([i for i, c in zip(ids, counts, strict=True) if c]))
    return text.translate({ord(space): None for space in " ▁Ġ"})


def test_the_byte_tokenizer_is_the_same_with_a_template(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(MARKED)
    chat = load_chat_tokenizer(DataConfig(tokenizer="byte", chat_template=str(template)))
    text = "Grüße\x00 \U0001f642\n"
    assert chat.encode([text])[0].ids == ByteTokenizer().encode([text])[0].tolist()
    assert chat.encode(["<|endoftext|>"])[0].ids == [chat.eos_id] == [256]


FORMATS = {
    "openai": {"messages": CHAT[:2]},
    "sharegpt": {
        "messages": [
            {"from": "human", "value": CHAT[0]["content"]},
            {"from": "gpt", "value": CHAT[1]["content"]},
        ]
    },
    "named": {"dialogue": CHAT[:2]},
    "null fields": {"messages": [message | {"tool_calls": None, "name": None} for message in CHAT[:2]]},
}


@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_and_file_type_gives_the_same_tokens(kind: str, tmp_path: Path) -> None:
    row = FORMATS[kind]
    (column,) = row
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    options = dict(tokenizer=tokenizer, messages_column=column)
    expected = prepared(tmp_path, write_rows(tmp_path / "o.jsonl", [FORMATS["openai"]]), tokenizer=tokenizer)
    write_rows(tmp_path / "a.jsonl", [row])
    pq.write_table(pa.Table.from_pylist([row | {"id": 1}]), tmp_path / "a.parquet")
    with open(tmp_path / "a.csv", "w", newline="") as file:
        csv.writer(file).writerows([["id", column], ["1", json.dumps(row[column])]])
    for name in ("a.jsonl", "a.parquet", "a.csv"):
        assert only_conversation(prepared(tmp_path, tmp_path / name, **options)) == only_conversation(expected), name


def test_rows_of_a_datasets_folder_are_read(tmp_path: Path) -> None:
    import datasets

    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    datasets.Dataset.from_list([{"messages": CHAT[:2]}] * 3).save_to_disk(str(tmp_path / "saved"))
    corpus = prepared(tmp_path, tmp_path / "saved", tokenizer=tokenizer)
    assert corpus.sources[0].manifest["counts"]["conversations"] == 3


GOOD = {"messages": [{"role": "user", "content": "aa"}, {"role": "assistant", "content": "bb"}]}
BAD: dict[str, tuple[Any, str]] = {
    "no list": ({"messages": 5}, "the messages are int 5, not a list"),
    "no json": ({"messages": "[{"}, "the messages are text that is no JSON"),
    "no object": ({"messages": ["hi"]}, "message 1 is str, not an object"),
    "no role": ({"messages": [{"content": "a"}]}, "message 1 has no role; it has content"),
    "parts": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"message 1 \(user\): the content is"),
    "null content": ({"messages": [{"role": "user", "content": None}]}, "the content is NoneType, not a string"),
    "sharegpt": ({"messages": [{"from": "bing", "value": "a"}]}, "message 1 is from 'bing'; known are human"),
    "weight": ({"messages": [GOOD["messages"][0], GOOD["messages"][1] | {"weight": 0.5}]}, "weight 0.5 of a message"),
    "surrogate": ({"messages": [{"role": "assistant", "content": "\ud800"}]}, "half a surrogate pair"),
    "number": ({"prompt": "a", "completion": 7}, "completion is int 7, not a string"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_broken_row_is_named_with_its_line_or_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    row, said = BAD[kind]
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    path = write_rows(tmp_path / "a.jsonl", [GOOD, row])
    with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{said}"):
        prepared(tmp_path, path, tokenizer=tokenizer)
    counts = prepared(tmp_path, path, tokenizer=tokenizer, bad_lines=BadLine.skip).sources[0].manifest["counts"]
    assert (counts["rows"], counts["conversations"], counts["bad"]) == (2, 1, 1)
    assert "a.jsonl:2" in counts["first_bad"]


def test_counts_of_rows_and_tokens_add_up(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 100}]}
    lost = {"messages": [{"role": "user", "content": "a " * 100}, {"role": "assistant", "content": "b"}]}
    rows = [
        GOOD, long, long, lost, {"messages": []}, {"messages": None}, {"other": 1}, {"messages": GOOD["messages"][:1]},
        {"messages": [GOOD["messages"][0], GOOD["messages"][1] | {"weight": 0}]}, {"prompt": "aa", "completion": ""},
        {"prompt": "aa", "completion": "bb"}, {"prompt": None, "completion": "bb"}, {"messages": 3},
    ]  # fmt: skip
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    path = write_rows(tmp_path / "a.jsonl", rows)
    options = dict(tokenizer=tokenizer, bad_lines=BadLine.skip)
    whole = prepared(tmp_path, path, **options, sequence_length=1000).sources[0].manifest
    cut = prepared(tmp_path, path, **options, sequence_length=40).sources[0].manifest
    for manifest in (whole, cut):
        counts = manifest["counts"]
        kinds = ("conversations", "empty", "absent", "unanswered", "cut", "bad")
        assert counts["rows"] == len(rows) == sum(counts[kind] for kind in kinds)
        splits = manifest["splits"]
        assert sum(split["documents"] for split in splits.values()) == counts["conversations"]
        slots = splits["train"]["samples"] * manifest["sequence_length"]
        assert splits["train"]["tokens"] + splits["train"]["padding"] == slots
    counts = cut["counts"]
    assert (counts["truncated"], counts["cut"], counts["unanswered"], counts["empty"]) == (2, 1, 2, 2)
    assert (counts["absent"], counts["bad"]) == (3, 1)
    train = whole["splits"]["train"]
    lost_tokens = train["tokens"] - cut["splits"]["train"]["tokens"] - counts["truncated_tokens"]
    assert 100 < lost_tokens < 300  # those of the conversation that was left out
    assert train["loss_tokens"] - cut["splits"]["train"]["loss_tokens"] == counts["truncated_loss_tokens"] + 2


def test_what_was_cut_is_said_at_the_start(tmp_path: Path) -> None:
    long = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b " * 100}]}
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    corpus = prepared(tmp_path, write_rows(tmp_path / "a.jsonl", [GOOD, long]), tokenizer=tokenizer, sequence_length=40)
    [note] = corpus.notes
    assert "data.sequence_length=40 cut 1 of them by" in note and "left out 0 with none" in note


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokenizer": "byte"}, "data.tokenizer=byte has no chat template, .* data.chat_template=FILE, or give prompt"),
        ({"tokenizer": "bpe"}, "data.tokenizer=bpe trains a new vocabulary"),
        ({"tokenizer": "byte", "chat_template": "no/such"}, "data.chat_template=no/such cannot be read"),
        (
            {"tokenizer": "byte", "messages_column": "chat"},
            "no column 'chat', or 'prompt' and 'completion'; it has",
        ),
    ],
)
def test_what_cannot_serve_is_refused_with_what_would(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        prepared(tmp_path, write_rows(tmp_path / "a.jsonl", [GOOD]), **fields)


def test_text_files_and_knobs_of_the_other_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(ValueError, match="is text, not conversations"):
        prepared(tmp_path, tmp_path / "a.txt", tokenizer="byte")
    for field, value in (("packing", False), ("chat_template", "x"), ("validation_sources", [CorpusSource(path="x")])):
        with pytest.raises(ValueError, match=rf"data\.{field} is for conversations"):
            prepare_corpus(DataConfig(**{field: value}), vocab_size=300, seed=1)


def test_answers_of_weight_0_do_not_count(tmp_path: Path) -> None:
    chat = [CHAT[0], CHAT[1] | {"weight": 0}, CHAT[2], CHAT[3] | {"weight": 1}]
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    ids, counts = only_conversation(
        prepared(tmp_path, write_rows(tmp_path / "a.jsonl", [{"messages": chat}]), tokenizer=tokenizer)
    )
    all_ids, all_counts = only_conversation(
        prepared(tmp_path, write_rows(tmp_path / "b.jsonl", [{"messages": CHAT}]), tokenizer=tokenizer)
    )
    assert ids == all_ids
    first = all_counts.index(True)
    second = first + all_counts[first:].index(False)
    assert counts == [False] * second + all_counts[second:]


def chats(number: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [
        {
            "messages": [
                {"role": "user", "content": f"{n} " + "x" * int(random.integers(0, 30))},
                {"role": "assistant", "content": "y" * int(random.integers(1, 30))},
            ]
        }
        for n in range(number)
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_samples_hold_whole_conversations_side_by_side_and_padding_counts_nowhere(
    packing: bool, tmp_path: Path
) -> None:
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    path = write_rows(tmp_path / "a.jsonl", chats(40))
    corpus = prepared(tmp_path, path, tokenizer=tokenizer, sequence_length=128, packing=packing)
    stream = corpus.train.streams[0]
    found = []
    for index in range(len(corpus.train)):
        sample, place = corpus.train.sample(index), 0
        held = stream.file.conversations(stream.sample_id(index))  # type: ignore[attr-defined]
        assert len(held) == 1 or packing
        for ids, counts in held:
            stop = place + len(ids)
            assert sample.tokens[place:stop].tolist() == ids.tolist()
            assert sample.positions[place:stop].tolist() == list(range(len(ids)))
            assert sample.loss_mask[place : stop - 1].tolist() == counts[1:].tolist()
            assert not sample.loss_mask[stop - 1]  # its target is the next conversation's first token
            found.append(tuple(ids))
            place = stop
        assert (sample.tokens[place:] == corpus.tokenizer.eod_id).all() and not sample.loss_mask[place:].any()
        assert sample.positions[place:].tolist() == list(range(128 - place))
    assert len(found) == len(set(found)) == 40
    labels = batch(corpus.train, indices=range(len(corpus.train))).labels_BS
    assert int((labels != -100).sum()) == corpus.sources[0].manifest["splits"]["train"]["loss_tokens"]


def test_draws_are_a_function_of_seed_and_index(tmp_path: Path) -> None:
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    path = write_rows(tmp_path / "a.jsonl", chats(40))
    once, again = (prepared(tmp_path, path, tokenizer=tokenizer, sequence_length=64) for _ in range(2))
    number = len(once.train)
    orders = [[once.train.sample_id(index)[1] for index in range(e * number, (e + 1) * number)] for e in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == list(range(number))
    assert all((once.train.sample(i).tokens == again.train.sample(i).tokens).all() for i in (5, 0, number + 3))
    assert once.fingerprint == again.fingerprint


def test_validation_is_by_a_hash_of_the_text_or_a_source_of_its_own(tmp_path: Path) -> None:
    tokenizer = str(save_tokenizer(tmp_path, "gpt2", MARKED))
    rows = chats(40)
    path = write_rows(tmp_path / "a.jsonl", rows + rows)
    by_hash = prepared(tmp_path, path, tokenizer=tokenizer, sequence_length=64, packing=False, validation_fraction=0.3)
    texts = {split: {tuple(s.sample(i).tokens) for i in range(len(s))} for split, s in (
        ("train", by_hash.train), ("validation", by_hash.validation)
    )}  # fmt: skip
    assert texts["train"] and texts["validation"] and not texts["train"] & texts["validation"]
    own = write_rows(tmp_path / "b.jsonl", [GOOD])
    apart = prepared(
        tmp_path, path, tokenizer=tokenizer, packing=False, validation_sources=[CorpusSource(path=str(own))]
    )
    assert (len(apart.train), len(apart.validation)) == (80, 1)
    with pytest.raises(ValueError, match="holds out none of the 1 conversations"):
        prepared(tmp_path, own, tokenizer=tokenizer, validation_fraction=1e-9)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
@settings(max_examples=100)
def test_packing_keeps_every_conversation_once_within_the_length(lengths: list[int]) -> None:
    samples = packed(lengths, size=50)
    assert sorted(place for sample in samples for place in sample) == list(range(len(lengths)))
    assert all(0 < sum(lengths[place] for place in sample) <= 50 for sample in samples)
    # best fit decreasing: at most 11/9 of the fewest possible, and 1 (Johnson 1973), which is at least the volume's
    half_and_more = sum(length > 25 for length in lengths)
    assert len(samples) <= 11 / 9 * max(len(lengths), 1) + 1
    assert len(samples) <= max(2 * math.ceil(sum(lengths) / 50), half_and_more + 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=30), st.data())
@settings(max_examples=100)
def test_a_token_counts_where_one_of_its_characters_does(tokens: list[tuple[int, bool]], data: st.DataObject) -> None:
    """Against the rule by characters. Tokens may share a character (bytes of one) but leave none out."""
    offsets, place = [], 0
    for width, again in tokens:
        start = place - 1 if again and place else place
        offsets.append((start, start + width))
        place = start + width
    cuts = sorted(data.draw(st.sets(st.integers(0, place), max_size=6)))
    spans = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False) if a < b]
    counted = {character for a, b in spans for character in range(a, b)}
    expected = [any(c in counted for c in range(a, b)) for a, b in offsets]
    got = counted_tokens(offsets, spans).tolist()
    assert all(g >= e for g, e in zip(got, expected, strict=True))
    if not any(again for _, again in tokens):
        assert got == expected
