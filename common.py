"""
What the scripts share: flags, refusals in one sentence, files, devices and processes, provenance.
"""

import argparse
import atexit
import errno
import fcntl
import hashlib
import json
import os
import platform
import re
import secrets
import shlex
import subprocess
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent

# --- refusals: bad input ends in one sentence and exit code 1, everything else in a traceback


class Refused(Exception):
    """What one of our checks refuses. The message is one sentence for the user."""


def one_sentence_errors(main):
    """Show what a check refused as its sentence; any other exception, a bug, has its traceback."""

    @wraps(main)
    def wrapped(*args, **kwargs):
        with suppress(AttributeError):  # a notebook's, or none
            sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character
        try:
            main(*args, **kwargs)
            print(end="", flush=True)
        except Refused as e:
            sys.exit(f"error: {e}")
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            less = "a larger --grad_accum, smaller models, shorter lengths, smaller files need less"
            sys.exit(f"error: out of memory; {less}")
        except BrokenPipeError:  # what reads our output, such as head, has enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except OSError as e:
            if e.errno not in (errno.EACCES, errno.ENAMETOOLONG, errno.ENOSPC):
                raise
            sys.exit(f"error: {e.filename or 'output'}: {e.strerror}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return wrapped


def is_out_of_memory(e):
    """Whether an exception is Python's or torch's, on a CPU or a GPU, for want of memory."""
    words = "out of memory|allocate memory|not enough memory|ALLOC_FAILED"
    return isinstance(e, MemoryError) or bool(re.search(words, str(e)))


@contextmanager
def file_errors():
    """Within it, what the system says of a file that cannot be read or written is a refusal."""
    try:
        yield
    except OSError as e:
        raise Refused(f"{e.filename}: {e.strerror}" if e.filename else str(e)) from None
    except UnicodeDecodeError as e:
        raise Refused(f"what was read is not UTF-8: {e.reason} at byte {e.start:,}") from None


# --- command lines


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        # a flag without a value of its own has no default worth printing
        if action.default is None or action.default is False or action.default in ("", [], {}):
            return action.help
        return super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    """--help begins with a script's docstring, whose examples say how it is called."""

    def __init__(self, doc, **kwargs):
        kwargs |= dict(description=doc, usage=argparse.SUPPRESS, allow_abbrev=False)
        kwargs |= dict(formatter_class=HelpFormatter)
        super().__init__(**kwargs)

    def error(self, message):
        raise Refused(f"{message} (see {shlex.join(script())} --help)")


def number(kind, low, high):
    """A type for argparse: an int or a float, whatever `kind` is, from low to high."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be at least {low} and at most {high:,}")
        return value

    parse.__name__ = kind.__name__  # argparse's word for what it cannot read
    return parse


def path(text):
    """A type for argparse: a Path that has a name."""
    if not text:
        raise argparse.ArgumentTypeError("must have a name")
    return Path(text)


positive_int = number(int, 1, 10**15)
seed_int = number(int, 0, 2**63 - 1)


def add_device_flag(parser):
    """--device, by default the accelerator of this machine: cuda, mps, xpu, ... or else cpu."""
    found = torch.accelerator.is_available()
    default = torch.accelerator.current_accelerator().type if found else "cpu"
    parser.add_argument("--device", default=default, help="cpu, cuda, cuda:1, mps, xpu, ...")


# --- files


def make_folder(path):
    with file_errors():
        Path(path).mkdir(parents=True, exist_ok=True)
    if not os.access(path, os.W_OK):
        raise Refused(f"{path} cannot be written to")
    return Path(path)


@contextmanager
def lock(folder):
    """
    Within it no other process writes to a folder, and what a killed one left half written is gone.
    Refused where another has the lock, which the system frees however that process ends.
    """
    with file_errors():
        fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refused(f"another command is writing to {folder}") from None
        except OSError:
            pass  # a disk that has no locks
        for half in Path(folder).glob(f"*.{'[0-9a-f]' * 8}.tmp"):  # of write_atomically
            half.unlink()
        yield
    finally:
        os.close(fd)


def write_atomically(path, write):
    """Call write(file), then rename: a kill or a full disk leaves the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())  # or a power cut could leave the new name without its content
        os.replace(temporary, path)
    except BaseException as e:
        with suppress(OSError):  # a read-only disk refuses this, too
            temporary.unlink(missing_ok=True)
        disk = e if isinstance(e, OSError) else e.__context__  # torch.save has words of its own
        if isinstance(disk, OSError):
            why = disk.strerror or disk
            kept = "what it held before is untouched"
            raise Refused(f"{path} could not be written ({why}); {kept}") from None
        raise


def write_json(path, content):
    """Indented, but with each innermost list on one line. content: a dict or a list."""
    text = json.dumps(content, indent=1) + "\n"
    one_line = re.compile(r"\[\n([^\[\]{}]*?)\n *\]")
    text = one_line.sub(lambda m: "[" + re.sub(r"\n *", " ", m[1]).strip() + "]", text)
    write_atomically(path, lambda f: f.write(text.encode()))


def read_json(path, kind=dict):
    """A json object (or with kind=list a list). Refused where there is none or it is damaged."""
    try:
        with file_errors():
            content = Path(path).read_bytes()
        content = json.loads(content.decode())
    except (ValueError, RecursionError) as e:
        raise Refused(f"{path} is damaged: it is not JSON ({e})") from None
    if not isinstance(content, kind):
        raise Refused(f"{path} is damaged: it is not the JSON that was written there")
    return content


def file_sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# --- devices, and the processes that torchrun starts


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
    accelerator = torch.accelerator.current_accelerator()
    known = ["cpu", accelerator.type] if accelerator else ["cpu"]
    if device.split(":")[0] not in known:
        raise Refused(f"--device must be {' or '.join(known)} on this machine, not {device}")
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world > 1 and not {"RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise Refused(f"WORLD_SIZE is {world}, but torchrun has not started this process")
    if world > 1 and device != "cpu":
        if device == "mps" or ":" in device:
            raise Refused(f"several processes cannot share --device {device}")
        device = f"{device}:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise Refused(f"--device {device} cannot be used here: {reason}") from None
    if world > 1 and not dist.is_initialized():
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


def code_hashes():
    """The code of the model: {file: the start of its sha256}."""
    return {name: file_sha256(ROOT / name)[:16] for name in ("fope.py", "baselines.py", "model.py")}


def git_commit():
    """
    The commit that the code is at, "-dirty" with uncommitted changes to anything but results/,
    where figures and numbers are written; "unknown" outside a git checkout.
    """

    def git(*args):
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True)

    try:
        commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)results").returncode
    except OSError:
        return "unknown"
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if changed else commit


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


def script():
    """What this process runs, as one would type it in the project's folder."""
    path, module = Path(sys.argv[0]).resolve(), sys.modules["__main__"].__spec__
    if module:  # python -m
        return ["python", "-m", module.name.removesuffix(".__main__")]
    return ["python", str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name)]


def command():
    """How this process was started."""
    return shlex.join([*script(), *sys.argv[1:]])
