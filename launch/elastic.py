"""torchrun for orchestrators that start one process on each node: its options, and exit codes that mean something.

    python launch/elastic.py --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint w0:29400 \\
        recipes/pretrain.py run.id=NAME resume=auto OVERRIDES...

What torchrun takes may come by PET_* variables, as Kubeflow's operators set them. torchrun itself ends with 1 whatever
the ranks' codes are; this ends with that of the first rank that failed: 2 refused, 75 stop on request, 76 stop by an
alert, 128 and the signal's number where it was killed, or where this process was told to end. RETRY_CODE: what 1 and
above become, but for 2 and 76, for those who start again by the code's number. RETRY_LIMIT: which failure in a row is
not to be retried any more and ends with 1; one that came later than QUICK_S after its start is the first again, and
requests to stop are none. They are counted in the working folder, in a file of this host.

The store that torchrun's agent shares with its ranks is off, as it survives a restart with the dead ranks' addresses
(pytorch/pytorch#135712). Not here: starting on several nodes (multinode.py).
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

FINAL = (0, 2, 76)  # started again, they would end the same way
ASKED = (75, 130, 143)
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
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(argv)
        return 0
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"rank {rank} on this node ended with code {failure.exitcode}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    except SignalException as error:
        return 128 + error.sigval
    except RendezvousError as error:  # the other nodes did not come, or their store went
        print(f"launch/elastic.py: the nodes did not meet: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
