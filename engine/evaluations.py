"""What recipes/evaluate.py computes of a text: loss, perplexities, bits per byte, accuracy of last words.

loss                 nats a predicted token, over all of them
perplexity           exp(loss)
bits per byte        nats / (ln 2 x bytes of the predicted text), which does not depend on the tokenizer
word perplexity      exp(loss x (T - 1) / (T_o - 1)): T tokens, of T_o words of the tokenised original, as Megatron
                     prints it ("adjusted ppl"); arXiv:1909.08053 appendix E writes the same sum over T_o
accuracy             last words all of whose tokens are the most likely ones
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from corpus.lambada import encoded_passages, read_passages
from corpus.scored_rows import Row, continuation_row, overlapping_rows
from corpus.token_bytes import token_bytes
from corpus.tokenizer import Tokenizer
from corpus.wikitext import detokenised, read_wikitext, word_count
from engine.failure import StopRun
from engine.scoring import Scorer

Metrics = dict[str, float]


@dataclass(frozen=True)
class TextScore:
    """Sums over a text's predicted tokens; bytes: of the text they stand for."""

    nats: float
    tokens: int
    bytes: int
    sequences: int

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    def metrics(self) -> Metrics:
        return {
            "loss": self.loss,
            "perplexity": exponential(self.loss),
            "bits_per_byte": self.nats / (math.log(2) * self.bytes) if self.bytes else math.nan,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sequences": self.sequences,
        }


@dataclass(frozen=True)
class WikitextScore:
    """text: what was predicted; all_tokens, words: of the whole file."""

    text: TextScore
    all_tokens: int
    words: int

    def metrics(self) -> Metrics:
        ratio = (self.all_tokens - 1) / (self.words - 1)
        word_perplexity = exponential(self.text.loss * ratio)
        return {"word_perplexity": word_perplexity} | self.text.metrics() | {"words": self.words, "token_ratio": ratio}


@dataclass(frozen=True)
class ClozeScore:
    """nats: of all last words."""

    correct: int
    examples: int
    nats: float

    def metrics(self) -> Metrics:
        return {
            "accuracy": self.correct / self.examples,
            "perplexity": exponential(self.nats / self.examples),
            "examples": self.examples,
        }


Score = TextScore | WikitextScore | ClozeScore


def text_score(rows: Iterable[Row], scorer: Scorer, tokenizer: Tokenizer) -> TextScore:
    """Of rows of text, of which one or more predicts something; called on all ranks alike."""
    lengths, seen = token_bytes(tokenizer), [0]

    def counted() -> Iterator[Row]:
        for row in rows:
            seen[0] += int(lengths[row.targets].sum())
            yield row

    scores = list(scorer.score(counted()))
    tokens = sum(score.count for score in scores)
    if tokens == 0:
        raise StopRun("no token of the text counts, so it has no loss: it is too short, or all is masked from the loss")
    return TextScore(math.fsum(score.nats for score in scores), tokens, seen[0], len(scores))


@dataclass(frozen=True)
class Wikitext:
    """A file's rows to score, and what its words are counted from."""

    rows: list[Row]
    all_tokens: int
    words: int


def prepare_wikitext(
    path: str, tokenizer: Tokenizer, *, sequence_length: int, stride: int, limit: int | None
) -> Wikitext:
    """ValueError: see `read_wikitext` and `overlapping_rows`."""
    text = read_wikitext(path)
    tokens = tokenizer.encode([detokenised(text)])[0]
    if len(tokens) < 2:
        raise ValueError(f"evaluate.wikitext: {path}: is {len(tokens)} token: none comes after another")
    rows = list(overlapping_rows(tokens, sequence_length=sequence_length, stride=stride, limit=limit))
    return Wikitext(rows, len(tokens), word_count(text))


def wikitext_score(prepared: Wikitext, scorer: Scorer, tokenizer: Tokenizer) -> WikitextScore:
    """Called on all ranks alike."""
    return WikitextScore(text_score(prepared.rows, scorer, tokenizer), prepared.all_tokens, prepared.words)


def prepare_lambada(
    path: str, tokenizer: Tokenizer, *, text_column: str, sequence_length: int, strict: bool, limit: int | None
) -> list[Row]:
    """A row an example. ValueError: see `read_passages`."""
    passages = read_passages(path, text_column=text_column)[:limit]
    pairs = encoded_passages(passages, tokenizer.encode, strict=strict)
    return [continuation_row(context, answer, sequence_length=sequence_length) for context, answer in pairs]


def cloze_score(rows: list[Row], scorer: Scorer) -> ClozeScore:
    """Called on all ranks alike."""
    scores = list(scorer.score(rows))
    return ClozeScore(sum(one.all_argmax for one in scores), len(scores), math.fsum(one.nats for one in scores))


def exponential(x: float) -> float:
    """exp, infinite where fp64 ends."""
    with np.errstate(over="ignore"):
        return float(np.exp(x))
