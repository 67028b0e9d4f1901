"""launch/multinode.sh up to where it would reach for the hosts: what it prints, and what it refuses before."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest

from conf.load import ConfigError
from launch import environment, multinode, on_host
from launch.remote import Answer

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch" / "multinode.sh"
HOSTS = "w0 slots=2\nw1 slots=2\n"


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """(code, stdout, stderr) of a dry run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRY_RUN", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str, hosts: str = HOSTS) -> tuple[int, str, str]:
        (tmp_path / "hosts").write_text(hosts)
        monkeypatch.setattr("sys.argv", ["multinode.py", *arguments])
        code = multinode.main()
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_dry_run_prints_both_commands_and_asks_no_host(tmp_path):
    (tmp_path / "hosts").write_text("nowhere.invalid slots=2\n")
    done = subprocess.run(
        [SCRIPT, "hosts", "recipes/pretrain.py", "parallel=tp2", "telemetry.wandb.tags=[a b]"],
        cwd=tmp_path, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    each, command = done.stdout.splitlines()
    assert each.startswith("2 ranks on nowhere.invalid, each: ")
    assert each.endswith("recipes/pretrain.py parallel=tp2 'telemetry.wandb.tags=[a b]' resume=auto")
    assert f"--hostfile {tmp_path}/hosts " in command and "--launcher pdsh" in command and "wandb" not in command
    assert "--master_addr ADDRESS_OF_nowhere.invalid --master_port FREE" in command


def test_options_stand_before_or_behind_the_hostfile_and_filters_name_every_slot(call):
    for words in (["-e", "w1:0", "hosts"], ["hosts", "-e", "w1:0"], ["hosts", "--exclude", "w1:0"]):
        code, out, err = call(*words, "recipes/pretrain.py", "parallel=tp1", "train.global_batch_size=9")
        assert (code, err) == (0, "") and "3 ranks on w0, w1" in out and "--include w0:0,1@w1:1" in out


def test_of_spare_hosts_the_first_are_used(call):
    code, out, _ = call("hosts", "--hosts", "1", "-r", "2", "recipes/pretrain.py", "parallel=tp2")
    assert code == 0 and "2 ranks on w0, each" in out and "--include w0:0,1 " in out


def test_a_preflight_plans_for_the_hosts_that_are_used_and_names_the_spares(tmp_path):
    (tmp_path / "hosts").write_text("w0 slots=2\nw1 slots=1\n")
    done = subprocess.run(
        [SCRIPT, "hosts", "--preflight", "--hosts", "1", "recipes/pretrain.py", "parallel=tp2"],
        cwd=tmp_path, env=os.environ | {"DRY_RUN": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks on w0 (spares: w1), each: " in done.stdout and "2 ranks on w0, each: " in done.stdout


def test_openmpi_starts_a_process_for_every_slot_in_order_and_the_command_holds_none_of_the_users_words(call):
    words = ["--launcher", "openmpi", "-e", "w0:0", "--interface", "ib0", "recipes/pretrain.py", "parallel=tp1"]
    code, out, err = call("hosts", *words, "train.global_batch_size=9", "telemetry.wandb.tags=[a b]")
    command = out.splitlines()[1]
    assert (code, err) == (0, "") and "mpirun --map-by seq --host w0,w1,w1 -n 3 " in command
    assert " --mca oob_tcp_if_include ib0 " in command and command.endswith(" 0:w0,1:w1,1:w1")
    assert "wandb" not in command and "deepspeed" not in command


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["hosts"], "usage: launch/multinode.sh HOSTFILE"),
        (["-z", "hosts", "recipes/pretrain.py"], "option -z not recognized"),
        (["none", "recipes/pretrain.py"], "none: No such file"),
        (["hosts", "-i", "w2", "recipes/pretrain.py"], "'w2' is not in the hostfile"),
        (["hosts", "-p", "ssh", "recipes/pretrain.py"], "-p ssh is not a port"),
        (["hosts", "-r", "often", "recipes/pretrain.py"], "-r often is not a number of restarts"),
        (["hosts", "-r", "²", "recipes/pretrain.py"], "-r ² is not a number of restarts"),
        (["hosts", "-i", "w0", "-i", "w1", "recipes/pretrain.py"], "--include is given twice: w0 and w1"),
        (["hosts", "recipes/pretrain.py", "telemetry.profile.steps=9-3"], "telemetry.profile.steps"),
        (["hosts", "-p", "²", "recipes/pretrain.py"], "-p ² is not a port"),
        (["hosts", "--hosts", "²", "recipes/pretrain.py"], "--hosts ² is not a number of hosts"),
        (["hosts", "-i", "", "recipes/pretrain.py"], "--include is empty"),
        (["hosts", "--interface", "", "recipes/pretrain.py"], "--interface is empty"),
        (
            ["hosts", "-e", "w1:0", "recipes/pretrain.py", "train.global_batch_size=8"],
            "train.global_batch_size=8",
        ),
        (["hosts", "--hosts", "0", "recipes/pretrain.py"], "--hosts 0 is not a number of hosts"),
        (["hosts", "--hosts", "3", "recipes/pretrain.py"], "--hosts 3 but there are 2 (w0, w1); give at most that"),
        (
            ["hosts", "--lost-after", "1", "recipes/pretrain.py"],
            "--lost-after 1 is not a time in seconds; give 5 or more",
        ),
        (["hosts", "--hosts", "1", "recipes/pretrain.py", "parallel=tp4_pp2"], "but the hosts have 2 slots"),
        (
            ["hosts", "--launcher", "mpich", "recipes/pretrain.py"],
            "--launcher mpich is not offered; use pdsh or openmpi",
        ),
        (["hosts", "recipes/nothing.py"], "there is no recipe recipes/nothing.py"),
        (["hosts", "recipes/pretrain.py", "train.lrr=1"], "did you mean train.lr?"),
        (["hosts", "recipes/pretrain.py", "train.lr=-1"], "train.lr=-1"),
        (["hosts", "-e", "w1:0", "recipes/pretrain.py", "parallel=tp2"], "does not divide the 3 slots"),
    ],
)
def test_what_cannot_be_ends_with_code_2_and_a_line(call, arguments, line):
    code, out, err = call(*arguments)
    assert code == 2 and out == "" and line in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("MASTER_ADDR", "", "MASTER_ADDR is empty"),
        ("MASTER_PORT", "x", "MASTER_PORT=x is not a port"),
        ("MASTER_PORT", "0", "0 is not a port"),
        ("SLURM_STEP_NUM_TASKS", "2", "srun started 2 tasks (SLURM_STEP_NUM_TASKS) and each would start the ranks of"),
        ("OMPI_COMM_WORLD_SIZE", "4", "mpirun started 4 tasks (OMPI_COMM_WORLD_SIZE) and each would start the"),
    ],
)
def test_an_environment_that_cannot_be_is_told(call, monkeypatch, name, value, line):
    monkeypatch.setenv(name, value)
    code, _, err = call("hosts", "recipes/pretrain.py", "parallel=tp1")
    assert code == 2 and line in err


