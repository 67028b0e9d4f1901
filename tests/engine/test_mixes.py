"""Every mix of precision, accumulation, ZeRO stage and offload either runs or is refused by the plan (case C1)."""

from __future__ import annotations

from itertools import product

import pytest

from conf.schema import DType
from parallel.plan import ParallelPlan, PlanError
from tests.engine.cases import reference_run, tiny_config
from tests.engine.on_ranks import train_steps
from tests.ranks import run_ranks

MIXES = list(product((1, 2), (DType.fp32, DType.bf16), (DType.fp32, DType.bf16), (0, 1, 2, 3), (False, True)))
REFUSED = "refused"


def config_of(pp: int, dtype: DType, accumulate: DType, zero: int, offload: bool):
    return tiny_config(
        parallel__pp=pp,
        precision__dtype=dtype,
        precision__grad_accum_dtype=accumulate,
        zero__stage=zero,
        zero__offload_optimizer=offload,
    )


def is_refused(mix: tuple) -> bool:
    try:
        ParallelPlan.from_config(config_of(*mix), 2, device="cpu")
    except PlanError:
        return True
    return False


ACCEPTED = [mix for mix in MIXES if not is_refused(mix)]


def name(mix: tuple) -> str:
    pp, dtype, accumulate, zero, offload = mix
    return f"pp{pp}-{dtype.value}-accumulate-{accumulate.value}-zero{zero}" + ("-offload" if offload else "")


def test_the_mixes_that_deepspeed_cannot_do_are_refused() -> None:
    refused = {name(mix) for mix in MIXES} - {name(mix) for mix in ACCEPTED}
    assert "pp2-bf16-accumulate-fp32-zero0" in refused  # NotImplementedError after all ranks have started
    assert {"pp2-fp32-accumulate-fp32-zero2", "pp2-bf16-accumulate-fp32-zero3"} <= refused
    assert {"pp2-bf16-accumulate-fp32-zero1", "pp1-bf16-accumulate-fp32-zero2"} <= {name(mix) for mix in ACCEPTED}


def check(mix: tuple) -> None:
    config = config_of(*mix)
    reference = reference_run(config, steps=2)
    exact = mix[1] is DType.fp32
    for results in run_ranks(2, train_steps, config, 2):
        for result, (loss, norm) in zip(results, reference, strict=True):
            # bf16 keeps 8 bits: 2^-8 = 0.4 % of a loss near 5.6, and some percent of a norm of many rounded gradients
            assert result.loss == pytest.approx(loss, rel=1e-5 if exact else 2**-8)
            assert result.grad_norm == pytest.approx(norm, rel=1e-5 if exact else 0.03)


SHORT = [mix for mix in ACCEPTED if mix[4] or (mix[1] is DType.bf16 and mix[0] == 2)][:6]


@pytest.mark.parametrize("mix", SHORT, ids=name)
def test_an_accepted_mix_computes_the_reference(mix: tuple) -> None:
    check(mix)


@pytest.mark.slow
@pytest.mark.parametrize("mix", [mix for mix in ACCEPTED if mix not in SHORT], ids=name)
def test_every_accepted_mix_computes_the_reference(mix: tuple) -> None:
    check(mix)
