"""The page at /: what is served, to whom, and what the browser may do with it."""

import base64
import hashlib
import re

import pytest

from mindlora.serving.server.run import AnswersWhileLoading
from mindlora.serving.server.settings import ServerSettings
from tests.support.served_apps import ask, error_of, make_app


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("ann sk-ann\n")
    return str(path)


def policy_of(answer):
    directives = answer.headers["Content-Security-Policy"].split("; ")
    return dict(directive.split(" ", 1) for directive in directives)


def hash_of(text):
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_page_may_run_and_ask_nothing_else(engine):
    answer = ask(make_app(engine), "/")
    assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = policy_of(answer)
    (style,) = re.findall("<style>(.*?)</style>", answer.text, re.S)
    (script,) = re.findall('<script type="module">(.*?)</script>', answer.text, re.S)
    assert policy["style-src"] == hash_of(style) and policy["script-src"] == hash_of(script)
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in str(policy) and "http" not in str(policy)
    assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Referrer-Policy"] == "no-referrer"


def test_the_page_is_one_file_of_plain_text(engine):
    text = ask(make_app(engine), "/").text
    assert not re.search(
        r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", text
    )
    assert not re.search(r"<(img|link|script|iframe)[^>]+(src|href)=[\"'](?!data:,)", text)
    # The policy refuses attributes that hold style or script.
    assert not re.search(r"<[^>]+\s(style|on\w+)=", text.split("<body>")[1].split("<script")[0])


def test_both_languages_have_the_same_texts(engine):
    text = ask(make_app(engine), "/").text
    english, chinese = (
        re.findall(r"(\w+): (?:\"|\()", re.search(rf"^  {language}: {{(.*?)^  }},", text, re.S | re.M).group(1))
        for language in ("en", "zh")
    )
    assert english == chinese and len(english) > 50
    named = set(re.findall(r'data-(?:text|label|placeholder)="(\w+)"', text)) | set(re.findall(r"\bsay\.(\w+)", text))
    assert named <= set(english)


def test_the_page_needs_no_key_and_what_it_asks_does(engine, keys):
    app = make_app(engine, api_key_file=keys)
    assert ask(app, "/").status_code == 200
    assert ask(app, "/metrics").status_code == ask(app, "/v1/models").status_code == 401


def test_without_a_page_there_is_nothing_at_its_address(engine, keys):
    for settings in ({}, {"api_key_file": keys}):
        answer = ask(make_app(engine, page=False, **settings), "/")
        assert answer.status_code == 404 and error_of(answer)["code"] == "not_found"


def test_a_page_of_another_name_for_this_machine_is_refused(engine):
    answer = ask(make_app(engine), "/", headers={"Host": "evil.example"})
    assert answer.status_code == 403 and error_of(answer)["code"] == "host_not_allowed"


def test_the_page_is_there_while_the_model_is_loaded():
    loading = AnswersWhileLoading(ServerSettings())
    assert policy_of(ask(loading, "/")) and ask(loading, "/ready").status_code == 503
    assert ask(AnswersWhileLoading(ServerSettings(page=False)), "/").status_code == 503
