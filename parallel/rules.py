"""What a plan may not be: each rule reads the config and answers with lines, one a problem.

A line names the knob and its value, the rule, and what would work. All rules run: every problem is shown at once.
Not here: ranges of single fields (`conf.load`), and what is allowed but unwise (`warnings`, at the end, is).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from conf.schema import Config, DType, Recompute
from parallel import architecture, objectives
from parallel.adapters import target_problems
from parallel.sizes import sizes


def problems(config: Config, *, world_size: int, device: str | None) -> list[str]:
    """Every reason to refuse `config` on `world_size` ranks of `device` ("cpu", "cuda"; None: not known)."""
    model, parallel = config.model, config.parallel
    positive = (
        parallel.tp, parallel.pp, world_size, model.num_attention_heads, model.num_layers, model.hidden_size,
        config.train.micro_batch_size, config.train.global_batch_size, config.data.sequence_length,
        1 if model.num_key_value_heads is None else model.num_key_value_heads,
    )  # fmt: skip
    if min(positive) < 1:
        return []  # the range checks of conf.load say so; nothing can be divided by these
    lines = [*objectives.problems(config), *_model(config), *_tensor(config), *_pipeline(config), *_sequence(config)]
    lines += [*states_problems(config, device=device), *_lora(config), *_world(config, world_size)]
    if world_size % (parallel.tp * parallel.pp) == 0:
        lines += _batch(config, world_size // (parallel.tp * parallel.pp))
    return lines


def states_problems(config: Config, *, device: str | None) -> list[str]:
    """Those that ZeRO and precision make, whatever the mesh but for parallel.pp."""
    return [*_zero(config), *_precision(config, device)]


def _divisors(*numbers: int, least: int = 1) -> list[int]:
    """Common divisors, smallest first."""
    return [n for n in range(least, min(numbers) + 1) if all(number % n == 0 for number in numbers)]


def _either(numbers: Sequence[int]) -> str:
    """1, 2, 4, 8 or 16; the first dozen of a long list."""
    numbers = list(numbers)[:12]
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{', '.join(str(n) for n in numbers[:-1])} or {numbers[-1]}"


def _around(value: int, multiple: int) -> str:
    """The multiples on both sides of value."""
    below = value // multiple * multiple
    return _either([n for n in (below, below + multiple) if n > 0])


def _model(config: Config) -> Iterator[str]:
    model = config.model
    heads, kv_heads = model.num_attention_heads, sizes(model).num_key_value_heads
    if model.head_dim is None and model.hidden_size % heads:
        yield (
            f"model.num_attention_heads={heads} does not divide model.hidden_size={model.hidden_size}; "
            "use a divisor or set model.head_dim"
        )
    elif sizes(model).rotary_dim % 2 or (sizes(model).parts.rotary and not sizes(model).rotary_dim):
        yield f"{_rotated(config)}, and rotary positions turn pairs; use an even size"
    if heads % kv_heads:
        yield (
            f"model.num_key_value_heads={kv_heads} does not divide model.num_attention_heads={heads}; "
            f"use {_either(_divisors(heads))}"
        )
    yield from architecture.problems(model)


def _rotated(config: Config) -> str:
    size = sizes(config.model)
    if size.parts.rotary_fraction == 1:
        return f"model.head_dim={size.head_dim} is odd"
    return f"model.rotary_fraction={size.parts.rotary_fraction:g} of a head of {size.head_dim} is {size.rotary_dim}"


def _tensor(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tp
    heads, ffn = model.num_attention_heads, sizes(model).ffn_hidden_size
    kv_heads = sizes(model).num_key_value_heads
    if heads % tp:
        yield (f"parallel.tp={tp} does not divide model.num_attention_heads={heads}; use {_either(_divisors(heads))}")
    if ffn % tp:
        yield (f"parallel.tp={tp} does not divide model.ffn_hidden_size={ffn}; use {_either(_divisors(ffn, heads))}")
    if kv_heads % tp and tp % kv_heads:
        fitting = [n for n in _divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0]
        yield (
            f"parallel.tp={tp} and model.num_key_value_heads={kv_heads}: one must divide the other; "
            f"use tp {_either(fitting)}"
        )


def virtual_stages(config: Config) -> int:
    """Pieces the model is cut into: dualpipev has two a rank."""
    return config.parallel.pp * (2 if config.parallel.schedule.value == "dualpipev" else 1)


def _pipeline(config: Config) -> Iterator[str]:
    parallel, layers = config.parallel, config.model.num_layers
    stages = virtual_stages(config)
    dual = parallel.schedule.value == "dualpipev"
    if dual and parallel.pp == 1:
        yield "parallel.schedule=dualpipev needs parallel.pp of 2 or more, not 1; use parallel.schedule=1f1b"
    if layers < stages:
        twice = " (dualpipev: two stages a rank)" if dual else ""
        yield (
            f"model.num_layers={layers} is less than the {stages} stages of parallel.pp={parallel.pp}{twice}; "
            f"use parallel.pp of at most {max(1, layers // (2 if dual else 1))}"
        )
    if isinstance(parallel.stages, list):
        given = parallel.stages
        if len(given) != stages:
            yield f"parallel.stages={given} names {len(given)} stages, the plan has {stages}; give {stages} numbers"
        elif min(given) < 1:
            yield f"parallel.stages={given} leaves a stage without a block; give each at least 1"
        if sum(given) != layers:
            yield (
                f"parallel.stages={given} adds up to {sum(given)} blocks but model.num_layers={layers}; "
                f"give numbers that add up to {layers}"
            )


def _sequence(config: Config) -> Iterator[str]:
    length, tp = config.data.sequence_length, config.parallel.tp
    if length > config.model.max_position_embeddings:
        yield (
            f"data.sequence_length={length} is longer than model.max_position_embeddings="
            f"{config.model.max_position_embeddings}; use at most {config.model.max_position_embeddings}"
        )
    if config.parallel.sequence_parallel and length % tp:
        yield (
            f"parallel.sequence_parallel splits data.sequence_length={length}, which parallel.tp={tp} does not divide; "
            f"use a length of {_around(length, tp)}, or parallel.sequence_parallel=false"
        )


def _zero(config: Config) -> Iterator[str]:
    stage, pp = config.zero.stage, config.parallel.pp
    if stage >= 2 and pp > 1:
        yield (
            f"zero.stage={stage} does not go with parallel.pp={pp} (the pipeline engine accumulates whole gradients); "
            "use zero=stage0 or zero=stage1, or parallel.pp=1"
        )
    if config.zero.offload_optimizer and stage == 0:
        yield "zero.offload_optimizer=true needs ZeRO but zero.stage=0; use zero=stage1, stage2 or stage3"


def _precision(config: Config, device: str | None) -> Iterator[str]:
    dtype, accumulate, stage = config.precision.dtype, config.precision.grad_accum_dtype, config.zero.stage
    if dtype is DType.fp16 and device == "cpu":
        yield "precision.dtype=fp16 is not supported on CPU; use precision=bf16 or precision=fp32"
    if dtype is DType.fp16 and stage == 0:
        yield "precision.dtype=fp16 needs ZeRO, which keeps its master weights, but zero.stage=0; use zero=stage1"
    if accumulate not in (dtype, DType.fp32):
        yield (
            f"precision.grad_accum_dtype={accumulate.value} does not go with precision.dtype={dtype.value}; "
            f"use {_names(dtype)}"
        )
    elif stage == 0 and accumulate is not dtype and dtype is not DType.fp16:
        yield (
            f"precision.dtype={dtype.value} with precision.grad_accum_dtype={accumulate.value} needs ZeRO but "
            f"zero.stage=0; use zero=stage1, or precision.grad_accum_dtype={dtype.value}"
        )


def _lora(config: Config) -> Iterator[str]:
    if config.lora.rank == 0 or config.model.family in architecture.BIDIRECTIONAL:
        return
    yield from target_problems(config.model, config.lora.target_modules)
    if config.zero.stage == 3:
        yield (
            f"lora.rank={config.lora.rank} does not go with zero.stage=3 (frozen weights are not spread over the data "
            "axis here); use zero=stage1 or zero=stage2, and parallel.tp or parallel.pp to split the weights"
        )


def _names(dtype: DType) -> str:
    return "fp32" if dtype is DType.fp32 else f"fp32 or {dtype.value}"


def _world(config: Config, world_size: int) -> Iterator[str]:
    tp, pp, cluster = config.parallel.tp, config.parallel.pp, config.cluster
    ranks = "1 rank runs" if world_size == 1 else f"{world_size} ranks run"
    if world_size % (tp * pp):
        fitting = _around(world_size, tp * pp)
        yield (
            f"{ranks}, not a multiple of parallel.tp={tp} x parallel.pp={pp} = {tp * pp}; "
            f"start {fitting} ranks (deepspeed --num_gpus N), or use degrees whose product divides {world_size}"
        )
    if cluster.devices_per_node is not None and cluster.nodes * cluster.devices_per_node != world_size:
        devices = cluster.nodes * cluster.devices_per_node
        yield (
            f"{ranks} but cluster.nodes={cluster.nodes} x cluster.devices_per_node={cluster.devices_per_node} = "
            f"{devices} devices; start {devices} ranks or set the numbers of this cluster"
        )


def _batch(config: Config, dp: int) -> list[str]:
    train, lines = config.train, []
    per_micro = train.micro_batch_size * dp
    unit = f"train.micro_batch_size={train.micro_batch_size} x data-parallel size {dp} = {per_micro}"
    if train.global_batch_size % per_micro:
        lines.append(
            f"train.global_batch_size={train.global_batch_size} is not a multiple of {unit}; "
            f"use {_around(train.global_batch_size, per_micro)}"
        )
    first = train.global_batch_size
    if train.batch_ramp_up is not None:
        ramp = list(_ramp_up(train.batch_ramp_up, train.global_batch_size, per_micro, unit))
        lines += ramp
        if not ramp:
            first = train.batch_ramp_up[0]
    needed = 2 * config.parallel.pp
    if config.parallel.schedule.value == "dualpipev" and config.parallel.pp > 1 and first // per_micro < needed:
        lines.append(
            f"parallel.schedule=dualpipev needs {needed} micro-batches (2 x parallel.pp={config.parallel.pp}) but a "
            f"batch of {first} samples has {first // per_micro}; use train.global_batch_size of at least "
            f"{needed * per_micro}, a smaller train.micro_batch_size, or parallel.schedule=1f1b"
        )
    return lines


def _ramp_up(ramp: Sequence[int], target: int, per_micro: int, unit: str) -> Iterator[str]:
    shown = f"train.batch_ramp_up={list(ramp)}"
    if len(ramp) != 3 or min(ramp) < 1:
        yield f"{shown} is not [first batch size, increment, samples], all positive; give three such numbers"
        return
    first, increment, samples = ramp
    if first >= target:
        yield f"{shown} starts at {first}, not below train.global_batch_size={target}; start lower or leave it null"
        return
    for name, number in (("first batch size", first), ("increment", increment)):
        if number % per_micro:
            yield f"{shown}: the {name} {number} is not a multiple of {unit}; use {_around(number, per_micro)}"
    if (target - first) % increment:
        yield (
            f"{shown}: steps of {increment} from {first} do not reach train.global_batch_size={target}; "
            f"use an increment of {_either(_divisors(target - first))}"
        )
    elif samples < (target - first) // increment:
        yield f"{shown}: {samples} samples are too few for {(target - first) // increment} increments; use more"


def warnings(config: Config, *, num_micro_batches: int) -> list[str]:
    """What is allowed but costs: one line each."""
    parallel, lines = config.parallel, []
    pp = parallel.pp
    if num_micro_batches < pp:
        bubble = (pp - 1) / (num_micro_batches + pp - 1)
        lines.append(
            f"{num_micro_batches} micro-batches for {pp} stages: the pipeline is idle for (P-1)/(M+P-1) = {bubble:.0%} "
            "of a step; raise train.global_batch_size or lower train.micro_batch_size"
        )
    if parallel.sequence_parallel and parallel.tp == 1:
        lines.append("parallel.sequence_parallel=true has no effect at parallel.tp=1")
    if parallel.stages == "profile" and pp == 1:
        lines.append("parallel.stages=profile has no effect at parallel.pp=1")
    if parallel.recompute is not Recompute.full and parallel.recompute_interval != 1:
        lines.append(
            f"parallel.recompute_interval={parallel.recompute_interval} has no effect with "
            f"parallel.recompute={parallel.recompute.value}"
        )
    if config.train.lr_unit.value == "steps" and config.train.lr_warmup >= config.train.train_iters:
        lines.append(
            f"train.lr_warmup={config.train.lr_warmup} is not shorter than train.train_iters="
            f"{config.train.train_iters}: the learning rate never starts to fall"
        )
    return lines
