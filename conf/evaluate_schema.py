"""Knobs of recipes/evaluate.py: part of `conf.schema`, which others import. No number of a run depends on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

from conf.choices import EvaluateTask


@dataclass
class HarnessConfig:
    """The lm-evaluation-harness (the lm-eval package) on task files."""

    tasks: list[str] = field(default_factory=list)  # names of tasks, groups or tags, or paths of their YAML files
    include_path: Optional[str] = None  # folder of task files, searched before those that come with lm-eval
    num_fewshot: Optional[int] = None  # examples before each question; null: what each task says
    apply_chat_template: bool = False  # put the questions into the tokenizer's chat template
    log_samples: bool = False  # write every request and answer too, into samples-TASK.jsonl


@dataclass
class EvaluateConfig:
    """What recipes/evaluate.py computes of the weights that initialize_from names."""

    tasks: Optional[list[EvaluateTask]] = None  # of loss, wikitext, lambada, harness; null: what is named, else loss
    files: list[str] = field(default_factory=list)  # loss: texts (as data.sources); empty: the validation split
    wikitext: list[str] = field(default_factory=list)  # raw text files, such as wiki.test.tokens
    lambada: list[str] = field(default_factory=list)  # .jsonl, .csv or .parquet with a text a row
    text_column: str = "text"  # column of these files that holds the text
    batch_size: int = 8  # sequences that a data-parallel rank computes at once
    sequence_length: Optional[int] = None  # tokens seen at once; null: data.sequence_length, harness: all the model has
    overlapping_eval: int = 32  # wikitext: tokens by which the window moves on (Megatron's --overlapping-eval)
    strict_lambada: bool = True  # lambada: the whole last word counts; false: the last token
    limit: Optional[int] = None  # sequences, examples or documents of each task, the first ones; null: all
    write: Optional[str] = None  # JSON file of the results; null: results.json in the run's folder
    harness: HarnessConfig = field(default_factory=HarnessConfig)
