"""The registry of forms: what is added to it is read, written and offered to users, with no other change."""

import pytest

from mindlora import cli
from mindlora.core.errors import LoraError
from mindlora.files.adapters import files as adapter_files
from mindlora.files.adapters.dialects import registry
from mindlora.files.adapters.dialects.dialect import Dialect, Keys, write_file
from mindlora.models.architectures.architecture import LEGACY
from tests.support.adapter_samples import Q, make


class Reversed(Dialect):
    """A form whose keys are written from right to left."""

    name = form = "reversed"
    ending = ".safetensors"
    world = LEGACY

    def matches(self, file):
        return any(key.endswith("_aroL") for key in file.keys)

    def sort(self, file):
        return Keys({key: (key[:-7][::-1], key[-6]) for key in file.keys})

    def write(self, adapter, path):
        write_file(path, {f"{cell[::-1]}.{part}_aroL": a for (cell, part), a in adapter.tensors.items()}, {})


@pytest.fixture
def with_another(monkeypatch):
    another = Reversed()
    monkeypatch.setattr("mindlora.files.adapters.files.DIALECTS", (*registry.DIALECTS, another))
    monkeypatch.setattr(registry, "DIALECTS", (*registry.DIALECTS, another))
    monkeypatch.setitem(registry.FORMS, another.form, another)


def test_a_form_that_is_added_is_written_and_read(tmp_path, with_another):
    path = str(tmp_path / "a.safetensors")
    adapter = make()
    adapter_files.write(adapter, path, "reversed")
    found = adapter_files.read(path)
    assert found.dialect == "reversed"
    assert found.tensors.keys() == adapter.tensors.keys()
    assert found.tensors[Q, "A"].tobytes() == adapter.tensors[Q, "A"].tobytes()


def test_users_can_choose_it(tmp_path, with_another, capsys):
    adapter_files.write(make(), str(tmp_path / "a"))
    output = str(tmp_path / "a.safetensors")
    assert cli.main(["adapter", "convert", str(tmp_path / "a"), output, "--to", "reversed"]) == 0
    assert "-> " + output + " (reversed)" in capsys.readouterr().out
    with pytest.raises(LoraError, match="format 'reversed' writes a file that ends in .safetensors"):
        adapter_files.check_adapter_output(str(tmp_path / "b"), "reversed")


def test_no_two_forms_have_one_name():
    assert len(registry.FORMS) == sum(bool(dialect.form) for dialect in registry.DIALECTS)
    assert set(registry.FORMS) == {"peft", "mindformers", "ckpt", "slora", "mcore", "pynative", "diffusers", "kohya"}


def test_a_form_that_is_only_read_is_not_offered(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["adapter", "convert", str(tmp_path), str(tmp_path / "b"), "--to", "mlx-lm"])
    assert "invalid choice: 'mlx-lm'" in capsys.readouterr().err
