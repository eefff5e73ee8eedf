"""One watched forward pass: every attention call, computed twice, and what reads the heads afterwards."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headwise import kernels
from headwise.errors import HeadwiseError, InputError, UnsupportedError
from headwise.kernels.problem import Problem, Wanted
from headwise.layout import Projection
from headwise.models.by_gradient import Told, tell
from headwise.models.cut_modules import HeadCut, cut_of
from headwise.models.families.projections import Linear, find_projections
from headwise.models.interface import answer, attend_as, delegate, enrol, expel
from headwise.models.masks import CompactMaskError
from headwise.models.problems import Call, problem_of
from headwise.models.replay import Replay, taken
from headwise.models.restore import held
from headwise.models.standin import MaskMode
from headwise.models.torch_seam import Heads, TorchSeam, by_torch
from headwise.models.torch_seam.heads import Reading, find_heads
from headwise.models.tracking import Tracker

__all__ = ["Probe", "Record", "run_model", "tensors_of"]


@dataclass
class Record:
    """One attention call of the probe.

    Attributes:
        path, call: the module and the ordinal of its call.
        query, key, value: its tensors; parts joined along their length.
        causal, window: what the mask says.
        arguments: what the module's forward was given, by name.
        linears: linear layers inside the module, by path relative to it, with what they put out.
        z: (B, Q, H * D_v) heads side by side, as the model's own function gave them; parts joined along Q.
        error: why headwise's numbers cannot be trusted here, or None.
        heads: how the model's tensors hold the heads, for a call that did not come through the interface.
        raw: z as the model has it, (..., Q, D_v), for such a call.
        settled: the model took its own softmax.
        reading: how a layer reads the heads of such a call, once one was seen to.
        later: whether a linear layer of the module reads something as wide as the heads after the call.
        told: what gradients tell of the module's weights, where values and names do not tell enough.
    """

    path: str
    call: int
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    window: int | None
    arguments: Mapping[str, Any]
    linears: dict[str, Linear]
    z: Tensor
    error: str | HeadwiseError | None = None
    heads: Heads | None = None
    raw: Tensor | None = None
    settled: bool = False
    reading: Reading | None = None
    later: bool = False
    told: Told = field(default_factory=Told)

    def groups(self, cut: HeadCut | None) -> tuple[Tensor, Tensor, list[int] | None]:
        """Keys and values (B, G, K, D) of the module's own key-value heads, and which of those it gave they are.

        In a module that was cut unevenly each head comes with its own copy of its key-value head.
        """
        kv_map = None if cut is None else cut.kv_map
        if kv_map is None:
            return self.key, self.value, None
        first = [kv_map.index(head) for head in range(max(kv_map) + 1)]
        return self.key[:, first], self.value[:, first], first


def run_model(root: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """One forward pass without a cache, with the same random numbers every time."""
    extra: dict[str, Any] = {}
    if "use_cache" not in inputs and "use_cache" in inspect.signature(root.forward).parameters:
        extra["use_cache"] = False
    torch.manual_seed(0)
    return root(**inputs, **extra)


def tensors_of(output: Any) -> list[Tensor]:
    """Every tensor in a model's output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [tensor for part in output for tensor in tensors_of(part)]
    return []


