"""A tokenizer with ids that given weights have no rows for (case E4): evaluation and training refuse it in a line, and
what that line says would work does; generation runs prompts that have none of these ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from conf.cli import compose_config
from conf.weight_sources import with_source
from corpus.corpora import prepare_corpus
from corpus.tokenizer import train_bpe
from engine.answers import open_job
from engine.evaluation_jobs import prepare_jobs
from tests.corpus.helpers import write_jsonl
from tests.engine.inferences import saved

ADDED = "<|endoftext|>"  # by transformers' class of Qwen2's tokenizers, where nothing else is said


def qwen2(folder: Path, *, end: str, extra: tuple[str, ...] = ()) -> Path:
    """A model of 300 ids and as many in its tokenizer.json, of which transformers makes 301."""
    saved("qwen2", folder, vocab_size=300, max_position_embeddings=64)
    backend = Tokenizer.from_str(train_bpe(["for x in y: pass\n"] * 9, size=280).to_str().replace(ADDED, end))
    room = 300 - len(extra) - backend.get_vocab_size()
    backend.add_tokens([*extra, *(f"zq{n}zq" for n in range(room))])
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": end, "pad_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture
def recipes(tmp_path):
    """What each of the recipes says of a tokenizer: its refusal, or None."""
    rows = write_jsonl(tmp_path / "x.jsonl", ["for x in y"] * 9)

    def ask(weights: Path, **data: Any) -> dict[str, str | None]:
        words = [f"initialize_from={weights}", *(f"data.{key}={value}" for key, value in data.items())]
        words += [f"evaluate.files=[{rows}]", "evaluate.sequence_length=32", "prompt=for x"]
        config = compose_config(with_source(words, device=lambda: "cpu"))
        config.data.sources[0].path, config.data.cache_dir = str(rows), str(tmp_path / "cache")
        config.data.sequence_length, config.data.validation_fraction = 4, 0.0
        size = config.model.vocab_size
        said: dict[str, str | None] = {}
        for name, run in (
            ("evaluate", lambda: prepare_jobs(config, progress=print)),
            ("generate", lambda: open_job(config)),
            ("pretrain", lambda: prepare_corpus(config.data, vocab_size=size, seed=1, weights=True)),
        ):
            try:
                run()
                said[name] = None
            except ValueError as error:
                said[name] = str(error)
        assert said.pop("generate") is None
        return said

    return ask


def test_ids_beyond_the_weights_are_named_and_the_vocabulary_is_not_to_be_changed(recipes, tmp_path):
    folder = qwen2(tmp_path / "model", end="</s>")
    said = recipes(folder)
    (line,) = set(said.values())
    assert line is not None and "set model.vocab_size" not in line
    assert line.startswith(
        f"model.vocab_size=300 is smaller than the 301 ids of data.tokenizer={folder}, and the weights have no row for "
        f"{ADDED} (300); set data.tokenizer={folder}/tokenizer.json, which has none of them but no chat template, or "
    )
    assert set(recipes(folder, tokenizer=folder / "tokenizer.json").values()) == {None}


@pytest.mark.parametrize("end", ["</s>", "<|im_end|>"])
def test_the_settings_that_the_line_names_take_the_added_token_away(end, recipes, tmp_path):
    folder = qwen2(tmp_path / "model", end=end)
    line = recipes(folder)["evaluate"]
    assert line is not None and line.endswith(f'write "unk_token": "{end}" into {folder}/tokenizer_config.json')
    assert ("set data.tokenizer=" in line) is (end == "</s>")  # the other end of text is known to the settings alone
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"unk_token": end}))
    assert set(recipes(folder).values()) == {None}


def test_a_tokenizer_of_another_model_is_refused_alike(recipes, tmp_path):
    folder = qwen2(tmp_path / "model", end="</s>")
    larger = tmp_path / "larger.json"
    train_bpe(["for x in y: pass\n" * 9, "while True: break\n"], size=290).save(str(larger))
    backend = Tokenizer.from_file(str(larger))
    backend.add_tokens([f"zq{n}zq" for n in range(305 - backend.get_vocab_size())])
    backend.save(str(larger))
    (line,) = set(recipes(folder, tokenizer=larger).values())
    assert line is not None and line.startswith(
        f"model.vocab_size=300 is smaller than the 305 ids of data.tokenizer={larger}, "
    )
    assert "row for the last 5 of them; set data.tokenizer to one whose ids are all below 300, such as" in line
