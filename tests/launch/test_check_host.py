"""What a host answers of itself: facts without packages, a rank's view, tokens, GPUs by a played nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf.cli import compose_config
from conf.load import fingerprint
from launch import check_host, needs
from launch.check_gpus import gpus
from parallel.sizes import parameter_count, sizes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "check_host.py"
RUN = ["model=llama_tiny", "parallel=tp1_pp2", "resume=auto"]


def asked(verb: str, order: dict, *python: str, **environ: str) -> dict:
    """The verb in a process of its own, as ssh starts it."""
    done = subprocess.run(
        [sys.executable, *python, str(SCRIPT), verb], input=json.dumps(order), capture_output=True, text=True,
        env={"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "DS_ACCELERATOR": "cpu"} | environ,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_facts_are_told_where_no_package_is_installed():
    """-I -S: Python's own library alone."""
    found = asked("facts", {"recipe": str(ROOT / "recipes" / "pretrain.py")}, "-I", "-S")
    assert found["packages"]["torch"] is None and "hydra-core" in found["packages"]
    assert found["python"].startswith("CPython 3.") and found["memory"] > 0 and found["cores"] > 0
    assert {"conf/load.py", "conf/model/llama_tiny.yaml", "launch/rank.sh", "recipes/pretrain.py"} <= found[
        "code"
    ].keys()
    assert not any(path.startswith(("tests/", "docs/", ".venv")) for path in found["code"])


def test_a_recipe_of_ones_own_counts_as_code(tmp_path):
    (tmp_path / "mine.py").write_text("pass\n")
    assert str(tmp_path / "mine.py") in check_host._code(tmp_path / "mine.py")


def test_every_required_package_is_asked_for(tmp_path):
    (tmp_path / "r.txt").write_text("# a comment\ntorch>=2.13,<2.14\n\n  hydra-core>=1.3\nnumpy\n")
    assert check_host._required(tmp_path / "r.txt") == ["torch", "hydra-core", "numpy"]


def view(tmp_path: Path, *overrides: str, **environ: str) -> dict:
    about = {"folder": str(tmp_path), "world_size": 4, "ranks": [2, 3], "overrides": [*RUN, *overrides]}
    return asked("view", about | {"environ": environ})


def test_a_view_has_the_config_as_a_rank_there_would_resolve_it(tmp_path):
    found = view(tmp_path, "train.lr=${oc.env:TORCH_LR}", TORCH_LR="1e-5", WANDB_API_KEY="k" * 40)
    expected = compose_config([*RUN, "train.lr=1e-5"])
    assert found["fingerprint"] == fingerprint(expected) and found["knobs"]["train.lr"] == "1e-05"
    assert found["folders"] == {"run folder": f"{tmp_path}/runs", "corpus folder": f"{tmp_path}/runs/corpus"}
    assert (
        "k" * 40 not in json.dumps(found) and {"TORCH_LR", "WANDB_API_KEY", "DS_ACCELERATOR"} <= found["environ"].keys()
    )
    assert found["needs"]["rank_bytes"][0] > 0 and len(found["needs"]["rank_bytes"]) == 2


def test_a_config_that_cannot_be_there_is_told_and_so_is_a_folder_that_is_not(tmp_path):
    assert "train.lrr" in view(tmp_path, "train.lrr=1")["problem"]
    assert view(tmp_path / "none")["problem"].startswith(f"it has no folder {tmp_path}/none; mount it there")


def test_pythonpath_is_the_callers_or_none(tmp_path):
    """A package that only this path has is one that ranks there would find."""
    meta = tmp_path / "xxhash-0.0.1.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text("Metadata-Version: 2.1\nName: xxhash\nVersion: 0.0.1\n")
    order = {"recipe": str(SCRIPT)}
    assert asked("facts", order | {"environ": {}}, PYTHONPATH=str(tmp_path))["packages"]["xxhash"] != "0.0.1"
    assert asked("facts", order | {"environ": {"PYTHONPATH": str(tmp_path)}})["packages"]["xxhash"] == "0.0.1"


def test_tokens_are_seen_by_those_that_share_a_folder_and_are_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(check_host, "READ_S", 0.0)
    about = {"id": "x", "tokens": ["w0 a", "w1 a"]}
    w0 = about | {"node": 0, "folders": {"run folder": f"{tmp_path}/runs", "corpus folder": f"{tmp_path}/c"}}
    w1 = about | {"node": 1, "folders": {"run folder": f"{tmp_path}/runs", "corpus folder": f"{tmp_path}/other"}}
    assert [check_host.write(order) for order in (w0, w1)] == [{"problems": {}}] * 2
    assert check_host.read(w0) == {"unseen": {"run folder": [], "corpus folder": [1]}}
    assert check_host.read(w1) == {"unseen": {"run folder": [], "corpus folder": [0]}}
    stale = w0 | {"tokens": ["w0 a", "w1 new"]}
    assert check_host.read(stale)["unseen"]["run folder"] == [1]  # an old file under the name is none
    for order in (w0, w1):
        check_host.clear(order)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (tmp_path / "file").write_text("")
    blocked = check_host.write(w0 | {"folders": {"run folder": f"{tmp_path}/file/runs"}})
    assert blocked == {"problems": {"run folder": "Not a directory"}}


