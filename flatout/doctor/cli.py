"""The command line of `flatout doctor`, and its report as text or JSON."""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from flatout.cli import parser_of, switch, value
from flatout.clock import machine
from flatout.doctor import gpu, host, images
from flatout.findings import LEVELS, Finding, exit_code
from flatout.lazy import renamed

# Facts and findings: the report is `diagnose(examine())`.


@dataclass(frozen=True)
class Facts:
    """All facts about this machine as plain data; the `facts` of `--json`."""

    cores: machine.Cores
    memory: machine.Memory
    shm: machine.Shm | None
    descriptors: machine.Descriptors
    software: host.Software
    torch: gpu.TorchFacts
    driver: gpu.DriverFacts
    images: images.DecoderFacts
    disk: host.DiskFacts | None


def examine(disk_folder: Path | None = None) -> Facts:
    """Gather the facts: run one kernel per GPU, time JPEG decoding, and the disk of `disk_folder` if given."""
    return Facts(
        cores=machine.cores(),
        memory=machine.memory(),
        shm=machine.shm(),
        descriptors=machine.descriptors(),
        software=host.software(),
        torch=gpu.torch_facts(),
        driver=gpu.driver_facts(),
        images=images.decoder_facts(),
        disk=host.disk_facts(disk_folder) if disk_folder else None,
    )


def diagnose(facts: Facts) -> dict[str, list[Finding]]:
    """Findings by section of the report."""
    return {
        "machine": [
            host.check_cores(facts.cores),
            host.check_memory(facts.memory),
            host.check_shm(facts.shm),
            host.check_descriptors(facts.descriptors),
        ],
        "software": host.check_software(facts.software),
        "torch and GPUs": gpu.check_torch_and_gpus(facts.torch, facts.driver),
        "images": [images.check_opencv(facts.images), images.check_jpeg(facts.images)],
        "disk": [host.check_disk(facts.disk)],
    }


__getattr__ = renamed(__name__, judge="diagnose")


# Command line

DESCRIPTION = """\
Examine this machine and report what would slow training down or prevent it, with a line of advice on each:
cores, memory, shared memory, open files, versions, torch and GPUs (one kernel is run on each), OpenCV and
JPEG decoding speed, and the disk of a folder if you name one. Takes a few seconds and changes nothing.
"""
EPILOG = """\
levels:  ok    fine; the advice says why it matters     note  good to know
         warn  works, but costs speed or safety         bad   training will not run as it should

examples:
  flatout doctor                     the report
  flatout doctor --disk data/coco    also time the disk that holds the data (writes 72 MB there and removes them)
  flatout doctor --json              facts and findings for a script or a bug report

exit code: 0, or 5 if a finding is bad
"""
FLAGS = (
    switch("--json", "print one JSON document instead of text"),
    value("--disk", "also time the disk that holds this folder", type=Path, metavar="FOLDER"),
)
COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


def main(argv: list[str]) -> int:
    """Print what the doctor finds; returns 0, or 5 (ResourceError) if any finding is bad."""
    args = parser_of("flatout doctor", DESCRIPTION, EPILOG, FLAGS, shortened=True).parse_args(argv)
    facts = examine(args.disk)
    sections = diagnose(facts)
    code = exit_code(chain(*sections.values()))
    if args.json:
        print(as_json(facts, sections, code))
    else:
        _show(as_text(sections))
    return code


def as_json(facts: Facts, sections: dict[str, list[Finding]], code: int) -> str:
    """One JSON document: facts, findings with their section, exit code."""
    findings = [
        {"section": name, "topic": each.topic, "value": each.value, "level": each.level, "advice": each.advice}
        for name, part in sections.items()
        for each in part
    ]
    return json.dumps({"facts": asdict(facts), "findings": findings, "exit_code": code}, indent=2)


def as_text(sections: dict[str, list[Finding]]) -> str:
    """Aligned plain text: level, topic and value on one line, the advice below it."""
    lines = []
    for name, findings in sections.items():
        lines.append(name)
        for finding in findings:
            lines.append(f"  {finding.level:<5} {finding.topic:<11} {finding.value}")
            lines.append(f"{'':<19} {finding.advice}")
        lines.append("")
    return "\n".join([*lines, summary(chain(*sections.values()))])


def summary(findings: Iterable[Finding]) -> str:
    """The last line: whether this machine is ready to train, and the number of findings of each level."""
    counts = Counter(finding.level for finding in findings)
    verdict = "not ready to train: see `bad` above" if counts["bad"] else "ready to train"
    return f"{verdict} ({', '.join(f'{counts[level]} {level}' for level in LEVELS if counts[level])})"


def _show(report: str) -> None:
    if not sys.stdout.isatty():
        print(report)
        return
    from rich.console import Console
    from rich.text import Text

    text = Text(report)
    text.highlight_regex(r"(?m)^\S.*$", "bold")
    for level, colour in COLOURS.items():
        text.highlight_regex(rf"(?m)^  {level}\b", colour)
    Console(soft_wrap=True).print(text)
