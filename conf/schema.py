"""Every knob of the product: one dataclass a config group, a sentence and a unit a field.

This file knows neither hydra nor torch, so that plans are checked in milliseconds. `conf/load.py` turns a Hydra
config into a `Config`; nothing downstream of it sees a DictConfig. Derived numbers (data-parallel size, number of
micro-batches, padded vocabulary) are not here: `parallel.plan.ParallelPlan` derives them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from conf.alert_schema import AlertRule as AlertRule
from conf.alert_schema import NormalRange as NormalRange
from conf.alert_schema import Persistence as Persistence
from conf.choices import Activation as Activation
from conf.choices import AlertAction as AlertAction
from conf.choices import AlertCompared as AlertCompared
from conf.choices import AlertReference as AlertReference
from conf.choices import AlertSeverity as AlertSeverity
from conf.choices import AlertSlice as AlertSlice
from conf.choices import BadLine as BadLine
from conf.choices import DataFormat as DataFormat
from conf.choices import (
    DeviceKind,
    DType,
    Family,
    LRSchedule,
    LRUnit,
    Objective,
    OnBadStep,
    OnSaveError,
    Order,
    Recompute,
    Schedule,
    WandbMode,
)
from conf.choices import EvaluateTask as EvaluateTask
from conf.data_schema import CorpusSource as CorpusSource
from conf.data_schema import DataConfig as DataConfig
from conf.evaluate_schema import EvaluateConfig as EvaluateConfig
from conf.lora_schema import LoraConfig as LoraConfig
from conf.recipe_schema import BenchmarkConfig, PlanConfig, PrepareConfig, ProbeConfig, PromoteConfig
from conf.recipe_schema import GenerateConfig as GenerateConfig


@dataclass
class ModelConfig:
    """What is computed. Sizes are whole-model sizes, before any split."""

    name: str = "???"  # a label for logs and tables
    family: Family = Family.llama  # the kind of block: gpt2, llama, ..., bert; megatron_bert: its norms before
    vocab_size: int = 256  # number of real token ids; padding for the tensor axis is derived
    hidden_size: int = 64  # width of the residual stream
    num_layers: int = 4  # transformer blocks
    num_attention_heads: int = 4  # query heads
    num_key_value_heads: Optional[int] = None  # key/value heads; null: as many as query heads (MHA)
    head_dim: Optional[int] = None  # size of one head; null: hidden_size / num_attention_heads
    ffn_hidden_size: Optional[int] = None  # width of the feed-forward; null: 4 x hidden_size
    max_position_embeddings: int = 1024  # longest sequence the model is built for, in tokens
    tie_word_embeddings: bool = False  # the output head shares the word embedding's weight
    type_vocab_size: Optional[int] = None  # BERT's token types, of which text has the first; null: the family's own
    norm_epsilon: float = 1e-5  # added to the variance in LayerNorm and RMSNorm
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scaling: Optional[dict[str, Any]] = field(
        default_factory=dict
    )  # transformers': {rope_type: linear, factor: 2}
    rotary_fraction: Optional[float] = None  # share of each head that is rotated; null: the family's own
    sliding_window: Optional[int] = None  # keys that a query sees, its own included; null: all before it
    layer_types: Optional[list[str]] = None  # full_attention or sliding_attention a block; null: sliding in all
    attention_bias: Optional[bool] = None  # biases of the attention's projections; null: the family's own
    mlp_bias: Optional[bool] = None  # biases of the feed-forward's projections; null: the family's own
    activation: Optional[Activation] = None  # of the feed-forward layer; null: the family's own
    parallel_residual: Optional[bool] = None  # attention and feed-forward both read the input; null: the family's own
    hidden_dropout: float = 0.0  # dropout on embeddings and on each residual branch
    attention_dropout: float = 0.0  # dropout on attention probabilities
    init_std: float = 0.02  # standard deviation of initial weights; residual outputs use it / sqrt(2 num_layers)
    make_vocab_size_divisible_by: int = 128  # the padded vocabulary is a multiple of this times tp


@dataclass
class ParallelConfig:
    """How it is split. The data-parallel size is what these degrees leave of the world size."""

    name: str = "custom"  # profile name, for logs
    version: int = 1  # profile version, for logs
    tp: int = 1  # tensor-parallel degree: ranks that share every matrix
    pp: int = 1  # pipeline-parallel degree: stages
    sequence_parallel: bool = False  # shard norms and dropout over the sequence on the tensor axis (arXiv:2205.05198)
    schedule: Schedule = Schedule["1f1b"]  # order of micro-batches: 1f1b, eager1f1b (faster, more memory), dualpipev
    order: Order = Order["pipe_data_tensor"]  # axes of the mesh, slowest first: the last one's ranks are neighbours
    stages: Any = None  # null: balanced by FLOPs; profile: by measured times; [3, 5]: blocks per stage, by hand
    recompute: Recompute = Recompute.none  # activations rebuilt in backward: none, selective (attention core), full
    recompute_interval: int = 1  # full: one saved input per this many blocks


@dataclass
class ZeroConfig:
    """Which states are spread over the data axis (arXiv:1910.02054)."""

    stage: int = 1  # 0 none, 1 optimizer states, 2 and gradients, 3 and weights
    offload_optimizer: bool = False  # keep optimizer states in host memory
    bucket_size: int = 50_000_000  # elements per reduce and gather bucket


@dataclass
class PrecisionConfig:
    """Number formats."""

    dtype: DType = DType.fp32  # of weights and activations in forward and backward; master weights are fp32
    grad_accum_dtype: DType = DType.fp32  # of accumulated gradients
    initial_loss_scale_power: int = 16  # fp16: first loss scale is 2 to this power
    loss_scale_window: int = 1000  # fp16: good steps before the scale doubles
    min_loss_scale: float = 1.0  # fp16: the run stops with a message when overflow persists at this scale


@dataclass
class OptimizerConfig:
    """AdamW (arXiv:1711.05101)."""

    beta1: float = 0.9  # decay of the first moment
    beta2: float = 0.95  # decay of the second moment
    epsilon: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.1  # decoupled weight decay
    decay_norms_and_biases: bool = False  # whether one-dimensional parameters decay too
    clip_grad: float = 1.0  # largest global gradient norm; 0: no clipping


@dataclass
class TrainConfig:
    """How long and how fast."""

    micro_batch_size: int = 1  # samples a rank computes at once
    global_batch_size: int = 8  # samples per optimizer step over all ranks
    batch_ramp_up: Optional[list[int]] = None  # [first batch size, increment, samples]: Megatron's rampup_batch_size
    train_iters: int = 100  # optimizer steps
    lr: float = 3e-4  # peak learning rate
    min_lr_ratio: float = 0.1  # last learning rate over the peak
    lr_schedule: LRSchedule = LRSchedule.cosine  # shape after warm-up
    lr_unit: LRUnit = LRUnit.steps  # what warm-up, decay and stable lengths count: steps or tokens
    lr_warmup: int = 0  # length of linear warm-up, in lr_unit
    lr_decay: Optional[int] = None  # where the schedule ends (wsd: length of its decay), in lr_unit; null: at the end
    eval_interval: int = 50  # steps between evaluations; 0: never
    eval_samples: int = 64  # validation samples per evaluation (fewer where the split is shorter)
    max_bad_steps: int = 3  # bad steps in a row (skip), or rollbacks without a checkpoint between, before the run stops
    on_bad_step: OnBadStep = OnBadStep.skip  # skip the update, or roll back to the last checkpoint, past the batch
    spike_factor: float = 0.0  # a loss above this x the median of 50 steps is bad too (skip: only recorded); 0: never
    deterministic: bool = True  # ask torch for deterministic kernels where they exist
    sample_tokens: int = 0  # length of a text sample printed at the end, in tokens; 0: none
    sample_prompt: str = "def "  # what that sample continues


@dataclass
class CheckpointConfig:
    """What a run can go on from."""

    interval: int = 500  # steps between checkpoints, one more at the end; 0: only when the run is asked to stop
    keep_last: int = 3  # newest checkpoints that are kept; -1: all
    keep_every: int = 0  # checkpoints of each so many steps are kept for good; 0: none
    asynchronous: bool = True  # train on while bytes are written, at the price of a host copy of the rank's states
    on_error: OnSaveError = OnSaveError["continue"]  # a save that fails (disk full): continue training, or stop


@dataclass
class LinkConfig:
    """A link between devices, by the alpha-beta model: a message of n bytes takes latency_s + n / bandwidth."""

    name: Optional[str] = None  # NVLink, PCIe, InfiniBand, Ethernet, loopback; null: not known
    bandwidth: Optional[float] = None  # bytes/s that one device sends over it in a collective, as measured
    latency_s: Optional[float] = None  # seconds before the first byte of a message arrives


@dataclass
class RatesConfig:
    """What one device is measured to do in the run's dtype; never the data sheet. A product of [m, k] and [k, n] takes
    kernel_s + 2 m k n / matrix_flops + bytes of its three matrices / operand_bandwidth."""

    matrix_flops: Optional[float] = None  # FLOP/s that ever larger matrix products approach
    operand_bandwidth: Optional[float] = None  # bytes/s at which their operands and results move beside
    attention_flops: Optional[float] = None  # FLOP/s of the fused attention core, counted over the half it computes
    memory_bandwidth: Optional[float] = None  # bytes/s of pointwise kernels: norms, activations, dropout, the optimizer
    kernel_s: Optional[float] = None  # seconds that each kernel costs beside its work
    micro_batch_s: float = 0.0  # seconds that each micro-batch costs a pipeline stage beside its kernels
    step_s: float = 0.0  # seconds that each optimizer step costs beside its kernels
    overlap: float = 1.0  # share of communication that may run beside computation and really does (CPU: 0)
    dtype: Optional[DType] = None  # number format they were measured in; the 16-bit ones count as one
    source: Optional[str] = None  # where these numbers come from: a probe or a fit, with its date


@dataclass
class ClusterConfig:
    """What the ranks run on."""

    name: str = "local"  # a label for logs
    nodes: int = 1  # machines
    device: Optional[DeviceKind] = None  # what plans are for: cpu or cuda; null: as found
    devices_per_node: Optional[int] = None  # accelerators per machine; null: as found
    memory_per_device: Optional[float] = None  # bytes; null: as found
    peak_flops: Optional[float] = None  # data-sheet FLOP/s of one device in the run's dtype; null: by device name
    intra_node: LinkConfig = field(default_factory=LinkConfig)  # between devices of one machine
    inter_node: LinkConfig = field(default_factory=LinkConfig)  # between machines, the share of one device
    host: LinkConfig = field(default_factory=LinkConfig)  # between a device and its machine's memory
    rates: RatesConfig = field(default_factory=RatesConfig)  # what one device is measured to do
    timeout_s: float = 1800.0  # longest wait in a collective before the run ends, in seconds
    hang_timeout_s: float = 600.0  # longest time in which no rank makes progress before the run ends, in s; 0: never


@dataclass
class WandbConfig:
    """Weights & Biases, written by rank 0 only."""

    mode: WandbMode = WandbMode.offline  # offline, online or disabled
    project: str = "transformer-training"  # project name
    entity: Optional[str] = None  # team or user; null: the account's default
    group: Optional[str] = None  # runs compared together; null: the experiment's name
    job_type: Optional[str] = None  # what kind of run it is within its group; null: the recipe's name (pretrain)
    name: Optional[str] = None  # run name; null: experiment and plan
    tags: list[str] = field(default_factory=list)  # labels (up to 64 characters each), beside plan, model, dtype, ...
    init_timeout_s: float = 30.0  # longest wait for the service, in seconds


@dataclass
class ProfileConfig:
    """Steps that torch.profiler records, into traces/ of the run's folder."""

    steps: Any = None  # 10, 10-12 or [10-12,20]: counted from 1, both ends included; null: none
    ranks: Optional[list[int]] = None  # whose traces are kept; null: the first rank of each pipeline stage


