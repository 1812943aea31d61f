"""/v1/models, and adapters that come and go while the server runs."""

import gzip
import json
import os
import time

import pytest

from mindlora.core.errors import ConfigError
from mindlora.serving.server import models as model_schemas
from tests.support.scripted_engine import BASE, make_engine, started, write_adapter
from tests.support.served_apps import ask, complete, error_of, make_app, until

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def names(app):
    return [entry["id"] for entry in ask(app, "/v1/models").json()["data"]]


def test_the_base_comes_first_and_is_the_parent_of_the_others(engine):
    app = make_app(engine)
    page = model_schemas.ModelPage(**ask(app, "/v1/models").json())
    assert [(entry.id, entry.parent) for entry in page.data] == [
        (BASE, None),
        ("broken", BASE),
        ("formal", BASE),
        ("pirate", BASE),
    ]
    assert {entry.max_model_len for entry in page.data} == {engine.seq_length}
    assert ask(app, "/v1/models/pirate").json() == page.data[3].model_dump()
    answer = ask(app, "/v1/models/pirat")
    assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"


def test_the_list_of_10000_is_made_once_until_it_changes(tmp_path):
    engine = make_engine(paths={f"adapter-{number:05}": str(tmp_path) for number in range(10_000)})
    models = make_app(engine).state.context.models
    plain, zipped = models.page(False), models.page(True)
    assert gzip.decompress(zipped) == plain and len(zipped) < len(plain) / 10
    assert len(json.loads(plain)["data"]) == 10_001
    assert models.page(True) is zipped
    begin = time.process_time()
    for _ in range(20):
        models.page(True)
    assert (time.process_time() - begin) / 20 < 0.005  # about 0.1 ms; rendering takes 100
    engine.adapters.unregister("adapter-00007")
    assert models.page(False) is not plain and len(json.loads(models.page(False))["data"]) == 10_000


def test_the_list_is_compressed_for_those_who_take_it(engine):
    app = make_app(engine)
    taken = ("gzip", "br, GZIP ;q=0.5", "*", "gzip;q=1, *;q=0", "gzip;q=0.001")
    refused = ("identity", "", "gzip;q=0", "br, gzip; q=0.000", "*;q=0", "gzip;q=0, *", "gzipped")
    answers = [ask(app, "/v1/models", headers={"Accept-Encoding": wanted}) for wanted in (*taken, *refused)]
    zipped = [answer.headers.get("content-encoding") == "gzip" for answer in answers]
    assert zipped == [True] * len(taken) + [False] * len(refused)
    assert all(answer.json() == answers[0].json() for answer in answers)


def test_an_adapter_does_not_have_the_bases_name(tmp_path, folder, caplog):
    for engine in (make_engine(paths={BASE: str(tmp_path)}), make_engine(str(folder), name="pirate")):
        with pytest.raises(ConfigError, match=rf"adapter '{engine.model_name}', .* or the base \(--model-name\)"):
            make_app(engine)
    app = make_app(make_engine(str(folder)))
    assert names(app) == [BASE, "pirate"]
    write_adapter(folder, BASE, "Ahoy, ")
    write_adapter(folder, "second", "Ahoy, ")
    until(lambda: "second" in names(app), 3)
    assert names(app) == [BASE, "pirate", "second"] and f"is called {BASE}, as the base" in caplog.text


def test_head_is_answered_as_get(engine):
    app = make_app(engine)
    for path in ("/health", "/ready", "/v1/models", "/metrics"):
        answer = ask(app, path, method="HEAD")
        assert answer.status_code == 200 and answer.headers["content-type"] == ask(app, path).headers["content-type"]
    app.state.context.starting = True
    assert [ask(app, path, method="HEAD").status_code for path in ("/health", "/ready")] == [200, 503]


@pytest.fixture
def folder(tmp_path):
    write_adapter(tmp_path / "adapters", "pirate", "Arr, ")
    return tmp_path / "adapters"


@pytest.fixture
def app(folder):
    with started(make_engine(str(folder))) as engine:
        yield make_app(engine, allow_runtime_loading=True)


def test_an_adapter_can_be_loaded_and_unloaded(app, folder):
    write_adapter(folder, "formal", "Dear Sir, ")
    answer = ask(app, LOAD, {"lora_name": "letter", "lora_path": "formal"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'letter' added successfully.")
    assert complete(app, model="letter").json()["choices"][0]["text"] == "Dear Sir, hello cats"
    assert "letter" in names(app)
    answer = ask(app, UNLOAD, {"lora_name": "letter"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'letter' removed successfully.")
    assert complete(app, model="letter").status_code == 404 and "letter" not in names(app)
    assert ask(app, UNLOAD, {"lora_name": "letter"}).status_code == 404


def test_an_adapter_can_be_replaced(app, folder):
    write_adapter(folder, "formal", "Dear Sir, ")
    taken = {"lora_name": "pirate", "lora_path": str(folder / "formal")}
    answer = ask(app, LOAD, taken)
    assert answer.status_code == 400 and "already" in error_of(answer)["message"]
    assert ask(app, LOAD, {**taken, "load_inplace": True}).status_code == 200
    assert complete(app, model="pirate").json()["choices"][0]["text"] == "Dear Sir, hello cats"


def test_a_new_folder_can_be_used_within_a_second(app, folder):
    assert complete(app, model="formal").status_code == 404
    write_adapter(folder, "formal", "Dear Sir, ")
    until(lambda: complete(app, model="formal").status_code == 200, 3)
    assert "formal" in names(app)


def test_an_adapter_that_is_replaced_on_disk_is_read_again(app, folder):
    assert complete(app, model="pirate").json()["choices"][0]["text"] == "Arr, hello cats"
    write_adapter(folder, "pirate", "Ahoy, ")
    assert complete(app, model="pirate").json()["choices"][0]["text"] == "Ahoy, hello cats"


def test_a_damaged_adapter_is_not_loaded(app, folder):
    write_adapter(folder, "broken", "")
    answer = ask(app, LOAD, {"lora_name": "new", "lora_path": "broken"})
    assert answer.status_code == 400 and "holds no tensors" in error_of(answer)["message"]
    assert "new" not in names(app)


@pytest.mark.parametrize("path", ["..", "../outside", "/etc", ".", "nothing", "link", "a\0b", "pirate/../../outside"])
def test_only_what_is_in_the_folder_is_loaded(app, folder, path):
    write_adapter(folder.parent, "outside", "secret")
    os.symlink(folder.parent / "outside", folder / "link")
    answer = ask(app, LOAD, {"lora_name": "new", "lora_path": path})
    assert answer.status_code == 400 and "no adapter at" in error_of(answer)["message"]


def test_names_that_are_none_are_refused(app):
    for name in ("", "a\nb", "x" * 300, BASE):
        assert ask(app, LOAD, {"lora_name": name, "lora_path": "pirate"}).status_code == 400
    # A name is never a path.
    assert ask(app, LOAD, {"lora_name": "../../x", "lora_path": "pirate"}).status_code == 200
    assert complete(app, model="../../x").status_code == 200


def test_loading_is_off_unless_it_is_allowed(engine):
    app = make_app(engine)
    for path, body in ((LOAD, {"lora_name": "new", "lora_path": "pirate"}), (UNLOAD, {"lora_name": "pirate"})):
        answer = ask(app, path, body)
        assert answer.status_code == 403 and "--allow-runtime-loading" in error_of(answer)["message"]
    assert complete(app, model="pirate").status_code == 200
