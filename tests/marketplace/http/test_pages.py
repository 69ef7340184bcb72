"""The pages as a browser shows them: headless Chromium, which can reach this machine and nothing else."""

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

from marketplace.auth import email_tokens
from marketplace.http.pages import SITE
from marketplace.operations import TABLE
from marketplace.users import service as users

if TYPE_CHECKING:
    from marketplace.users.service import User
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

SAID = """
new Promise((resolve) => {
  const look = () => {
    const said = document.querySelector("[role=status]");
    const shown = said.getBoundingClientRect().height > 0;
    shown ? resolve(`${said.dataset.state} ${said.textContent}`) : setTimeout(look, 20);
  };
  look();
  setTimeout(() => resolve("nothing "), 15000);
})
"""
"""Waits until the page says how something ended."""


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

    def open(self, url: str) -> None:
        """Go to an address, and wait until the page is there with its scripts."""
        self.do("Page.navigate", url="about:blank")
        self.do("Page.navigate", url=url)
        loaded = "document.readyState === 'complete' && location.href !== 'about:blank'"
        assert self.evaluate(f"new Promise((r) => {{ const f = () => {loaded} ? r(1) : setTimeout(f, 20); f(); }})")

    def fill(self, **values: str) -> None:
        """Type into the fields of the form that is shown, and send it."""
        typed = "".join(f"put({json.dumps(name)}, {json.dumps(value)});" for name, value in values.items())
        self.evaluate(
            f"""(() => {{
              const form = [...document.forms].find((form) => !form.hidden);
              const put = (name, value) => {{
                const at = name === "again" ? "input:not([name])" : `input[name=${{name}}]`;
                form.querySelector(at).value = value;
              }};
              {typed}
              form.querySelector("button").click();
            }})()"""
        )

    def says(self) -> tuple[str, str]:
        """Whether it worked, and what the page says about it, once it says something."""
        state, _, text = self.evaluate(SAID).partition(" ")
        return state, text

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


def someone(site: Site, name: str) -> str:
    """The id of somebody who registered and has confirmed nothing; their address is NAME@example.com."""
    office = site.office
    office.wait(60)
    body = {"name": name, "email": f"{name}@example.com", "password": office.PASSWORD}
    assert office.ask("users.register", body, None).status == 200
    return person(site, name).id


def person(site: Site, name: str) -> User:
    """Somebody, by the name before the @."""
    with site.office.database.read() as unit:
        found = users.find_by_email(unit, f"{name}@example.com")
    assert found is not None
    return found


def token(site: Site, user_id: str, purpose: email_tokens.Purpose) -> str:
    """What the link in a mail to somebody holds."""
    office = site.office
    with office.database.write() as unit:
        return email_tokens.issue(unit, user_id, purpose, now=office.clock(), random=office.random)


def test_a_link_confirms_an_address_once(site: Site, page: Page) -> None:
    link = site.url(f"/verify-email#token={token(site, someone(site, 'lovelace'), 'verify')}")
    page.open(link)
    assert page.evaluate("location.href") == site.url("/verify-email"), "the token is not for the history"
    assert person(site, "lovelace").email_verified_at is None, "programs that open links confirm nothing"
    page.fill()
    assert page.says() == ("done", "Your address is confirmed. You can sign in now.")
    assert person(site, "lovelace").email_verified_at is not None
    assert page.complaints == []

    page.open(link)
    page.fill()
    state, text = page.says()
    assert (state, text.partition(",")[0]) == ("failed", "The link was used")
    page.fill(email="lovelace@example.com")
    assert page.evaluate(READY % json.dumps(MAILED)) == MAILED
    assert {urlsplit(url).netloc for url in page.requested if url.startswith("http")} == {f"127.0.0.1:{site.port}"}


MAILED = "If an account with this address waits for it, another mail is on its way."


def test_a_link_changes_a_password_once(site: Site, page: Page) -> None:
    grace = someone(site, "grace")
    link = site.url(f"/reset-password#token={token(site, grace, 'reset')}")
    page.open(link)
    page.fill(password="a new pass phrase", again="another one")
    assert page.says() == ("failed", "The two passwords are not the same.")
    page.fill(password="a new pass phrase", again="a new pass phrase")
    assert page.evaluate(READY % json.dumps(CHANGED)) == CHANGED
    assert page.complaints == []
    login = {"email": "grace@example.com", "password": "a new pass phrase"}
    assert site.office.ask("auth.login", login, None).status == 200
    assert site.office.ask("auth.login", {**login, "password": site.office.PASSWORD}, None).status == 401

    page.open(link)
    page.fill(password="a third pass phrase", again="a third pass phrase")
    state, text = page.says()
    assert (state, text.partition(",")[0]) == ("failed", "The link was used")
    assert site.office.ask("auth.login", login, None).status == 200


CHANGED = "Your password is changed, and every session was ended. You can sign in with it now."


def test_whoever_has_no_link_asks_for_one(site: Site, page: Page) -> None:
    page.open(site.url("/reset-password"))
    page.fill(email="nobody@example.com")
    assert page.says() == ("done", "If there is an account with this address, a mail with a link is on its way.")


def test_people_register_and_hear_why_not(site: Site, page: Page) -> None:
    site.office.wait(60)
    page.open(site.url("/register"))
    page.fill(name="Hopper", email="h..r@example.com", password="correct horse battery")
    state, text = page.says()
    assert state == "failed" and text.startswith("email: ")
    page.fill(name="Hopper", email="hopper@example.com", password="correct horse battery")
    done = "A mail is on its way to you: open the link in it to confirm the address."
    assert page.evaluate(READY % json.dumps(done)) == done
    assert person(site, "hopper").name == "Hopper"


def test_a_server_that_is_gone_is_said(site: Site, page: Page) -> None:
    page.open(site.url("/reset-password"))
    page.do("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    page.fill(email="ada@example.com")
    assert page.says() == ("failed", "The server does not answer. Try again in a moment.")
    assert page.evaluate("document.querySelector('form:not([hidden]) button').disabled") is False


def test_the_front_page_leads_to_the_others(site: Site, page: Page) -> None:
    page.open(site.url("/"))
    links = page.evaluate("[...document.querySelectorAll('main li a')].map((link) => link.href)")
    assert {urlsplit(link).path for link in links} >= {"/register", "/reset-password", "/swagger-ui", "/rapidoc"}
    for link in links:
        assert site.http.get(link).status_code == 200
    assert site.http.post(site.url("/"), content=b"{}").status_code == 404
    assert page.complaints == []


@pytest.mark.parametrize("path", ["/", "/register", "/verify-email", "/reset-password", "/site/page.js"])
def test_pages_run_nothing_but_our_own_script(site: Site, path: str) -> None:
    answer = site.http.get(site.url(path))
    policy = answer.headers["content-security-policy"]
    assert answer.status_code == 200 and "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["referrer-policy"] == "no-referrer" and answer.headers["x-frame-options"] == "DENY"
    assert " style=" not in answer.text and "http:" not in answer.text and "https:" not in answer.text


def test_every_file_of_the_site_is_part_of_the_package(site: Site) -> None:
    served = {site.http.get(site.url(path)).content for path in SERVED}
    assert served == {file.read_bytes() for file in SITE.iterdir()}


SERVED = ("/", "/register", "/verify-email", "/reset-password", "/site/page.css", "/site/page.js")
