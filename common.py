"""
What the scripts share: refusals in one sentence, files, devices and processes, provenance.
"""

import argparse
import atexit
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent

# --- refusals: bad input ends in one sentence and exit code 1, a bug in its traceback


class Refused(Exception):
    """What one of our checks refuses. The message is one sentence for the user."""


def one_sentence_errors(main):
    """main, but what a user can mend ends in one sentence."""

    def wrapped(*args, **kwargs):
        try:
            main(*args, **kwargs)
        except Refused as e:
            sys.exit(f"error: {e}")
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            sys.exit("error: out of memory; a larger --grad_accum or a smaller model needs less")
        except BrokenPipeError:  # what reads our output, such as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as e:
            if not e.filename:
                raise
            sys.exit(f"error: {e.filename}: {e.strerror}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return wrapped


def is_out_of_memory(e):
    """Whether an exception is Python's or torch's, on a CPU or a GPU, for want of memory."""
    messages = "out of memory|allocate memory|not enough memory|ALLOC_FAILED"
    return isinstance(e, MemoryError) or bool(re.search(messages, str(e)))


# --- command lines


class Bar(tqdm):
    """A progress bar; into a file it is printed every ten seconds."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, mininterval=0.1 if sys.stderr.isatty() else 10, **kwargs)

    def display(self, *args, **kwargs):
        with suppress(OSError):  # Ctrl-C ends the tee of `train.py 2>&1 | tee log`, too
            return super().display(*args, **kwargs)


class ArgumentParser(argparse.ArgumentParser):
    """--help begins with a script's docstring, whose examples say how it is called."""

    def __init__(self, doc, **kwargs):
        kwargs |= dict(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False)
        super().__init__(**kwargs, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        raise Refused(f"{message} (--help shows the flags)")


def positive_int(text):
    """A type for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def add_device_flag(parser):
    """--device, by default the accelerator of this machine: cuda, mps, xpu, ... or else cpu."""
    found = torch.accelerator.is_available()
    default = torch.accelerator.current_accelerator().type if found else "cpu"
    parser.add_argument("--device", default=default, help="cpu, cuda, cuda:1, mps, xpu, ...")


# --- files


def make_folder(path):
    Path(path).mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):  # said before the work
        raise Refused(f"{path} cannot be written to")
    return Path(path)


@contextmanager
def lock(folder):
    """
    Within it no other process writes to a folder. Refused where another one has the lock. An empty
    folder is not left behind.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Refused(f"another command is writing to {folder}") from None
    except OSError:  # a disk that has no locks
        pass
    try:
        yield
    finally:
        os.close(fd)
        with suppress(OSError):
            os.rmdir(folder)


def write_atomically(path, write):
    """Call write(file), then rename: a kill or a full disk leaves the old file or the new one."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())  # or a power cut could leave the new name without its content
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path, content):
    """Indented, but with each innermost list on one line. content: a dict or a list."""
    text = json.dumps(content, indent=1) + "\n"
    one_line = re.compile(r"\[\n([^\[\]{}]*?)\n *\]")
    text = one_line.sub(lambda m: "[" + re.sub(r"\n *", " ", m[1]).strip() + "]", text)
    write_atomically(path, lambda f: f.write(text.encode()))


def read_json(path):
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as e:
        raise Refused(f"{path} is damaged: it is not JSON ({e})") from None


def file_sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# --- devices, and the processes that torchrun starts

# of cards by torch's name for them, in bf16, dense, in FLOP/s, as the makers say
PEAK_FLOPS = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA GeForce RTX 4090": 165e12,
}


def peak_flops(card):
    return PEAK_FLOPS.get(card)


def autocast(device):
    """bf16 where a CUDA or XPU device has it in hardware, fp32 elsewhere."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        if module.is_bf16_supported(including_emulation=False):
            return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def init_distributed(device):
    """
    The torch.device of this process. Where torchrun has started several, they join here: each
    takes an accelerator of its own or shares the CPU, and all but the first stop printing. Refused
    for a device that is not there.
    """
    several = dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1
    if several and device != "cpu":
        device = f"{device}:{os.environ['LOCAL_RANK']}"
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise Refused(f"--device {device} cannot be used here: {reason}") from None
    if several and not dist.is_initialized():
        backend = "cpu:gloo"  # sums of results are on the CPU, gradients on the device
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
            backend += f",{device.type}:{dist.get_default_backend_for_device(device)}"
        dist.init_process_group(backend)
        atexit.register(dist.destroy_process_group)
        if rank() > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    return device


def rank():
    """The number of this process: 0 where torchrun has not started several."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce_sum(tensor):
    """The sum of a tensor that every process has, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


# --- where a result comes from


def git_commit():
    """
    That of the code; "-dirty" with changes to all but results/, and with a new .py file. "unknown"
    without git, or if the folder of the code is no repository of its own.
    """

    def git(*args):
        command = ["git", "--git-dir=.git", *args]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("diff", "--name-only", "HEAD", "--", ".", ":(exclude)results")
        new = git("ls-files", "--others", "--exclude-standard", "--", "*.py")
    except FileNotFoundError:
        return "unknown"
    return commit + "-dirty" * bool(changed or new) if commit else "unknown"


def provenance(device):
    """Commit, hardware and software."""
    if device.type == "cpu":
        hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    else:
        module = torch.get_device_module(device)
        hardware = getattr(module, "get_device_name", lambda device: device.type)(device)
    if world_size() > 1:
        hardware = f"{world_size()} x {hardware}"
    software = f"Python {platform.python_version()}, torch {torch.__version__}"
    return {"commit": git_commit(), "hardware": hardware, "software": software}


def command():
    """How this script was started, as one would type it in the project's folder."""
    module = getattr(sys.modules["__main__"], "__spec__", None)  # of python -m hf.evaluate
    script = ["-m", module.name] if module else [os.path.relpath(sys.argv[0], ROOT)]
    return shlex.join(["python", *script, *sys.argv[1:]])