def test_a_control_groups_limit_counts_where_it_is_lower(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n",
        "/proc/self/cgroup": "1:cpu:/\n0::/slurm/job\n",
        "/sys/fs/cgroup/slurm/memory.max": "3000000\n",
        "/sys/fs/cgroup/slurm/memory.current": "1000000\n",
        "/sys/fs/cgroup/slurm/job/memory.max": "max\n",
    }
    monkeypatch.setattr(Path, "read_text", lambda self: files[str(self)])
    monkeypatch.setattr(Path, "is_file", lambda self: str(self) in files)
    assert check_host._available_memory() == 2_000_000
    files["/sys/fs/cgroup/slurm/memory.max"] = "9000000\n"
    assert check_host._available_memory() == 4_096_000


def smi(folder: Path, text: str) -> None:
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "nvidia-smi").chmod(0o755)


NEW = """case $1 in
--query-gpu=*) cat <<END
0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, 30000, 33, 2, Yes, No, 0x0000000000000004, 0x0000000000000004
1, GPU-b, NVIDIA GeForce RTX 3090, [N/A], [N/A], 40, [N/A], [N/A], [N/A], 0x0000000000000000, 0x0000000000000000
END
;;
--query-compute-apps=gpu_uuid,pid,process_name) echo "GPU-a, 4711, /usr/bin/python, x.py" ;;
esac"""
OLD = """case $1 in
*clocks_event*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2 ;;
--query-gpu=*) echo "0, GPU-a, Tesla V100, 32768, 0, 33, 0, [N/A], [N/A], 0x0000000000000008" ;;
esac"""


def test_gpus_are_read_with_all_that_is_known_of_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi(tmp_path, NEW)
    (first, second), problem = gpus()
    assert problem is None
    assert first == {
        "index": 0, "name": "NVIDIA A100-SXM4-80GB", "total": 81920 << 20, "used": 30000 << 20, "temperature": 33,
        "ecc": 2, "pending": True, "failure": False, "reasons": 4, "users": ["/usr/bin/python, x.py (process 4711)"],
    }  # fmt: skip
    assert (second["ecc"], second["pending"], second["total"], second["users"]) == (None, None, None, [])


def test_fields_that_an_older_driver_does_not_know_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi(tmp_path, OLD)
    found, problem = gpus()
    assert problem is None and [(one["name"], one["reasons"]) for one in found or ()] == [("Tesla V100", 8)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9",
         "nvidia-smi fails: NVIDIA-SMI has failed because it could not communicate with the driver"),
        ("exit 1", "nvidia-smi fails: code 1"),
        ("exec sleep 9", "nvidia-smi does not answer within 0.2 s"),
    ],
)  # fmt: skip
def test_a_driver_that_does_not_answer_is_a_problem(tmp_path, monkeypatch, text, expected):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("launch.check_gpus.PATIENCE_S", 0.2 if "sleep" in text else 20.0)
    smi(tmp_path, text)
    assert gpus() == ([], expected)


def test_without_nvidia_smi_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == (None, None)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.train_iters=5000"], 4),  # three kept and the one that is written
        (["train.train_iters=1000"], 2),  # there are no more
        (["train.train_iters=5000", "checkpoint.keep_last=-1"], 10),
        (["train.train_iters=5000", "checkpoint.keep_every=1000"], 4 + 5),
        (["train.train_iters=5000", "checkpoint.keep_every=750"], 4 + 3),  # of those saved: 1500, 3000, 4500
        (["train.train_iters=501"], 2),  # one more at the end
        (["checkpoint.interval=0"], 1),  # when it is asked to stop
    ],
)
def test_as_many_checkpoints_are_counted_as_lie_on_the_disk_at_once(overrides, expected):
    assert needs.checkpoints(compose_config(overrides)) == expected


def test_a_run_that_is_gone_on_with_has_some_of_them_already(tmp_path):
    for number in (1, 2):
        (tmp_path / "default" / "a" / "checkpoints" / f"step-0000000{number}").mkdir(parents=True)
    (tmp_path / "default" / "b" / "checkpoints").mkdir(parents=True)

    def held(*overrides: str) -> int:
        return needs.held(compose_config([f"run.dir={tmp_path}", *overrides]))

    assert (held("resume=auto", "run.id=a"), held("resume=auto"), held("run.id=a")) == (2, 0, 0)  # b is the newest
    assert held("resume=auto", "run.experiment=none") == 0
    (tmp_path / "default" / "b" / "complete.json").touch()
    assert held("resume=auto") == 2  # of a, as b has come to its end


def test_needs_are_those_of_the_ranks_of_this_host():
    config = compose_config(["model=llama_tiny", "parallel=tp1_pp2"])
    first, last = (needs.needs(config, ranks, world_size=4, device="cpu") for ranks in ([0, 1], [2, 3]))
    assert (
        first["rank_bytes"] != last["rank_bytes"] and len(set(last["rank_bytes"])) == 1
    )  # stages differ, ranks do not
    assert first["checkpoint_bytes"] == 3 * 4 * parameter_count(config.model)
    adapters = compose_config(["model=llama_tiny", "parallel=tp1", "lora=all_linear", "lora.rank=2"])
    hidden, ffn, layers = config.model.hidden_size, sizes(config.model).ffn_hidden_size, config.model.num_layers
    key_value = sizes(config.model).num_key_value_heads * sizes(config.model).head_dim
    a_and_b = 4 * hidden + 2 * (hidden + key_value) + 3 * (hidden + ffn)  # q, o; k, v; gate, up, down
    kept = needs.needs(adapters, [0], world_size=1, device="cpu")["checkpoint_bytes"]
    assert kept == 3 * 4 * 2 * layers * a_and_b  # adapters alone, of rank 2
    offloaded = compose_config(["model=llama_tiny", "parallel=tp1", "zero.offload_optimizer=true"])
    assert needs.needs(offloaded, [0], world_size=1, device="cuda")["host_bytes"] > 0
