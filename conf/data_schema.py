"""Knobs of the corpus: part of `conf.schema`, which others import."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from conf.choices import BadLine, DataFormat


@dataclass
class CorpusSource:
    """One corpus of a blend."""

    path: str = "???"  # "stdlib", a file, a folder, a glob, hf:NAME[/CONFIG], or the prefix of Megatron's .bin and .idx
    weight: float = 1.0  # share of samples drawn from it, before normalisation
    split: str = "train"  # split of a Hugging Face dataset; of Megatron data its --split, such as 969,30,1
    text_column: str = "text"  # column that holds the text
    messages_column: str = "messages"  # conversations: a list of {role, content}, or ShareGPT's {from, value}
    prompt_column: str = "prompt"  # conversations: text before the completion, where there are no messages
    completion_column: str = "completion"  # conversations: text that is learnt, to the end of the sequence
    streaming: bool = False  # Hugging Face datasets: stream instead of downloading first
    max_documents: Optional[int] = None  # read at most this many documents; null: all
    eod_id: Optional[int] = None  # Megatron data: the id that closes a document; null: the tokenizer's


@dataclass
class DataConfig:
    """Text to tokens to batches."""

    sources: list[CorpusSource] = field(default_factory=lambda: [CorpusSource(path="stdlib")])  # blend of corpora
    format: DataFormat = DataFormat.text  # of the rows: text; conversations (messages, or prompt and completion)
    validation_sources: list[CorpusSource] = field(default_factory=list)  # conversations held out; empty: by a hash
    chat_template: Optional[str] = None  # conversations: file of a Jinja chat template; null: the tokenizer's own
    packing: bool = True  # conversations: several share a sample, never cut; false: one a sample, padded
    tokenizer: str = "byte"  # "byte", "bpe" (trained on the corpus), a folder, a tokenizer.json or a hub name
    bpe_vocab_size: int = 4096  # "bpe": number of token ids to train
    sequence_length: int = 256  # tokens per sample
    validation_fraction: float = 0.02  # share of documents held out, chosen by a hash of each document
    mask_documents: bool = True  # attention and positions restart at each document inside a sample
    bad_lines: BadLine = BadLine.fail  # broken rows: fail with file and row, or skip and count
    cache_dir: str = "runs/corpus"  # where tokenised corpora are kept, relative to the calling folder
    num_workers: int = 0  # chunks of text tokenised at once; 0: one a core
    wait_timeout_s: float = 1800.0  # how long ranks wait for the one that prepares, in seconds
