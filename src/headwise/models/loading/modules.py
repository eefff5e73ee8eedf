"""Modules in memory: which are models as they are, which must be unwrapped, which cannot be measured truly."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from headwise.errors import InputError, ModelError, UnsupportedError

__all__ = ["check_module", "unwrapped"]

_PARALLEL: Final = {
    "DataParallel": "module.module",
    "DistributedDataParallel": "module.module",
    "FullyShardedDataParallel": "the whole model before it is sharded",
    "DeepSpeedEngine": "engine.module",
}
_QUANTISED_PACKAGES: Final = (
    "bitsandbytes",
    "auto_gptq",
    "gptqmodel",
    "awq",
    "hqq",
    "optimum.quanto",
    "quanto",
    "torchao",
    "aqlm",
    "eetq",
    "vptq",
    "compressed_tensors",
    "auto_round",
    "torch.ao.nn.quantized",
    "torch.ao.nn.intrinsic",
    "transformers.integrations.finegrained_fp8",
    "transformers.integrations.bitnet",
    "transformers.integrations.mxfp4",
    "transformers.integrations.fbgemm_fp8",
)
_WHOLE_FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def unwrapped(module: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """The model inside ``torch.compile``'s wrapper, and a note if there was one.

    Raises:
        InputError: not a module.
        UnsupportedError: a parallel, traced or adapter wrapper.
    """
    if isinstance(module, str):
        raise InputError(f"wrap takes a module, and the string {module!r} was given; a path or hub id goes to load")
    if not isinstance(module, nn.Module):
        inner = getattr(module, "model", None)
        hint = f"; give its .model ({type(inner).__name__})" if isinstance(inner, nn.Module) else ""
        raise InputError(f"wrap takes a torch.nn.Module, and a {type(module).__name__} was given{hint}")
    notes: tuple[str, ...] = ()
    while isinstance(getattr(module, "_orig_mod", None), nn.Module):
        module = module._orig_mod
        notes = ("the model was compiled (torch.compile); its uncompiled modules, with the same weights, are measured",)
    names = {kind.__name__ for kind in type(module).__mro__}
    for name, instead in _PARALLEL.items():
        if name in names:
            raise UnsupportedError(
                f"the module is wrapped in {name}, whose parts live in several places; give {instead}"
            )
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            "the module is a TorchScript program, whose attention cannot be reached; give the Python model"
        )
    if isinstance(module, torch.fx.GraphModule):
        raise UnsupportedError(
            "the module is a traced or exported graph, whose attention cannot be reached; give the Python model"
        )
    if type(module).__module__.split(".")[0] == "sentence_transformers":
        raise UnsupportedError(
            f"the module is a {type(module).__name__} of sentence-transformers; give the transformer in it: "
            "wrap(model[0].auto_model, "
            f"model.tokenizer)"
        )
    return module, notes


def check_module(module: nn.Module) -> None:
    """Refuse what would be measured untruly or not at all.

    Raises:
        UnsupportedError: adapters, quantised weights, tensor-parallel shards, compiled parts.
        ModelError: parameters without values.
    """
    for path, part in module.named_modules():
        where = path or type(part).__name__
        home = type(part).__module__
        if home.split(".")[0] == "peft" or getattr(part, "_hf_peft_config_loaded", False):
            raise UnsupportedError(
                f"{where}: the model carries a PEFT adapter, whose weights stand beside the model's own; merge it "
                "first "
                f"(merge_and_unload()) and give the result"
            )
        if home.startswith(_QUANTISED_PACKAGES):
            raise UnsupportedError(_quantised(f"{where} ({type(part).__name__} of {home.split('.')[0]})"))
        if getattr(part, "_orig_mod", None) is not None or getattr(part, "_compiled_call_impl", None) is not None:
            raise UnsupportedError(
                f"{where}: was compiled in place (module.compile()), which hides its attention; give the "
                "uncompiled model"
            )
        if hasattr(part.__dict__.get("forward"), "_torchdynamo_orig_callable"):
            raise UnsupportedError(
                f"{where}: its forward was compiled in place, which hides its attention; give the uncompiled model"
            )
    _check_config(module)
    _check_values(module)


def _quantised(where: str) -> str:
    return (
        f"{where}: the weights are quantised, and headwise reads unpacked weights; give the original model, or "
        "dequantise it "
        f"(model.dequantize() in transformers)"
    )


def _check_config(module: nn.Module) -> None:
    config = getattr(module, "config", None)
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    method = str(getattr(method, "value", method))
    if method != "gguf":
        raise UnsupportedError(_quantised(f"{type(module).__name__} ({method})"))


def _check_values(module: nn.Module) -> None:
    devices: dict[str, str] = {}
    for name, value in module.named_parameters():
        if isinstance(value, nn.parameter.UninitializedParameter):
            raise ModelError(f"{name}: has no values yet (a lazy module); run the model once before it is wrapped")
        if value.is_meta:
            raise ModelError(
                f"{name}: has no values (it is on the meta device); load the weights before the model is wrapped"
            )
        if hasattr(value, "ds_id"):
            raise UnsupportedError(f"{name}: is split by DeepSpeed; gather the model, or give it before it is split")
        kind = type(value.data)
        if kind.__name__ == "DTensor":
            raise UnsupportedError(f"{name}: is split over devices (DTensor); give a model that is whole on one device")
        if kind not in (torch.Tensor, nn.Parameter):
            raise UnsupportedError(_quantised(f"{name} (a {kind.__name__})"))
        if value.is_floating_point() and value.dtype not in _WHOLE_FLOATS:
            raise UnsupportedError(_quantised(f"{name} ({str(value.dtype).removeprefix('torch.')})"))
        devices.setdefault(str(value.device), name)
    if len(devices) > 1 and getattr(module, "hf_device_map", None) is None:
        (one, first), (two, second) = list(devices.items())[:2]
        raise ModelError(
            f"the parameters lie on several devices ({first} on {one}, {second} on {two}); move the model to one "
            "(model.to)"
        )
