"""Which plans fit, how fast each should be and why, and which to take: predicted in seconds, without torch.

    python recipes/plan.py model=llama_70b cluster=dgx_h100 cluster.nodes=8 train.global_batch_size=1024
    python recipes/plan.py model=gpt3_175b cluster=dgx_a100 cluster.nodes=64 parallel=tp8_pp8      how a named plan does
    python recipes/plan.py model=llama_8b cluster=dgx_h100 --write llama_8b_h100x8       conf/parallel/ and its record
    python recipes/plan.py model=gpt3_175b cluster=dgx_h100 cluster.nodes=128 parallel=tp8_pp8 dry_run=517

Where the cluster is not this machine, precision and sequence length are bf16 and the model's longest unless named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conf.cli import main_without_plan, refuse
from conf.schema import Config
from parallel import memory, placement, rules, stage_split
from parallel.hardware import device_count
from parallel.links import Fabric
from parallel.memory_advice import advice
from parallel.plan import ParallelPlan
from parallel.prediction import Prediction, predict_run
from parallel.profile import write_profile
from parallel.search import best, search
from telemetry import plan_page as page
from telemetry.run_folder import git_commit

ROOT = Path(__file__).resolve().parents[1]
PLAN_WORDS = ("parallel", "zero", "train.micro_batch_size")  # overrides that name a plan


def run(config: Config) -> int:
    world_size = world(config)
    limit = config.cluster.memory_per_device
    print(page.header(config, world_size, limit_bytes=limit))
    for line in assumed:
        print(f"assumed  {line}; name it to change it")
    try:
        named = named_plan(config, world_size) if names_a_plan(sys.argv[1:]) or not config.plan.search else None
        if config.plan.dry_run is not None:
            return dry_run(config, world_size)
        chosen = searched(config, world_size) if config.plan.search else named
        if chosen is None:
            return 1
        details(*chosen)
        if config.plan.write is not None:
            write(*(named if named is not None else chosen))
    except ValueError as error:
        return refuse(str(error).splitlines())
    return 0


def world(config: Config) -> int:
    """Devices of the cluster; of this machine where it names none."""
    per_node = config.cluster.devices_per_node or device_count() or int(os.environ.get("WORLD_SIZE", "1"))
    return config.cluster.nodes * per_node


def names_a_plan(words: Sequence[str]) -> bool:
    return any(word.split("=")[0].split(".")[0] in PLAN_WORDS or word.startswith(PLAN_WORDS[2]) for word in words)


def named_plan(config: Config, world_size: int) -> tuple[Config, Prediction] | None:
    """The plan of the command line, or why it is refused."""
    problems = rules.problems(config, world_size=world_size, device=DEVICE)
    if problems:
        print("\nthe named plan is refused:", *(f"  {line}" for line in problems), sep="\n")
        return None
    plan = ParallelPlan.from_config(config, world_size, device=DEVICE)
    prediction = predict_run(config, plan, device=DEVICE)
    held, limit = memory.worst(prediction.ledgers).total, config.cluster.memory_per_device
    print(
        f"\nthe named plan: {page.degrees(plan)}, micro-batch {plan.micro_batch_size}, recompute {plan.recompute}: "
        f"{prediction.step_s:.3f} s a step, {prediction.tokens_per_s:,.0f} tokens/s, {page.size(held)}"
    )
    for line in (*plan.warnings, *placement.warnings(config, plan)):
        print(f"  warning: {line}")
    if limit is not None and held > limit:
        print(f"  does not fit: pp rank {memory.worst(prediction.ledgers).pp_rank} needs {page.size(held)} of "
              f"{page.size(limit)}; what would bring it under:")  # fmt: skip
        print(*(f"    {line}" for line in advice(config, world_size, limit, device=DEVICE)), sep="\n")
    return config, prediction


def searched(config: Config, world_size: int) -> tuple[Config, Prediction] | None:
    """The plan to take: tables of the best, and of time against memory."""
    limit = config.cluster.memory_per_device
    found = search(config, world_size, device=DEVICE, limit_bytes=limit)
    print(f"\n{page.found(found)}")
    pairs = best(found, world_size=world_size, device=DEVICE, limit_bytes=limit, count=config.plan.top)
    if not pairs:
        return None
    print(page.ranking(pairs), *page.CONVENTIONS, "", page.pareto(found, most=config.plan.top), sep="\n")
    candidate, prediction = pairs[0]
    return candidate.config, prediction


def details(config: Config, prediction: Prediction) -> None:
    """Ledgers, placement and schedule of one plan."""
    plan = prediction.plan
    fabric = Fabric.from_config(config.cluster, world_size=plan.world_size)
    print(f"\n== {page.degrees(plan)}, micro-batch {plan.micro_batch_size}, recompute {plan.recompute} ==")
    parts = [page.memory(prediction, limit_bytes=config.cluster.memory_per_device)]
    if any(prediction.collectives):
        parts += [page.communication(prediction), page.placement(placement.prices(config, plan, fabric))]
    split = stage_split.describe(config, plan) if plan.pipeline_model_parallel_size > 1 else None
    parts += [page.time(prediction), page.stages(prediction, split)]
    print("\n\n".join(parts))
    if config.plan.picture is not None:
        from telemetry.schedule_plot import plot_timeline

        plot_timeline(prediction.timeline, Path(config.plan.picture))
        print(f"\nschedule drawn in {config.plan.picture}")
    if config.plan.trace is not None:
        from telemetry.trace import write_trace

        write_trace(prediction.timeline, Path(config.plan.trace))
        print(f"\ntrace in {config.plan.trace}; open it in ui.perfetto.dev")


def write(config: Config, prediction: Prediction) -> None:
    name = config.plan.write
    assert name is not None
    path = write_profile(
        name, config, prediction, ROOT / "conf" / "parallel", overwrite=config.plan.overwrite, device=DEVICE,
        git_commit=git_commit(),
    )  # fmt: skip
    print(f"\nwrote {path.relative_to(ROOT)} and its record (predicted only): use parallel={name}")


def dry_run(config: Config, world_size: int) -> int:
    """Build one rank on the meta device and count, beside the ledgers."""
    plan = ParallelPlan.from_config(config, world_size, device=DEVICE)
    from engine.dry_run import dry_run as build
    from engine.dry_run import report

    assert config.plan.dry_run is not None
    print(f"\n{report(build(config, plan, config.plan.dry_run))}")
    return 0


def words_of(argv: Sequence[str]) -> list[str]:
    """--write NAME and dry_run=RANK as the knobs they stand for."""
    words, left = [], list(argv)
    while left:
        word = left.pop(0)
        if word == "--write" and left:
            word = f"plan.write={left.pop(0)}"
        elif word.startswith(("--write=", "dry_run=")):
            word = f"plan.{word.lstrip('-')}"
        words.append(word)
    return words


def assumptions(words: Sequence[str]) -> list[str]:
    """What is meant where a cluster is named and these are not."""
    keys = {word.split("=")[0]: word.split("=")[-1] for word in words}
    if keys.get("cluster", "local") == "local" or "experiment" in keys:
        return []
    lines = []
    if not any(key.split(".")[0] == "precision" for key in keys):
        lines.append(f"precision={'fp16' if 'v100' in keys['cluster'] else 'bf16'}")
    if "data.sequence_length" not in keys and "data" not in keys:
        lines.append("data.sequence_length=${model.max_position_embeddings}")
    return lines


if __name__ == "__main__":
    sys.argv[1:] = words_of(sys.argv[1:])
    assumed = assumptions(sys.argv[1:])
    sys.argv[1:] += assumed
    DEVICE = "cuda"
    main_without_plan(run)
