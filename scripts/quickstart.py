"""The quickstart: prepares data, trains a tiny base, fine-tunes it with LoRA through a YAML, and shows what changed."""

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from typing import List, Tuple

# Before transformers is imported: it would warn that there is no PyTorch, which nothing here needs.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXTS = os.path.join(ROOT, "scripts", "quickstart_data")
BASE_YAML = os.path.join(ROOT, "configs", "tiny", "pretrain_llama_tiny_cpu.yaml")
LORA_YAML = os.path.join(ROOT, "configs", "tiny", "lora_llama_tiny_cpu.yaml")
TEMPLATE = "{instruction}\n"
VOCABULARY, SEQUENCE, HELD_OUT, COPIES = 1000, 64, 0.1, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few steps only, to check an installation")
    parser.add_argument("--output", default=os.path.join(ROOT, "output", "quickstart"), help="where to write")
    parser.add_argument("--evaluate", metavar="ADAPTER", help=argparse.SUPPRESS)
    args = parser.parse_args()
    paths = Paths(os.path.abspath(args.output), args.short)
    os.makedirs(paths.output, exist_ok=True)
    os.chdir(paths.output)
    if args.evaluate:
        evaluate(paths, args.evaluate)
        return
    started = time.time()
    say("1/4  Data: a tokenizer of 1,000 tokens, the base text, 432 dialogues to train on and 48 held out")
    prepare_data(paths)
    if os.path.exists(paths.base):
        say(f"2/4  Base: a Llama of 1 M parameters, trained before ({os.path.relpath(paths.base, ROOT)})")
    else:
        say("2/4  Base: trains a Llama of 1 M parameters on the bundled text, once")
        train_base(paths, args.short)
    say("3/4  LoRA: fine-tunes it on the dialogues through configs/tiny/lora_llama_tiny_cpu.yaml")
    train_lora(paths, args.short)
    adapter = os.path.join(paths.lora_run, "lora_checkpoint", "best")
    say("4/4  Result: base and adapter, loaded by a fresh process")
    run(
        [sys.executable, os.path.abspath(__file__), "--output", paths.output, "--evaluate", adapter]
        + (["--short"] if args.short else []),
        "evaluate.log",
        keep_stdout=True,
    )
    if args.short:
        print("\n     (--short trains for seconds: it shows that everything works, not what LoRA can do.)")
    print(
        f"\nadapter     {adapter}\nreport      {os.path.join(paths.lora_run, 'report.html')} (open it in a browser)"
        f"\nlogs        {paths.output}/*.log\ndone in {time.time() - started:.0f} s"
    )


class Paths:
    """Where the quickstart reads and writes. The base is cached under a hash of all that it depends on."""

    def __init__(self, output, short):
        self.output = output
        key = hashlib.sha256(str((VOCABULARY, SEQUENCE, HELD_OUT, COPIES, TEMPLATE, short)).encode())
        for name in (BASE_YAML, os.path.join(TEXTS, "base.txt"), os.path.join(TEXTS, "dialogues.json")):
            with open(name, "rb") as file:
                key.update(file.read())
        self.cache = os.path.join(output, f"cache_{key.hexdigest()[:12]}")
        self.tokenizer = os.path.join(self.cache, "tokenizer")
        self.base_text = os.path.join(self.cache, "base.mindrecord")
        self.dialogues = os.path.join(self.cache, "dialogues.mindrecord")
        self.held_out = os.path.join(self.cache, "dialogues-heldout.mindrecord")
        self.base = os.path.join(self.cache, "base.ckpt")
        self.base_run = os.path.join(output, "base")
        self.lora_run = os.path.join(output, "lora")
        self.yaml = os.path.join(output, "lora.yaml")


def prepare_data(paths: Paths) -> None:
    """Writes tokenizer and MindRecords, unless an earlier run did."""
    if os.path.exists(paths.held_out):
        return
    shutil.rmtree(paths.cache, ignore_errors=True)
    os.makedirs(paths.cache)
    from mindlora.data import alpaca, text, tokenizers

    dialogues = os.path.join(TEXTS, "dialogues.json")
    with open(dialogues, encoding="utf-8") as file:
        rows = json.load(file)
    with open(os.path.join(TEXTS, "base.txt"), encoding="utf-8") as file:
        base_text = file.read()
    seen = rows[: -round(len(rows) * HELD_OUT)]
    spoken = [TEMPLATE.format(**row) + row["output"] for row in seen]
    tokenizer = tokenizers.train_tokenizer([base_text] + spoken, VOCABULARY, paths.tokenizer)
    # Copies in other orders, so that no answer is learned from the paragraph before it.
    paragraphs = base_text.strip().split("\n\n")
    shuffle = random.Random(1)
    shuffled = os.path.join(paths.cache, "base_shuffled.txt")
    with open(shuffled, "w", encoding="utf-8") as file:
        for _ in range(COPIES):
            file.write("\n\n".join(shuffle.sample(paragraphs, len(paragraphs))) + "\n\n")
    text.convert_text(shuffled, paths.base_text, tokenizer, SEQUENCE, paragraphs=True)
    # The last dialogues are held out, not drawn, because the tokenizer must not have seen them either.
    for output, part in ((paths.dialogues, seen), (paths.held_out, rows[len(seen) :])):
        source = os.path.splitext(output)[0] + ".json"
        with open(source, "w", encoding="utf-8") as file:
            json.dump(part, file)
        alpaca.convert_alpaca(source, output, tokenizer, SEQUENCE, template=TEMPLATE, strict=True)


