"""The page in a real browser: chats with one model and two, settings, keys, errors, keyboard, telephone, languages."""

import json
import re
import time

import pytest

from tests.support.chat_templates import HERMES_TOOLS
from tests.support.chromium import browser
from tests.support.scripted_engine import BASE, make_engine, started, write_adapter
from tests.support.served_apps import live, make_app, until

pytest.importorskip("selenium")
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import Select  # noqa: E402

END = "<|im_end|>"
MARKUP = "<b>bold</b> <img src=//evil.example/x onerror=alert(1)>"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
THOUGHT = "'<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' if message.reasoning_content else ''"


@pytest.fixture(scope="module")
def window():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def talkers(tmp_path_factory):
    """An engine with adapters, each of which says one thing."""
    folder = tmp_path_factory.mktemp("talkers")
    write_adapter(folder, "broken", "")
    write_adapter(folder, "caller", "Let me see.\n" + CALL + END)
    write_adapter(folder, "markup", MARKUP + END)
    write_adapter(folder, "pirate", "Arr, matey." + END)
    write_adapter(folder, "thinker", "<think>\nTwo\n</think>\n\nThere are 2." + END)
    with started(make_engine(str(folder), num_blocks=1024, seq_length=1024)) as engine:
        yield engine


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(HERMES_TOOLS.replace("message.content", f"({THOUGHT}) + message.content"))
    return str(path)


class Page:
    """The page of a server, opened, with what a reader does on it."""

    def __init__(self, window, engine, url, log):
        self.window, self.engine, self.url, self._log = window, engine, url, log

    def open(self, **view):
        self.window.open(self.url, **view)
        return self

    def ready(self):
        until(lambda: self.window.texts("#state") == ["ready"])
        return self

    def choose(self, *models):
        for model, element in zip(models, self.window.driver.find_elements("css selector", "select.model")):
            Select(element).select_by_visible_text(model)

    def send(self, text):
        self.window.find("#prompt").send_keys(text, Keys.ENTER)

    def answers(self):
        """Returns the texts of all answers once they are complete."""
        until(lambda: self.window.find("#send").is_displayed())
        return self.window.texts("article .text")

    def asked(self):
        """Returns (model, [(role, content)]) of each request for an answer."""
        lines = [json.loads(line) for line in self._log.read_text().splitlines()]
        asked = [line for line in lines if line["path"] == "/v1/chat/completions"]
        return [(line["model"], [(turn["role"], turn.get("content")) for turn in line["prompt"]]) for line in asked]


@pytest.fixture
def page(window, talkers, template, tmp_path):
    """The page; at the end, nothing may have come from elsewhere or broken the policy, and all scripts have run."""
    log = tmp_path / "requests.jsonl"
    app = make_app(talkers, chat_template=template, request_log=str(log), log_prompts=True)
    with live(app) as url:
        yield Page(window, talkers, url, log)
        talkers.runner.delay, talkers.runner.error = 0.0, None
        talkers.runner.going.set()
        said = [line for line in window.console() if "Failed to load resource" not in line]
        requested = window.requested()
        window.driver.get("about:blank")
    assert said == []
    assert requested and all(address.startswith((f"{url}/", "data:,")) for address in requested), requested
    assert all("?" not in address for address in requested)


def test_two_models_answer_one_prompt_side_by_side_and_go_on(page):
    page.open().ready().choose(BASE, "pirate")
    page.send("hello cats")
    base, pirate = page.answers()
    assert base.endswith("hello cats") and pirate == "Arr, matey."
    left, right = page.window.driver.find_elements("css selector", "article")
    assert left.rect["y"] == right.rect["y"] and left.rect["x"] + left.rect["width"] < right.rect["x"]
    page.send("and dogs")
    assert page.answers()[2:] == [base, pirate]
    first, second = page.asked()[:2], page.asked()[2:]
    assert sorted(first) == [("pirate", [("user", "hello cats")]), (BASE, [("user", "hello cats")])]
    then = [("user", "and dogs")]
    assert sorted(second) == [
        ("pirate", [("user", "hello cats"), ("assistant", pirate), *then]),
        (BASE, [("user", "hello cats"), ("assistant", base), *then]),
    ]


