"""Who may use the server, and how much of it."""

import contextlib
import socket

import httpx
import pytest

from mindlora.core.errors import ConfigError
from mindlora.serving.server.access import ApiKeys, KeyLimits
from mindlora.serving.server.errors import ApiError
from mindlora.serving.server.settings import ServerSettings, is_local
from tests.support.served_apps import ask, complete, error_of, live, make_app, until

ANN = {"Authorization": "Bearer sk-ann"}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# people\nann sk-ann\n\n  bob\tsk-bob  \n")
    return str(path)


def test_without_its_key_nobody_gets_an_answer(engine, keys):
    app = make_app(engine, api_key_file=keys)
    wrong = [{}, {"Authorization": "Bearer sk-anna"}, {"Authorization": "sk-ann"}, {"Authorization": "Bearer "}]
    wrong += [{"Authorization": b"Bearer \xff\xfe"}, {"Authorization": "Basic sk-ann"}, {"X-Api-Key": "sk-ann"}]
    for headers in wrong:
        for path, body in (("/v1/models", None), ("/v1/completions", {}), ("/metrics", None), ("/openapi.json", None)):
            answer = ask(app, path, body, headers=headers)
            assert answer.status_code == 401 and error_of(answer)["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    for key in ("sk-ann", "sk-bob"):
        assert ask(app, "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    assert ask(app, "/v1/models", headers={"authorization": "bearer sk-ann"}).status_code == 200


def test_health_needs_no_key(engine, keys):
    app = make_app(engine, api_key_file=keys)
    assert [ask(app, path).status_code for path in ("/health", "/ready")] == [200, 200]


def test_all_keys_are_compared_in_constant_time(keys, monkeypatch):
    import hmac

    compared = []
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((len(a), len(b))) or a == b)
    found = ApiKeys(keys)
    assert [found.name_of(key) for key in (b"sk-ann", b"sk-bob", b"")] == ["ann", "bob", None]
    assert compared == [(32, 32)] * 6


@pytest.mark.parametrize("text", ["", "# none\n", "sk-ann\n", "ann sk ann\n", "ann a\nann b\n", "ann a\nbob a\n"])
def test_a_file_of_keys_that_is_not_one_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError, match="--api-key-file"):
        ApiKeys(str(tmp_path / "keys"))
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(str(tmp_path / "nothing"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "example.org", ""])
def test_another_address_needs_keys_or_a_word(host, keys):
    with pytest.raises(ConfigError, match="--no-auth"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, no_auth=True) and ServerSettings(host=host, api_key_file=keys)
    assert not is_local(host)