@dataclass
class Probe:
    """Watches one forward pass, once. Takes part in attention calls like a session (see ``interface.Party``)."""

    root: nn.Module
    static: dict[str, nn.Module]
    keep_weights: bool = True
    by_gradient: bool = False
    direct: Mapping[str, Mapping[int, Heads]] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)
    paths: dict[str, None] = field(default_factory=dict)
    returned_weights: bool = False
    seam: TorchSeam | None = None
    watching: bool = True

    def __post_init__(self) -> None:
        self.names = {module: path for path, module in self.root.named_modules()}
        self._owners = {
            id(module.weight): module for module in self.names if isinstance(getattr(module, "weight", None), Tensor)
        }
        self.tracker = Tracker(self.root, self.static.values())
        self._arguments: dict[nn.Module, Mapping[str, Any]] = {}
        self._given: dict[nn.Module, tuple[int, Any, Any]] = {}
        self._replay: Replay | None = None
        self._outputs: dict[nn.Module, dict[str, Linear]] = {}
        self._inside: list[nn.Module] = []
        self._readers: dict[tuple[str, int], tuple[str, nn.Module]] = {}
        self._between: dict[tuple[str, int], str] = {}

    @contextmanager
    def running(self, masks: MaskMode) -> Iterator[None]:
        """Inside, forward passes of the model are watched."""
        with ExitStack() as stack:
            stack.callback(self.tracker.remove)
            self.tracker.install()
            for module in self.static.values():
                stack.callback(module.register_forward_pre_hook(self._enter, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for module in self.names:
                if not any(True for _ in module.children()):
                    stack.callback(module.register_forward_pre_hook(self._reads).remove)
                    stack.callback(module.register_forward_hook(self._puts_out).remove)
            stack.callback(expel, self, self.names)
            enrol(self, self.names)
            watched = {self.root.get_submodule(path): axes for path, axes in self.direct.items()}
            self.seam = stack.enter_context(by_torch(watched, answer, self._reads_weight))
            stack.enter_context(held(self.root, masks, attend_as))
            stack.callback(setattr, self, "watching", False)
            yield

    # --- the seam hands every call over to a probe ---

    def take(self, call: Call, spot: Hashable) -> tuple[Tensor, Any]:
        """Compute a call twice, record it, and go on with the model's own output."""
        if self._replay is not None:
            return self._replay.take(call)
        path = self.names[call.module]
        self.paths[path] = None
        place = self.tracker.place(call.module, spot)
        output, weights = delegate(call)
        self.returned_weights |= weights is not None
        flat = output.flatten(2).clone()  # a model may add to it in place
        raw = None if call.heads is None else call.heads.joined(output.transpose(1, 2), call.lead).clone()
        problem, error = (None, None) if not call.query.shape[1] else self._check(call, path, output)
        if place.part:
            record = next(one for one in self.records if (one.path, one.call) == (path, place.call))
            record.z = torch.cat([record.z, flat], dim=1) if record.z.shape[::2] == flat.shape[::2] else record.z
            record.query = _longer(record.query, call.query)
            record.key, record.value = _longer(record.key, call.key), _longer(record.value, call.value)
            if raw is not None and record.raw is not None and record.raw.shape[:-2] == raw.shape[:-2]:
                record.raw = torch.cat([record.raw, raw], dim=-2)
            record.error = record.error or error
        else:
            causal, window = (False, None) if problem is None else _look(problem)
            self.records.append(
                Record(
                    path=path,
                    call=place.call,
                    query=call.query,
                    key=call.key,
                    value=call.value,
                    causal=causal,
                    window=window,
                    arguments=self._arguments.get(call.module, {}),
                    linears=dict(self._outputs.get(call.module, {})),
                    z=flat,
                    error=error,
                    heads=call.heads,
                    raw=raw,
                    settled=call.settled,
                )
            )
        return output, weights if self.keep_weights else None

    def _check(self, call: Call, path: str, own: Tensor) -> tuple[Problem | None, str | HeadwiseError | None]:
        try:
            problem = problem_of(replace(call, path=path))
            mine = kernels.run(problem, Wanted(rows=True))
        except CompactMaskError:
            raise
        except (InputError, UnsupportedError) as refusal:
            return None, refusal
        assert mine.rows is not None
        ours, theirs = mine.z.transpose(1, 2).double(), own.double()
        if ours.shape != theirs.shape:
            return problem, f"its own attention gives the shape {tuple(theirs.shape)}, headwise {tuple(ours.shape)}"
        seeing = (mine.rows.visible > 0).expand(mine.z.shape[:3]).transpose(1, 2)
        difference, scale = (ours - theirs)[seeing].abs(), theirs[seeing].abs()
        if difference.numel() == 0:
            return problem, None
        worst, largest = difference.max().item(), scale.max().item()
        allowed = _tolerance(own.dtype) * largest + 1e-7
        if not worst <= allowed:
            return (
                problem,
                f"its own attention ('{call.original}') and headwise differ by {worst:.2g} "
                f"where values reach {largest:.2g}",
            )
        return problem, None

    # --- hooks ---

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = list(inspect.signature(module.forward).parameters)
        self._arguments[module] = {**dict(zip(names, args, strict=False)), **kwargs}
        self._outputs[module] = {}
        self._inside.append(module)
        if self.by_gradient:
            self._given[module] = (len(self.records), taken(args), taken(kwargs))

    def _leave(self, module: nn.Module, _args: Any, output: Any) -> None:
        if output is not None and self.by_gradient and self._replay is None and module in self._inside:
            self._ask_gradients(module)
        if module in self._inside:
            del self._inside[self._inside.index(module) :]

    def _ask_gradients(self, module: nn.Module) -> None:
        """Run a module again, with gradients, where its weights are not known otherwise."""
        start, args, kwargs = self._given.pop(module)
        path = self.names[module]
        own = [record for record in self.records if record.path == path]
        if len(own) != 1 or own[0] not in self.records[start:] or not own[0].query.shape[1] or own[0].error:
            return
        record = own[0]
        key, value, first = record.groups(cut_of(module))
        unknown = {part for part, _ in find_projections(record.linears, record.query, key, value).unknown}
        place = (path, record.call)
        if record.later and place not in self._readers and "an adapter" not in self._between.get(place, ""):
            unknown.add("o")
        if not unknown:
            return
        self._replay = Replay(module, first)
        try:
            record.told = tell(self._replay.run(args, kwargs), unknown, record.value.shape[3])
        except RuntimeError:  # a module that does not run with gradients tells nothing
            return
        finally:
            self._replay = None

    def _puts_out(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self._inside or not isinstance(output, Tensor) or not args or not isinstance(args[0], Tensor):
            return None
        if not is_linear(module, args[0]):
            return None
        outer = self._inside[-1]
        path, start = self.names[module], self.names[outer]
        if path.startswith(start + ".") or not start:
            relative = path[len(start) + 1 :] if start else path
            if self._replay is not None:
                return self._replay.puts_out(relative, args[0], output, transposed=isinstance(module, Conv1D))
            self._outputs[outer][relative] = Linear(relative, isinstance(module, Conv1D), output)
        return None

    def _reads(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not isinstance(args[0], Tensor) or not args[0].numel():
            return
        if self._replay is not None:
            if is_linear(module, args[0]):
                self._replay.reads(self.names[module], args[0])
            return
        if any(self._reads_direct(record, module, args[0]) for record in self._direct()):
            return
        for record in reversed(self.records[-4:]):
            if record.raw is None and _holds(args[0], record.z):
                place = (record.path, record.call)
                if self.names[module].endswith(".base_layer"):
                    self._between.setdefault(place, f"an adapter on {self.names[module].removesuffix('.base_layer')}")
                elif is_linear(module, args[0]) and args[0].shape[-1] == record.z.shape[-1]:
                    self._readers.setdefault(place, (self.names[module], module))
                elif place not in self._readers and not isinstance(module, (nn.Dropout, nn.Identity)):
                    self._between.setdefault(place, f"{self.names[module]} ({type(module).__name__})")
                return
        last = self.records[-1] if self.records else None
        if last is not None and self._inside and last.path == self.names[self._inside[-1]]:
            last.later |= args[0].shape[-1] == last.z.shape[-1] and is_linear(module, args[0])

    def _reads_direct(self, record: Record, module: nn.Module, given: Tensor) -> bool:
        """Whether ``module`` reads the heads of a call outside the interface, and nothing beside; noted either way."""
        assert record.raw is not None
        if isinstance(module, (nn.Conv1d, nn.Conv2d)) and given.ndim > 2:
            given = given.movedim(1, -1)
        reading = find_heads(record.raw, given)
        if reading is None:
            return False
        record.reading = record.reading or reading
        place = (record.path, record.call)
        if not reading.alone:
            last = reading.column + record.z.shape[-1] - 1
            columns = f"which are columns {reading.column} to {last} of what {self.names[module]} reads"
            self._between.setdefault(place, f"other columns beside the heads ({columns})")
        elif is_linear(module, given):
            self._readers.setdefault(place, (self.names[module], module))
        elif place not in self._readers and not isinstance(module, (nn.Dropout, nn.Identity)):
            self._between.setdefault(place, f"{self.names[module]} ({type(module).__name__})")
        return reading.alone

    def _direct(self) -> Iterator[Record]:
        """The latest calls outside the interface, the last one first."""
        return (record for record in reversed(self.records[-64:]) if record.raw is not None)

    def _reads_weight(self, given: Tensor, weight: Tensor) -> None:
        """A linear map that torch computes from a module's weight without calling the module."""
        owner = self._owners.get(id(weight))
        for record in self._direct():
            assert record.raw is not None
            if owner is not None and self._reads_direct(record, owner, given):
                return
            if owner is None and record.reading is None:
                record.reading = find_heads(record.raw, given)
                if record.reading is not None:
                    self._between.setdefault(
                        (record.path, record.call), "a product with a parameter that no layer holds"
                    )
                    return

    def output_projection(self, record: Record) -> tuple[Projection | None, str]:
        """W_O of the record's heads: the linear layer that read exactly them, side by side; or why there is none."""
        place = (record.path, record.call)
        if place in self._readers and place not in self._between:
            path, module = self._readers[place]
            return Projection(path, isinstance(module, Conv1D), "heads"), ""
        if record.told.output is not None:
            module = self.root.get_submodule(record.told.output)
            return Projection(record.told.output, isinstance(module, Conv1D), "heads"), ""
        if place in self._between:
            return None, f"{self._between[place]} stands between the heads and the output projection"
        return None, "no linear layer reads the heads as they leave attention"


def is_linear(module: nn.Module, given: Tensor | None = None) -> bool:
    """Whether a module is a plain linear layer whose weight can be read by heads.

    A class of its own that is derived from ``nn.Linear`` is one if it maps ``given`` as a linear layer does.
    """
    if getattr(module, "weight", None) is None:
        return False
    if type(module).forward in (nn.Linear.forward, Conv1D.forward):
        return True
    if (
        given is None
        or not isinstance(module, nn.Linear)
        or module.weight.shape != (module.out_features, module.in_features)
    ):
        return False
    return torch.allclose(type(module).forward(module, given), nn.Linear.forward(module, given), rtol=1e-4, atol=1e-6)


def _holds(given: Tensor, z: Tensor) -> bool:
    """Whether ``given`` is z (B, Q, H * D_v), in whatever shape, or z with the sequence before the batch."""
    if given.numel() != z.numel() or not z.numel():
        return False
    if given.ndim == 3 and given.shape != z.shape and given.transpose(0, 1).shape == z.shape:
        given = given.transpose(0, 1)
    return torch.equal(given.reshape(z.shape), z)


def _longer(before: Tensor, part: Tensor) -> Tensor:
    """(B, heads, length, width) with another part behind it, where it fits."""
    fits = before.ndim == part.ndim and before.shape[:2] == part.shape[:2] and before.shape[3:] == part.shape[3:]
    return torch.cat([before, part], dim=2) if fits else before


def _tolerance(dtype: torch.dtype) -> float:
    return {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-4)


def _look(problem: Problem) -> tuple[bool, int | None]:
    """Whether the mask is causal, and its window; a whole mask is looked at."""
    visible = problem.visible
    if visible.causal or visible.mask is None:
        return visible.causal, visible.window
    queries, keys = problem.q.shape[2], problem.k.shape[2]
    if queries != keys or queries < 2:
        return False, None
    upper = torch.ones(queries, keys, dtype=torch.bool, device=visible.mask.device).triu(1)
    return not bool((visible.mask & upper).any()), None
