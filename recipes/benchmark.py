"""Measure plans, and programs of other packages, on one model, batch and machine in one run.

    python recipes/benchmark.py                                        the setting of conf/experiment/benchmark.yaml
    python recipes/benchmark.py benchmark.plans=[tp2,tp2_sp] precision=bf16
    python recipes/benchmark.py benchmark.plans=[tp2_pp2,tp4] benchmark.cores=4 model.num_layers=4
    python recipes/benchmark.py benchmark.plans=[tp1,tp2] cluster=mine     beside what is predicted of that cluster, by
                                                                           recipes/promote.py promote.run=THE_JSON

Started as one process: it spawns the ranks of each contender itself. Prints rates and ratios, and writes them with
every measured step to run.dir/benchmark/ID.json.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import main
from conf.schema import Config
from parallel.plan import ParallelPlan


def ranks_of(config: Config) -> int:
    """Of the whole cluster, of which each contender takes what it needs; one where the cluster does not say."""
    return config.cluster.nodes * (config.cluster.devices_per_node or 1)


def run(config: Config, plan: ParallelPlan) -> int:
    """Config is valid here; the plans to measure are `benchmark.plans`."""
    import torch

    from conf.load import to_plain
    from engine.comparison import Rates, rates, rates_table, ratios, ratios_table, record
    from engine.contenders import comparisons
    from engine.device import this_device
    from engine.failure import refuse
    from engine.measure import Contender, MatmulRate, Measurement, compare
    from engine.measure_checkpoints import measure_checkpoints
    from engine.session import DTYPES
    from parallel.flops import model_flops_per_token
    from parallel.record import software
    from parallel.rungs import composed
    from telemetry.run_folder import git_commit, new_run_id, write_json

    chosen = config.benchmark
    try:
        groups = comparisons(config)
    except ValueError as error:
        return refuse(error)
    device = this_device()
    cores = chosen.cores or len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    rate = MatmulRate(device, DTYPES[config.precision.dtype])
    tokens = config.train.global_batch_size * config.data.sequence_length
    flops = model_flops_per_token(config.model, config.data.sequence_length)
    print(
        f"{config.model.name}, {tokens} tokens a step, {config.precision.dtype.value}, {device.name}, {cores} cores; "
        f"{sum(len(ours) + len(peers) for ours, peers in groups)} contenders, "
        f"{chosen.rounds} rounds of {chosen.steps} steps"
    )

    def between(message: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)
        rate.measure()

    between("the matrix rate of this machine")
    measurements: dict[str, Measurement] = {}
    for ours, peers in groups:
        measurements |= compare(
            [*ours, *peers], cores=cores, warmup_steps=chosen.warmup_steps, steps=chosen.steps, rounds=chosen.rounds,
            between=between,
        )  # fmt: skip

    def rates_of(contenders: list[Contender]) -> list[Rates]:
        return [
            rates(
                one.name, measurements[one.name], ranks=one.ranks, tokens_per_step=tokens, flops_per_token=flops,
                matmul_rate=rate.median,
            )
            for one in contenders
        ]  # fmt: skip

    measured = [(rates_of(ours), rates_of(peers)) for ours, peers in groups]
    rows = [row for ours, peers in measured for row in (*ours, *peers)]
    print(f"\n{rates_table(rows)}\n\nmatrix product: {rate.median / 1e9:.1f} GFLOP/s on {cores} cores (median)\n")
    pairs = [ratio for ours, peers in measured for ratio in ratios(ours, peers)]
    if pairs:
        print(f"{ratios_table(pairs)}\n")
    saving = measure_checkpoints(composed(config, 1), cores=cores, rounds=chosen.rounds) if chosen.checkpoints else None
    if saving is not None:
        print(f"{saving.text()}\n")
    path = Path(config.run.dir) / "benchmark" / f"{config.run.id or new_run_id()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    setting = {
        "git_commit": git_commit(), "software": software(), "device": device.name, "device_kind": device.kind,
        "cores": cores, "tokens_per_step": tokens,
        "flops_per_token": flops, "matmul_flops_per_s": rate.all, "config": to_plain(config),
        "checkpoints": None if saving is None else asdict(saving),
    }  # fmt: skip
    write_json(path, record(measured, measurements, **setting))
    print(path)
    return 0


if __name__ == "__main__":
    if not any(word.startswith("experiment=") for word in sys.argv[1:]):
        sys.argv.append("experiment=benchmark")
    main(run, ranks=ranks_of)