def test_this_machines_own_addresses_need_none():
    assert all(ServerSettings(host=host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    with pytest.raises(ConfigError, match="contradict|both"):
        ServerSettings(no_auth=True, api_key_file="keys")


@pytest.mark.parametrize(
    "given", [{"port": 70000}, {"max_body_bytes": 0}, {"grace": -1}, {"request_seconds": 0}, {"key_requests": 0}]
)
def test_settings_out_of_range_are_refused(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        ServerSettings(**given)


def test_web_pages_are_let_in_only_from_the_origins_that_were_named(engine):
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in ask(make_app(engine), "/v1/models", headers=asked).headers
    app = make_app(engine, cors_origins=("https://a.example",))
    assert ask(app, "/v1/models", headers=asked).headers["access-control-allow-origin"] == "https://a.example"
    assert ask(app, "/v1/completions", method="OPTIONS", headers=asked).status_code == 200
    other = {**asked, "Origin": "https://b.example"}
    assert "access-control-allow-origin" not in ask(app, "/v1/models", headers=other).headers


def test_a_page_may_ask_before_it_sends_its_key(engine, keys):
    app = make_app(engine, cors_origins=("https://a.example",), api_key_file=keys)
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    # As openai's JavaScript client asks in a browser.
    wanted = "authorization,content-type,x-stainless-arch,x-stainless-os,x-stainless-retry-count"
    asked["Access-Control-Request-Headers"] = wanted
    answer = ask(app, "/v1/completions", method="OPTIONS", headers=asked)
    assert answer.status_code == 200 and answer.headers["access-control-allow-headers"] == wanted
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = {**asked, "Origin": "https://b.example"}
    refused = ask(app, "/v1/completions", method="OPTIONS", headers=other)
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    seen = ask(app, "/v1/models", headers={**ANN, "Origin": "https://a.example"})
    assert "x-request-id" in seen.headers["access-control-expose-headers"].lower()


def test_a_page_whose_name_stands_for_this_machine_is_not_answered(engine, keys):
    def status(app, host):
        return ask(app, "/v1/models", headers={"Host": host}).status_code

    app = make_app(engine)
    for host in ("a.example", "a.example:8000", "localhost.a.example", "127.0.0.1.a.example", "[::1].a.example"):
        answer = ask(app, "/v1/models", headers={"Host": host})
        assert answer.status_code == 403 and error_of(answer)["code"] == "host_not_allowed"
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.1.2.3"):
        assert status(app, host) == 200
    assert status(make_app(engine, no_auth=True), "a.example") == 200
    answer = ask(make_app(engine, api_key_file=keys), "/v1/models", headers={**ANN, "Host": "a.example"})
    assert answer.status_code == 200


def test_a_large_body_is_not_read(engine):
    app = make_app(engine, max_body_bytes=1000)
    for answer in (complete(app, "x" * 1000), ask(app, "/v1/nothing", content=b"x" * 1001)):
        assert answer.status_code == 413 and error_of(answer)["code"] == "body_too_large"

    async def chunks():
        for _ in range(20):
            yield b"x" * 100

    assert ask(app, "/v1/completions", content=chunks()).status_code == 413
    assert complete(app, "x" * 10).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(engine):
    with live(make_app(engine, body_seconds=0.1)) as url:
        address = httpx.URL(url)
        with contextlib.closing(socket.create_connection((address.host, address.port))) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: [::1]:80\r\nContent-Length: 100\r\n\r\n{")
            connection.settimeout(5)
            assert connection.recv(100).startswith(b"HTTP/1.1 408 ")


def test_requests_of_a_key_at_once_are_bounded(engine, keys):
    app = make_app(engine, api_key_file=keys, key_requests=1)
    engine.runner.going.clear()
    fields = {"model": "pirate", "prompt": "x", "max_tokens": 4}
    with live(app) as url, httpx.Client(base_url=url, headers=ANN, timeout=10) as client:
        import threading

        first = []
        thread = threading.Thread(target=lambda: first.append(client.post("/v1/completions", json=fields)))
        thread.start()
        until(lambda: engine.snapshot().waiting + engine.snapshot().running)
        second = client.post("/v1/completions", json=fields)
        assert second.status_code == 429 and error_of(second)["code"] == "too_many_requests"
        assert second.headers["Retry-After"] == "1"
        engine.runner.going.set()
        thread.join()
        assert first[0].status_code == 200
        assert client.post("/v1/completions", json=fields).status_code == 200


def test_requests_of_a_key_in_a_minute_are_bounded():
    limits = KeyLimits(None, 3)

    def send(key, now):
        with limits.hold(key, now):
            pass

    for now in (0.0, 1.0, 2.0):
        send("ann", now)
    with pytest.raises(ApiError, match="3 requests a minute") as refused:
        send("ann", 3.0)
    assert (refused.value.status, refused.value.retry_after) == (429, 17)
    send("bob", 3.0)
    send("ann", 20.0)
    with pytest.raises(ApiError):
        send("ann", 21.0)


def test_a_request_that_fails_counts_no_longer(engine):
    app = make_app(engine, key_requests=1)
    assert [complete(app, [1, 99999]).status_code for _ in range(3)] == [400] * 3
    assert complete(app).status_code == 200
