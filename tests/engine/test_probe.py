"""The probe: what it measures is laid out right, and a run on two ranks prints its tables and writes a cluster."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import yaml

from conf.cli import compose_config
from conf.load import range_problems
from conf.schema import Config, ProbeConfig
from engine.device import this_device
from engine.distributed import start
from engine.probe import measure
from engine.probe_file import as_yaml, target
from engine.probe_links import lines_to_measure, message_sizes, worst_spread
from engine.probe_overlap import Overlap
from engine.probe_rates import matrix_shapes
from parallel.kernels import Rates
from parallel.links import Fabric
from parallel.plan import ParallelPlan
from parallel.topology import Spread, Topology
from tests.engine.cases import tiny_config
from tests.engine.launched import BIN, LOCAL, ROOT, finish
from tests.ranks import run_ranks

pytestmark = pytest.mark.alone

QUICK = ["probe.trials=2", "probe.trial_s=0.001", "probe.largest_message=4194304", "data.sequence_length=32"]
PROBE = str(ROOT / "recipes" / "probe.py")


def test_each_axis_of_the_plan_is_measured_on_all_its_lines():
    lines = lines_to_measure(Topology(pp=2, dp=2, tp=2), ["a"] * 8)
    assert list(lines) == ["tensor", "data", "pipe"]
    assert lines["tensor"] == ((0, 1), (2, 3), (4, 5), (6, 7)) and lines["pipe"] == ((0, 4), (1, 5), (2, 6), (3, 7))


def test_links_that_the_axes_leave_out_are_measured_too():
    hosts = ["a", "a", "b", "b"]
    assert lines_to_measure(Topology(pp=1, dp=1, tp=4), hosts)["host"] == ((0, 1), (2, 3))  # tensor crosses
    inside = lines_to_measure(Topology(pp=1, dp=2, tp=2), hosts)
    assert list(inside) == ["tensor", "data"]  # tensor inside, data across: both links are there
    assert lines_to_measure(Topology(pp=1, dp=1, tp=2), ["a", "b"]) == {"tensor": ((0, 1),)}  # no link inside
    assert lines_to_measure(Topology(pp=1, dp=1, tp=1), ["a"]) == {}


def test_the_spread_is_that_of_the_line_that_lies_worst():
    assert worst_spread(((0, 1), (2, 3)), ["a", "a", "a", "b"]) == Spread(nodes=2, ranks_per_node=1)
    assert worst_spread(((0, 1, 2, 3),), ["a", "a", "b", "b"]) == Spread(nodes=2, ranks_per_node=2)


def test_overlap_is_the_hidden_share_of_the_shorter_one():
    assert Overlap(collective_s=2.0, compute_s=3.0, both_s=3.0).share == 1.0
    assert Overlap(collective_s=2.0, compute_s=3.0, both_s=4.5).share == 0.25
    assert Overlap(collective_s=2.0, compute_s=3.0, both_s=6.0).share == 0.0  # they hinder each other


def test_sizes_go_from_smallest_to_largest_in_fours():
    assert message_sizes(4096, 1 << 20) == [4096, 16384, 65536, 262144, 1048576]
    with pytest.raises(ValueError, match=r"probe\.largest_message=4096 leaves too few sizes .* use at least 65536"):
        message_sizes(4096, 4096)


def test_matrix_shapes_are_those_of_the_models_blocks_at_each_tensor_degree():
    shapes = matrix_shapes(tiny_config(), squares=(64, 128))
    # 32 tokens, hidden 64, 4 query and 2 key-value heads of 16, ffn 128 gated, vocabulary 259; tp 1 and 4.
    for shape in ((32, 64, 128), (32, 64, 64), (32, 64, 256), (32, 128, 64), (32, 64, 259), (32, 64, 48), (32, 16, 64)):
        assert shape in shapes
    assert (128, 128, 128) in shapes and (16, 128, 128) in shapes and len(shapes) == len(set(shapes))


def test_two_ranks_measure_fit_print_and_write_a_cluster_that_plans(tmp_path: Path):
    written = tmp_path / "conf" / "cluster" / "here.yaml"
    written.parent.mkdir(parents=True)
    command = [str(LOCAL), "-n", "2", PROBE, *QUICK, f"probe.write={written}"]
    code, output = finish(command, tmp_path)
    assert code == 0, output
    for part in (
        "links: data, 1 x 2 ranks",
        "reduce_scatter",
        "send_recv",
        "matrix_flops",
        "attention B1",
        "layer_norm",
    ):
        assert part in output
    assert "inter_node: not measured" in output and str(written) in output
    rows = re.findall(r"^data +\w+ +2 .* ([\d.]+) +([\d.]+) +([+-]\d+)$", output, re.MULTILINE)
    assert len(rows) == 4 * 6  # operations x sizes
    for measured, fitted, error in rows:
        assert float(error) == pytest.approx(100 * (float(fitted) / float(measured) - 1), abs=1.5)
    assert written.read_text().startswith("# ") and "2 rank(s) on 1 host(s)" in written.read_text()

    config = compose_config(["cluster=here", "parallel.tp=2"], config_dir=str(tmp_path / "conf"))
    assert range_problems(config) == [] and config.cluster.name == "here" and config.cluster.devices_per_node == 2
    plan = ParallelPlan.from_config(config, 2, device="cpu")
    fabric = Fabric.from_config(config.cluster, world_size=2)
    assert fabric.inter_node is None and fabric.seconds("all_reduce", 1e6, topology=plan.topology, axis="tensor") > 0
    rates = Rates.from_config(config.cluster, config.precision.dtype)
    assert min(rates.matrix_flops, rates.operand_bandwidth, rates.attention_flops, rates.memory_bandwidth) > 0
    assert 0 <= rates.overlap <= 1 and "both at once" in output


def cluster_of_two_hosts(config: Config) -> str:
    """The YAML of ranks that each take themselves to be on a host of their own."""
    torch.set_num_threads(1)
    rank = dist.get_rank()
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", DS_ACCELERATOR="cpu")
    socket.gethostname = lambda: f"host{rank}"
    device = this_device()
    start(device, timeout_s=60)
    plan = ParallelPlan.from_config(config, 2)
    return as_yaml(measure(config, plan, device=device, progress=lambda message: None), name="hosts")


def test_ranks_on_two_hosts_measure_the_link_between_nodes():
    config = tiny_config(probe__trials=2, probe__trial_s=0.001, probe__largest_message=4 << 20)
    first, second = run_ranks(2, cluster_of_two_hosts, config)
    written = yaml.safe_load(first)
    assert first == second and (written["nodes"], written["devices_per_node"]) == (2, 1)
    assert "intra_node" not in written and set(written["inter_node"]) == {"name", "bandwidth", "latency_s"}
    assert "# intra_node: not measured, one rank a host ran" in first


def test_one_rank_writes_rates_and_says_that_it_has_no_links(tmp_path: Path):
    code, output = finish([str(BIN / "python"), PROBE, *QUICK, "probe.write=./alone"], tmp_path)
    assert code == 0 and "cluster.intra_node: not measured" in output, output
    written = yaml.safe_load((tmp_path / "alone.yaml").read_text())
    assert "intra_node" not in written and set(written["rates"]) > {"matrix_flops", "kernel_s", "source"}


@pytest.mark.parametrize(
    ("write", "line"),
    [
        ("no/folder/x", "probe.write=no/folder/x: there is no folder no/folder; make it or choose another"),
        ("a b", "probe.write=a b is not the name of a cluster; use letters, digits and . _ -"),
        ("./.yaml", "probe.write=./.yaml is not the name of a cluster; use letters, digits and . _ -"),
    ],
)
def test_what_cannot_be_written_is_named_before_anything_is_measured(write: str, line: str):
    with pytest.raises(ValueError, match=re.escape(line)):
        target(ProbeConfig(write=write))


def test_a_cluster_is_replaced_only_when_told_to(tmp_path: Path):
    code, output = finish([str(BIN / "python"), PROBE, "probe.write=dgx_h100"], tmp_path)
    assert code == 2 and output.count("\n") == 1, output
    assert output.startswith("error: probe.write=dgx_h100: ") and output.endswith("or set probe.overwrite=true\n")
    path = target(ProbeConfig(write="dgx_h100", overwrite=True))
    assert path is not None and path.name == "dgx_h100.yaml" and path.exists()
    assert target(ProbeConfig()) is None
