"""A pruned encoder exported to ONNX gives in onnxruntime what it gives in torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headwise.surgery import prune
from tests.surgery import small

PLANS = {
    "uneven": {"encoder.layer.0": [1], "encoder.layer.1": [0, 2, 3]},
    "a layer without heads": {"encoder.layer.0": [0, 1, 2, 3]},
}


class Encoder(nn.Module):
    """The last hidden state, by position, as the exporter wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        return found


def exported(encoder: nn.Module, inputs: tuple[torch.Tensor, ...], file: Path) -> Path:
    """The encoder as an ONNX file, for any batch and length."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            encoder, inputs, file, dynamo=False, input_names=["input_ids", "attention_mask"], output_names=["hidden"],
            dynamic_axes={name: {0: "batch", 1: "length"} for name in ("input_ids", "attention_mask", "hidden")},
        )  # fmt: skip
    return file


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_a_pruned_encoder_runs_in_onnxruntime(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="onnx is not installed: pip install headwise[onnx]")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install headwise[onnx]")
    pruned: Any = prune(small.bert(), PLANS[name], repair="none").module
    encoder = Encoder(pruned).eval()
    ids = torch.arange(2 * 7).view(2, 7) % 29
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    session = runtime.InferenceSession(str(exported(encoder, (ids, mask), tmp_path / "small.onnx")))
    for batch, length in ((2, 7), (3, 11)):
        ids = (torch.arange(batch * length).view(batch, length) * 7) % 29
        mask = torch.ones_like(ids)
        mask[1, length - 2 :] = 0
        with torch.no_grad():
            expected = encoder(ids, mask)
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        assert found.shape == tuple(expected.shape)
        assert float((torch.from_numpy(found) - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
