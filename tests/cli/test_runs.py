"""mindlora report and runs: the page of a run, and a list of runs."""

import json

import pytest

from mindlora import cli
from tests.support.histories import write_history


def test_the_page_of_a_run_is_in_its_folder(tmp_path, capsys):
    write_history(tmp_path / "run", steps=20)
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    assert capsys.readouterr().out == f"{page}: {tmp_path / 'run'}\n" and page.read_text("utf-8").endswith("</html>")


def test_several_runs_are_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("first", "second"):
        write_history(tmp_path / name, steps=20, seed=len(name))
    assert cli.main(["report", "first", "second"]) == 0
    assert "Settings that differ" in (tmp_path / "comparison.html").read_text("utf-8")
    assert cli.main(["report", "first", "second", "--output", "pages/both.html", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {
        "output": "pages/both.html",
        "runs": ["first", "second"],
    }
    assert (tmp_path / "pages" / "both.html").is_file()


def test_a_folder_without_a_run_is_an_error(tmp_path, capsys):
    write_history(tmp_path / "run", steps=2)
    assert cli.main(["report", str(tmp_path / "run"), str(tmp_path), "--output", str(tmp_path / "x.html")]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"mindlora: error: {tmp_path} has no metrics.jsonl: name the output folder")
    assert not (tmp_path / "x.html").exists()


def test_runs_are_listed(tmp_path, capsys):
    write_history(tmp_path / "run", steps=20)
    assert cli.main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["run", "finished", "20", "of", "20"]
    assert cli.main(["runs", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["path"], run["state"], run["step"], run["held_out_step"]) == (str(tmp_path / "run"), "finished", 20, 20)
    assert cli.main(["runs", str(tmp_path / "run" / "nothing")]) == 1
    assert "is not a folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, said",
    [
        (("--port", "0"), "--port is for the live page: add --live."),
        (("--live", "--output", "x.html"), "--live writes no file: leave out --output."),
    ],
)
def test_options_of_the_file_and_of_the_live_page_exclude_each_other(tmp_path, capsys, words, said):
    write_history(tmp_path / "run", steps=2)
    assert cli.main(["report", str(tmp_path / "run"), *words]) == 1
    assert capsys.readouterr().err == f"mindlora: error: {said}\n"
