"""What recipes/plan.py prints: tables of plans, bytes, collectives and seconds, and why one plan beats the next.

Values in, text out. Each number's convention stands where it is printed.
"""

from __future__ import annotations

from collections.abc import Sequence

from conf.schema import Config
from parallel.instructions import rank_of
from parallel.ledger import Ledger
from parallel.memory import worst
from parallel.placement import AxisPrice
from parallel.plan import ParallelPlan
from parallel.prediction import Prediction
from parallel.search import Candidate, Search
from parallel.sizes import parameter_count
from telemetry.tables import size, table

CONVENTIONS = (
    "FLOPs: a multiply-add is 2; matrix products only; attention scores whole, not the causal half; the head counts",
    "once, tied or not, with the real vocabulary. MFU leaves recomputation out, HFU counts it; both of the peak rate.",
)


def header(config: Config, world_size: int, *, limit_bytes: float | None) -> str:
    """Model, cluster and batch."""
    cluster, train = config.cluster, config.train
    memory = "memory unknown" if limit_bytes is None else f"{size(limit_bytes)} each"
    lines = [
        f"model    {config.model.name}: {parameter_count(config.model):,} parameters (a tied table once), "
        f"{config.precision.dtype.value}",
        f"cluster  {cluster.name}: {cluster.nodes} nodes, {world_size} devices, {memory}",
        f"batch    {train.global_batch_size} samples x {config.data.sequence_length} tokens a step",
    ]
    if cluster.rates.source:
        lines.append(f"rates    {cluster.rates.source}")
    return "\n".join(lines)


def degrees(plan: ParallelPlan) -> str:
    """tp8 pp4 dp2 zero1 ... in one cell."""
    parts = [f"tp{plan.tensor_model_parallel_size}", f"pp{plan.pipeline_model_parallel_size}"]
    parts += [f"dp{plan.data_parallel_size}", f"zero{plan.zero_stage}"]
    parts += ["sp"] * plan.sequence_parallel
    return " ".join([*parts, plan.schedule] if plan.pipeline_model_parallel_size > 1 else parts)


def title(plan: ParallelPlan) -> str:
    """Degrees, micro-batch and recomputation in one line."""
    line = f"{degrees(plan)}, {plan.num_micro_batches} micro-batches of {plan.micro_batch_size}"
    return f"{line}, recompute {plan.recompute}, axis order {'_'.join(plan.order)}"


def ranking(pairs: Sequence[tuple[Candidate, Prediction]]) -> str:
    """Plans in their order, and a line a pair on why the first beats each of the others."""
    rows = []
    for number, (candidate, prediction) in enumerate(pairs, start=1):
        plan = prediction.plan
        rows.append(
            (number, degrees(plan), plan.micro_batch_size, plan.recompute, "_".join(plan.order),
             f"{prediction.step_s:.3f} s", f"{prediction.tokens_per_s:,.0f}", _percent(prediction.mfu),
             _percent(prediction.hfu), f"{max(prediction.bubble):.0%}", f"{prediction.imbalance:.2f}",
             size(candidate.memory_bytes))
        )  # fmt: skip
    names = (
        "", "plan", "micro-batch", "recompute", "axis order", "step", "tokens/s", "MFU", "HFU", "worst bubble",
        "imbalance", "memory",
    )  # fmt: skip
    reasons = [f"1 before {number}: {reason(pairs[0], pair)}" for number, pair in list(enumerate(pairs, start=1))[1:4]]
    return "\n".join([table(names, rows), *reasons])


def reason(better: tuple[Candidate, Prediction], other: tuple[Candidate, Prediction]) -> str:
    """Why one plan is ranked before another, by the seconds that differ most."""
    (first, fast), (second, slow) = better, other
    gain = slow.step_s - fast.step_s
    differences = {what: slow.seconds[what] - fast.seconds[what] for what in fast.seconds}
    saved = second.memory_bytes - first.memory_bytes
    memory = f"{size(abs(saved))} {'less' if saved > 0 else 'more'} memory"
    if abs(gain) <= 0.01 * fast.step_s and saved > 0:
        return f"as fast within 1 %, {memory}"
    largest = sorted(differences, key=lambda what: abs(differences[what]), reverse=True)[:3]
    parts = [
        f"{abs(differences[what]):.3f} s {'less' if differences[what] > 0 else 'more'} {what}"
        for what in largest
        if abs(differences[what]) > 1e-3 * fast.step_s
    ]
    return f"{gain / slow.step_s:.1%} faster: {', '.join(parts) or 'by little of each'}; {memory}"


def found(search: Search) -> str:
    """What was tried, and the least memory where nothing fits."""
    line = f"{search.considered:,} legal plans: {len(search.fitting):,} fit, {len(search.too_large):,} do not"
    if not search.fitting and search.too_large:
        least = search.too_large[0]
        line += f"; the smallest is {degrees(least.plan)}, recompute {least.plan.recompute}, {size(least.memory_bytes)}"
    crossing = next((candidate for candidate in search.fitting if candidate.crosses_nodes), None)
    if crossing is not None and search.ranked is not search.fitting:
        line += "\nset aside: plans whose tensor axis leaves a node; "
        line += f"the fastest, {degrees(crossing.plan)}, takes {crossing.step_s:.3f} s"
    return line


