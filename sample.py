"""
Text from a trained model, printed as it comes.

    python sample.py runs_out/fope --prompt "My fellow citizens" --max_new_tokens 200
"""

import codecs
import sys

import torch

import common
from checkpoint import load_checkpoint
from common import Refused, positive_int
from data import load_tokenizer
from evaluation import seed_int


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    add = parser.add_argument
    add("run", help="the --out folder of a training run")
    add("--prompt", action="append", help="the text to go on with; may be given several times")
    add("--max_new_tokens", type=positive_int, default=200, help="length (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token (%(default)s)")
    add("--top_k", type=positive_int, help="draw from the k likeliest tokens, not from all")
    add("--seed", type=seed_int, default=0, help="seed of the draws (%(default)s)")
    common.add_device_flag(parser)
    args = parser.parse_args(argv)
    if not args.temperature >= 0:
        raise Refused("--temperature must not be negative")
    device = common.init_distributed(args.device)
    model, _, _ = load_checkpoint(args.run, device)
    encoding = load_tokenizer(model.config.tokenizer, args.run)
    prompts = args.prompt or ["\n"]
    if "" in prompts:
        raise Refused("--prompt is empty: there is nothing to go on with")
    model.eval()
    for prompt in prompts:
        go_on(model, encoding, prompt, args, device)


def go_on(model, encoding, prompt, args, device):
    """Print the prompt and what the model says next, as if it were the only one."""
    tokens = encoding.encode_ordinary(prompt)
    if len(tokens) > 16 * model.config.train_len:
        print(f"note: {len(tokens):,} tokens are read anew for each that comes", file=sys.stderr)

    # a token may end within a character, so bytes are decoded as they come
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    generator = torch.Generator(device).manual_seed(args.seed)
    options = dict(temperature=args.temperature, top_k=args.top_k, generator=generator)
    print(prompt, end="", flush=True)
    with common.autocast(device):
        idx = torch.tensor([tokens], device=device)
        for token in model.generate(idx, args.max_new_tokens, **options):
            if token.item() == encoding.eot_token:
                break
            text = decode(encoding.decode_single_token_bytes(token.item()))
            print(text, end="", flush=True)
    print(decode(b"", final=True))


if __name__ == "__main__":
    common.one_sentence_errors(main)()
