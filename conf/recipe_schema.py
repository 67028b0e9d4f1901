"""Knobs of one recipe each: part of `conf.schema`, which others import. No number of a run depends on them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional


@dataclass
class BenchmarkConfig:
    """What recipes/benchmark.py compares, on the model, batch and precision of the rest of the config."""

    plans: list[str] = field(
        default_factory=lambda: ["tp1", "dp2", "dp2_zero1", "pp2", "pp2_eager1f1b", "tp2"]
    )  # plans to measure; parts joined by _: tpN, ppN, dpN, zeroN (default 0), sp, a schedule
    checkpoints: bool = True  # measure saving and loading beside torch.save and torch.load, on one rank
    peers: bool = True  # measure each plan beside programs of other packages that split the model the same way
    telemetry: bool = False  # measure each plan beside itself with every step metered on all ranks, in place of peers
    warmup_steps: int = 2  # optimizer steps of each contender before anything is measured
    steps: int = 2  # measured optimizer steps of a contender in one round
    rounds: int = 5  # rounds; contenders on one mesh take turns in each
    cores: Optional[int] = None  # CPU: threads over all ranks of a contender; null: the cores of this process


@dataclass
class PromoteConfig:
    """What recipes/promote.py asks of a profile before it counts as promoted."""

    ranks: Optional[int] = None  # of the whole plan; null: the cluster's devices, else tp x pp
    steps: int = 8  # optimizer steps of each rung; a checkpoint is saved half-way, and gone on from
    layers: Optional[int] = None  # blocks of the model on all rungs but a last one, where one device holds no more
    tolerance: float = 0.2  # share of the predicted step time by which the measured one may miss it
    memory_limit: Optional[float] = None  # bytes of one device; null: cluster.memory_per_device, else what it has
    baseline: Optional[str] = None  # folder of a one-device run that a run of promote.run is compared with
    run: Optional[str] = None  # what to fill in, instead of climbing: a finished run's folder, or a benchmark's JSON
    reuse: bool = False  # leave out rungs that passed in the last climb under the same conditions
    dry_run: bool = False  # print the rungs and their commands, and stop
    timeout_s: float = 900.0  # longest time for one rung, in seconds


@dataclass
class ProbeConfig:
    """What recipes/probe.py measures, on the axes, in the dtype and the matrix shapes of the rest of the config."""

    write: Optional[str] = None  # cluster file to write: a name in conf/cluster/, or a path with a slash; null: none
    overwrite: bool = False  # replace that file if it is there
    smallest_message: int = 4096  # bytes of the smallest collective
    largest_message: Optional[int] = None  # bytes of the largest collective; null: 64 MiB on CPU, 1 GiB on GPU
    trials: int = 5  # timed repetitions of each collective and kernel, of which the median counts
    trial_s: float = 0.02  # a repetition makes calls for about so many seconds


@dataclass
class PlanConfig:
    """What recipes/plan.py prints and writes."""

    search: bool = True  # try every legal plan; false: predict the plan that the command line names
    top: int = 8  # plans in the table
    write: Optional[str] = None  # name of a profile to write into conf/parallel/, with its record
    overwrite: bool = False  # write a profile that is there again, as its next version
    dry_run: Optional[int] = None  # build this global rank of the named plan on the meta device and count (needs torch)
    picture: Optional[str] = None  # draw the schedule of the first plan into this PNG
    trace: Optional[str] = None  # write it as a trace that ui.perfetto.dev opens


@dataclass
class PrepareConfig:
    """What recipes/prepare.py writes beside the corpus that our runs read."""

    megatron: Optional[str] = None  # prefix of .bin and .idx files for Megatron-LM, GPT-NeoX and NeMo; null: none
    overwrite: bool = False  # replace such files if they are there


@dataclass
class GenerateConfig:
    """What recipes/generate.py continues, and how each next token is chosen."""

    prompts: list[str] = field(default_factory=list)  # texts to continue; prompt="..." adds one as it is typed
    prompts_file: Optional[str] = None  # more of them: .txt (one a line), or rows of prompt or messages (.jsonl, ...)
    chat: bool = False  # each prompt is a user's message, put into the tokenizer's chat template
    system: Optional[str] = None  # chat: a system message before each conversation
    add_bos: Optional[bool] = None  # put the tokenizer's beginning of text first; null: as it does, not for text runs
    max_new_tokens: int = 128  # longest continuation, in tokens
    temperature: float = 1.0  # logits are divided by it; 0: always the likeliest token
    top_k: int = 0  # draw among the k likeliest tokens; 0: all
    top_p: float = 1.0  # draw among the likeliest tokens that together have this probability; 1: all
    stop: list[str] = field(default_factory=list)  # texts that end a continuation, and are left out of it
    ignore_eos: bool = False  # go on after the token that ends a text or a turn
    num_samples: int = 1  # continuations of each prompt
    seed: int = 1234  # of the draws; each continuation has its own, whatever stands beside it
    batch_size: int = 8  # continuations that one replica computes at once
    use_cache: bool = True  # keep keys and values of earlier tokens; false: compute all again for each token
    stream: bool = True  # print text as it comes
    output: Optional[str] = None  # JSONL file with a row a continuation; null: none
    overwrite: bool = False  # replace that file if it is there
