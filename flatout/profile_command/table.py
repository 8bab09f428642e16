"""Ledger and verdict in colour, for a terminal."""

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flatout.clock import kind_of, place_label
from flatout.profiler import (
    KIND_COLOURS,
    Ledger,
    Profile,
    ledger_head,
    note_lines,
    runs_of,
    shown_rows,
    verdict_lines,
)

BAR = 24
WITHOUT_BAR = 62
"""Width of a row without its bar, in characters."""


def show(profile: Profile, console: Console | None = None) -> None:
    """Print the whole report: ledger, notes, verdict."""
    console, ledger = console or Console(), profile.ledger
    console.print(ledger_table(ledger, console.width))
    notes = note_lines(ledger, profile.measurement)
    for line in (*notes, *verdict_lines(profile.verdict, console.width)):
        console.print(escape(line), highlight=False, soft_wrap=True)


def ledger_table(ledger: Ledger, width: int = 120) -> Table:
    """One row per stage, with a bar for its share; in a narrow terminal bars are shorter, or left out."""
    bar = min(BAR, max(0, width - WITHOUT_BAR))
    table = Table(title=ledger_head(ledger), title_justify="left", box=None, pad_edge=False)
    table.add_column("", overflow="fold")
    for name in ("ms/step", "share", "us/image", "runs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for place in ledger.places:
        table.add_row(f"[bold]{escape(place_label(place))}[/bold]")
        for row in shown_rows(ledger.lane(place)):
            table.add_row(
                f"  {escape(row.label)}",
                f"{row.ms:,.2f}",
                f"{row.share:.1%}",
                f"{row.us_per_image:,.1f}",
                runs_of(row),
                Text("█" * round(bar * max(0.0, row.share)), style=KIND_COLOURS[kind_of(row.stage)]),
            )
    return table
