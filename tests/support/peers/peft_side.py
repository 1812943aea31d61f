"""PEFT and transformers, in their own process and environment.

It reads requests from stdin, one JSON object per line ({"verb": name, ...arguments}), and answers each with a line of
JSON: {"result": ...} or {"error": traceback}. One process serves all tests, since its imports take seconds.
"""

import json
import os
import random
import runpy
import sys
import tempfile
import traceback
import warnings

# What a library prints must not come between the answers.
ANSWERS = os.fdopen(os.dup(1), "w", encoding="utf-8")
os.dup2(2, 1)

import numpy as np  # noqa: E402
import peft  # noqa: E402
import torch  # noqa: E402
from adalora_side import adalora_steps  # noqa: E402
from classifiers_side import classifier_logits, hidden_states, make_classifier_adapter  # noqa: E402
from diffusers_side import (  # noqa: E402
    diffusion_cells,
    diffusion_outputs,
    diffusion_weights,
    original_names,
    save_diffusion,
)
from folders_side import make_folder  # noqa: E402
from odd_side import grow, make_odd_adapter, odd_logits  # noqa: E402
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from peft.tuners.miss import MissLayer  # noqa: E402
from peft.tuners.vera import VeraLayer  # noqa: E402
from peft.utils.loftq_utils import _low_rank_decomposition  # noqa: E402
from quantized_side import quantize_folder, quantized_logits  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
)
from transformers.utils import logging  # noqa: E402


def make_model(folder, seed, shard_size, **config):
    """Saves a Llama with random weights."""
    seed_all(seed)
    model = LlamaForCausalLM(LlamaConfig(**config))
    # transformers initializes all norms to one, which would hide it if two of them were exchanged.
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder, max_shard_size=shard_size)


def make_adapter(model, folder, seed, kind, config, dtype, safetensors, embeddings):
    """Saves an adapter for a model. All that is saved is random: A, B, saved modules and embeddings."""
    seed_all(seed)
    adapted = get_peft_model(load_model(model), getattr(peft, kind)(task_type="CAUSAL_LM", **config))
    saved = get_peft_model_state_dict(adapted, save_embedding_layers=embeddings)
    for name, parameter in adapted.named_parameters():
        if key_of(name) in saved:
            parameter.data += 0.1 * torch.randn_like(parameter)
            parameter.data = parameter.data.to(getattr(torch, dtype))
    adapted.save_pretrained(folder, safe_serialization=safetensors, save_embedding_layers=embeddings)


def logits(model, ids, path, adapter=None, dtype="float32"):
    """Saves the logits for token ids, with an adapter loaded as PEFT loads it, or of the model in another dtype."""
    loaded = load_adapted(model, adapter) if adapter else load_model(model, getattr(torch, dtype))
    with torch.no_grad():
        np.save(path, loaded(torch.tensor(ids)).logits.float().numpy())


def eva(model, batches, config, eva_config, folder):
    """Saves the adapter that PEFT initializes by EVA from batches of token ids and labels."""
    settings = peft.LoraConfig(**config, init_lora_weights="eva", eva_config=peft.EvaConfig(**eva_config))
    adapted = get_peft_model(load_model(model), settings)
    rows = [{name: torch.tensor(values) for name, values in batch.items()} for batch in batches]
    peft.initialize_lora_eva_weights(adapted, rows, show_progress_bar=False)
    adapted.save_pretrained(folder)


def generate(model, ids, new, adapter=None):
    """Returns the greedy continuation of token ids, and how much the best logit of each exceeds the second."""
    loaded = load_adapted(model, adapter) if adapter else load_model(model)
    # Only what the call says: neither an end token nor the settings in the model's folder.
    config = GenerationConfig(do_sample=False, max_new_tokens=new, eos_token_id=None, pad_token_id=0)
    loaded.generation_config = GenerationConfig()
    found = loaded.generate(
        input_ids=torch.tensor([ids]), generation_config=config, return_dict_in_generate=True, output_logits=True
    )
    best = [row[0].topk(2).values for row in found.logits]
    return [found.sequences[0, len(ids) :].tolist(), [(first - second).item() for first, second in best]]


def gradients(model, adapter, ids, path):
    """Saves the gradients of all trainable tensors by their keys in the adapter file; returns the loss. No dropout."""
    adapted = load_adapted(model, adapter, trainable=True)
    loss = adapted(torch.tensor(ids), labels=torch.tensor(ids)).loss
    loss.backward()
    save_file(
        {key_of(name): parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad},
        path,
    )
    return loss.item()


def describe(model, adapter):
    """Returns module -> [r, lora_alpha, scaling] as PEFT resolves an adapter's configuration; others' scale is 1."""
    described = {}
    for name, module in load_adapted(model, adapter).base_model.model.named_modules():
        if isinstance(module, LoraLayer):
            described[name] = [module.r["default"], module.lora_alpha["default"], module.scaling["default"]]
        elif isinstance(module, (VeraLayer, MissLayer)):
            rank = (module.r if isinstance(module, VeraLayer) else module.miss_r)["default"]
            described[name] = [rank, rank, 1]
    return described


