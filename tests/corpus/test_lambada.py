"""LAMBADA's passages parted by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpus.lambada import Passage, encoded_passages, read_passages, split_last_word
from corpus.tokenizer import ByteTokenizer

encode = ByteTokenizer().encode


@pytest.mark.parametrize(
    ("text", "context", "answer"),
    [
        ("he called his dog", "he called his", " dog"),
        ("the dog saw another dog", "the dog saw another", " dog"),  # the last one of equal words
        ("ends with a mark sarah.", "ends with a mark", " sarah."),
        ("  two\nwords \n", "two", " words"),
    ],
)
def test_the_last_word_is_parted_from_its_context(text, context, answer):
    assert split_last_word(text) == (context, answer)


def test_strict_answers_are_whole_words_and_others_single_tokens():
    passages = [Passage("ab cd", "x:1")]
    (strict,) = encoded_passages(passages, encode, strict=True)
    assert [part.tolist() for part in strict] == [list(b"ab"), list(b" cd")]
    (loose,) = encoded_passages(passages, encode, strict=False)
    assert [part.tolist() for part in loose] == [list(b"ab c"), list(b"d")]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_rows_that_are_no_example_are_named_by_file_and_line(tmp_path: Path):
    good = {"text": "one two"}
    for rows, words in (
        ([good, {"text": "single"}], "a.jsonl:2: has no two words"),
        ([good, {"text": 5}], "a.jsonl:2: the text is int, not a string"),
        ([good, "{broken"], "a.jsonl:2: broken JSON"),
        ([{"passage": "one two"}], "no column 'text'; it has passage: set evaluate.text_column"),
        ([], "holds no row"),
    ):
        with pytest.raises(ValueError, match=words):
            read_passages(write(tmp_path / "a.jsonl", *rows), text_column="text")
    with pytest.raises(ValueError, match=r"evaluate.lambada path=.*no file matches"):
        read_passages(str(tmp_path / "b.jsonl"), text_column="text")
    with pytest.raises(ValueError, match="wants a row an example"):
        read_passages(write(tmp_path / "plain.txt", "one two"), text_column="text")
    found = read_passages(write(tmp_path / "a.jsonl", good, {"text": "three four"}), text_column="text")
    assert [one.text for one in found] == ["one two", "three four"] and found[1].where.endswith("a.jsonl:2")