def pareto(search: Search, *, most: int) -> str:
    """Plans of which none is both faster and smaller."""
    rows = [
        (degrees(c.plan), c.plan.micro_batch_size, c.plan.recompute, f"{c.step_s:.3f} s", size(c.memory_bytes))
        for c in search.pareto()[:most]
    ]
    return "time against memory (no plan is both faster and smaller):\n" + table(
        ("plan", "micro-batch", "recompute", "step", "memory"), rows
    )


def memory(ledgers: Sequence[Ledger], *, limit_bytes: float | None) -> str:
    """Bytes by category on the first, the worst and the last pipeline rank."""
    chosen = sorted({0, worst(ledgers).pp_rank, len(ledgers) - 1})
    columns = [ledgers[rank].categories() for rank in chosen]
    names = [name for name in columns[0] | columns[-1] if any(column.get(name) for column in columns)]
    rows = [(name, *(size(column.get(name, 0)) for column in columns)) for name in names]
    rows.append(("total", *(size(ledgers[rank].total) for rank in chosen)))
    limit = "" if limit_bytes is None else f", {worst(ledgers).total / limit_bytes:.0%} of {size(limit_bytes)}"
    head = f"memory of a rank by pipeline rank; the worst is {worst(ledgers).pp_rank}{limit}:\n"
    host = max(ledger.host for ledger in ledgers)
    offloaded = f"\noffloaded to the host's memory: {size(host)} a rank" if host else ""
    return head + table(("bytes", *(f"pp rank {rank}" for rank in chosen)), rows) + offloaded


def communication(prediction: Prediction) -> str:
    """Every collective of a step on the pipeline rank that waits longest for them."""
    ranks = prediction.collectives
    busiest = max(range(len(ranks)), key=lambda rank: sum(priced.seconds for priced in ranks[rank]))
    rows = [
        (p.collective.axis, p.collective.what, p.collective.phase, p.collective.operation, p.collective.group_size,
         size(p.collective.bytes), p.collective.calls, size(p.collective.total_bytes), p.link, f"{p.seconds:.4f} s",
         "yes" if p.collective.hides else "no")
        for p in ranks[busiest]
    ]  # fmt: skip
    names = (
        "axis", "what", "phase", "operation", "ranks", "each", "calls", "a step", "link", "time", "can hide",
    )  # fmt: skip
    return f"collectives of a step on each rank of pipeline rank {busiest} (alpha-beta):\n" + table(names, rows)


def placement(prices: Sequence[AxisPrice]) -> str:
    """Which axis to keep inside a node first."""
    rows = [
        (price.axis, price.group_size, price.calls, size(price.bytes), f"{price.inside_s:.4f} s",
         f"{price.across_s:.4f} s", f"{price.placed_s:.4f} s", price.link)
        for price in prices
    ]  # fmt: skip
    names = ("axis", "ranks", "calls", "bytes a step", "inside a node", "between nodes", "as placed", "on")
    first = prices[0]
    line = "there is one node, and all of them are inside it"
    if first.loss_s:
        line = (
            f"keep the {first.axis} axis inside a node first: {size(first.bytes)} in {first.calls} calls a step and "
            f"rank cost {first.inside_s:.4f} s there and {first.across_s:.4f} s between nodes, "
            f"{first.loss_s:.4f} s more"
        )
    head = "where axes lie, and the seconds that are waited for (beyond what hides behind computation):"
    return "\n".join([head, table(names, rows), line])


def time(prediction: Prediction) -> str:
    """The step by what, a mean over pipeline ranks."""
    rows = [
        (what, f"{seconds:.4f} s", f"{seconds / prediction.step_s:.1%}")
        for what, seconds in prediction.seconds.items()
        if seconds > 1e-4 * prediction.step_s
    ]
    rows.append(("step", f"{prediction.step_s:.4f} s", "100.0%"))
    return "time of a step (mean over pipeline ranks; hidden communication is not in it):\n" + table(
        ("what", "seconds", "share"), rows
    )


def stages(prediction: Prediction, split: str) -> str:
    """Layers and seconds of each stage, and how long its rank waits; `split`: a line on a split by count alone."""
    plan = prediction.plan
    rows = []
    for index, ((first, last), stage) in enumerate(zip(plan.stage_layers, prediction.stages, strict=True)):
        rank = rank_of(plan.schedule, index, ranks=plan.pipeline_model_parallel_size)
        rows.append(
            (str(index), str(rank), f"{last - first}", f"{1000 * stage.forward_s:.2f} ms",
             f"{1000 * stage.backward_s:.2f} ms", f"{prediction.bubble[rank]:.1%}")
        )  # fmt: skip
    if len(rows) > 16:
        rows = [*rows[:8], ("...", "", "", "", "", ""), *rows[-8:]]
    names = ("stage", "pp rank", "layers", "forward", "backward", "bubble of the rank")
    head = "stages (layers with embedding, norm and head; seconds of one micro-batch; bubble: share of the step):\n"
    return f"{head}{table(names, rows)}\nsplit {split}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
