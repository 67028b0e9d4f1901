"""recipes/plan.py as a user calls it: what it answers, refuses, writes and draws, and that it needs no torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conf.cli import compose_config, main_without_plan
from recipes import plan
from tests.engine.launched import ROOT

H100 = ["model=llama_8b", "cluster=dgx_h100", "train.global_batch_size=64"]
TINY = [
    "model=llama_tiny", "model.vocab_size=256", "model.hidden_size=64", "model.num_layers=4",
    "model.num_attention_heads=4", "model.num_key_value_heads=2", "model.ffn_hidden_size=128",
    "data.sequence_length=32",
]  # fmt: skip
MEASURED = [
    "cluster.intra_node={name: loopback, bandwidth: 5e8, latency_s: 2e-4}", "cluster.rates.matrix_flops=2e10",
    "cluster.rates.operand_bandwidth=5e9", "cluster.rates.attention_flops=1e10", "cluster.rates.memory_bandwidth=5e9",
    "cluster.rates.kernel_s=1e-5", "cluster.device=cpu",
]  # fmt: skip


@pytest.fixture
def called(monkeypatch, capsys, tmp_path):
    """(exit code, stdout, stderr) of the recipe with these words, its profiles under tmp_path."""
    (tmp_path / "conf" / "parallel").mkdir(parents=True)
    monkeypatch.setattr(plan, "ROOT", tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plan.py", *plan.words_of(words)])
        with pytest.raises(SystemExit) as end:
            main_without_plan(plan.run)
        found = capsys.readouterr()
        assert "Traceback" not in found.err
        return end.value.code, found.out, found.err

    return call


def test_it_answers_in_seconds_without_torch(tmp_path):
    """The question of the head of the recipe, in a process of its own."""
    words = ["model=llama_70b", "cluster=dgx_h100", "cluster.nodes=8", "train.global_batch_size=1024", "plan.top=3"]
    program = (
        f"import runpy, sys; sys.argv = {['plan.py', *words]!r}\n"
        "try: runpy.run_path(sys.path.pop(), run_name='__main__')\n"
        "finally: print(sorted({'torch', 'numpy', 'deepspeed', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT / 'recipes' / 'plan.py')!r})\n{program}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stderr == "", ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
    assert "legal plans" in ended.stdout and "1 before 2: " in ended.stdout
    assert "FLOPs: a multiply-add is 2" in ended.stdout and "MFU leaves recomputation out" in ended.stdout


def test_two_nodes_print_what_to_keep_inside_first_and_the_bytes_and_seconds_that_justify_it(called):
    code, out, _ = called(*H100, "cluster.nodes=2", "parallel.tp=8", "plan.search=false")
    assert code == 0
    line = next(line for line in out.splitlines() if line.startswith("keep the "))
    assert re.fullmatch(
        r"keep the tensor axis inside a node first: [\d.]+ GB in \d+ calls a step and rank cost [\d.]+ s there and "
        r"[\d.]+ s between nodes, [\d.]+ s more",
        line,
    )
    code, out, _ = called(*H100, "parallel.tp=8", "plan.search=false")
    assert code == 0 and "keep the " not in out and "there is one node" in out


@pytest.mark.parametrize(("changes", "count"), [
    ([], 180_800), (["model.tie_word_embeddings=true"], 164_416), (["model.num_key_value_heads=4"], 197_184),
    (["model.vocab_size=259"], 180_800 + 3 * 64 * 2),
], ids=["untied", "tied", "all heads", "vocab 259"])  # fmt: skip
def test_the_parameter_count_is_the_same_at_every_layout(called, changes, count):
    """Case H1: tied copies once, replicas once, padding never."""
    for layout in (["parallel.tp=1"], ["parallel.tp=2", "parallel.pp=2"]):
        _, out, _ = called(*TINY, *changes, *MEASURED, "cluster.devices_per_node=4", *layout, "plan.search=false")
        assert f" {count:,} parameters" in out, layout


@pytest.mark.parametrize(("layers", "stages"), [(5, 4), (42, 16), (38, 8), (7, 3)])
def test_blocks_are_spread_to_within_one(called, layers, stages):
    """Case B3, with a head that weighs little: a vocabulary of one word."""
    _, out, _ = called(
        *TINY, *MEASURED, f"model.num_layers={layers}", "model.vocab_size=1", "model.make_vocab_size_divisible_by=1",
        f"cluster.devices_per_node={stages}", f"parallel.pp={stages}", "plan.search=false",
        "train.global_batch_size=16",
    )  # fmt: skip
    head = out.index("\nstage  pp rank  layers")
    rows = [line.split() for line in out[head:].splitlines()[3:] if line.strip() and line.split()[0].isdigit()]
    held = {int(row[0]): int(row[2]) for row in rows}
    held[0] -= 1  # the embedding
    held[stages - 1] -= 2  # final norm and head
    assert max(held.values()) - min(held.values()) <= 1 and min(held.values()) >= 1
    if stages <= 8:
        assert len(held) == stages and sum(held.values()) == layers


def test_more_stages_than_blocks_are_refused_with_both_numbers(called):
    code, out, _ = called(
        *TINY, *MEASURED, "model.num_layers=2", "cluster.devices_per_node=4", "parallel.pp=4", "plan.search=false"
    )
    assert code == 2 and "model.num_layers=2 is less than the 4 stages of parallel.pp=4; use parallel.pp of at" in out


def test_one_micro_batch_in_four_stages_is_said_to_idle_three_quarters(called):
    """Case B6."""
    code, out, _ = called(
        *TINY,
        *MEASURED,
        "cluster.devices_per_node=4",
        "parallel.pp=4",
        "train.global_batch_size=1",
        "plan.search=false",
    )
    assert code == 0 and "the pipeline is idle for (P-1)/(M+P-1) = 75% of a step" in out


REFUSED = {
    "no such cluster": (["cluster=dgx_h10"], 2, "error: cluster=dgx_h10 is not an option; did you mean dgx_h100?"),
    "no such knob": (["plan.topp=3"], 2, "error: plan.topp is not a knob; did you mean plan.top?"),
    "no rates": (["cluster=dgx_b200"], 2, "error: cluster.rates of cluster=dgx_b200 has no matrix_flops, "),
    "rates of another width": (["precision=fp32"], 2, "error: cluster.rates of cluster=dgx_h100 are those of bf16"),
    "rank outside": (["parallel=tp4_pp2", "dry_run=99"], 2, "error: rank 99 is outside a world of 8; ranks are 0 to 7"),
    "rank is no number": (["dry_run=x"], 2, "error: plan.dry_run=x: "),
    "too long": (["data.sequence_length=9999"], 2, "error: data.sequence_length=9999 is longer than model.max_"),
    "no rows": (["plan.top=0"], 2, "error: plan.top=0 must be positive"),
    "no folder": (["plan.picture=no/x.png"], 2, "error: plan.picture=no/x.png: there is no folder no; make it"),
    "a folder": (["plan.trace=."], 2, "error: plan.trace=. is a folder; name a file in it"),
    "a path for a name": (["--write", "a/b", "plan.top=1"], 2, "error: profile name 'a/b' cannot be"),
}  # fmt: skip


@pytest.mark.parametrize(("words", "code", "line"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_answered_is_one_line(called, words, code, line):
    found, _, err = called(*H100, "model.max_position_embeddings=8192", *words)
    assert found == code and err.startswith(line) and err.count("\n") == 1, err


def test_a_dry_run_of_a_bad_plan_is_refused_with_every_problem(called):
    code, _, err = called(*H100, "parallel.tp=3", "dry_run=0")
    assert code == 2 and all(line.startswith("error: ") for line in err.splitlines()) and err.count("\n") == 4
    assert err.startswith("error: parallel.tp=3 does not divide model.num_attention_heads=32; use 1, 2, 4, 8, 16 or 32")


def test_a_name_must_follow_write(tmp_path):
    command = [sys.executable, str(ROOT / "recipes" / "plan.py"), *H100, "--write"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (2, "error: --write needs the name of a profile: --write NAME\n")


def test_a_cluster_without_rates_still_prints_the_memory_of_the_named_plan(called):
    words = [*TINY, "cluster=local", "cluster.device=cpu", "cluster.devices_per_node=2", "parallel.tp=2"]
    code, out, err = called(*words)
    assert code == 2 and err.startswith("error: cluster.rates of cluster=local has no ") and err.count("\n") == 1
    assert "optimizer moments" in out and re.search(r"^total +[\d.]+ [kM]B$", out, re.MULTILINE)


def test_a_named_plan_is_refused_with_every_problem_and_the_search_goes_on(called):
    code, out, err = called(*H100, "parallel.tp=3", "zero=stage2", "parallel.pp=2", "plan.top=2")
    assert (code, err) == (0, "")
    refused = out[out.index("the named plan is refused:") :]
    assert "parallel.tp=3 does not divide model.num_attention_heads=32" in refused
    assert "zero.stage=2 does not go with parallel.pp=2" in refused
    assert "legal plans" in refused
    code, out, _ = called(*H100, "parallel.tp=3", "plan.search=false")
    assert code == 2 and "legal plans" not in out


def test_a_named_plan_that_is_too_large_comes_with_advice(called):
    code, out, _ = called("model=llama_70b", "cluster=dgx_h100", "parallel.tp=8", "plan.search=false")
    assert code == 1 and re.search(r"does not fit:\n    \S.*\n", out)


def test_a_model_that_fits_nowhere_has_no_plan_and_the_smallest_is_named(called):
    code, out, err = called("model=megatron_1t", "cluster=dgx_h100")
    assert (code, err) == (1, "") and re.search(
        r"legal plans: 0 fit, \d+ do not; the smallest is tp\d+ .*, [\d.]+ TB", out
    )


def test_a_batch_that_no_plan_divides_is_said(called):
    code, out, err = called(*TINY, *MEASURED, "cluster.devices_per_node=7", "train.global_batch_size=8")
    assert (code, err) == (1, "") and "leaves 7 devices in a dp that divides a batch of 8" in out


def test_a_plan_is_written_with_its_record_and_composes_again(called, tmp_path):
    code, out, _ = called(*H100, "--write", "mine", "plan.top=2")
    assert code == 0 and "wrote conf/parallel/mine.yaml and its record (predicted only)" in out
    assert "parallel=mine zero=stage" in out
    record = json.loads((tmp_path / "conf" / "parallel" / "records" / "mine.json").read_text())
    assert record["status"] == "predicted only" and record["observations"] == []
    first = re.search(r"^== tp(\d+) pp(\d+) ", out, re.MULTILINE)
    composed = compose_config(["parallel=mine"], config_dir=str(tmp_path / "conf")).parallel
    assert first is not None and (composed.tp, composed.pp) == (int(first[1]), int(first[2]))
    assert composed.name == "mine"
    code, _, err = called(*H100, "--write=mine", "plan.top=2")
    assert code == 2 and "mine.yaml exists (version 1)" in err and err.count("\n") == 1
    code, out, _ = called(*H100, "plan.write=mine", "plan.top=2", "plan.overwrite=true")
    assert code == 0 and "wrote conf/parallel/mine.yaml" in out


def test_a_refused_plan_is_not_written_nor_another_in_its_place(called, tmp_path):
    code, _, err = called(*H100, "parallel.tp=3", "--write", "mine", "plan.top=1")
    assert (code, err) == (2, "error: plan.write=mine: the named plan is refused, so that none is written\n")
    assert list((tmp_path / "conf" / "parallel").iterdir()) == []


def test_the_schedule_is_drawn_and_traced(called, tmp_path):
    picture, trace = tmp_path / "schedule.png", tmp_path / "trace.json"
    words = [f"plan.picture={picture}", f"plan.trace={trace}", "parallel=tp4_pp2", "plan.search=false"]
    code, out, _ = called(*H100, *words)
    assert code == 0 and str(picture) in out and "ui.perfetto.dev" in out
    assert picture.read_bytes().startswith(b"\x89PNG") and json.loads(trace.read_text())["traceEvents"]


def test_words_stand_for_knobs():
    assert plan.words_of(["--write", "a", "dry_run=3", "x=1"]) == ["plan.write=a", "plan.dry_run=3", "x=1"]
    assert plan.words_of(["--write=a"]) == ["plan.write=a"]


def test_nothing_is_left_in_the_repository():
    assert not (Path(ROOT) / "conf" / "parallel" / "mine.yaml").exists()
