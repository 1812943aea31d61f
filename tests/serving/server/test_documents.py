"""docs/serving.md and docs/serving/: their curl lines work, their codes and metrics are those of the server."""

import glob
import os
import re
import subprocess

import numpy as np
import pytest

from mindlora.serving.server import schemas
from mindlora.serving.server.settings import ServerSettings
from tests.conftest import ROOT
from tests.support.scripted_engine import HIDDEN, make_engine, started, write_adapter, write_pooling
from tests.support.served_apps import ask, complete, live, make_app

PAGES = [os.path.join(ROOT, "docs", "serving.md"), *sorted(glob.glob(os.path.join(ROOT, "docs", "serving", "*.md")))]
DOCUMENT = ""
for page in PAGES:
    with open(page, encoding="utf-8") as file:
        DOCUMENT += file.read() + "\n"
BLOCKS = re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in re.split(r"\n(?=curl)", block.strip())]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for name in ("support", "sql"):
        write_adapter(folder, name, f"{name}: ")
    for name, labels in (("judge", 1), ("topics", 3)):
        write_adapter(folder, name, score=np.ones((labels, HIDDEN), np.float32))
    base = tmp_path_factory.mktemp("base")
    write_pooling(base)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("anyone sk-example\n")
    with started(make_engine(str(folder), name="llama2_7b", base_folder=str(base))) as engine:
        apps = [make_app(engine, allow_runtime_loading=True), make_app(engine, api_key_file=str(keys))]
        with live(apps[0]) as free, live(apps[1]) as guarded:
            yield {False: free, True: guarded}


@pytest.mark.parametrize("command", COMMANDS)
def test_each_curl_line_works(server, command):
    assert "http://127.0.0.1:8000/" in command
    command = command.replace("http://127.0.0.1:8000", server["Bearer" in command])
    command = re.sub("^curl ", "curl --silent --show-error --fail ", command)
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and run.stdout, run.stderr


def test_there_are_curl_lines():
    assert len(COMMANDS) == 14 and any("stream" in command for command in COMMANDS)


def test_every_code_is_in_the_table():
    folder = os.path.join(ROOT, "mindlora", "serving", "server")
    source = ""
    for name in os.listdir(folder):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                source += file.read()
    table = DOCUMENT.partition("| status | code |")[2].partition("\n\n")[0]
    documented = set(re.findall("`([a-z_]+)`", table)) - {"load_lora", "param"}
    assert len(documented) > 20 and all(f'"{code}"' in source for code in documented)
    used = set(re.findall(r'code="(\w+)"', source)) | set(re.findall(r'[45]\d\d, "([a-z_]+)"', source))
    assert used - {"internal_error"} <= documented


@pytest.mark.parametrize("body", [schemas.CompletionRequest, schemas.ChatRequest, schemas.StreamOptions])
def test_every_field_is_documented(body):
    names = {*body.model_fields, *body.unsupported} - {"include_usage"}
    named = set(re.findall(r"`(\w+)(?:: \w+)?`", DOCUMENT))
    assert len(named) > 100 and names <= named, names - named


def test_the_metrics_exist(running):
    app = make_app(running)
    complete(app, model="pirate")
    shown = ask(app, "/metrics").text
    named = set(re.findall(r"`(mindlora_\w+)", DOCUMENT))
    assert len(named) > 20
    assert not [name for name in named if not re.search(rf"^{name}(_bucket)?[ {{]", shown, re.M)]


def test_the_defaults_are_those_of_the_settings():
    settings = ServerSettings()
    rows = dict(re.findall(r"^\| `--(max-choices|request-seconds)` \| (\d+) \|", DOCUMENT, re.M))
    assert rows == {"max-choices": str(settings.max_choices), "request-seconds": f"{settings.request_seconds:.0f}"}
    assert f"the busiest {settings.adapter_labels} models" in DOCUMENT and settings.max_body_bytes == 4 << 20
    assert f"more than {settings.body_seconds:.0f} s" in DOCUMENT and f"seconds ({settings.grace:.0f})" in DOCUMENT