def save_again(model, adapter, folder):
    """Loads an adapter and saves it as PEFT does."""
    load_adapted(model, adapter).save_pretrained(folder)


def save_stacked(model, adapter, folder):
    """Loads an adapter with a pair for each expert, as before transformers stacked them, and saves what PEFT makes."""
    with warnings.catch_warnings():
        # PEFT looks for its own rank_pattern of the stacked experts among the modules, and then uses it.
        warnings.simplefilter("ignore")
        PeftModel.from_pretrained(load_model(model), adapter).save_pretrained(folder)


def merge(model, adapter, folder):
    """Saves the model with the adapter merged."""
    load_adapted(model, adapter).merge_and_unload().save_pretrained(folder)


def convolve(tensors, folder, conv, config):
    """Puts LoRA on a convolution; saves the adapter in ``folder``, with its outputs and gradients.

    ``tensors`` is a file with weight, bias, x, A, B and weights: the loss is sum(output * weights).
    """
    given = load_file(tensors)
    base = torch.nn.ModuleDict({"patch": torch.nn.Conv2d(*conv.pop("sizes"), **conv)})
    base["patch"].weight.data, base["patch"].bias.data = given["weight"], given["bias"]
    adapted = get_peft_model(base, LoraConfig(target_modules=["patch"], **config)).eval()
    layer = adapted.base_model.model["patch"]
    layer.lora_A["default"].weight.data, layer.lora_B["default"].weight.data = given["A"], given["B"]
    adapted.save_pretrained(folder)
    output = layer(given["x"].requires_grad_())
    (output * given["weights"]).sum().backward()
    found = {
        "output": output,
        "x": given["x"].grad,
        "A": layer.lora_A["default"].weight.grad,
        "B": layer.lora_B["default"].weight.grad,
    }
    if layer.get_base_layer().groups == 1:
        layer.merge()
        found["merged"] = layer.get_base_layer().weight
    save_file({name: tensor.detach().contiguous() for name, tensor in found.items()}, os.path.join(folder, "found"))


