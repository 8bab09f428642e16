"""audit.html: the worst findings on one page, with a box to tick for each; no network, nothing but this file.

Crops are JPEG data URIs. A short script in the page saves the fixes of the ticked findings as fix-list.json.
"""

import base64
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from itertools import groupby

import cv2
import numpy as np

from flatout.errors import counted
from flatout.feed import DecodeError
from flatout.images import decoder_messages, read_large
from flatout.progress import progress
from flatout.yolo.label_audit.records import Record

SHOWN = 200
"""Findings on the page."""
CROP_PX = 260
"""Longer side of a crop."""
MARGIN = 0.6
"""Surroundings of the boxes in a crop, as a share of their longer side."""
MIN_MARGIN_PX = 24
JPEG_QUALITY = 82
LABEL_BGR, FOUND_BGR, TWIN_BGR = (60, 60, 235), (70, 190, 30), (235, 130, 40)
"""Label red, detection green, the other label of a duplicate blue."""

CSS = """
:root { --ink: #1c2024; --soft: #60646c; --line: #e4e4e9; --ground: #f7f7f9; --card: #fff; --accent: #3e63dd;
  --on-accent: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #edeef0; --soft: #a4a8b0; --line: #2e3135; --ground: #111113; --card: #19191b; --accent: #8da4ef;
    --on-accent: #111113; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 96px; }
h1 { font-size: 22px; margin: 0 0 6px; }
p { margin: 4px 0; max-width: 60em; }
.soft { color: var(--soft); font-size: 14px; }
.red { color: #eb3c3c; } .green { color: #1e9e46; } .blue { color: #2882eb; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(280px, 1fr)); gap: 16px; margin-top: 20px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 12px; overflow: hidden; display: flex;
  flex-direction: column; }
.card img { width: 100%; height: 230px; object-fit: contain; background: #222; display: block; }
.card div { padding: 10px 14px 12px; }
.card b { font-size: 15px; } .card .where { font: 12px/1.4 ui-monospace, Menlo, Consolas, monospace;
  overflow-wrap: anywhere; color: var(--soft); margin-top: 6px; }
.card label { display: block; margin-top: 8px; padding: 6px 8px; border: 1px solid var(--line); border-radius: 8px;
  cursor: pointer; font-size: 14px; }
.card details { margin-top: 8px; font-size: 14px; } .card summary { cursor: pointer; color: var(--soft); }
.card code { font-size: 12px; overflow-wrap: anywhere; }
.bar { position: fixed; left: 0; right: 0; bottom: 0; background: var(--card); border-top: 1px solid var(--line);
  padding: 12px 20px; display: flex; gap: 18px; align-items: center; justify-content: center; }
button { font: inherit; padding: 7px 18px; border-radius: 8px; border: 0; background: var(--accent);
  color: var(--on-accent); cursor: pointer; }
"""
SCRIPT = """
const fixes = JSON.parse(document.getElementById("fixes").textContent);
const boxes = [...document.querySelectorAll("input[type=checkbox]")];
const ticked = () => boxes.filter(box => box.checked).map(box => fixes[box.value]);
const count = () => { document.getElementById("count").textContent = `${ticked().length} accepted`; };
boxes.forEach(box => box.addEventListener("change", count));
document.getElementById("save").addEventListener("click", () => {
  const text = JSON.stringify({ version: 1, fixes: ticked() }, null, 1) + "\\n";
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = "fix-list.json";
  link.click();
  URL.revokeObjectURL(link.href);
});
count();
"""


