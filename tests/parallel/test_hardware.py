"""Device kinds from a faked environment, and data-sheet peaks."""

from __future__ import annotations

import pytest

from parallel import hardware
from parallel.hardware import device_count, device_kind, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "fp16", 989e12),
        ("Tesla V100-SXM2-32GB", "fp16", 125e12),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A10G", "bf16", 70e12),
        ("NVIDIA A10", "bf16", None),
        ("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "fp32", None),
    ],
)
def test_peaks_are_those_of_the_data_sheets_and_absent_where_unknown(name, dtype, peak):
    assert peak_flops(name, dtype) == peak


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidia1").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(hardware, "version", lambda name: "2.13.0+cu130")
    return tmp_path


@pytest.mark.parametrize(
    ("environ", "kind", "count"),
    [
        ({}, "cuda", 2),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "cuda", 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cpu", 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cpu", 0),
        ({"DS_ACCELERATOR": "cpu"}, "cpu", 0),
    ],
)
def test_devices_are_found_without_torch(two_gpus, environ, kind, count):
    assert device_kind(environ, devices=two_gpus) == kind
    assert device_count(environ, devices=two_gpus) == count


def test_a_cpu_build_of_torch_computes_on_the_cpu_whatever_gpus_there_are(two_gpus, monkeypatch):
    monkeypatch.setattr(hardware, "version", lambda name: "2.13.0+cpu")
    assert device_kind({}, devices=two_gpus) == "cpu"


def test_no_device_files_mean_cpu(tmp_path):
    assert device_kind({}, devices=tmp_path) == "cpu"
