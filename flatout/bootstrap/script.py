"""The on-start script of a rented machine: a few lines with settings, and a body that is the same for all.

BootstrapConfig --install, fetch, train, run at the end--> head + body.sh --> one POSIX sh file below 4,000 characters
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from flatout.errors import ConfigError
from flatout.runs import check_mirror_url

MAX_CHARACTERS = 4000
"""Limit of the on-start forms of most providers."""
_NAME = r"""(?:secret|token|passw(?:or)?d|passphrase|(?<![a-z])pass|sshpass|[-_]pwd
    |(?:api|access|account|private|auth)[-_]?key)(?:[-_]?id)?"""
_VALUE = r"""["']?[^\s$`"'<>|&;()-]"""
"""The first character of a literal value: `$NAME` and `$(command)` are not secrets."""
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
      | [?&](?:x-amz-signature|x-goog-signature|sig)=  # a signed URL is itself a key
    )""",
    re.VERBOSE,
)
_INDEX_NAME = re.compile(r"flatout\s*(?:\[[^]]*\]\s*)?(?:[<>=!~;(].*)?", re.IGNORECASE)
"""Our name as a requirement that pip would look up: `flatout`, `flatout[tb]>=0.1`; not `flatout[tb] @ URL`."""
_ALL_GPUS = '"$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)"'
_HEAD = """\
#!/bin/sh
# From `flatout bootstrap`. Installs, trains, and continues when it is run again after a preemption.
# Keys belong in environment variables of the machine, not in this file.
package={package}
needs={needs}
work={work}
fetch={fetch}
at_end={at_end}
train() {{ exec {train}; }}

"""


@dataclass(frozen=True, kw_only=True)
class BootstrapConfig:
    """The settings of an on-start script."""

    command: Sequence[str]
    """Arguments of flatout: `yolo train --data ...`."""
    package: str
    """What pip installs as flatout: a git address, a wheel or its URL, `flatout[EXTRA] @ URL`; never the bare name."""
    work: str = ""
    """Folder for all files; empty: /workspace/flatout, or ~/flatout."""
    fetch: str = ""
    """Shell commands that fetch the data, run once."""
    mirror: str = ""
    at_end: str = ""
    """Shell commands to run at the end; $FLATOUT_EXIT is the exit code."""
    gpus: str = "1"
    """Number of GPUs to train on, or "all"; "0": the CPU."""
    line: str = ""
    """Shell command that starts the training; empty: flatout with the command, on the GPUs."""

    def __post_init__(self) -> None:
        if "train" not in self.command:
            given = " ".join(self.command[:2])
            problem = f"`{given}` is not a training command" if given else "the training command is missing"
            raise ConfigError(f"{problem}: flatout bootstrap [FLAG ...] -- yolo train --data my.yaml ...")
        if not self.package or self.package.startswith("-"):
            raise ConfigError(
                "--package is missing: give pip a git+https://HOST/OWNER/flatout@COMMIT, the URL of a wheel, or a "
                "wheel or folder on that machine. There is no default: the name on the package index is not ours."
            )
        if _INDEX_NAME.fullmatch(self.package.strip()):
            raise ConfigError(
                f"--package {self.package}: pip would look this name up on the package index, where it is not ours, "
                "and could install somebody else's program. Give an address: git+https://HOST/OWNER/flatout@COMMIT, "
                'the URL of a wheel, a wheel or ./folder on that machine; with an extra, "flatout[tb] @ URL".'
            )
        if self.gpus != "all" and not self.gpus.isdecimal():
            raise ConfigError(f"--gpus {self.gpus}: use a number, or all; 0 trains on the CPU.")
        for text in (" ".join(self.command), self.package, self.fetch, self.mirror, self.at_end):
            _refuse_secrets(text)
        if self.mirror:
            check_mirror_url(self.mirror)


def script_of(config: BootstrapConfig, *, max_characters: int = MAX_CHARACTERS) -> str:
    """The whole script; ConfigError if it is too long or a shell command in it cannot be parsed."""
    text = _HEAD.format(
        package=shlex.quote(config.package),
        needs="obstore" if config.mirror else "",
        work=shlex.quote(config.work),
        fetch=_quoted_shell("--fetch", config.fetch),
        at_end=_quoted_shell("--at-end", config.at_end),
        train=config.line or train_line(config),
    )
    text += resources.files("flatout.bootstrap").joinpath("body.sh").read_text()
    if len(text) >= max_characters:
        raise ConfigError(
            f"the script has {len(text):,} characters; most providers accept fewer than {max_characters:,}. "
            "Put long settings into a file and download it with --fetch."
        )
    return text


def train_line(config: BootstrapConfig) -> str:
    """The training command as the machine runs it, on the requested GPUs."""
    line = shlex.join(["flatout", *arguments_of(config)])
    if config.gpus in ("0", "1"):
        return line
    # Not torchrun: it loses exit codes, and ends processes half a minute after a signal, perhaps while they save.
    return f"{line} --device {_ALL_GPUS if config.gpus == 'all' else ','.join(map(str, range(int(config.gpus))))}"


def arguments_of(config: BootstrapConfig) -> list[str]:
    """The arguments of flatout on one GPU or the CPU."""
    # --once, because the provider may run the script again after the training has finished.
    mirror = ["--mirror", config.mirror] if config.mirror else []
    return [*config.command, "--once", *mirror, *(["--device", "cpu"] if config.gpus == "0" else [])]


def _quoted_shell(flag: str, commands: str) -> str:
    """The user's commands as one word for `sh -c`, so that comments, `&` and here-documents cannot affect the rest."""
    # Parsed without running: a mistake is cheaper here than on a rented machine.
    parsed = subprocess.run(["sh", "-n"], input=commands, capture_output=True, text=True)
    if parsed.returncode:
        reason = " ".join(parsed.stderr.split()).removesuffix(".")
        raise ConfigError(
            f"{flag}: sh cannot parse the commands: {reason}. They are run by sh, not bash; check quotes and brackets."
        )
    return shlex.quote(commands)


def _refuse_secrets(text: str) -> None:
    if _SECRET.search(text):
        raise ConfigError(
            "the command seems to contain a key or password. Providers store and show on-start scripts: set it as an "
            "environment variable of the machine instead, and write $NAME here."
        )
