"""The boxes of all ranks' runs, put together, are transformers' state dict: for any split of any parameter."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.schema import Family
from model.huggingface import to_huggingface_state
from model.huggingface_names import copies_in_folder, stored_tensors
from model.placement import boxes
from model.tensor_parallel.parameter import to_canonical
from parallel.groups import AxisGroup
from tests.model.reference import small_model
from tests.model.test_huggingface import CASES, build


def stored_whole(model, padded: int) -> dict[str, torch.Tensor]:
    """The state dict of the one-rank model: every value differs."""
    whole = build(model, AxisGroup("tensor", 0, 1, (0,), None), padded_vocab_size=padded)
    canonical = {}
    for parameter in whole.parameters():
        canonical |= to_canonical(parameter.detach(), parameter.info)
    state = to_huggingface_state(canonical, model)
    for copy in copies_in_folder(model):
        del state[copy]
    return state


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@settings(max_examples=5)
@given(cuts=st.lists(st.floats(0, 1), max_size=3))
def test_boxes_of_all_ranks_fill_the_stored_model_once(case: str, tp: int, cuts: list[float]) -> None:
    model = small_model(**CASES[case])
    padded = 64
    expected = stored_whole(model, padded)
    filled = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    places = stored_tensors(model)
    for rank in range(tp):
        module = build(model, AxisGroup("tensor", rank, tp, tuple(range(tp)), None), padded_vocab_size=padded)
        for parameter in module.parameters():
            info, values = parameter.info, parameter.detach().reshape(-1)
            edges = sorted({0, len(values), *(int(cut * len(values)) for cut in cuts)})
            for start, stop in pairwise(edges):
                for box in boxes(info, places, tensor_rank=rank, start=start, count=stop - start):
                    assert box.shape == tuple(filled[box.name].shape)
                    target = filled[box.name]
                    for dim, (first, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                        target = target.narrow(dim, first, size)
                    fresh = bool(target.isnan().all())
                    assert fresh or rank % info.replicas, f"{box.name} is covered twice"
                    target.copy_(box.view(values[start:stop]))
    for name, tensor in expected.items():
        assert torch.equal(filled[name], tensor), name


def test_a_run_is_cut_into_a_tail_whole_rows_and_a_head() -> None:
    model = small_model(family=Family.llama)
    module = build(model, AxisGroup("tensor", 0, 1, (0,), None))
    parameter = next(p for p in module.parameters() if p.info.name.endswith("attention.out.weight"))
    width = parameter.shape[1]
    got = boxes(parameter.info, stored_tensors(model), tensor_rank=0, start=width // 2, count=2 * width)
    assert [box.sizes for box in got] == [(1, width - width // 2), (1, width), (1, width // 2)]
    assert sum(prod(box.sizes) for box in got) == 2 * width
