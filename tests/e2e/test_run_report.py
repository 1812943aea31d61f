"""What a run of mindlora-run leaves behind of itself, without a word of it in the YAML."""

import pytest

from mindlora.training.report.history import read_history
from tests.support.runs import ROWS, SEQUENCE, step_losses


def test_a_run_records_itself(trained):
    history = read_history(str(trained.output))
    steps, losses = history.series("loss")
    assert steps.tolist() == list(range(1, 2 * ROWS // 4 + 1))
    assert losses.tolist() == pytest.approx(step_losses(trained.stdout), abs=1e-6)
    assert set(history.series("tokens")[1]) == {4.0 * SEQUENCE} and not any(step["skipped"] for step in history.steps)
    rates = history.series("learning_rate")[1]
    assert rates.max() == pytest.approx(1e-2) and rates[-1] < 1e-3
    (run,) = history.runs
    configuration, defaults = run["run"]["configuration"], run["run"]["defaults"]
    assert configuration["runner_config"]["epochs"] == 2 and defaults["runner_config.epochs"] == 1
    assert run["run"]["data"]["rows"] == ROWS and run["run"]["data"]["tokens in a row"] == SEQUENCE + 1
    page = (trained.output / "report.html").read_text("utf-8")
    assert "Training report" in page and "runner_config.epochs" in page
