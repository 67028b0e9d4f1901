"""What cannot be evaluated is refused with one line that names knob and remedy, before any rank starts."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conf.load import ConfigError
from conf.schema import DataConfig
from corpus.tokenizer_folder import write_tokenizer
from engine.answers import open_job
from recipes import evaluate
from tests.engine.inferences import configured, saved
from tests.engine.launched import ROOT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = saved("llama gqa", tmp_path_factory.mktemp("refusals") / "model", vocab_size=259)
    write_tokenizer(DataConfig(tokenizer="byte"), made)
    return made


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of an evaluation that ends with 2."""
    config, plan = configured(folder, f"data.tokenizer={folder}", *words, world_size=1)
    capsys.readouterr()  # what saving the folder said
    assert evaluate.run(config, plan) == 2
    # datasets was imported before the recipe switched its progress bars off.
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line and "examples/s" not in line)
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


def task(folder: Path, name: str, **changes: Any) -> None:
    (folder / "data.jsonl").write_text(json.dumps({"q": "1 + 1 =", "a": " 2"}) + "\n")
    about = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test", "output_type": "loglikelihood", "doc_to_text": "{{q}}", "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc"}],
    }  # fmt: skip
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(about | changes))


def test_texts_that_are_not_there_or_of_another_shape_are_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"body": "one two"}\n')
    Path("plain.txt").write_text("one two")
    for words, said in (
        (["evaluate.files=[nowhere.txt]"], f"evaluate.files path=nowhere.txt: no file matches (from {tmp_path})"),
        (["evaluate.files=[rows.jsonl]"], "no column 'text'; it has body: set evaluate.text_column"),
        (["evaluate.wikitext=[nowhere]"], f"evaluate.wikitext: nowhere: no such file (from {tmp_path})"),
        (["evaluate.wikitext=[rows.jsonl]"], "name the file as WikiText has it, such as wiki.test.tokens"),
        (["evaluate.lambada=[rows.jsonl]"], "no column 'text'; it has body: set evaluate.text_column"),
        (["evaluate.lambada=[plain.txt]"], "wants a row an example, as .jsonl, .csv or .parquet has them"),
        (["evaluate.tasks=[lambada]"], "evaluate.tasks has lambada, but evaluate.lambada names nothing"),
        (["evaluate.tasks=[harness]"], "evaluate.tasks has harness, but evaluate.harness.tasks names nothing"),
        (["evaluate.wikitext=[plain.txt]", "evaluate.overlapping_eval=64"], "leaves gaps between windows of 32 tokens"),
        (["evaluate.files=[plain.txt]", "evaluate.sequence_length=999"], "exceeds model.max_position_embeddings=32"),
        (["evaluate.files=[plain.txt]", "evaluate.write=no/where.json"], "there is no folder no; name a .json file"),
    ):
        assert said in refusal(folder, capsys, *words), words


def test_masked_models_do_not_go_on_with_a_text(tmp_path, capsys):
    bert = saved("bert", tmp_path / "bert", vocab_size=259)
    assert "model.family=bert fills in masks; leave them" in refusal(bert, capsys, "evaluate.files=[plain.txt]")
    with pytest.raises(ValueError, match="=bert fills in masks and does not continue a text"):
        open_job(configured(bert, world_size=1)[0])


def test_weights_and_tokenizers_that_do_not_go_together_are_named(folder, tmp_path, capsys):
    small = saved("llama gqa", tmp_path / "small")
    assert "model.vocab_size=61 is smaller than the 257 ids of data.tokenizer=byte" in refusal(
        small, capsys, "data.tokenizer=byte"
    )
    assert "these weights have none; name their tokenizer" in refusal(folder, capsys, "data.tokenizer=bpe")
    with pytest.raises(ConfigError, match=r"evaluate.batch_size=0 must be positive"):
        configured(folder, "evaluate.batch_size=0", world_size=1)


def test_harness_tasks_that_cannot_be_loaded_are_named(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task(tmp_path, "sums")
    task(tmp_path, "lost", dataset_kwargs={"data_files": {"test": str(tmp_path / "gone.jsonl")}})
    answers = {"output_type": "generate_until", "metric_list": [{"metric": "exact_match"}]}
    task(tmp_path, "beams", **answers, generation_kwargs={"until": ["x"], "max_gen_toks": 4, "num_beams": 4})
    task(tmp_path, "long", **answers, generation_kwargs={"until": ["x"], "temperature": 0.0})
    for name, said in (
        (str(tmp_path / "gone.yaml"), "gone.yaml: no such file"),
        ("beams", "evaluate.harness.tasks: beams asks for generation_kwargs num_beams=4, not known here"),
        ("long", "evaluate.harness.tasks: long generates 256 tokens, and the model sees 32 at once"),
        ("lost", "evaluate.harness.tasks: lost cannot be loaded (FileNotFoundError: Unable to find"),
    ):
        line = refusal(folder, capsys, f"evaluate.harness.tasks=[{name}]", f"evaluate.harness.include_path={tmp_path}")
        assert said in line
    line = refusal(folder, capsys, "evaluate.harness.tasks=[sums]", f"evaluate.harness.include_path={tmp_path / 'no'}")
    assert "evaluate.harness.include_path=" in line and "no such folder" in line


@pytest.mark.slow  # lm-eval lists its 14,000 tasks
def test_unknown_tasks_and_those_of_the_hub_are_named(folder, tmp_path):
    task(tmp_path, "sums")
    for tasks, said in (
        ("summs", f"no task, group or tag summs in {tmp_path} and lm-eval's own; did you mean sums?"),
        ("sums,hellaswag", "hellaswag cannot be loaded (ConnectionError: Couldn't reach 'Rowan/hellaswag' on the Hub"),
    ):
        command = [sys.executable, "recipes/evaluate.py", f"initialize_from={folder}", f"run.dir={tmp_path}"]
        command += [f"evaluate.harness.tasks=[{tasks}]", f"evaluate.harness.include_path={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
        assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1


def test_lm_eval_that_is_not_installed_is_named_with_the_command_that_installs_it(folder, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *args: None if name == "lm_eval" else found(name, *args)
    )
    line = refusal(folder, capsys, "evaluate.harness.tasks=[sums]")
    assert line.endswith("needs the package lm-eval, which is not installed; pip install 'lm-eval>=0.4.9,<0.5'")
