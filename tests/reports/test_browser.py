"""The page in Chromium: nothing is fetched, every head is there, numbers are right, names are inert."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise import artifacts
from headwise.heads import HeadTable
from headwise.reports import write_report
from tests.tables import synthetic_run, synthetic_table

pytestmark = pytest.mark.browser

EVIL = "</script><img src=x onerror=document.title='owned'><b>&amp;{{7*7}}"
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """The browser that HEADWISE_CHROMIUM names, or one on the path."""
    named = os.environ.get("HEADWISE_CHROMIUM")
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return named or next((found for found in map(shutil.which, names) if found), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    binary = chromium()
    if binary is None:
        pytest.skip("NO CHROMIUM FOUND: the report was not tested in a browser; install it or set HEADWISE_CHROMIUM")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=binary, args=ARGUMENTS)
        yield started
        started.close()


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, browser: Any, folder: Path, table: HeadTable, **options: Any) -> None:
        facts = options.pop("facts", {})
        artifacts.write_run(folder, synthetic_run(table, **facts), table, report=write_report)
        self.table = table
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
        self.context.set_default_timeout(10_000)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.url = (folder / "report.html").as_uri()
        self.page.goto(self.url)
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=30_000)

    def close(self) -> None:
        """Close it, after checking that it was quiet and fetched nothing."""
        self.context.close()
        assert self.said == []
        assert [url for url in self.asked if not url.startswith("data:")] == [self.url]


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    pages: list[Opened] = []

    def make(table: HeadTable, **options: Any) -> Opened:
        pages.append(Opened(browser, tmp_path / f"run{len(pages)}", table, **options))
        return pages[-1]

    yield make
    for page in pages:
        page.close()


ENCODER_DECODER = {("encoder", "self"): [3, 2], ("decoder", "self"): [3, 3], ("decoder", "cross"): [2, 3]}


def cell(page: Any, at: int) -> Any:
    return page.locator(f'#maps .cell[data-at="{at}"]')


def ids(page: Any) -> list[int]:
    return [int(at) for at in page.eval_on_selector_all(".heads tbody tr", "rows => rows.map(r => r.dataset.at)")]


def test_every_head_is_present_in_map_and_table(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    assert page.locator("#maps .map").count() == 3
    assert page.locator("#maps .cell").count() == 16
    assert ids(page) == list(range(16))
    assert page.locator("#shown").text_content() == "16 of 16 heads"
    assert page.locator("#thumbnails .thumb").count() == 10
    marks = page.eval_on_selector_all("#maps .cell", "cells => cells.map(c => c.getAttribute('aria-label'))")
    assert marks[15].startswith("decoder cross, layer 1, head 2: ")


def test_hover_shows_the_exact_number(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    for at in (0, 4, 15):
        cell(page, at).hover()
        tip = page.locator("#tip")
        assert tip.is_visible()
        assert tip.locator(".exact").text_content() == f"exactly {table['entropy'][at]!r}".replace(
            "np.float64(", ""
        ).rstrip(")")
        assert tip.locator(".value").text_content().endswith(" nats")
        assert tip.locator(".std").text_content().endswith("over 1,013 rows")
        assert table.heads[at].site.module in tip.text_content()
    page.locator("h1").hover()
    assert page.locator("#tip").is_hidden()


def test_colours_follow_the_values(opened: Any) -> None:
    table = synthetic_table({("encoder", "self"): [5, 7]})
    page = opened(table).page
    fills = page.eval_on_selector_all("#maps .cell", "cells => cells.map(c => c.getAttribute('fill'))")
    order = np.argsort(table["entropy"])
    assert fills[order[0]] == "#440154"  # viridis begins
    assert fills[order[-1]] == "#fde725"  # and ends
    legend = page.locator("#legend").text_content()
    assert "Entropy (nats)" in legend


def test_choosing_a_measure(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    page.locator('.thumb[data-measure="max_weight"]').click()
    assert page.locator("#map-title").text_content() == "Max weight"
    about = page.locator("#measure-about").text_content()
    assert about == "Largest weight of the row. Unit: weight. Range: 0 to 1. Source: Voita et al. 2019."
    cell(page, 3).hover()
    assert str(float(table["max_weight"][3])) in page.locator("#tip .exact").text_content()
    # Colours over the measure's whole range.
    before = cell(page, 3).get_attribute("fill")
    page.locator("#full-range input").check()
    assert cell(page, 3).get_attribute("fill") != before
    page.keyboard.press("Tab")
    page.locator('.thumb[data-measure="max_weight"]').focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#map-title").text_content() == "Previous weight"
    assert page.locator('.thumb[aria-checked="true"]').get_attribute("data-measure") == "previous_weight"


def test_missing_values_say_why(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    page.locator('.thumb[data-measure="distance"]').click()
    reason = page.locator('.map[data-group="2"] .reason').text_content()
    assert reason == "Distance does not apply here: keys and queries are positions of different sequences"
    assert page.locator("#maps .cell").count() == 11
    page.locator('.thumb[data-measure="next_weight"]').click()
    assert cell(page, 5).get_attribute("fill") == "url(#hatch-1)"
    assert "no value" in page.locator("#legend").text_content()
    cell(page, 5).hover()
    assert "no rows" in page.locator("#tip").text_content()
    assert page.locator('.heads tr[data-at="15"] td.missing').first.get_attribute("title").startswith("does not apply")


@pytest.mark.parametrize("by", ["click", "Enter", "Space"])
def test_sorting(by: str, opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    header = page.locator(".heads thead th").filter(has_text="Distance").locator("button")
    page.evaluate("() => { window.sorted = 0; document.addEventListener('sort-end', () => { window.sorted += 1; }); }")

    def press() -> None:
        if by == "click":
            header.click()
        else:
            header.focus()
            page.keyboard.press(by)

    for times, descending in enumerate((False, True), start=1):
        press()
        page.wait_for_function("times => window.sorted === times", arg=times)
        direction = "descending" if descending else "ascending"
        assert page.locator(".heads th[aria-sort]").get_attribute("aria-sort") == direction
        shown = [table.heads[at] for at in ids(page)]
        expected = table.sort("distance", descending)
        there = int((~np.isnan(expected["distance"])).sum())
        assert shown[:there] == list(expected.heads[:there])
        assert set(shown[there:]) == set(expected.heads[there:])  # missing values last


def test_filters(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page

    def shown() -> list[int]:
        rows = page.eval_on_selector_all(
            ".heads tbody tr", "rows => rows.filter(r => !r.hidden).map(r => Number(r.dataset.at))"
        )
        return list(rows)

    page.locator("#filters select[name=layer]").select_option("1")
    assert [table.heads[at] for at in shown()] == list(table.select(layer=1).heads)
    page.locator("#filters select[name=group]").select_option("1")
    assert [table.heads[at] for at in shown()] == list(table.select(layer=1, stack="decoder", kind="self").heads)
    page.locator("#filters input[name=text]").fill("CROSS")
    assert shown() == []
    page.locator("#filters select[name=group]").select_option("")
    assert [table.heads[at] for at in shown()] == list(table.select(layer=1, kind="cross").heads)
    assert page.locator("#shown").text_content() == "3 of 16 heads"


def test_map_table_and_card_are_linked(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    cell(page, 7).click()
    assert page.locator('.heads tr[aria-selected="true"]').get_attribute("data-at") == "7"
    assert page.locator("#card h3").text_content() == "Layer 0, head 2"
    assert page.locator("#maps .ring").count() == 1
    line = page.locator('#card tr[data-measure="own_weight"] td')
    assert line.get_attribute("title") == f"exactly {float(table['own_weight'][7])}, 1,013 rows"
    # Filtered away, the row comes back when asked for.
    page.locator("#filters select[name=layer]").select_option("1")
    page.locator("#card .button").click()
    assert page.locator('.heads tr[data-at="7"]').is_visible()
    assert page.evaluate("document.activeElement.closest('tr').dataset.at") == "7"
    # From the table back to the map.
    page.locator('.heads tr[data-at="12"] .pick').press("Enter")
    assert cell(page, 12).get_attribute("aria-pressed") == "true"
    assert cell(page, 7).get_attribute("aria-pressed") == "false"
    # It stays chosen when the measure changes.
    page.locator('.thumb[data-measure="z_norm"]').click()
    assert cell(page, 12).get_attribute("aria-pressed") == "true"


def test_keyboard_walks_the_map(opened: Any) -> None:
    table = synthetic_table({("encoder", "self"): [3, 2, 3]})
    page = opened(table).page
    assert page.locator('#maps .cell[tabindex="0"]').count() == 1
    cell(page, 0).focus()
    focused = lambda: int(page.evaluate("document.activeElement.dataset.at"))  # noqa: E731
    for key, expected in [("ArrowRight", 1), ("ArrowRight", 2), ("ArrowRight", 2), ("ArrowDown", 2), ("ArrowLeft", 1),
                          ("ArrowDown", 4), ("ArrowDown", 6), ("End", 7), ("Home", 5), ("ArrowUp", 3)]:  # fmt: skip
        page.keyboard.press(key)
        assert focused() == expected
    assert page.locator("#tip .exact").text_content() == f"exactly {float(table['entropy'][3])}"
    page.keyboard.press("Enter")
    assert page.locator("#card h3").text_content() == "Layer 1, head 0"
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_special_rows_stand_apart(opened: Any) -> None:
    table = synthetic_table(ENCODER_DECODER)
    page = opened(table).page
    page.locator('.heads thead button:has-text("Entropy")').first.click()
    page.locator("#row-class input[value=special]").check()
    assert page.locator("#map-title").text_content() == "Entropy at special tokens"
    cell(page, 3).hover()
    assert page.locator("#tip .exact").text_content() == f"exactly {float(table.mean('entropy', 'special')[3])}"
    assert page.locator("#tip .std").text_content().endswith("over 29 special-token rows")
    first = list(table.heads).index(table.sort("entropy", rows="special").heads[0])
    page.wait_for_function(f"Number(document.querySelector('.heads tbody tr').dataset.at) === {first}")
    assert [table.heads[at] for at in ids(page)] == list(table.sort("entropy", rows="special").heads)


def test_distribution(opened: Any) -> None:
    table = synthetic_table({("encoder", "self"): [5, 7]})
    page = opened(table).page
    dots = ("#spread-plot .means circle", "dots => dots.map(d => Number(d.getAttribute('cy')))")
    about = page.locator("#spread-about").text_content()
    assert about.startswith("12 heads. Smallest ")
    assert page.locator("#spread-plot .means circle").count() == 12
    heights = page.eval_on_selector_all(*dots)
    assert heights == sorted(heights, reverse=True)  # larger values stand higher
    page.locator("#spread-plot").scroll_into_view_if_needed()
    box = page.locator("#spread-plot .means circle").nth(11).bounding_box()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + 1)
    best = int(np.argmax(table["entropy"]))
    assert page.locator('.heads tr[aria-selected="true"]').get_attribute("data-at") == str(best)
    page.locator("#spread-order input[value=layer]").check()
    again = page.eval_on_selector_all(*dots)
    assert np.argsort(again).tolist() == np.argsort(-table["entropy"]).tolist()


def test_hostile_names_are_inert(opened: Any) -> None:
    table = synthetic_table({("encoder", "self"): [2, 2]}, model=EVIL, prefix=EVIL + ".")
    page = opened(table, facts={"notes": [EVIL], "warnings": [EVIL], "arguments": {EVIL: EVIL}}).page
    assert page.title().startswith(EVIL)
    assert page.locator("h1").text_content() == EVIL
    cell(page, 1).hover()
    assert EVIL in page.locator("#tip").text_content()
    cell(page, 1).click()
    assert EVIL in page.locator("#card").text_content()
    page.locator("#filters input[name=text]").fill(EVIL)
    assert page.locator("#shown").text_content() == "4 of 4 heads"
    assert page.locator("img, b:has(img)").count() == 0
    assert page.title() != "owned"


def test_the_policy_stops_what_would_slip_through(browser: Any, tmp_path: Path) -> None:
    """The guard can act: an image with a handler and an inline script put into the file do nothing."""
    table = synthetic_table({("encoder", "self"): [2]})
    artifacts.write_run(tmp_path / "run", synthetic_run(table), table, report=write_report)
    file = tmp_path / "run" / "report.html"
    slipped = (
        "<h1><img src='http://127.0.0.1:9/x' onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    )
    file.write_text(file.read_text("utf-8").replace("<h1>", slipped), "utf-8")
    context = browser.new_context()
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]", state="attached")
    page.wait_for_timeout(200)
    assert page.title() != "owned"
    assert any("Content Security Policy" in line for line in said)
    context.close()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_readable_at_both_widths_in_both_schemes(width: int, scheme: str, opened: Any) -> None:
    table = synthetic_table({("decoder", "self"): [32] * 3}, groups=4)
    page = opened(table, viewport={"width": width, "height": 900}, color_scheme=scheme).page
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    background, ink = page.evaluate(
        "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
    )
    light = [sum(map(int, colour[4:-1].split(","))) for colour in (background, ink)]
    assert (light[0] > light[1]) == (scheme == "light")
    assert abs(light[0] - light[1]) > 400
    assert page.locator(".heads thead th").nth(3).text_content() == "KV head"
    wide = "all => all.filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
    clipped = page.eval_on_selector_all("h1, h2, h3, p, dt, dd, .thumb b", wide)
    assert clipped == []


def test_the_ten_columns_of_a_scan_fit_a_window_of_1280(opened: Any) -> None:
    page = opened(synthetic_table({("decoder", "self"): [4, 4]}, groups=2)).page
    inside, box = page.eval_on_selector("#table-box", "(box) => [box.scrollWidth, box.clientWidth]")
    assert inside <= box
    headers = page.locator(".heads thead button")
    assert all(one["x"] >= 0 and one["x"] + one["width"] <= 1280 for one in map(bounds, headers.all()))


def test_more_columns_can_be_reached_and_a_shadow_says_that_there_are_more(opened: Any) -> None:
    page = opened(
        synthetic_table({("decoder", "self"): [4, 4]}, measures=12), viewport={"width": 700, "height": 900}
    ).page
    last = page.locator(".heads thead button").last
    assert bounds(last)["x"] > 700
    assert "linear-gradient" in page.eval_on_selector("#table-box", "(box) => getComputedStyle(box).backgroundImage")
    page.eval_on_selector("#table-box", "(box) => { box.scrollLeft = box.scrollWidth; }")
    assert bounds(last)["x"] + bounds(last)["width"] <= 700


def bounds(locator: Any) -> dict[str, float]:
    found: dict[str, float] = locator.bounding_box()
    return found


def test_resizing_draws_again(opened: Any) -> None:
    page = opened(synthetic_table({("decoder", "self"): [12] * 2})).page
    wide = page.locator("#spread-plot svg").bounding_box()["width"]
    cell(page, 3).click()
    page.set_viewport_size({"width": 500, "height": 800})
    page.wait_for_function(f"document.querySelector('#spread-plot svg').getBoundingClientRect().width < {wide - 100}")
    assert cell(page, 3).get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.documentElement.scrollWidth") <= 500


def test_print_shows_the_whole_table_and_no_controls(opened: Any) -> None:
    page = opened(synthetic_table()).page
    page.emulate_media(media="print")
    assert page.locator("#filters label").first.is_hidden()
    box, inside = page.evaluate(
        "(() => { const b = document.getElementById('table-box'); return [b.clientHeight, b.scrollHeight]; })()"
    )
    assert box == inside
    assert page.pdf()[:5] == b"%PDF-"


def test_one_head_and_a_large_model(opened: Any) -> None:
    page = opened(synthetic_table({("decoder", "self"): [1]}, measures=1, special=False)).page
    assert page.locator("#maps .cell").count() == 1
    assert page.locator("#shown").text_content() == "1 of 1 head"
    large = opened(synthetic_table({("decoder", "self"): [64] * 48}, measures=12)).page
    assert large.locator("#maps .cell").count() == 3072
    assert large.locator(".heads tbody tr").count() == 3072
    assert large.evaluate("document.documentElement.scrollWidth") <= 1280


def test_without_scripts_the_facts_are_there(browser: Any, tmp_path: Path) -> None:
    table = synthetic_table()
    artifacts.write_run(tmp_path / "run", synthetic_run(table), table, report=write_report)
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((tmp_path / "run" / "report.html").as_uri())
    assert page.locator("noscript").is_visible()
    assert page.locator("#facts dd").filter(has_text="sha256:00ff").is_visible()
    context.close()
