"""Loading a folder that headwise saved: the class is built from its config, cut to the weights, and filled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise import artifacts
from headwise.errors import ModelError, RunError
from headwise.models.arguments import places_of
from headwise.models.cut_modules import HeadCut, install, restate
from headwise.models.loading.companions import FAILURES
from headwise.models.loading.weights import refuse_pointer
from headwise.models.surgery_record import SurgeryRecord

__all__ = ["MODEL_FILE", "check_cut", "cuts_of", "outline", "read_model_file", "rebuilt", "record_of", "submodule"]

MODEL_FILE: Final = "headwise.json"
_HOME: Final = "transformers.models."


def read_model_file(folder: Path) -> dict[str, Any] | None:
    """The document of a folder that headwise saved, or None where it is another folder.

    Raises:
        ModelError: there is one, and it is damaged or of a newer version.
    """
    if not folder.is_dir() or not (folder / MODEL_FILE).exists():
        return None
    try:
        return artifacts.read_document(folder / MODEL_FILE, artifacts.MODEL_FORMAT)
    except RunError as error:
        raise ModelError(str(error)) from None


def record_of(document: Mapping[str, Any]) -> SurgeryRecord | None:
    """What was cut, as the document says it.

    Raises:
        ModelError: it does not say it whole.
    """
    found = document["surgery"]
    try:
        return None if found is None else SurgeryRecord.from_document(found)
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{MODEL_FILE}: surgery is not complete ({error})") from None


def cuts_of(document: Mapping[str, Any]) -> Iterator[tuple[str, HeadCut]]:
    """What each cut module is told, by its path.

    Raises:
        ModelError: a module is named twice, or the last surgery says something else of it.
    """
    surgery = document["surgery"]
    told = {} if surgery is None else {one["module"]: one for one in surgery["blocks"]}
    seen: set[str] = set()
    for entry in document["cuts"]:
        values: dict[str, Any] = {name: _tupled(value) for name, value in entry.items()}
        path = values.pop("module")
        try:
            cut = HeadCut(**values)
        except TypeError as error:
            raise ModelError(f"{MODEL_FILE}: the cut of {path} is not understood ({error})") from None
        if path in seen:
            raise ModelError(f"{MODEL_FILE}: {path} is among the cuts twice; save or copy the folder again")
        seen.add(path)
        if path in told:
            _compare(path, cut, told.pop(path))
        yield path, cut
    if told:
        raise ModelError(
            f"{MODEL_FILE}: the surgery cut {next(iter(told))}, which is not among the cuts; save or copy the folder "
            "again"
        )


def _compare(path: str, cut: HeadCut, told: Mapping[str, Any]) -> None:
    """Refuse a cut that is not the one that the last surgery tells of."""
    pairs = list(told["kv_map"])
    theirs = {"heads": told["query_heads"][1:], "kv_heads": told["kv_heads"][1:], "kv_map": pairs}
    ours = {"heads": [len(cut.heads)], "kv_heads": [cut.kv_heads], "kv_map": list(cut.kv_map or pairs)}
    wrong = next((name for name in ours if ours[name] != theirs[name]), None)
    if wrong is None and (cut.kv_map is None) is not told["even"]:
        wrong = "kv_map"
    if wrong is not None:
        raise ModelError(
            f"{MODEL_FILE}: the cut of {path} and the surgery say different {wrong}; save or copy the folder again"
        )


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value


def submodule(module: nn.Module, path: str, where: str) -> nn.Module:
    """The module that a cut names.

    Raises:
        ModelError: the model has none there.
    """
    try:
        return module.get_submodule(path)
    except AttributeError:
        raise ModelError(f"{where}: {MODEL_FILE} cuts {path}, which {type(module).__name__} does not have") from None


def check_cut(part: nn.Module, path: str, cut: HeadCut) -> None:
    """Refuse a cut that contradicts itself, or that would set what the module does not have.

    Raises:
        ModelError: what is wrong with it.
    """
    wrong = None
    if list(cut.heads) != sorted(set(cut.heads)) or any(head >= cut.original for head in cut.heads):
        wrong = f"its heads {list(cut.heads)[:9]} are not numbers below {cut.original} in order"
    elif cut.kv_map is not None and len(cut.kv_map) != len(cut.heads):
        wrong = f"its kv_map has {len(cut.kv_map)} entries for {len(cut.heads)} heads"
    elif cut.kv_map is not None and any(kv >= cut.kv_heads for kv in cut.kv_map):
        wrong = f"its kv_map {list(cut.kv_map)[:9]} leads to heads beyond {cut.kv_heads}"
    elif any(not one or one[0] not in cut.heads or max(one) >= cut.original for one in cut.means):
        wrong = f"its means {list(cut.means)[:3]} are not of heads that are left"
    elif not 1 <= cut.fused <= 3:
        wrong = f"fused is {cut.fused}, not 1 to 3"
    unknown = next((name for name in cut.narrow if name not in places_of(part)), None)
    if unknown is not None:
        wrong = f"it narrows {unknown!r}, which is no argument of {type(part).__name__}"
    parts = dict(part.named_modules())
    for name, width in cut.placeholder.items():
        possible = not cut.heads and width and width in (cut.d_k, cut.d_v, 2 * cut.d_k + cut.d_v)
        if not possible or not isinstance(getattr(parts.get(name), "weight", None), Tensor):
            wrong = f"{name!r} is no layer of a {type(part).__name__} without heads that could put out {width} zeros"
    for name in cut.attributes:
        if type(vars(part).get(name)) is not int:
            wrong = f"it sets {name!r}, which is no whole number of {type(part).__name__}"
    for name in cut.config:
        if type(getattr(getattr(part, "config", None), name, None)) is not int:
            wrong = f"it sets {name!r}, which is no whole number of the config"
    if wrong is not None:
        raise ModelError(f"{MODEL_FILE}: the cut of {path} is not understood: {wrong}")


def rebuilt(folder: Path, document: Mapping[str, Any]) -> nn.Module:
    """The module of a folder in headwise's own layout, in eval mode.

    Raises:
        ModelError: files are missing or damaged, or do not fit the class.
    """
    module = _built(folder, document)
    _filled(module, _stored(folder, document["weights"]["files"]), folder, document)
    for name, value in module.named_parameters():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ModelError(f"{folder}: {name} holds values that are not finite (NaN or infinity)")
    return module.eval()


def outline(folder: Path, document: Mapping[str, Any]) -> nn.Module:
    """The same module on the meta device: of its weights only names and shapes are read.

    Raises:
        ModelError: as for :func:`rebuilt`.
    """
    with torch.device("meta"):
        module = _built(folder, document)
    _filled(module, _stored(folder, document["weights"]["files"], shapes=True), folder, document)
    return module.eval()


def _filled(module: nn.Module, stored: dict[str, Tensor], folder: Path, document: Mapping[str, Any]) -> None:
    tied = document["weights"]["tied"]
    around: list[str] = []
    for path, cut in cuts_of(document):
        part = submodule(module, path, str(folder))
        check_cut(part, path, cut)
        install(part, cut)
        around.append(".".join(path.split(".")[:-2]))
    _fill(module, stored, tied, around, str(folder))


def _built(folder: Path, document: Mapping[str, Any]) -> nn.Module:
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.initialization import no_init_weights

    kind = _class(document["class"], PreTrainedModel, folder)
    config_kind = _class(document["config"], PretrainedConfig, folder)
    try:
        config = config_kind.from_json_file(str(folder / "config.json"))
        with no_init_weights():
            module: nn.Module = kind._from_config(config)
    except FAILURES as error:
        said = " ".join(str(error).split())[:240]
        raise ModelError(
            f"{folder}: {kind.__name__} cannot be built from config.json ({type(error).__name__}: {said})"
        ) from error
    return module


def _class(named: Mapping[str, str], base: type, folder: Path) -> Any:
    """A class of transformers by module and name; nothing else is ever imported."""
    home, name = named["module"], named["name"]
    if home.startswith(_HOME) and all(part.isidentifier() for part in home.split(".")):
        try:
            kind = getattr(import_module(home), name, None)
        except ImportError:
            kind = None
        if isinstance(kind, type) and issubclass(kind, base):
            return kind
    import transformers

    raise ModelError(
        f"{folder}: {MODEL_FILE} names the class {home}.{name}, which transformers {transformers.__version__} does "
        "not have; "
        "update transformers"
    )


def _stored(folder: Path, files: list[str], *, shapes: bool = False) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    stored: dict[str, Tensor] = {}
    for name in files:
        file = folder / name
        if Path(name).name != name or not file.is_file():
            raise ModelError(f"{folder}: the weights {name!r} are not there; copy the whole folder")
        refuse_pointer(file)
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    shape = opened.get_slice(key).get_shape() if shapes else ()
                    stored[key] = torch.empty(shape, device="meta") if shapes else opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: is not a readable safetensors file ({error}); save or copy it again") from None
    return stored


def _fill(module: nn.Module, stored: dict[str, Tensor], tied: Mapping[str, str], around: list[str], where: str) -> None:
    """Put what is stored into the model; it may be smaller only under the paths ``around``, where something was cut."""
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, value in stored.items():
        path, _, last = name.rpartition(".")
        owner = owners.get(path)
        if owner is None or (last not in owner._parameters and last not in owner._buffers):
            raise ModelError(f"{where}: the weights hold {name}, for which {type(module).__name__} has no place")
        cut = any(not one or name.startswith(f"{one}.") for one in around)
        _check_place(owner, name, value, where, cut=cut)
        _set(owner, last, value)
    expected = {name for name in module.state_dict() if name not in tied}
    missing = sorted(expected - set(stored))
    if missing:
        raise ModelError(f"{where}: the weights lack {missing[0]} (of {len(missing)}); save or copy the folder again")
    for name, first in tied.items():
        _tie(owners, name, first, where)


def _check_place(owner: nn.Module, name: str, value: Tensor, where: str, *, cut: bool) -> None:
    """Refuse what does not fit the place of its name.

    Raises:
        ModelError: its name, and what is wrong with it.
    """
    last = name.rpartition(".")[2]
    known = _held(owner, last)
    wrong = None
    if known is None and last in owner._parameters:
        weight = owner._parameters.get("weight")
        if not cut or weight is None or value.ndim != 1 or value.shape[0] not in weight.shape:
            wrong = f"has the shape {tuple(value.shape)}, and the {type(owner).__name__} has no place for that"
    elif isinstance(known, nn.Parameter):
        fits = known.ndim == value.ndim and sum(map(int.__ne__, known.shape, value.shape)) <= int(cut)
        if not fits or value.numel() > known.numel():
            said = f"{tuple(known.shape)} with one axis cut" if cut else f"{tuple(known.shape)}, as in a layer not cut"
            wrong = f"of a {type(owner).__name__} has the shape {tuple(value.shape)}, which is not {said}"
        elif value.is_floating_point() != known.is_floating_point():
            wrong = f"of a {type(owner).__name__} is {value.dtype}, and the model has {known.dtype} there"
    if wrong is not None:
        raise ModelError(f"{where}: {name} {wrong}; save or copy the folder again")


def _set(owner: nn.Module, name: str, value: Tensor) -> None:
    """Fill a parameter or buffer in place, so that what is tied to it stays tied, whatever its shape was."""
    known = owner._parameters.get(name)
    if known is not None:
        known.data = value
    elif name in owner._parameters:  # an intercept that the repair added
        owner._parameters[name] = nn.Parameter(value)
    else:
        owner._buffers[name] = value
    restate(owner)


def _tie(owners: Mapping[str, nn.Module], name: str, first: str, where: str) -> None:
    (path, _, last), (first_path, _, first_last) = name.rpartition("."), first.rpartition(".")
    source, target = (_held(owners.get(one), tail) for one, tail in ((first_path, first_last), (path, last)))
    if source is None or target is None:
        raise ModelError(f"{where}: {MODEL_FILE} ties {name} to {first}, and the model does not have both")
    if target is not source:
        setattr(owners[path], last, source)


def _held(owner: nn.Module | None, name: str) -> Tensor | None:
    """The parameter or buffer of a module by its name, or None."""
    if owner is None:
        return None
    found = owner._parameters.get(name)
    return owner._buffers.get(name) if found is None else found