def test_given_address_and_port_win(call, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.1.2.3")
    monkeypatch.setenv("MASTER_PORT", "29511")
    assert "--master_addr 10.1.2.3 --master_port 29511 " in call("hosts", "recipes/pretrain.py", "parallel=tp1")[1]


def test_a_sourced_file_brings_any_value_back_and_is_gone(tmp_path):
    values = {"A": "a b\n$HOME `id` 'q' \"d\" \\ (x2) !", "WANDB_API_KEY": "%n é", "EMPTY": ""}
    path = tmp_path / "it's a file"
    path.write_text(environment.shell_file(str(path), values))
    shell = subprocess.run(["bash", "-c", 'source "$0"; env -0', path], env={}, capture_output=True, text=True)
    found = dict(entry.split("=", 1) for entry in shell.stdout.split("\0") if entry)
    assert {name: found[name] for name in values} == values
    assert not path.exists()


def test_only_listed_variables_travel():
    given = {"WANDB_MODE": "offline", "HF_HOME": "/x", "NCCL_DEBUG": "INFO", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/y"}
    assert environment.travelling(given).keys() == {"WANDB_MODE", "HF_HOME", "NCCL_DEBUG"}


def test_lines_of_deepspeed_env_are_literal_and_a_bad_one_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".deepspeed_env").write_text("# c\n\nFOO=a b=c\n BAR = $HOME \n")
    assert environment.of_files({}) == {"FOO": "a b=c", "BAR": "$HOME"}
    (tmp_path / ".deepspeed_env").write_text("# c\nFOO\n")
    with pytest.raises(ConfigError, match=r"\.deepspeed_env line 2 is not NAME=VALUE"):
        environment.of_files({})


def test_the_launchers_own_environment_holds_nothing_that_it_would_put_on_a_command_line():
    given = {"NCCL_DEBUG": "INFO", "PYTHONPATH": "$(x)", "UCX_TLS": "tcp", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "1"}
    kept = environment.for_the_launcher(given, ssh_options="-p 2222")
    assert kept.keys() == {"PATH", "PDSH_SSH_ARGS_APPEND", "DS_ENV_FILE"} and not Path(kept["DS_ENV_FILE"]).exists()


@pytest.mark.parametrize(
    ("interface", "given", "expected"),
    [(None, None, "ens3"), (None, "bond0,ib0", "bond0,ib0"), ("ens3", "bond0", "ens3")],
)
def test_a_hosts_own_interface_is_named_unless_the_caller_named_one(monkeypatch, interface, given, expected):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    request = multinode.Request(Path("hosts"), "", "", None, interface, Path("recipe.py"), ())
    answers = [Answer(host, {"interface": name}, None) for host, name in (("w0", "eth0"), ("w1", "ens3"))]
    assert multinode.variables(request, answers, "id", words=(), restart=None)[1]["NCCL_SOCKET_IFNAME"] == expected


@pytest.mark.skipif(not os.path.isdir(on_host.MEMORY), reason="no memory file system")
def test_what_a_host_receives_is_its_owners_alone_and_goes_at_the_end(monkeypatch, tmp_path):
    path, marker = f"{on_host.MEMORY}/launch-test-{os.getpid()}.env", tmp_path / "done"
    order = {"id": "none", "node": 0, "path": path, "marker": str(marker), "asked": False, "early": False}
    on_host.receive(order | {"text": "export A=1\n"})
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert on_host.end(order) == {"finished": False, "ended": 0} and not os.path.exists(path)
    marker.touch()
    assert on_host.end(order)["finished"] and not marker.exists()


def test_only_processes_of_this_launch_on_this_host_are_ended():
    def sleeper(launch: str, node: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"], env={"LAUNCH_ID": launch, "LAUNCH_NODE": node})

    mine, others = sleeper("x1", "0"), [sleeper("x1", "1"), sleeper("x2", "0")]
    try:
        order = {"id": "x1", "node": 0, "path": "/none", "marker": "/none", "asked": False, "early": False}
        assert on_host.end(order)["ended"] == 1
        assert not psutil.pid_exists(mine.pid) and [one.poll() for one in others] == [None, None]
    finally:
        for process in (mine, *others):
            process.kill()
            process.wait()