def train_base(paths: Paths, short: bool) -> None:
    shutil.rmtree(paths.base_run, ignore_errors=True)
    launch(
        BASE_YAML,
        paths.base_run,
        "base.log",
        "--train_dataset_dir",
        paths.base_text,
        *(["--runner_config.epochs", "1"] if short else []),
    )
    checkpoints = os.path.join(paths.base_run, "checkpoint", "rank_0")
    newest = max(
        (entry.path for entry in os.scandir(checkpoints) if entry.name.endswith(".ckpt")), key=os.path.getmtime
    )
    os.replace(newest, paths.base)


def train_lora(paths: Paths, short: bool) -> None:
    shutil.rmtree(paths.lora_run, ignore_errors=True)
    with open(LORA_YAML, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    # Before LoraCheckpoint, for the report: how well it does on what it does not learn, and how each adapter fares.
    watching = [
        {"type": "HeldOutLoss", "dataset_dir": paths.held_out, "every_steps": 50},
        {"type": "AdapterHealth", "every_steps": 25},
    ]
    config["callbacks"] = watching + config["callbacks"]
    with open(paths.yaml, "w", encoding="utf-8") as file:
        yaml.safe_dump(config, file, sort_keys=False)
    launch(
        paths.yaml,
        paths.lora_run,
        "lora.log",
        "--train_dataset_dir",
        paths.dialogues,
        "--load_checkpoint",
        paths.base,
        *(["--runner_config.epochs", "1"] if short else []),
    )


def launch(config: str, output: str, log: str, *flags: str) -> None:
    """Runs what a user types, mindlora-run --config YAML ...: its log to a file, its progress bar to the screen."""
    run(
        [sys.executable, "-m", "mindlora.training.launch.launcher", "--config", config, "--output_dir", output, *flags],
        log,
    )


def run(command: List[str], log: str, keep_stdout: bool = False) -> None:
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=None if keep_stdout else file, check=False).returncode
    if code != 0:
        sys.exit(f"quickstart: {' '.join(command[:5])} ... failed with exit code {code}; see {os.path.abspath(log)}")


def evaluate(paths: Paths, adapter: str) -> None:
    """Prints held-out loss and three answers, of the base alone and with the adapter, and adds them to the report."""
    log = open("evaluate.log", "w", encoding="utf-8")  # noqa: SIM115  MindFormers logs to it until the process ends
    screen, sys.stdout = sys.stdout, log
    # In a process of its own, meanwhile.
    asked = ask(paths, adapter)
    import mindspore as ms
    from mindformers.models.build_model import build_network
    from mindformers.tools.register import MindFormerConfig

    from mindlora import load_lora, trainable_summary
    from mindlora.training.held_out.held_out_loss import HeldOutLossCell, held_out_loss
    from mindlora.training.launch import hooks  # noqa: F401
    from mindlora.training.report import write_report
    from mindlora.training.report.history import HistoryWriter

    config = MindFormerConfig(LORA_YAML)
    ms.set_context(mode=config.context.mode, device_target=config.context.device_target)
    network = build_network(config.model)
    missing, _ = ms.load_param_into_net(network, ms.load_checkpoint(paths.base))
    assert all("mindpet_delta_lora" in name for name in missing), missing
    loss_cell = HeldOutLossCell(network, network.config.ignore_token_id)
    losses = [held_out_loss(loss_cell, paths.held_out, 16)]
    load_lora(network, adapter, on_base_mismatch="error")
    losses.append(held_out_loss(loss_cell, paths.held_out, 16))
    prompts, *answers = answered(asked)
    with open(os.path.join(adapter, "best.json"), encoding="utf-8") as file:
        step = json.load(file)["step"]
    with contextlib.closing(HistoryWriter(paths.lora_run, None)) as history:
        for at, loss, texts in zip((0, step), losses, answers):
            history.append(at, held_out_loss=loss)
            history.append(at, answers=[{"prompt": prompt, "answer": text} for prompt, text in zip(prompts, texts)])
    write_report([paths.lora_run], os.path.join(paths.lora_run, "report.html"))
    sys.stdout = screen
    print("     " + trainable_summary(network).splitlines()[-1])
    print(f"     held-out loss  before {losses[0]:.3f}   after {losses[1]:.3f}   (nats per token, 48 dialogues)")
    for prompt, old, new in zip(prompts, *answers):
        print(f"\n     {prompt}\n       before: {old}\n       after:  {new}")


def ask(paths: Paths, adapter: str) -> "subprocess.Popen[str]":
    """Asks base and adapter with what a user types: mindlora generate, the likeliest token each time."""
    command = [sys.executable, "-m", "mindlora.cli", "generate", "--config", LORA_YAML, "--load_checkpoint", paths.base]
    command += ["--tokenizer", paths.tokenizer, "--adapter", adapter, "--base", "--template", TEMPLATE, "--json"]
    command += ["--prompts-file", os.path.join(TEXTS, "prompts.json")]
    with open("generate.log", "w", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


def answered(asked: "subprocess.Popen[str]") -> Tuple[List[str], List[str], List[str]]:
    """Waits for the answers; returns the prompts and the first lines that base and adapter said to each."""
    report, _ = asked.communicate()
    if asked.returncode != 0:
        sys.exit(f"quickstart: mindlora generate failed; see {os.path.abspath('generate.log')}")
    # Base and adapter answer each prompt in turn.
    answers = json.loads(report)["answers"]
    lines = [answer["text"].split("\n")[0].strip() for answer in answers]
    return [answer["prompt"] for answer in answers[::2]], lines[::2], lines[1::2]


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
