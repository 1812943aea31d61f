"""mindlora adapter inspect, diff and combine, as a user types them."""

import json
import re

import numpy as np
import pytest

from mindlora import cli
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.adapter import Adapter
from mindlora.files.adapters.combine import METHODS
from mindlora.files.adapters.dialects.registry import FORMS
from tests.support import diffusion_adapters

WQ, WV = "model.layers.0.attention.wq", "model.layers.1.attention.wv"


def make(seed, rank=2, alpha=4.0):
    random = np.random.default_rng(seed)
    tensors = {}
    for path in (WQ, WV):
        tensors[path, "A"] = random.normal(size=(rank, 8)).astype(np.float32)
        tensors[path, "B"] = random.normal(size=(6, rank)).astype(np.float32)
    return Adapter(tensors, alphas=dict.fromkeys((WQ, WV), alpha))


@pytest.fixture
def three():
    """Writes two adapters of rank 2 and one of rank 3 into the working folder."""
    adapters = {"one": make(0), "two": make(1), "wide": make(2, rank=3)}
    for name, adapter in adapters.items():
        adapter_files.write(adapter, name, to="peft")
    return adapters


def run(capsys, *words):
    """Returns (exit code, stdout, stderr)."""
    code = cli.main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_inspect(three, capsys):
    code, out, _ = run(capsys, "adapter", "inspect", "one")
    assert code == 0 and "rank           2" in out and WQ in out
    code, out, _ = run(capsys, "adapter", "inspect", "one", "--json")
    report = json.loads(out)
    assert code == 0 and report["ranks"] == [2] and report["cells"][0]["norm_delta"] > 0


def test_resize_writes_a_smaller_adapter_and_reports_the_error(three, capsys):
    code, out, _ = run(capsys, "adapter", "resize", "wide", "small", "--rank", "1", "--json")
    report = json.loads(out)
    assert code == 0 and [cell["rank"] for cell in report["cells"]] == [1, 1] and 0 < report["error"] < 1
    assert adapter_files.read("small").rank(WQ) == 1
    code, out, _ = run(capsys, "adapter", "resize", "wide", "small", "--energy", "0.9")
    assert code == 0 and "3 -> 2" in out
    code, out, err = run(capsys, "adapter", "resize", "wide", "small", "--energy", "90")
    assert code == 1 and "mindlora: error: energy is 90" in err and not out
    code, out, _ = run(capsys, "adapter", "inspect", "wide", "--energy")
    assert code == 0 and "90%" in out


def test_diff_reports_whether_they_are_equal_or_not(three, capsys):
    adapter_files.write(three["one"], "same.ckpt", to="ckpt")
    for other, equal in (("same.ckpt", True), ("two", False)):
        code, out, _ = run(capsys, "adapter", "diff", "one", other, "--json")
        assert code == 0 and json.loads(out)["equal"] is equal
    code, out, _ = run(capsys, "adapter", "diff", "one", "two")
    assert code == 0 and "equal   no" in out and "2 in both, 0 of them equal bit for bit" in out


def test_combine_writes_what_combine_adapters_makes(three, capsys):
    code, out, _ = run(
        capsys, "adapter", "combine", "sum", "--method", "cat", "--adapter", "one", "0.5", "--adapter", "wide", "-2"
    )
    assert code == 0 and out == "sum: 2 cells, rank 5, by method cat from\n  0.5 x one\n  -2 x wide\n"
    written = adapter_files.read("sum")
    for path in (WQ, WV):
        np.testing.assert_allclose(
            written.delta(path), 0.5 * three["one"].delta(path) - 2 * three["wide"].delta(path), rtol=1e-5, atol=1e-5
        )
    code, out, _ = run(
        capsys,
        "adapter",
        "combine",
        "sum",
        "--method",
        "svd",
        "--svd-rank",
        "1",
        "--adapter",
        "one",
        "1",
        "--adapter",
        "two",
        "1",
        "--json",
    )
    assert code == 0 and json.loads(out) == {
        "output": "sum",
        "method": "svd",
        "adapters": [["one", 1.0], ["two", 1.0]],
        "ranks": [1],
        "cells": 2,
    }
    assert adapter_files.read("sum").rank(WQ) == 1


def test_density_seed_and_majority_sign_reach_the_method(three, capsys):
    def combined(*options):
        assert (
            run(capsys, "adapter", "combine", "out", "--adapter", "one", "1", "--adapter", "two", "-1", *options)[0]
            == 0
        )
        return adapter_files.read("out").tensors[WQ, "A"]

    dare = [combined("--method", "dare_linear", "--density", "0.5", "--seed", seed) for seed in ("1", "1", "2")]
    np.testing.assert_array_equal(dare[0], dare[1])
    assert (dare[0] != dare[2]).any()
    ties = [combined("--method", "ties", "--density", "1", "--majority-sign", sign) for sign in ("total", "frequency")]
    assert (ties[0] != ties[1]).any()
    assert np.count_nonzero(combined("--method", "ties", "--density", "0.2")) < np.count_nonzero(ties[0])


