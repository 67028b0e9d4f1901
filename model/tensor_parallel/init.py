"""Initial weights that depend on the seed and the parameter's name only, never on the plan.

Each canonical tensor is drawn whole in fp32 from its own generator, seeded with sha256 of (seed, name), then sliced. So
standard deviations are those of the unsharded shape, shards of one matrix differ, and replicas are equal bit for bit.
Vocabulary padding rows are zeros. Not here: which standard deviation a layer wants.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from model.tensor_parallel.parameter import ParameterInfo, attach, from_canonical, slice_for_rank
from parallel.groups import AxisGroup


def generator_seed(*parts: object) -> int:
    """63 bits of sha256 over the parts' text; stable across processes, machines and Python versions."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def normal(name: str, shape: tuple[int, ...], *, seed: int, std: float) -> Tensor:
    """Whole fp32 tensor of N(0, std^2) drawn for this seed and name, on the CPU."""
    generator = torch.Generator(device="cpu").manual_seed(generator_seed(seed, name))
    values = torch.empty(shape, dtype=torch.float32, device="cpu")
    return values.normal_(0.0, std, generator=generator)


def normal_parameter(info: ParameterInfo, *, tensor: AxisGroup, seed: int, std: float) -> nn.Parameter:
    """This rank's part of N(0, std^2) weights, in the default dtype and device (on "meta": shape only)."""
    parameter = nn.Parameter(torch.empty(info.local_shape))
    if not parameter.is_meta:
        whole = {name: normal(name, shape, seed=seed, std=std) for name, shape in info.canonical_shapes.items()}
        with torch.no_grad():
            parameter.copy_(slice_for_rank(from_canonical(whole, info), info, tensor))
    return attach(parameter, info, tensor)


def uniform_parameter(info: ParameterInfo, *, tensor: AxisGroup, seed: int, bound: float) -> nn.Parameter:
    """This rank's part of weights drawn evenly from [-bound, bound), in the default dtype and device."""
    parameter = nn.Parameter(torch.empty(info.local_shape))
    if not parameter.is_meta:
        generator = torch.Generator(device="cpu").manual_seed(generator_seed(seed, info.name))
        whole = torch.empty(info.global_shape, dtype=torch.float32, device="cpu")
        whole.uniform_(-bound, bound, generator=generator)
        with torch.no_grad():
            parameter.copy_(slice_for_rank(whole, info, tensor))
    return attach(parameter, info, tensor)


def constant_parameter(info: ParameterInfo, *, tensor: AxisGroup, value: float) -> nn.Parameter:
    """This rank's part of a parameter that starts at one value: biases at 0, norm weights at 1."""
    return attach(nn.Parameter(torch.full(info.local_shape, value)), info, tensor)
