"""torchrun for orchestrators that start one process on each node: its options, and exit codes that mean something.

    python launch/elastic.py --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint w0:29400 \\
        recipes/pretrain.py run.id=NAME resume=auto OVERRIDES...

What torchrun takes may come by PET_* variables, as Kubeflow's operators set them. torchrun itself ends with 1 whatever
the ranks' codes are; this ends with that of the first rank that failed: 2 refused, 75 stop on request, 76 stop by an
alert, 128 and the signal's number where it was killed, or where this process was told to end. RETRY_CODE: what 1 and
above become, but for 2 and 76, for those who start again by the code's number. The store that torchrun's agent shares
with its ranks is off, as it survives a restart with the dead ranks' addresses (pytorch/pytorch#135712).
Not here: starting on several nodes (multinode.py).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

FINAL = (0, 2, 76)  # started again, they would end the same way


def main(argv: list[str]) -> int:
    code = run(argv)
    retry = os.environ.get("RETRY_CODE")
    return code if retry is None or code in FINAL else int(retry)


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
