"""
Imports a student's file and calls its functions, in a process of its own with a limit of time, and
saves what comes back. It knows no right answer and gives no points.
"""

import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # torch imports it when it is first used, which takes 3 seconds: once, here
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# where a student's file finds the project: a starter has the right files in answers.zip
HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(next(HERE.glob("answers.zip"), HERE.parent)))

SECONDS = 20  # of CPU time, for the questions of one check
NUMBERS = 4096**2  # that no tensor may hold: right answers need a quarter at most


class NoMatrix(TorchDispatchMode):
    """Within it no tensor may hold NUMBERS numbers, however much memory the machine has."""

    supports_higher_order_operators = True  # flex_attention is one, and it compiles itself,
    is_infra_mode = classmethod(lambda cls: True)  # which torch does within such modes alone

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        value = function(*args, **(kwargs or {}))
        dense = isinstance(value, torch.Tensor) and value.layout == torch.strided
        if dense and value.untyped_storage().nbytes() >= NUMBERS * value.itemsize:
            raise MemoryError(f"a tensor holds {NUMBERS:,} numbers or more")
        return value


# --- what is asked


def call(module, name, *args):
    """
    module.name(*args), or what one of the functions below makes of it. For a method the first of
    args are the fields of its object, which __init__ has not made: so no function needs another.
    """
    if name in SPECIAL:
        return SPECIAL[name](module, *args)
    owner, _, function = name.rpartition(".")
    if owner:
        (fields, *args), kind = args, getattr(module, owner)
        module = kind.__new__(kind)
        nn.Module.__init__(module)
        module.__dict__.update(fields)
    value = plain(getattr(module, function)(*args))
    return value.tril() if function == "scores" else value  # above the diagonal nothing counts


def plain(value):
    """A tensor, or a list of tensors, as a NamedTuple, a map or a generator are, too."""
    if isinstance(value, torch.Tensor):
        return value.as_subclass(torch.Tensor)
    if isinstance(value, Iterable) and not isinstance(value, str | dict | np.ndarray):
        return [plain(x) for x in value]
    raise TypeError(f"it gives {value!r:.60}, not a tensor")


def on_the_cpu(function, *args):
    """Whether a function makes a tensor on the CPU, and not where its arguments are, in words."""

    def moved(x):  # to torch's device without numbers, which every machine has
        if isinstance(x, dict):
            return {name: moved(value) for name, value in x.items()}
        return x.to("meta") if isinstance(x, torch.Tensor | nn.Module) else x

    try:
        function(*map(moved, args))
    except Exception as e:  # this device refuses much else, which is no mistake
        if "expected device" in str(e):
            return "it makes a tensor on the CPU, which fails on a GPU or a Mac: use q.device"
    return ""