def test_an_answer_is_shown_while_it_comes_with_its_figures_in_the_end(page):
    page.open().ready()
    page.window.find("#compare").click()
    page.choose("pirate")
    page.engine.runner.delay = 0.05
    page.send("hi")
    shown = until(lambda: page.window.texts("article[aria-busy] .text") != [""] and page.window.texts("article .text"))
    assert "Arr, matey.".startswith(shown[0]) and page.window.find("#stop").is_displayed()
    assert page.answers() == ["Arr, matey."]
    (figures,) = page.window.texts("article .figures")
    tokens = len(page.engine.tokenizer.encode("Arr, matey." + END, add_special_tokens=False))
    count, rate, first, cached = figures.split(" · ")
    assert count == f"{tokens} tokens" and first.startswith("first after 0.")
    assert 5 < float(rate.removesuffix(" tokens/s")) < 20  # 50 ms a token, and what the browser takes
    page.engine.runner.delay = 0.0
    page.send("hi again")
    page.answers()
    cached_again = page.window.texts("article .figures")[1].split(" · ")[-1]
    (part, prompt), (part_again, prompt_again) = (
        map(int, re.fullmatch(r"(\d+) of (\d+) prompt tokens cached", said).groups()) for said in (cached, cached_again)
    )
    assert part < prompt <= part_again < prompt_again


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_a_stopped_answer_ends_on_the_server_and_is_part_of_the_conversation(page, how):
    page.open().ready().choose(BASE, "pirate")
    page.engine.runner.delay = 0.05
    page.send("a long text that is repeated")
    until(lambda: all(len(text) > 3 for text in page.window.texts("article .text")))
    page.window.find("#stop").click() if how == "button" else page.window.press(Keys.ESCAPE)
    texts = page.answers()
    until(lambda: page.engine.snapshot().running == 0)
    assert "stopped" in page.window.texts("article .figures")[0]
    assert page.window.driver.switch_to.active_element == page.window.find("#prompt")
    page.engine.runner.delay = 0.0
    page.send("go on")
    page.answers()
    assert ("assistant", texts[0]) in dict(page.asked()[2:])[BASE]


def test_errors_are_shown_as_the_server_says_them_and_leave_the_conversation(page):
    page.open().ready().choose("broken", "pirate")
    page.send("hi")
    page.answers()
    assert page.window.texts("article .error") == ["broken holds no tensors: copy the adapter again.", ""]
    page.choose("pirate")
    page.send("again")
    page.answers()
    assert [("user", "again")] in [turns for _, turns in page.asked()[2:]]
    page.engine.runner.delay = 0.05
    page.send("break")
    until(lambda: page.window.texts("article[aria-busy] .text") and page.window.texts("article .text")[-1])
    page.engine.runner.error = RuntimeError("no")
    page.answers()
    assert page.window.texts("article .error")[-2:] == 2 * ["The network could not compute a step: no"]


def test_settings_reach_the_request_and_wrong_ones_do_not(page):
    page.open().ready().choose(BASE, "pirate")
    page.window.find("[name=system]").send_keys("Be brief.")
    page.window.find("[name=max_tokens]").send_keys("3")
    page.window.find("[name=temperature]").send_keys("101")
    page.send("hi")
    assert page.window.texts("article") == [] and page.window.find("[name=temperature]:invalid")
    page.window.find("[name=temperature]").clear()
    page.window.find("#settings summary").click()
    page.window.find("[name=tools]").send_keys("[{]")
    page.window.find("#send").click()
    assert page.window.texts("article") == [] and page.window.find("[name=tools]:invalid")
    page.window.find("[name=tools]").clear()
    page.window.find("#send").click()
    page.answers()
    assert all(figures.startswith("3 tokens") and "cut off" in figures for figures in page.window.texts(".figures"))
    assert all(turns == [("system", "Be brief."), ("user", "hi")] for _, turns in page.asked())
    page.window.find("#fresh").click()
    assert page.window.texts("article") == []


