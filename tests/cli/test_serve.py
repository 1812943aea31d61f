"""mindlora serve: options to settings, and a server from its start to its end."""

import argparse
import json
import os
import pathlib
import signal
import sys
import threading

import httpx
import pytest

from mindlora import cli
from mindlora.cli import serve
from mindlora.serving.server.run import run
from tests.support.scripted_engine import BASE, make_engine, write_adapter


@pytest.fixture
def scripted(monkeypatch, tmp_path_factory):
    """Makes the command serve a scripted engine, beside a run.yaml of that name; returns what it asked for."""
    asked = argparse.Namespace()
    monkeypatch.chdir(tmp_path_factory.mktemp("served"))
    pathlib.Path("run.yaml").write_text(f"trainer: {{model_name: {BASE}}}", encoding="utf-8")

    def build(arguments, registry, model_name):
        asked.arguments, asked.registry, asked.model_name = arguments, registry, model_name
        asked.engine = make_engine(arguments.adapters)
        return asked.engine

    monkeypatch.setattr(serve, "build", build)
    return asked


def test_it_serves_until_it_is_told_to_stop(scripted, tmp_path, capsys, monkeypatch):
    write_adapter(tmp_path / "adapters", "pirate", "Arr, ")
    answers = []

    def listening(make_engine, settings, say):
        def talk(url):
            with httpx.Client(base_url=url) as client:
                body = {"model": "pirate", "prompt": "hi", "max_tokens": 20}
                answers.append(client.post("/v1/completions", json=body))
            os.kill(os.getpid(), signal.SIGTERM)

        def heard(engine, url):
            say(engine, url)
            threads.append(threading.Thread(target=talk, args=[url]))
            threads[0].start()

        threads = []
        engine = run(make_engine, settings, heard)
        threads[0].join()
        assert settings.max_choices == 3 and settings.grace == 5.0 and settings.cors_origins == ("https://a.example",)
        return engine

    monkeypatch.setattr("mindlora.serving.server.run.run", listening)
    log = tmp_path / "requests.jsonl"
    words = ["--config", "run.yaml", "--adapters", str(tmp_path / "adapters"), "--port", "0", "--max-choices", "3"]
    words += ["--grace", "5", "--cors-origin", "https://a.example", "--request-log", str(log), "--model-name", "mine"]
    assert cli.main(["serve", *words, "--json"]) == 0
    assert answers[0].json()["choices"][0]["text"] == "Arr, hi"
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["model"] == BASE and report["generated_tokens"] == answers[0].json()["usage"]["completion_tokens"]
    assert f"mindlora: {BASE} at http://127.0.0.1:" in err
    assert json.loads(log.read_text())["model"] == "pirate"
    assert scripted.model_name == "mine" and scripted.registry.names() == ["pirate"]


@pytest.fixture
def nothing_begins(monkeypatch):
    """Fails a test whose server begins to load its model."""
    monkeypatch.setattr("mindlora.serving.server.run.run", lambda *_: pytest.fail("the server has begun"))


def test_what_is_wrong_is_said_before_anything_is_loaded(scripted, nothing_begins, capsys, tmp_path):
    write_adapter(tmp_path, "pirate", "Arr, ")
    adapter = tmp_path / "pirate"
    for words, message in (
        (["--host", "0.0.0.0"], "--no-auth"),
        (["--api-key-file", str(tmp_path / "keys"), "--no-auth"], "contradict|both"),
        (["--max-choices", "0"], "max_choices"),
        (["--adapter", "a=nothing"], "nothing"),
        (["--adapter", f"{BASE}={adapter}"], f"There is an adapter '{BASE}', and the base has this name too"),
        (["--adapter", f"other={adapter}", "--trainer.model_name", "other"], "There is an adapter 'other'"),
        (["--adapter", f"other={adapter}", "--model-name", "other"], "There is an adapter 'other'"),
        (["--adapters", str(tmp_path), "--model-name", "pirate"], "There is an adapter 'pirate'"),
    ):
        assert cli.main(["serve", "--config", "run.yaml", *words]) == 1
        err = capsys.readouterr().err
        assert any(part in err for part in message.split("|")) and len(err.splitlines()) == 1


def test_a_folder_gives_the_base_its_name(scripted, nothing_begins, capsys, tmp_path):
    write_adapter(tmp_path, "pirate", "Arr, ")
    os.makedirs("models/tiny")
    assert cli.main(["serve", "--model", "models/tiny/", "--adapter", f"tiny={tmp_path / 'pirate'}"]) == 1
    assert "There is an adapter 'tiny', and the base has this name too" in capsys.readouterr().err


def test_pinned_adapters_keep_their_slots(scripted, tmp_path, monkeypatch, capsys):
    for name in ("pirate", "poet"):
        write_adapter(tmp_path, name, name)
    monkeypatch.setattr("mindlora.serving.server.run.run", lambda make_engine, settings, say: make_engine())
    words = ["serve", "--config", "run.yaml", "--adapters", str(tmp_path), "--pin", "poet"]
    assert cli.main(words) == 0
    assert scripted.engine.adapters.stats().pinned == ["poet"]
    assert cli.main([*words, "--pin", "pirat"]) == 1
    assert "There is no adapter 'pirat'" in capsys.readouterr().err


def test_a_missing_extra_is_named(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("mindlora.serving.server.run")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert cli.main(["serve", "--config", "run.yaml"]) == 1
    assert "pip install 'mindlora[serve]'" in capsys.readouterr().err
