"""The table: what is in it, sorting, selecting, matrices, other forms."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from headwise.errors import InputError
from headwise.heads import HeadTable, MeasureInfo, Moments
from headwise.layout import Block, HeadId, HeadLayout, Site, SiteKey
from tests.tables import layout_of, synthetic_table

INFO = MeasureInfo("entropy", "nats", 0.0, None, None, "Shannon entropy of the row")


def small(means: list[float], heads: list[int], special: list[float] | None = None) -> HeadTable:
    """One layer after another with so many heads each; NaN means no rows."""
    layout = layout_of({("encoder", "self"): heads})
    values: dict[Any, Moments] = {}
    for rows, given in (("token", means), ("special", special)):
        if given is not None:
            array = np.array(given)
            values["entropy", rows] = Moments(np.where(np.isnan(array), 0, 5), array, np.zeros(len(array)))
    return HeadTable.build(layout, {"entropy": INFO}, values)


def test_len_iteration_and_rows() -> None:
    table = synthetic_table({("decoder", "self"): [4, 4]}, groups=2)
    assert len(table) == 8
    rows = list(table)
    assert [row.id for row in rows] == list(table.heads) == list(table.layout.heads())
    row = rows[7]
    assert (row.stack, row.kind, row.layer, row.head, row.kv_head, row.d_k) == ("decoder", "self", 1, 3, 1, 11)
    assert row["entropy"] == table["entropy"][7] == table[row.id]["entropy"]
    stat = row.stat("entropy", "special")
    assert (stat.mean, stat.rows) == (table.mean("entropy", "special")[7], 29)
    assert row.stat("entropy").std == table.std("entropy")[7]
    assert "decoder.layer.1.attention.self:3" in repr(row)


def test_missing_is_nan_and_counted_zero() -> None:
    table = synthetic_table({("encoder", "self"): [2], ("decoder", "cross"): [2]})
    assert np.isnan(table["distance"]).tolist() == [False, False, True, True]
    assert table.count("distance").tolist() == [1013, 1013, 0, 0]
    key = table.heads[3].site
    assert table.reason("distance", key) == "keys and queries are positions of different sequences"
    assert table.reason("distance", table.heads[0].site) is None
    assert table.reason("entropy", key) is None


def test_sort_is_stable_and_puts_missing_last() -> None:
    nan = math.nan
    table = small([3.0, nan, 1.0, 3.0, -2.0], [5])
    order = lambda sorted_: [head.head for head in sorted_.heads]  # noqa: E731
    assert order(table.sort("entropy")) == [4, 2, 0, 3, 1]
    assert order(table.sort("entropy", descending=True)) == [0, 3, 2, 4, 1]
    assert order(table.top("entropy", 2)) == [0, 3]
    assert order(table.top("entropy", 99)) == [0, 3, 2, 4]
    assert order(table.top("entropy", 2, descending=False)) == [4, 2]
    assert len(table.top("entropy", 0)) == 0


def test_infinite_values_sort_at_the_ends() -> None:
    table = small([1.0, math.inf, -math.inf], [3])
    assert [head.head for head in table.sort("entropy").heads] == [2, 0, 1]
    assert [head.head for head in table.sort("entropy", descending=True).heads] == [1, 0, 2]


def test_sort_by_special_rows() -> None:
    table = small([1.0, 2.0], [2], special=[8.0, 7.0])
    assert [head.head for head in table.sort("entropy", rows="special").heads] == [1, 0]


def test_matrix_of_uneven_layers() -> None:
    table = small([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [3, 1, 2])
    expected = [[1.0, 2.0, 3.0], [4.0, math.nan, math.nan], [5.0, 6.0, math.nan]]
    np.testing.assert_array_equal(table.matrix("entropy", "encoder", "self"), expected)
    np.testing.assert_array_equal(table.matrix("entropy"), expected)
    part = table.sort("entropy", descending=True).select(layer=[0, 2])
    expected[1] = [math.nan] * 3
    np.testing.assert_array_equal(part.matrix("entropy"), expected)


def test_matrix_needs_one_group() -> None:
    table = synthetic_table({("encoder", "self"): [2, 2], ("decoder", "self"): [3], ("decoder", "cross"): [3]})
    assert table.groups == (("encoder", "self"), ("decoder", "self"), ("decoder", "cross"))
    assert table.matrix("entropy", "encoder").shape == (2, 2)
    assert table.matrix("entropy", kind="cross").shape == (1, 3)
    with pytest.raises(InputError, match=r"fits several: \(encoder, self\), \(decoder, self\); name both"):
        table.matrix("entropy", kind="self")
    with pytest.raises(InputError, match="no heads of stack 'vision' and kind None; it has"):
        table.matrix("entropy", "vision")


def test_select() -> None:
    table = synthetic_table({("encoder", "self"): [3, 3, 3], ("decoder", "self"): [3], ("decoder", "cross"): [3]})
    name = lambda chosen: [str(head) for head in chosen.heads]  # noqa: E731
    assert len(table.select(stack="encoder")) == 9
    assert len(table.select(stack=["encoder", "decoder"], kind="self")) == 12
    assert len(table.select(layer=[0, 2])) == 12
    assert name(table.select(module="encoder.layer.1", heads=[0, 2])) == [
        "encoder.layer.1.attention.self:0",
        "encoder.layer.1.attention.self:2",
    ]
    ids = [table.heads[4], table.heads[0]]
    assert table.select(heads=ids).heads == (ids[1], ids[0])
    assert table.select(heads=ids[0]).heads == (ids[0],)
    assert len(table.select(heads=1)) == 5
    low = table.select(where=lambda row: row["entropy"] < 1.0)
    assert 0 < len(low) < len(table)
    assert (low["entropy"] < 1.0).all()
    assert len(table.select(where=lambda row: False)) == 0
    assert len(table.select()) == len(table)


def test_select_by_module_respects_dots() -> None:
    table = synthetic_table({("encoder", "self"): [1] * 12})
    assert len(table.select(module="encoder.layer.1")) == 1  # and not layers 10 and 11


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ({"stack": "audio"}, "no head of the table has stack 'audio'; there is encoder"),
        ({"kind": ["self", "cross"]}, "no head of the table has kind 'cross'; there is self"),
        ({"layer": 6}, "no head of the table has layer 6; there is 0, 1, 2, 3, 4, 5"),
        ({"layer": "0"}, "layer must be whole numbers, one or several; got '0'"),
        ({"layer": True}, "layer must be whole numbers"),
        ({"module": "encoder.lay"}, "no head of the table has module 'encoder.lay'; modules are"),
        ({"heads": 12}, "no site of the table has a head 12; there is 0, 1, 2"),
        ({"heads": [HeadId(SiteKey("encoder", "self", "x"), 0)]}, r"there is no head x:0 \(encoder, self\)"),
        ({"heads": 0.5}, "heads must be whole numbers or HeadIds, one or several; got 0.5"),
    ],
)
def test_select_refuses_what_is_not_there(conditions: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        synthetic_table().select(**conditions)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda t: t["nothing"], "there is no measure 'nothing' in this table; it has entropy"),
        (lambda t: t[3], "by the name of a measure or by a HeadId, not by int"),
        (lambda t: t[HeadId(SiteKey("encoder", "self", "x"), 0)], r"no head x:0"),
        (lambda t: t.mean("entropy", "padding"), "rows must be 'token' or 'special', not 'padding'"),
        (lambda t: next(iter(t)).stat("nothing"), "there is no measure 'nothing'"),
        (lambda t: t.top("entropy", -1), "at least 0, not -1"),
        (lambda t: t.top("entropy", 1.5), "whole number of heads"),
        (lambda t: t.sort("nothing"), "there is no measure"),
    ],
)
def test_refusals_of_questions(ask: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        ask(synthetic_table())


def one_site(**changes: Any) -> HeadLayout:
    block = Block("a", **({"query_heads": 2, "kv_heads": 1, "d_k": 3, "d_v": 3, "kv_map": (0, 0)} | changes))
    return HeadLayout((Site(SiteKey("encoder", "self", "a"), "a", 0, False),), {"a": block})


def test_refusals_of_parts_that_do_not_fit() -> None:
    good = {("entropy", "token"): Moments.of([[1.0, 2.0]])}
    site = SiteKey("encoder", "self", "a")
    build = HeadTable.build
    twice = HeadLayout(one_site().sites * 2, one_site().blocks)
    for arguments, options, words in [
        (("a", {"entropy": INFO}, good), {}, "layout must be a HeadLayout, not str"),
        ((twice, {"entropy": INFO}, good), {}, r"site a \(encoder, self\) is in the layout twice"),
        ((HeadLayout(one_site().sites, {}), {"entropy": INFO}, good), {}, "reads block 'a', which the layout"),
        ((HeadLayout((), {"b": one_site().blocks["a"]}), {"entropy": INFO}, good), {}, "filed under 'b'"),
        ((one_site(kv_map=(0,)), {"entropy": INFO}, good), {}, "kv_map has 1 entries for 2 query heads"),
        ((one_site(kv_map=(0, 1)), {"entropy": INFO}, good), {}, r"outside 0\.\.0"),
        ((one_site(), {}, good), {}, "at least one measure"),
        ((one_site(), {"entropy": "nats"}, good), {}, "must be described by a MeasureInfo, not by str"),
        ((one_site(), {"other": INFO}, good), {}, "'entropy' is filed under 'other'"),
        ((one_site(), {"entropy": INFO}, {}), {}, "no moments for measure 'entropy' over rows of real tokens"),
        ((one_site(), {"entropy": INFO}, good | {"entropy": 1}), {}, "values has the key 'entropy'"),
        ((one_site(), {"entropy": INFO}, good | {("entropy", "pad"): Moments.empty(2)}), {}, "keys are"),
        ((one_site(), {"entropy": INFO}, {("entropy", "token"): [1.0]}), {}, "must be Moments, not list"),
        ((one_site(), {"entropy": INFO}, {("entropy", "token"): Moments.empty(3)}), {}, "3 heads; the table has 2"),
        ((one_site(), {"entropy": INFO}, good), {"absent": {"x": {site: "no"}}}, "absent names measure 'x'"),
        ((one_site(), {"entropy": INFO}, good), {"absent": {"entropy": {site: " "}}}, "needs a reason in words"),
        (
            (one_site(), {"entropy": INFO}, good),
            {"absent": {"entropy": {SiteKey("encoder", "self", "b"): "no"}}},
            "names site b, which is not in the layout",
        ),
        (
            (one_site(), {"entropy": INFO}, good),
            {"absent": {"entropy": {site: "no distance here"}}},
            "declared absent at site a but has 1 token rows",
        ),
    ]:
        with pytest.raises(InputError, match=words):
            build(*arguments, **options)
    with pytest.raises(InputError, match="head a:0 is in the table twice"):
        HeadTable(one_site(), {"entropy": INFO}, good, heads=[HeadId(site, 0)] * 2)
    with pytest.raises(InputError, match=r"head a:2 \(encoder, self\) is not in the layout"):
        HeadTable(one_site(), {"entropy": INFO}, good, heads=[HeadId(site, 0), HeadId(site, 2)])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("Entropy", "nats"), "lower-case letters"),
        (("", "nats"), "lower-case letters"),
        (("entropy\n", "nats"), "lower-case letters"),
        (("layer", "nats"), "collides with a column"),
        (("entropy_std", "nats"), "collides with a column"),
        (("entropy", "nats", 2.0, 1.0), "low 2.0 is above high 1.0"),
        (("entropy", "nats", math.nan), "low must be a number or None"),
        (("entropy", "nats", 0.0, True), "high must be a number or None"),
        (("entropy", "nats", 0.0, None, "up"), "better must be 'high', 'low' or None, not 'up'"),
    ],
)
def test_refusals_of_measures(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        MeasureInfo(*arguments)


def test_an_infinite_bound_is_no_bound() -> None:
    assert MeasureInfo("a", "1", -math.inf, math.inf) == MeasureInfo("a", "1")


def test_equality() -> None:
    table = synthetic_table({("encoder", "self"): [2], ("decoder", "cross"): [2]})
    same = synthetic_table({("encoder", "self"): [2], ("decoder", "cross"): [2]})
    assert table == same  # NaN included
    assert table != same.sort("entropy", descending=True)
    assert table != synthetic_table({("encoder", "self"): [2], ("decoder", "cross"): [2]}, seed=1)
    assert table != synthetic_table({("encoder", "self"): [2], ("decoder", "cross"): [2]}, model="other")
    assert table != 3
    for other in (copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert other == table


def test_to_pandas() -> None:
    table = synthetic_table({("decoder", "self"): [4, 2]}, groups=2, measures=9).sort("entropy")
    frame = table.to_pandas()
    assert list(frame.columns[:9]) == ["stack", "kind", "layer", "module", "call", "head", "kv_head", "d_k", "d_v"]
    assert list(frame.columns[9:12]) == ["entropy", "entropy_std", "entropy_rows"]
    assert len(frame) == 6
    assert frame["entropy"].is_monotonic_increasing
    assert frame["entropy"].tolist() == table["entropy"].tolist()
    assert frame["entropy_std"].tolist() == table.std("entropy").tolist()
    assert (frame["entropy_rows"] == 1013).all()
    assert frame["next_weight"].isna().all()
    assert (frame["next_weight_rows"] == 0).all()
    assert [(row.layer, row.head, row.kv_head) for row in frame.itertuples()] == [
        (row.layer, row.head, row.kv_head) for row in table
    ]
    assert (table.to_pandas("special")["entropy_rows"] == 29).all()


def test_text_html_and_rich() -> None:
    table = synthetic_table({("encoder", "self"): [12] * 2}, model="a<b>&c [bold]", measures=10)
    text = repr(table)
    assert text.startswith(
        "HeadTable of a<b>&c [bold]: 24 heads at 2 sites (encoder self: 24), 10 measures, 1,013 token"
    )
    assert "... and 14 more heads, 6 more measures" in text
    assert max(len(line) for line in text.splitlines()[1:]) <= 120
    html = table._repr_html_()
    assert "a&lt;b&gt;&amp;c" in html
    assert "<b>" not in html
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    console.file.close()
    printed = console.export_text()
    assert "[bold]" in printed
    assert "4 more heads, 4 more measures" in printed


def test_an_empty_selection_still_prints() -> None:
    table = synthetic_table().select(where=lambda row: False)
    assert "0 heads at 0 sites (none)" in repr(table)
    assert table._repr_html_()
    assert table.__rich__()
    assert len(table.to_pandas()) == 0


def test_a_shared_block_gives_every_call_its_own_heads() -> None:
    block = Block("attention", 3, 3, 5, 5, (0, 1, 2))
    sites = tuple(Site(SiteKey("encoder", "self", "attention", call), "attention", call, False) for call in range(4))
    table = HeadTable.build(
        HeadLayout(sites, {"attention": block}), {"entropy": INFO}, {("entropy", "token"): Moments.of([range(12)])}
    )
    assert len(table) == 12
    assert table.matrix("entropy")[3].tolist() == [9.0, 10.0, 11.0]
    assert str(table.heads[11]) == "attention@3:2"
