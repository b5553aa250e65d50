"""
A checkpoint of train.py as a model of the transformers library, with its tokenizer.

    python -m hf.export runs_out/rope_60M --out exported

A RoPE model without QK-norm becomes a plain Llama, which every tool of that library reads. The
others are a Llama with its embedding exchanged, which hf.swap.load reads. Logits agree to rounding.
"""

import re
import tempfile
from base64 import b64encode
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

import common
from checkpoint import load_checkpoint
from common import Refused
from data import EOT, load_tokenizer
from hf.swap import SwappedConfig, SwappedLlama

# our names and the library's, exchanged in this order
NAMES = {
    r"^blocks\.": "model.layers.",
    r"^embed\.": "model.embed_tokens.",
    r"^norm\.": "model.norm.",
    r"^head\.": "lm_head.",
    r"\.norm1\.": ".input_layernorm.",
    r"\.norm2\.": ".post_attention_layernorm.",
    r"\.mlp\.(gate|up|down)\.": r".mlp.\1_proj.",
    r"\.attn\.proj\.": ".attn.o_proj.",
    r"\.attn\.pos\.": ".attn.pos.embedding.",
    r"\.attn\.": ".self_attn.",
}
PLAIN = """A plain Llama, which `transformers.pipeline("text-generation", FOLDER)` reads."""
SWAPPED = """A Llama with another position embedding. In the root folder of the project that wrote
it, `import hf.swap; model = hf.swap.load(FOLDER)` reads it; after that import pipelines do, too."""


def llama_config(config, tokenizer):
    """The library's name for each field of a GPTConfig."""
    return dict(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=4 * config.n_embd,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        head_dim=config.head_dim,
        max_position_embeddings=config.train_len,
        rope_parameters={"rope_type": "default", "rope_theta": config.theta},
        rms_norm_eps=1e-6,
        bos_token_id=tokenizer.eot_token,
        eos_token_id=tokenizer.eot_token,
    )


def llama_weights(model):
    """The weights of a GPT under the library's names, q, k and v apart, no padded vocabulary."""
    weights = {}
    for key, weight in model.state_dict().items():
        for ours, theirs in NAMES.items():
            key = re.sub(ours, theirs, key)
        if key in ("model.embed_tokens.weight", "lm_head.weight"):
            weight = weight[: model.config.vocab_size]
        if key.endswith("qkv.weight"):
            parts = zip("qkv", weight.chunk(3), strict=True)
            weights |= {key.replace("qkv", f"{name}_proj"): part for name, part in parts}
        else:
            weights[key] = weight
    return weights


def to_llama(model, tokenizer):
    """The Llama with the weights of a GPT, in eval mode. Refused for another bias or score."""
    config = model.config
    fields = llama_config(config, tokenizer)
    if config.pos == "rope" and not (config.pos_args or config.qk_norm or config.rope_scaling):
        llama = LlamaForCausalLM(LlamaConfig(**fields))
    else:
        if config.pos not in ("nope", "alibi", "rope", "fope", "rope_a"):
            raise Refused(f"the position embedding {config.pos} cannot be exported")
        names = ("pos", "pos_args", "rope_scaling", "train_len", "qk_norm")
        swap = {name: getattr(config, name) for name in names}
        llama = SwappedLlama(SwappedConfig(**fields, swap=swap))
    # what a checkpoint does not have follows from the config: RoPE's frequencies, ALiBi's slopes
    llama.load_state_dict(llama.state_dict() | llama_weights(model))
    return llama.eval()


def to_fast_tokenizer(encoding):
    """A tiktoken.Encoding of ours as the library's tokenizer: the same ids."""
    lines = [b64encode(token) + b" %d\n" % n for token, n in encoding._mergeable_ranks.items()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.tiktoken"
        path.write_bytes(b"".join(lines))
        converter = TikTokenConverter(str(path), encoding._pat_str, extra_special_tokens=[EOT])
        return PreTrainedTokenizerFast(tokenizer_object=converter.converted(), eos_token=EOT)


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    parser.add_argument("run", metavar="RUN", help="a folder that train.py wrote")
    parser.add_argument("--out", required=True, type=Path, help="folder for the exported model")
    args = parser.parse_args(argv)
    if args.out.is_dir() and any(args.out.iterdir()):
        raise Refused(f"--out {args.out} holds other files; give an empty or a new folder")
    model, _, _ = load_checkpoint(args.run)
    tokenizer = load_tokenizer(model.config.tokenizer, args.run)
    llama = to_llama(model, tokenizer)
    llama.save_pretrained(common.make_folder(args.out))
    to_fast_tokenizer(tokenizer).save_pretrained(args.out)
    about = PLAIN if type(llama) is LlamaForCausalLM else SWAPPED
    (args.out / "README.md").write_text(f"{about}\n", encoding="utf-8")
    print(f"{args.out}: {about.partition('. ')[0].partition(',')[0]}")


if __name__ == "__main__":
    common.one_sentence_errors(main)()
