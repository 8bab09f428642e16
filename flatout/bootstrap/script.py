"""The on-start script of a rented machine: a few lines that say what, and a body that is the same for all.

Job --what to install, fetch, train, do at the end--> head + body.sh --> one POSIX sh file, below 4,000 characters
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from flatout.errors import ConfigError

MOST_CHARACTERS = 4000
"""What the forms of those who rent out machines take."""
_NAME = r"""(?:secret|token|passw(?:or)?d|passphrase|(?<![a-z])pass|sshpass|[-_]pwd
    |(?:api|access|account|private|auth)[-_]?key)(?:[-_]?id)?"""
_VALUE = r"""["']?[^\s$`"'<>|&;()-]"""
"""The first character of a literal value: `$NAME` and `$(command)` are no secrets."""
_SECRET = re.compile(
    rf"""
      ://[^/@\s$:]*:[^/@\s$]+@ | ://[^/@\s$:]{{20,}}@  # user:password@host, token@host
    | \bA[KS]IA[0-9A-Z]{{12,}} | \bgh[pousr]_\w{{20,}} | \bgithub_pat_\w{{20,}} | \bglpat-[\w-]{{20,}}
    | \bhf_\w{{20,}} | \bsk-[\w-]{{20,}} | \bxox[a-z]-[\w-]{{10,}} | \bAIza[\w-]{{30,}} | \beyJ[\w-]{{10,}}\.[\w-]+
    | -----BEGIN[ A-Z]*PRIVATE
    | (?i:
        {_NAME}["']?\s*[=:]\s*{_VALUE}  # X_TOKEN=..., --password=..., "api-key: ..."
      | (?<!\S)--?[\w-]*{_NAME}\s+{_VALUE}  # --password ...
      | \b(?:config\w*|set)\b[^|;&\n]*?{_NAME}\s+{_VALUE}  # aws configure set aws_secret_access_key ...
      | \bauthorization["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token|key)\b\s*)?+{_VALUE}
      | \bbearer\s+{_VALUE}
      | \b(?:login|authtoken)\b[^|;&\n]*?\s["']?(?=[\w-]*\d)[a-z0-9][\w-]{{19,}}(?![^\s"'])  # wandb login ...
      | \blogin\b[^|;&\n]*?\s-p\s*{_VALUE} | \bsshpass\s+-p\s*{_VALUE} | \bmysql\w*\b[^|;&\n]*?\s-p{_VALUE}
      | \bcurl\b[^|;&\n]*?\s(?:-u|--user|--proxy-user)[\s=]*["']?[^\s:$"']+:{_VALUE}
      | \b(?:echo|printf)\b[^|$`]*\|[^|]*(?:-stdin|--with-token|\blogin\b)  # echo ... | docker login --password-stdin
      | [?&](?:x-amz-signature|x-goog-signature|sig)=  # a URL that was signed is a key for whoever reads it
    )""",
    re.VERBOSE,
)
_ALL_GPUS = '"$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)"'
_HEAD = """\
#!/bin/sh
# From `flatout bootstrap`. Installs, trains, and continues when it is run again after a preemption.
# Keys belong into the machine's environment variables, not into this file.
package={package}
needs={needs}
work={work}
fetch={fetch}
at_end={at_end}
train() {{ exec {train}; }}

"""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rented machine is to do."""

    command: Sequence[str]
    """Of flatout: `yolo train --data ...`."""
    package: str
    """What pip installs as flatout: a wheel, an address, a requirement."""
    work: str = ""
    """Folder for everything; empty: /workspace/flatout, or ~/flatout."""
    fetch: str = ""
    """Shell commands that bring the data, run once."""
    mirror: str = ""
    at_end: str = ""
    """Shell commands for when all is over; $FLATOUT_EXIT is the exit code."""
    gpus: str = "1"
    """How many take part: a number, or "all"."""

    def __post_init__(self) -> None:
        if "train" not in self.command:
            raise ConfigError("say what to train: flatout bootstrap [FLAG ...] -- yolo train --data my.yaml ...")
        if not self.package or self.package.startswith("-"):
            raise ConfigError(
                "say what pip installs: --package git+https://HOST/OWNER/flatout@COMMIT, or the URL of a wheel, or a "
                "wheel or folder on that machine. There is no default: the name on the package index is not ours."
            )
        if self.gpus != "all" and not (self.gpus.isdecimal() and int(self.gpus)):
            raise ConfigError(f"--gpus {self.gpus}: write a number, or all.")
        for text in (" ".join(self.command), self.package, self.fetch, self.mirror, self.at_end):
            _refuse_secrets(text)


def script_of(job: Job) -> str:
    """The whole script; ConfigError if it is too long, or would hold a key."""
    text = _HEAD.format(
        package=shlex.quote(job.package),
        needs="obstore" if job.mirror else "",
        work=shlex.quote(job.work),
        fetch=_quoted_shell("--fetch", job.fetch),
        at_end=_quoted_shell("--at-end", job.at_end),
        train=train_line(job),
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
    # Exit codes survive, and saving takes as long as it takes; torchrun ends processes after half a minute.
    return f"flatout {line} --device {_ALL_GPUS if job.gpus == 'all' else ','.join(map(str, range(int(job.gpus))))}"


def _quoted_shell(flag: str, commands: str) -> str:
    """The user's commands as one word for `sh -c`: comments, `&` and here-documents in them end where they end."""
    # Only parsed: a mistake is cheaper here than on a machine that costs money.
    parsed = subprocess.run(["sh", "-n"], input=commands, capture_output=True, text=True)
    if parsed.returncode:
        raise ConfigError(f"{flag}: the shell cannot read this: {' '.join(parsed.stderr.split())}")
    return shlex.quote(commands)


def _refuse_secrets(text: str) -> None:
    if _SECRET.search(text):
        raise ConfigError(
            "a key or password seems to stand in the command. On-start scripts are stored and shown by those who rent "
            "out machines: set it as an environment variable of the machine, and write $NAME here."
        )
