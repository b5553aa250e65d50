"""
The process in which a student's file runs. It calls their functions on what grade.py sends and
sends back tensors and plain values, as json. It knows no right answer and gives no points.

    python -P child.py FD FOLDER SECONDS      FD is a socket, FOLDER has the project's other files
"""

import ast
import base64
import json
import math
import os
import re
import resource
import socket
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

MEMORY = 2**30  # bytes that a student's code may take beyond what torch has taken
DTYPES = {str(d): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.int64)}

# --- messages: nested dicts and lists of tensors and plain values. Nothing in them is executed.


def encode(x):
    if not isinstance(x, torch.Tensor):
        return np.asarray(x).tolist()  # what numpy has
    x = x.detach() if str(x.dtype) in DTYPES else x.detach().float()
    raw = x.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return {"dtype": str(x.dtype), "shape": x.shape, "bytes": base64.b64encode(raw).decode()}


def decode(x):
    if x.keys() != {"dtype", "shape", "bytes"}:
        return x
    raw, dtype = bytearray(base64.b64decode(x["bytes"])), DTYPES[x["dtype"]]
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0)).reshape(x["shape"])


def send(sock, value):
    text = json.dumps(value, default=encode).encode()
    sock.sendall(len(text).to_bytes(8, "little") + text)


def receive(sock, deadline=math.inf, most=2**40):
    """What was sent. TimeoutError after the deadline, ValueError for more than `most` bytes."""
    data, n = bytearray(), 8
    while len(data) < n:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        sock.settimeout(left if left < math.inf else None)
        if not (part := sock.recv(min(n - len(data), 2**20))):
            raise ConnectionError
        data += part
        if len(data) == 8 == n and (n := 8 + int.from_bytes(data, "little")) > most:
            raise ValueError("too long")
    return json.loads(data[8:], object_hook=decode)


# --- what a student's file may not do. A second line only: right values alone give points.


def limit_resources(seconds):
    """Time and memory of this process; no file can be written."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if os.path.exists("/proc/self/statm"):  # Linux: other systems do not keep to this limit
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))


def forbid(folder):
    """Files are read where packages and the project's other files are; no process, no network."""
    readable = tuple(os.path.realpath(path) + os.sep for path in [folder, *sys.path])
    kinds = {"os", "subprocess", "socket", "ctypes", "shutil", "fcntl", "mmap", "resource"}

    def hook(event, args):
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(readable) or args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise PermissionError("a file handed in may not open files")
        elif event.split(".")[0] in kinds and event not in ("os.listdir", "os.scandir"):
            raise PermissionError(f"a file handed in may not use {event}")

    sys.addaudithook(hook)


# --- the student's file


def load(file, text, imports):
    """The module that a student's file is, which may import nothing but `imports`."""
    tree = ast.parse(text.encode("latin-1"), file)
    for node in ast.walk(tree):
        wanted = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        wanted += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        for name in wanted:
            if name.split(".")[0] not in imports:
                raise ImportError(f"line {node.lineno} imports {name}, not {', '.join(imports)}")
    module = sys.modules[Path(file).stem] = ModuleType(Path(file).stem)
    exec(compile(tree, file, "exec"), module.__dict__)
    return module


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


def autocast(module, name, *args):
    """A result with matrix products in bf16, as train.py computes on a GPU."""
    with torch.autocast("cpu", torch.bfloat16):
        return call(module, name, *args)


def gradients(module, name, fields, *args):
    """Those of the sum of squares of a result."""
    args = [x.clone().requires_grad_() for x in args]
    return torch.autograd.grad(call(module, name, fields, *args).square().sum(), args)


class Reader(nn.Module):
    """
    A model for exercise 5. It looks where the last 8 tokens stood before and predicts what came
    next there; after a share of the tokens, another one; in training mode, as by dropout, nonsense.
    """

    def __init__(self, wrong):
        super().__init__()
        self.wrong, self.weight = wrong, nn.Parameter(torch.zeros(1))

    def forward(self, idx, targets=None, *, positions=slice(None)):
        t = torch.arange(idx.size(1))
        context = sum(F.pad(idx + 1, (i, 0))[:, : len(t)] * pow(1009, i, 2**31) for i in range(8))
        before = (context[:, :, None] == context[:, None]) * (t[:, None] > t) * t
        guess = idx.gather(1, torch.minimum(before.argmax(dim=-1) + 1, t))
        guess += (idx * 37 % 100 < 100 * self.wrong).long()
        logits = torch.sin((idx[..., None] + 1.0) * torch.arange(320)) + 4 * F.one_hot(guess, 320)
        return (-logits if self.training else logits)[:, positions]


def task_accuracy(module, wrong, trials, seed, training, keys):
    """Of its result these keys; also whether it left the model's mode and torch's state alone."""
    from data import Passkey

    def encode(text):  # some pairs of digits are one token, as GPT-2's tokenizer has it
        parts = re.findall(r"[0-4]\d|.", text, re.DOTALL)
        return [256 + int(part) if len(part) == 2 else ord(part) for part in parts]

    torch.rand(1)  # a seed that an earlier call has set would be no change
    model, state = Reader(wrong).train(training), torch.get_rng_state()
    result = module.task_accuracy(model, Passkey(encode), 400, trials, seed)
    result["mode"] = model.training == training
    result["random"] = torch.equal(torch.get_rng_state(), state)
    return json.loads(json.dumps({key: result[key] for key in keys}))  # what json can hold


def embed(module, name, shape, q, k, v):
    """An embedding's attention, also once loaded, scores, the gradient of what has least."""

    def new(seed):
        torch.manual_seed(seed)
        return getattr(module, name)(**shape)

    def attend(pos):
        return pos.attend(*pos.rotate(q, k), v)

    pos, loaded = new(0), new(1)
    attend(loaded)
    loaded.load_state_dict(pos.state_dict())
    y, parameters = attend(pos), [*pos.parameters()]
    if parameters:
        y.square().sum().backward()
    largest = [0.0 if p.grad is None else float(p.grad.abs().max()) for p in parameters]
    values = {"attention": y, "scores": pos.scores(q, k), "loaded": attend(loaded)}
    return values | {"gradient": min(largest, default=1.0)}


SPECIAL = {f.__name__: f for f in (autocast, gradients, task_accuracy, embed)}


def describe(e, file):
    """An exception in one line, with the last line of the student's file that it came through."""
    lines = [
        n for frame, n in traceback.walk_tb(e.__traceback__) if frame.f_code.co_filename == file
    ]
    line = e.lineno if isinstance(e, SyntaxError) else (lines or [None])[-1]
    words = f"{type(e).__name__}: {e}".split("\n")[0][:200]
    return f"{words} ({file}, line {line})" if line else words


def main(fd, folder, seconds):
    torch.set_num_threads(1)
    sock = socket.socket(fileno=int(fd))
    send(sock, "ready")
    about = receive(sock)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    limit_resources(int(seconds))
    forbid(folder)
    module = question = None
    while True:
        try:
            value = call(module, *question) if module else None
            module = module or load(**about)
            send(sock, {"value": value})
        except BaseException as e:  # whatever a student's code raises, SystemExit as well
            send(sock, {"error": describe(e, about["file"])})
        question = receive(sock)


if __name__ == "__main__":
    main(*sys.argv[1:])
