"""
What the scripts share: flags, errors in one sentence, files, devices and processes, provenance.
"""

import argparse
import atexit
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from functools import wraps
from pathlib import Path

import torch
import torch.distributed as dist

# --- command lines: bad input ends in one sentence and exit code 1


class HelpFormatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    def _get_help_string(self, action):
        # a flag without a value of its own has no default worth printing
        if action.default is None or action.default is False or action.default == []:
            return action.help
        return super()._get_help_string(action)


class ArgumentParser(argparse.ArgumentParser):
    def __init__(self, doc):
        super().__init__(description=doc, formatter_class=HelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise ValueError(f"{message} (see {self.prog} --help)")


def number(kind, low, high):
    """A type for argparse: an int or a float, whatever `kind` is, from low to high."""

    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"must be at least {low} and at most {high:,}")
        return value

    parse.__name__ = kind.__name__  # argparse's word for what it cannot read
    return parse


positive_int = number(int, 1, 10**15)
seed_int = number(int, 0, 2**63 - 1)


def add_device_flag(parser):
    """--device, by default the accelerator of this machine: cuda, mps, xpu, ... or else cpu."""
    found = torch.accelerator.is_available()
    default = torch.accelerator.current_accelerator().type if found else "cpu"
    parser.add_argument("--device", default=default, help="cpu, cuda, cuda:1, mps, xpu, ...")


def add_pos_flags(parser):
    """Flags of the position embedding, which training and evaluation both have."""
    add, factor = parser.add_argument, number(float, 1, 10**9)
    add("--pos_args", nargs="*", default=[], metavar="K=V", help="such as variant=paper sigma=0.4")
    add("--yarn_scale", type=factor, help="read this many times the trained length, by YaRN")
    add("--yarn_temperature", action="store_true", help="as YaRN's paper; FoPE's leaves it out")
    add("--pi_scale", type=factor, help="as --yarn_scale, by position interpolation")


def parse_keywords(flag, pairs):
    """["sigma=0.4", "variant=paper"] of a flag -> {"sigma": 0.4, "variant": "paper"}."""
    keywords = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or key in keywords:
            raise ValueError(f"{flag} {pair!r} is not of the form keyword=value, each once")
        try:
            keywords[key] = json.loads(text)
        except ValueError:
            keywords[key] = text
    return keywords


def parse_rope_scaling(args, trained):
    """
    GPTConfig.rope_scaling as the flags say, None where they say nothing. They lower frequencies
    that a model, whose config is `trained`, has learned at its training length.
    """
    if args.yarn_scale and args.pi_scale:
        raise ValueError("--yarn_scale and --pi_scale both lower the frequencies: give one of them")
    if args.yarn_temperature and not args.yarn_scale:
        raise ValueError("--yarn_temperature goes with --yarn_scale")
    factor = args.yarn_scale or args.pi_scale
    if factor is None:
        return None
    if trained is None:
        raise ValueError("--yarn_scale and --pi_scale are for a trained model: use --init_from")
    original_len = (trained.rope_scaling or {}).get("original_len", trained.train_len)
    kind = "yarn" if args.yarn_scale else "interpolate"
    scaling = {"kind": kind, "factor": factor, "original_len": original_len}
    return scaling | ({"temperature": True} if args.yarn_temperature else {})


def is_out_of_memory(e):
    """Whether an exception is Python's or torch's, on a CPU or a GPU, for want of memory."""
    words = "out of memory|allocate memory|not enough memory"
    return isinstance(e, MemoryError) or bool(re.search(words, str(e)))


def one_sentence_errors(main):
    """Show the ValueError or OSError that a check raised as its sentence, without a traceback."""

    @wraps(main)
    def wrapped(*args, **kwargs):
        try:
            return main(*args, **kwargs)
        except (ValueError, OSError) as e:
            sys.exit(f"error: {e}")
        except (MemoryError, RuntimeError) as e:
            if not is_out_of_memory(e):
                raise
            less = "a larger --grad_accum, a smaller model or shorter lengths need less"
            sys.exit(f"error: out of memory; {less}")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.exit(130)

    return wrapped


# --- files


def write_atomically(path, write):
    """Call write(file), then rename: a kill or a full disk leaves the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as f:
            write(f)
            f.flush()
            os.fsync(f.fileno())  # or a power cut could leave the new name without its content
        os.replace(temporary, path)
    except BaseException as e:
        temporary.unlink(missing_ok=True)
        disk = e if isinstance(e, OSError) else e.__context__  # torch.save has words of its own
        if isinstance(disk, OSError):
            why = disk.strerror or disk
            kept = "what it held before is untouched"
            raise OSError(f"{path} could not be written ({why}); {kept}") from None
        raise


def write_json(path, content):
    """Indented, but with each innermost list on one line. content: a dict or a list."""
    text = json.dumps(content, indent=1) + "\n"
    one_line = re.compile(r"\[\n([^\[\]{}]*?)\n *\]")
    text = one_line.sub(lambda m: "[" + re.sub(r"\n *", " ", m[1]).strip() + "]", text)
    write_atomically(path, lambda f: f.write(text.encode()))


def read_json(path, kind=dict):
    """A json object (or with kind=list a list). ValueError or OSError with one sentence."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no file {path}") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged: it is not JSON ({e})") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} is damaged: it is not the JSON that was written there")
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
    takes an accelerator of its own or shares the CPU, and all but the first stop printing. Raises
    ValueError for a device that is not there.
    """
    accelerator = torch.accelerator.current_accelerator()
    known = ["cpu", accelerator.type] if accelerator else ["cpu"]
    if device.split(":")[0] not in known:
        raise ValueError(f"--device must be {' or '.join(known)} on this machine, not {device}")
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and device != "cpu":
        if device == "mps" or ":" in device:
            raise ValueError(f"several processes cannot share --device {device}")
        device = f"{device}:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as e:
        reason = str(e).splitlines()[0]
        raise ValueError(f"--device {device} cannot be used here: {reason}") from None
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


def git_commit():
    """
    The commit that the code is at, "-dirty" with uncommitted changes to anything but results/,
    where figures and numbers are written; "unknown" outside a git checkout.
    """

    def git(*args):
        command = ["git", *args]
        return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)

    try:
        commit = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        changed = git("diff", "--quiet", "HEAD", "--", ".", ":(exclude)results").returncode
    except OSError:
        return "unknown"
    if not commit:
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def provenance(device):
    """Command, commit, hardware and software."""
    if device.type == "cpu":
        hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    else:
        module = torch.get_device_module(device)
        hardware = getattr(module, "get_device_name", lambda device: device.type)(device)
    if world_size() > 1:
        hardware = f"{world_size()} x {hardware}"
    script, root = Path(sys.argv[0]).resolve(), Path(__file__).resolve().parent
    script = str(script.relative_to(root)) if script.is_relative_to(root) else script.name
    module = sys.modules["__main__"].__spec__  # of python -m
    script = ["-m", module.name] if module else [script]
    return {
        "command": shlex.join(["python", *script, *sys.argv[1:]]),
        "commit": git_commit(),
        "hardware": hardware,
        "software": f"Python {platform.python_version()}, torch {torch.__version__}",
    }
