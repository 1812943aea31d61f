"""The quickstart: prepares data, trains a tiny base, fine-tunes it with LoRA through a YAML, and shows the change."""

import argparse
import contextlib
import hashlib
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from typing import List, Sequence

# Set before transformers is imported, which would warn about PyTorch's absence; nothing here needs PyTorch.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# MindSpore warns about unused parts of MindFormers' models that it leaves out.
os.environ.setdefault("GLOG_v", "3")

import yaml

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TEXTS = os.path.join(ROOT, "scripts", "quickstart_data")
# Value of --model -> name of the model.
MODELS = {"qwen3": "Qwen3", "llama": "Llama"}
TEMPLATE = "{instruction}\n"
VOCABULARY, SEQUENCE, HELD_OUT, COPIES = 1000, 64, 0.1, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="a few steps only, to check an installation")
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="what to train (default: qwen3)")
    parser.add_argument("--output", default=os.path.join(ROOT, "output", "quickstart"), help="where to write")
    args = parser.parse_args()
    paths = Paths(os.path.abspath(args.output), args.short, args.model)
    title = MODELS[args.model]
    os.makedirs(paths.output, exist_ok=True)
    os.chdir(paths.output)
    started = time.time()
    say("1/4  Data: a tokenizer of 1,000 tokens, the base text, 432 dialogues to train on and 48 held out")
    prepare_data(paths)
    if os.path.exists(paths.base):
        say(f"2/4  Base: a {title} of 1 M parameters, trained before ({os.path.relpath(paths.base, ROOT)})")
    else:
        say(f"2/4  Base: trains a {title} of 1 M parameters on the bundled text, once")
        train_base(paths, args.short)
    say(f"3/4  LoRA: fine-tunes it on the dialogues through {os.path.relpath(paths.lora_yaml, ROOT)}")
    train_lora(paths, args.short)
    adapter = os.path.join(paths.lora_run, "lora_checkpoint", "best")
    say("4/4  Result: base and adapter, asked by mindlora generate and measured by mindlora eval")
    evaluate(paths, adapter)
    if args.short:
        print("\n     (--short trains for seconds: it shows that everything works, not what LoRA can do.)")
    print(
        f"\nbase        {paths.base}\nadapter     {adapter}"
        f"\nreport      {os.path.join(paths.lora_run, 'report.html')} (open it in a browser)"
        f"\nlogs        {paths.output}/*.log\ndone in {time.time() - started:.0f} s"
    )


class Paths:
    """The quickstart's paths. The base is cached under a hash of everything that it depends on."""

    def __init__(self, output, short, model="qwen3"):
        self.output = output
        self.base_yaml, self.lora_yaml = (
            os.path.join(ROOT, "configs", "tiny", f"{kind}_{model}_tiny_cpu.yaml") for kind in ("pretrain", "lora")
        )
        key = hashlib.sha256(str((VOCABULARY, SEQUENCE, HELD_OUT, COPIES, TEMPLATE, short)).encode())
        for name in (self.base_yaml, os.path.join(TEXTS, "base.txt"), os.path.join(TEXTS, "dialogues.json")):
            with open(name, "rb") as file:
                key.update(file.read())
        self.cache = os.path.join(output, f"cache_{key.hexdigest()[:12]}")
        self.tokenizer = os.path.join(self.cache, "tokenizer")
        self.base_text = os.path.join(self.cache, "base.mindrecord")
        self.dialogues = os.path.join(self.cache, "dialogues.mindrecord")
        self.held_out = os.path.join(self.cache, "dialogues-heldout.mindrecord")
        self.base = os.path.join(self.cache, f"{MODELS[model]}-tiny")
        self.base_run = os.path.join(output, "base")
        self.lora_run = os.path.join(output, "lora")
        self.yaml = os.path.join(output, "lora.yaml")


def prepare_data(paths: Paths) -> None:
    """Writes the tokenizer and the MindRecords, unless an earlier run did."""
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
    # Copies in different orders, so that no answer is learned from the preceding paragraph.
    paragraphs = base_text.strip().split("\n\n")
    shuffle = random.Random(1)
    shuffled = os.path.join(paths.cache, "base_shuffled.txt")
    with open(shuffled, "w", encoding="utf-8") as file:
        for _ in range(COPIES):
            file.write("\n\n".join(shuffle.sample(paragraphs, len(paragraphs))) + "\n\n")
    text.convert_text(shuffled, paths.base_text, tokenizer, SEQUENCE, paragraphs=True)
    # The last dialogues are held out, instead of random ones, because the tokenizer must not have seen them either.
    for output, part in ((paths.dialogues, seen), (paths.held_out, rows[len(seen) :])):
        source = os.path.splitext(output)[0] + ".json"
        with open(source, "w", encoding="utf-8") as file:
            json.dump(part, file)
        alpaca.convert_alpaca(source, output, tokenizer, SEQUENCE, template=TEMPLATE, strict=True)


