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
    between_lines,
    fixed_cost_lines,
    ledger_head,
    runs_of,
    shown_rows,
    speed_of_light_lines,
    verdict_lines,
    wait_lines,
)

BAR = 24
WITHOUT_BAR = 62
"""Width of a row without its bar, in characters."""


def show(profile: Profile, console: Console | None = None) -> None:
    """Print the whole report: ledger, waits, time between steps, fixed costs, hardware limits, verdict."""
    console = console or Console()
    console.print(ledger_table(profile.ledger, console.width))
    ledger, measurement = profile.ledger, profile.measurement
    notes = (*wait_lines(measurement), *between_lines(ledger, measurement), *fixed_cost_lines(measurement))
    notes += (*speed_of_light_lines(measurement),)
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
