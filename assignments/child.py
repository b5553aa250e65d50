"""
Calls functions of a student's file, each in a process of its own, with limits of time and memory,
which saves what comes back. It knows no right answer and gives no points.
"""

import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

SECONDS = 20  # for one call
MEMORY = 2**30  # bytes that a student's code may take beyond what torch has taken


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
    value = getattr(module, function)(*args)
    return value.tril() if function == "scores" else value  # above the diagonal nothing counts


def train(module, n, name, *args):
    """Why a training cannot use a function, or "". It trains the first n tensors of args."""
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    copies, start = [x.clone() for x in tensors], time.process_time()
    call(module, name, *args)
    if time.process_time() - start > 0.5:
        return f"{name} is too slow: use tensors in place of loops"
    if not all(map(torch.equal, copies, tensors)):
        return f"{name} changes its arguments in place"
    trained = [x.requires_grad_() for x in tensors[:n]]
    y = call(module, name, *args)
    if y.requires_grad:
        y.square().sum().backward()
    if all(x.grad is not None and x.grad.flatten(0, -2).any(dim=0).all() for x in trained):
        return ""
    return "no gradient comes through: numpy, detach, .data or no_grad cut it"


def rounding(module, name, x, *args):
    """Whether a function gives bf16 for bf16, and rounds the fp32 result once."""
    x = x.bfloat16()
    y, exact = call(module, name, x, *args), call(module, name, x.float(), *args)
    return y.dtype == x.dtype and bool((y == exact.to(x.dtype)).double().mean() > 0.97)


def statistics(module, name, *args):
    """What random numbers have in common, as logarithms where sizes count, and if they are new."""
    first, second = (call(module, name, *args).double() for _ in range(2))
    new = not torch.equal(first, second) and not torch.equal(first[0], first[1])
    x = torch.stack((first, second))
    std, size = x.std(), x.abs().mean()
    return [torch.tensor(x.shape), x.mean() / std, std.log(), (size / std).log(), new]


def task_accuracy(module, keys, wrong, trials, seed, training):
    """
    Of its result these keys, and whether it left the model's mode and torch's state alone. The
    model knows what comes next in the trials; after a share of the tokens it says another one; in
    training mode, as by dropout, nonsense.
    """
    texts = []

    class Task:
        def sample(self, length, rng):
            tokens = rng.integers(0, 300, length)
            texts.append(torch.from_numpy(tokens))
            return tokens, int(rng.integers(1, 6)), int(rng.integers(length))

    class Model(nn.Module):
        def forward(self, idx, targets=None, *, positions=slice(None)):
            T = idx.size(1)
            found = [next(t for t in texts if torch.equal(t[:T], row)) for row in idx]
            guess = F.pad(torch.stack(found), (0, 1))[:, 1 : T + 1]
            guess = guess + (idx * 37 % 100 < 100 * wrong).long()
            logits = torch.sin((idx[..., None] + 1.0) * torch.arange(320))
            logits += 4 * F.one_hot(guess, 320)
            return (-logits if self.training else logits)[:, positions]

    model, state = Model().train(training), torch.get_rng_state()
    model.weight = nn.Parameter(torch.zeros(1))
    result = module.task_accuracy(model, Task(), 40, trials, seed)
    result["mode"] = model.training == training
    result["random"] = torch.equal(torch.get_rng_state(), state)
    return [result[key] for key in keys]


def embed(module, name, shape, qkv):
    """Pairs of what must be equal in an embedding; and its scores and theta."""

    def attend(pos, qkv):
        q, k, v = qkv.clone()
        return pos.attend(*pos.rotate(q, k), v)

    torch.manual_seed(0)  # one that draws is known by what it draws
    pos, loaded = (getattr(module, name)(**shape) for _ in range(2))
    attend(loaded, qkv)
    loaded.load_state_dict(pos.state_dict())
    y, scores, T = attend(pos, qkv), pos.scores(qkv[0], qkv[1]).tril(), qkv.size(-2)
    later = torch.ones(T, T).triu(1).bool()
    other_later = attend(pos, torch.cat((qkv[..., :20, :], 1 + qkv[..., 20:, :]), dim=-2))
    other_order = attend(pos, torch.cat((qkv[..., :-1, :].flip(-2), qkv[..., -1:, :]), dim=-2))
    if parameters := [*pos.parameters()]:
        y.square().sum().backward()
    grads = [p.grad for p in parameters]
    return {
        "fused": [y, scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ qkv[2]],
        "causal": [other_later[..., :20, :], y[..., :20, :]],
        "position": [torch.allclose(other_order[..., -1, :], y[..., -1, :], atol=1e-3), False],
        "saved": [attend(loaded, qkv), y],
        "learns": [all(g is not None and g.isfinite().all() and g.any() for g in grads), True],
        "scores": scores,
        "theta": pos.theta,
    }


SPECIAL = {f.__name__: f for f in (train, rounding, statistics, task_accuracy, embed)}

# --- its process


def describe(e, file):
    """An exception in one line, with the last line of the student's file that it came through."""
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    where = f" ({file}, line {lines[-1]})" if lines else ""  # a SyntaxError says it by itself
    return f"{type(e).__name__}: {e}".split("\n")[0][:200] + where


def leave(file, text, question, answer):
    """In the new process: call what is asked, and save what ask returns."""
    os.setsid()  # Ctrl-C ends the grading, and no student's answer is wrong by it
    for stream in (0, 1, 2):  # a student's file may print
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    if os.path.exists("/proc/self/statm"):  # Linux: other systems do not keep to this limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    signal.alarm(SECONDS)  # ends this process, wherever it is
    torch.seed()
    module = sys.modules[file[:-3]] = ModuleType(file[:-3])
    result = {}
    try:
        exec(compile(text, file, "exec"), module.__dict__)
        result["loaded"] = True
        result["value"] = call(module, *question)
    except BaseException as e:  # whatever a student's code raises, SystemExit as well
        result["error"] = describe(e, file)
    torch.save(result, answer)


def ask(file, text, *question):
    """What a file's text answers: {"value": ...} or {"error": ...}, and "loaded" if it could be."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.pt")
        words = dict(target=leave, args=(file, text, question, answer), daemon=True)
        process = multiprocessing.get_context("fork").Process(**words)
        process.start()
        process.join()
        if process.exitcode == -signal.SIGALRM:
            return {"error": f"no end within {SECONDS} seconds", "loaded": True}
        try:
            return torch.load(answer, weights_only=False)  # it has run already: no less safe
        except Exception:  # whatever a half of a file makes torch raise
            return {"error": "nothing readable comes back: too much memory?", "loaded": True}
