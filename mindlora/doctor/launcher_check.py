"""Asks mindlora-run's own preflight whether it would refuse a YAML."""

import contextlib
import importlib.util
import io
import os
import tempfile
from typing import Iterator

from mindlora.checks.finding import Finding
from mindlora.errors import ConfigMistakes, LoraError


def check_with_launcher(path: str) -> Iterator[Finding]:
    """Yields what mindlora-run would refuse or warn of before it builds anything; nothing without MindFormers."""
    if not all(importlib.util.find_spec(package) for package in ("mindspore", "mindformers")):
        return
    # MindFormers' log says nothing about the YAML here. It also goes to a file, by default under the working folder,
    # and some warnings of MindSpore bypass Python's streams.
    os.environ.setdefault("GLOG_v", "3")
    with tempfile.TemporaryDirectory(prefix="mindlora-doctor-") as folder, contextlib.redirect_stdout(io.StringIO()):
        os.environ.setdefault("LOG_MF_PATH", folder)
        try:
            from mindformers.tools.register import MindFormerConfig

            from mindlora.plugin.launching import preflight
            from mindlora.plugin.mistakes import find_warnings

            config = MindFormerConfig(path)
            yield from (Finding("warning", "", found) for found in find_warnings(config))
            preflight.prepare(config)
        except ConfigMistakes as error:
            yield from (Finding("error", "", mistake) for mistake in error.mistakes)
        except LoraError as error:
            yield Finding("error", "", str(error))
        except Exception as error:
            # MindFormers' readers raise exceptions of many kinds, and mindlora-run would fail with the same one.
            yield Finding("error", "", f"mindlora-run would fail on this YAML: {type(error).__name__}: {error}")
