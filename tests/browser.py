"""A page in a real headless browser: what it writes to the console, and what it asks of the network."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@dataclass(frozen=True)
class Visit:
    """What happened."""

    document: str  # The page after its scripts have run
    console: list[str]
    requests: list[str]  # Addresses other than the page's own file


LOOK = Path(__file__).parent / "report" / "look.html"


def look(page: Path, folder: Path, scheme: str = "light") -> list[dict]:
    """Show `page` with all its folds open on a phone and a desk; return what look.html finds, the phone first."""
    text = page.read_text().replace("<details>", "<details open>")
    wrapper = folder / "look.html"
    script = f"const page = {json.dumps(text)};".replace("</", "<\\/")
    wrapper.write_text(LOOK.read_text().replace("const page = PAGE;", script))
    seen = visit(wrapper, folder, *["--blink-settings=preferredColorScheme=0"] * (scheme == "dark"))
    assert (seen.console, seen.requests) == ([], [])
    found = json.loads(unescape(re.search("<title>(.*?)</title>", seen.document, re.DOTALL).group(1)))
    for each in found:
        assert each["needed"] <= each["width"] == each["asked"]  # nothing scrolls sideways
        assert each["faint"] == []
    return sorted(found, key=lambda each: each["asked"])


def visit(page: Path, folder: Path, *more: str) -> Visit:
    """Open `page` with its scripts. Skips where there is no browser.

    Args:
        folder: takes the browser's logs and profile.
        more: options of the browser.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed (scripts/test.sh does so as root on Debian)")
    network = folder / "network.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += ["--disable-background-networking", "--enable-logging=stderr", "--timeout=2000"]
    options += [f"--user-data-dir={folder / 'profile'}", f"--log-net-log={network}", "--dump-dom", *more]
    result = subprocess.run([browser, *options, page.as_uri()], capture_output=True, text=True, timeout=60)
    console = re.findall(r":CONSOLE[^\]]*\] (.*)", result.stderr)
    return Visit(result.stdout, console, _addresses(network.read_text()))


def _addresses(log: str) -> list[str]:
    try:
        events = json.loads(log)["events"]
    except json.JSONDecodeError:  # the browser ends without closing its log
        events = json.loads(log.rstrip().rstrip(",") + "]}")["events"]
    parameters = [event.get("params", {}) for event in events]
    found = [str(p[key]) for p in parameters if isinstance(p, dict) for key in ("url", "host") if key in p]
    return [address for address in found if not address.startswith(("file:", "data:"))]