def train(module, n, name, *args):
    """Why a training cannot use a function, or "". It trains the first n tensors of args."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    copies = [x.clone() for x in tensors]
    call(module, name, *args)
    if not all(map(torch.equal, copies, tensors)):
        return f"{name} changes its arguments in place"
    trained = [x.requires_grad_() for x in tensors[:n]]
    y = call(module, name, *args)
    if y.requires_grad:
        y.square().sum().backward()
    if not all(x.grad is not None and x.grad.flatten(0, -2).any(dim=0).all() for x in trained):
        return "no gradient comes through: numpy, detach, .data or no_grad cut it"
    return on_the_cpu(call, module, name, *args)


def columns(module, first, last, name, *args):
    """call, but of its tables only these columns count."""
    return [table[..., first:last] for table in call(module, name, *args)]


def rounding(module, name, x, *args):
    """Whether a function gives bf16 for bf16, and rounds the fp32 result once: why not, or ""."""
    x = x.bfloat16()
    y, exact = call(module, name, x, *args), call(module, name, x.float(), *args)
    if y.dtype != x.dtype:
        return f"the dtype is {y.dtype} where x has {x.dtype}"
    return "" if (y == exact.to(x.dtype)).double().mean() > 0.97 else "it computes in bf16"


def statistics(module, name, *args):
    """What random numbers have in common. Sure up to 3 % of the largest of these numbers."""
    x = torch.stack([call(module, name, *args) for _ in range(16)]).double()
    numbers = {"mean": x.mean(), "standard deviation": x.std(), "mean size": x.abs().mean()}
    return [torch.zeros(x.shape[1:]), {name: number.item() for name, number in numbers.items()}]


def seeded(module, name, *args):
    """Whether random numbers are new at each call, and the same after the same seed, in words."""
    torch.manual_seed(0)
    first, second = (call(module, name, *args) for _ in range(2))
    if torch.equal(first, second):
        return "two calls give the same numbers"
    torch.manual_seed(0)
    again = torch.equal(first, call(module, name, *args))
    return "" if again else "after the same torch.manual_seed come other numbers"


def task_accuracy(module, keys, wrong, trials, seed, training, learns):
    """
    Of its result these keys; and, in words, whether it left the model's mode and torch's state
    alone, and whether json takes the result. The model knows what comes next in the trials; after a
    share of the tokens it says another one; in training mode, as by dropout, nonsense. One that
    learns has logits that need gradients. Of a trial rng decides the distance alone, so that
    another rng costs nothing in other keys.
    """
    texts, own = {}, np.random.default_rng(seed)  # {first tokens: all}

    class Task:
        def sample(self, length, rng):
            tokens = own.integers(300, size=length)
            texts[(*tokens[:8],)] = torch.from_numpy(tokens)
            return tokens, int(own.integers(1, 6)), int(rng.integers(length))

    class Model(nn.Module):
        def forward(self, idx, targets=None, *, positions=slice(None)):
            found = torch.stack([texts[(*row,)] for row in idx[:, :8].tolist()])
            guess = F.pad(found, (0, 1))[:, 1 : idx.size(1) + 1]
            guess = guess + (idx * 37 % 100 < 100 * wrong).long()
            logits = torch.sin((idx[..., None] + 1.0) * torch.arange(320))
            logits += 4 * F.one_hot(guess, 320)
            logits = (-logits if self.training else logits) + self.weight
            return logits[:, positions]

    model, state = Model().train(training), torch.get_rng_state()
    model.weight = nn.Parameter(torch.zeros(1), requires_grad=learns)
    result = dict(module.task_accuracy(model, Task(), 40, trials, seed))
    result["mode"] = "the model is left in another mode" * (model.training != training)
    same_state = torch.equal(torch.get_rng_state(), state)
    result["random"] = "torch's random state has changed" * (not same_state)
    if "json" in keys:
        json.dumps(result)  # its error says what json cannot hold
        result["json"] = ""
    if "share_right" in keys:  # in sixtieths: it may be rounded to two digits, or not
        result["share_right"] = (60 * torch.as_tensor(result["share_right"])).round()
    return [x if isinstance(x := result[key], str) else torch.as_tensor(x) for key in keys]


def embedding(module, part, name, shape, qkv):
    """Why an embedding is wrong in this part of what is asked, in words, or ""."""

    def make():
        pos = getattr(module, name)(**shape).eval()
        for p in pos.parameters():  # as a training does: a bias may start at 0
            p.data += 0.1 * torch.rand_like(p)
        return pos

    def attend(pos, qkv, seed=0):
        torch.manual_seed(seed)  # what is drawn at each call costs once, in the part "saved"
        q, k, v = qkv.clone()
        return pos.attend(*pos.rotate(q, k), v)

    attend(make(), qkv)  # an error here costs each part
    pos = make()
    if part == "device":
        return on_the_cpu(attend, pos, qkv) or on_the_cpu(attend, make().train(), qkv)
    if part == "learns":
        y = torch.stack([attend(pos.train(), qkv, seed) for seed in range(8)])  # by dropout
        if y.requires_grad:
            y.square().sum().backward()
        unmoved = [n for n, p in pos.named_parameters() if p.grad is None or not p.grad.norm() > 0]
        return f"{', '.join(unmoved)}: no gradient" if unmoved else ""
    y, T = attend(pos, qkv), qkv.size(-2)
    if part == "fused":
        torch.manual_seed(0)
        later = torch.ones(T, T).triu(1).bool()
        scores = pos.scores(*qkv[:2].clone()).masked_fill(later, -torch.inf)
        other = scores.softmax(dim=-1) @ qkv[2]
    elif part == "causal":
        other = attend(pos, torch.cat((qkv[..., :20, :], 1 + qkv[..., 20:, :]), dim=-2))
        y, other = y[..., :20, :], other[..., :20, :]
    elif part == "position":
        other = attend(pos, torch.cat((qkv[..., :-1, :].flip(-2), qkv[..., -1:, :]), dim=-2))
        alike = torch.allclose(y[..., -1, :], other[..., -1, :], atol=1e-3)
        return "turned round, they give the same" if alike else ""
    elif part == "saved":
        loaded = make()
        loaded.load_state_dict(pos.state_dict())
        other = attend(loaded, qkv, seed=1)
    off = (y - other).abs().max()
    return "" if off < 1e-3 else f"they differ by up to {off:.3g}"


SPECIAL = [train, columns, rounding, statistics, seeded, task_accuracy, embedding]
SPECIAL = {function.__name__: function for function in SPECIAL}

# --- its process


def describe(e, file):
    """An exception in one line, with the last line of the student's file that it came through."""
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == str(file)]
    where = f" ({file.name}, line {lines[-1]})" if lines else ""  # a SyntaxError has it already
    return f"{type(e).__name__}: {e}".split("\n")[0][:200] + where


def leave(file, questions, answer):
    """In the new process: import the file, call what is asked, and save what ask returns."""
    os.setsid()  # Ctrl-C ends the grading, and no student's answer is wrong by it
    for stream in (0, 1, 2):  # a student's file may print
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    # both end this process, wherever it is; on a busy machine a right answer may wait long
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    torch.seed()
    os.chdir(file.parent)  # of the student's files this one alone is there, as in the grading
    sys.path.insert(0, str(file.parent))
    sys.modules.pop(file.stem, None)  # the right file, where checks.py has imported it
    sys.dont_write_bytecode = True
    result = {}
    try:
        with NoMatrix():
            module = importlib.import_module(file.stem)
            result["loaded"] = True
            result["value"] = [call(module, *question) for question in questions]
    except BaseException as e:  # whatever a student's code raises, SystemExit as well
        result["error"] = describe(e, file)
    torch.save(result, answer)
    os._exit(0)  # a thread that a student's file has started may never end


def ask(file, text, questions):
    """
    What a file of this name and text, bytes, answers to each of the questions (name, *args):
    {"value": a list} or {"error": a sentence}, and "loaded" if it could be imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.pt")
        Path(folder, file).write_bytes(text)
        args = Path(folder, file).resolve(), questions, answer
        process = multiprocessing.get_context("fork").Process(target=leave, args=args, daemon=True)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a fork may lose a Ctrl-C
        process.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        process.join()
        code = process.exitcode
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return {"error": f"no end within {SECONDS} seconds", "loaded": True}
        try:
            return torch.load(answer, weights_only=False)  # it has run already: no less safe
        except Exception:  # there is no file, or a half
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return {"error": f"its process ended before it answered: {how}", "loaded": True}
