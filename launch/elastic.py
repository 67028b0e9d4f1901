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

import multiprocessing
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

FINAL = (0, 2, 76)  # started again, they would end the same way
ASKED = (75, 130, 143)
ANSWER_S = 15.0  # for the store of a rendezvous, which answers in milliseconds
QUICK_S = 600.0  # as the kubelet, which then forgets how often a container failed


def main(argv: list[str]) -> int:
    began = time.monotonic()
    code = run(argv)
    retry, limit = os.environ.get("RETRY_CODE"), os.environ.get("RETRY_LIMIT")
    if retry is None:
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
    from torch.distributed import DistNetworkError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main as torchrun

    stranger = stranger_at_the_rendezvous(argv)
    if stranger is not None:
        print(f"launch/elastic.py: {stranger}", file=sys.stderr)
        return 2
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
    except RendezvousError as error:  # the other nodes did not come, or their store went
        print(f"launch/elastic.py: the nodes did not meet: {error}", file=sys.stderr)
        return 1


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
    client = multiprocessing.get_context("fork").Process(target=_greet_store, args=(host, port))
    client.start()
    client.join(ANSWER_S)
    client.kill()
    client.join()
    if client.exitcode == 0:
        return None
    return f"what listens on port {port} of {host} is no rendezvous of torchrun; give all nodes another --rdzv-endpoint"


def _greet_store(host: str, port: int) -> None:
    """In a process of its own, as it waits for ever for a program that says nothing, and says much of one that does."""
    from torch.distributed import TCPStore

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=ANSWER_S))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
