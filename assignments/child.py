"""
Calls functions of a student's file, each in a process of its own, with limits of time and memory,
which leaves tensors and plain values. It knows no right answer and gives no points.
"""

import json
import os
import re
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


def plain(x):
    """x of plain types, as torch.load(weights_only=True) reads them; else TypeError."""
    if isinstance(x, torch.Tensor):
        return x.detach().clone()  # of a part not the whole
    if isinstance(x, list | tuple):
        return [plain(y) for y in x]
    if isinstance(x, dict):
        return {str(key): plain(y) for key, y in x.items()}
    if isinstance(x, int | float):
        return x
    raise TypeError(f"the result is of type {type(x).__name__}")


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


def training(module, i, name, *args):
    """
    What a training needs of a function whose last three arguments are tensors: seconds of a CPU,
    arguments that stay as they were, and the gradient of the i-th of the three: its product with
    random steps, measured and autograd's.
    """
    args, tensors, start = args[:-3], args[-3:], time.process_time()
    copies = [x.clone() for x in tensors]
    y = call(module, name, *args, *tensors)
    values = {"seconds": time.process_time() - start}
    values["unchanged"] = all(map(torch.equal, copies, tensors))
    if values["seconds"] > 1 or not values["unchanged"]:  # the rest would take long, or mislead
        return values
    weights, steps = torch.randn(y.shape), 0.01 * torch.randn(copies[i].shape)

    def f(size):
        moved = [x + size * steps if x is copies[i] else x for x in copies]
        return (call(module, name, *args, *moved) * weights).double().sum()

    size = torch.zeros((), requires_grad=True)
    y = f(size)
    values["autograd"] = torch.autograd.grad(y, size)[0] if y.requires_grad else 0.0
    return values | {"measured": (f(1) - f(-1)) / 2}


def task_accuracy(module, keys, wrong, trials, seed, training, ahead=False):
    """
    Of its result these keys, and whether it left the model's mode and torch's state alone. The
    model knows what comes next in the trials; after a share of the tokens it says another one; in
    training mode, as by dropout, nonsense. ahead: its logits are those of the next position.
    """
    from data import Passkey

    texts = []

    class Task(Passkey):
        def sample(self, length, rng):
            tokens, *rest = super().sample(length, rng)
            texts.append(torch.tensor([*tokens, 0, 0]))
            return tokens, *rest

    class Model(nn.Module):
        def forward(self, idx, targets=None, *, positions=slice(None)):
            T = idx.size(1)
            found = [next(t for t in texts if torch.equal(t[:T], row)) for row in idx]
            found = torch.stack(found)[:, int(ahead) :]
            idx, guess = found[:, :T], found[:, 1 : T + 1]
            guess = guess + (idx * 37 % 100 < 100 * wrong).long()
            logits = torch.sin((idx[..., None] + 1.0) * torch.arange(320))
            logits += 4 * F.one_hot(guess, 320)
            return (-logits if self.training else logits)[:, positions]

    def encode(text):  # some pairs of digits are one token, as GPT-2's tokenizer has it
        parts = re.findall(r"[0-4]\d|.", text, re.DOTALL)
        return [256 + int(part) if len(part) == 2 else ord(part) for part in parts]

    torch.rand(1)  # a seed that an earlier call has set would be no change
    model, state = Model().train(training), torch.get_rng_state()
    model.weight = nn.Parameter(torch.zeros(1))
    result = module.task_accuracy(model, Task(encode), 400, trials, seed)
    result["mode"] = model.training == training
    result["random"] = torch.equal(torch.get_rng_state(), state)
    return json.loads(json.dumps({key: result[key] for key in keys}))  # what json can hold


def embed(module, name, shape, q, k, v):
    """An embedding's attention, also once loaded, scores, the gradient of what has least."""

    def new(seed):
        torch.manual_seed(seed)
        return getattr(module, name)(**shape)

    def attend(pos):
        return pos.attend(*pos.rotate(q.clone(), k.clone()), v.clone())

    pos, loaded = new(0), new(1)
    attend(loaded)
    loaded.load_state_dict(pos.state_dict())
    y, parameters = attend(pos), [*pos.parameters()]
    if parameters:
        y.square().sum().backward()
    largest = [0.0 if p.grad is None else float(p.grad.abs().max()) for p in parameters]
    values = {"attention": y, "scores": pos.scores(q, k).tril(), "loaded": attend(loaded)}
    return values | {"gradient": min(largest, default=1.0)}


SPECIAL = {f.__name__: f for f in (training, task_accuracy, embed)}


def describe(e, file):
    """An exception in one line, with the last line of the student's file that it came through."""
    lines = [f.lineno for f in traceback.extract_tb(e.__traceback__) if f.filename == file]
    line = e.lineno if isinstance(e, SyntaxError) else (lines or ["?"])[-1]
    return f"{type(e).__name__}: {e}".split("\n")[0][:200] + f" ({file}, line {line})"


def leave(file, text, question, answer):
    """In the new process: call what is asked, write {"value": ...} or {"error": ...}, and end."""
    for stream in (0, 1, 2):  # a student's file may print
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    if os.path.exists("/proc/self/statm"):  # Linux: other systems do not keep to this limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    signal.alarm(SECONDS)  # ends this process, wherever it is
    torch.seed()
    try:
        module = sys.modules[file[:-3]] = ModuleType(file[:-3])
        exec(compile(text, file, "exec"), module.__dict__)
        result = {"value": plain(call(module, *question)) if question else 0}
    except BaseException as e:  # whatever a student's code raises, SystemExit as well
        result = {"error": describe(e, file)}
    torch.save(result, answer)


def ask(file, text, *question):
    """({"value": ...} or {"error": ...}) of a file's function; without a question of the file."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.pt")
        if not (process := os.fork()):
            try:
                os.setsid()  # Ctrl-C ends the grading, and no student's answer is wrong by it
                leave(file, text, question, answer)
            finally:
                os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code == -signal.SIGALRM:
            return {"error": f"no end within {SECONDS} seconds"}
        try:
            return torch.load(answer, weights_only=True)
        except Exception:  # whatever a half of a file makes torch raise
            return {"error": "its process has ended: too much memory?"}