def train_base(paths: Paths, short: bool) -> None:
    shutil.rmtree(paths.base_run, ignore_errors=True)
    launch(
        paths.base_yaml,
        paths.base_run,
        "base.log",
        "--train_dataset_dir",
        paths.base_text,
        *(["--runner_config.epochs", "1"] if short else []),
    )
    saved = os.path.join(paths.base_run, "checkpoint", "rank_0")
    weights = (entry.path for entry in os.scandir(saved) if entry.name.endswith((".ckpt", ".safetensors")))
    newest = max(weights, key=os.path.getmtime)
    # A folder in Hugging Face's form: config.json, weights, and the tokenizer, which comes last.
    made = f"{paths.base}.new"
    shutil.rmtree(made, ignore_errors=True)
    Command("convert.log", "base", "convert", newest, made, "--to", "hf", "--config", paths.base_yaml).report()
    shutil.copytree(paths.tokenizer, made, dirs_exist_ok=True)
    os.replace(made, paths.base)


def train_lora(paths: Paths, short: bool) -> None:
    shutil.rmtree(paths.lora_run, ignore_errors=True)
    with open(paths.lora_yaml, encoding="utf-8") as file:
        config = yaml.safe_load(file)
    # Before LoraCheckpoint, for the report: the held-out loss, and the adapters' health.
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
        "--load_ckpt_format",
        "safetensors",
        *(["--runner_config.epochs", "1"] if short else []),
    )


def launch(config: str, output: str, log: str, *flags: str) -> None:
    """Runs mindlora-run --config YAML ... as a user would: its log goes to a file, its progress bar to the screen."""
    run(
        [sys.executable, "-m", "mindlora.training.launch.launcher", "--config", config, "--output_dir", output, *flags],
        log,
    )


def run(command: List[str], log: str) -> None:
    with open(log, "w", encoding="utf-8") as file:
        code = subprocess.run(command, stdout=file, check=False).returncode
    if code != 0:
        sys.exit(f"quickstart: {' '.join(command[:5])} ... failed with exit code {code}; see {os.path.abspath(log)}")


class Command:
    """A command mindlora VERB ... as a user types it, in a separate process; its stderr goes to the file ``log``."""

    def __init__(self, log: str, *words: str):
        self.words = words
        with open(log, "w", encoding="utf-8") as file:
            command = [sys.executable, "-m", "mindlora.cli", *words]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True)
        self.log = os.path.abspath(log)

    def report(self) -> str:
        """Waits for the command's end, and returns its output."""
        printed, _ = self.process.communicate()
        if self.process.returncode != 0:
            sys.exit(f"quickstart: mindlora {' '.join(self.words[:2])} ... failed; see {self.log}")
        return printed


def evaluate(paths: Paths, adapter: str) -> None:
    """Prints the held-out loss and three answers, without and with the adapter, and adds them to the report."""
    of_both = ("--model", paths.base, "--adapter", adapter, "--json")
    # The two run side by side.
    measured = Command("eval.log", "eval", *of_both, "--rows", paths.held_out)
    questions = ("--template", TEMPLATE, "--prompts-file", os.path.join(TEXTS, "prompts.json"))
    asked = Command("generate.log", "generate", *of_both, "--base", *questions)
    found = json.loads(measured.report())["measures"][0]["values"]
    losses = [math.log(found[name]["value"]) for name in ("base", "best")]
    # The base and the adapter answer each prompt in turn.
    answers = json.loads(asked.report())["answers"]
    texts = [answer["text"].split("\n")[0].strip() for answer in answers]
    prompts, of_base, of_adapter = [answer["prompt"] for answer in answers[::2]], texts[::2], texts[1::2]
    add_to_report(paths, adapter, losses, prompts, (of_base, of_adapter))
    print(f"     held-out loss  before {losses[0]:.3f}   after {losses[1]:.3f}   (nats per token, 48 dialogues)")
    for prompt, old, new in zip(prompts, of_base, of_adapter):
        print(f"\n     {prompt}\n       before: {old}\n       after:  {new}")


def add_to_report(
    paths: Paths, adapter: str, losses: Sequence[float], prompts: Sequence[str], answers: Sequence[Sequence[str]]
) -> None:
    """Adds the base's results before the first step, and the adapter's at its step, to the run's history."""
    from mindlora.training.report import write_report
    from mindlora.training.report.history import HistoryWriter

    with open(os.path.join(adapter, "best.json"), encoding="utf-8") as file:
        step = json.load(file)["step"]
    with contextlib.closing(HistoryWriter(paths.lora_run, None)) as history:
        for at, loss, texts in zip((0, step), losses, answers):
            history.append(at, held_out_loss=loss)
            history.append(at, answers=[{"prompt": prompt, "answer": text} for prompt, text in zip(prompts, texts)])
    write_report([paths.lora_run], os.path.join(paths.lora_run, "report.html"))


def say(text: str) -> None:
    print(f"\n{text}", flush=True)


if __name__ == "__main__":
    main()
