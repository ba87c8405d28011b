"""A real service, a real Chromium, and pages that fail a test if they log an error or ask another host for anything."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.bundles import memory_mean, relu_ffn, sequence_mean, write_bundle
from tests.e2e.server import Server, serving

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Route

D, D_MEMORY = 16, 6
WIDE = {"width": 1200, "height": 900}
NAMES = ("chromium", "chromium-browser", "google-chrome")


class Opener(Protocol):
    """Opens the console in a page of its own."""

    def __call__(self, server: Server, *, log: list[str] | None = None, **context: Any) -> Page:
        """`log` gets what the page logs as errors, which fail the test otherwise."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_bundle(root, "ffn", relu_ffn(D, 4 * D))
    write_bundle(root, "mean", sequence_mean(D))
    write_bundle(root, "memory", memory_mean(D, D_MEMORY))
    return root


@pytest.fixture(scope="session")
def server(models: Path) -> Iterator[Server]:
    with serving(models, "--threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright  # not above: without it, these tests are skipped where they begin

    with sync_playwright() as playwright:
        # As root, as in a container, Chromium has no sandbox; it opens nothing but this service.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_console(browser: Browser) -> Iterator[Opener]:
    errors: list[str] = []
    elsewhere: list[str] = []
    contexts = []

    def opened(server: Server, *, log: list[str] | None = None, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        page = context.new_page()
        own = f"127.0.0.1:{server.port}"

        def let(route: Route) -> None:
            if urlsplit(route.request.url).netloc == own:
                route.continue_()
            else:
                elsewhere.append(route.request.url)
                route.abort()

        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                (errors if log is None else log).append(message.text)

        context.route("**/*", let)
        page.on("console", heard)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://{own}/")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert errors == []
    assert elsewhere == []


@contextmanager
def load(server: Server, model: str, d: int, clients: int = 6, most: int = 12) -> Iterator[None]:
    """Clients that each ask for 1 to `most` tokens, again and again."""
    over = threading.Event()
    faults: list[BaseException] = []

    def ask(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            while not over.is_set():
                rows = int(rng.integers(1, most + 1))
                server.infer(model, rng.standard_normal((rows, d), dtype=np.float32))
        except Exception as fault:  # noqa: BLE001 - whatever it is, it fails the test
            faults.append(fault)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not faults
