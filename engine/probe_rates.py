"""Matrix products, attention cores and pointwise kernels, timed on all ranks at once in the run's dtype.

Weights of a product come from memory each time, as in a step, where everything else has been through the caches since;
they are taken in turn from a buffer larger than those. Not here: the fit (`parallel.fit_rates`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch
import torch.nn.functional as F
from torch import Tensor

from conf.schema import Config
from engine.device import Device
from engine.distributed import broadcast
from engine.timing import seconds_together
from model.blocked_attention import blocked_attention, plan_blocks
from parallel.fit_rates import Product
from parallel.kernels import FUSED_BACKWARD
from parallel.sizes import sizes

BUFFER_BYTES = {"cpu": 256 << 20, "cuda": 1 << 30}  # several times the caches of any device
SQUARES = {"cpu": (128, 256, 512, 1024), "cuda": (256, 512, 1024, 2048, 4096, 8192)}
POINTWISE_BYTES = {"cpu": (16 << 20, 64 << 20), "cuda": (128 << 20, 512 << 20)}  # of one tensor
LONGEST_S = 0.5  # products, and attention beyond the configured length, that would take longer are left out


@dataclass(frozen=True)
class Kernel:
    """A measured kernel. work: FLOPs or bytes; configured: of the config's own shape."""

    name: str
    work: int
    seconds: float
    configured: bool = True


class RateProbe:
    """Times kernels on all ranks at once; every method is called on all ranks alike."""

    def __init__(self, config: Config, *, device: Device, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype

    def _seconds(self, call: Callable[[], object]) -> float:
        chosen = self.config.probe
        return seconds_together(call, device=self.device, trials=chosen.trials, trial_s=chosen.trial_s)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, device=self.device.torch_device).to(self.dtype)

    def products(self) -> list[Product]:
        """Of `matrix_shapes`, those that take at most LONGEST_S each at the rate of the largest square tried first."""
        shapes = matrix_shapes(self.config, squares=SQUARES[self.device.kind])
        largest = max(m * k + k * n for m, k, n in shapes)
        buffer = self._random(max(BUFFER_BYTES[self.device.kind] // self.dtype.itemsize, largest))
        reference = SQUARES[self.device.kind][-2]
        rate = 2 * reference**3 / self._product_s(buffer, reference, reference, reference)
        most = broadcast(LONGEST_S * rate)
        return [
            Product(m, k, n, self.dtype.itemsize, self._product_s(buffer, m, k, n))
            for m, k, n in shapes
            if 2 * m * k * n <= most
        ]

    def _product_s(self, buffer: Tensor, m: int, k: int, n: int) -> float:
        a, out = buffer[: m * k].view(m, k), buffer.new_empty(m, n)
        places = max(1, (len(buffer) - m * k) // (k * n))
        weights = [
            buffer[m * k + place * k * n : m * k + (place + 1) * k * n].view(k, n) for place in range(min(places, 4096))
        ]
        turn = count()
        return self._seconds(lambda: torch.mm(a, weights[next(turn) % len(weights)], out=out))

    def attention_cores(self) -> list[Kernel]:
        """Forward and backward of the causal core that the model uses here, at half, one and two sequence lengths.

        FLOPs are those of the causal half, as `parallel.kernels` counts them.
        """
        model, length = self.config.model, self.config.data.sequence_length
        found: list[Kernel] = []
        for one in sorted({max(1, length // 2), length, 2 * length}):
            shape = (self.config.train.micro_batch_size, model.num_attention_heads, one, sizes(model).head_dim)
            flops = round((1 + FUSED_BACKWARD) * 2 * shape[0] * shape[1] * one * one * shape[3])
            if one > length and flops / found[-1].work * found[-1].seconds > LONGEST_S:
                break
            seconds = self._seconds(partial(self._attend, *(self._random(*shape).requires_grad_() for _ in range(3))))
            found.append(Kernel(f"attention B{shape[0]} N{shape[1]} S{one} D{shape[3]}", flops, seconds, one == length))
        return found

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """The choice of `model.attention` for one document a sample."""
        if self.device.kind == "cpu" and self.dtype is torch.float32:
            out = blocked_attention(q, k, v, blocks=plan_blocks(q.shape[2], None, dtype=self.dtype))
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), out)

    def pointwise(self) -> list[Kernel]:
        """Kernels that read and write tensors larger than the caches; bytes read and written."""
        hidden, found = self.config.model.hidden_size, []
        for size in POINTWISE_BYTES[self.device.kind]:
            rows = max(1, size // (self.dtype.itemsize * hidden))
            a, b, out = (self._random(rows, hidden) for _ in range(3))
            moved = a.numel() * self.dtype.itemsize
            found.append(Kernel(f"add [{rows}, {hidden}]", 3 * moved, self._seconds(partial(torch.add, a, b, out=out))))
            norm = partial(F.layer_norm, a, (hidden,))
            found.append(Kernel(f"layer_norm [{rows}, {hidden}]", 2 * moved, self._seconds(norm)))
        return found


def matrix_shapes(config: Config, *, squares: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(m, k, n) of squares, of skinny products beside the largest, and of a block and head at tp 1, 2, 4 and 8."""
    model, s = config.model, sizes(config.model)
    tokens, hidden = config.train.micro_batch_size * config.data.sequence_length, model.hidden_size
    query = model.num_attention_heads * s.head_dim
    shapes = {(size, size, size) for size in squares}
    side = squares[-1]
    shapes |= {shape for thin in (16, 64) for shape in ((thin, side, side), (side, thin, side), (side, side, thin))}
    for tp in (1, 2, 4, 8):
        if model.num_attention_heads % tp or s.ffn_hidden_size % tp:
            continue
        key_value = max(1, s.num_key_value_heads // tp) * s.head_dim
        width = s.ffn_hidden_size // tp
        shapes |= {
            (tokens, hidden, query // tp + 2 * key_value),
            (tokens, query // tp, hidden),
            (tokens, hidden, width * (2 if s.parts.gated else 1)),
            (tokens, width, hidden),
            (tokens, hidden, -(-model.vocab_size // tp)),
        }
    return sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2])
