"""Test the page of a ticket in a real browser, opened from disk. `make test-browser` runs this file.

Chromium is controlled with its DevTools protocol over a pair of pipes: messages are JSON, and each ends with a zero
byte. Screenshots are saved in runs/browser/, for you to look at.
"""

import base64
import contextlib
import fcntl
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cases import make

from hf_slt.runtimes.page import write_page
from hf_slt.text.blocks import train_tokenizer

SHOTS = Path(__file__).parents[1] / "runs" / "browser"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
TEXT = (
    "The function returns the value of the argument, or None if there is none. It's what we'll say, twice. "
)


class Browser:
    """One tab of a headless Chromium."""

    def __init__(self, program: str, profile: Path) -> None:
        (read, self.to), (self.back, write) = os.pipe(), os.pipe()
        ends = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (read, write)]
        options = (
            f"--headless=new --no-sandbox --disable-gpu --no-first-run --user-data-dir={profile}".split()
        )
        self.process = subprocess.Popen(
            [program, *options, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=lambda: [os.dup2(end, place) for end, place in zip(ends, (3, 4), strict=True)],
            pass_fds=(3, 4),  # the pipes of --remote-debugging-pipe
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (read, write, *ends):
            os.close(one)
        self.number, self.buffer, self.session = 0, b"", None
        self.errors: list[str] = []  # errors of the page
        targets = self.ask("Target.getTargets")["targetInfos"]
        (tab,) = (one["targetId"] for one in targets if one["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict:
        """Send one message and return its answer. Events that come before it are searched for errors."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"]))

    def _read(self, seconds: float = 60) -> dict:
        end = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.back], [], [], max(0, end - time.monotonic()))
            assert ready, "no answer from the browser"
            part = os.read(self.back, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, (
                f"never true: {script}; the page: {self.run('document.body.innerText')}"
            )
            time.sleep(0.02)

    def text(self, element: str) -> str:
        return self.run(f"document.getElementById('{element}').textContent")

    def open(self, page: Path) -> None:
        self.ask("Page.navigate", url=page.resolve().as_uri())
        self.wait("document.readyState === 'complete' && document.getElementById('status') && "
                  "/ready|again/.test(document.getElementById('status').textContent)")  # fmt: skip

    def press(self, key: str, code: int) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, after the page has added all pictures that could move it."""
        self.wait("document.getElementById('gallery').getAttribute('aria-busy') === 'false'")
        self.run(f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()")
        place = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, **place, button="left", clickCount=1)

    def look(self, width: int, scheme: str = "light") -> None:
        """Set the width of the screen, and a light or dark theme."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.ask("Emulation.setEmulatedMedia", features=[feature])

    def shoot(self, name: str) -> None:
        """Save a screenshot of the whole page."""
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 200)))")
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        SHOTS.mkdir(parents=True, exist_ok=True)
        (SHOTS / f"{name}.png").write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.session = None
            self.ask("Browser.close")
        self.process.terminate()
        self.process.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no Chromium here: install it (Debian: apt-get install chromium) to run these tests")
    one = Browser(program, tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Write the page of a ticket with the shape of `nano`, or of the ticket that the variable TICKET names."""
    folder = tmp_path_factory.mktemp("page")
    if "TICKET" in os.environ:
        return write_page(os.environ["TICKET"], folder / "page.html")
    nano = {"n_layer": 4, "n_embd": 128, "vocab_size": 2048, "n_positions": 128, "law": "signed_constant"}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    make("scores", **nano, **ends).save_ticket(folder / "ticket")
    train_tokenizer([TEXT * 9], 320, 128).save_pretrained(folder / "ticket")
    return write_page(folder / "ticket", folder / "page.html")


READY = "document.getElementById('go').textContent === 'Write'"


def write(browser: Browser) -> str:
    """Click on the button and return the text that the page writes."""
    browser.run("document.getElementById('speed').textContent = ''")
    browser.click("#go")
    browser.wait("/tokens per second/.test(document.getElementById('speed').textContent)")
    browser.wait(READY)
    return browser.text("text")


def test_a_visitor_writes_and_flips_the_switch(browser, page):
    browser.look(1280)
    browser.open(page)
    assert browser.run("document.getElementById('alarm').hidden")
    right, _, every = browser.text("digests").partition(" of ")
    assert right == every
    assert int(right) == browser.run("document.querySelectorAll('.good').length") > 20
    browser.run("document.getElementById('prompt').value = ''")
    browser.click("#prompt")
    browser.ask("Input.insertText", text="It's what")
    trained = write(browser)
    assert trained.startswith("It's what")
    assert re.search(r"Trained mask, draw 1: \d+ tokens, \d+ tokens per second", browser.text("speed"))
    browser.click("[value=random]")
    browser.wait("document.getElementById('speed').textContent.startsWith('Random')")
    browser.wait(READY)
    untrained = browser.text("text")
    assert untrained.startswith("It's what")
    browser.click("[value=trained]")  # the same random draw again
    browser.wait("document.getElementById('speed').textContent.startsWith('Trained')")
    browser.wait(READY)
    assert browser.text("text") == trained != untrained
    assert not browser.errors


def test_a_text_can_be_stopped_and_is_never_longer_than_the_model_sees(browser, page):
    browser.open(page)
    browser.run("document.getElementById('prompt').value = 'The '.repeat(400)")
    browser.click("#go")
    browser.wait("/at most/.test(document.getElementById('speed').textContent)")
    assert browser.run(READY)


def test_masks_can_be_looked_into(browser, page):
    browser.open(page)
    browser.wait("document.querySelectorAll('#gallery canvas').length > 5")
    browser.click("#gallery button:nth-of-type(2)")
    browser.click("#lens")
    before = browser.text("cell").replace("\u2212", "-")  # a minus sign
    number = r"(-?[\d.e+-]+)"
    drawn, factor, weight = re.search(
        rf"drawn {number}; code \d stands for the factor {number}; the weight is {number}\.$", before
    ).groups()
    assert float(weight) == float(drawn) * float(factor)
    browser.run("document.getElementById('lens').focus()")
    browser.press("ArrowRight", 39)
    browser.press("ArrowDown", 40)
    after = browser.text("cell")
    places = [tuple(map(int, re.findall(r"(?:Row|column) (\d+)", text))) for text in (before, after)]
    assert (places[1][0] - places[0][0], places[1][1] - places[0][1]) == (1, 1)
    assert not browser.errors


@pytest.mark.parametrize("part", ["ticket", "tokenizer"])
def test_damage_is_told_and_nothing_is_written(browser, page, tmp_path, part):
    text = page.read_text()
    start = text.index(f'id="{part}">') + len(f'id="{part}">')
    place = start + (text.index("<", start) - start) * 3 // 4
    damaged = tmp_path / "damaged.html"
    damaged.write_text(text[:place] + ("A" if text[place] != "A" else "B") + text[place + 1 :])
    browser.look(1280)
    browser.open(damaged)
    assert not browser.run("document.getElementById('alarm').hidden")
    assert "damaged" in browser.text("alarm")
    assert browser.run("document.getElementById('go').disabled")
    browser.run("document.getElementById('form').requestSubmit()")
    assert browser.text("text") == ""
    browser.shoot(f"damaged_{part}")


def test_a_visitor_flips_a_bit_and_mends_it(browser, page):
    browser.open(page)
    browser.click("#flip")
    browser.wait("!document.getElementById('alarm').hidden")
    assert browser.run("document.querySelectorAll('.bad').length") >= 1
    assert browser.run("document.getElementById('go').disabled")
    browser.click("#flip")
    browser.wait("!document.getElementById('go').disabled")
    assert browser.run("document.getElementById('alarm').hidden")
    assert len(write(browser)) > 30


def test_every_control_has_a_name_and_can_be_reached(browser, page):
    """Check what a screen reader reads, and the order of the tab key."""
    browser.open(page)
    browser.wait("document.querySelectorAll('#gallery canvas').length > 5")
    nodes = browser.ask("Accessibility.getFullAXTree")["nodes"]
    roles = ("button", "radio", "slider", "spinbutton", "textbox", "image", "region", "heading")
    named = [
        (one["role"]["value"], one.get("name", {}).get("value", ""))
        for one in nodes
        if not one.get("ignored") and one.get("role", {}).get("value") in roles
    ]
    assert all(name.strip() for _, name in named), named
    assert {"button", "radio", "slider", "spinbutton", "textbox"} <= {role for role, _ in named}
    browser.run("document.activeElement.blur()")
    reached = []
    for _ in range(8):
        browser.press("Tab", 9)
        reached.append(browser.run("document.activeElement.id || document.activeElement.value"))
    order = ["prompt", "trained", "temperature", "topk", "go", "text"]
    assert [one for one in reached if one in order] == order


# The text of the page with the lowest contrast (WCAG), and where it is.
CONTRAST = r"""(() => {
  const linear = (one) => one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\d.]+/g).map((one) => linear(one / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (one) => {
    const found = getComputedStyle(one).backgroundColor;
    return /, 0\)/.test(found) && one.parentElement ? ground(one.parentElement) : found;
  };
  const has_text = (one) => [...one.childNodes].some((part) => part.nodeType === 3 && part.data.trim());
  const shown = (one) => one.checkVisibility() && !one.closest("script, :disabled") && has_text(one);
  return [...document.querySelectorAll("body *")].filter(shown).map((one) => {
    const [a, b] = [getComputedStyle(one).color, ground(one)].map(light).sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), one.outerHTML.slice(0, 99)];
  }).sort((x, y) => x[0] - y[0])[0];
})()"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("screen", "width"), [("wide", 1280), ("narrow", 360)])
def test_screens(browser, page, capsys, screen, width, scheme):
    """Nothing is wider than the screen, and no text is too pale. The screenshots are for you to look at."""
    browser.look(width, scheme)
    browser.open(page)
    browser.wait("document.querySelectorAll('#gallery canvas').length > 5")
    write(browser)
    assert browser.run("document.documentElement.scrollWidth") <= width
    worst, where = browser.run(CONTRAST)
    assert worst >= 4.5, where
    browser.shoot(f"{screen}_{scheme}")
    assert not browser.errors
    with capsys.disabled():  # only printed: a busy machine must not fail the test
        numbers = [browser.text(one) for one in ("weights", "time", "speed")]
        print("\n{} weights drawn in {}. {}".format(*numbers))


LARGE = {"n_layer": 2, "n_embd": 320, "n_head": 5, "vocab_size": 8192, "n_positions": 128, "scales": "row"}
RULES = {
    "edge_popup": {"law": "signed_constant", "density": 0.5},
    "trellis": {"density": None, "states": 1024},
}
LONG_TASKS = (
    "window.longest = 0; new PerformanceObserver((list) => list.getEntries().forEach((one) => "
    "(longest = Math.max(longest, one.duration)))).observe({ entryTypes: ['longtask'] })"
)


@pytest.mark.parametrize("rule", RULES)
def test_a_ticket_of_a_megabyte_is_drawn_and_writes(browser, capsys, rule, tmp_path):
    """Open a page with five million weights, and measure the longest time in which it does not react."""
    model = make("scores", **LARGE, rule=rule, **RULES[rule], bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_ticket(tmp_path / "ticket", encoding="entropy")
    train_tokenizer([TEXT * 9], 320, 128).save_pretrained(tmp_path / "ticket")
    browser.ask("Page.addScriptToEvaluateOnNewDocument", source=LONG_TASKS)
    browser.open(write_page(tmp_path / "ticket", tmp_path / "page.html"))
    longest = browser.run("longest")
    assert write(browser)
    assert not browser.errors
    with capsys.disabled():  # only printed: a busy machine must not fail the test
        numbers = [browser.text(one) for one in ("weights", "bytes", "time", "speed")]
        print("\n{}: {} weights in {} bytes, drawn in {}. {}".format(rule, *numbers), end=" ")
        print(f"Longest task while opening: {longest:.0f} ms.")
