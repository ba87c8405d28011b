"""The console as a person meets it, in headless Chromium."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

from tests.browser.conftest import D_MEMORY, D, Opener, load
from tests.bundles import leave_unmeasured, relu_ffn, write_bundle
from tests.e2e.server import Server, serving

pytest.importorskip("playwright.sync_api", reason="the extra `browser` is not installed")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parents[2]
KEY = "root-" + "r" * 16
PATIENCE_MS = 30_000  # other work may have the cores
expect.set_options(timeout=PATIENCE_MS)


def wait_until(page: Page, condition: str) -> None:
    """Wait for a condition in JavaScript, asked from outside: the page's policy forbids it to evaluate one itself."""
    until_s = time.monotonic() + PATIENCE_MS / 1000
    while not page.evaluate(condition):
        assert time.monotonic() < until_s, condition
        page.wait_for_timeout(50)


def tile(page: Page, name: str) -> float:
    return float(re.sub(r"[^\d.]", "", page.inner_text(f"#tile-{name}")) or 0)


def send(page: Page, model: str, lens: str, *, count: int = 1) -> None:
    page.select_option("#try-model", f"{model}/1")
    page.fill("#try-lens", lens)
    page.fill("#try-count", str(count))
    page.click("#try-send")
    page.wait_for_selector("#try-result:not([hidden])", timeout=PATIENCE_MS)


