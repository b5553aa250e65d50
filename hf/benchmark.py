r"""
Read Llamas, swapped or not, with the paper's benchmarks, by lm-evaluation-harness's command line.

    python -m hf.benchmark run --tasks table4 table5 mmlu_continuation --model_args pretrained=tuned
    python -m hf.benchmark run --tasks table1 --model middle_cut \
        --model_args pretrained=tuned,max_length=16384
    python -m hf.benchmark run --tasks passkeys --model_args pretrained=tuned,max_length=8192

The flags are those of `lm_eval`. A model is a folder or a name on the hub. hf/tasks/ has what the
harness lacks: the paper's tables 1, 4 and 5 and passkeys. Table 6 is its own mmlu_continuation.
"""

import sys
from pathlib import Path

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

import common
import hf.swap  # noqa: F401  from here on the library's Auto classes know swapped models
from common import Refused

TASKS = Path(__file__).parent / "tasks"


@register_model("middle_cut")
class MiddleCut(HFLM):
    """The harness's model. Prompts that are too long lose their middle, there their beginning."""

    def generate_until(self, requests, **kwargs):
        for request in requests:
            text, settings = request.args
            ids = self.tok_encode(text)
            room = self.max_length - settings.get("max_gen_toks", self.max_gen_toks)
            if len(ids) > room:
                halves = ids[: room // 2], ids[len(ids) - room // 2 :]
                request.arguments = ("".join(map(self.tok_decode, halves)), settings)
        return super().generate_until(requests, **kwargs)


def main():
    if len(sys.argv) > 2 and "--include_path" not in sys.argv:
        sys.argv += ["--include_path", str(TASKS)]
    try:
        cli_evaluate()
    except (OSError, ValueError) as e:  # no such model, no such data, no such task
        if isinstance(e, ValueError) and not str(e).startswith("Tasks not found"):
            raise
        raise Refused(str(e).splitlines()[0]) from None


if __name__ == "__main__":
    common.one_sentence_errors(main)()
