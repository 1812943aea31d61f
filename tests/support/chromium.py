"""A page in a real browser: Chromium without a window, driven by selenium."""

import contextlib
import json
import shutil
import tempfile

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
# Without a sandbox, as root has none, and without what a browser asks of the network by itself.
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


@contextlib.contextmanager
def browser():
    """Yields a Browser; the test is skipped where there is none."""
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("Chromium is not installed, or chromedriver is not (Debian: chromium, chromium-driver)")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    profile = tempfile.mkdtemp()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
        # Its processes may still be writing there.
        shutil.rmtree(profile, ignore_errors=True)


class Browser:
    """One window.

    Attributes:
        driver (selenium.webdriver.Chrome): What drives it.
    """

    def __init__(self, driver):
        self.driver = driver
        self._agent = driver.execute_script("return navigator.userAgent")

    def open(self, url, width=1280, height=900, phone=False, dark=False, language="en-US"):
        """Opens a page as the first one of a new tab; what the browser had kept of others is gone."""
        self.driver.get("about:blank")
        self._tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._tell("Emulation.setEmulatedMedia", features=[scheme])
        self._tell("Emulation.setUserAgentOverride", userAgent=self._agent, acceptLanguage=language)
        self._tell("Storage.clearDataForOrigin", origin=url, storageTypes="all")
        self.driver.get_log("browser"), self.driver.get_log("performance")
        self.driver.get(url)

    def run(self, script, *arguments):
        """Runs JavaScript, and returns what it returns."""
        return self.driver.execute_script(script, *arguments)

    def find(self, selector):
        """Returns the only element of a CSS selector."""
        (found,) = self.driver.find_elements("css selector", selector)
        return found

    def texts(self, selector):
        """Returns the text of each element of a CSS selector, hidden ones too."""
        return self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)", selector)

    def press(self, *keys):
        """Presses keys, wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def console(self):
        """Returns what the console has said since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requested(self):
        """Returns the addresses that were asked for since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        return [request["request"]["url"] for request in sent]

    def _tell(self, command, **parameters):
        self.driver.execute_cdp_cmd(command, parameters)