def test_it_shows_each_model_with_certificate_precision_shapes_and_state(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    expect(page.locator("#connection")).to_have_text("Live")
    expect(page.locator("#cards > li")).to_have_count(6)
    card = page.locator("#cards > li", has_text=re.compile("^memory, version 1"))
    for text in (
        "ready",
        "fp32, cpu",
        f"tokens [n, {D}]",
        f"memory [m, {D_MEMORY}]",
        f"out [n, {D}]",
        "Certificate: exact",
    ):
        expect(card).to_contain_text(text)
    card.locator("summary").click()
    expect(card).to_contain_text("Measured on 1 rows")
    page.wait_for_timeout(4500)  # two rounds of events about models
    assert card.locator("details").get_attribute("open") is not None, "what is open stays open"


def test_a_model_that_nobody_measured_says_so(tmp_path: Path, open_console: Opener) -> None:
    leave_unmeasured(write_bundle(tmp_path, "trial", relu_ffn(D, 4 * D)))
    with serving(tmp_path, "--threads", "1") as running:
        card = open_console(running).locator("#cards > li").first
        expect(card).to_contain_text("SQNR 200 dB, of a stand-in on the CPU")
        card.locator("summary").click()
        expect(card).to_contain_text("nobody has measured")
        expect(card).not_to_contain_text("undefined")
        expect(card).not_to_contain_text("Measured on")
        card.page.context.close()  # before its server: a stream that ends amidst is an error to the console


def test_windows_move_under_load_and_show_that_requests_share_them(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    expect(page.locator("#rows .empty")).to_be_visible()
    with load(server, "ffn", D):
        wait_until(page, "document.querySelectorAll('#rows tr').length >= 8")
        wait_until(page, "Number(document.querySelector('#tile-requests').textContent) > 1")
        wait_until(page, "[...document.querySelectorAll('#rows tr')].some((r) => Number(r.cells[0].textContent) > 1)")
        assert tile(page, "windows") > 0
        assert tile(page, "tokens") >= tile(page, "requests") > 1
        for row in page.query_selector_all("#rows tr")[:3]:
            cells = [cell.inner_text() for cell in row.query_selector_all("td")]
            paths = row.query_selector_all("svg path")
            drawn = sum((path.get_attribute("d") or "").count("M") for path in paths)
            assert drawn == int(cells[0]), "a block a request"
        page.click("#pause")
        expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
        text = page.text_content("#rows") or ""
        page.wait_for_timeout(1000)
        assert page.text_content("#rows") == text
        page.click("#pause")
        expect(page.locator("#rows")).not_to_have_text(text)
        expect(page.locator("#windows-said")).to_contain_text("requests and")


def test_the_last_minutes_have_charts_and_the_same_in_words(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    page.click("#samples summary")
    with load(server, "ffn", D, clients=2):
        server.ask("/v2/models/none")
        wait_until(
            page,
            "[...document.querySelectorAll('#sample-rows tr')].some((r) => parseFloat(r.cells[2].textContent) > 0)",
        )
        expect(page.locator("#reasons")).to_contain_text("not_found")
        wait_until(page, "/[1-9]/.test(document.querySelector('#chart-latency .legend b').textContent)")
    for name in ("throughput", "latency", "rejections"):
        box = page.locator(f"#chart-{name} canvas").bounding_box()
        assert box is not None
        assert box["width"] > 200
    ink = """() => { const c = document.querySelector('#chart-throughput canvas');
      return c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v > 0); }"""
    assert page.evaluate(ink), "something is drawn"
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(ink), "and drawn again in other colours"
    expect(page.locator("#chart-throughput canvas")).to_have_count(1)


def test_events_are_the_same_wherever_the_network_cuts_them(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    parsed = page.evaluate("""async () => {
      const { eventParser } = await import("/console/stream.js");
      const text = 'event: a\\ndata: {"x": "1: 2"}\\n\\nevent: b\\ndata: []\\n\\n';
      return Array.from({ length: text.length + 1 }, (_, cut) => {
        const parse = eventParser();
        return [...parse(text.slice(0, cut)), ...parse(text.slice(cut))];
      });
    }""")
    assert len(parsed) > 40
    assert all(events == [["a", {"x": "1: 2"}], ["b", []]] for events in parsed)


def test_a_page_that_nobody_sees_lets_its_stream_go_and_takes_it_up_again(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    expect(page.locator("#connection")).to_have_text("Live")
    page.clock.install()
    show = "(hidden) => { Object.defineProperty(document, 'hidden', { value: hidden, configurable: true });"
    show += " document.dispatchEvent(new Event('visibilitychange')); }"
    with page.expect_event("requestfailed") as ended:
        page.evaluate(show, True)
        page.clock.fast_forward(11_000)
    assert ended.value.url.endswith("/v2/console/events")
    with page.expect_request("**/v2/console/events"):
        page.evaluate(show, False)


def test_random_tokens_are_answered_and_the_bytes_shown_are_those_sent(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    with page.expect_request("**/infer") as asked:
        send(page, "mean", "2, 3")
    body = asked.value.post_data_buffer
    assert body is not None
    length = int(asked.value.headers["inference-header-content-length"])
    assert json.loads(body[:length])["inputs"][0]["shape"] == [5, D]
    expect(page.locator("#try-said")).to_contain_text("5 tokens answered in")
    expect(page.locator("#try-legend")).to_contain_text(re.compile(r"queue: .*ms.*compute: .*ms", re.DOTALL))
    lines = page.locator("#try-sent .hex tbody tr").all()
    shown = {}
    for line in lines:
        cells = [cell.inner_text() for cell in line.locator("td").all()]
        if len(cells) == 3:
            shown[int(cells[0], 16)] = (bytes.fromhex(cells[1]), cells[2])
    assert shown
    for offset, (data, _) in shown.items():
        assert body[offset : offset + len(data)] == data
    first = np.frombuffer(body[length : length + 16], "<f4")
    meaning = shown[length][1]
    assert [float(text) for text in meaning.split(":")[1].split()] == pytest.approx(first, rel=1e-3)
    assert shown[length + 5 * D * 4][1].split() == ["2", "3"], "seq_lens"


def test_pasted_tokens_get_the_answer_that_any_client_gets(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    tokens = np.random.default_rng().standard_normal((3, D), dtype=np.float32)
    page.check("input[value=pasted]")
    page.fill("#try-values", json.dumps(tokens.tolist()))
    send(page, "ffn", "3")
    rows = page.locator("#try-out tbody tr").all()
    shown = np.array([[float(cell.inner_text()) for cell in row.locator("td").all()] for row in rows])
    np.testing.assert_allclose(shown, server.infer("ffn", tokens)[:, : shown.shape[1]], rtol=1e-3, atol=1e-6)


def test_a_model_with_a_memory_can_be_tried(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    page.select_option("#try-model", "memory/1")
    page.fill("#try-memory", "4, 1")
    send(page, "memory", "2, 3")
    expect(page.locator("#try-sent")).to_contain_text(f"FP32 [5, {D_MEMORY}]")


def test_requests_at_once_are_summed_up(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    send(page, "ffn", "4", count=5)
    expect(page.locator("#try-said")).to_contain_text("5 requests answered; their windows held")


@pytest.mark.parametrize(
    ("lens", "values", "fault"),
    [
        ("0", None, "Tokens: expected whole numbers from 1"),
        ("2", "1 2 3", "Pasted: 3 numbers, expected 2 x"),
        ("2", "1 two", 'number 2 is "two"'),
    ],
)
def test_what_is_wrong_with_the_form_is_said(
    server: Server, open_console: Opener, lens: str, values: str | None, fault: str
) -> None:
    page = open_console(server)
    page.wait_for_selector("#try-model option", state="attached")
    page.select_option("#try-model", "ffn/1")
    page.fill("#try-lens", lens)
    if values is not None:
        page.check("input[value=pasted]")
        page.fill("#try-values", values)
    page.click("#try-send")
    expect(page.locator("[role=alert]")).to_contain_text(fault)


def test_the_service_s_own_refusal_is_shown(server: Server, open_console: Opener) -> None:
    log: list[str] = []
    page = open_console(server, log=log)
    page.select_option("#try-model", "ffn/1")
    page.fill("#try-lens", "200000")
    page.click("#try-send")
    expect(page.locator("[role=alert]")).to_contain_text("413")
    assert len(log) == 1, "what Chromium itself says of a 413"


def test_all_of_it_is_reached_and_used_with_the_keyboard_alone(server: Server, open_console: Opener) -> None:
    page = open_console(server)
    page.wait_for_selector("#cards summary")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    expect(page.locator(".skip")).to_be_in_viewport()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    met: list[str] = []
    opened = False
    while "try-lens" not in met:
        page.keyboard.press("Tab")
        met.append(
            page.evaluate(
                "document.activeElement.id || document.activeElement.className || document.activeElement.localName"
            )
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline == "solid", f"focus shows on {met[-1]}"
        if met[-1] == "summary" and not opened:
            page.keyboard.press("Enter")
            opened = True
        assert len(met) < 60, met
    assert page.locator("#samples").get_attribute("open") is not None
    assert {"pause", "scroll", "summary", "try-model"} <= set(met)
    page.keyboard.press("Control+A")
    page.keyboard.type("3")
    page.keyboard.press("Enter")
    expect(page.locator("#try-said")).to_contain_text("3 tokens answered")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_axe_finds_nothing_and_no_width_needs_sideways_scrolling(
    server: Server, open_console: Opener, scheme: str, width: int
) -> None:
    page = open_console(server, color_scheme=scheme, viewport={"width": width, "height": 800})
    with load(server, "ffn", D, clients=3):
        wait_until(page, "document.querySelectorAll('#rows tr').length >= 4")
    send(page, "mean", "2, 3")
    page.click("#samples summary")
    page.locator("#cards summary").first.click()
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#rows svg").first.bounding_box()
    assert box is not None
    assert box["width"] > 100, "the blocks stay large enough to be seen"
    channels = re.findall(r"\d+", page.evaluate("getComputedStyle(document.body).backgroundColor"))[:3]
    assert (max(map(int, channels)) < 60) == (scheme == "dark")


def test_where_keys_are_set_the_page_asks_for_one_and_uses_it(models: Path, open_console: Opener) -> None:
    keys = {"TOKENSLAB_ADMIN_KEYS": f"root:{KEY}", "TOKENSLAB_API_KEYS": "alice:" + "a" * 20}
    with serving(models, "--threads", "1", **keys) as server:
        log: list[str] = []
        page = open_console(server, log=log)
        dialog = page.locator("#key-dialog")
        expect(dialog).to_be_visible(timeout=PATIENCE_MS)
        expect(dialog).to_contain_text("no key")
        assert Axe().run(page).violations_count == 0
        page.keyboard.type("wrong-wrong-wrong-wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("not known here")
        page.fill("#key", KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#connection")).to_have_text("Live")
        send(page, "ffn", "2")
        assert KEY not in page.content()
        headers = {"X-API-Key": KEY, "Content-Type": "application/json"}
        assert server.ask("/v2/settings", b'{"max_wait_ms": 3}', headers, "PATCH")[0] == 200
        expect(page.locator("#server")).to_contain_text("windows wait 3 ms")
        assert server.ask("/v2/repository/models/ffn/unload", b"", headers)[0] == 200
        expect(page.locator("#cards > li", has_text=re.compile("^ffn, version 1"))).to_contain_text("unavailable")
        expect(page.locator("#try-model option", has_text="ffn,")).to_have_count(0)
        assert len(log) == 2, "what Chromium itself says of two refusals"


def test_a_page_whose_service_restarts_goes_on(models: Path, server: Server, open_console: Opener) -> None:
    log: list[str] = []
    with serving(models, "--threads", "1", "--drain-delay", "0.2") as first:
        page = open_console(first, log=log)
        expect(page.locator("#connection")).to_have_text("Live")
        port = first.port
        first.process.terminate()
        assert first.wait() == 0
        expect(page.locator("#connection")).to_contain_text("trying again")
    with serving(models, "--threads", "1", "--port", str(port)):
        expect(page.locator("#connection")).to_have_text("Live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_screenshots(open_console: Opener, tmp_path: Path, scheme: str) -> None:
    """Of the bundles that the repository ships, for the documents: kept where SHOTS says."""
    folder = Path(os.environ.get("SHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    with (
        serving(ROOT / "models", "--threads", "1", "--max-wait-ms", "2") as server,
        load(server, "demo-ffn", 64, 8, 40),
    ):
        page = open_console(server, log=[], color_scheme=scheme, viewport={"width": 1200, "height": 1180})
        wait_until(page, "document.querySelectorAll('#rows tr').length >= 16")
        page.wait_for_timeout(16_000)
        page.screenshot(path=folder / f"console-{scheme}.png")
        send(page, "demo-block", "2, 3", count=4)
        page.locator("#try").screenshot(path=folder / f"console-try-{scheme}.png")
        page.set_viewport_size({"width": 360, "height": 740})
        page.wait_for_timeout(1000)
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=folder / f"console-narrow-{scheme}.png")
    assert (folder / f"console-{scheme}.png").stat().st_size > 10_000
