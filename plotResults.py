"""Pictures from results.jsonl: what was measured, beside what was predicted.

    python plotResults.py                                  # plots/*.png from results.jsonl
    python plotResults.py tpot_by_method --engine int8     # one picture, of rows with this engine
    python plotResults.py --run="--temperature 1"          # of the commands that hold these words

A picture shows the newest run that has its rows; the other texts beside it were measured with the same pair, engine,
machine, sampling and methods. Which run that is stands below it: machine, pair, engine, commit and command.
"""

import argparse
import json
import math
import sys
import textwrap
from dataclasses import dataclass
from datetime import datetime
from itertools import cycle, takewhile
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from downloadData import short_name

# ------------------------------------------------------------------------------------- constants to edit

RESULTS = "results.jsonl"
OUT = "plots"
WIDTH = 9.0            # inches; at DPI twice the 900 pixels that a README shows
DPI = 200
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.parse_math": False, "axes.titlesize": 9,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "0.6", "axes.labelcolor": "0.25", "xtick.color": "0.6", "ytick.color": "0.6",
    "xtick.labelcolor": "0.25", "ytick.labelcolor": "0.25",
}
# Okabe and Ito's colours, which colour-blind readers tell apart.
BLACK, BLUE, ORANGE, GREEN = "0.35", "#0072B2", "#D55E00", "#009E73"
COLOURS = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", BLACK)
ENGINE_COLOURS = {"eager": BLACK, "packed": BLUE, "int8": ORANGE, "graphs": GREEN}
MARKERS = "osD^vPX"
WIDEST_CHAIN = 17      # v(n) is shown so far: gamma up to 16 and the bonus token; wider passes are those of token trees
LOSSY = "*"            # behind the name of a method that follows another law than the target's
MIN_JUDGED = 20        # a share of fewer proposals is noise and left out


@dataclass(frozen=True)
class Line:
    """One named series: y[i] belongs to x[i]."""

    name: str
    x: list
    y: list
    intervals: list = ()  # of each y: its 95% interval (low, high), or None
    predicted: list = ()  # of each x: a number, or None
    counts: list = ()     # of each y: how many events it is the share of
    note: str = ""        # said behind the name
    star: tuple | None = None  # (x, y) of the cost-aware controller under the same conditions


@dataclass(frozen=True)
class Panel:
    """One pair of axes; rows: those of results.jsonl that are in it."""

    title: str
    lines: list
    rows: list


# ------------------------------------------------------------------------------------- rows

# What must be equal for two rows to be compared, and what tells one run from another.
SETTING = ("pair", "target", "draft", "device", "dtype", "engine", "threads", "temperature", "top_k", "top_p",
           "max_new_tokens")
RUN = ("date", "command", "commit", *SETTING)


def read_rows(path: Path) -> list[dict]:
    """The rows of a results.jsonl, oldest first. ValueError names a line that is none; the last one, half written by
    a run that was killed, is skipped with a warning."""
    rows, lines = [], path.read_bytes().rstrip().split(b"\n")
    for n, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif n == len(lines):
            print(f"plotResults.py: {path}, line {n} is half written: skipped", file=sys.stderr)
        else:
            raise ValueError(f"{path}, line {n} is no row (one JSON object a line): mend it, or name another --results")
    return sorted(filter(None, rows), key=when)


