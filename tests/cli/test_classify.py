"""mindlora classify: texts from everywhere, labels and scores as lines and JSON, measures, errors of one line."""

import json

import numpy as np
import pytest

TEXTS = ["two cats", "hello dogs", "no"]


def scores(engine, name, text):
    """The scores of a text: those of its last token, whose hidden state the scripted runner knows."""
    head = engine.adapters.memory.take(name).packed.score
    token = engine.tokenizer.encode(text, add_special_tokens=False)[-1]
    return head.scores(engine.runner.hidden[token])


def softmax(values):
    shifted = np.exp(values.astype(np.float64))
    return shifted / shifted.sum()


def words_of(texts):
    return [word for text in texts for word in ("--text", text)]


def test_labels_and_their_probabilities(run):
    ran = run("classify", "--adapter", "judge", "--labels", "bad,so so,good", *words_of(TEXTS))
    assert ran.code == 0, ran.err
    lines = []
    for text in TEXTS:
        found = softmax(scores(run.engine, "judge", text))
        lines.append(f"{['bad', 'so so', 'good'][found.argmax()]}\t{found.max():.4f}\t{text}")
    assert ran.out.splitlines() == lines


def test_a_reward_model_beside_a_classifier_from_lines_of_a_pipe(run):
    words = ("classify", "--adapter", "judge", "--adapter", "reward", "--json")
    report = json.loads(run(*words, typed="two cats\n\nno\n").out)
    assert [(row["text"], row["adapter"]) for row in report["judgments"]] == [
        (text, name) for text in ("two cats", "no") for name in ("judge", "reward")
    ]
    for row in report["judgments"]:
        expected = scores(run.engine, row["adapter"], row["text"])
        if row["adapter"] == "reward":
            assert row["label"] is None and row["score"] == pytest.approx(float(expected[0]), abs=1e-6)
        else:
            assert row["label"] == f"LABEL_{expected.argmax()}"
            np.testing.assert_allclose(list(row["probabilities"].values()), softmax(expected), atol=1e-6)


def test_rows_with_labels_are_measured_and_written(run, tmp_path):
    rows = [{"text": text, "label": "yes"} for text in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "names.json").write_text(json.dumps(["no", "yes", "perhaps"]), encoding="utf-8")
    words = ("--input", str(tmp_path / "rows.jsonl"), "--labels", str(tmp_path / "names.json"))
    ran = run("classify", "--adapter", "judge", *words, "--output", str(tmp_path / "said.jsonl"))
    said = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert [row["text"] for row in said] == TEXTS and set(said[0]) == {"adapter", "text", "label", "probabilities"}
    right = sum(row["label"] == "yes" for row in said)
    f1 = 2 * right / (3 + right) / len({row["label"] for row in said} | {"yes"})
    assert ran.out == f"accuracy {right / 3:.4f}, F1 {f1:.4f} of 3 labels\n", ran.err


def test_words_are_labeled_at_their_first_tokens(run, tmp_path):
    """Those of a row as the row has them, and those of a text between its spaces."""
    rows = [{"tokens": ["two cats", "go"], "tags": [1, 0]}, {"tokens": ["x"], "tags": ["LABEL_1"]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = ("--adapter", "tagger", "--text", "cats  run", "--input", str(tmp_path / "rows.jsonl"))
    ran = run("classify", *words)
    engine = run.engine
    head, lines, right = engine.adapters.memory.take("tagger").packed.score, [], 0
    for texts, actual in ((["cats", "run"], ()), (["two cats", "go"], (1, 0)), (["x"], (1,))):
        for place, word in enumerate(texts):
            token = engine.tokenizer.encode(f" {word}" if place else word, add_special_tokens=False)[0]
            found = softmax(head.scores(engine.runner.hidden[token]))
            lines.append(f"LABEL_{found.argmax()}\t{found.max():.4f}\t{word}")
            right += len(actual) > 0 and actual[place] == found.argmax()
        lines.append("")
    *said, measured = ran.out.splitlines()
    assert said == lines, ran.err
    assert measured.startswith(f"accuracy {right / 3:.4f}, F1 ") and measured.endswith(" of 3 labels")


@pytest.mark.parametrize(
    "words, error",
    [
        (("--text", "x"), "No adapter is named"),
        (("--adapter", "judge"), "There is no text"),
        (("--adapter", "pirate", "--text", "x"), "pirate has no score head, so it gives no labels"),
        (("--adapter", "judge", "--text", "x", "--labels", "a,b"), "--labels names 2 labels, but the head has 3"),
        (("--adapter", "judge", "--text", " "), "--text 1: an empty text"),
        (("--adapter", "judge", "--text", "cats " * 300), "--text 1 has 303 tokens, but the model takes 256"),
        (("--adapter", "judge", "--text", "x", "--output", "said.txt"), "does not end in .jsonl"),
        (("--adapter", "judge", "--input", "rows.jsonl"), "rows.jsonl, line 1 has words, but judge labels whole texts"),
        (("--adapter", "tagger", "--input", "text.jsonl"), "text.jsonl, line 1 has one label, but tagger labels words"),
        (("--adapter", "reward", "--input", "text.jsonl"), "line 1 has a label, but reward gives one score"),
        (("--adapter", "judge", "--input", "text.jsonl"), "has the label 'x', but those of judge are LABEL_0, LABEL_1"),
    ],
)
def test_errors_are_one_line(run, tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"tokens": ["a"], "tags": ["x"]}), encoding="utf-8")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "a", "label": "x"}), encoding="utf-8")
    ran = run("classify", *words)
    assert ran.code == 1 and error in ran.err[-1] and ran.err[-1].startswith("mindlora: error: ")