@dataclass
class TelemetryConfig:
    """What is seen."""

    log_interval: int = 1  # steps between console lines (metrics.jsonl has every step)
    plot: bool = True  # write the loss curve as PNG at the end
    ranks_interval: int = 10  # steps between those in which all ranks tell what they measured; 0: none
    time_collectives: bool = True  # time each axis's collectives in the second step, one by one
    tensorboard: bool = False  # write TensorBoard's event files too, into tensorboard/ of the run's folder
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class RunConfig:
    """Where files go."""

    experiment: str = "default"  # runs are kept under dir/experiment/id
    dir: str = "runs"  # relative to the folder of the call
    id: Optional[str] = None  # null: decided once by rank 0 from the clock


@dataclass
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    alerts: dict[str, Any] = field(default_factory=dict)  # AlertRule by name: conf/alerts, and alerts.NAME.FIELD
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    run: RunConfig = field(default_factory=RunConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    promote: PromoteConfig = field(default_factory=PromoteConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    objective: Objective = Objective.clm  # what is learnt: clm, the next token; mlm, tokens that were masked (BERT)
    seed: int = 1234  # of initial weights, data order, masks and dropout
    resume: str = "never"  # never; auto: the newest unfinished run of the experiment; or the path of a checkpoint
    initialize_from: Optional[str] = None  # weights to start from: a checkpoint, or a transformers folder (safetensors)
