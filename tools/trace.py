#!/usr/bin/env python3
"""Joins the traces of several nodes (MLFAB_TRACE), or draws them.

    trace.py join FILE... > all.json          one file for ui.perfetto.dev
    trace.py svg [--from MS] [--ms MS] FILE... > picture.svg
                                              a picture of MS milliseconds, from MS after the first event on

A process that was killed leaves a file that is cut off: its last line is left out."""
import argparse
import json
import sys
from html import escape

COLOURS = {"push": "#4878d0", "pull": "#6acc64", "member": "#956cb4", "sum": "#d65f5f", "collective": "#ee854a",
           "slice": "#8c613c", "plan": "#cccccc", "frames": "#aaaaaa"}
NAMES = {"push": "push", "pull": "pull", "member": "update to an aggregator", "sum": "sum of an aggregator", "collective": "collective",
         "slice": "slice that moves", "plan": "as planned", "frames": "other frames"}
ROW, LEFT, WIDTH, TOP = 16, 190, 620, 52


def events_of(path):
    """The events of a file, which has one a line."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            line = line.strip().rstrip(",")
            if line in ("[", "]", ""):
                continue
            try:
                event = json.loads(line)
            except ValueError:
                print("%s:%d is not an event; the rest is left out" % (path, number), file=sys.stderr)
                return
            yield event


def join(events):
    print("[\n%s\n]" % ",\n".join(json.dumps(event, separators=(",", ":")) for event in events))


class Picture:
    def __init__(self, events, begin_ms, length_ms):
        timed = [e for e in events if "ts" in e]
        first = min(e["ts"] for e in timed if e["ph"] == "X")
        self.begin = first + begin_ms * 1000
        last = max(e["ts"] for e in timed)
        self.end = min(self.begin + length_ms * 1000, last + 1) if length_ms else last + 1
        self.timed = [e for e in timed if e["ts"] < self.end and e["ts"] + e.get("dur", 0) >= self.begin]
        self.nodes = {e["pid"]: e["args"]["name"].split(" ")[0] for e in events if e["name"] == "process_name"}
        self.lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        order = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
        used = {(e["pid"], e["tid"]) for e in self.timed if e["ph"] == "X"}
        self.rows = {lane: row for row, lane in
                     enumerate(sorted(used, key=lambda lane: (lane[0], order.get(lane, 0))))}

    def x(self, ts):
        ts = min(max(ts, self.begin), self.end)
        return LEFT + (ts - self.begin) / (self.end - self.begin) * WIDTH

    def y(self, event):
        return TOP + self.rows[event["pid"], event["tid"]] * ROW

    def frame(self):
        height = TOP + len(self.rows) * ROW + 34
        yield ('<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" '
               'font-size="11">' % (LEFT + WIDTH + 24, height))
        yield '<rect width="100%" height="100%" fill="white"/>'
        yield ('<defs><marker id="a" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="5" markerHeight="5" '
               'orient="auto"><path d="M0 0L6 3L0 6z" fill="#333"/></marker></defs>')
        for i in range(11):
            ms, x = (self.end - self.begin) / 1000 * i / 10, LEFT + WIDTH * i / 10
            yield '<path d="M%.1f %d V%d" stroke="#ddd"/>' % (x, TOP - 6, height - 30)
            yield '<text x="%.1f" y="%d" text-anchor="middle">%.3g ms</text>' % (x, TOP - 14, ms)
        yield ('<text x="4" y="14">Time from left to right, in milliseconds; a row is a lane of a node (bold); an arrow goes from the sender to '
               'the receiver.</text>')
        before = None
        for lane, row in self.rows.items():
            y = TOP + row * ROW
            if lane[0] != before:
                yield '<path d="M0 %d H%d" stroke="#888"/>' % (y - 1, LEFT + WIDTH)
                yield '<text x="4" y="%d" font-weight="bold">%s</text>' % (y + 11, escape(self.nodes.get(lane[0], "?")))
            before = lane[0]
            yield '<text x="%d" y="%d" text-anchor="end">%s</text>' % (LEFT - 6, y + 11, escape(self.lanes.get(lane, "?")))

    def legend(self):
        """One colour a kind, for the kinds in the picture."""
        x, y, used = LEFT, TOP + len(self.rows) * ROW + 12, {e["cat"] for e in self.timed if e["ph"] == "X"}
        for kind in [k for k in COLOURS if k in used] + [None] * bool(used - set(COLOURS)):
            name = NAMES.get(kind, "other")
            yield '<rect x="%d" y="%d" width="12" height="12" fill="%s"/>' % (x, y, COLOURS.get(kind, "#aaaaaa"))
            yield '<text x="%d" y="%d">%s</text>' % (x + 17, y + 10, name)
            x += 40 + 6 * len(name)

    def slices(self):
        for e in self.timed:
            if e["ph"] != "X":
                continue
            x, y = self.x(e["ts"]), self.y(e)
            width = max(self.x(e["ts"] + e["dur"]) - x, 1.5)
            colour = COLOURS.get(e["cat"], "#aaaaaa")
            dashed = ' stroke="#666" stroke-dasharray="3 2"' if e["cat"] == "plan" else ""
            yield ('<rect x="%.1f" y="%d" width="%.1f" height="%d" fill="%s"%s><title>%s, %d bytes</title></rect>'
                   % (x, y + 2, width, ROW - 4, colour, dashed, escape(e["name"]), e["args"]["bytes"]))
            if width > 7 * len(e["name"]):
                yield '<text x="%.1f" y="%d" fill="black">%s</text>' % (x + 3, y + 12, escape(e["name"]))

    def arrows(self):
        begun = {e["id"]: e for e in self.timed if e["ph"] == "s"}
        for end in self.timed:
            start = begun.get(end.get("id")) if end["ph"] == "f" else None
            if start and all((e["pid"], e["tid"]) in self.rows for e in (start, end)):
                yield ('<path d="M%.1f %d L%.1f %d" stroke="#333" stroke-width="0.8" marker-end="url(#a)"/>'
                       % (self.x(start["ts"]), self.y(start) + ROW // 2, self.x(end["ts"]), self.y(end) + ROW // 2))

    def text(self):
        return "\n".join([*self.frame(), *self.slices(), *self.arrows(), *self.legend(), "</svg>"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=("join", "svg"))
    parser.add_argument("--from", dest="begin", type=float, default=0.0, metavar="MS",
                        help="begins so long after the first event")
    parser.add_argument("--ms", type=float, default=0.0, metavar="MS", help="length of the picture")
    parser.add_argument("files", nargs="+")
    arguments = parser.parse_args()
    try:
        events = [event for path in arguments.files for event in events_of(path)]
    except (OSError, UnicodeDecodeError) as error:
        sys.exit("trace.py: %s" % error)
    if arguments.what == "join":
        join(events)
    elif any(e["ph"] == "X" for e in events):
        print(Picture(events, arguments.begin, arguments.ms).text())
    else:
        sys.exit("there is no slice in these files")


if __name__ == "__main__":
    main()
