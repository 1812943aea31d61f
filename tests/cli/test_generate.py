"""mindlora generate: prompts from everywhere, answers in order, forms of prompts, errors of one line."""

import json
import sys

import pytest

from mindlora import cli
from mindlora.serving.engine import Engine
from mindlora.serving.request import Sampling


def test_one_answer_is_printed_as_it_is(run):
    ran = run("generate", "--prompt", "hello cats", "--adapter", "pirate", "--template", "none")
    assert (ran.code, ran.out) == (0, "Arr, hello cats\n")
    compiling, compiled, form, figures = ran.err
    assert (compiling, form) == ("mindlora: compiling ...", "mindlora: prompts: the text itself")
    assert "prompt tokens, " in figures and " tokens/s, first token after " in figures


def test_base_and_adapters_answer_side_by_side(run):
    prompts = ("--prompt", "hello", "--prompt", "two cats")
    ran = run("generate", *prompts, "--adapter", "pirate", "--adapter", "formal", "--base", "--template", "none")
    assert ran.out.splitlines() == [
        "> hello",
        "[base] hello",
        "[pirate] Arr, hello",
        "[formal] Dear Sir, hello",
        "",
        "> two cats",
        "[base] two cats",
        "[pirate] Arr, two cats",
        "[formal] Dear Sir, two cats",
    ]
    assert ran.err[-1].startswith("mindlora: 6 answers, ")
    ran = run("generate", *prompts, "--template", "none")
    assert ran.out.splitlines() == ["> hello", "hello", "", "> two cats", "two cats"]


def test_an_answer_on_a_terminal_comes_piece_by_piece(run, monkeypatch):
    written = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", written.append)
    words = ("generate", "--template", "none", "--prompt")
    assert run(*words, "there are cats and dogs").code == 0
    assert "".join(written) == "there are cats and dogs\n" and len(written) > 3
    # Several cannot come at once, and JSON is whole.
    written.clear()
    run(*words, "cats", "--prompt", "dogs")
    assert "".join(written) == "> cats\ncats\n\n> dogs\ndogs\n"
    written.clear()
    run(*words, "cats", "--json")
    assert json.loads("".join(written))["answers"][0]["text"] == "cats"


def test_prompts_come_from_files_and_pipes(run, tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo \\n lines\n", encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps(["a\nb", "c"]), encoding="utf-8")
    for words, typed, prompts in (
        (["--prompts-file", "lines.txt"], None, ["one", "two \\n lines"]),
        (["--prompts-file", "list.json", "--prompt", "first"], None, ["first", "a\nb", "c"]),
        (["--prompts-file", "-"], "one\ntwo\n", ["one", "two"]),
        ([], "a whole\ntext\n", ["a whole\ntext"]),
        (["--prompt", "x"], "not this", ["x"]),
    ):
        answers = json.loads(run("generate", *words, "--template", "none", "--json", typed=typed).out)["answers"]
        assert [(answer["prompt"], answer["text"]) for answer in answers] == [(text, text) for text in prompts]


def test_the_prompt_takes_the_form_that_was_asked_for(run):
    for words, said, form in (
        # The tokenizer has a chat template; its tokens have no text, and the end of a turn ends the answer.
        ([], "user\nhi", "through the chat template of the tokenizer"),
        (["--system", "be kind"], "system\nbe kind", "through the chat template of the tokenizer"),
        (["--template", "none"], "hi", "the text itself"),
        (["--template", r"{instruction}\n!"], "hi\n!", r'in the form "{instruction}\n!"'),
        (["--template", "plain"], "hi\n", "in the form plain"),
    ):
        ran = run("generate", "--prompt", "hi", "--json", *words)
        report = json.loads(ran.out)
        assert (report["answers"][0]["text"], report["template"]) == (said, form)
        assert f"mindlora: prompts: {form}" in ran.err


def test_sampling_is_what_the_options_say(run):
    ran = run("generate", "--prompt", "there are cats", "--template", "none", "--stop", " cats", "--json")
    assert json.loads(ran.out)["answers"][0]["text"] == "there are"
    words = ["--max-tokens", "2", "--logprobs", "3"]
    ran = run("generate", "--prompt", "there are cats", "--template", "none", *words, "--json")
    report = json.loads(ran.out)
    (answer,) = report["answers"]
    assert (answer["tokens"], answer["finish_reason"], answer["adapter"], answer["error"]) == (2, "length", None, None)
    assert [len(entry["top"]) for entry in answer["logprobs"]] == [3, 3]
    # This engine says the begin token again, which has no text.
    assert "".join(entry["token"] for entry in answer["logprobs"]) == "<s>" + answer["text"]
    assert report["figures"]["tokens"] == 2 and report["figures"]["cut"] == 1
    assert ran.err[-1].endswith("; it reached the limit of tokens")


def test_every_option_of_sampling_reaches_the_engine(run, monkeypatch):
    taken, submit = [], Engine.submit

    def spy(engine, tokens, sampling, adapter):
        taken.append(sampling)
        return submit(engine, tokens, sampling, adapter)

    monkeypatch.setattr(Engine, "submit", spy)
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 2, "repetition_penalty": 1.5, "seed": 7, "max_tokens": 3}
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    run("generate", "--prompt", "x", "--template", "none", "--stop", r"a\n", "--stop", "b", *words)
    run("generate", "--prompt", "x", "--template", "none")
    assert taken == [Sampling(**given, stop=("a\n", "b")), Sampling(temperature=0.0, max_tokens=254)]