def test_thoughts_are_folded_and_calls_shown_whose_results_go_back(page):
    page.open().ready().choose("thinker", "caller")
    page.window.run("document.querySelector('details').open = true")
    page.window.find("[name=tools]").send_keys(json.dumps(TOOLS))
    page.send("How many cats?")
    assert page.answers() == ["There are 2.", "Let me see."]
    thought, hidden = page.window.driver.find_elements("css selector", ".thought")
    assert thought.is_displayed() and not thought.get_attribute("open") and not hidden.is_displayed()
    assert page.window.texts(".thought p") == ["Two", ""]
    assert page.window.texts(".call .name") == ["weather"]
    assert json.loads(page.window.texts(".call pre")[0]) == {"city": "Rome"}
    page.window.find(".call textarea").send_keys("It rains.")
    page.window.find(".calls > button").click()
    until(lambda: len(page.window.texts("article")) == 3)
    page.answers()
    assert page.asked()[-1] == (
        "caller",
        [("user", "How many cats?"), ("assistant", "Let me see."), ("tool", "It rains.")],
    )


def test_the_conversation_goes_on_after_a_call_that_was_cut_off(page):
    page.open().ready().choose("caller", "caller")
    page.window.run("document.querySelector('details').open = true")
    page.window.find("[name=tools]").send_keys(json.dumps(TOOLS))
    page.window.find("[name=max_tokens]").send_keys("60")
    page.send("How many cats?")
    page.answers()
    assert "cut off" in page.window.texts(".figures")[0] and page.window.texts(".call pre")[0] == '{"ci'
    page.window.find("[name=max_tokens]").clear()
    page.send("again")
    page.answers()
    assert page.window.texts("article .error") == 4 * [""]
    assert page.asked()[-1][1] == [("user", "How many cats?"), ("assistant", "Let me see."), ("user", "again")]


def test_the_end_stays_in_sight_until_the_reader_scrolls_up(page):
    page.open(height=400).ready().choose(BASE, "pirate")
    page.engine.runner.delay = 0.02
    page.send("hello " * 40)
    until(lambda: page.window.run("const talk = document.getElementById('talk'); return talk.scrollTop > 60"))
    page.window.run("document.getElementById('talk').scrollTop -= 50")
    height = page.window.run("return document.getElementById('talk').scrollTop")
    tokens = len(page.window.texts("article .text")[0])
    until(lambda: len(page.window.texts("article .text")[0]) > tokens + 40)
    assert page.window.run("return document.getElementById('talk').scrollTop") == height


def test_text_of_a_model_is_text(page):
    page.open().ready().choose("markup", "markup")
    page.send(MARKUP)
    assert page.answers() == [MARKUP, MARKUP] and page.window.texts(".prompt") == [MARKUP]
    assert page.window.run("return document.querySelectorAll('#turns b, #turns img').length") == 0
    refused = "try { document.body.innerHTML = '<p>'; return '' } catch (error) { return error.name }"
    assert page.window.run(refused) == "TypeError"
    page.window.console()


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(window, talkers, tmp_path):
    (tmp_path / "keys").write_text("ann sk-ann\n")
    with live(make_app(talkers, api_key_file=str(tmp_path / "keys"), request_log="/dev/null")) as url:
        page = Page(window, talkers, url, None).open()
        until(lambda: window.find("#ask-key").is_displayed())
        assert "This server asks for a key" in window.texts("#key-said")[0]
        window.press("wrong", Keys.ENTER)
        until(lambda: window.find("#ask-key").is_displayed())
        window.press("sk-ann", Keys.ENTER)
        page.ready().choose(BASE, "pirate")
        page.send("hi")
        assert len(page.answers()) == 2 and window.texts("article .error") == ["", ""]
        assert window.driver.current_url == f"{url}/" and window.run("return document.cookie") == ""
        assert window.run("return [localStorage.length, Object.values({...sessionStorage})]") == [0, ["sk-ann"]]
        assert not any("sk-ann" in address for address in window.requested())
        window.driver.refresh()
        page.ready()
        window.driver.get("about:blank")


