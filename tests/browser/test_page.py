"""The page of inspect-drift: in a real browser it shows, sorts and answers to keys; nothing in its data runs."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from inspections import make_inspection as make_plain_inspection

from featcal_cli.reporting.html_page import TEMPLATE, write_page
from featcal_cli.reporting.report import BlockDrift, Inspection, ModelDrift, OutputDrift, PlaceDrift, TaskInspection

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Dialog, Locator, Page

SCRIPT, IMAGE = "</script><script>alert(1)</script>", "<img src=x onerror=alert(2)> \"'&<!--"
TASKS = ["cars", SCRIPT, IMAGE, "__proto__", "مهمة\u202e10"]
BLOCKS = [f"encoder.layers.{number}" for number in range(4)]
LAST = {"model": [0.5, 0.9, 0.3, 0.7, 0.1], "other": [0.4, 0.2, 0.35, 0.6, 0.05], "base": [0.6, 0.6, 0.6, 0.6, 0.6]}
"""Relative drift after the last block, in the order of TASKS: on two of them the model is farther than the base."""
FIRST = (
    "Outputs of user/mended are 36 % nearer to the experts' than those of user/merged "
    "(mean distance of outputs 0.160 against 0.250)"
)
"""The page's heading: the first sentence of the verdict."""


def model_drift(last: float, blocks: list[str]) -> ModelDrift:
    """Drift that grows evenly to `last`, and jumps by half of it in the third block."""
    rising = [last * share for share in (0.1, 0.2, 0.8, 1.0)][-len(blocks) :]
    output = OutputDrift("logits", last / 2, last / 4, 1 - last / 2)
    stem = PlaceDrift(0.1, 0.01, 0.999)
    shares = [0.5, -0.25, 0.5, 0.125][-len(blocks) :]
    places = [PlaceDrift(10 * e, e, 1 - e / 2, 0.4 * e, 0.8 * e) for e in rising]
    drifts = [BlockDrift(*block) for block in zip(blocks, places, shares, strict=True)]
    return ModelDrift(stem, drifts, output, 1 - sum(shares))


def make_inspection(compare: bool = True) -> Inspection:
    """Five tasks with names to be afraid of, through four blocks; the examples of the last skip the first block."""
    roles = ["model", "base", "other"] if compare else ["model", "base"]
    tasks = {
        task: TaskInspection(64, {role: model_drift(LAST[role][i], BLOCKS[task == TASKS[-1] :]) for role in roles})
        for i, task in enumerate(TASKS)
    }
    names = {"model": "user/merged", "base": "user/base", **({"other": "user/mended"} if compare else {})}
    names |= {f"expert {task}": f"user/expert-{number}" for number, task in enumerate(TASKS)}
    facts = ({"merged": "user/merged"}, {"device": "cpu", "torch": "2.13"}, {"seconds": 12.0})
    return Inspection("0.1.0", names, tasks, ["<b>a note<!--"], *facts)


def test_the_page_is_one_small_file_that_names_no_other() -> None:
    page = write_page(make_inspection())
    assert TEMPLATE.stat().st_size < 42_000
    assert page == write_page(make_inspection())
    assert not re.findall(r"(?:src|href)=(?!\"data:,\")|@import|url\(", page.partition('id="data"')[0])
    assert page.count("<script") == 2
    assert page.count("://") == page.count("http://www.w3.org/2000/svg") == 1
    assert "{{" not in page.partition('id="data"')[0]


def test_notes_that_say_the_same_of_several_tasks_are_one() -> None:
    notes = [f"{task}: column text, tokenizer from its expert" for task in TASKS[:2]]
    page = write_page(replace(make_inspection(), notes=notes))
    assert page.count("column text, tokenizer from its expert") == 1


