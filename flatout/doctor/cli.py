"""flatout doctor: the command line, and the report as text or JSON."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.clock import machine
from flatout.doctor import gpu, host, images
from flatout.findings import LEVELS, Finding, exit_code

# Gather every fact about this machine, then diagnose them: `diagnose(examine())` is the whole doctor.


@dataclass(frozen=True)
class Facts:
    """Everything the doctor found out; plain data, the `facts` of `--json`."""

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
    """Look at the machine, run one kernel per GPU, time JPEG decoding, and the disk of `disk_folder` if given."""
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
        "images": images.check_decoders(facts.images),
        "disk": [host.check_disk(facts.disk)],
    }


DESCRIPTION = """\
Look at this machine and say what would slow training down or stop it, with one line of advice each:
cores, memory, shared memory, open files, versions, torch and GPUs (one kernel is run on each), OpenCV
and JPEG decoding speed, and the disk of a folder if you name one. Takes a few seconds, changes nothing.
"""
EPILOG = """\
levels:  ok    fine, and why it matters       note  good to know
         warn  works, but costs you           bad   training will not run as it should

examples:
  flatout doctor                     the report
  flatout doctor --disk data/coco    also time the disk that holds the data (writes 72 MB there, removes it)
  flatout doctor --json              facts and findings for a script or a bug report

exit code: 0, or 5 when something is bad
"""
COLOURS = {"ok": "green", "note": "cyan", "warn": "yellow", "bad": "bold red"}


def main(argv: list[str]) -> int:
    """Run the doctor; returns the exit code."""
    args = _parser().parse_args(argv)
    facts = examine(args.disk)
    sections = diagnose(facts)
    code = exit_code(_all(sections))
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
    """Aligned plain text: level, topic and value on one line, the advice below the value."""
    lines = []
    for name, findings in sections.items():
        lines.append(name)
        for finding in findings:
            lines.append(f"  {finding.level:<5} {finding.topic:<11} {finding.value}")
            lines.append(f"{'':<19} {finding.advice}")
        lines.append("")
    return "\n".join([*lines, summary(_all(sections))])


def summary(findings: Iterable[Finding]) -> str:
    """The last line: is this machine ready, and how many findings of each level."""
    counts = Counter(finding.level for finding in findings)
    verdict = "not ready to train, see `bad` above" if counts["bad"] else "ready to train"
    return f"{verdict} ({', '.join(f'{counts[level]} {level}' for level in LEVELS if counts[level])})"


def _all(sections: dict[str, list[Finding]]) -> list[Finding]:
    return [finding for findings in sections.values() for finding in findings]


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="also measure the disk that holds this folder")
    return parser
