"""Which plans fit, how fast each should be and why, and which to take: predicted in seconds, without torch.

    python recipes/plan.py model=llama_70b cluster=dgx_h100 cluster.nodes=8 train.global_batch_size=1024
    python recipes/plan.py model=gpt3_175b cluster=dgx_a100 cluster.nodes=64 parallel=tp8_pp8      how a named plan does
    python recipes/plan.py model=llama_8b cluster=dgx_h100 --write my_plan               conf/parallel/ and its record
    python recipes/plan.py model=gpt3_175b cluster=dgx_h100 cluster.nodes=128 parallel=tp8_pp8 dry_run=517

Where a cluster is named, precision is that of its rates and the sequence the model's longest up to 8192 tokens, unless
these are named.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

if __name__ == "__main__":
    from conf import interrupts

    interrupts.while_imports_run()

from conf.cli import EXIT_CONFIG, main_without_plan, refuse
from conf.schema import Config
from parallel import memory, placement, rules, stage_split
from parallel.hardware import device_count, device_kind
from parallel.links import Fabric
from parallel.memory_advice import advice
from parallel.plan import ParallelPlan
from parallel.prediction import Prediction, predict_run
from parallel.profile import read_record, write_profile
from parallel.promotion import standing
from parallel.search import Candidate, best, layer_seconds, search
from telemetry import plan_page as page
from telemetry.run_folder import git_commit

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 8192  # tokens that pretraining commonly uses of a longer context
PLAN_WORDS = ("parallel", "zero", "train.micro_batch_size")  # overrides that name a plan


def run(config: Config) -> int:
    config, assumed = with_assumptions(config, sys.argv[1:])
    world_size, device = world(config), device_of(config)
    print(page.header(config, world_size, limit_bytes=config.cluster.memory_per_device))
    for line in assumed:
        print(f"assumed  {line}; name it to change it")
    problems = unwritable("plan.picture", config.plan.picture, ".png")
    problems += unwritable("plan.trace", config.plan.trace, ".json")
    if config.parallel.stages == "profile":
        problems.append(
            "parallel.stages=profile measures layers on ranks; leave it out here: stages are cut without it"
        )
    if problems:
        return refuse(problems)
    try:
        if config.plan.dry_run is not None:
            return dry_run(config, world_size, device)
        named, names = None, names_a_plan(sys.argv[1:]) or not config.plan.search
        if names:
            named = named_plan(config, world_size, device)
        chosen = searched(config, world_size, device) if config.plan.search else named
        if chosen is None:
            return 1 if config.plan.search else EXIT_CONFIG
        if named is not None and config.plan.search:
            times = named[1].step_s / chosen[1].step_s
            print(f"\nthe named plan's step takes {times:.2f} x that of the first; plan.search=false shows its ledgers")
        details(*chosen)
        if config.plan.write is not None:
            if names and named is None:
                return refuse([f"plan.write={config.plan.write}: the named plan is refused, so that none is written"])
            write(*(named or chosen), device)
        if excess(config, chosen[1]) > 0:
            return 1
    except (ValueError, OSError) as error:
        return refuse(str(error).splitlines())
    return 0


def unwritable(knob: str, name: str | None, suffix: str) -> list[str]:
    """Why a file cannot be made there."""
    if name is None:
        return []
    path = Path(name)
    if path.is_dir():
        return [f"{knob}={name} is a folder; name a file in it"]
    if path.suffix != suffix:
        return [f"{knob}={name} does not end in {suffix}; name a {suffix} file"]
    if not path.parent.is_dir():
        return [f"{knob}={name}: there is no folder {path.parent}; make it or choose another"]
    return [] if os.access(path.parent, os.W_OK) else [f"{knob}={name}: {path.parent} cannot be written to"]


def excess(config: Config, prediction: Prediction) -> float:
    """Bytes by which the worst rank exceeds a device; 0 where the device is not known."""
    limit = config.cluster.memory_per_device
    return 0 if limit is None else memory.worst(prediction.ledgers).total - limit


def device_of(config: Config) -> str:
    return config.cluster.device.value if config.cluster.device is not None else device_kind()


def world(config: Config) -> int:
    """Devices of the cluster; of this machine where it names none."""
    per_node = config.cluster.devices_per_node or device_count() or int(os.environ.get("WORLD_SIZE", "1"))
    return config.cluster.nodes * per_node


def names_a_plan(words: Sequence[str]) -> bool:
    return any(word.split("=")[0].split(".")[0] in PLAN_WORDS or word.startswith(PLAN_WORDS[2]) for word in words)


def named_plan(config: Config, world_size: int, device: str) -> tuple[Config, Prediction] | None:
    """The plan of the command line and how it does, or why it is refused."""
    problems = rules.problems(config, world_size=world_size, device=device)
    if problems:
        print("\nthe named plan is refused:", *(f"  {line}" for line in problems), sep="\n")
        return None
    plan = ParallelPlan.from_config(config, world_size, device=device)
    ledgers, limit = memory.predict(config, plan, device=device), config.cluster.memory_per_device
    print(f"\nthe named plan: {page.title(plan)}: {page.size(memory.worst(ledgers).total)} on the worst rank")
    profile = config.parallel.name
    stands = standing(read_record(profile, ROOT / "conf" / "parallel"), config, None, world_size=world_size)
    print(f"  profile {profile} version {config.parallel.version}: {stands}")
    for line in (*plan.warnings, *placement.warnings(config, plan)):
        print(f"  warning: {line}")
    if limit is not None and memory.worst(ledgers).total > limit:
        print(
            "  does not fit:",
            *(f"    {line}" for line in advice(config, world_size, int(limit), device=device)),
            sep="\n",
        )
    try:
        prediction = predict_run(config, plan, device=device)
    except ValueError:
        print(f"\n{page.memory(ledgers, limit_bytes=limit)}\n")
        raise
    candidate = Candidate(config, plan, memory.worst(ledgers).total, prediction.step_s)
    print(page.ranking([(candidate, prediction)]), *page.CONVENTIONS, sep="\n")
    return config, prediction


def searched(config: Config, world_size: int, device: str) -> tuple[Config, Prediction] | None:
    """The plan to take: tables of the best, and of time against memory."""
    limit = config.cluster.memory_per_device
    found = search(config, world_size, device=device, limit_bytes=limit)
    print(f"\n{page.found(found)}")
    if not found.considered:
        batch = config.train.global_batch_size
        print(f"no tp x pp that fits the model leaves {world_size} devices in a dp that divides a batch of {batch}")
    pairs = best(found, world_size=world_size, device=device, limit_bytes=limit, count=config.plan.top)
    if not pairs:
        return None
    print(page.ranking(pairs), *page.CONVENTIONS, "", page.pareto(found, most=config.plan.top), sep="\n")
    candidate, prediction = pairs[0]
    other = next((c for c in found.fitting if c.plan.tensor_model_parallel_size > 1), None)
    if prediction.plan.tensor_model_parallel_size == 1 and other is not None:
        print(f"\nthe fastest plan with a tensor axis: {page.title(other.plan)}, {other.step_s:.3f} s")
        print(page.placement(prices_of(other.config, predict_run(other.config, other.plan, device=device))))
    return candidate.config, prediction


def prices_of(config: Config, prediction: Prediction) -> list[placement.AxisPrice]:
    """Of a plan's axes, inside a node and between nodes."""
    fabric = Fabric.from_config(config.cluster, world_size=prediction.plan.world_size)
    return placement.prices(config, prediction.plan, fabric, compute_s=prediction.seconds["compute"])