def test_the_keyboard_is_enough(page):
    page.open().ready()
    active = page.window.driver.switch_to
    assert active.active_element == page.window.find("#prompt")
    page.window.press("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.window.find("#prompt").get_attribute("value") == "one\ntwo"
    page.window.press(Keys.SHIFT, Keys.TAB, Keys.TAB, Keys.TAB, Keys.NULL)
    page.window.press("p")
    assert page.window.run("return document.activeElement.value") == "pirate"
    for key in (Keys.TAB, Keys.TAB, Keys.TAB, Keys.ENTER):
        page.window.press(key)
    page.answers()
    assert ("pirate", [("user", "one\ntwo")]) in page.asked()
    names = [active.active_element.accessible_name]
    while active.active_element.tag_name != "summary":
        page.window.press(Keys.TAB)
        names.append(active.active_element.accessible_name)
    assert names == [
        *("Message", "Send", "System prompt", "Temperature", "Most tokens"),
        *("top_p", "top_k", "min_p", "Seed", "More"),
    ]  # fmt: skip


@pytest.mark.parametrize("width, dark", [(320, False), (390, True)])
def test_on_a_telephone_the_columns_stack_and_nothing_is_wider(page, width, dark):
    page.open(width=width, height=700, phone=True, dark=dark).ready().choose("markup", "pirate")
    page.send("a_long_word_without_a_space_" * 8)
    page.answers()
    above, below = page.window.driver.find_elements("css selector", "article")
    assert above.rect["y"] + above.rect["height"] < below.rect["y"] and above.rect["x"] == below.rect["x"]
    everything = "[...document.querySelectorAll('body *')]"
    wide = f"return {everything}.filter((one) => one.getBoundingClientRect().right > innerWidth)"
    for _ in range(2):
        assert page.window.run("return [document.documentElement.scrollWidth, innerWidth]") == [width, width]
        assert page.window.run(f"{wide}.map((one) => one.outerHTML)") == []
        page.window.find("#fold").click()
    assert not page.window.find("#panel").is_displayed()
    channels = page.window.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert max(channels) < 40 if dark else min(channels) > 230


def test_in_chinese(page):
    page.open(language="zh-CN")
    until(lambda: page.window.texts("#state") == ["就绪"])
    assert page.window.texts("#send, #stop, #fresh, #fold") == ["新对话", "设置", "发送", "停止"]
    assert page.window.run("return document.documentElement.lang") == "zh-CN"
    page.choose(BASE, "pirate")
    page.send("你好")
    page.answers()
    assert "个 token" in page.window.texts("article .figures")[1]
    until(lambda: "运行中的请求" in page.window.texts("#figures dt"))


def test_what_the_server_holds_is_shown(page):
    page.open().ready().choose(BASE, "pirate")
    page.send("hi")
    page.answers()

    def figures():
        return dict(zip(page.window.texts("#figures dt"), page.window.texts("#figures dd")))

    until(lambda: figures().get("Slots that hold an adapter") not in (None, "0"))
    assert figures()["Adapters"] == "5" and figures()["Requests running"] == "0"
    until(lambda: sorted(page.window.texts("#adapters tbody td:first-child")) == ["pirate", BASE])


def test_a_new_adapter_can_be_chosen_and_a_server_that_is_gone_is_said(window, tmp_path):
    write_adapter(tmp_path, "first", "One." + END)
    with started(make_engine(str(tmp_path))) as engine, live(make_app(engine, request_log="/dev/null")) as url:
        page = Page(window, engine, url, None).open().ready()
        write_adapter(tmp_path, "second", "Two." + END)

        def offered():
            # The server looks at the folder once a second.
            time.sleep(0.3)
            window.run("for (const one of document.querySelectorAll('select.model')) one.focus()")
            return window.texts("select.model option")

        until(lambda: offered() == 2 * [BASE, "first", "second"])
        page.choose("second")
    until(lambda: "cannot be reached" in window.texts("#state")[0])
    page.send("hi")
    assert all("cannot be reached" in text for text in page.answers() and window.texts("article .error"))
