"""Pages opened in headless Chromium, at a width and in a colour scheme."""

import html
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
BROWSER = next((found for name in _NAMES if (found := shutil.which(name))), None)

# The page stands in a frame of the wanted width: a window has a least width of its own.
_FRAME = """<!doctype html><meta charset="utf-8">
<style>body {{ margin: 0 }} iframe {{ border: 0; width: {width}px; height: 2000px }}</style>
<iframe srcdoc="{page}"></iframe>
<pre id="found"></pre><script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const found = (() => {{ {script} }})();
  document.getElementById("found").textContent = JSON.stringify(
    {{ found, sideways: root.scrollWidth - root.clientWidth,
      background: getComputedStyle(page.body).backgroundColor }});
}};
</script>"""


@dataclass(frozen=True)
class Seen:
    """What a browser saw.

    Args:
        found: what the script returned.
        sideways: pixels that the page is wider than its window.
        background: of the page.
        console: what was written there.
    """

    found: Any
    sideways: int
    background: str
    console: list[str]


def look(page: Path, folder: Path, *, width: int, dark: bool = False, script: str = "") -> Seen:
    """Open a page; `script` sees it as `page` and returns what is wanted."""
    assert BROWSER is not None
    text = html.escape(page.read_text(encoding="utf-8"), quote=True)
    frame = folder / f"frame-{width}-{dark}.html"
    frame.write_text(_FRAME.format(width=width, page=text, script=script), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={folder / 'profile'}", "--disable-background-networking"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", frame.as_uri()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    shown = done.stdout.rpartition('<pre id="found">')[2].partition("</pre>")[0]
    seen = json.loads(html.unescape(shown))
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Seen(seen.get("found"), seen["sideways"], seen["background"], console)