def test_a_prompt_without_an_answer_says_why_and_ends_in_1(run):
    ran = run("generate", "--prompt", "x", "--template", "none", error=ValueError("out of memory"))
    assert (ran.code, ran.out) == (1, "(no answer: The network could not compute a step: out of memory)\n")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--prompt", "x", "--logprobs", "1"], "--logprobs is printed in JSON alone: add --json."),
        (["--prompt", " "], "There is no prompt: give --prompt or --prompts-file, or pipe a text in."),
        ([], "There is no prompt: give --prompt or --prompts-file, or pipe a text in."),
        (["--prompts-file", "bad.json"], "bad.json must hold a JSON list of texts, one for each prompt."),
        (
            ["--prompts-file", "no.json"],
            "no.json is not JSON: Expecting value: line 1 column 1 (char 0). Write a list of texts, "
            "one for each prompt.",
        ),
        (["--prompts-file", "missing"], "There is no file missing. Correct the path."),
        (["--prompt", "x", "--max-tokens", "0"], "--max-tokens is 0: ask for at least one token."),
        (["--prompt", "x", "--stop", ""], "--stop is empty: leave it out, or name a text."),
        (["--prompt", "x", "--temperature", "-1"], "temperature is -1.0: it must be a number of at least 0."),
        (
            ["--prompt", "x", "--template", "alpacca"],
            "template 'alpacca' is neither alpaca nor plain nor a text with {instruction} in it.",
        ),
        (
            ["--prompt", "x", "--template", "plain", "--chat-template", "c.jinja"],
            "--chat-template c.jinja and --template plain: give one of them.",
        ),
        (
            ["--prompt", "x", "--template", "plain", "--chat-template-kwargs", '{"enable_thinking": false}'],
            "--chat-template-kwargs is for a chat template, but --template plain is none: give one of them.",
        ),
        (
            ["--prompt", "x", "--template", "none", "--system", "s"],
            "A system message needs a chat template, but prompts are made without one: leave it out, or give one "
            "(--chat-template FILE).",
        ),
        (
            ["--prompt", "x", "--prompt", "long " * 200, "--template", "none"],
            "Prompt 2 of 2 has 1001 tokens, but the model takes 256, the answer included: make it shorter, or lower "
            "--max-tokens.",
        ),
    ],
)
def test_errors_are_one_line(run, words, message, tmp_path):
    (tmp_path / "bad.json").write_text('{"a": 1}')
    (tmp_path / "no.json").write_text("no")
    ran = run("generate", *words)
    assert (ran.code, ran.out, ran.err) == (1, "", [f"mindlora: error: {message}"])


def test_an_adapter_that_cannot_be_used_is_an_error_before_anything_is_compiled(run):
    ran = run("generate", "--prompt", "x", "--adapter", "broken")
    assert (ran.code, ran.err) == (1, ["mindlora: error: broken holds no tensors: copy the adapter again."])


def test_fixed_batches_that_are_no_numbers_are_usage(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", "--config", "x", "--prompt", "x", "--fixed-batches", "1;2"])
    assert stopped.value.code == 2
    message = "error: argument --fixed-batches: '1;2' must be numbers such as 1,2,4,8."
    assert capsys.readouterr().err.splitlines()[-1].endswith(message)


def test_a_yaml_that_does_not_exist_is_said_before_the_imports(capsys):
    assert cli.main(["generate", "--config", "nowhere.yaml", "--prompt", "x"]) == 1
    assert capsys.readouterr().err == "mindlora: error: --config nowhere.yaml does not exist. Check the path.\n"
