"""The process that never saw the original: loads the folders that it is told of, and compares what they give.

One JSON object a line comes in (the folder, the case, the class), one line goes out: what headwise loaded, and what
plain transformers made of the folder.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from pruning import apart, outputs
from transformers.utils import logging

from headwise.models import load


def compared(model: nn.Module, stored: Mapping[str, Any]) -> str:
    """Whether a model gives bit for bit what is stored."""
    found = outputs(model, stored["inputs"])
    same = len(found) == len(stored["expected"]) and all(map(torch.equal, found, stored["expected"]))
    return "equal" if same else f"off by {apart(stored['expected'], found):.2g}"


def answer(told: Mapping[str, str]) -> tuple[str, str]:
    """What became of one folder."""
    stored = torch.load(told["case"], weights_only=False)
    try:
        ours = compared(load(told["place"]).module, stored)
    except Exception as failure:  # noqa: BLE001
        ours = f"{type(failure).__name__}: {str(failure)[:200]}"
    kind = getattr(import_module(told["home"]), told["name"])
    try:
        plain = compared(kind.from_pretrained(told["place"]).eval(), stored)
    except Exception as failure:  # noqa: BLE001
        plain = f"refused: {type(failure).__name__}: {str(failure)[:100]}"
    return ours, plain


def main() -> None:
    """Answer until nothing more comes."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
