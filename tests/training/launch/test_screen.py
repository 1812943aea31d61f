"""What mindlora-run prints: everything into a pipe; on a terminal a progress bar and mindlora's messages."""

import sys

import pytest
from mindformers.tools.register import MindFormerConfig

from mindlora.training.launch import launcher
from mindlora.training.launch.screen import progress_only
from mindlora.training.log import logger
from tests.support.tiny_runs import LORA_YAML


def test_only_mindloras_messages_are_on_the_screen(tmp_path, capsys):
    config = MindFormerConfig(callbacks=[MindFormerConfig(type="MFLossMonitor")], output_dir=str(tmp_path / "out"))
    with pytest.raises(RuntimeError), progress_only(config):
        print("a line of MindFormers")
        logger.warning("Saved in %s.", "here")
        raise RuntimeError
    print("after")
    log = tmp_path / "out" / "log" / "screen.log"
    assert capsys.readouterr().out == (
        f"MindFormers' log is in {log}; --verbose prints it here.\nwarning: Saved in here.\nafter\n"
    )
    assert "a line of MindFormers" in log.read_text("utf-8") and "after" not in log.read_text("utf-8")
    assert [callback["type"] for callback in config.callbacks] == ["MFLossMonitor", "ProgressBar"]


@pytest.mark.parametrize(
    "terminal, flags, shown",
    [(False, [], True), (True, [], False), (True, ["--verbose"], True), (True, ["--run_mode", "eval"], True)],
)
def test_a_terminal_gets_the_log_only_if_asked_for(tmp_path, capsys, monkeypatch, terminal, flags, shown):
    monkeypatch.setattr(launcher, "run", lambda config: print("a line of MindFormers"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert launcher.main(["--config", LORA_YAML, "--output_dir", str(tmp_path), *flags]) == 0
    assert ("a line of MindFormers" in capsys.readouterr().out) == shown
