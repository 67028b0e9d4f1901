"""LAMBADA's examples (arXiv:1606.06031): a passage, and the last word that a reader can tell from it.

A file of rows with a text each. As in Megatron-LM (tasks/zeroshot_gpt), strict: the last word as whitespace parts it,
its context without the space between them, the word encoded behind one space; a word of several tokens counts as one
answer. Not strict: the last token of the encoded text, whatever part of a word that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from conf.schema import CorpusSource
from corpus.readers import Tally, rows
from corpus.rows import Columns
from corpus.sources import resolve

Encode = Callable[[list[str]], list[np.ndarray]]


@dataclass(frozen=True)
class Passage:
    """A text and where it came from, in words."""

    text: str
    where: str


def read_passages(path: str, *, text_column: str) -> list[Passage]:
    """The texts of a .jsonl, .csv or .parquet file. ValueError, with file and row, for one that is no text."""
    source = resolve(CorpusSource(path=path, text_column=text_column), knob="evaluate.lambada")
    if source.kind != "files" or any(file.kind in ("txt", "text") for file in source.files):
        raise ValueError(f"evaluate.lambada: {path}: wants a row an example, as .jsonl, .csv or .parquet has them")
    # To the end before a row is refused: where none has the column the reader says so.
    read = list(rows(source, Columns(((text_column,),), knobs="evaluate.text_column"), Tally()))
    for row in read:
        problem = row.problem
        if problem is None and not isinstance(row.value, str):
            problem = f"the text is {type(row.value).__name__}, not a string"
        elif problem is None and len(str(row.value).split()) < 2:
            problem = "has no two words, of which the last could be told"
        if problem is not None:
            raise ValueError(f"evaluate.lambada: {row.where()}: {problem}")
    if not read:
        raise ValueError(f"evaluate.lambada: {path}: holds no row")
    return [Passage(str(row.value), row.where()) for row in read]


def split_last_word(text: str) -> tuple[str, str]:
    """(context without surrounding space, last word behind one space) of a text of two words or more."""
    word = text.split()[-1]
    return text[: text.rfind(word)].strip(), f" {word}"


def encoded_passages(
    passages: Sequence[Passage], encode: Encode, *, strict: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(context, answer) in token ids of each. ValueError where one has an empty half."""
    if strict:
        parts = [split_last_word(passage.text) for passage in passages]
        pairs = list(zip(encode([one for one, _ in parts]), encode([word for _, word in parts]), strict=True))
    else:
        pairs = [(ids[:-1], ids[-1:]) for ids in encode([passage.text for passage in passages])]
    for passage, (context, answer) in zip(passages, pairs, strict=True):
        if len(context) == 0 or len(answer) == 0:
            raise ValueError(f"evaluate.lambada: {passage.where}: the tokenizer gives no token before the last word")
    return pairs
