"""Names, seeds and sizes; what a run leaves behind; and a quick look at every experiment."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from headwise import lab
from headwise.errors import InputError

NAMES = [entry.name for entry in lab.CATALOGUE]


def test_the_catalogue_has_the_eleven_claims() -> None:
    assert len(NAMES) == len(set(NAMES)) == 11
    for entry in lab.CATALOGUE:
        assert entry.claim.endswith(".")
        assert lab.definition(entry.name).name == entry.name


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("ranks", "did you mean 'rank'?"),
        ("specialization", "did you mean 'specialisation'?"),
        ("Several Reads", "did you mean 'several-reads'?"),
        ("xyzzy", "the experiments are sum-of-scores, several-reads, "),
    ],
)
def test_an_unknown_name_gives_the_nearest(typed: str, hint: str) -> None:
    with pytest.raises(InputError) as refused:
        lab.find(typed)
    assert str(refused.value).startswith(f"the lab has no experiment {typed!r}; {hint}")


def test_every_name_is_checked_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    monkeypatch.setattr("headwise.lab.running.run", lambda name, **_: ran.append(name))
    with pytest.raises(InputError, match="no experiment 'rnak'"):
        lab.run_all(["worked-split", "rnak"])
    assert ran == []


def test_several_run_in_the_order_of_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.lab.running.run", lambda name, **_: name)
    told: list[tuple[int, int, str]] = []
    ran = lab.run_all(["rank", "sum-of-scores", "rank"], progress=lambda *what: told.append(what))
    assert ran == ["sum-of-scores", "rank"]
    assert told == [(0, 2, "sum-of-scores"), (1, 2, "rank"), (2, 2, "rank")]


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0"])
def test_a_seed_is_a_whole_number(seed: object) -> None:
    with pytest.raises(InputError, match="seed must be a whole number from 0 to"):
        lab.run("worked-split", seed=seed)  # type: ignore[arg-type]


def test_an_unknown_size_is_refused() -> None:
    with pytest.raises(InputError, match="size must be one of full, small; got 'huge'"):
        lab.run("worked-split", size="huge")


def test_torch_random_state_is_as_before() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    threads = torch.get_num_threads()
    lab.run("saturation", size="small")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    first, again, other = (lab.run("sum-of-scores", seed=seed, size="small") for seed in (1, 1, 2))
    assert first.quantities == again.quantities
    assert first.quantities["pattern_distance"] != other.quantities["pattern_distance"]


def test_listing_imports_nothing_that_computes() -> None:
    code = "import sys, headwise.lab; print([m for m in ('torch', 'matplotlib', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


#: Half a minute and more on an idle machine.
LONG = ("several-reads",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in NAMES]
)
def test_a_small_run_gives_a_whole_outcome(name: str) -> None:
    outcome = lab.run(name, seed=1, size="small")
    experiment = lab.definition(name)
    assert outcome.size == "small"
    assert {check.threshold for check in outcome.stated} == set(experiment.rule.stated)
    assert len(outcome.finding) > 100
    assert 20 < len(outcome.headline) < 180
    json.dumps(outcome.to_dict(), allow_nan=False)
    for quantity in outcome.quantities.values():
        assert quantity.meaning, quantity.name
    for item in experiment.literature:
        assert not item.ours or item.ours in outcome.quantities
