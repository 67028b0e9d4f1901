"""Training over real hosts, through DeepSpeed's launcher over pdsh: the same numbers, and nothing left behind."""

from __future__ import annotations

import pytest

from tests.cluster.hosts import Hosts
from tests.cluster.runs import BIN, MULTINODE, PRETRAIN, TINY, environ, finish, losses

AT_MOST = 1e-5  # fp32: sums in another order


@pytest.mark.slow
def test_plain_deepspeed_with_a_hostfile_trains_over_two_hosts(hosts, tmp_path, one_rank):
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\nOMP_NUM_THREADS=1\n")
    command = [str(BIN / "deepspeed"), "--hostfile", str(hosts.hostfile(tmp_path / "hostfile")), "--no_ssh_check"]
    command += ["--master_addr", hosts[0].addresses[0], PRETRAIN, *TINY, "parallel=tp1_pp2"]
    code, output = finish(hosts[0], command, tmp_path, environ(hosts))
    assert code == 0, output
    assert losses(tmp_path) == pytest.approx(one_rank, abs=AT_MOST)
    assert hosts.processes() == []


@pytest.mark.parametrize(
    ("slots", "plan"),
    [
        (2, ["parallel=tp2_pp2"]),  # tensor axis inside a host, pipeline across
        pytest.param(1, ["parallel=tp1", "zero=stage1"], marks=pytest.mark.slow),  # data across
        pytest.param(2, ["parallel=tp2", "zero=stage2"], marks=pytest.mark.slow),  # tensor inside, data across
    ],
)
def test_multinode_over_two_hosts_trains_as_one_rank_does(hosts, tmp_path, one_rank, slots, plan):
    hostfile = hosts.hostfile(tmp_path / "hostfile", slots=slots)
    code, output = finish(hosts[0], [MULTINODE, str(hostfile), PRETRAIN, *TINY, *plan], tmp_path, environ(hosts))
    assert code == 0, output
    assert losses(tmp_path) == pytest.approx(one_rank, abs=AT_MOST)
    assert hosts.processes() == []


@pytest.mark.slow
def test_multinode_over_four_hosts_trains_as_one_rank_does(allowed, tmp_path, one_rank):
    with Hosts(4, tmp_path / "hosts") as four:
        hostfile = four.hostfile(tmp_path / "hostfile")
        command = [MULTINODE, str(hostfile), PRETRAIN, *TINY, "parallel=tp1_pp2"]  # pipeline and data across
        code, output = finish(four[0], command, tmp_path, environ(four))
        assert code == 0, output
        assert losses(tmp_path) == pytest.approx(one_rank, abs=AT_MOST)
        assert four.processes() == []