def when(row: dict) -> float:
    """Seconds since 1970 of the row's date; rows without one are the oldest."""
    try:
        return datetime.fromisoformat(row["date"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return -math.inf


def chosen(rows: list[dict], pair=None, engine=None, text=None, run=None) -> list[dict]:
    """The rows that the flags let through. Costs pass --engine, since their picture compares the engines, and peers,
    who have their own; rows that belong to no text pass --text. "all" repeats the other texts: it is left out unless
    asked for. ValueError where a flag leaves none, with what there is."""
    for flag, wanted, of in (("--pair", pair, lambda row: row.get("pair")), ("--engine", engine, engine_of),
                             ("--text", text, lambda row: row.get("text"))):
        there = sorted({str(of(row)) for row in rows} - {"None"})
        if wanted is not None and wanted not in there:
            raise ValueError(f"no row for {flag} {wanted}: there are {', '.join(there) or 'none'}")
        passed = {"--pair": lambda row: False, "--engine": lambda row: costs(row) or peer(row),
                  "--text": lambda row: row.get("text") is None or simulated(row)}[flag]
        rows = [row for row in rows if wanted in (None, of(row)) or passed(row)]
    rows = [row for row in rows if row.get("text") != "all" or text == "all"]
    if run is not None:
        rows = [row for row in rows if run in str(row.get("command"))]
        if not rows:
            raise ValueError(f"no row for --run {run!r}: no command has these words")
    return rows


def number(value) -> float | None:
    """The value if it is a finite number."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if usable else None


def numbers(value) -> list:
    """The value if it is a list of finite numbers, else an empty one (older rows have none)."""
    return value if isinstance(value, list) and all(number(v) is not None for v in value) else []


def interval(value) -> tuple | None:
    return tuple(value) if len(numbers(value)) == 2 else None


def engine_of(row: dict) -> str:
    """The engine in use, without the reason in brackets for its being another one than was asked for."""
    return str(row.get("engine")).partition(" ")[0]


def method_of(row: dict) -> str:
    return name_of(row).partition(":")[0]


def name_of(row: dict) -> str:
    """The method with its setting, as --methods takes it: spec:8, dynamic:cost. Older rows have no label."""
    name = str(row.get("label") or row.get("method"))
    return f"dynamic:{row.get('controller') or row.get('gamma')}" if name == "dynamic" else name


def marked(row: dict, name: str) -> str:
    """The name, with LOSSY behind it if the row's law is another than the target's."""
    return name + LOSSY * (row.get("lossless") is False)


def gamma_of(row: dict) -> int | None:
    gamma = row.get("gamma")
    return gamma if isinstance(gamma, int) and gamma is not True and gamma > 0 else None


def nodes_of(row: dict) -> int | None:
    """The most nodes that its token trees may have, where that was set; None where costs chose, and for chains."""
    nodes = row.get("node_budget")
    return nodes if isinstance(nodes, int) and nodes is not True and nodes > 0 else None


def costs(row: dict) -> bool:
    return row.get("method") == "cost target"


def peer(row: dict) -> bool:
    """Whether its method is another project's."""
    return method_of(row).startswith(("hf", "llama"))


def simulated(row: dict) -> bool:
    return method_of(row).startswith("simulated")


def keyed(row: dict, keys) -> tuple:
    return tuple(str(row.get(key)) for key in keys)


def grouped(rows: list[dict], keys) -> list[list[dict]]:
    """Groups of rows that are equal in these keys, the group with the newest row last."""
    groups = {}
    for row in rows:
        group = groups.pop(keyed(row, keys), [])
        groups[keyed(row, keys)] = [*group, row]
    return list(groups.values())


def newest_runs(rows: list[dict], fits=bool, by=RUN) -> list[list[dict]]:
    """The newest run that fits, and the newest run on each other text with the same setting and methods.

    rows: oldest first. fits(rows of one run and text) -> bool. by: the keys in which the rows of one run are equal.
    """
    runs = [run for run in grouped(rows, (*by, "text")) if fits(run)]

    def kind(run):
        return keyed(run[-1], SETTING), {name_of(row) for row in run}

    return list({str(run[-1].get("text")): run for run in runs if kind(run) == kind(runs[-1])}.values())


def newest_or_joined(rows: list[dict], of, alone: bool) -> list[list[dict]]:
    """newest_runs of those that compare two or more values of(row), which were measured interleaved; where there are
    none, the runs of each setting are joined, and need to compare nothing if `alone`."""
    def several(run):
        return len({of(row) for row in run}) > 1

    return newest_runs(rows, several) or newest_runs(rows, bool if alone else several, by=SETTING)


# ------------------------------------------------------------------------------------- what each picture shows


def speedup_panels(rows: list[dict]) -> list[Panel]:
    """Speedup over gamma, measured and predicted: of `spec` a line for each text, of the simulated drafter one for
    each alpha."""
    rows = [row for row in rows if number(row.get("speedup")) is not None]
    panels = []
    spec = [row for row in rows if method_of(row) == "spec" and gamma_of(row)]
    if runs := newest_or_joined(spec, gamma_of, alone=False):
        lines = [over_gamma(str(run[0].get("text")), run, rows) for run in runs]
        panels.append(Panel("spec, with the draft's own tokens", lines, sum(runs, [])))
    guided = [row for row in rows if simulated(row) and number(row.get("alpha_asked")) is not None]
    if runs := newest_or_joined([row for row in guided if gamma_of(row)], gamma_of, alone=False):
        lines = []
        for alpha in sorted({row["alpha_asked"] for row in runs[-1]}):
            run, beside = ([row for row in some if row["alpha_asked"] == alpha] for some in (runs[-1], guided))
            lines.append(over_gamma(f"alpha {alpha:g}", run, beside))
        panels.append(Panel("simulated drafter, alpha as asked for", lines, runs[-1]))
    return panels


def over_gamma(name: str, rows: list[dict], beside: list[dict]) -> Line:
    """rows: of fixed gammas. beside: rows among which those of the cost-aware controller in the same run are."""
    cost_aware = [row for row in beside if row.get("controller") == "cost"]
    return swept(name, rows, gamma_of, cost_aware, "mean_gamma")


def swept(name: str, rows: list[dict], x_of, cost_aware: list[dict], reached: str) -> Line:
    """The speedups of rows, oldest first, over x_of(row); of one x the newest counts. cost_aware: rows that chose x by
    costs, each with the mean that it `reached`; one of the same run is the star."""
    by_x = {x_of(row): row for row in rows}
    fixed = [by_x[x] for x in sorted(by_x)]
    run = (*RUN, "text")
    stars = [(row[reached], row[gain(row)]) for row in cost_aware
             if number(row.get(reached)) is not None and keyed(row, run) == keyed(rows[-1], run)]
    return Line(name, sorted(by_x), [row[gain(row)] for row in fixed],
                intervals=[interval(row.get(f"{gain(row)}_ci")) for row in fixed],
                predicted=[number(row.get("predicted")) for row in fixed], star=stars[-1] if stars else None)


def gain(row: dict) -> str:
    """The key of the speedup that `predicted` is about: that of the time per token, where the row has it."""
    return "decode_speedup" if number(row.get("decode_speedup")) is not None else "speedup"


def nodes_panels(rows: list[dict]) -> list[Panel]:
    """Speedup over the nodes of the token trees: a panel for each text, a line for each method."""
    rows = [row for row in rows if number(row.get("speedup")) is not None and not simulated(row)]
    panels = []
    for run in newest_or_joined([row for row in rows if nodes_of(row)], nodes_of, alone=False):
        lines = []
        for name in dict.fromkeys(map(method_of, run)):
            own = [row for row in run if method_of(row) == name]
            advised = [row for row in rows if method_of(row) == name and not nodes_of(row)]
            lines.append(swept(marked(own[-1], name), own, nodes_of, advised, "nodes_per_round"))
        panels.append(Panel(str(run[0].get("text")), lines, run))
    return panels


def sparse_tree_panels(rows: list[dict]) -> list[Panel]:
    """Of the rows of `medusa` that tell their token tree (the paths, and the accuracy of each guess of each head on
    greedy text) the one with the largest, of equal ones the newest."""
    told = [row for row in rows if method_of(row) == "medusa" and tree_of(row)]
    if not told:
        return []
    row = max(reversed(told), key=lambda row: len(tree_of(row)))
    shares, measured = tree_of(row), number(row.get("tokens_per_round"))
    told = "" if measured is None else f", measured on {short_name(str(row.get('text')))}: {measured:.2f}"
    title = (f"{name_of(row)}, {len(shares)} nodes; tokens per round expected on greedy text: "
             f"{1 + sum(shares.values()):.2f}{told}")
    return [Panel(title, [], [row])]


def tree_of(row: dict) -> dict[tuple, float]:
    """{path: the product of the accuracies along it}; empty where the row has no tree, or one that is none."""
    tree, accuracy = row.get("tree"), row.get("accuracy")
    if not isinstance(tree, list) or not isinstance(accuracy, list):
        return {}
    try:
        shares = {tuple(path): math.prod(accuracy[k][i] for k, i in enumerate(path)) for path in tree}
        whole = all(path and (len(path) == 1 or path[:-1] in shares) for path in shares)
        return shares if whole and numbers(list(shares.values())) else {}
    except (TypeError, IndexError):
        return {}


def places_of(nodes) -> dict[tuple, float]:
    """Where the nodes stand from left to right: leaves side by side, a node over the middle of its children; () is the
    root."""
    places = {}

    def put(path, left):
        children = sorted(node for node in nodes if node[:-1] == path and len(node) == len(path) + 1)
        right = left
        for child in children:
            right = put(child, right)
        places[path] = (places[children[0]] + places[children[-1]]) / 2 if children else left
        return right if children else left + 1

    put((), 0)
    return places


def tpot_panels(rows: list[dict]) -> list[Panel]:
    """TPOT [ms] of every method with its interval, a panel for each text of the newest run. Peers beside it run on
    engines of their own."""
    speed = [row for row in rows if number(row.get("tpot_ms")) is not None and not simulated(row)]
    runs = newest_runs(speed, lambda run: not all(map(peer, run)), by=("date", "command", "pair", "device"))
    used = [list({name_of(row): row for row in run}.values()) for run in runs]
    return [Panel(str(run[0].get("text")), [tpot_line(row) for row in run], run) for run in used]


def tpot_line(row: dict) -> Line:
    law = "" if row.get("lossless") is True else "lossy" if row.get("lossless") is False else "own law"
    return Line(name_of(row), [0], [row["tpot_ms"]], intervals=[interval(row.get("tpot_ms_ci"))], note=law)


def cost_panels(rows: list[dict]) -> list[Panel]:
    """v(n), a target forward over n tokens by its time for one, up to WIDEST_CHAIN; and its milliseconds, all widths.
    A line for each engine, the newest measurement of each."""
    usable = [row for row in rows if costs(row) and 1 in steps_of(row)]
    place = ("pair", "target", "device", "threads")
    newest = {engine_of(row): row for row in usable if keyed(row, place) == keyed(usable[-1], place)}
    used = [newest[engine] for engine in sorted(newest, key=[*ENGINE_COLOURS, *newest].index)]
    steps = {engine_of(row): dict(sorted(steps_of(row).items())) for row in used}
    chains = {name: {n: t for n, t in ms.items() if n <= WIDEST_CHAIN} for name, ms in steps.items()}
    v = [Line(name, list(ms), [t / ms[1] for t in ms.values()]) for name, ms in chains.items()]
    absolute = [Line(name, list(ms), list(ms.values())) for name, ms in steps.items()]
    return [Panel("v(n) = t(n) / t(1)", v, used), Panel("t(n), milliseconds", absolute, used)] if used else []


def steps_of(row: dict) -> dict:
    """{n: ms} of a row of costs; empty where it is of no use."""
    widths, ms = numbers(row.get("widths")), numbers(row.get("step_ms"))
    return dict(zip(widths, ms)) if len(widths) == len(ms) > 1 and min(*ms, *widths) > 0 else {}


def gamma_panels(rows: list[dict]) -> list[Panel]:
    """The tokens proposed in each round of the first prompt: a panel for each text, a line for each controller."""
    dynamic = [row for row in rows if method_of(row) == "dynamic" and numbers(row.get("gamma_log"))]
    panels = []
    for run in newest_or_joined(dynamic, name_of, alone=True):
        newest = {name_of(row)[len("dynamic:"):]: row for row in run}
        lines = [Line(name, list(range(1, len(row["gamma_log"]) + 1)), row["gamma_log"], note=means_of(row))
                 for name, row in sorted(newest.items())]
        panels.append(Panel(str(run[0].get("text")), lines, list(newest.values())))
    return panels


def means_of(row: dict) -> str:
    """What the controller reached over all prompts of the run, where the row tells it."""
    told = [(row.get("mean_gamma"), "mean gamma {:.1f}"), (row.get("speedup"), "speedup {:.2f}")]
    return ", ".join(form.format(value) for value, form in told if number(value) is not None)


def acceptance_panels(rows: list[dict]) -> list[Panel]:
    """The share accepted of the proposals judged at each position of the round, which in a tree is the depth (a node
    of it, if any was there): a panel for each text, a line for each method (of one method with several settings, that
    which went furthest)."""
    panels = []
    for run in newest_runs([row for row in rows if not simulated(row) and judged_of(row)]):
        furthest = {}
        for row in run:
            if len(judged_of(row)) > len(judged_of(furthest.get(method_of(row), {}))):
                furthest[method_of(row)] = row
        lines = [acceptance_line(row) for row in furthest.values()]
        panels.append(Panel(str(run[0].get("text")), lines, list(furthest.values())))
    return panels


def judged_of(row: dict) -> list[tuple]:
    """(accepted, judged) at the first, second, ... position, as far as MIN_JUDGED were judged."""
    judged, accepted = numbers(row.get("proposed_at")), numbers(row.get("accepted_at"))
    pairs = zip(accepted, judged) if len(accepted) == len(judged) else ()
    return list(takewhile(lambda pair: pair[1] >= MIN_JUDGED, pairs))


def acceptance_line(row: dict) -> Line:
    pairs = judged_of(row)
    return Line(marked(row, name_of(row)), list(range(1, len(pairs) + 1)), [a / n for a, n in pairs],
                counts=[n for _, n in pairs])


# ------------------------------------------------------------------------------------- drawing


def sheet(title: str, note: str, panels: list[Panel], shape: tuple, height: float, left=0.6, right=1.0, gap=0.5,
          between=0.9, **how):
    """A figure WIDTH wide with a heading, shape = (lines, columns) of axes and the footer.

    height of each axes; left, right, gap, between: beside them, between columns, between lines [inches].
    how: sharex, sharey. Returns the figure and its axes, line by line.
    """
    foot = footer([row for panel in panels for row in panel.rows])
    top, bottom = 0.95, 0.62 + 0.14 * len(foot)
    total = top + shape[0] * (height + between) - between + bottom
    width = (WIDTH - left - right - (shape[1] - 1) * gap) / shape[1]
    figure = Figure(figsize=(WIDTH, total), dpi=DPI, facecolor="white")
    axes = figure.subplots(*shape, squeeze=False, **how, gridspec_kw={
        "left": left / WIDTH, "right": 1 - right / WIDTH, "top": 1 - top / total, "bottom": bottom / total,
        "wspace": gap / width, "hspace": between / height}).flatten()
    figure.text(0.15 / WIDTH, 1 - 0.3 / total, title, fontsize=12, fontweight="bold", color="0.1")
    figure.text(0.15 / WIDTH, 1 - 0.38 / total, note, color="0.35", va="top")
    figure.text(0.15 / WIDTH, 0.08 / total, "\n".join(foot), fontsize=6.5, color="0.45", linespacing=1.4)
    return figure, axes


def abreast(panels: list[Panel], most: int) -> tuple:
    """As few lines as do with `most` columns, and as few columns as do with these lines."""
    lines = math.ceil(len(panels) / most)
    return lines, math.ceil(len(panels) / lines)


def footer(rows: list[dict]) -> list[str]:
    """Where the figures come from: what all rows share, then each run with what it has of its own, and its methods
    where these differ."""
    methods = {}
    for row in rows:
        methods.setdefault(facts_of(row), {})[method_of(row)] = True
    shared = [column[0] for column in zip(*methods) if len(set(column)) == 1]
    lines = ["all: " * (len(methods) > 1) + " | ".join(filter(None, shared))]
    differ = len(set(map(tuple, methods.values()))) > 1
    for facts, names in methods.items() if len(methods) > 1 else ():
        own = " | ".join(fact for fact in facts if fact and fact not in shared)
        lines.append(f"{', '.join(names)}: " * differ + own)
    return [piece for line in filter(None, lines) for piece in textwrap.wrap(line, 165, subsequent_indent="    ")]


def facts_of(row: dict) -> tuple:
    draft = f" <- {row['draft']}" if row.get("draft") else ""
    drawn = f"temperature {row.get('temperature')}, top_k {row.get('top_k')}, top_p {row.get('top_p')}"
    sampling = "" if row.get("temperature") is None else "greedy" if row["temperature"] == 0 else drawn
    return (f"{row.get('pair')}: {row.get('target')}{draft}", str(row.get("device")),
            f"engine {row.get('engine')}, {row.get('dtype')}, {row.get('threads')} threads", sampling,
            f"commit {row.get('commit')}, {str(row.get('date'))[:10]}", str(row.get("command")))


def name_ends(ax, ends: list[tuple], size=9) -> None:
    """Write names right of the axes at the ends of their lines, pushed apart where they would overlap.

    ends: (y in data units, text, colour). The limits of the axes must be settled.
    """
    step = 1.25 * size / 72 * DPI / ax.get_window_extent().height  # a line of text, as a share of the axes
    low, high = ax.get_ylim()
    ends = sorted(ends, key=lambda end: end[0])
    places = [(y - low) / (high - low) for y, *_ in ends]
    for _ in range(200):  # neighbours that are too close give way to both sides
        for i in range(len(places) - 1):
            lack = max(0, step - (places[i + 1] - places[i]))
            places[i], places[i + 1] = places[i] - lack / 2, min(1, places[i + 1] + lack / 2)
    for place, (_, text, colour) in zip(places, ends):
        ax.text(1.02, place, text, color=colour, fontsize=size, va="center", transform=ax.transAxes)


MEDIAN = "the median and, of six or more values, its 95% interval"


def draw_speedup(panels: list[Panel]) -> Figure:
    stars = any(line.star for panel in panels for line in panel.lines)
    figure, axes = sheet("Speedup against gamma", f"dots: measured in the time per token, {MEDIAN};\n"
                         "thin lines: predicted from alpha and costs" + "; stars: the cost-aware controller" * stars,
                         panels, (1, len(panels)), 3.1, gap=1.4, right=1.4, sharey=True)
    ends = []
    for ax, panel in zip(axes, panels):
        n = len(panel.lines)
        shades = [matplotlib.colormaps["cividis"](0.7 * (1 - i / max(1, n - 1))) for i in range(n)]
        colours = shades if any(simulated(row) for row in panel.rows) else COLOURS
        for i, (line, colour, marker) in enumerate(zip(panel.lines, cycle(colours), cycle(MARKERS))):
            draw_measured(ax, line, colour, marker, shift=0.1 * (i - (n - 1) / 2) * any(line.intervals))
        ends.append([(line.y[-1], short_name(line.name), colour) for line, colour in zip(panel.lines, cycle(colours))])
        ax.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        ax.set(title=panel.title, xlabel="gamma: tokens proposed in a round")
        ax.set_xticks(sorted({x for line in panel.lines for x in line.x}))
    axes[0].set(ylabel="speedup over the target alone", ylim=(0, None))
    for ax, named in zip(axes, ends):  # the axes share their limits: only now are these settled
        name_ends(ax, named)
    return figure


def draw_measured(ax, line: Line, colour, marker: str, shift: float) -> None:
    """Dots with intervals, set off by `shift` so that they do not hide each other, over the thin predicted line."""
    known = [(x, p) for x, p in zip(line.x, line.predicted) if p is not None]
    ax.plot([x for x, _ in known], [p for _, p in known], color=colour, linewidth=0.9)
    for x, ci in zip(line.x, line.intervals):
        if ci:
            ax.plot([x + shift] * 2, ci, color=colour, linewidth=1.2, alpha=0.6)
    ax.plot([x + shift for x in line.x], line.y, marker, color=colour, markersize=5)
    if line.star:
        ax.plot(*[[value] for value in line.star], "*", color=colour, markersize=11, markerfacecolor="white")


def lossy_note(panels: list[Panel]) -> str:
    return f"; {LOSSY}: lossy" * any(line.name.endswith(LOSSY) for panel in panels for line in panel.lines)


def draw_nodes(panels: list[Panel]) -> Figure:
    stars = any(line.star for panel in panels for line in panel.lines)
    figure, axes = sheet("Speedup against nodes", f"dots: measured in the time per token, {MEDIAN};\n"
                         "thin lines: predicted from rounds and costs" + "; stars: as many as costs advise" * stars
                         + lossy_note(panels), panels, abreast(panels, 3), 2.9, gap=1.3, right=1.3, sharey=True)
    methods = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    styles = dict(zip(methods, zip(cycle(COLOURS), cycle(MARKERS))))
    for ax, panel in zip(axes, panels):
        for line in panel.lines:
            draw_measured(ax, line, *styles[line.name], shift=0)
        ax.axhline(1, color="0.8", linewidth=0.8, zorder=0)
        ax.set(title=short_name(panel.title), xlabel="nodes of the tree")
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_locator(NullLocator())
    axes[0].set(ylabel="speedup over the target alone", ylim=(0, None))
    for ax, panel in zip(axes, panels):  # the axes share their limits: only now are these settled
        name_ends(ax, [(line.y[-1], line.name, styles[line.name][0]) for line in panel.lines])
    for ax in axes[len(panels):]:
        ax.remove()
    return figure


def draw_sparse_tree(panels: list[Panel]) -> Figure:
    shares = tree_of(panels[0].rows[0])
    places, depth = places_of(shares), max(map(len, shares))
    figure, (ax,) = sheet("The token tree", "each guess where it is proposed, with its rank among the guesses of its "
                          "head; the darker, the more rounds are expected to accept it", panels, (1, 1),
                          0.7 * depth + 0.5, left=0.9, right=0.3)
    ax.plot(places[()], 0, "s", color=BLACK, markersize=7)
    for path, share in shares.items():
        x, y, shade = places[path], len(path), 1 - share**0.5  # shares fall by orders of magnitude
        ax.plot([places[path[:-1]], x], [y - 1, y], color="0.75", linewidth=0.4 + 3 * share, zorder=0)
        ax.plot(x, y, "o", color=matplotlib.colormaps["cividis"](shade), markersize=9)
        ink = "white" if shade < 0.6 else "0.1"
        ax.text(x, y, f"{path[-1] + 1}", ha="center", va="center", fontsize=5.5, color=ink)
    ax.set(title=panels[0].title, ylim=(depth + 0.4, -0.4))
    ax.set_yticks(range(depth + 1), ["last token", *(f"depth {i}" for i in range(1, depth + 1))])
    ax.set_xticks([])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    return figure


def draw_tpot(panels: list[Panel]) -> Figure:
    """Bars, fastest on top; the same methods in the same place in every panel."""
    lines = [line for panel in panels for line in panel.lines]
    times = {line.name: [other.y[0] for other in lines if other.name == line.name] for line in lines}
    order = sorted(times, key=lambda name: -sum(times[name]) / len(times[name]))
    laws = {line.name: f" ({line.note})" for line in lines if line.note}
    figure, axes = sheet("Time per output token, by method", f"{MEDIAN}.\ngrey: the target alone; "
                         "orange: other projects' decoders; pale: another law than the target's", panels,
                         abreast(panels, 4), 0.25 * len(order) + 0.1, left=1.65, right=0.3, gap=0.3, sharey=True)
    limit = 1.18 * max(line.intervals[0][1] if line.intervals[0] else line.y[0] for line in lines)
    for ax, panel in zip(axes, panels):
        for line, row in zip(panel.lines, panel.rows):
            draw_bar(ax, order.index(line.name), line, row, limit)
        ax.set(title=short_name(panel.title), xlim=(0, limit), ylim=(-0.6, len(order) - 0.4), xlabel="TPOT, ms")
        ax.set_yticks(range(len(order)), [name + laws.get(name, "") for name in order])
        ax.tick_params(axis="y", length=0)
    for ax in axes[len(panels):]:
        ax.remove()
    return figure


def draw_bar(ax, place: int, line: Line, row: dict, limit: float) -> None:
    colour = BLACK if line.name == "target" else ORANGE if peer(row) else BLUE
    ax.barh(place, line.y[0], height=0.62, color=colour, alpha=0.35 if line.note else 0.85)
    low, high = line.intervals[0] or (line.y[0], line.y[0])
    ax.plot([low, high], [place, place], color="0.1", linewidth=1)
    ax.text(max(high, line.y[0]) + 0.015 * limit, place, f"{line.y[0]:.1f}", va="center", fontsize=8, color="0.25")


def draw_costs(panels: list[Panel]) -> Figure:
    figure, axes = sheet("What a verification costs, by engine", "a forward pass of the target over n tokens behind a "
                         "cached prefix; v = 1: n tokens cost as much as one", panels, (1, len(panels)), 3.1, gap=1.1)
    for ax, panel in zip(axes, panels):
        colours = [ENGINE_COLOURS.get(line.name, COLOURS[3]) for line in panel.lines]
        for line, colour, marker in zip(panel.lines, colours, cycle(MARKERS)):
            ax.plot(line.x, line.y, marker + "-", color=colour, markersize=3.5, linewidth=1.3)
        ax.set(title=panel.title, xlabel="n: tokens in the forward pass", ylim=(0, None))
        most = max(x for line in panel.lines for x in line.x)
        if most > WIDEST_CHAIN:
            ax.set_xscale("log")
            ax.xaxis.set_major_locator(FixedLocator([2**i for i in range(math.ceil(math.log2(most)) + 1)]))
            ax.xaxis.set_major_formatter("{x:g}")
            ax.xaxis.set_minor_locator(NullLocator())
        else:
            ax.set_xticks(range(1, int(most) + 1, 1 if most < 9 else 4))
        name_ends(ax, [(line.y[-1], line.name, colour) for line, colour in zip(panel.lines, colours)])
    axes[0].axhline(1, color="0.8", linewidth=0.8, zorder=0)
    return figure


def draw_gammas(panels: list[Panel]) -> Figure:
    """A line of axes for each controller, a column for each text."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    figure, axes = sheet("Gamma over the rounds, by controller", "tokens proposed in each round of the first prompt; "
                         "in grey what was reached over all prompts", panels, (len(names), len(panels)), 0.75,
                         left=1.3, right=0.3, gap=0.3, between=0.35, sharex=True, sharey=True)
    for i, ax in enumerate(axes):
        panel, name = panels[i % len(panels)], names[i // len(panels)]
        line = next((line for line in panel.lines if line.name == name), Line(name, [], [], note="not measured"))
        ax.bar(line.x, line.y, width=0.8, color=BLUE)
        ax.text(1, 1.05, line.note, transform=ax.transAxes, ha="right", fontsize=7.5, color="0.45")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=3))
        if i < len(panels):
            ax.set_title(short_name(panel.title), pad=16)
        if i % len(panels) == 0:
            ax.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=8)
        if i >= len(axes) - len(panels):
            ax.set_xlabel("round")
    return figure


def draw_acceptance(panels: list[Panel]) -> Figure:
    figure, axes = sheet("Acceptance by position in the round", "accepted / judged, at positions where "
                         f"{MIN_JUDGED} or more were judged; the area of a dot: how many" + lossy_note(panels), panels,
                         abreast(panels, 3), 2.9, gap=1.3, right=1.3, sharey=True)
    methods = list(dict.fromkeys(method_of(row) for panel in panels for row in panel.rows))
    for ax, panel in zip(axes, panels):
        most = max(n for line in panel.lines for n in line.counts)
        places = [methods.index(method_of(row)) for row in panel.rows]
        colours = [COLOURS[i % len(COLOURS)] for i in places]
        for line, colour, i in zip(panel.lines, colours, places):
            ax.plot(line.x, line.y, color=colour, linewidth=0.9, alpha=0.6)
            ax.scatter(line.x, line.y, [4 + 70 * n / most for n in line.counts], color=colour, linewidth=0,
                       marker=MARKERS[i // len(COLOURS) % len(MARKERS)])
        ax.set(title=short_name(panel.title), xlabel="position in the round, depth in a tree", ylim=(0, 1.03))
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        name_ends(ax, [(line.y[-1], line.name, colour) for line, colour in zip(panel.lines, colours)])
    for ax in axes[len(panels):]:
        ax.remove()
    return figure


# Of each picture: what it shows, how it is drawn, and the command that measures its rows.
PICTURES = {
    "speedup_vs_gamma": (speedup_panels, draw_speedup,
                         "python test.py --speed 1 --methods target,spec:1,spec:2,spec:4,spec:8"),
    "tpot_by_method": (tpot_panels, draw_tpot, "python test.py --speed 1"),
    "v_of_n": (cost_panels, draw_costs, "python costModel.py"),
    "gamma_over_rounds": (gamma_panels, draw_gammas,
                          "python test.py --speed 1 --methods target,dynamic:aimd,dynamic:cost"),
    "acceptance_by_position": (acceptance_panels, draw_acceptance, "python test.py --speed 1"),
    "speedup_vs_nodes": (nodes_panels, draw_nodes,
                         "python test.py --speed 1 --methods target,medusa:8,medusa:32,eagle:8,eagle:32"),
    "sparse_tree": (sparse_tree_panels, draw_sparse_tree, "python test.py --speed 1 --methods target,medusa"),
}


# ------------------------------------------------------------------------------------- main


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="plotResults.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.error = fail
    add = parser.add_argument
    add("pictures", nargs="*", metavar="PICTURE", help=f"any of {', '.join(PICTURES)}; without one, all")
    add("--results", type=Path, default=Path(RESULTS), help=f"the rows; default {RESULTS}")
    add("--out", type=Path, default=Path(OUT), help=f"folder of the pictures, made if need be; default {OUT}")
    add("--pair", help="only rows of this pair")
    add("--engine", help="only rows of this engine")
    add("--text", help="only rows of this text")
    add("--run", help="only rows of commands that hold these words")
    args = parser.parse_args(argv)
    for name in args.pictures:
        if name not in PICTURES:
            raise ValueError(f"no picture {name!r}: there are {', '.join(PICTURES)}")
    return args


def fail(message) -> None:
    """One line that says what is wrong, exit status 2."""
    print(f"plotResults.py: {' '.join(str(message).split())}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: list[str]) -> int:
    """0, also when pictures are left out for want of rows; 2 and one line for bad input."""
    try:
        args = parse(argv)
        if not args.results.is_file():
            raise ValueError(f"--results {args.results}: no such file; python test.py writes it")
        rows = read_rows(args.results)
        if not rows:
            raise ValueError(f"--results {args.results} has no rows: python test.py writes them")
        rows = chosen(rows, args.pair, args.engine, args.text, args.run)
        args.out.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # the same picture whatever the user's matplotlibrc says
            matplotlib.rcParams.update(STYLE)
            for name in args.pictures or PICTURES:
                make(args.out / f"{name}.png", rows, *PICTURES[name])
    except (ValueError, OSError) as error:
        fail(error)
    return 0


def make(path: Path, rows: list[dict], panels_of, draw, command: str) -> None:
    """One picture, or one line that names the command which measures its rows."""
    panels = panels_of(rows)
    if panels:
        draw(panels).savefig(path, metadata={"Software": None})  # nothing but the picture: no version, no date
        print(path)
    else:
        print(f"{path} left out: no rows for it; {command} measures them")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