def combine(model, adapters, folder, **arguments):
    """Saves PEFT's weighted combination of adapters."""
    names = [f"adapter{index}" for index in range(len(adapters))]
    adapted = PeftModel.from_pretrained(load_model(model), adapters[0], adapter_name=names[0])
    for name, path in zip(names[1:], adapters[1:]):
        adapted.load_adapter(path, adapter_name=name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.add_weighted_adapter(names, adapter_name="combined", **arguments)
    state = get_peft_model_state_dict(adapted, adapter_name="combined")
    scalings = {
        module.scaling["combined"]
        for module in adapted.modules()
        if isinstance(module, LoraLayer) and "combined" in module.scaling
    }
    os.makedirs(folder)
    save_file({key: tensor.contiguous() for key, tensor in state.items()}, os.path.join(folder, "tensors.safetensors"))
    return sorted(scalings)


def key_of(name):
    """Returns the key in an adapter's file of a parameter of an adapted model."""
    return (
        name.replace(".default", "")
        .replace(".modules_to_save", "")
        .replace("lora_magnitude_vector.weight", "lora_magnitude_vector")
    )


def load_model(folder, dtype=torch.float32):
    """Loads a model for inference."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def load_adapted(model, adapter, trainable=False):
    """Loads a model with an adapter. PEFT must not warn, and must hold each tensor of the file and no other."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # A warning that PEFT and transformers cause between themselves.
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
        # PEFT looks for the patterns of stacked experts among the modules, finds none, and then uses them.
        of_experts = r"The following (rank|alpha)_pattern keys .*(\.mlp\.experts\.|\.gate_up_proj)"
        warnings.filterwarnings("ignore", message=of_experts)
        # That merging in PEFT changes the one table for embedding and head.
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True` and a tied layer is part of")
        adapted = PeftModel.from_pretrained(load_model(model), adapter, is_trainable=trainable).eval()
    stored = load_stored(adapter)
    declared = adapted.peft_config["default"].modules_to_save
    embeddings = not declared and any(key.endswith(("embed_tokens.weight", "lm_head.weight")) for key in stored)
    with warnings.catch_warnings():
        # Where lm_head is a target, PEFT warns that it also saves the base's own weight.
        warnings.filterwarnings("ignore", message="Setting `save_embedding_layers`")
        held = get_peft_model_state_dict(adapted, save_embedding_layers=embeddings or "auto")
    for key in [key for key in held if key not in stored and ".base_layer." in key]:
        del held[key]
    if set(held) != set(stored):
        raise AssertionError(
            f"PEFT holds {sorted(set(held) - set(stored))} more than {adapter}, "
            f"and lacks {sorted(set(stored) - set(held))}"
        )
    changed = [key for key in held if not torch.equal(held[key].float(), stored[key].float())]
    if changed:
        raise AssertionError(f"PEFT holds other values than {adapter}: {changed}")
    return adapted


def load_stored(adapter):
    """Reads an adapter's tensors from its file."""
    path = os.path.join(adapter, "adapter_model.safetensors")
    if os.path.exists(path):
        return load_file(path)
    return torch.load(os.path.join(adapter, "adapter_model.bin"), weights_only=True)


def run(program, arguments):
    """Runs a program in a process of its own, which begins with all that is imported here; returns what it printed."""
    sys.stderr.flush()
    with tempfile.TemporaryFile("w+") as printed:
        child = os.fork()
        if not child:
            code = 1
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
            try:
                seed_all(0)
                sys.argv = [program, *arguments]
                runpy.run_path(program, run_name="__main__")
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        printed.seek(0)
        text = printed.read()
        if status:
            raise RuntimeError(f"{program} ended with status {status}:\n{text[-3000:]}")
        return text


def seed_all(seed):
    """Seeds every random generator, so that what follows is reproducible."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def initial_layers(model, config, path):
    """Saves A, B, DoRA's magnitude, the base's weight and the scale of each layer as PEFT initializes them."""
    seed_all(1)
    found = {}
    for name, module in get_peft_model(load_model(model), LoraConfig(task_type="CAUSAL_LM", **config)).named_modules():
        if isinstance(module, LoraLayer):
            name = name.removeprefix("base_model.model.")
            found.update(
                {
                    f"{name}.A": module.lora_A["default"].weight,
                    f"{name}.B": module.lora_B["default"].weight,
                    f"{name}.W": module.base_layer.weight,
                    f"{name}.scale": torch.tensor([module.scaling["default"]]),
                }
            )
            if "default" in module.lora_magnitude_vector:
                found[f"{name}.magnitude"] = module.lora_magnitude_vector["default"].weight
    save_file({name: tensor.detach().contiguous() for name, tensor in found.items()}, path)


def train_initialized(model, config, folder, ids, path):
    """Saves an adapter moved away from its initial values and converted to a plain LoRA, and its logits before that."""
    seed_all(2)
    adapted = get_peft_model(load_model(model), LoraConfig(task_type="CAUSAL_LM", **config)).eval()
    adapted.save_pretrained(f"{folder}-initial")
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    with torch.no_grad():
        np.save(path, adapted(torch.tensor(ids)).logits.numpy())
    adapted.save_pretrained(folder, path_initial_model_for_weight_conversion=f"{folder}-initial")


def low_rank(path, rank, output):
    """Saves the factors L and R of a matrix, as PEFT's LoftQ decomposes it."""
    found = _low_rank_decomposition(load_file(path)["weight"], rank)
    save_file({name: found[name].contiguous() for name in "LR"}, output)


def plateau_rates(metrics, rate, settings):
    """Returns the learning rate of torch's ReduceLROnPlateau after each measurement."""
    optimizer = torch.optim.SGD([torch.zeros(1)], rate)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **settings)
    rates = []
    for metric in metrics:
        scheduler.step(metric)
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def warm_up_rates(count, steps, start):
    """Returns the learning rates of torch's LinearLR, which rise to 1 in so many steps."""
    optimizer = torch.optim.SGD([torch.zeros(1)], 1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start, 1.0, steps)
    rates = []
    for _ in range(count):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def next_probabilities(tokens, settings, path, output):
    """Saves the probabilities with which transformers draws the next token, from logits in float64."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes))
    config = GenerationConfig(do_sample=True, **{"top_k": 0, **settings})
    processors = model._get_logits_processor(config, len(tokens), torch.tensor([tokens]), None, LogitsProcessorList())
    scores = processors(torch.tensor([tokens]), torch.from_numpy(np.load(path)).double()[None])
    np.save(output, scores.softmax(-1)[0].numpy())


VERBS = {
    verb.__name__: verb
    for verb in (
        make_model,
        make_folder,
        make_adapter,
        quantize_folder,
        quantized_logits,
        logits,
        generate,
        gradients,
        describe,
        save_again,
        merge,
        combine,
        convolve,
        initial_layers,
        train_initialized,
        low_rank,
        plateau_rates,
        warm_up_rates,
        next_probabilities,
        adalora_steps,
        make_odd_adapter,
        odd_logits,
        grow,
        diffusion_cells,
        diffusion_outputs,
        diffusion_weights,
        original_names,
        eva,
        save_stacked,
        save_diffusion,
        make_classifier_adapter,
        classifier_logits,
        hidden_states,
        run,
    )
}


def main():
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": VERBS[request.pop("verb")](**request)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()


if __name__ == "__main__":
    main()
