"""Software stacks of published runs on one GPU generation each: one calibration a stack.

`software`: what the planner must know of the program; what a GPU can do before anything is fitted: data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from conf.schema import Family
from parallel.software import Software

UNFUSED = Software(fused_attention=False, as_deepspeed=False, partitioned_sends=True, reduce_scatters=True)
FUSED = Software(as_deepspeed=False, reduce_scatters=True)
HIDING = Software(as_deepspeed=False, reduce_scatters=True, hides_data=True)


@dataclass(frozen=True)
class Stack:
    """name: of its calibration. `words`: what a row's stack column contains. `gpu`: how its gpu column begins."""

    name: str
    words: tuple[str, ...]
    gpu: str
    software: Software
    family: Family = Family.gpt2
    per_node: int = 8
    zero_stage: int = 0  # where a row states none
    reduces_fp32: bool = False  # gradients are summed over the data axis in fp32
    accumulates_not: bool = False  # one micro-batch a step where a row states no micro-batch
    baseline_tflops: float = 0.0  # of one GPU, recomputation included, where rows state shares of it

    def holds(self, row: dict[str, str]) -> bool:
        return all(word in row["stack"] for word in self.words) and row["gpu"].lower().startswith(self.gpu.lower())


# The first that holds a row counts.
STACKS = (
    Stack(
        "megatron_2019_v100",
        ("Megatron-LM 2019",),
        "V100",
        UNFUSED,
        per_node=16,
        accumulates_not=True,
        baseline_tflops=39.0,  # arXiv:1909.08053 section 5.1
    ),
    Stack("megatron_2020_v100", ("Megatron-LM 2020",), "V100", UNFUSED, per_node=16, accumulates_not=True),
    Stack("megatron_2020_a100_40gb", ("Megatron-LM 2020",), "A100-SXM4-40", UNFUSED, accumulates_not=True),
    Stack("megatron_jan_2021_a100", ("Megatron-LM Jan 2021",), "A100", UNFUSED),
    Stack("megatron_ptdp_a100", ("Megatron-LM PTD-P",), "A100", UNFUSED),
    Stack("deepspeed_zero3_2021_a100", ("ZeRO-3 without",), "A100", UNFUSED),
    Stack("megatron_deepspeed_bloom_a100", ("DeepSpeed PipelineEngine",), "A100", UNFUSED),
    Stack("megatron_deepspeed_mtnlg_a100", ("TP x PP x ZeRO-1",), "A100", UNFUSED, zero_stage=1),
    Stack("megatron_deepspeed_vtrain_a100", ("vTrain",), "A100", UNFUSED),
    Stack(
        "megatron_core_0.8_h100",
        ("Megatron-Core",),
        "H100",
        HIDING,
        zero_stage=1,
    ),
    Stack("megatron_2022_a100", ("Megatron-LM",), "A100-SXM4-80", UNFUSED),
    Stack("nanotron_h100", ("nanotron",), "H100", FUSED, family=Family.llama, reduces_fp32=True),
    Stack("composer_fsdp_h100", ("Composer + FSDP",), "H100", FUSED),
    Stack("composer_fsdp_a100_80gb", ("Composer + FSDP",), "a100_80gb", FUSED),
    Stack("composer_fsdp_a100_40gb", ("Composer + FSDP",), "a100_40gb", FUSED),
)