def page(title: str, about: Sequence[str], records: Sequence[Record], *, replay: str = "", shown: bool = False) -> str:
    """The complete HTML document with the first SHOWN records; `about` are lines below the title.

    `replay` is the command that replays the run, which every finding completes with its image; empty: there is none.
    `shown`: show the progress of cropping.
    """
    chosen = list(records[:SHOWN])
    cards = [""] * len(chosen)
    # Every image is decoded once.
    by_image = groupby(sorted(range(len(chosen)), key=lambda number: chosen[number].image), lambda n: chosen[n].image)
    done = 0
    with progress("cropping", len(chosen), unit="findings", shown=shown) as advance, decoder_messages():
        for path, numbers in by_image:
            image = _read(path)
            for number in numbers:
                cards[number] = _card(chosen[number], image, replay)
                advance(done := done + 1, 0)
    fixes = {str(record.rank): asdict(record.fix) for record in chosen if record.fix is not None}
    # A label file named "</script>" must not end the script element.
    data = json.dumps(fixes, ensure_ascii=True).replace("<", "\\u003c")
    lines = "".join(f'<p class="soft">{escape(line)}</p>' for line in about)
    head = (
        f"{counted(len(records), 'finding')}, the first {len(chosen)} shown. "
        if len(chosen) < len(records)
        else f"{counted(len(records), 'finding')}. "
    )
    todo = ""
    if fixes:
        todo = (
            "Tick what should be fixed, save the list, then run: "
            "<code>flatout yolo audit --fix-list fix-list.json --out fixed</code>"
        )
    elif chosen:
        todo = "No fixes can be saved: only labels in YOLO text files are corrected."
    bar = '<div class="bar"><span id="count"></span><button id="save">Save fix list</button></div>'
    script = f'<script type="application/json" id="fixes">{data}</script><script>{SCRIPT}</script>'
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{CSS}</style></head>'
        f"<body><main><h1>{escape(title)}</h1>{lines}"
        f'<p>{head}<b class="red">Red</b> is the label, <b class="green">green</b> what the network found, '
        f'<b class="blue">blue</b> the other label of a duplicate. {todo}</p>'
        f'<div class="cards">{"".join(cards)}</div></main>'
        f"{bar + script if fixes else ''}</body></html>\n"
    )


SUGGESTIONS = {"add": "add this label", "delete": "delete this label"}


def _read(path: str) -> np.ndarray | str:
    """The pixels of an image, or why it cannot be read."""
    try:
        return read_large(path)
    except (OSError, DecodeError) as error:
        return str(error)


def _card(record: Record, image: np.ndarray | str, replay: str) -> str:
    suggestion = ""
    if record.fix is not None:
        what = SUGGESTIONS.get(record.fix.action)
        if what is None:
            is_class = record.kind == "wrong class"
            what = f"change the class to {record.found_class}" if is_class else "use the green box"
        suggestion = f'<label><input type="checkbox" value="{record.rank}"> Yes, {escape(what)}</label>'
    shown = ""
    if replay:
        command = f"{replay} --file {shlex.quote(record.image)}"
        shown = f"<details><summary>When was it shown?</summary><code>{escape(command)}</code></details>"
    return (
        f'<div class="card">{_crop_tag(record, image)}<div><b>{record.rank}. {escape(record.kind)}</b> '
        f'<span class="soft">{record.score:.2f}</span><p>{escape(record.reason)}</p>'
        f'<p class="where">{escape(record.place)}</p>{suggestion}{shown}</div></div>'
    )


def _crop_tag(record: Record, image: np.ndarray | str) -> str:
    if isinstance(image, str):
        return f'<p class="soft">{escape(record.image)}: {escape(image)}</p>'
    encoded = cv2.imencode(".jpg", crop(image, record), [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1]
    content = base64.b64encode(encoded.tobytes()).decode()
    return f'<img alt="crop of {escape(record.image)}" src="data:image/jpeg;base64,{content}">'


def crop(image_HWC: np.ndarray, record: Record) -> np.ndarray:
    """The part of an image around the boxes of a finding, with the boxes; uint8 [h, w, 3], BGR."""
    height, width = image_HWC.shape[:2]
    scale = np.array([width, height, width, height])
    boxes = [(np.array(box) * scale, colour) for box, colour in
             ((record.twin_box, TWIN_BGR), (record.box, LABEL_BGR), (record.found_box, FOUND_BGR))
             if box is not None]  # fmt: skip
    all_n4 = np.array([box for box, _ in boxes])
    low, high = all_n4[:, :2].min(0), all_n4[:, 2:].max(0)
    margin = max(MIN_MARGIN_PX, MARGIN * float((high - low).max()))
    left, top = (int(value) for value in np.clip(low - margin, 0, [width - 1, height - 1]))
    right, bottom = (int(value) for value in np.clip(high + margin, [left + 1, top + 1], [width, height]))
    factor = CROP_PX / max(right - left, bottom - top)
    size_wh = max(1, round((right - left) * factor)), max(1, round((bottom - top) * factor))
    shown = cv2.resize(image_HWC[top:bottom, left:right], size_wh, interpolation=cv2.INTER_LINEAR)
    shown = np.ascontiguousarray(shown)
    for box, colour in boxes:
        x1, y1, x2, y2 = ((box - [left, top, left, top]) * factor).round().astype(int).tolist()
        cv2.rectangle(shown, (x1, y1), (x2, y2), colour, 2, cv2.LINE_AA)
    return shown
