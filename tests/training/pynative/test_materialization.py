"""A model that MindFormers builds without values gets room for them where it trains."""

import subprocess
import sys

from tests.support.pynative_runs import environment, only_with_pynative_trainer

pytestmark = only_with_pynative_trainer

CODE = """
import sys

from tests.support.pynative_cpu import ONE_DEVICE

sys.path.insert(1, ONE_DEVICE)
import mindspore as ms
from mindspore import nn

from mindlora.training.pynative.pet import on_current_device

ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
with ms.DeviceCtx("meta"):
    cell = nn.Dense(2, 3)
cell.to_empty = on_current_device(cell.to_empty)
cell.to_empty()
print("on meta:", cell.weight.is_meta, cell.weight.asnumpy().shape)
"""


def test_room_for_values_is_made_on_the_current_device(tmp_path):
    # Not in a process that begins as a run does: there this method is replaced.
    command = [sys.executable, "-c", CODE]
    run = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "on meta: False (3, 2)" in run.stdout, run.stderr[-2000:]
