"""The corpus of a config, whatever its rows hold and whatever is learnt: text (prepare.py; masked: prepare_masked.py)
or conversations (prepare_conversations.py)."""

from __future__ import annotations

from conf.schema import DataConfig, DataFormat, Objective
from corpus.cache import Progress
from corpus.prepare import PreparedCorpus, prepare
from corpus.prepare_masked import prepare_masked


def prepare_corpus(
    data: DataConfig, *, vocab_size: int, seed: int, objective: Objective = Objective.clm,
    weights: bool = False, progress: Progress | None = None,
) -> PreparedCorpus:  # fmt: skip
    """Prepared once, then mapped. weights: see `require_vocabulary`. ValueError: see `prepare`; and knobs that this
    format does not know."""
    if data.format is DataFormat.conversations:
        from corpus.prepare_conversations import prepare_conversations  # transformers: seconds that text does without

        return prepare_conversations(data, vocab_size=vocab_size, seed=seed, weights=weights, progress=progress)
    for knob, is_set in (
        ("chat_template", data.chat_template is not None), ("packing", not data.packing),
        ("validation_sources", bool(data.validation_sources)),
    ):  # fmt: skip
        if is_set:
            raise ValueError(f"data.{knob} is for conversations, but data.format=text; set data=chat, or leave it out")
    if objective is Objective.mlm:
        return prepare_masked(data, vocab_size=vocab_size, seed=seed, weights=weights, progress=progress)
    return prepare(data, vocab_size=vocab_size, seed=seed, weights=weights, progress=progress)
