"""Calls of tools: what an answer that calls them must be, and how it is taken apart as it comes."""

import json

import pytest

from mindlora.serving.constraints import Constraint, ConstraintCompiler
from mindlora.serving.tools import HERMES, LLAMA3, CallArguments, CallBegin, CallReader, format_of, tool_constraint
from tests.support.chat_templates import CHATML, HERMES_TOOLS, chat_tokenizer
from tests.support.chat_templates import LLAMA3 as LLAMA3_TEMPLATE

pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = {"weather": Constraint("json", CITY, "weather"), "time": Constraint("json", {"type": "object"}, "time")}


def call(form, name, arguments):
    return form.begin(name) + arguments + form.end


PARIS = '{"city": "Paris }\\n", "days": 2}'


@pytest.fixture(scope="module", params=[(), ("<tool_call>", "</tool_call>")], ids=["text", "tokens"])
def accepts(request):
    """Returns a function that returns whether a constraint lets a text be written, and lets it end there."""
    tokenizer = chat_tokenizer(CHATML)
    tokenizer.add_tokens(list(request.param))
    compiler = ConstraintCompiler(tokenizer)

    def accepted(text, form, required, several=True):
        grammar = compiler.compile(tool_constraint(form, TOOLS, required, several, request.param))
        matcher = grammar._matcher.deep_copy()
        tokens = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return accepted


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
@pytest.mark.parametrize("required", [True, False])
def test_a_call_has_a_known_name_and_arguments_of_the_schema(accepts, form, required):
    assert accepts(call(form, "weather", PARIS), form, required)
    assert accepts(call(form, "time", "{}"), form, required)
    assert not accepts(call(form, "weather", '{"days": 2}'), form, required)
    assert not accepts(call(form, "weather", '{"city": "Paris", "days": "2"}'), form, required)
    assert not accepts(call(form, "place", "{}"), form, required)
    assert accepts("It rains {}.", form, required) is not required
    assert not accepts(call(form, "time", "{}") + " Done.", form, required)


def test_hermes_may_call_several_and_say_something_before(accepts):
    two = call(HERMES, "time", "{}") + "\n" + call(HERMES, "weather", PARIS)
    assert accepts(two, HERMES, True) and accepts("Let me see.\n" + two, HERMES, False)
    assert not accepts(two, HERMES, True, several=False)
    assert not accepts("Let me see.\n" + two, HERMES, True)


def parts_of(pieces, form):
    """Returns the text outside of calls, (name, arguments) of each call, and whether the calls are complete."""
    reader = CallReader(form, ["weather", "time"])
    text, calls = "", []
    for place, piece in enumerate(pieces):
        for part in reader.read(piece, place == len(pieces) - 1):
            if isinstance(part, CallBegin):
                assert part.number == len(calls)
                calls.append([part.name, ""])
            elif isinstance(part, CallArguments):
                assert part.number == len(calls) - 1 and part.text
                calls[-1][1] += part.text
            else:
                assert not calls
                text += part
    return text, [tuple(each) for each in calls], reader.complete


ANSWERS = [
    (HERMES, "It is <b> 3 < 4 <tool", "It is <b> 3 < 4 <tool", []),
    (HERMES, call(HERMES, "weather", '{"city": "a}\\n"}'), "", [("weather", '{"city": "a}\\n"}')]),
    (
        HERMES,
        "Let me see. " + call(HERMES, "time", "{\n}") + "\n" + call(HERMES, "weather", '{"city": ""}'),
        "Let me see. ",
        [("time", "{\n}"), ("weather", '{"city": ""}')],
    ),
    (LLAMA3, "No { call }", "No { call }", []),
    (LLAMA3, call(LLAMA3, "weather", '{"city": "}}"}'), "", [("weather", '{"city": "}}"}')]),
    (LLAMA3, call(LLAMA3, "time", "{}"), "", [("time", "{}")]),
]


@pytest.mark.parametrize("form, answer, text, calls", ANSWERS)
def test_an_answer_is_taken_apart_the_same_whatever_its_pieces(form, answer, text, calls):
    expected = (text, calls, bool(calls))
    for size in (1, 2, 3, 7, len(answer)):
        pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
        assert parts_of(pieces, form) == expected
        assert parts_of([*pieces, ""], form) == expected


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_a_call_that_is_cut_off_is_shown_as_far_as_it_came(form):
    whole = call(form, "weather", '{"city": "Paris"}')
    text, calls, complete = parts_of([whole[: whole.index("ris")]], form)
    assert (text, calls, complete) == ("", [("weather", '{"city": "Pa')], False)


@pytest.mark.parametrize("form", [HERMES, LLAMA3], ids=["hermes", "llama3"])
def test_nothing_around_the_arguments_is_shown_wherever_the_call_is_cut_off(form):
    arguments = '{"city": "a\\"}}", "days": [{"x": 1}]}'
    whole = call(form, "weather", arguments)
    for cut in range(1, len(whole)):
        for size in (1, 5, cut):
            text, calls, complete = parts_of(
                [whole[start : min(start + size, cut)] for start in range(0, cut, size)], form
            )
            assert text in ("", form.opening[:cut].rstrip("\n")) and not complete
            assert not calls or calls[0][0] == "weather" and arguments.startswith(calls[0][1])
    assert calls == [("weather", arguments)]


def test_llama3s_text_is_shown_as_soon_as_it_can_be_no_call():
    reader = CallReader(LLAMA3, ["weather"])
    assert reader.read('{"na', False) == [] and reader.read('me": "x"', False) == ['{"name": "x"']
    assert reader.read('{"name": "weather", "parameters": ', False) == ['{"name": "weather", "parameters": ']


def test_the_chat_template_tells_the_format():
    assert format_of(HERMES_TOOLS) is HERMES
    assert format_of(LLAMA3_TEMPLATE) is LLAMA3
    assert format_of(CHATML) is None
    assert json.loads(call(LLAMA3, "weather", PARIS))["parameters"]["days"] == 2
