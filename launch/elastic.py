"""torchrun for orchestrators that start one process on each node: its options, and exit codes that mean something.

    python launch/elastic.py --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint w0:29400 \\
        recipes/pretrain.py run.id=NAME resume=auto OVERRIDES...

What torchrun takes may come by PET_* variables, as Kubeflow's operators set them. torchrun itself ends with 1 whatever
the ranks' codes are; this ends with that of the first rank that failed: 2 refused, 75 stop on request, 76 stop by an
alert, 128 and the signal's number where it was killed, or where this process was told to end. RETRY_CODE: what 1 and
above become, but for 2 and 76, for those who start again by the code's number. RETRY_LIMIT: which failure in a row is
not to be retried any more and ends with 1; one that came later than QUICK_S after its start is the first again, and
requests to stop are none. They are counted in the working folder, in a file of this host. A port that another program
has is told in a line, where torchrun would wait for ever (the c10d rendezvous'), or end with a traceback.

The store that torchrun's agent shares with its ranks is off, as it survives a restart with the dead ranks' addresses
(pytorch/pytorch#135712). Not here: starting on several nodes (multinode.py).
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.load import ConfigError
from launch import elastic_request

FINAL = (0, 2, 76)  # started again, they would end the same way
ASKED = (75, 130, 143)
ANSWER_S = 15.0  # for the store of a rendezvous, which answers in milliseconds
QUICK_S = 600.0  # as the kubelet, which then forgets how often a container failed
WHEN_MET = {"num_nodes_waiting", "_restart_workers"}  # what torchrun's agent calls after its ranks have started
CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"


def main(argv: list[str]) -> int:
    began = time.monotonic()
    code = run(argv)
    retry, limit = os.environ.get("RETRY_CODE"), os.environ.get("RETRY_LIMIT")
    if retry is None or is_dry():
        return code
    counts = Path(f"retries-{socket.gethostname()}")
    if code not in FINAL and (limit is None or may_retry(code, time.monotonic() - began, int(limit), counts)):
        return int(retry)
    counts.unlink(missing_ok=True)
    return code if code in FINAL else 1


def may_retry(code: int, seconds: float, limit: int, counts: Path) -> bool:
    """seconds: that it ran; counts: the file that knows of the failures before."""
    if code in ASKED:
        return True
    before = int(counts.read_text()) if seconds < QUICK_S and counts.exists() else 0
    counts.write_text(f"{before + 1}\n")
    if before + 1 < limit:
        return True
    print(f"launch/elastic.py: failure {before + 1} in a row (code {code}); not to be retried", file=sys.stderr)
    return False


def run(argv: list[str]) -> int:
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    import_quietly()
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main as torchrun
    from torch.distributed.run import parse_args

    asked = parse_args(argv)
    try:
        argv = elastic_request.with_recipe(argv, asked)
        asked = parse_args(argv)
        elastic_request.check(asked)
    except ConfigError as error:
        print("\n".join(f"launch/elastic.py: {line}" for line in error.problems), file=sys.stderr)
        return 2
    show(argv, rank=elastic_request.command_of(asked), where=f"{asked.nnodes} hosts x {asked.nproc_per_node} ranks")
    if is_dry():
        return 0
    stranger = stranger_at_the_rendezvous(argv)
    if stranger is not None:
        print(f"launch/elastic.py: {stranger}", file=sys.stderr)
        return 1  # it may have gone at the next start
    try:
        torchrun(argv)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} on this node ended with code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except DistNetworkError as error:
        first = str(error).splitlines()[0]
        print(f"launch/elastic.py: {first}; give --master-port, or --rdzv-endpoint, a free port", file=sys.stderr)
        return 1
    except RendezvousError as error:
        print(f"launch/elastic.py: {why_apart(error, asked.rdzv_endpoint)}", file=sys.stderr)
        return 1


def show(argv: list[str], *, rank: list[str], where: str) -> None:
    """Print what each rank is given, and the same as torchrun's command with the variables that it reads."""
    read = {name: value for name, value in os.environ.items() if name.startswith(("PET_", "TORCH_DISABLE_SHARE"))}
    print(f"{where}, each: {shlex.join(rank)}")
    words = [f"{name}={value}" for name, value in sorted(read.items())]
    print(shlex.join(["env", *words, sys.executable, "-m", "torch.distributed.run", *argv]), flush=True)


def is_dry() -> bool:
    return os.environ.get("DRY_RUN", "0") == "1"


def import_quietly() -> None:
    """torch, without its warnings from C++ in this process: where a store goes away they are pages of frames. The level
    is read at the import; the ranks have the caller's.
    """
    given = os.environ.get(CPP_LEVEL)
    os.environ.setdefault(CPP_LEVEL, "ERROR")
    import torch.distributed  # noqa: F401

    if given is None:
        del os.environ[CPP_LEVEL]


def why_apart(error: Exception, endpoint: str) -> str:
    """A rendezvous' error in a line. endpoint: HOST:PORT of the store."""
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    reason = str(error.__cause__ or error).partition("\n")[0] or type(error).__name__
    if not WHEN_MET & {frame.name for frame in traceback.extract_tb(error.__traceback__)}:
        return f"the nodes did not meet: {reason}"
    if isinstance(error, RendezvousConnectionError):
        host = endpoint.rpartition(":")[0] or endpoint
        return f"the store on host {host} went away: its launcher ended, or it is cut off; its output says why"
    return f"the nodes did not meet again: {reason}; another host has ended, and its output says why"


def stranger_at_the_rendezvous(argv: list[str]) -> str | None:
    """What is wrong where something listens on the port of the c10d rendezvous and is no store of torchrun's."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import parse_args

    asked = parse_args(argv)
    if asked.rdzv_backend != "c10d" or not asked.rdzv_endpoint:
        return None
    host, port = parse_rendezvous_endpoint(asked.rdzv_endpoint, default_port=29400)
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError:
        return None  # the first node serves it, when it comes
    if _is_store(host, port):
        return None
    return f"what listens on port {port} of {host} is no rendezvous of torchrun; give all nodes another --rdzv-endpoint"


def _is_store(host: str, port: int) -> bool:
    """Asked in a thread, as torch waits for ever for a program that says nothing, and says much of one that does."""
    from torch.distributed import DistNetworkError, TCPStore

    answered = threading.Event()

    def greet() -> None:
        with contextlib.suppress(DistNetworkError):
            TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S))
            answered.set()

    thread = threading.Thread(target=greet, daemon=True)
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        thread.start()
        thread.join(ANSWER_S)
    finally:
        os.dup2(errors, 2)
    return answered.is_set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
