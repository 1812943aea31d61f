"""The options that pick an engine: names of adapters, overrides of the YAML."""

import argparse
import os
import types

import pytest

from mindlora import cli
from mindlora.cli.engine import add_engine_options, build, read_adapters
from mindlora.core.errors import ConfigError
from tests.support.scripted_engine import write_adapter


def chosen(*words):
    parser = argparse.ArgumentParser()
    add_engine_options(parser, {})
    return read_adapters(parser.parse_args(["--config", "x", *words]))


def test_an_adapter_is_called_like_its_folder_or_as_it_is_named(tmp_path):
    for path in ("runs/best", "adapters/a", "adapters/b=c"):
        write_adapter(tmp_path, path)
    (tmp_path / "lora.v2.ckpt").write_bytes(b"")
    os.chdir(tmp_path)
    found = chosen("--adapters", "adapters", "--adapter", "runs/best/", "--adapter", "x=runs/best", "--adapter", "a")
    assert found.chosen == ["best", "x", "a"]
    assert found.registry.names() == ["a", "b=c", "best", "x"]
    assert found.registry.path("x") == found.registry.path("best") == str(tmp_path / "runs" / "best")
    assert chosen("--adapter", "lora.v2.ckpt", "--adapter", "adapters/b=c").chosen == ["lora.v2", "b=c"]
    assert chosen().chosen == []


def test_an_adapter_that_is_nowhere_is_an_error_with_near_names(tmp_path):
    write_adapter(tmp_path, "adapters/pirate")
    os.chdir(tmp_path)
    advice = "Give an adapter's path, or NAME=PATH."
    for words, message in (
        (["--adapter", "pirat"], f"--adapter pirat: there is no such file or folder. {advice}"),
        (
            ["--adapters", "adapters", "--adapter", "pirat"],
            "--adapter pirat: there is no such file or folder, and no adapter of that name in "
            f"{tmp_path / 'adapters'}. Did you mean 'pirate'? {advice}",
        ),
        (["--adapter", "x=pirat"], "The adapter 'x' is said to be at pirat, where there is nothing. Check the path."),
        (["--adapter", ""], f"--adapter : there is no such file or folder. {advice}"),
        (
            ["--adapter", "adapters/pirate", "--adapter", "pirate=adapters/pirate"],
            "--adapter pirate=adapters/pirate: pirate was given before. Write NAME=PATH with another name.",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            chosen(*words)
        assert str(caught.value) == message


@pytest.mark.parametrize("words", [["plugin-path", "--a.b", "1"], ["generate", "--config", "x", "--temprature", "1"]])
def test_what_no_verb_knows_is_usage(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2
    assert f"mindlora: error: unrecognized arguments: {words[-2]} 1\n" in capsys.readouterr().err


@pytest.mark.parametrize("words, rounds, said", [([], True, True), ([], False, False), (["float32"], True, False)])
def test_products_that_nobody_asked_for_are_named(tmp_path, monkeypatch, capsys, words, rounds, said):
    notes = ("14 weights are decoded from GPTQ in 4 bits to bfloat16.",)
    made = types.SimpleNamespace(runner=types.SimpleNamespace(rounds=rounds), base_notes=notes)
    monkeypatch.setattr("mindlora.training.launch.serve.build_engine", lambda *_: made)
    monkeypatch.setenv("MINDLORA_GRAPH_CACHE", "")
    parser = argparse.ArgumentParser()
    add_engine_options(parser, {})
    (tmp_path / "run.yaml").write_text("{}", encoding="utf-8")
    options = ["--config", str(tmp_path / "run.yaml"), *(f"--product-dtype={word}" for word in words)]
    arguments = parser.parse_args(options)
    arguments.overrides = []
    assert build(arguments, registry=None) is made
    printed = capsys.readouterr().err
    assert ("multiply in bfloat16, which is faster here" in printed) == said
    assert f"mindlora: {notes[0]}\n" in printed


@pytest.mark.parametrize(
    "words, variable, placed", [([], None, "graphs"), (["--no-graph-cache"], None, ""), ([], "", ""), ([], "x", "x")]
)
def test_graphs_are_kept_in_the_user_s_folder_unless_told_otherwise(
    tmp_path, monkeypatch, capsys, words, variable, placed
):
    made = types.SimpleNamespace(runner=types.SimpleNamespace(rounds=False), base_notes=())
    monkeypatch.setattr("mindlora.training.launch.serve.build_engine", lambda *_: made)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # So that it is as before when the test ends.
    monkeypatch.setenv("MINDLORA_GRAPH_CACHE", variable or "")
    if variable is None:
        monkeypatch.delenv("MINDLORA_GRAPH_CACHE")
    parser = argparse.ArgumentParser()
    add_engine_options(parser, {})
    (tmp_path / "run.yaml").write_text("{}", encoding="utf-8")
    arguments = parser.parse_args(["--config", str(tmp_path / "run.yaml"), *words])
    build(arguments, registry=None)
    at_home = str(tmp_path / "mindlora" / "graphs")
    assert os.environ["MINDLORA_GRAPH_CACHE"] == (at_home if placed == "graphs" else placed)
    line = f"mindlora: compiled graphs are kept in {at_home} for later starts (--no-graph-cache keeps none)\n"
    assert (line in capsys.readouterr().err) == (placed == "graphs")


@pytest.mark.parametrize("caches, device", [("a file", "CPU"), ("a folder", "Ascend")])
def test_nothing_is_said_to_be_kept_where_it_cannot_be(tmp_path, monkeypatch, capsys, caches, device):
    made = types.SimpleNamespace(runner=types.SimpleNamespace(rounds=False), base_notes=())
    monkeypatch.setattr("mindlora.training.launch.serve.build_engine", lambda *_: made)
    monkeypatch.setattr("mindspore.get_context", lambda name: device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / caches))
    # So that it is as before when the test ends.
    monkeypatch.setenv("MINDLORA_GRAPH_CACHE", "")
    monkeypatch.delenv("MINDLORA_GRAPH_CACHE")
    (tmp_path / "a file").write_text("", encoding="utf-8")
    parser = argparse.ArgumentParser()
    add_engine_options(parser, {})
    (tmp_path / "run.yaml").write_text("{}", encoding="utf-8")
    build(parser.parse_args(["--config", str(tmp_path / "run.yaml")]), registry=None)
    said = capsys.readouterr().err
    assert "MINDLORA_GRAPH_CACHE" not in os.environ and "graphs are kept" not in said
    refusal = f"compiled graphs are not kept for later starts: [Errno 20] Not a directory: '{tmp_path}/a file/mindlora"
    assert (refusal in said) == (device == "CPU")
    assert not (tmp_path / "a folder").exists()
