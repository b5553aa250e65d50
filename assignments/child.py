"""
Imports a student's file and calls its functions, in a process of its own, with limits of time and
memory, which saves what comes back. It knows no right answer and gives no points.
"""

import importlib
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch._dynamo  # torch imports it when it is first used, which takes 3 seconds: once, here
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

SECONDS = 20  # of CPU time, for the questions of one check
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


def lean(module, name, *args):
    """call, but it may not make a T x T matrix, even of a single head."""
    size = args[-1].size(-2) ** 2

    class NoMatrix(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            value = function(*args, **(kwargs or {}))
            numbers = value.untyped_storage() if isinstance(value, torch.Tensor) else ()
            if len(numbers) >= size * getattr(value, "itemsize", 1):
                raise MemoryError(f"a tensor holds {size:,} numbers or more")
            return value

    with NoMatrix():
        return call(module, name, *args)


def rounding(module, name, x, *args):
    """Whether a function gives bf16 for bf16, and rounds the fp32 result once."""
    x = x.bfloat16()
    y, exact = call(module, name, x, *args), call(module, name, x.float(), *args)
    return y.dtype == x.dtype and bool((y == exact.to(x.dtype)).double().mean() > 0.97)


def statistics(module, name, *args):
    """What random numbers have in common; sizes as logarithms. Sure up to 0.03, so all / 30."""
    first, second = (call(module, name, *args) for _ in range(2))
    x = torch.stack((first, second)).double()
    std, size = x.std(), x.abs().mean()
    numbers = x.mean() / std, std.log(), (size / std).log()
    return [torch.zeros_like(first), *(number / 30 for number in numbers)]


def seeded(module, name, *args):
    """Whether random numbers are new at each call, and the same after the same seed."""
    torch.manual_seed(0)
    first, second = (call(module, name, *args) for _ in range(2))
    torch.manual_seed(0)
    return [torch.equal(first, second), torch.equal(first, call(module, name, *args))]


def task_accuracy(module, keys, wrong, trials, seed, training, learns):
    """
    Of its result these keys, and whether it left the model's mode and torch's state alone. The
    model knows what comes next in the trials; after a share of the tokens it says another one; in
    training mode, as by dropout, nonsense. One that learns has logits that need gradients.
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
            logits = (-logits if self.training else logits) + self.weight
            return logits[:, positions]

    model, state = Model().train(training), torch.get_rng_state()
    model.weight = nn.Parameter(torch.zeros(1), requires_grad=learns)
    result = module.task_accuracy(model, Task(), 40, trials, seed)
    result["mode"] = model.training == training
    result["random"] = torch.equal(torch.get_rng_state(), state)
    if "share_right" in keys:  # in sixtieths: it may be rounded to two digits, or not
        result["share_right"] = [round(60 * share) for share in result["share_right"]]
    return [result[key] for key in keys]


@torch.no_grad()
def logits(pos, q, k):
    """
    The logits that attend goes by, less each row's own on the diagonal: at the start, and after a
    step of training, which moves all parameters. For an identity attend gives softmax's weights.
    """
    values, steps = torch.eye(q.size(-2)).expand_as(q), []
    for _ in range(2):
        log = pos.attend(*pos.rotate(q, k), values).clamp(min=1e-30).log()
        steps.append((log - log.diagonal(dim1=-2, dim2=-1)[..., None]).tril())
        torch.manual_seed(1)
        moved = {name: p + 0.1 * torch.randn_like(p) for name, p in pos.named_parameters()}
        pos.load_state_dict(pos.state_dict() | moved)
    return torch.stack(steps)


def embed(module, name, shape, qkv):
    """
    Pairs of what must be equal in an embedding; its logits; and those of the class that it is built
    on, with the same numbers and names as keywords.
    """

    def attend(pos, qkv):
        q, k, v = qkv.clone()
        return pos.attend(*pos.rotate(q, k), v)

    def make(kind, **keywords):
        torch.manual_seed(0)  # one that draws is known by what it draws
        return kind(**keywords)

    kind, given = getattr(module, name), {}
    base = next((c for c in kind.__mro__ if c.__module__ in ("fope", "baselines")), nn.Module)
    init = base.__init__
    base.__init__ = lambda self, **keywords: given.update(keywords) or init(self, **keywords)
    pos, loaded = make(kind, **shape), kind(**shape)
    base.__init__ = init
    attend(loaded, qkv)
    loaded.load_state_dict(pos.state_dict())
    y, scores, T = attend(pos, qkv), pos.scores(qkv[0], qkv[1]).tril(), qkv.size(-2)
    later = torch.ones(T, T).triu(1).bool()
    other_later = attend(pos, torch.cat((qkv[..., :20, :], 1 + qkv[..., 20:, :]), dim=-2))
    trained = make(kind, **shape)  # one that starts without a bias may learn it
    own_logits = logits(trained, *qkv[:2])
    same_order = attend(trained, qkv)
    other_order = attend(trained, torch.cat((qkv[..., :-1, :].flip(-2), qkv[..., -1:, :]), -2))
    no_order = torch.allclose(other_order[..., -1, :], same_order[..., -1, :], atol=1e-3)
    if same_order.requires_grad:
        same_order.square().sum().backward()
    grads = {name: p.grad for name, p in trained.named_parameters()}
    cut_off = [name for name, grad in grads.items() if grad is None or not grad.abs().sum() > 0]
    plain = {k: v for k, v in given.items() if v is None or isinstance(v, int | float | str)}
    answer = {
        "fused": [y, scores.masked_fill(later, -torch.inf).softmax(dim=-1) @ qkv[2]],
        "causal": [other_later[..., :20, :], y[..., :20, :]],
        "position": ["turned round, they give the same" if no_order else "", ""],
        "saved": [attend(loaded, qkv), y],
        "learns": [f"{', '.join(cut_off)}: no gradient" if cut_off else "", ""],
        "device": [on_the_cpu(attend, trained, qkv), ""],
        "logits": own_logits,
        "keywords": {k: v for k, v in plain.items() if k not in shape or v != shape[k]},
        "base": base.__name__,
    }
    with suppress(NotImplementedError, AttributeError):  # a class without a bias, or not ours
        answer["base logits"] = logits(make(base, **plain), *qkv[:2])
    return answer


SPECIAL = (train, lean, rounding, statistics, seeded, task_accuracy, embed)
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
    if os.path.exists("/proc/self/statm"):  # Linux: other systems do not keep to this limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    # both end this process, wherever it is; on a busy machine a right answer may wait long
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(10 * SECONDS)
    torch.seed()
    sys.path.insert(0, str(file.parent))
    sys.modules.pop(file.stem, None)  # the right file, where checks.py has imported it
    sys.dont_write_bytecode = True
    result = {}
    try:
        module = importlib.import_module(file.stem)
        result |= {"loaded": True, "dtype": torch.get_default_dtype()}
        torch.set_default_dtype(torch.float32)
        result["value"] = [call(module, *question) for question in questions]
    except BaseException as e:  # whatever a student's code raises, SystemExit as well
        result["error"] = describe(e, file)
    torch.save(result, answer)
    os._exit(0)  # a thread that a student's file has started may never end


def ask(file, text, questions):
    """
    What a file of this name and text, bytes, answers to each of the questions (name, *args):
    {"value": a list} or {"error": a sentence}, "loaded" if it could be imported, and the default
    "dtype" of torch that it has set.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.pt")
        Path(folder, file).write_bytes(text)
        args = Path(folder, file).resolve(), questions, answer
        process = multiprocessing.get_context("fork").Process(target=leave, args=args, daemon=True)
        process.start()
        process.join()
        if process.exitcode in (-signal.SIGPROF, -signal.SIGALRM):
            return {"error": f"no end within {SECONDS} seconds", "loaded": True}
        try:
            return torch.load(answer, weights_only=False)  # it has run already: no less safe
        except Exception:  # whatever a half of a file makes torch raise
            return {"error": "nothing readable comes back: too much memory?", "loaded": True}
