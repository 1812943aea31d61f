"""What import_mindformers puts off works when it is needed."""

import subprocess
import sys

SCRIPT = """
import gc, sys
from mindlora.training.launch.imports import import_mindformers

import_mindformers()
assert "mindformers" in sys.modules and "nltk" not in sys.modules
assert gc.isenabled() and gc.get_freeze_count() > 100000
from mindformers.core.metric import metric

if hasattr(metric, "SmoothingFunction"):  # MindFormers 2.1 does without.
    words = [["a", "b", "c", "d"]], ["a", "b", "c", "e"]
    here = metric.sentence_bleu(*words, smoothing_function=metric.SmoothingFunction().method3)
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    assert 0 < here == sentence_bleu(*words, smoothing_function=SmoothingFunction().method3)
"""


def test_nltk_is_imported_when_a_metric_calls_it():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
