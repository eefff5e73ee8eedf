"""Two tables: partial runs merged into the whole, runs compared head by head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.errors import InputError
from headwise.heads import HeadTable, MeasureInfo, Moments
from headwise.layout import HeadLayout
from tests.tables import CROSSING, layout_of, synthetic_table

COUNTS = {("encoder", "self"): [3, 2], ("decoder", "cross"): [2]}
MEASURES = {
    "entropy": MeasureInfo("entropy", "nats", 0.0, None, None, "Shannon entropy"),
    "distance": MeasureInfo("distance", "tokens", 0.0),
}


def run_over(rows: np.ndarray, special: np.ndarray, part: str, **changes: Any) -> HeadTable:
    """A run over (rows, heads) of values; distance does not apply at the last site."""
    layout = changes.pop("layout", layout_of(COUNTS))
    here = np.arange(len(layout)) < 5
    values: dict[Any, Moments] = {}
    for kind, given_ in (("token", rows), ("special", special)):
        values["entropy", kind] = Moments.of(given_) if len(given_) else Moments.empty(len(layout))
        values["distance", kind] = Moments.of(2 * given_, np.broadcast_to(here, given_.shape))
    absent = {"distance": {site.key: CROSSING for site in layout.sites if site.key.kind == "cross"}}
    options = {"absent": absent, "model": "m", "weight_hash": "h", "parts": [part]} | changes
    return HeadTable.build(layout, options.pop("measures", MEASURES), values, **options)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.data())
def test_merging_parts_gives_the_whole_run(seed: int, rows: int, data: st.DataObject) -> None:
    random = np.random.default_rng(seed)
    values = 3 * random.random((rows, 7))
    special = random.random((rows, 7))
    cut, special_cut = data.draw(st.integers(0, rows)), data.draw(st.integers(0, rows))
    whole = run_over(values, special, "all")
    left = run_over(values[:cut], special[:special_cut], "a")
    right = run_over(values[cut:], special[special_cut:], "b")
    merged = left.merge(right.sort("entropy", descending=True))  # the order of heads does not matter
    assert merged.heads == whole.heads
    assert merged.parts == ("a", "b")
    assert merged.absent == whole.absent
    assert (merged.model, merged.weight_hash) == ("m", "h")
    for name in MEASURES:
        for kind in ("token", "special"):
            ours, truth = merged.moments(name, kind), whole.moments(name, kind)
            assert ours.count.tolist() == truth.count.tolist()
            np.testing.assert_allclose(ours.mean, truth.mean, rtol=1e-12, atol=0)
            np.testing.assert_allclose(ours.std, truth.std, rtol=1e-11, atol=1e-13)
    assert right.merge(left) == left.merge(right)


def a_run(part: str = "a", **changes: Any) -> HeadTable:
    return run_over(np.ones((2, changes.pop("heads", 7))), np.ones((0, 7)), part, **changes)


def other_layout(change: Callable[[HeadLayout], HeadLayout]) -> HeadLayout:
    return change(layout_of(COUNTS))


def wider(layout: HeadLayout) -> HeadLayout:
    path = layout.sites[0].block
    return replace(layout, blocks=layout.blocks | {path: replace(layout.blocks[path], d_k=13)})


def windowed(layout: HeadLayout) -> HeadLayout:
    return replace(layout, sites=(replace(layout.sites[0], window=4), *layout.sites[1:]))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: a_run("b", weight_hash="g"), r"different weights, m \(h\) and m \(g\)"),
        (lambda: a_run("b", weight_hash=None), r"different weights, m \(h\) and m \(no hash\)"),
        (lambda: a_run("b", layout=other_layout(wider)), "has d_k 11 in the first table and 13 in the second"),
        (lambda: a_run("b", layout=other_layout(windowed)), "has window None in the first table and 4 in the second"),
        (
            lambda: a_run("b", layout=layout_of({("encoder", "self"): [3, 4]}), absent={}),
            r"decoder.layer.0.attention.cross \(decoder, cross\) is in the first table only|has query heads 2",
        ),
        (
            lambda: a_run("b", measures=MEASURES | {"entropy": replace(MEASURES["entropy"], unit="bits")}),
            "'entropy' is defined differently: unit is 'nats' in the first table and 'bits' in the second",
        ),
        (
            lambda: a_run("b", measures=MEASURES | {"entropy": replace(MEASURES["entropy"], description="Other")}),
            "'entropy' is defined differently: description",
        ),
        (lambda: a_run("b").select(stack="encoder"), "2 heads are in one table only, e.g. .*, in the first"),
        (lambda: a_run("a"), "both tables measured 'a', whose rows would count twice"),
    ],
)
def test_merge_refuses(other: Callable[[], HeadTable], words: str) -> None:
    with pytest.raises(InputError, match=words):
        a_run("a").merge(other())


def test_merge_refuses_other_things_and_other_measures() -> None:
    with pytest.raises(InputError, match="only be merged with a HeadTable, not with int"):
        a_run().merge(3)  # type: ignore[arg-type]
    more = synthetic_table(COUNTS, measures=10)
    less = synthetic_table(COUNTS, measures=9)
    with pytest.raises(InputError, match="measure 'result_norm' is in the first table only"):
        more.merge(less)
    with pytest.raises(InputError, match="measure 'result_norm' is in the second table only"):
        less.merge(more)


def test_merge_of_unhashed_models_goes_by_name() -> None:
    first, second = a_run("a", weight_hash=None), a_run("b", weight_hash=None)
    assert first.merge(second).count("entropy").tolist() == [4] * 7
    with pytest.raises(InputError, match="different models, 'm' and 'n'"):
        first.merge(a_run("b", weight_hash=None, model="n"))


def test_overlap_may_be_allowed() -> None:
    assert a_run().merge(a_run(), overlap=True).count("entropy").tolist() == [4] * 7


def test_merge_refuses_a_measure_that_applies_on_one_side_only() -> None:
    layout = layout_of(COUNTS)
    measures = {"distance": MEASURES["distance"]}
    full = HeadTable.build(layout, measures, {("distance", "token"): Moments.of(np.ones((2, 7)))})
    none = HeadTable.build(
        layout,
        measures,
        {("distance", "token"): Moments.of(np.ones((2, 7)), np.broadcast_to(np.arange(7) < 5, (2, 7)))},
        absent={"distance": {layout.sites[2].key: CROSSING}},
    )
    with pytest.raises(InputError, match=r"has rows in the first table and does not apply in the other \(keys and"):
        full.merge(none)
    with pytest.raises(InputError, match="has rows in the second table"):
        none.merge(full)


def test_compare_gives_differences_head_by_head() -> None:
    random = np.random.default_rng(7)
    first, second = random.random((5, 7)), random.random((5, 7))
    left, right = run_over(first, first, "a"), run_over(second, second, "b")
    found = left.compare(right.sort("entropy"))
    assert found.heads == left.heads
    assert len(found) == 7
    np.testing.assert_allclose(found.difference("entropy"), (second - first).mean(0), rtol=1e-12)
    assert np.isnan(found.difference("distance")).tolist() == [False] * 5 + [True] * 2
    top = found.largest("entropy", 2)
    order = np.argsort(-np.abs((second - first).mean(0)))
    assert [head for head, _ in top] == [left.heads[at] for at in order[:2]]
    assert len(found.largest("distance", 99)) == 5
    frame = found.to_pandas()
    assert frame["entropy_difference"].tolist() == found.difference("entropy").tolist()
    assert frame["entropy_second"].tolist() == right["entropy"].tolist()
    assert "entropy: largest difference" in repr(found)
    with pytest.raises(InputError, match="'x' is not in both tables; these are: entropy, distance"):
        found.difference("x")


def test_comparing_a_table_with_itself_gives_zeros() -> None:
    table = synthetic_table()
    found = table.compare(table)
    assert all((found.difference(name) == 0).all() for name in table.measures)


def test_compare_refuses_unless_told() -> None:
    left = synthetic_table({("encoder", "self"): [4, 4]}, measures=10)
    pruned = synthetic_table({("encoder", "self"): [4, 3]}, measures=9, model="pruned")
    with pytest.raises(InputError, match="pass different_models=True"):
        left.compare(pruned)
    with pytest.raises(InputError, match="pass different_measures=True"):
        left.compare(pruned, different_models=True)
    found = left.compare(pruned, different_models=True, different_measures=True)
    assert len(found) == 7
    assert [str(head) for head in found.only_left] == ["encoder.layer.1.attention.self:3"]
    assert found.only_right == ()
    assert found.measures_only_left == ("result_norm",)
    assert found.measures_only_right == ()
    back = pruned.compare(left, different_models=True, different_measures=True)
    assert [str(head) for head in back.only_right] == ["encoder.layer.1.attention.self:3"]
    assert back.measures_only_right == ("result_norm",)
    np.testing.assert_array_equal(back.difference("entropy"), -found.difference("entropy"))


def test_compare_refuses_what_has_nothing_in_common() -> None:
    left = synthetic_table({("encoder", "self"): [2]}, measures=1)
    with pytest.raises(InputError, match="no head in common"):
        left.compare(synthetic_table({("decoder", "self"): [2]}, measures=1), different_models=True)
    other = synthetic_table({("encoder", "self"): [2]}, measures=2)
    alone = HeadTable(
        other.layout, {"max_weight": replace(MEASURES["entropy"], name="max_weight")},
        {("max_weight", "token"): Moments.empty(2)}, model="synthetic", weight_hash="sha256:00ff",
    )  # fmt: skip
    with pytest.raises(InputError, match="no measure in common"):
        left.compare(alone, different_measures=True)
    with pytest.raises(InputError, match="only be compared with a HeadTable, not with str"):
        left.compare("x")  # type: ignore[arg-type]
