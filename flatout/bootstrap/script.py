"""The on-start script of a rented machine: a few lines that say what, and a body that is the same for all.

Job --what to install, fetch, train, do at the end--> head + body.sh --> one POSIX sh file, below 4,000 characters
"""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from flatout.errors import ConfigError

MOST_CHARACTERS = 4000
"""What the forms of those who rent out machines take."""
_SECRET = re.compile(
    r"://[^/@\s$]+:[^/@\s$]+@|AKIA[0-9A-Z]{12,}|gh[pousr]_\w{20,}|hf_\w{20,}|\bsk-\w{20,}"
    r"|(?i:(secret|token|passw(or)?d|api[-_]?key|access[-_]?key(_id)?)\s*[=:]\s*[^\s$\"']+)"
)
_ALL_GPUS = '"$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)"'
_HEAD = """\
#!/bin/sh
# From `flatout bootstrap`. Installs, trains, and continues when it is run again after a preemption.
# Keys belong into the machine's environment variables, not into this file.
package={package}
work={work}
fetch_data() {{ {fetch}; }}
train() {{ exec {train}; }}
at_end() {{ {at_end}; }}

"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rented machine is to do."""

    command: Sequence[str]
    """Of flatout: `yolo train --data ...`."""
    package: str = ""
    """What pip installs; empty: flatout, with what the command needs."""
    work: str = ""
    """Folder for everything; empty: /workspace/flatout, or ~/flatout."""
    fetch: str = ""
    """A line of shell that brings the data, run once."""
    mirror: str = ""
    at_end: str = ""
    """A line of shell for when all is over; $FLATOUT_EXIT is the exit code."""
    gpus: str = "1"
    """How many take part: a number, or "all"."""

    def __post_init__(self) -> None:
        if "train" not in self.command:
            raise ConfigError("say what to train: flatout bootstrap [FLAG ...] -- yolo train --data my.yaml ...")
        if self.gpus != "all" and not self.gpus.isdecimal():
            raise ConfigError(f"--gpus {self.gpus}: write a number, or all.")
        for text in (*self.command, self.package, self.fetch, self.mirror, self.at_end):
            _refuse_secrets(text)


def script_of(job: Job) -> str:
    """The whole script; ConfigError if it is too long, or would hold a key."""
    text = _HEAD.format(
        package=shlex.quote(job.package or ("flatout[cloud]" if job.mirror else "flatout")),
        work=shlex.quote(job.work),
        fetch=_line(job.fetch),
        train=train_line(job),
        at_end=_line(job.at_end),
    )
    text += resources.files("flatout.bootstrap").joinpath("body.sh").read_text()
    if len(text) >= MOST_CHARACTERS:
        raise ConfigError(
            f"the script has {len(text):,} characters; {MOST_CHARACTERS:,} are too many for most who rent out machines."
            " Put long settings into a file that --fetch brings along."
        )
    return text


def train_line(job: Job) -> str:
    """The command as the machine runs it, with all of its GPUs that are asked for."""
    # Whoever rents out the machine may run the script again when all is done.
    line = shlex.join([*job.command, "--once", *(["--mirror", job.mirror] if job.mirror else [])])
    if job.gpus == "1":
        return f"flatout {line}"
    if job.command[0] == "yolo":
        # Exit codes survive, and saving takes as long as it takes; torchrun ends processes after half a minute.
        return f"flatout {line} --device {_ALL_GPUS if job.gpus == 'all' else ','.join(map(str, range(int(job.gpus))))}"
    count = "gpu" if job.gpus == "all" else job.gpus
    return f"python -m torch.distributed.run --standalone --nproc_per_node {count} -m flatout {line}"


def _line(shell: str) -> str:
    """One line of the user's own shell; nothing is a line that does nothing."""
    if "\n" in shell.strip():
        raise ConfigError("--fetch and --at-end take one line of shell each: put more of it into a file.")
    return shell.strip().rstrip(";") or ":"


def _refuse_secrets(text: str) -> None:
    if _SECRET.search(text):
        raise ConfigError(
            "a key or password seems to stand in the command. On-start scripts are stored and shown by those who rent "
            "out machines: set it as an environment variable of the machine, and write $NAME here."
        )