def test_adapters_of_stable_diffusion_are_combined_into_diffusers_form(three, capsys):
    original = diffusion_adapters.make(paths=(diffusion_adapters.Q, diffusion_adapters.OUT, diffusion_adapters.TEXT))
    adapter_files.write(original, "style.safetensors", to="kohya")
    words = ("--method", "cat", "--adapter", "style.safetensors", "0.5", "--adapter", "style.safetensors", "0.5")
    assert run(capsys, "adapter", "combine", "both", *words)[0] == 0
    found = adapter_files.read("both")
    assert found.dialect == "diffusers" and set(found.paths) == set(original.paths)


def test_the_help_names_every_method(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["adapter", "combine", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert all(method in out for method in METHODS)
    with pytest.raises(SystemExit, match="^0$"):
        cli.main(["adapter", "diff", "--help"])
    assert "The exit code is 0 whenever both could be compared" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "words, message",
    [
        (["adapter", "inspect", "none"], "none does not exist."),
        (["adapter", "inspect", "one", "--alpha", "3"], "lora_alpha is 3, but the adapter has its own: 4."),
        (["adapter", "diff", "one", "none"], "none does not exist."),
        (
            ["adapter", "combine", "out", "--method", "tise", "--adapter", "one", "1"],
            "method is 'tise', which is not known. Did you mean 'ties'?",
        ),
        (
            ["adapter", "combine", "out", "--method", "cat", "--adapter", "one", "x"],
            "--adapter one x: the weight must be a number",
        ),
        (
            ["adapter", "combine", "out", "--method", "linear", "--adapter", "one", "1", "--adapter", "wide", "1"],
            "method linear needs adapters of equal rank; at",
        ),
        (["adapter", "combine", "out", "--method", "ties", "--adapter", "one", "1"], "method ties needs density"),
        (
            ["adapter", "combine", "out.ckpt", "--method", "cat", "--adapter", "none", "1"],
            "path is 'out.ckpt': format 'peft' writes a folder.",
        ),
    ],
)
def test_what_cannot_be_done_writes_nothing(three, capsys, tmp_path, words, message):
    code, out, err = run(capsys, *words)
    assert code == 1 and out == "" and err.startswith(f"mindlora: error: {message}")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "two", "wide"]


@pytest.mark.parametrize(
    "words",
    [
        ["adapter", "inspect"],
        ["adapter", "diff", "one"],
        ["adapter", "combine", "out"],
        ["adapter", "combine", "out", "--method", "cat"],
        ["adapter", "combine", "out", "--method", "cat", "--adapter", "one"],
    ],
)
def test_an_incomplete_command_line_prints_the_usage(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(words)
    assert stopped.value.code == 2 and f"usage: mindlora {' '.join(words[:2])}" in capsys.readouterr().err


def test_alpha_where_the_file_does_not_say_it(three, capsys, monkeypatch):
    silent = make(3)
    silent.alphas = {}
    read = adapter_files.read
    monkeypatch.setattr(
        adapter_files,
        "read",
        lambda path, allow_pickle=False, *_: silent if path == "silent" else read(path, allow_pickle),
    )
    words = ["adapter", "combine", "out", "--method", "cat", "--adapter", "one", "1", "--adapter", "silent", "1"]
    code, _, err = run(capsys, *words)
    assert code == 1 and "does not state lora_alpha" in err
    assert run(capsys, *words, "--alpha", "6")[0] == 0
    assert silent.scale(WQ) == 3
    np.testing.assert_allclose(read("out").delta(WQ), three["one"].delta(WQ) + silent.delta(WQ), rtol=1e-5, atol=1e-5)


def test_a_pickle_is_read_only_if_allowed(capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(
        adapter_files, "read", lambda path, allow_pickle=False, *_: asked.append(allow_pickle) or make(0)
    )
    for words in (
        ["adapter", "inspect", "x"],
        ["adapter", "diff", "x", "x"],
        ["adapter", "combine", "out", "--method", "cat", "--adapter", "x", "1"],
    ):
        open("x", "wb").close()
        for flag in ([], ["--allow-pickle"]):
            asked.clear()
            assert run(capsys, *words, *flag)[0] == 0
            assert set(asked) == {bool(flag)}


@pytest.mark.parametrize("group", ["adapter", "base"])
def test_the_help_says_what_each_form_is(group, capsys):
    """A name that is only in the list of choices says nothing to whoever does not know it."""
    with pytest.raises(SystemExit):
        cli.main([group, "convert", "--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    text = re.search(r"\n  --to (.*?)\n  --\w", options, re.DOTALL)[1]
    forms = [*FORMS, "gguf"] if group == "adapter" else ["mindformers", "mcore", "pynative"]
    assert [form for form in forms if form not in text] == []
