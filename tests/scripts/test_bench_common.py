"""What the benchmarks share."""

import os

import pytest

from tests.conftest import ROOT


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "scripts"))
    from bench_common import parser

    for path in (tmp_path, tmp_path / "nowhere/figures.json"):
        with pytest.raises(SystemExit):
            parser("").parse_args(["--json", str(path)])
        assert f"{path} cannot be written: name a new file in a folder that is there" in capsys.readouterr().err
    assert parser("").parse_args(["--json", str(tmp_path / "figures.json")]).json == str(tmp_path / "figures.json")
