"""mindlora eval: what it prints, draws and records of a tiny Llama and its adapters, and what it refuses."""

import contextlib
import json

import numpy as np
import pytest

from mindlora import cli
from mindlora.data.mindrecord import write_mindrecord
from mindlora.training.report.history import read_history
from tests.conftest import in_mode
from tests.support import tiny_serving
from tests.support.histories import write_history
from tests.support.tiny_serving import adapter, base_weights, save_adapter, save_base

MODEL = ("--config", "run.yaml", "--template", "none")


@pytest.fixture(scope="module")
def served(library, mindformers, tmp_path_factory):
    """A folder with a base and adapters, and an engine on them that was started."""
    folder = tmp_path_factory.mktemp("served")
    for name, made in (("first", adapter(1)), ("second", adapter(2)), ("base", adapter(3))):
        save_adapter(folder / "adapters", name, made)
    with in_mode(0):
        engine = tiny_serving.engine(save_base(folder / "base.ckpt", base_weights()), folder / "adapters").start()
        yield folder, engine
        engine.stop()


@pytest.fixture
def run(served, tmp_path, capsys, monkeypatch):
    """Returns a function that runs mindlora eval on the engine, in a folder with data; it returns code, out and err."""
    folder, engine = served

    @contextlib.contextmanager
    def loaded_engine(arguments, adapters, defaults):
        yield engine

    monkeypatch.setattr("mindlora.cli.eval.loaded_engine", loaded_engine)
    monkeypatch.setattr("mindlora.cli.eval.start", lambda engine: None)
    (tmp_path / "a.txt").write_text("The cats eat. * The dogs sleep. * " * 4)
    question = {"question": "The cats", "choices": ["eat", "sleep"], "answer": "eat"}
    (tmp_path / "q.jsonl").write_text("\n".join(json.dumps(question) for _ in range(3)))
    (tmp_path / "t.jsonl").write_text(json.dumps({"question": "The cats", "answer": "#### 2"}))
    row = np.arange(3, 9, dtype=np.int32)
    write_mindrecord([{"input_ids": row, "labels": row}] * 2, str(tmp_path / "rows.mindrecord"))

    def ran(*words):
        code = cli.main(["eval", *MODEL, "--adapters", str(folder / "adapters"), *words])
        return code, *capsys.readouterr()

    return ran


def test_everything_is_measured_in_one_report(run):
    words = ["--texts", "a.txt", "--separator", "*", "--rows", "rows.mindrecord", "--choices", "q.jsonl"]
    words += ["--answers", "t.jsonl", "--rule", "number", "--max-tokens", "4", "--forgetting", "7", "--json"]
    code, out, err = run(*words, "--adapter", "first", "--adapter", "second")
    assert code == 0, err
    report = json.loads(out)
    assert [(found["name"], found["source"], found["examples"]) for found in report["measures"]] == [
        ("perplexity", "a.txt", 8),
        ("bits per byte", "a.txt", 8),
        ("perplexity", "rows.mindrecord", 2),
        ("bits per byte", "rows.mindrecord", 2),
        ("accuracy", "q.jsonl", 3),
        ("accuracy by length", "q.jsonl", 3),
        ("right answers (number)", "t.jsonl", 1),
        ("forgetting", "samples of the base", 7),
    ]
    for found in report["measures"]:
        assert list(found["values"]) == ["base", "first", "second"]
        assert list(found["differences"]) == list(found["verdicts"]) == ["first", "second"]
    assert len(report["verdicts"]) == 2
    assert "not told apart by 3 examples in accuracy of q.jsonl, which are fewer than 6" in report["verdicts"][0]


def test_the_text_says_what_is_better_and_by_how_much(run):
    code, out, _ = run(
        "--texts", "a.txt", "--separator", "*", "--limit", "7", "--adapter", "first", "--forgetting", "6"
    )
    assert code == 0
    *tables, verdict = out.strip().split("\n\n")
    assert [table.splitlines()[0].split("  ")[0] for table in tables] == [
        "perplexity of a.txt (7 examples)",
        "bits per byte of a.txt (7 examples)",
        "KL(base || adapter), nats per token, on 6 samples of the base",
    ]
    words = " ".join(verdict.split())
    assert words.startswith("first against the base: ") and words.endswith("away from the base's own answers.")


def test_the_base_alone_is_compared_with_nothing(run):
    code, out, _ = run("--texts", "a.txt")
    assert code == 0 and "against" not in out and "minus base" not in out


def test_a_picture_is_drawn_and_the_run_gets_a_section(run, tmp_path):
    write_history(tmp_path / "output", steps=20)
    words = ("--choices", "q.jsonl", "--adapter", "first", "--picture", "found.png", "--run", "output")
    code, out, err = run(*words)
    assert code == 0, err
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    record = read_history("output").evaluations[-1]
    assert record["step"] == 20 and record["evaluation"]["tables"][0]["title"] == "accuracy of q.jsonl (3 examples)"
    assert " ".join(record["evaluation"]["verdicts"]) in " ".join(out.split())
    assert cli.main(["report", "output"]) == 0
    page = (tmp_path / "output" / "report.html").read_text("utf-8")
    assert "accuracy by length of q.jsonl (3 examples)" in page


@pytest.mark.parametrize(
    "words, told",
    [
        ((), "There is nothing to measure: give --texts"),
        (("--forgetting", "3"), "--forgetting compares adapters with their base"),
        (("--texts", "a.txt", "--limit", "0"), "--limit is 0: it must be at least 1"),
        (("--texts", "a.txt", "--overlap", "65"), "--overlap is 65, but a window has 64 tokens"),
        (("--texts", "a.txt", "--adapter", "base"), "base is what the report calls the base"),
        (("--texts", "a.txt", "--picture", "a.jpg"), "--picture a.jpg does not end in .png"),
        (("--texts", "a.txt", "--run", "nowhere"), "nowhere has no metrics.jsonl"),
        (("--texts", "b.txt"), "There is no file b.txt"),
        (("--answers", "q.jsonl", "--rule", "number"), "the answer has no number after ####"),
    ],
)
def test_what_cannot_be_measured_is_refused(run, words, told):
    code, out, err = run(*words)
    assert (code, out) == (1, "") and told in err
