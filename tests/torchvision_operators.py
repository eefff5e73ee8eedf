"""A pytest plugin for machines whose torchvision was compiled for another build of torch than theirs.

Importing such a torchvision fails on operators that its compiled part would have declared. Declared here before, they
let timm be imported; nothing in the tests calls them. Use: ``pytest -p tests.torchvision_operators``.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
for _name in ("nms(Tensor a, Tensor b, float c) -> Tensor", "qnms(Tensor a, Tensor b, float c) -> Tensor"):
    _LIBRARY.define(_name)
