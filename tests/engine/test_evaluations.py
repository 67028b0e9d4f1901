"""Loss, perplexities, bits per byte and accuracy of a model whose probabilities are known by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from conf.schema import EvaluateConfig, EvaluateTask
from corpus.batches import IGNORED
from corpus.scored_rows import Row, stream_rows
from corpus.scored_texts import token_stream
from corpus.tokenizer import ByteTokenizer, FastTokenizer, train_bpe
from engine.evaluation_jobs import tasks_of
from engine.evaluation_report import storable
from engine.evaluations import (
    TextScore,
    cloze_score,
    prepare_lambada,
    prepare_wikitext,
    text_score,
    wikitext_score,
)
from engine.scoring import Scorer, padded
from tests.engine.evaluations import KnownModel

BYTES = ByteTokenizer()
UNIFORM = Scorer(KnownModel({}, p=0.5), batch_size=2)  # 1/257 each


def test_a_uniform_model_has_the_vocabulary_as_perplexity_and_its_bits_a_byte():
    stream = token_stream(iter(["abc", "de"]), BYTES, what="x")
    rows = list(stream_rows(stream, sequence_length=4, mask_documents=True, limit=None))
    found = text_score(rows, UNIFORM, BYTES).metrics()
    # b c END / e END: the first byte of a document is not predicted; the end counts as a prediction, not as a byte
    assert found["tokens"] == 5 and found["bytes"] == 3 and found["sequences"] == 2
    assert found["perplexity"] == pytest.approx(257) and found["loss"] == pytest.approx(math.log(257))
    assert found["bits_per_byte"] == pytest.approx(5 * math.log2(257) / 3)


def test_bits_per_byte_count_bytes_whatever_the_tokens_are():
    bpe = FastTokenizer(train_bpe(["ab ab ab ab café"] * 9, size=280), name="bpe", eod_id=0)
    stream = token_stream(iter(["ab café"]), bpe, what="x")
    rows = list(stream_rows(stream, sequence_length=99, mask_documents=True, limit=None))
    found = text_score(rows, UNIFORM, bpe).metrics()
    first = len(bpe.decode(stream.tokens[:1].tolist()).encode())
    assert found["bytes"] == len("ab café".encode()) - first and found["tokens"] == len(stream) - 1 < 8


def test_word_perplexity_shares_the_whole_loss_among_the_words_before_detokenisation(tmp_path: Path):
    (tmp_path / "w").write_text("one @-@ two , three\n")  # 5 words; detokenised "one-two, three\n": 15 bytes
    prepared = prepare_wikitext(str(tmp_path / "w"), BYTES, sequence_length=6, stride=2, limit=None)
    found = wikitext_score(prepared, UNIFORM, BYTES).metrics()
    assert found["tokens"] == 14 and found["words"] == 5 and found["token_ratio"] == 14 / 4
    assert found["word_perplexity"] == pytest.approx(257 ** (14 / 4)) and found["perplexity"] == pytest.approx(257)


def lambada(folder: Path, *texts: str, strict: bool = True, length: int = 16) -> list[Row]:
    path = folder / "l.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare_lambada(
        str(path), BYTES, text_column="text", sequence_length=length, strict=strict, limit=None
    )  # fmt: skip


def test_a_last_word_counts_where_all_its_tokens_are_the_most_likely_ones(tmp_path: Path):
    model = KnownModel({"b": " ", " ": "c", "c": "d"}, p=0.5)
    rows = lambada(tmp_path, "ab cd", "ab ce", "ax cd")  # right; a wrong letter; the space is not expected after x
    found = cloze_score(rows, Scorer(model, batch_size=2)).metrics()
    rest, even = 0.5 / 256, 1 / 257
    by_hand = [0.5**3, 0.5 * 0.5 * rest, even * 0.5 * 0.5]
    assert found["accuracy"] == pytest.approx(1 / 3) and found["examples"] == 3
    assert found["perplexity"] == pytest.approx(math.prod(by_hand) ** (-1 / 3), rel=1e-6)


def test_without_strict_the_last_token_alone_counts(tmp_path: Path):
    model = KnownModel({"c": "d"}, p=0.5)
    rows = lambada(tmp_path, "ab cd", "ab ce", "ax cd", strict=False)
    found = cloze_score(rows, Scorer(model, batch_size=2)).metrics()
    assert found["accuracy"] == pytest.approx(2 / 3)


def test_a_passage_longer_than_the_model_sees_keeps_its_end(tmp_path: Path):
    (row,) = lambada(tmp_path, "a long way from b cd", length=8)
    assert bytes(row.tokens.tolist()) == b"from b c" and bytes(row.targets.tolist()) == b" cd"


def test_rows_without_a_target_cost_no_pass_and_score_nothing():
    silent = Row(np.array([1, 2]), np.array([IGNORED, IGNORED]))
    loud = Row(np.array([1]), np.array([2]))
    scores = list(UNIFORM.score([silent, loud, silent]))
    assert [score.count for score in scores] == [0, 1, 0] and scores[0].nats == 0


def test_positions_travel_only_where_documents_restart():
    one = Row(np.arange(3), np.arange(3), np.arange(3))
    assert padded([one, Row(np.arange(2), np.arange(2))])[2] is None
    two = Row(np.arange(3), np.arange(3), np.array([0, 0, 1]))
    _, labels_BS, positions_BS = padded([one, two, Row(np.arange(2), np.arange(2))])
    assert positions_BS is not None and positions_BS.tolist() == [[0, 1, 2], [0, 0, 1], [0, 1, 2]]
    assert labels_BS.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, IGNORED]]


def test_what_is_computed_is_what_something_is_named_for():
    assert tasks_of(EvaluateConfig()) == [EvaluateTask.loss]
    assert tasks_of(EvaluateConfig(lambada=["x"])) == [EvaluateTask.lambada]
    both = [EvaluateTask.loss, EvaluateTask.lambada]
    assert tasks_of(EvaluateConfig(tasks=both, lambada=["x"])) == both
    for asked, words in (
        (EvaluateConfig(tasks=[EvaluateTask.wikitext]), "has wikitext, but evaluate.wikitext names nothing; set"),
        (EvaluateConfig(tasks=both[:1], lambada=["x"]), "evaluate.lambada is given, but evaluate.tasks does not have"),
        (EvaluateConfig(tasks=[]), "asks for nothing; name some of loss, wikitext, lambada, harness"),
    ):
        with pytest.raises(ValueError, match=words):
            tasks_of(asked)


def test_what_is_not_finite_is_null_in_the_results_file():
    found = {"loss": {"a.txt": TextScore(nats=1e4, tokens=1, bytes=0, sequences=1).metrics()}}
    stored = json.loads(json.dumps(storable(found), allow_nan=False))["loss"]["a.txt"]
    assert (stored["perplexity"], stored["bits_per_byte"], stored["loss"]) == (None, None, 1e4)
