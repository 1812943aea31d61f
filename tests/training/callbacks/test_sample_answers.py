"""SampleAnswers in MindSpore's own training loop: answers before and after, in the report; and what it refuses."""

import types

import mindspore as ms
import pytest
from mindspore import Tensor, ops

from mindlora.core.errors import ConfigError
from mindlora.data import tokenizers
from mindlora.training.callbacks.registry import LoraCheckpoint, RunReport, SampleAnswers
from mindlora.training.report.history import read_history
from tests.support.scripted_runs import Model, ScriptedStep, train

LENGTH = 24
LOSSES = [3.0, 2.5, 2.0]


class Shifted(Model):
    """Its likeliest token is the one before it plus 1, and plus the value that training writes into B."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary = vocabulary
        self.config = types.SimpleNamespace(seq_length=LENGTH)

    def construct(self, tokens):
        shift = 1 + self.wq.mindpet_delta_lora_b[0, 0].astype(ms.int32)
        next_tokens = (tokens + shift) % self.vocabulary
        return ops.one_hot(next_tokens, self.vocabulary, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)), tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The path of a small tokenizer, and the tokenizer."""
    path = str(tmp_path_factory.mktemp("tokenizer") / "tokenizer")
    trained = tokenizers.fit_tokenizer(["good morning, good evening, good night"] * 3, 280)
    tokenizers.save_tokenizer(trained, path)
    return path, trained


def expected(tokenizer, prompt, shift):
    """The four tokens after the prompt, as text."""
    last = tokenizers.encode(tokenizer, prompt + "\n")[-1]
    return tokenizer.decode([(last + shift * (n + 1)) % len(tokenizer) for n in range(4)], skip_special_tokens=True)


def test_answers_before_and_after_are_in_the_report(tokenizer, tmp_path):
    path, loaded = tokenizer
    prompts = ["good morning", "night"]
    callbacks = [
        LoraCheckpoint(save_steps=2, directory=str(tmp_path / "saved")),
        SampleAnswers(prompts, path, template="plain", max_tokens=4),
        RunReport(str(tmp_path)),
    ]
    train(callbacks, LOSSES, step=ScriptedStep(Shifted(len(loaded))))
    answers = read_history(str(tmp_path)).answers
    assert [record["step"] for record in answers] == [0, 3]
    for record, shift in zip(answers, (1, 4)):
        wanted = [{"prompt": prompt, "answer": expected(loaded, prompt, shift).strip()} for prompt in prompts]
        assert record["answers"] == wanted
    assert "good morning" in (tmp_path / "report.html").read_text("utf-8")


def test_a_resumed_run_answers_at_its_end_alone(tokenizer, tmp_path):
    path, loaded = tokenizer
    saved = str(tmp_path / "saved")
    train([LoraCheckpoint(save_steps=2, directory=saved)], LOSSES, step=ScriptedStep(Shifted(len(loaded))))
    callbacks = [
        LoraCheckpoint(save_steps=2, directory=saved, resume=f"{saved}/step_2"),
        SampleAnswers(["night"], path, template="plain", max_tokens=4),
        RunReport(str(tmp_path)),
    ]
    train(callbacks, LOSSES, skip=2, step=ScriptedStep(Shifted(len(loaded))))
    assert [record["step"] for record in read_history(str(tmp_path)).answers] == [3]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompts": "good morning"}, "prompts is 'good morning', but it must be a list of texts"),
        ({"prompts": []}, r"prompts is \[\], but it must be a list of texts"),
        ({"max_tokens": 0}, "max_tokens is 0: it must be a whole number of at least 1"),
    ],
)
def test_wrong_arguments_are_refused(tokenizer, changes, message):
    with pytest.raises(ConfigError, match=message):
        SampleAnswers(**{"prompts": ["night"], "tokenizer": tokenizer[0], **changes})


def test_a_prompt_that_fills_the_window_is_refused(tokenizer):
    path, loaded = tokenizer
    with pytest.raises(ConfigError, match="the prompt .* has .* tokens with its template, but seq_length is 24"):
        train([SampleAnswers(["night " * 20], path)], LOSSES, step=ScriptedStep(Shifted(len(loaded))))