def details(config: Config, prediction: Prediction) -> None:
    """Ledgers, placement and schedule of one plan."""
    plan = prediction.plan
    print(f"\n== {page.title(plan)} ==")
    for line in (*plan.warnings, *placement.warnings(config, plan)):
        print(f"warning: {line}")
    parts = [page.memory(prediction.ledgers, limit_bytes=config.cluster.memory_per_device)]
    prices = prices_of(config, prediction)
    if prices:
        parts += [page.communication(prediction), page.placement(prices)]
    parts.append(page.time(prediction))
    if plan.pipeline_model_parallel_size > 1:
        parts.append(page.stages(prediction, stage_split.describe(config, plan, predicted=layer_seconds(config, plan))))
    print("\n\n".join(parts))
    if config.plan.picture is not None:
        from telemetry.schedule_plot import plot_timeline

        plot_timeline(prediction.timeline, Path(config.plan.picture))
        print(f"\nschedule drawn in {config.plan.picture}")
    if config.plan.trace is not None:
        from telemetry.trace import write_trace

        write_trace(prediction.timeline, Path(config.plan.trace))
        print(f"\ntrace in {config.plan.trace}; open it in ui.perfetto.dev")


def write(config: Config, prediction: Prediction, device: str) -> None:
    name, limit = config.plan.write, config.cluster.memory_per_device
    assert name is not None
    if limit is not None and excess(config, prediction) > 0:
        raise ValueError(f"plan.write={name}: the plan does not fit {page.size(limit)}; it is not written")
    path = write_profile(
        name, config, prediction, ROOT / "conf" / "parallel", overwrite=config.plan.overwrite, device=device,
        git_commit=git_commit(),
    )  # fmt: skip
    plan = prediction.plan
    words = f"parallel={name} zero=stage{plan.zero_stage} precision={config.precision.dtype.value}"
    words += f" data.sequence_length={config.data.sequence_length} train.micro_batch_size={plan.micro_batch_size}"
    words += f" train.global_batch_size={plan.global_batch_size}"
    print(f"\nwrote {path.relative_to(ROOT)} and its record (predicted only); it was predicted with\n  {words}")


def dry_run(config: Config, world_size: int, device: str) -> int:
    """Build one rank on the meta device and count, beside the ledgers."""
    plan = ParallelPlan.from_config(config, world_size, device=device)
    rank = config.plan.dry_run
    assert rank is not None
    plan.coordinate(rank)
    from engine.dry_run import dry_run as build

    built = build(config, plan, rank)
    print(f"\n{built.report()}")
    return 0 if built.agrees else 1


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


def with_assumptions(config: Config, words: Sequence[str]) -> tuple[Config, list[str]]:
    """Where a cluster is named: the 16-bit format of its rates, and the model's longest sequence up to 8192 tokens."""
    keys = {word.split("=")[0] for word in words}
    lines: list[str] = []
    if "cluster" not in keys or "experiment" in keys:
        return config, lines
    dtype = config.cluster.rates.dtype
    if dtype is not None and not any(key.split(".")[0] == "precision" for key in keys):
        config = replace(config, precision=replace(config.precision, dtype=dtype))
        lines.append(f"precision={dtype.value}")
    if not keys & {"data", "data.sequence_length"}:
        length = min(config.model.max_position_embeddings, LONGEST)
        config = replace(config, data=replace(config.data, sequence_length=length))
        lines.append(f"data.sequence_length={length}")
    return config, lines


if __name__ == "__main__":
    if sys.argv[-1] == "--write":
        sys.exit(refuse(["--write needs the name of a profile: --write NAME"]))
    sys.argv[1:] = words_of(sys.argv[1:])
    main_without_plan(run)
