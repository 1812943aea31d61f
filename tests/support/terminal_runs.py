"""mindlora generate and chat on a tiny Llama, one after the other in one process; and what training says of it.

Run as a script in a folder of served_llama.write_llama: it writes ended.json there.
"""

import contextlib
import io
import json
import os
import signal
import sys
import time

import yaml

PROMPTS = ["how many cats", "and dogs", "no cats there"]
TOKENS = 12
MODEL = ("--config", "run.yaml", "--adapters", "adapters", "--adapter", "first", "--adapter", "second")

INTERRUPT = "INTERRUPT"
# What is typed into the chat.
LINES = [PROMPTS[0], "/adapter second", "/again", "/base", "/again", INTERRUPT, "and on and on", PROMPTS[0]]


class Typed(io.StringIO):
    """Standard input that is typed line by line, and what INTERRUPT stands for: Ctrl-C at the start of an answer."""

    def __init__(self, text, screen):
        super().__init__(text)
        self.screen = screen

    def readline(self, *_):
        line = super().readline()
        if line.strip() != INTERRUPT:
            return line
        self.screen.armed = True
        return super().readline()


class Screen(io.StringIO):
    """Standard output that presses Ctrl-C once, as soon as something is written after it was armed."""

    armed = False

    def write(self, text):
        if self.armed:
            self.armed = False
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)
        return super().write(text)


def command(words, typed=""):
    """Runs a command line; returns its exit code, stdout and stderr."""
    from mindlora import cli

    stdout, stderr, before = Screen(), io.StringIO(), sys.stdin
    sys.stdin = Typed(typed, stdout)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = cli.main(words)
    finally:
        sys.stdin = before
    return code, stdout.getvalue(), stderr.getvalue()


def greedy(adapter):
    """Returns what training continues the prompts with, as text."""
    import mindspore as ms
    from mindformers.models.build_model import build_network
    from mindformers.tools.register import MindFormerConfig

    from mindlora import load_lora
    from mindlora.data.tokenizers import load_tokenizer
    from mindlora.network.load_base import load_base
    from mindlora.training.callbacks.sample_answers import Continuations

    ms.set_context(mode=ms.PYNATIVE_MODE)
    config = MindFormerConfig("run.yaml")
    del config.model.model_config["pet_config"]
    network = build_network(config.model)
    load_base(network, config.load_checkpoint)
    if adapter:
        load_lora(network, os.path.join("adapters", adapter))
    tokenizer = load_tokenizer(config.load_checkpoint)
    rows = [[tokenizer.bos_token_id, *tokenizer.encode(text, add_special_tokens=False)] for text in PROMPTS]
    window = config.model.model_config.seq_length
    continued = Continuations(network, window, tokenizer.pad_token_id, tokenizer.eos_token_id, TOKENS)
    found = continued.greedy(rows)
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in found]


def main():
    """Runs everything."""
    # As on a terminal: in the background of a shell, Ctrl-C is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open("prompts.json", "w", encoding="utf-8") as file:
        json.dump(PROMPTS, file)
    asked = ["--base", "--prompts-file", "prompts.json", "--template", "none", "--max-tokens", str(TOKENS), "--json"]
    # As the YAMLs for Ascend have it.
    with open("run.yaml", encoding="utf-8") as file:
        config = yaml.safe_load(file)
    config["context"]["jit_config"] = {"jit_level": "O1"}
    with open("run.yaml", "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file)
    ended = {"generate": command(["generate", *MODEL, *asked])}
    # What the YAML says, config.json says too.
    ended["from the folder"] = command(["generate", "--model", "base", *MODEL[2:], *asked])
    lines = [*PROMPTS, "/again"]
    ended["qwen3"] = command(
        ["chat", "--model", "qwen3", "--temperature", "0", "--max-tokens", str(TOKENS)], "\n".join(lines) + "\n"
    )
    chat = ["chat", *MODEL, "--template", "none", "--temperature", "0", "--max-tokens", str(TOKENS)]
    ended["chat"] = command(chat, "\n".join(LINES) + "\n")
    ended["greedy"] = [greedy(adapter) for adapter in (None, "first")]
    with open("ended.json", "w", encoding="utf-8") as file:
        json.dump(ended, file)


if __name__ == "__main__":
    main()
