"""Weight gradients taken by WeightGradients are those of autograd, at once or put off, over several micro-batches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model.tensor_parallel.linear import column_parallel_linear, row_parallel_linear
from model.tensor_parallel.weight_gradients import WeightGradients
from parallel.groups import SINGLE
from tests.ranks import run_ranks, tensor_axis

# float64: sums of 24 products in another order differ by less than 1e-14 of values of order 10.
TOLERANCE = 1e-12


def gradients(tensor, *, take: bool, later: bool) -> list[Tensor]:
    """Gradients of two weights and of the last input after three micro-batches through both kinds of linear layer."""
    torch.manual_seed(0)
    up, down = (torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64).reshape(shape)) for shape in ((6, 4), (4, 6)))
    taker = WeightGradients([up, down], later=later) if take else None
    x = torch.empty(0)
    for micro_batch in range(3):
        x = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=True)
        hidden = column_parallel_linear(x, up, None, tensor=tensor, sequence_parallel=False).tanh()
        row_parallel_linear(hidden, down, None, tensor=tensor, sequence_parallel=False).square().sum().backward()
        if taker is not None and later:
            assert micro_batch > 0 or up.grad is None, "put off until flush"
            taker.flush()
    assert up.grad is not None and down.grad is not None and x.grad is not None
    return [up.grad, down.grad, x.grad]


@pytest.mark.parametrize("later", [False, True])
def test_taken_gradients_are_those_of_autograd(later: bool) -> None:
    expected = gradients(SINGLE, take=False, later=False)
    torch.testing.assert_close(gradients(SINGLE, take=True, later=later), expected, rtol=TOLERANCE, atol=TOLERANCE)


def _both_ways() -> bool:
    tensor = tensor_axis(2)
    expected, taken = gradients(tensor, take=False, later=False), gradients(tensor, take=True, later=True)
    torch.testing.assert_close(taken, expected, rtol=TOLERANCE, atol=TOLERANCE)
    return True


def test_taken_gradients_are_those_of_autograd_on_two_tensor_ranks() -> None:
    assert run_ranks(2, _both_ways) == [True, True]
