"""
What a GPU would be asked, found out without one.

On fake CUDA tensors, which have a shape, a type and a device but no numbers, one step of every
embedding shows what a first run would: mixed devices, wrong types, numbers that the CPU waits for
(they have none to give). Kernels do not run. torch.compile is asked on the CPU how many graphs it
makes.
"""

import ctypes
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from conftest import POSITION_EMBEDDINGS  # with those of the tests, in a new process, too
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import common
import train
from fope import RoPE
from model import GPT, GPTConfig
from recipe import RECIPES

needs_compiler = pytest.mark.skipif(
    not shutil.which("g++"), reason="it needs the C++ compiler g++, and there is none here"
)

# --- fake CUDA, in a process of its own: torch would believe in the device for ever


@pytest.fixture(scope="module")
def on_fake_cuda(tmp_path_factory):
    """Calls a function of this file, with arguments, where there is a CUDA device."""
    library, torch_folder = tmp_path_factory.mktemp("cuda") / "fake.so", Path(torch.__file__).parent
    command = ["g++", "-shared", "-fPIC", "-std=c++20", Path(__file__).with_name("fake_cuda.cpp")]
    command += [f"-I{torch_folder}/include", f"-L{torch_folder}/lib", "-lc10", "-ltorch_cpu"]
    subprocess.run([*command, "-o", library], check=True)
    with ProcessPoolExecutor(1, get_context("spawn"), start_fake_cuda, [library]) as process:
        yield lambda call, *args: process.submit(call, *args).result()


def start_fake_cuda(library):
    ctypes.CDLL(str(library))
    torch.cuda.is_bf16_supported = lambda **kwargs: True
    F.scaled_dot_product_attention = fused_attention
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False


class Moved(TorchDispatchMode):
    """Counts the tensors that move between devices."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "_to_copy" in str(func) and kwargs.get("device", args[0].device) != args[0].device:
            self.n += 1
        return func(*args, **kwargs)


def fused_attention(q, k, v, attn_mask=None, is_causal=False, scale=None):
    """As scaled_dot_product_attention on a card, which chooses by the device that is not there."""
    if torch.is_autocast_enabled("cuda"):
        q, k, v = (x.to(torch.get_autocast_dtype("cuda")) for x in (q, k, v))
    # all that flash (or with a mask, or over a width of 256, the memory-efficient kernel) takes
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16, (q.dtype, k.dtype, v.dtype)
    assert q.shape == k.shape == v.shape or attn_mask is not None, (q.shape, k.shape, v.shape)
    assert q.size(-1) % 8 == 0, q.shape
    if attn_mask is None and q.size(-1) <= 256:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention
        return kernel(q, k, v, 0.0, is_causal, scale=scale)[0]
    if attn_mask is not None:
        # its blocks have 64 lengths in a text of 8192, and cuDNN would make a plan for each
        assert attn_mask.dtype == q.dtype and not torch.backends.cuda.cudnn_sdp_enabled()
        attn_mask = attn_mask.expand(q.size(0), q.size(1), -1, -1)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, attn_mask, True, 0.0, is_causal, scale=scale)[0]


def small(pos):
    """(model, recipe): a layer of the 60M recipe, with few tokens."""
    recipe = RECIPES["60M"].changed(pos=pos, n_layer=1, vocab_size=300)
    return GPT(recipe), recipe


def step(pos):
    """Two training steps, each in two micro-batches, and what moved in each of them."""
    model, recipe = small(pos)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = model.to("cuda")
        optimizer = train.make_optimizer(model, recipe)
        batch = torch.empty(4, recipe.train_len + 1, dtype=torch.long, device="cuda")
        moved = []
        for _ in range(2):
            with Moved() as mode:
                loss = train.accumulate_gradients(model, batch, 2)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            moved.append(mode.n)
    devices = {t.device.type for t in [loss, *model.parameters(), *model.buffers()]}
    return devices, loss.dtype, moved


def read(pos, length):
    """Evaluation of one text of `length` tokens and of an answer at its end, and two new tokens."""
    model, _ = small(pos)
    plans = []  # whether cuDNN may make one
    note = lambda *_: plans.append(torch.backends.cuda.cudnn_sdp_enabled())  # noqa: E731
    model.blocks[0].attn.register_forward_hook(note)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = model.to("cuda").eval()
        idx = torch.empty(1, length + 1, dtype=torch.long, device="cuda")
        with common.autocast(idx.device):
            losses = model(idx[:, :-1], idx[:, 1:], reduction="none")
            answer = model(idx[:, :-1], positions=slice(-6, None))
            for options in (dict(temperature=0), dict(top_k=5)):
                tokens = [*model.generate(idx, 2, **options)]
    outputs = [(t.device.type, tuple(t.shape)) for t in (losses, answer, *tokens)]
    return outputs, losses.dtype, plans, torch.backends.cuda.cudnn_sdp_enabled()


def slow_but_for(*quick):
    return [
        pytest.param(pos, marks=[] if pos in quick else pytest.mark.slow)
        for pos in POSITION_EMBEDDINGS
    ]


@needs_compiler
@pytest.mark.parametrize("pos", slow_but_for("alibi", "fope"))
def test_a_step_on_cuda(on_fake_cuda, pos):
    """Nothing is waited for, and after the first, which makes the tables, nothing moved."""
    devices, dtype, (first, second) = on_fake_cuda(step, pos)
    assert devices == {"cuda"} and dtype == torch.float32
    assert second == 0 and bool(first) == issubclass(POSITION_EMBEDDINGS[pos], RoPE)


@needs_compiler
@pytest.mark.parametrize("pos", slow_but_for("fope"))
def test_a_long_text_on_cuda(on_fake_cuda, pos):
    """8192 tokens, and generation, for which cuDNN makes no plan at every length."""
    outputs, dtype, plans, kept = on_fake_cuda(read, pos, 8192)
    text, answer = ("cuda", (1, 8192)), ("cuda", (1, 6, 300))
    assert outputs == [text, answer, ("cuda", (1, 1)), ("cuda", (1, 1))]
    assert dtype == torch.float32
    assert plans == [True, True, False, False, False, False] and kept


# --- torch.compile


@pytest.mark.parametrize("pos", slow_but_for("fope", "kerple"))
def test_graphs_of_a_compiled_run(pos):
    """Three in training: all blocks share one, validation has its own, and the loss."""
    torch._dynamo.reset()
    counters.clear()
    config = GPTConfig(pos=pos, train_len=64, vocab_size=300, n_layer=3, n_head=2, n_embd=64)
    model, graphs = GPT(config), []
    with patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        model.compile_parts()
        for length in (64, 64, 128, 256, 512, 64):  # of the text that is read after each step
            x = torch.randint(300, (4, length + 1))
            model(x[:, :64], x[:, 1:65]).backward()
            with torch.no_grad():
                model(x[:, :-1], x[:, 1:], reduction="none")
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[:2] == [3, 3] and graphs[-1] <= 8 and not counters["graph_break"], graphs
