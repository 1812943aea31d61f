"""mindlora report --live: what is served grows with the history, and a browser shows it without being reloaded."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading

import httpx
import pytest

from mindlora.core.errors import ConfigError, DataError
from mindlora.training.report import write_report
from mindlora.training.report.history import HistoryWriter
from mindlora.training.report.live import LiveReport
from tests.conftest import ROOT
from tests.support.chromium import browser
from tests.support.histories import description, step_record
from tests.support.served_apps import until

STEPS = 100
# The first line of the first chart, as the page has it and as it is drawn.
LAST_STEP = "JSON.parse(document.querySelector('figure > script').textContent).lines[0].steps.at(-1)"
PATH = "document.querySelector('svg.chart path.line').getAttribute('d')"


def grow(folder, first, last):
    """Writes steps of a run that goes on; with the first one, its beginning too."""
    writer = HistoryWriter(str(folder), None if first > 1 else 0)
    if first == 1:
        writer.append(0, run=description(STEPS))
    for step in range(first, last + 1):
        writer.append(step, **step_record(step, STEPS))
    writer.close()


@contextlib.contextmanager
def shown(*folders):
    """Shows runs while the context lasts; yields the server."""
    with LiveReport([str(folder) for folder in folders], 0) as live:
        thread = threading.Thread(target=live.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield live
        finally:
            live.shutdown()
            thread.join()


def last_step(page):
    return int(re.search(r"<dt>Steps</dt><dd>(\d+)", page).group(1))


def test_the_page_grows_with_the_history(tmp_path):
    grow(tmp_path, 1, 10)
    with shown(tmp_path) as live, httpx.Client(base_url=live.url) as client:
        first = client.get("/")
        assert first.status_code == 200 and last_step(first.text) == 10
        known = {"If-None-Match": first.headers["ETag"]}
        assert client.get("/", headers=known).status_code == 304
        grow(tmp_path, 11, 25)
        second = client.get("/", headers=known)
        assert second.status_code == 200 and last_step(second.text) == 25


def test_what_cannot_be_shown_is_said_until_it_can(tmp_path):
    grow(tmp_path, 1, 10)
    with shown(tmp_path) as live, httpx.Client(base_url=live.url) as client:
        (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
        answer = client.get("/")
        assert answer.status_code == 503 and "has no metrics.jsonl: name the output folder" in answer.text
        (tmp_path / "moved").rename(tmp_path / "metrics.jsonl")
        assert client.get("/").status_code == 200
        assert client.get("/metrics.jsonl").status_code == 404
        assert client.get("/", headers={"Host": f"evil.example:{live.server_port}"}).status_code == 403


def test_a_browser_that_leaves_is_no_news(tmp_path, capfd):
    grow(tmp_path, 1, 10)
    with shown(tmp_path) as live:
        for _ in range(5):
            with socket.create_connection(live.server_address) as leaving:
                # It is reset when it is closed.
                leaving.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                leaving.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert httpx.get(live.url).status_code == 200
    assert capfd.readouterr().err == ""


def test_the_page_runs_its_own_scripts_alone_and_the_file_is_as_before(tmp_path):
    grow(tmp_path, 1, 10)
    with shown(tmp_path) as live:
        answer = httpx.get(live.url)
    (nonce,) = set(re.findall(r"'nonce-([\w-]+)'", answer.headers["Content-Security-Policy"]))
    assert len(re.findall(f'<(?:style|script) nonce="{nonce}">', answer.text)) == 3
    assert "unsafe" not in answer.headers["Content-Security-Policy"]
    write_report([str(tmp_path)], str(tmp_path / "report.html"))
    file = (tmp_path / "report.html").read_text("utf-8")
    assert file.startswith("<!DOCTYPE html>") and "nonce" not in file and "fetch(" not in file


def test_a_folder_or_a_port_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(DataError, match="has no metrics.jsonl"):
        LiveReport([str(tmp_path)], 0)
    grow(tmp_path, 1, 2)
    with shown(tmp_path) as live:
        for port in (live.server_port, 99999):
            with pytest.raises(ConfigError, match=f"Port {port} cannot be listened on.*Choose another --port"):
                LiveReport([str(tmp_path)], port)


def test_the_command_ends_with_ctrl_c(tmp_path):
    grow(tmp_path, 1, 2)
    command = [sys.executable, "-m", "mindlora.cli", "report", "--live", "--port", "0", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, env=environment) as process:
        said = process.stderr.readline()
        url = re.fullmatch(r"mindlora: open (http://127.0.0.1:\d+); Ctrl-C ends it.\n", said).group(1)
        assert last_step(httpx.get(url).text) == 2
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, f"{url} showed {tmp_path}\n", "")


def test_a_browser_shows_the_curves_grow_without_being_reloaded(tmp_path):
    grow(tmp_path, 1, 20)
    with browser() as window, shown(tmp_path) as live:
        window.open(live.url)

        def curve():
            """Returns the last step of the loss, and how many points are drawn."""
            last, path = (window.run(f"return {where}") for where in (LAST_STEP, PATH))
            return last, len(re.findall("[ML]", path))

        closed = "return window.same && document.querySelectorAll('details:not([open])').length"
        window.run("window.same = true; document.querySelector('details:not([open])').open = true")
        unfolded = window.run(closed)
        assert curve() == (20, 20)
        grow(tmp_path, 21, 60)
        until(lambda: curve() == (60, 60))
        assert window.run(closed) == unfolded
        chart = "document.querySelector('svg.chart')"
        box = window.run(f"const box = {chart}.getBoundingClientRect(); return [box.right - 30, box.top + 40]")
        move = "new PointerEvent('pointermove', { clientX: arguments[0], clientY: arguments[1] })"
        window.run(f"{chart}.dispatchEvent({move})", *box)
        assert re.search(r"at step \d\d", window.texts(".readout")[0])
        assert window.console() == [] and all(address.startswith(live.url) for address in window.requested())
        (tmp_path / "metrics.jsonl").unlink()
        until(lambda: "has no metrics.jsonl" in window.texts("#live")[0])
        window.driver.get("about:blank")
