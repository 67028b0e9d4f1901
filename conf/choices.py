"""What the knobs of conf/schema.py that are no numbers may be. Import these names from there."""

from __future__ import annotations

from enum import Enum


class Family(str, Enum):
    gpt2 = "gpt2"
    llama = "llama"
    mistral = "mistral"
    qwen2 = "qwen2"
    qwen3 = "qwen3"
    gpt_neox = "gpt_neox"
    bert = "bert"
    megatron_bert = "megatron_bert"


class Objective(str, Enum):
    """What is learnt: the next token (causal), or tokens that were masked."""

    clm = "clm"
    mlm = "mlm"


class Activation(str, Enum):
    """Of the feed-forward layer; gelu_tanh is GPT-2's approximation, silu the gate of SwiGLU."""

    gelu_tanh = "gelu_tanh"
    gelu = "gelu"
    relu = "relu"
    silu = "silu"


# Members go by the name that is typed, and "1f1b" is no Python name.
Schedule = Enum("Schedule", {"1f1b": "1f1b", "eager1f1b": "eager1f1b", "dualpipev": "dualpipev"}, type=str)


# Axes of the mesh of ranks, the slowest first: ranks that differ in the last one are neighbours.
Order = Enum(
    "Order",
    {
        "pipe_data_tensor": "pipe_data_tensor",
        "pipe_tensor_data": "pipe_tensor_data",
        "data_pipe_tensor": "data_pipe_tensor",
        "data_tensor_pipe": "data_tensor_pipe",
        "tensor_pipe_data": "tensor_pipe_data",
        "tensor_data_pipe": "tensor_data_pipe",
    },
    type=str,
)


class Recompute(str, Enum):
    none = "none"
    selective = "selective"
    full = "full"


class DType(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class DeviceKind(str, Enum):
    cpu = "cpu"
    cuda = "cuda"


class LRSchedule(str, Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"


class LRUnit(str, Enum):
    steps = "steps"
    tokens = "tokens"


class DataFormat(str, Enum):
    text = "text"
    conversations = "conversations"


class BadLine(str, Enum):
    fail = "fail"
    skip = "skip"


class EvaluateTask(str, Enum):
    """What recipes/evaluate.py computes."""

    loss = "loss"
    wikitext = "wikitext"
    lambada = "lambada"
    harness = "harness"


class OnBadStep(str, Enum):
    skip = "skip"
    rollback = "rollback"


OnSaveError = Enum("OnSaveError", {"continue": "continue", "stop": "stop"}, type=str)


class WandbMode(str, Enum):
    offline = "offline"
    online = "online"
    disabled = "disabled"


class AlertSlice(str, Enum):
    """What an alert rule looks at apart: its metric of the whole run, or of each of these."""

    run = "run"
    stage = "stage"
    rank = "rank"
    axis = "axis"
    plan = "plan"


class AlertReference(str, Enum):
    """What the bounds of a normal range are relative to."""

    absolute = "absolute"
    prediction = "prediction"
    observation = "observation"
    recent = "recent"
    peers = "peers"


class AlertCompared(str, Enum):
    ratio = "ratio"
    difference = "difference"


class AlertSeverity(str, Enum):
    info = "info"
    warning = "warning"
    error = "error"


class AlertAction(str, Enum):
    """Each but the first does what the one before it does, too; the last saves before it stops."""

    log = "log"
    wandb = "wandb"
    stop = "stop"
    checkpoint_and_stop = "checkpoint_and_stop"
