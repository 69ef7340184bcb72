"""The reference pages as a browser shows them: headless Chromium, which can reach this machine and nothing else."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx2
import pytest
from websockets.sync.client import ClientConnection, connect

from marketplace.operations import TABLE

if TYPE_CHECKING:
    from tests.marketplace.http.conftest import Site

ROW = next(row for row in TABLE if row.name == "auth.login")
READY = """
new Promise((resolve) => {
  const all = (root) => [...root.querySelectorAll("*")].flatMap((e) => e.shadowRoot ? [e, ...all(e.shadowRoot)] : [e]);
  const text = (e) => e.textContent.replace(/\\u200b/g, "").trim();  // pages put these where a line may break
  const wanted = %s;
  const look = () => {
    const found = all(document).find((e) => text(e) === wanted && e.getBoundingClientRect().height > 0);
    found ? resolve(text(found)) : setTimeout(look, 50);
  };
  look();
  setTimeout(() => resolve(document.documentElement.outerHTML.slice(0, 500)), 15000);
})
"""
"""Waits until an element that takes up room holds a text, in shadow trees too, and returns the text."""


class Page:
    """One tab of a browser, driven over the DevTools protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        for domain in ("Network", "Runtime", "Log", "Page"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> Any:
        """Give a command and wait for its result, noting what happens meanwhile."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=20))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message["method"], message["params"])

    def _note(self, event: str, params: Any) -> None:
        if event == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif event == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(params["exceptionDetails"])[:500])

    def evaluate(self, script: str) -> Any:
        """The value of a script, awaited."""
        result = self.do("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the DevTools of a headless Chromium."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.fail("Chromium is not installed (Debian: apt-get install chromium)")
    profile = tmp_path_factory.mktemp("browser")
    process = subprocess.Popen(
        [
            program,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
            "--remote-debugging-port=0",
            "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("DevTools listening on "):
                yield f"http://{urlsplit(line.split()[-1]).netloc}"
                break
        else:
            pytest.fail("Chromium did not start")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        process.stderr and process.stderr.close()


@pytest.fixture
def page(browser: str) -> Iterator[Page]:
    """A new tab."""
    target = httpx2.put(f"{browser}/json/new?about:blank", verify=False, trust_env=False).json()
    with connect(target["webSocketDebuggerUrl"], proxy=None, max_size=None, close_timeout=1) as socket:
        yield Page(socket)


@pytest.mark.parametrize("path", ["/swagger-ui", "/rapidoc"])
def test_a_page_shows_the_operations_and_asks_nobody_else(site: Site, page: Page, path: str) -> None:
    page.do("Page.navigate", url=site.url(path))
    assert page.evaluate(READY % json.dumps(ROW.path)) == ROW.path
    assert page.evaluate(READY % json.dumps(ROW.summary)) == ROW.summary
    if path == "/swagger-ui":
        assert page.evaluate(READY % json.dumps(ROW.name)) == ROW.name
    schemes = {urlsplit(url).scheme for url in page.requested}
    asked = {urlsplit(url).netloc for url in page.requested if url.startswith(("http:", "https:", "ws:", "wss:"))}
    assert schemes <= {"http", "data", "blob"} and asked == {f"127.0.0.1:{site.port}"}
    assert {urlsplit(url).path for url in page.requested} >= {path, "/api/openapi.json"}
    assert [text for text in page.complaints if "favicon" not in text] == []


def test_a_page_could_not_ask_anybody_else(site: Site, page: Page) -> None:
    page.do("Page.navigate", url=site.url("/rapidoc"))
    page.evaluate(READY % json.dumps(ROW.path))
    policy = "new Promise((r) => document.addEventListener('securitypolicyviolation', (e) => r(e.effectiveDirective)))"
    element = "document.head.appendChild(document.createElement('script'))"
    for script, directive in {
        "fetch('http://127.0.0.1:1/').catch(() => 0)": "connect-src",
        f"{element}.src = 'http://127.0.0.1:1/x.js'": "script-src-elem",
        f"{element}.text = 'window.ours = 1'": "script-src-elem",
    }.items():
        assert page.evaluate(f"(() => {{ const seen = {policy}; {script}; return seen; }})()") == directive
    assert page.evaluate("window.ours") is None
