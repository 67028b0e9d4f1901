"""What a run's checkpoint says of its data, and what a data= on the command line says in its place."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from conf.cli import compose_config
from conf.load import to_plain
from conf.schema import Config, CorpusSource, DataConfig, ModelConfig
from conf.weight_sources import with_source


def checkpoint(folder: Path) -> tuple[str, DataConfig]:
    """A manifest with knobs of data of every kind that differ from the defaults."""
    data = DataConfig(
        sources=[CorpusSource(path="it's {odd}, here.jsonl", weight=2.5), CorpusSource(path="b", eod_id=3)],
        tokenizer="tok", sequence_length=77, mask_documents=False, validation_fraction=0.25,
    )  # fmt: skip
    config = dataclasses.replace(Config(), model=ModelConfig(name="m"), data=data)
    (folder / "manifest.json").write_text(json.dumps({"config": to_plain(config)}))
    return f"initialize_from={folder}", data


def data_of(*words: str) -> DataConfig:
    return compose_config(with_source(words, device=lambda: "cpu")).data


def test_the_data_of_a_run_are_those_of_its_weights_and_what_is_typed_rules(tmp_path: Path):
    word, data = checkpoint(tmp_path)
    assert data_of(word) == data
    typed = data_of(word, "data.sequence_length=8", "data.sources.1.path=c")
    assert typed.sequence_length == 8 and [one.path for one in typed.sources] == ["it's {odd}, here.jsonl", "c"]


def test_a_group_of_data_has_its_own_texts_and_the_tokenizer_of_the_weights(tmp_path: Path):
    word, _ = checkpoint(tmp_path)
    found = data_of(word, "data=stdlib")
    assert [one.path for one in found.sources] == ["stdlib"] and found.validation_fraction == 0.02
    assert (found.tokenizer, found.sequence_length, found.mask_documents) == ("tok", 77, False)
