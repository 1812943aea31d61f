"""The page in a real browser: no errors, nothing loaded, no text on other text, light and dark, narrow and wide."""

import json
import re
import subprocess

import pytest

from mindlora.training.report import write_report
from tests.support.chromium import CHROMIUM
from tests.support.histories import write_history

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

# Moves the pointer over the first chart, and writes what the page then looks like into its title.
PROBE = """
<script>
const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
chart.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
const overlaps = [];
for (const svg of document.querySelectorAll("svg")) {
  const texts = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
  const frame = svg.closest("figure")?.getBoundingClientRect();
  texts.forEach(([first, a], index) => {
    if (a.left < frame.left || a.right > frame.right) overlaps.push(`${first} leaves its frame`);
    for (const [second, b] of texts.slice(index + 1))
      if (a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom)
        overlaps.push(`${first} / ${second}`);
  });
}
document.title = JSON.stringify({
  overlaps,
  readout: chart.closest("figure").querySelector(".readout").textContent,
  background: getComputedStyle(document.body).backgroundColor,
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  loaded: performance.getEntriesByType("resource").map((entry) => entry.name),
  columns: getComputedStyle(document.querySelector(".charts")).gridTemplateColumns.split(" ").length,
});
</script>
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """One run with all that a page can show, and three runs on one page."""
    folder = tmp_path_factory.mktemp("pages")
    for number, name in enumerate(("first", "second_run_with_a_long_name", "third")):
        write_history(folder / name, steps=130 + 5 * number, nan_at=(30, 31), layers=30, seed=number)
    runs = [str(folder / name) for name in ("first", "second_run_with_a_long_name", "third")]
    for name, shown in (("one", runs[:1]), ("several", runs)):
        page = folder / f"{name}.html"
        write_report(shown, str(page))
        page.write_text(page.read_text("utf-8").replace("</body>", f"{PROBE}</body>"), "utf-8")
    return folder


def opened(page, profile, width, dark=False):
    """Returns what the probe saw in a window of ``width`` pixels, and the messages of the browser's console."""
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}", f"--window-size={width},1200",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--enable-logging=stderr", "--dump-dom",
        page.as_uri(),
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    title = re.search("<title>(.*?)</title>", run.stdout, re.S).group(1)
    return json.loads(title.replace("&amp;", "&")), re.findall(r".*CONSOLE.*", run.stderr)


@pytest.mark.parametrize("name, width, columns", [("one", 1280, 2), ("several", 1280, 2), ("one", 500, 1)])
def test_the_page_in_chromium(pages, tmp_path, name, width, columns):
    seen, console = opened(pages / f"{name}.html", tmp_path / "profile", width)
    assert console == [] and seen["loaded"] == []
    assert seen["overlaps"] == [] and seen["overflow"] <= 0 and seen["columns"] == columns
    label = "held-out" if name == "one" else "second_run_with_a_long_name"
    assert re.search(rf"{label}: [\d.]+ at step \d\d", seen["readout"])


def test_the_page_follows_the_colours_of_the_system(pages, tmp_path):
    dark, _ = opened(pages / "one.html", tmp_path / "profile", 1280, dark=True)
    assert max(map(int, re.findall(r"\d+", dark["background"]))) < 40
    light, _ = opened(pages / "one.html", tmp_path / "profile", 1280)
    assert min(map(int, re.findall(r"\d+", light["background"]))) > 230
