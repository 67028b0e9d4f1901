"""How a model is trained. The only home of deepspeed, which picks its accelerator when it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
