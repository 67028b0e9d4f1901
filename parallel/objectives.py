"""Which models learn which objective, and what a model that sees both ways cannot do: lines, one a problem.

clm, the next token, needs a causal model; mlm, tokens that were masked (arXiv:1810.04805), one that sees both ways.
"""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config, DataFormat, Family, Objective
from parallel.architecture import BIDIRECTIONAL


def objective_of(family: Family) -> Objective:
    """The one that models of this family learn."""
    return Objective.mlm if family in BIDIRECTIONAL else Objective.clm


def problems(config: Config) -> Iterator[str]:
    """Reasons to refuse the objective, or what goes with it."""
    family, objective = config.model.family, config.objective
    if objective is not objective_of(family):
        if objective is Objective.clm:
            yield (
                f"model.family={family.value} sees what comes after a token, which objective=clm asks for; use "
                "objective=mlm, or a causal model"
            )
        else:
            both = " or ".join(one.value for one in BIDIRECTIONAL)
            yield (
                f"objective=mlm needs a model that sees both ways, but model.family={family.value} is causal; use "
                f"model.family={both} (model=megatron_bert_336m), or objective=clm"
            )
        return
    if family not in BIDIRECTIONAL:
        return
    if config.data.format is DataFormat.conversations:
        yield (
            "data.format=conversations is learnt answer by answer, which objective=mlm is not; use data.format=text, "
            "or a causal model"
        )
    if config.train.sample_tokens > 0:
        yield (
            f"train.sample_tokens={config.train.sample_tokens} continues a text, which model.family={family.value} "
            "does not: it fills in masks; set train.sample_tokens=0"
        )
    if config.lora.rank > 0:
        yield (
            f"lora.rank={config.lora.rank} adapts causal models, but model.family={family.value}; set lora.rank=0, "
            "which trains all weights"
        )
