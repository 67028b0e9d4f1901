"""A run over two hosts through every launcher: rank 1 comes late (case F1), and a killed build left its lock (F8).

No run.id is given: the hosts decide on one. Data is relative to the folder of the call.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.nodes import Nodes
from tests.cluster.runs import BIN, MULTINODE, ROOT, environ, finish
from tests.cluster.slurm import SBATCH, SUBMIT, Slurm
from tests.engine.launched import FAULTY, steps_of

WORDS = [
    str(FAULTY), "model=llama_tiny", "data.sequence_length=32", "train.train_iters=3", "train.eval_interval=0",
    "telemetry=quiet", "data.sources=[{path: ./data/x.jsonl}]",
]  # fmt: skip
OPS = ("deepspeed_shm_comm", "cpu_adam", "utils", "async_io")  # what DeepSpeed would build on a CPU
LATE = {"FAULT": "late"}
PP2, TP2_PP2 = "parallel=tp1_pp2", "parallel=tp2_pp2"
SLOW = pytest.mark.slow
Ended = tuple[bool, str]  # well or not, output


def through_multinode(*options: str) -> Callable[[Hosts, Path], Ended]:
    def launch(hosts: Hosts, folder: Path) -> Ended:
        command = [MULTINODE, str(hosts.hostfile(folder / "hosts")), *options, *WORDS, PP2]
        code, output = finish(hosts[0], command, folder, surroundings(hosts, folder))
        return code == 0, output

    return launch


def through_node(hosts: Hosts, folder: Path) -> Ended:
    nodes = Nodes(hosts, folder, [[*WORDS, PP2]] * 2, **surroundings(hosts, folder))
    return nodes.wait(240) == [0, 0], "".join(nodes.outputs)


def through_elastic(hosts: Hosts, folder: Path) -> Ended:
    command = [str(BIN / "python"), str(ROOT / "launch" / "elastic.py"), "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-id", "late", "--rdzv-endpoint", "w0:31400", *WORDS, PP2]
    given = surroundings(hosts, folder) | {"GLOO_SOCKET_IFNAME": "eth0"}
    started = [
        host.start(command, folder=folder, output=folder / f"output-{number}.txt", environ=given)
        for number, host in enumerate([hosts[0], hosts[1]])
    ]
    codes = [one.wait(timeout=240) for one in started]
    return codes == [0, 0], "".join(path.read_text() for path in folder.glob("output-*.txt"))


def through_plain_deepspeed(hosts: Hosts, folder: Path) -> Ended:
    given = surroundings(hosts, folder)
    lock = given["TORCH_EXTENSIONS_DIR"]
    (folder / ".deepspeed_env").write_text(f"FAULT=late\nGLOO_SOCKET_IFNAME=eth0\nTORCH_EXTENSIONS_DIR={lock}\n")
    command = [str(BIN / "deepspeed"), "--hostfile", str(hosts.hostfile(folder / "hosts")), "--no_ssh_check"]
    # Brackets do not survive its remote shell.
    words = [word for word in WORDS if not word.startswith("data.sources")] + ["data.sources.0.path=./data/x.jsonl"]
    command += ["--master_addr", hosts[0].addresses[0], *words, PP2]
    code, output = finish(hosts[0], command, folder, given)
    return code == 0, output


def surroundings(hosts: Hosts, folder: Path) -> dict[str, str]:
    """The caller's, with a folder of extensions whose builds seem to go on."""
    return environ(hosts, TORCH_EXTENSIONS_DIR=str(folder / "extensions"), **LATE)


def prepare(folder: Path) -> None:
    (folder / "data").mkdir()
    rows = [json.dumps({"text": f"{number} plus {number} is {2 * number}. " * 5}) for number in range(200)]
    (folder / "data" / "x.jsonl").write_text("\n".join(rows) + "\n")
    (folder / ".deepspeed_env").write_text("# of the ranks, whatever the shell there has\n\nFAULT=late\n")
    for op in OPS:
        (folder / "extensions" / op).mkdir(parents=True)
        (folder / "extensions" / op / "lock").touch()


def check(folder: Path, ended: Ended) -> None:
    well, output = ended
    assert well, output
    (run,) = (folder / "runs" / "default").iterdir()
    assert steps_of(run) == [1, 2, 3]
    assert json.loads((run / "config.json").read_text())["data"]["sources"][0]["path"] == "./data/x.jsonl"
    left = sorted(path.relative_to(folder / "extensions").as_posix() for path in (folder / "extensions").rglob("*"))
    assert left == sorted([*OPS, *(f"{op}/lock" for op in OPS)])  # nothing was built, and nothing taken away


@pytest.mark.parametrize(
    "launch",
    [
        pytest.param(through_multinode(), id="multinode.sh"),
        pytest.param(through_multinode("--launcher", "openmpi"), id="openmpi", marks=SLOW),
        pytest.param(through_node, id="node.sh", marks=SLOW),
        pytest.param(through_elastic, id="elastic.py", marks=SLOW),
        pytest.param(through_plain_deepspeed, id="deepspeed", marks=SLOW),
    ],
)
def test_a_late_rank_joins_the_one_run_and_a_stale_lock_of_a_build_holds_nothing_up(hosts, tmp_path, launch):
    prepare(tmp_path)
    check(tmp_path, launch(hosts, tmp_path))
    assert hosts.processes() == []


@SLOW
@pytest.mark.parametrize(
    ("tasks", "plan"), [("-N 2", PP2), ("-N 2 --ntasks-per-node=2", TP2_PP2)], ids=["a task a host", "a task a rank"]
)
@pytest.mark.parametrize("script", ["slurm.sbatch", "submit.py"])
def test_so_it_is_in_a_job_of_slurm(slurm: Slurm, tmp_path, tasks, plan, script):
    prepare(tmp_path)
    more = LATE | {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions")}
    if script == "submit.py":
        code, said = slurm.call([str(BIN / "python"), SUBMIT, "--sbatch", tasks, *WORDS, plan], tmp_path, **more)
        assert code == 0, said
        job = said.splitlines()[-1].removeprefix("job ").partition(";")[0]
    else:
        job = slurm.submit([*tasks.split(), SBATCH, *WORDS, plan], tmp_path, **more)
    ended = slurm.wait(job) == ("COMPLETED", 0)
    output = "".join(path.read_text() for path in [*tmp_path.glob("slurm-*.out"), *tmp_path.glob("slurm-*/*.log")])
    check(tmp_path, (ended, output))
    assert slurm.processes() == []
