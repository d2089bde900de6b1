"""Tests the errors for handles of GPU memory without a GPU. tests/gpu tests the handles themselves."""

from __future__ import annotations

import pytest
import torch

from longshore_client import ArgumentError
from longshore_client.cuda import device_name, device_region


@pytest.mark.parametrize("wrong", [torch.zeros(4), torch.zeros(4, device="meta"), [1]], ids=["CPU", "meta", "list"])
def test_only_a_cuda_tensor_has_a_handle(wrong: object) -> None:
    for question in (device_region, device_name):
        with pytest.raises(ArgumentError, match="give a torch tensor on a CUDA device"):
            question(wrong)
