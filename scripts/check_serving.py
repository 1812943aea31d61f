"""Compares the engine's answers to many mixed requests on a small random model with those to each request alone.

    python scripts/check_serving.py --requests 1000 --model qwen3-moe

Requests of all kinds (tests/support/mixed_kinds.py: drawn, constrained, biased, scored, read, ...) for the base and for
adapters of many kinds arrive at random times (by --seed). The engine is too small for them, so that requests are
preempted and recomputed, adapters lose their slots, and prefixes of prompts come from the cache; some requests are
cancelled. Each answer, its log-probabilities and vectors are compared with those of the same request alone in an engine
with an empty cache. On a Llama in float32, the most likely tokens are also compared with those of MindFormers' plain
network, without a cache, on merged weights. If two logits differ by less than 1e-3, either token is right. Marked
adapters of the Llama always say one token, so that leaks between requests show. At the end, all blocks and slots must
be free.

The exit code is 1 if an answer is wrong, a block or slot is not released, or one of these events did not happen.
"""

import argparse
import os
import sys
import tempfile
import time

# mindlora-run sets this too; it must precede the import of MindSpore.
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("GLOG_v", "3")
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

MODELS = ("llama", "qwen3-moe", "glm4")


def arguments() -> argparse.Namespace:
    """Reads the command line."""
    from mindlora.cli.engine import fixed_batches

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, meaning in (
        ("requests", 1000, "how many"),
        ("adapters", 12, "of as many kinds as there are, besides the marked ones"),
        ("seed", 0, "of all that is random"),
        ("slots", 3, "adapters on the device at once"),
        ("blocks", 24, "of the cache, 4 tokens each"),
        ("running", 8, "requests in a step"),
        ("step", 24, "tokens in a step"),
        ("lookup", 0, "tokens that are guessed at a time, by prompt lookup"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning}. Default: {default}")
    parser.add_argument("--seconds", type=float, help="within which they arrive. Default: a hundred requests a second")
    fixed = "numbers of requests whose decoding has a graph of fixed shapes, as in 1,4,8. Default: none"
    parser.add_argument("--fixed-batches", type=fixed_batches, default=(), help=fixed)
    products = "what linear cells multiply in, but for qwen3-moe; with bfloat16 they hold it too. Default: %(default)s"
    parser.add_argument("--product-dtype", choices=("float32", "bfloat16"), default="float32", help=products)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0], help="small and random. Default: %(default)s")
    return parser.parse_args()


def main() -> int:
    """Runs the check; returns the exit code."""
    args = arguments()
    seconds = args.requests / 100 if args.seconds is None else args.seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("LOG_MF_PATH", os.path.join(folder, "log"))
        import mindspore as ms

        from tests.support import mixed_models
        from tests.support.mixed_kinds import KINDS
        from tests.support.mixed_requests import MixedServing

        ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
        sizes = {"slots": args.slots, "num_blocks": args.blocks, "max_running": args.running}
        sizes.update(max_tokens_per_step=args.step, prompt_lookup=args.lookup, product_dtype=args.product_dtype)
        sizes.update(fixed_batches=args.fixed_batches)
        model = mixed_models.MODELS[args.model](args.adapters)
        if args.product_dtype == "bfloat16":
            mixed_models.hold_in_bfloat16(model)
        served = MixedServing(folder, model, KINDS, **sizes)
        served.engine.start()
        begun = time.monotonic()
        verdict = served.judge(served.jobs(args.requests, args.seed, seconds))
        took = time.monotonic() - begun
        served.engine.stop()
    whole = {f"whole answers: {kind}": count for kind, count in sorted(verdict.kinds.items())}
    rows = {"requests": verdict.answers, **whole, "tokens": verdict.tokens, **verdict.provoked, "ties": verdict.ties}
    for name, count in {**rows, "defects": len(verdict.defects), "seconds": round(took, 1)}.items():
        print(f"{name:<28}{count:>10}")
    missing = [name for name, count in {**whole, **verdict.provoked}.items() if not count]
    for problem in [*verdict.defects, *(f"there were no {name}: other sizes would provoke them" for name in missing)]:
        print(problem)
    return 1 if verdict.defects or missing else 0


if __name__ == "__main__":
    sys.exit(main())
