"""mindlora chat, driven by lines from a pipe, on an engine without a model: it says back what it was asked."""

import pytest


@pytest.fixture
def chat(run):
    """Returns a function that types lines and returns exit code, the answers and what is said besides."""

    def talk(*lines, options=()):
        ran = run("chat", "--template", "none", *options, typed="".join(f"{line}\n" for line in lines))
        place = next((place for place, line in enumerate(ran.err) if "earlier ones are not seen" in line), -1)
        return ran.code, ran.out.splitlines(), ran.err[place + 1 :]

    return talk


def test_each_line_is_answered_until_the_input_ends(chat):
    assert chat("hello", "", "   ", " /cats ") == (0, ["hello", "/cats"], [])


def test_adapters_are_switched_and_compared(chat):
    lines = ["hi", "/base", "/again", "/base", "/again", "/adapter formal", "hi", "/adapter", "/adapters"]
    code, answers, told = chat(*lines, options=["--adapter", "pirate", "--adapter", "formal"])
    assert (code, answers) == (0, ["Arr, hi", "hi", "Arr, hi", "Dear Sir, hi"])
    assert told == [
        "answers come from the base",
        "answers come from pirate",
        "answers come from formal",
        "answers come from formal",
        "  broken",
        "* formal",
        "  pirate",
    ]


def test_without_an_adapter_the_base_answers(chat):
    code, answers, told = chat("hi", "/base", "/adapter pirate", "hi", "/base", "hi", "/base", "hi")
    assert answers == ["hi", "Arr, hi", "hi", "Arr, hi"]
    assert told[0] == "error: Answers come from the base already: choose an adapter with /adapter NAME."


def test_what_is_wrong_is_said_and_the_chat_goes_on(chat):
    code, answers, told = chat(
        "/again",
        "/bsae",
        "/adapter pirat",
        "/adapter broken",
        "/seed x",
        "/temperature -1",
        "/temperature warm",
        "/reset now",
        "/system be kind",
        "long " * 60,
        "hi",
    )
    assert (code, answers) == (0, ["hi"])
    assert told == [
        "error: Nothing has been asked yet: ask something before /again.",
        "error: There is no command /bsae. Did you mean /base? Type /help for all, or a space before the slash to send "
        "it.",
        "error: There is no adapter called pirat. Did you mean pirate? Type /adapters for a list.",
        "error: broken holds no tensors: copy the adapter again.",
        "error: /seed takes a whole number, and got 'x'.",
        "error: temperature is -1.0: it must be a number of at least 0.",
        "error: /temperature takes a number, and got 'warm'.",
        "error: /reset takes nothing behind it, and got 'now'.",
        "error: A system message needs a chat template, but this chat has none. Start it with --chat-template FILE.",
        "error: This message is 300 tokens in its prompt, but the model takes 256, its answer included: make it "
        "shorter.",
    ]


def test_a_step_that_fails_costs_one_answer(run):
    ran = run("chat", "--template", "none", typed="hi\n/again\n", error=ValueError("out of memory"))
    assert ran.code == 0 and ran.out == "\n"
    assert ran.err[-2:] == [
        "error: The network could not compute a step: out of memory",
        "error: Nothing has been asked yet: ask something before /again.",
    ]


def test_settings_are_told_and_exit_leaves(chat):
    code, answers, told = chat("/temperature", "/temperature 0", "/seed 3", "/seed", "/reset", "/exit", "never")
    assert (code, answers) == (0, [])
    assert told == [
        "temperature is 0.7",
        "temperature is 0",
        "the next answer has seed 3, later ones add 1",
        "each answer draws a new seed",
        "what was said is forgotten",
    ]
    code, answers, told = chat("/help")
    assert [line.split()[0] for line in told][:3] == ["/adapter", "/base", "/adapters"] and len(told) == 10


def test_through_a_chat_template_the_conversation_is_seen(run):
    ran = run("chat", "--system", "be kind", typed="hi\n/system\nwell\n/reset\n/system be\nhi\n")
    # The engine says what its prompt holds, up to the end of the first turn.
    assert ran.out.splitlines() == ["system", "be kind", "user", "hi", "system", "be"]
    assert ran.err[-3:] == ["there is no system message", "what was said is forgotten", "the system message is set"]
    assert "mindlora: prompts: through the chat template of the tokenizer; the base answers" in "\n".join(ran.err)


def test_old_turns_are_left_behind_with_a_word(run):
    ran = run("chat", typed="".join(f"{word * 8}\n" for word in ("there are cats ", "and dogs here ", "no cats ")) * 2)
    assert "(the oldest turn no longer fits into the window, and is forgotten)" in ran.err
    assert ran.code == 0


def test_a_chat_needs_a_template_unless_it_is_told_otherwise(run, monkeypatch):
    from tests.support import scripted_engine

    plain = scripted_engine.chat_tokenizer(None)
    monkeypatch.setattr(scripted_engine, "chat_tokenizer", lambda _: plain)
    ran = run("chat", typed="hi\n")
    assert ran.code == 1
    assert ran.err == [
        "mindlora: error: The tokenizer has no chat template: give one with --chat-template FILE, such as "
        "chat_template.jinja of a model with the same tokens. For an adapter that was trained on instructions, give "
        "the prompt of its training instead (--template alpaca)."
    ]
    assert run("chat", "--template", "plain", typed="hi\n").out == "hi\n\n"
    ran = run("generate", "--prompt", "hi")
    assert ran.out == "hi\n"
    assert "mindlora: prompts: the text itself, as the tokenizer has no chat template" in "\n".join(ran.err)
