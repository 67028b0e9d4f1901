"""Two hosts for all tests of this folder; skipped, with the reason, where a machine cannot have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm as slurm_on_hosts
from tests.cluster.hosts import Hosts, why_not
from tests.cluster.runs import BIN, PRETRAIN, TINY, losses
from tests.cluster.slurm import Slurm
from tests.engine.launched import finish


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def allowed() -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def hosts(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(2, tmp_path_factory.mktemp("cluster") / "hosts") as made:
        yield made


@pytest.fixture(scope="session")
def slurm(allowed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Slurm, on two hosts of its own."""
    reason = slurm_on_hosts.why_not()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with Hosts(2, folder / "hosts") as made:
        yield Slurm(made, folder / "slurm")


@pytest.fixture(scope="session")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process on this machine."""
    folder = tmp_path_factory.mktemp("one-rank")
    code, output = finish([str(BIN / "python"), PRETRAIN, *TINY], folder, OMP_NUM_THREADS="1")
    assert code == 0, output
    return losses(folder)
