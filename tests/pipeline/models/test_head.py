"""The classifier: fp32 in any model, with a constant that is not part of any weight."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from pipeline.models.head import Head


def test_product_bias_and_constant_are_fp32_in_a_bf16_model() -> None:
    head = Head(8, 5, constant=-10.0).to(torch.bfloat16)
    features = torch.randn(3, 8).bfloat16()
    expected = F.linear(features.float(), head.weight.float(), head.bias.float()) - 10.0
    assert torch.equal(head(features), expected)
    assert expected.dtype == torch.float32


def test_a_head_needs_its_classes() -> None:
    with pytest.raises(ValueError, match="num_classes is 0: take it from the dataset"):
        Head(8, 0, constant=0.0)
