"""A gate with the replacement running_mean puts the mean of visible values in a head's place, computed here by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.errors import GateError
from headwise.kernels import visible_block
from headwise.models import discover, gate, observe
from tests.surgery import small
from tests.surgery.small import IDS, apart, outputs

LEFT = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])


class Kept:
    """Keeps the problem and the gated output of every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def want(self, _site: Any, _problem: Any) -> Any:
        from headwise.kernels import Wanted

        return Wanted()

    def see(self, call: Any) -> None:
        self.calls.append(call)


def llama(**extra: Any) -> nn.Module:
    return small.decoder("Llama", **extra)


def by_hand(call: Any, head: int) -> tuple[Tensor, Tensor]:
    """(B, Q, D) the mean of what the head's queries see, from a dense matrix; and which rows see anything."""
    problem = call.problem
    batch, heads, queries, _ = problem.q.shape
    keys = problem.k.shape[2]
    seen = visible_block(problem, (0, queries), (0, keys))
    seen = torch.ones(1, 1, queries, keys) if seen is None else seen
    weights = seen.expand(batch, heads, queries, keys)[:, head].double()
    values = problem.v[:, head // (heads // problem.v.shape[1])].double()
    counts = weights.sum(-1, keepdim=True)
    return weights @ values / counts.clamp(min=1), counts[..., 0] > 0


@pytest.mark.parametrize(
    "build",
    [small.bert, llama, small.gpt2, small.albert, lambda: small.decoder("Mistral", sliding_window=3)],
    ids=["bert", "llama", "gpt2", "albert", "mistral"],
)
@pytest.mark.parametrize("mask", [None, LEFT], ids=["whole", "padded on the left"])
def test_the_mean_of_what_is_seen(build: Any, mask: Tensor | None) -> None:
    model = build()
    layout = discover(model)
    site = layout.sites[-1].key
    kept = Kept()
    inputs = {"input_ids": IDS} | ({} if mask is None else {"attention_mask": mask})
    # the observer's session is the inner one: it sees z after the gates of both
    with observe(model, kept), gate(model, {site: [1]}, replacement="running_mean"):
        outputs(model, **inputs)
    call = next(one for one in kept.calls if one.site.key == site)
    expected, sees = by_hand(call, 1)
    assert bool(sees.any())
    torch.testing.assert_close(call.z[:, 1][sees].double(), expected[sees], rtol=0, atol=1e-5)
    other = kept.calls[-1].answer.z[:, 0]
    assert torch.equal(call.z[:, 0], other)


def test_a_scale_mixes_and_gradients_flow() -> None:
    model = llama()
    where = {"model.layers.0": [1, 2]}
    plain = outputs(model, input_ids=IDS)
    with gate(model, where, scale=1.0, replacement="running_mean"):
        assert apart(outputs(model, input_ids=IDS), plain) == 0
    scale = torch.full((2,), 0.3, requires_grad=True)

    def loss(given: Tensor) -> Tensor:
        with gate(model, where, scale=given, replacement="running_mean"):
            found: Tensor = model(input_ids=IDS).logits.double().square().mean()
        return found

    (gradient,) = torch.autograd.grad(loss(scale), scale)
    with torch.no_grad():
        for at in range(2):
            step = torch.zeros(2)
            step[at] = 1e-2
            slope = (loss(scale + step) - loss(scale - step)) / 2e-2
            assert float(slope) == pytest.approx(float(gradient[at]), rel=2e-2)


def test_generation_with_a_cache_equals_a_pass_without() -> None:
    """Every step's mean is over all tokens so far, those in the cache included."""
    model: Any = llama()
    with gate(model, {"model.layers.0": [0, 3], "model.layers.1": [1]}, replacement="running_mean"):
        kinds = [
            model.generate(IDS, max_new_tokens=6, do_sample=False, **one)
            for one in ({}, {"use_cache": False}, {"cache_implementation": "static"})
        ]
    assert torch.equal(kinds[0], kinds[1])
    assert torch.equal(kinds[0], kinds[2])


def test_an_unknown_replacement() -> None:
    with (
        pytest.raises(
            GateError, match=r"replacement must be one of nothing, running_mean, and is 'constant' \(a const"
        ),
        gate(llama(), {"model.layers.0": [1]}, replacement="constant"),
    ):
        pass


@pytest.mark.parametrize("kind", ["eager", "sdpa"])
def test_rows_that_see_nothing_keep_what_the_model_gives(kind: str) -> None:
    """Eager attention gives such rows a mean of all values, and sdpa zeros."""
    model: Any = llama()
    model.set_attn_implementation(kind)
    given: list[Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    outputs(model, input_ids=IDS, attention_mask=LEFT)
    with gate(model, {"model.layers.0": [0, 1, 2, 3]}, replacement="running_mean"):
        outputs(model, input_ids=IDS, attention_mask=LEFT)
    handle.remove()
    plain, gated = given[0], given[-1]
    assert torch.equal(gated[1, :2], plain[1, :2])
    assert float((gated[1, 3:] - plain[1, 3:]).abs().max()) > 1e-3
