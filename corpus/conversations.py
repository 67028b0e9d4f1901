"""Rows to conversations: token ids, and which of them count in the loss.

A row holds messages (rendered by the chat template) or a prompt and a completion (one after the other, the tokenizer's
own beginning-of-text token before where it adds one, its end-of-text token after; neither twice). Ids are those of the
whole text: a token that holds a character of the assistant's counts, as in transformers. Not here: how long a
conversation may be, and where it is kept (conversation_file.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from conf.schema import BadLine
from corpus.chat_template import ASSISTANT, ChatTemplate, Rendered, RowProblem, Span, messages_of
from corpus.chat_tokenizer import ChatTokenizer
from corpus.readers import rows
from corpus.rows import Columns
from corpus.sources import ResolvedSource

ENCODED_AT_ONCE = 512


class Conversation(NamedTuple):
    """ids: int64 [n]; counts: bool [n], whether a token is to be predicted; digest: 64 bits of its text."""

    ids: np.ndarray
    counts: np.ndarray
    digest: int
    num_bytes: int


@dataclass
class ConversationTally:
    """What became of every row: rows = conversations + empty + absent + unanswered + cut + bad."""

    rows: int = 0
    conversations: int = 0
    empty: int = 0  # no message, or no character of a prompt's completion
    absent: int = 0  # null, or no such key in this row
    unanswered: int = 0  # no message of the assistant's that counts
    cut: int = 0  # nothing of the assistant's before the sequence ends: left out
    bad: int = 0  # broken rows, skipped by data.bad_lines=skip
    first_bad: str | None = None
    truncated: int = 0  # conversations whose end was cut off
    truncated_tokens: int = 0
    truncated_loss_tokens: int = 0  # of these, tokens that would have counted
    file_bytes: int = 0  # size of the files gone through so far

    def as_counts(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if key != "file_bytes"}


class _Text(NamedTuple):
    rendered: Rendered
    is_pair: bool  # prompt and completion: the ends of the text are still to be set


def conversation_columns(source: ResolvedSource) -> Columns:
    """Messages where a row has them, else prompt and completion."""
    named = source.source
    return Columns(
        ((named.messages_column,), (named.prompt_column, named.completion_column)),
        of_text=False,
        knobs="messages_column, or prompt_column and completion_column, of this data.sources entry",
    )


def conversations(
    source: ResolvedSource, tokenizer: ChatTokenizer, *, bad_lines: BadLine, tally: ConversationTally
) -> Iterator[Conversation]:
    """The conversations of `source` in order. ValueError with file and row where a row is broken."""
    found = _texts(source, tokenizer, bad_lines=bad_lines, tally=tally)
    while chunk := list(islice(found, ENCODED_AT_ONCE)):
        encodings = tokenizer.encode([one.rendered.text for one in chunk])
        for one, encoding in zip(chunk, encodings, strict=True):
            ids = np.array(encoding.ids, np.int64)
            counts = counted_tokens(encoding.offsets, one.rendered.spans)
            if one.is_pair:
                ids, counts = _with_ends(ids, counts, tokenizer)
            payload = one.rendered.text.encode()
            digest = int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little")
            yield Conversation(ids, counts, digest, len(payload))


def counted_tokens(offsets: Sequence[Span], spans: Sequence[Span]) -> np.ndarray:
    """bool [n]: tokens at these [start, stop) characters that share one with a span (both in order)."""
    counts = np.zeros(len(offsets), dtype=bool)
    number = covered = 0
    for place, (start, stop) in enumerate(offsets):
        start, covered = min(start, covered), max(stop, covered)  # what no token names belongs to the next one
        while number < len(spans) and start >= spans[number][1]:
            number += 1
        counts[place] = number < len(spans) and stop > spans[number][0]
    return counts


def _with_ends(ids: np.ndarray, counts: np.ndarray, tokenizer: ChatTokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The beginning of text before, where the tokenizer wants one, and the end after; neither where it is there."""
    if tokenizer.bos_id is not None and ids[:1].tolist() != [tokenizer.bos_id]:
        ids, counts = np.insert(ids, 0, tokenizer.bos_id), np.insert(counts, 0, False)
    if ids[-1:].tolist() != [tokenizer.eos_id]:
        ids, counts = np.append(ids, tokenizer.eos_id), np.append(counts, True)
    return ids, counts


def _texts(
    source: ResolvedSource, tokenizer: ChatTokenizer, *, bad_lines: BadLine, tally: ConversationTally
) -> Iterator[_Text]:
    limit, template = source.source.max_documents, None
    accepted = 0
    for row in rows(source, conversation_columns(source), tally):
        if limit is not None and accepted >= limit:
            return
        tally.rows += 1
        try:
            if row.problem is not None:
                raise RowProblem(row.problem)
            if row.value is None:
                tally.absent += 1
                continue
            if isinstance(row.value, dict):
                text = _pair(row.value, source, tally)
            else:
                template = template or ChatTemplate(tokenizer)
                text = _chat(row.value, template, tally)
        except RowProblem as problem:
            message = f"{row.where()}: {problem}; mend it or set data.bad_lines=skip"
            if bad_lines is BadLine.fail:
                raise ValueError(message) from None
            tally.bad += 1
            tally.first_bad = tally.first_bad or message
            continue
        if text is not None:
            accepted += 1
            yield text


def _pair(value: dict[str, object], source: ResolvedSource, tally: ConversationTally) -> _Text | None:
    parts = []
    for column in (source.source.prompt_column, source.source.completion_column):
        part = value[column]
        if part is None:
            tally.absent += 1
            return None
        if not isinstance(part, str):
            raise RowProblem(f"{column} is {type(part).__name__} {repr(part)[:40]}, not a string")
        parts.append(part)
    prompt, completion = parts
    if not completion:
        tally.empty += 1
        return None
    return _Text(_checked(Rendered(prompt + completion, ((len(prompt), len(prompt) + len(completion)),))), True)


def _chat(value: object, template: ChatTemplate, tally: ConversationTally) -> _Text | None:
    if isinstance(value, str):  # a list cannot stand in a cell of CSV but as text
        try:
            value = json.loads(value)
        except (json.JSONDecodeError, RecursionError) as error:
            raise RowProblem(f"the messages are text that is no JSON ({error})") from None
    messages = messages_of(value)
    if not messages:
        tally.empty += 1
        return None
    if all(message["role"] != ASSISTANT for message in messages):
        tally.unanswered += 1
        return None
    rendered = _checked(template.render(messages))
    if not rendered.spans:
        tally.unanswered += 1
        return None
    return _Text(rendered, False)


def _checked(rendered: Rendered) -> Rendered:
    try:
        rendered.text.encode()
    except UnicodeEncodeError as error:
        raise RowProblem(f"the text holds half a surrogate pair at character {error.start}") from None
    return rendered
