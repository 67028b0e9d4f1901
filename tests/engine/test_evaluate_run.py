"""The command itself: a run's newest checkpoint under another plan gives the loss that training saw, which is that of
transformers on the exported copy; the results are in JSON and in wandb.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.load import from_plain
from corpus.corpora import prepare_corpus
from corpus.dataset import Sample
from engine.weights_export import export_weights, open_stored
from tests.engine.inferences import loaded
from tests.engine.launched import LOCAL, ROOT, finish
from tests.telemetry.wandb_files import exit_code, stored

PRETRAIN, EVALUATE = str(ROOT / "recipes" / "pretrain.py"), str(ROOT / "recipes" / "evaluate.py")
SOURCE = "data.sources=[{path: t.jsonl}]"
KNOBS = [
    "model=llama_tiny", "model.vocab_size=320", "data.tokenizer=bpe", "data.bpe_vocab_size=300", SOURCE,
    "data.sequence_length=32", "data.validation_fraction=0.3", "train.train_iters=2", "train.lr=0.01",
    "train.eval_samples=1000", "train.micro_batch_size=2", "run.id=r", "telemetry=quiet",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a call in which a run has ended."""
    folder = tmp_path_factory.mktemp("run")
    texts = (f"Number {n} is {n * n} squared, and {'naïve café ' * (n % 4)}so it goes." for n in range(90))
    (folder / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    code, output = finish([sys.executable, PRETRAIN, *KNOBS], folder)
    assert code == 0, output
    return folder


@pytest.fixture(scope="module")
def results(run: Path) -> dict[str, Any]:
    """Of two tensor ranks."""
    words = ["initialize_from=runs/default/r", "parallel.tp=2", "evaluate.write=out.json", "run.id=e"]
    code, output = finish([str(LOCAL), "-n", "2", EVALUATE, *words], run)
    assert code == 0, output
    found = json.loads((run / "out.json").read_text())
    loss = found["results"]["loss"]["validation"]["loss"]
    assert f"loss       validation: loss {loss:.4f}, perplexity" in output
    return found


def test_the_loss_is_that_of_the_last_evaluation_in_training(run: Path, results: dict[str, Any]):
    rows = [json.loads(line) for line in (run / "runs/default/r/metrics.jsonl").read_text().splitlines()]
    last = [row["validation/loss"] for row in rows if "validation/loss" in row][-1]
    assert results["results"]["loss"]["validation"]["loss"] == pytest.approx(last, abs=1e-5)
    assert results["step"] == 2 and results["plan"] == "tp=2 x pp=1 x dp=1"


def pieces(sample: Sample) -> list[list[int]]:
    """The documents of a sample, each with the token that its last prediction is of."""
    starts = [0, *(n for n in range(1, len(sample.positions)) if sample.positions[n] == 0), len(sample.tokens) - 1]
    found = [sample.tokens[first : end + 1].tolist() for first, end in itertools.pairwise(starts)]
    mask = sample.loss_mask
    ends = [True] * len(found) if mask is None else [bool(mask[end - 1]) for end in starts[1:]]
    return [piece if whole else piece[:-1] for piece, whole in zip(found, ends, strict=True)]


def test_the_loss_is_transformers_on_the_exported_copy_document_by_document(
    run: Path, results: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run)
    checkpoint = open_stored(Path("runs/default/r"))
    export_weights(checkpoint, run / "exported", dtype=None, max_bytes=10**9, tokenizer=None, say=print)
    network = loaded(run / "exported")
    config = from_plain(checkpoint.manifest["config"])
    corpus = prepare_corpus(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    assert corpus.validation is not None
    nats, tokens = 0.0, 0
    for index in range(len(corpus.validation)):
        for piece in pieces(corpus.validation.sample(index)):
            if len(piece) < 2:
                continue
            ids = torch.tensor([piece])
            with torch.no_grad():
                logs = network(ids[:, :-1]).logits.double().log_softmax(-1)[0]
            nats -= float(logs.gather(1, ids[0, 1:, None]).sum())
            tokens += len(piece) - 1
    found = results["results"]["loss"]["validation"]
    assert found["tokens"] == tokens and found["loss"] == pytest.approx(nats / tokens, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)


def test_wandb_has_the_numbers_at_the_step_of_the_weights(run: Path, results: dict[str, Any]):
    rows, config, record = stored(run / "runs/default/e")
    numbers = results["results"]["loss"]["validation"]
    assert rows[-1]["step"] == 2 and rows[-1]["loss/validation/perplexity"] == numbers["perplexity"]
    assert config["model"]["name"] == "llama_tiny" and record.job_type == "evaluate"
    assert exit_code(run / "runs/default/e") == 0