def test_figures_that_are_no_numbers_and_secrets_stay_out() -> None:
    inspection = make_inspection(compare=False)
    cars = inspection.tasks["cars"].models
    cars["model"] = replace(cars["model"], output=None, outside=math.nan)
    inspection.names["model"] = "/home/somebody/merged"
    page = write_page(replace(inspection, notes=["hf_" + "a" * 34]))
    assert "NaN" not in page.partition('id="data"')[2].partition("</script>")[0]
    assert "somebody" not in page
    assert "a" * 34 not in page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine (on Debian: apt-get install chromium)")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens a written page; at the end nothing may have been asked for, gone wrong, or popped up."""
    complaints: list[str] = []
    contexts: list[BrowserContext] = []

    def dismiss(dialog: Dialog) -> None:
        complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def open_page(inspection: Inspection, width: int = 1400) -> Page:
        (file := tmp_path / "page.html").write_text(write_page(inspection), encoding="utf-8")
        contexts.append(context := browser.new_context(viewport={"width": width, "height": 900}, color_scheme="light"))
        page = context.new_page()
        page.set_default_timeout(5000)
        page.on("console", lambda said: complaints.append(f"console {said.type}: {said.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("dialog", dismiss)
        page.on("request", lambda asked: complaints.extend({asked.url} - {file.as_uri(), "data:,"}))
        page.goto(file.as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


Open = Callable[..., "Page"]


@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("compare", [True, False])
def test_axe_finds_nothing_that_keeps_anybody_out(opened: Open, compare: bool, width: int, colours: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = opened(make_inspection(compare), width)
    page.emulate_media(color_scheme=colours)
    page.evaluate("document.querySelectorAll('details').forEach(part => { part.open = true })")
    found = axe.run(page).response
    assert [(fault["id"], fault["nodes"][0]["html"]) for fault in found["violations"]] == []
    assert len(found["passes"]) > 40


@pytest.mark.parametrize("compare", [True, False])
def test_it_prints_on_two_pages(opened: Open, compare: bool) -> None:
    """As many tasks and blocks as the CLIP recipes with eight experts have."""
    printed = opened(make_plain_inspection([f"task{n}" for n in range(8)], 12, compare=compare)).pdf(format="A4")
    assert len(re.findall(rb"/Type\s*/Page\b", printed)) == 2


def cell(page: Page, task: int, block: int, role: str = "model") -> Locator:
    return page.locator(f"[data-map={role}] [data-cell='{task},{block}']")


def order(page: Page) -> list[int]:
    """The tasks' numbers, as the table shows them from top to bottom."""
    return [int(row.get_attribute("data-row") or "") for row in page.locator("#tasks tbody tr").all()]


@pytest.mark.parametrize("compare", [True, False])
def test_every_map_has_a_cell_for_every_task_and_block(opened: Open, compare: bool) -> None:
    page = opened(make_inspection(compare))
    maps = ["model", "other", "change"] if compare else ["model", "base"]
    assert [grid.get_attribute("data-map") for grid in page.locator("[data-map]").all()] == maps
    page.get_by_role("checkbox", name="base model").check()
    for role in {*maps, "base"}:
        assert page.locator(f"[data-map={role}] [data-cell]").count() == (len(TASKS) + 1) * len(BLOCKS)
        shown = f"{LAST[role][0]:.2f}" if role != "change" else "−0.10"
        assert cell(page, 0, 3, role).inner_text() == shown
    assert cell(page, len(TASKS), 3).inner_text() == f"{sum(LAST['model']) / len(TASKS):.2f}"
    label = f"{TASKS[1]}, encoder.layers.3: 0.90, farther than the base model (0.60)"
    assert cell(page, 1, 3).get_attribute("aria-label") == label
    assert cell(page, 4, 0).get_attribute("aria-label") == "مهمة10, encoder.layers.0: not reached"


@pytest.mark.parametrize(
    ("drifts", "shown"),
    [
        ((0.734, 0.678), ["0.73", "0.68", "−0.05"]),
        ((0.0712, 0.0748), ["0.071", "0.075", "+0.004"]),
        ((0.0982, 0.121), ["0.098", "0.12", "+0.02"]),
        ((1234.0, 120.4), ["1.23e+3", "120", "−1110"]),
        ((0.5012, 0.4991), ["0.50", "0.50", "0.00"]),
    ],
)
def test_a_difference_is_that_of_the_cells(opened: Open, drifts: tuple[float, float], shown: list[str]) -> None:
    models = {role: model_drift(last, BLOCKS) for role, last in zip(("model", "other"), drifts, strict=True)}
    page = opened(replace(make_inspection(), tasks={"cars": TaskInspection(64, models)}))
    assert [cell(page, 0, 3, role).inner_text() for role in ("model", "other", "change")] == shown


def test_what_was_not_measured_is_a_dash_and_what_no_task_has_is_no_column(opened: Open) -> None:
    inspection = make_inspection()
    for task in inspection.tasks.values():
        for role, model in task.models.items():
            task.models[role] = replace(model, output=OutputDrift("features", 0.5))
    cars = inspection.tasks["cars"].models
    broken = [replace(block, drift=replace(block.drift, relative=math.nan)) for block in cars["model"].blocks]
    cars["model"] = replace(cars["model"], blocks=broken, output=None)
    page = opened(inspection)
    heads = page.locator("#tasks thead tr").first.locator("th").all_inner_texts()
    assert heads == ["Drift", "Cosine", "Output drift"]
    assert page.locator("#tasks tbody tr").first.locator("td").all_inner_texts()[:4] == ["–", "0.40", "0.60", "–"]
    assert "not reached" not in (cell(page, 0, 1).get_attribute("aria-label") or "")


def test_the_table_sorts_by_click_and_by_keyboard(opened: Open) -> None:
    page = opened(make_inspection())
    assert order(page) == [0, 1, 2, 3, 4]
    assert page.locator("[aria-sort]").count() == 0
    drift = page.get_by_role("button", name="Drift of user/merged: sort", exact=True)
    drift.click()
    assert order(page) == [1, 3, 0, 2, 4]
    assert page.locator("[aria-sort]").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert order(page) == [4, 2, 0, 3, 1]
    assert page.locator("[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert order(page) == [3, 0, 2, 1, 4]
    assert page.locator("[aria-sort]").inner_text().strip() == "B"


def test_pointing_and_going_there_show_the_curves_of_that_task_until_one_is_pinned(opened: Open) -> None:
    page = opened(make_inspection())
    title, figures = page.locator("#curves-title"), page.locator("[data-curves=model] p")
    assert title.inner_text() == "mean of 5 tasks over depth, at encoder.layers.3"
    cell(page, 1, 2).hover()
    assert title.inner_text() == f"{TASKS[1]} over depth, at encoder.layers.2"
    assert figures.inner_text() == "drift 0.72: local 0.29, inherited 0.58; cosine 0.64"
    for role in ("model", "other"):
        chart = page.locator(f"[data-curves={role}]")
        lines = {line.get_attribute("data-line") for line in chart.locator("[data-line]").all()}
        assert lines == {"e", "m", "p", "base"}
        height = chart.locator(".dot.e").evaluate("dot => Number(dot.getAttribute('cy'))")
        assert height < chart.locator(".dot.m").evaluate("dot => Number(dot.getAttribute('cy'))")
    steep = page.locator("[data-curves=model] [data-line=e]").get_attribute("d")
    page.locator("[data-map=other] tbody th").nth(2).hover()
    assert title.inner_text().startswith(f"{TASKS[2]} over depth")
    assert page.locator("[data-curves=model] [data-line=e]").get_attribute("d") != steep
    cell(page, 3, 1).focus()
    assert title.inner_text().startswith(f"{TASKS[3]} over depth")
    page.keyboard.press("Enter")
    cell(page, 0, 0).hover()
    assert title.inner_text() == f"{TASKS[3]} over depth, at encoder.layers.1 (pinned)"
    assert cell(page, 3, 1).get_attribute("aria-selected") == "true"
    page.keyboard.press("Escape")
    cell(page, 0, 1).hover()
    assert title.inner_text() == "cars over depth, at encoder.layers.1"


def test_shares_are_those_of_the_task_that_is_shown(opened: Open) -> None:
    page = opened(make_inspection())
    title, figure = page.locator("#ends-title"), page.locator("[data-ends=model]")
    assert title.inner_text() == "The final drift: mean of 5 tasks"
    cell(page, 0, 3).hover()
    assert title.inner_text() == "The final drift: cars"
    shares = figure.get_by_role("img").first.get_attribute("aria-label") or ""
    assert shares.startswith("A: outside 13 %, encoder.layers.0 50 %, encoder.layers.1 -25 %")
    heights = [float(bar.get_attribute("height") or "") for bar in figure.locator("rect").all()]
    assert heights[1] == pytest.approx(2 * heights[2]) and heights[1] == pytest.approx(4 * heights[4])
    assert figure.locator("rect.m").count() == 1
    cell(page, 4, 3).hover()
    assert title.inner_text().startswith("The final drift: م")
    assert figure.locator("rect").count() == 4  # its examples skip the first block


def test_one_stop_of_tab_leads_into_a_map_and_the_arrows_lead_through_it(opened: Open) -> None:
    page = opened(make_inspection())
    page.get_by_role("checkbox", name="base model").focus()
    where = "() => document.activeElement.closest('[data-map]').dataset.map + ' ' + document.activeElement.dataset.cell"
    page.keyboard.press("Tab")
    seen = [page.evaluate(where)]
    ways = ["Down", "Left", "Up", "Up"]
    for key in (*(f"Arrow{way}" for way in ways), "Home", "ArrowLeft", "Control+End", "ArrowRight", "Tab"):
        page.keyboard.press(key)
        seen.append(page.evaluate(where))
    cells = ["5,3", "5,3", "5,2", "4,2", "3,2", "3,0", "3,0", "5,3", "5,3"]
    assert seen == [*(f"model {cell}" for cell in cells), "other 5,3"]
    assert page.locator("[data-cell][tabindex='0']").count() == 3
    assert page.locator("#tasks tfoot th").inner_text() == "mean"


def test_names_are_shown_as_they_are_and_nothing_of_them_runs(opened: Open) -> None:
    page = opened(make_inspection())
    shown = page.locator("#tasks tbody th").all_inner_texts()
    assert shown == [*TASKS[:4], TASKS[4].replace("\u202e", "")]
    assert page.locator("#notes p").inner_text() == "<b>a note<!--"
    assert page.locator("img, body script:not(#data)").count() == 1
    cell(page, 2, 2).click()
    assert TASKS[2] in page.locator("#curves-title").inner_text()


def test_the_policy_lets_nothing_else_run_or_be_fetched(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(write_page(make_inspection()), encoding="utf-8")
    page = browser.new_page()
    page.goto((tmp_path / "page.html").as_uri())
    blocked = page.evaluate(
        """async () => {
            const blocked = [];
            document.addEventListener("securitypolicyviolation", (event) => blocked.push(event.effectiveDirective));
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script);
            document.body.insertAdjacentHTML("beforeend", "<b style='color: red' onclick='window.ran = true'></b>");
            document.querySelector("body > b").click();
            await fetch("https://example.invalid/").catch(() => null);
            await new Promise((resolve) => setTimeout(resolve, 50));
            return [window.ran === undefined, [...new Set(blocked)].sort()];
        }"""
    )
    assert blocked == [True, ["connect-src", "script-src-attr", "script-src-elem", "style-src-attr"]]
    page.close()


@pytest.mark.parametrize("width", [400, 1400])
def test_it_fits_its_window_and_everything_in_it_has_a_name(opened: Open, width: int) -> None:
    page = opened(make_inspection(), width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for role, name in [
        ("heading", re.sub(r"(user/\w+)", "\u2068\\1\u2069", FIRST)), ("grid", "A user/merged"),
        ("grid", "B user/mended"), ("checkbox", "A user/merged"), ("region", "Every task, after the last block"),
        ("columnheader", "encoder.layers.2"), ("gridcell", "cars, encoder.layers.3: 0.50"),
        ("img", "A on mean: drift, local and inherited, after each block"),
    ]:  # fmt: skip
        assert page.get_by_role(role, name=name, exact=True).first.is_visible(), (role, name)  # type: ignore[arg-type]
    tree = page.locator("body").aria_snapshot()
    assert not re.findall(r"- (?:button|checkbox|grid|gridcell|img|region|table)(?=$|:| \[)", tree)
