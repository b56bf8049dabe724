"""plotResults.py: which rows a picture takes, what it draws of them, and what a user is told."""
import json
import shutil
import struct
import subprocess
from itertools import combinations

import matplotlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

import plotResults
from conftest import ROOT
from metrics import Generation, Level, Results, Round, run_record, summarise
from plotResults import (PICTURES, acceptance_panels, chosen, cost_panels, draw_acceptance, draw_costs, draw_gammas,
                         draw_nodes, draw_sparse_tree, draw_speedup, draw_tpot, footer, gamma_panels, main,
                         nodes_panels, places_of, read_rows, sparse_tree_panels, speedup_panels, tpot_panels, tree_of)

OLD, NEW, LATER = (f"2026-01-0{day}T10:00:00+00:00" for day in (1, 2, 3))


def row(method="spec", **fields):
    """A row as test.py writes it; fields replace."""
    base = {"date": NEW, "commit": "abc1234", "command": "python test.py --speed 1", "pair": "smollm2", "target": "Big",
            "draft": "Small", "device": "cpu (Chip, 2 cores)", "dtype": "float32", "engine": "packed", "threads": 2,
            "text": "wikitext", "method": method, "lossless": True, "gamma": None, "temperature": 0.0, "top_k": 0,
            "top_p": 1.0, "max_new_tokens": 64, "tpot_ms": 20.0, "tpot_ms_ci": [18.0, 23.0], "speedup": 2.0,
            "speedup_ci": [1.8, 2.2]}
    return {**base, **fields}


def spec(gamma, speedup, **fields):
    return row(**{"label": f"spec:{gamma}", "gamma": gamma, "speedup": speedup, "predicted": speedup + 0.1, **fields})


def simulated(alpha, gamma, speedup, **fields):
    return row("simulated spec", alpha_asked=alpha, gamma=gamma, speedup=speedup, predicted=speedup - 0.1,
               text="simulated", **fields)


def simulated_cost(alpha, mean_gamma, speedup, **fields):
    return row("simulated cost", alpha_asked=alpha, controller="cost", mean_gamma=mean_gamma, speedup=speedup,
               text="simulated", **fields)


def dynamic(controller, log, **fields):
    return row("dynamic", controller=controller, gamma=controller, gamma_log=log, mean_gamma=3.25, **fields)


def cost(engine, widths, ms, **fields):
    return row("cost target", engine=engine, widths=widths, step_ms=ms, text=None, tpot_ms=None, speedup=None, **fields)


def tree(method, nodes, speedup, **fields):
    """nodes: None where costs chose."""
    return row(method, **{"label": f"{method}:{nodes}" if nodes else method, "node_budget": nodes, "speedup": speedup,
                          "predicted": speedup + 0.5, "nodes_per_round": 5.5, **fields})


def judged(method, judged, accepted, **fields):
    return row(method, proposed_at=judged, accepted_at=accepted, **fields)


SPARSE = [[0], [0, 0], [1], [1, 0], [0, 0, 0]]


def everything():
    """Rows for all pictures: four texts, names of every length, more lines than colours."""
    rows = []
    for text in ("wikitext", "pg19", "gsm8k_train_2000.jsonl", "a_prompt_file_with_a_long_name.jsonl"):
        rows += [spec(g, 1 + g / 10 + len(text) / 100, text=text, proposed_at=[90, 60, 40], accepted_at=[60, 40, 39])
                 for g in (1, 2, 4, 8)]
        rows += [dynamic(name, [4, 5, 6, 3, 0, 1], text=text, proposed_at=[99, 50], accepted_at=[50, 25])
                 for name in ("aimd", "confidence", "cost", "fixed", "heuristic")]
        rows += [row("target", text=text, speedup=1.0), row("small", text=text, lossless=False),
                 row("hf-lookup", label="hf-lookup:4", text=text, engine="eager"),
                 row("llama-cpp", text=text, engine="llama.cpp", lossless=None, tpot_ms_ci=None)]
        rows += [tree(name, nodes, 1 + nodes / 20) for name in ("medusa", "lookup+eagle") for nodes in (4, 16, 64)]
        rows += [tree("lookup+eagle", None, 2.5, text=text),
                 tree("medusa", None, 2.5, text=text, tree=SPARSE, accuracy=[[0.5, 0.25], [0.25], [0.125]])]
    rows += [simulated(a / 10, g, a / 3 + g / 50) for a in range(1, 10) for g in (1, 4, 8)]
    rows += [simulated_cost(a / 10, a / 2, a / 3) for a in range(1, 10)]
    rows += [cost(engine, [1, 2, 5, 9, 17, 33], [20 * i, 21, 22, 25, 30, 44 * i])
             for i, engine in enumerate(("int8", "packed", "eager (float16 has no packed weights)", "new"), 1)]
    return rows


def series(panel):
    return {line.name: (line.x, line.y) for line in panel.lines}


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


# ------------------------------------------------------------------------------------- which rows


def test_rows_come_oldest_first_whatever_their_zone_and_undated_ones_before(tmp_path):
    rows = [{"n": 1, "date": "2026-01-01T12:00:00+02:00"}, {"n": 2, "date": "2026-01-01T09:59:00+00:00"},
            {"n": 3, "date": None}, {"n": 4, "date": "yesterday"}, {"n": 5}]
    assert [r["n"] for r in read_rows(write(tmp_path / "r.jsonl", rows))] == [3, 4, 5, 2, 1]


def test_the_newest_run_is_shown_alone():
    rows = [row("target", date=OLD, tpot_ms=50.0), row(date=OLD, tpot_ms=30.0), row("target", tpot_ms=40.0),
            row(tpot_ms=25.0)]
    (panel,) = tpot_panels(rows)
    assert series(panel) == {"target": ([0], [40.0]), "spec": ([0], [25.0])} and panel.rows == rows[2:]


def test_another_text_joins_only_from_the_same_setting_and_methods():
    old = {"date": OLD, "text": "pg19"}
    same = [row("target", **old), row(**old)]
    newest = [row("target"), row()]

    def titles(rows):
        return [panel.title for panel in tpot_panels(rows)]

    assert titles(same + newest) == ["pg19", "wikitext"]
    for change in ({"engine": "int8"}, {"device": "cuda (H200)"}, {"pair": "pythia"}, {"temperature": 1.0},
                   {"threads": 1}, {"max_new_tokens": 128}, {"draft": "Other"}):
        assert titles([{**r, **change} for r in same] + newest) == ["wikitext"], change
    assert titles(same[:1] + newest) == ["wikitext"]
    again = [row("target", text="pg19", date=OLD.replace("10", "11", 1), tpot_ms=77.0),
             row(text="pg19", date=OLD.replace("10", "11", 1))]
    assert [p.lines[0].y for p in tpot_panels(same + again + newest)] == [[77.0], [20.0]]


def test_the_flags_choose():
    rows = everything() + [row(pair="pythia", engine="graphs", command="python test.py --temperature 1")]
    assert {r["pair"] for r in chosen(rows, pair="pythia")} == {"pythia"}
    assert {r["command"] for r in chosen(rows, run="--temperature 1")} == {"python test.py --temperature 1"}
    assert {r["text"] for r in chosen(rows, text="pg19")} == {"pg19", None, "simulated"}  # costs belong to no text
    packed = chosen(rows, engine="packed")
    assert {r["engine"] for r in packed if r["method"] in ("spec", "target", "simulated spec")} == {"packed"}
    assert [line.name for line in cost_panels(packed)[0].lines] == ["eager", "packed", "int8", "new"]
    assert {"hf-lookup:4", "llama-cpp"} <= set(series(tpot_panels(packed)[0]))  # peers are beside us on their engines
    assert chosen(rows, engine="eager")[-1]["method"] == "cost target"
    assert not tpot_panels(chosen(rows, engine="eager"))  # no run of ours was on it


@pytest.mark.parametrize("flag, there", [
    ("pair", "pythia, smollm2"), ("engine", "eager, packed"), ("text", "wikitext")])
def test_a_flag_that_fits_no_row_says_what_there_is(flag, there):
    rows = [row(), row(pair="pythia"), cost("eager (why)", [1, 2], [1, 2])]
    with pytest.raises(ValueError, match=f"--{flag} nothing: there are {there}$"):
        chosen(rows, **{flag: "nothing"})


def test_the_row_over_all_texts_is_shown_only_if_asked_for():
    rows = [row(), row(text="pg19"), row(text="all", tpot_ms=30.0)]
    assert [panel.title for panel in tpot_panels(chosen(rows))] == ["wikitext", "pg19"]
    assert [panel.lines[0].y for panel in tpot_panels(chosen(rows, text="all"))] == [[30.0]]


# ------------------------------------------------------------------------------------- speedup against gamma


def test_speedup_over_gamma_measured_and_predicted():
    rows = [spec(4, 3.0, text="pg19"), spec(2, 2.0, text="pg19"), spec(8, 1.5), spec(1, 1.25),
            spec(2, 1.75, predicted=None, speedup_ci=None), row("dynamic", gamma="aimd"), row("lookup", gamma=4)]
    one, = speedup_panels(rows)
    assert series(one) == {"wikitext": ([1, 2, 8], [1.25, 1.75, 1.5])}  # pg19 was not measured at the same gammas
    assert one.lines[0].predicted == [1.35, None, 1.6] and one.lines[0].intervals == [(1.8, 2.2), None, (1.8, 2.2)]
    assert one.rows == rows[2:5]
    one, = speedup_panels(rows + [spec(g, g / 2, text="pg19", date=LATER) for g in (1, 2, 8)])
    assert series(one) == {"wikitext": ([1, 2, 8], [1.25, 1.75, 1.5]), "pg19": ([1, 2, 8], [0.5, 1.0, 4.0])}


def test_runs_are_joined_only_where_none_has_two_gammas():
    single = [row(gamma=4, speedup=9.0, date=OLD), row(gamma=2, speedup=1.5), row(gamma=4, speedup=2.0, date=LATER),
              row(gamma=6, speedup=7.0, engine="eager", date=LATER)]
    panel, = speedup_panels(single)
    assert series(panel) == {"wikitext": ([2, 4], [1.5, 2.0])}  # of gamma 4 the newest; the other engine is alone
    sweep = [spec(g, 3.0, date=OLD, command="python test.py --peers") for g in (1, 2)]
    assert series(speedup_panels(sweep + single)[0]) == {"wikitext": ([1, 2], [3.0, 3.0])}
    assert not speedup_panels(single[1:2]) and not speedup_panels([row(gamma=4), row(gamma=4)])


def test_the_simulated_drafter_has_a_line_for_each_alpha():
    rows = [simulated(0.9, g, g / 2, date=OLD) for g in (1, 2)] + [
        simulated(0.9, 4, 3.0), simulated(0.5, 1, 1.2), simulated(0.9, 1, 1.8), simulated(0.5, 4, 1.1)]
    panel, = speedup_panels(rows)
    assert series(panel) == {"alpha 0.5": ([1, 4], [1.2, 1.1]), "alpha 0.9": ([1, 4], [1.8, 3.0])}
    assert panel.lines[1].predicted == [1.7, 2.9] and "simulated" in panel.title
    assert not tpot_panels(rows) and not acceptance_panels(rows)  # a simulation is no row of the other pictures


def test_stars_are_the_cost_aware_controller_of_the_same_run():
    cost_aware = {"controller": "cost", "gamma": "cost", "mean_gamma": 3.5}
    rows = [row("dynamic", speedup=9.0, **{**cost_aware, "date": OLD}), spec(1, 1.5), spec(4, 2.5),
            row("dynamic", speedup=2.75, **cost_aware), row("dynamic", speedup=8.0, text="pg19", **cost_aware),
            row("dynamic", speedup=7.0, controller="aimd", mean_gamma=3.0),
            simulated(0.5, 1, 1.25), simulated(0.5, 4, 1.0), simulated(0.8, 1, 1.5), simulated(0.8, 4, 2.0),
            simulated_cost(0.8, 5.5, 2.25), simulated_cost(0.5, 0.25, 1.125),
            simulated_cost(0.5, 1, 5.0, engine="int8")]
    measured, simulation = speedup_panels(rows)
    assert [line.star for line in measured.lines] == [(3.5, 2.75)]
    assert [line.star for line in simulation.lines] == [(0.25, 1.125), (5.5, 2.25)]
    stars = [[line.get_xydata().tolist() for line in ax.lines if line.get_marker() == "*"]
             for ax in draw_speedup([measured, simulation]).axes]
    assert stars == [[[[3.5, 2.75]]], [[[0.25, 1.125]], [[5.5, 2.25]]]]


def test_speedup_is_drawn_as_it_is():
    rows = [spec(1, 1.5), spec(4, 2.5), simulated(0.8, 1, 1.25), simulated(0.8, 4, 2.0)]
    measured, simulation = draw_speedup(speedup_panels(rows)).axes

    def lines(ax):
        return [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in ax.lines]

    assert ([1, 4], [1.5, 2.5]) in lines(measured) and ([1, 4], [1.6, 2.6]) in lines(measured)
    assert ([1, 1], [1.8, 2.2]) in lines(measured)
    assert ([1, 4], [1.25, 2.0]) in lines(simulation) and ([1, 4], [1.15, 1.9]) in lines(simulation)
    assert measured.get_ylim() == simulation.get_ylim() and measured.get_ylim()[0] == 0
    assert measured.get_ylim()[1] > 2.6 and list(measured.get_xticks()) == [1, 4]


# ------------------------------------------------------------------------------------- time per token


def test_tpot_by_method():
    rows = [row("target", tpot_ms=40.0, tpot_ms_ci=[39.0, 42.0]), row("small", lossless=False, tpot_ms_ci=None),
            row("dynamic", gamma="aimd"), row("dynamic", controller="cost", label="dynamic:cost"),
            row("spec", ppl=17.0, tpot_ms=None), row("llama-cpp", lossless=None, engine="llama.cpp")]
    panel, = tpot_panels(rows)
    assert list(series(panel)) == ["target", "small", "dynamic:aimd", "dynamic:cost", "llama-cpp"]
    assert [line.intervals for line in panel.lines[:2]] == [[(39.0, 42.0)], [None]]
    assert [line.note for line in panel.lines] == ["", "lossy", "", "", "own law"]


def test_bars_are_as_long_as_the_times_and_the_fastest_is_on_top():
    times = {"target": 40.0, "spec": 20.0, "small": 5.0, "hf": 44.0}
    rows = [row(name, text=text, tpot_ms=ms + shift, lossless=name != "small", tpot_ms_ci=[ms - 1, ms + 2 + shift])
            for text, shift in (("wikitext", 0), ("pg19", 6)) for name, ms in times.items()]
    figure = draw_tpot(tpot_panels(rows))
    for ax, shift in zip(figure.axes, (0, 6)):
        names = [label.get_text() for label in ax.get_yticklabels()]
        if shift == 0:
            assert names == ["hf", "target", "spec", "small (lossy)"]  # from below
        bars = {round(bar.get_y() + bar.get_height() / 2): bar.get_width() for bar in ax.patches}
        assert bars == {i: times[name] + shift for i, name in enumerate(["hf", "target", "spec", "small"])}
        assert ax.get_xlim()[0] == 0 and ax.get_xlim()[1] > 52
        assert [[39.0, 42.0 + shift], [1, 1]] in [[list(x.get_xdata()), list(x.get_ydata())] for x in ax.lines]


@pytest.mark.parametrize("texts, tpot, acceptance", [(1, (1, 1), (1, 1)), (3, (1, 3), (1, 3)), (4, (1, 4), (2, 2)),
                                                     (5, (2, 3), (2, 3))])
def test_texts_stand_side_by_side_as_far_as_there_is_room(texts, tpot, acceptance):
    names = [f"text {i}" for i in range(texts)]
    rows = [judged("spec", [50, 40], [25, 10], text=name) for name in names]
    for axes, shape in ((draw_tpot(tpot_panels(rows)).axes, tpot),
                        (draw_acceptance(acceptance_panels(rows)).axes, acceptance)):
        assert [ax.get_title() for ax in axes] == names
        assert (len({ax.get_position().y0 for ax in axes}), len({ax.get_position().x0 for ax in axes})) == shape


# ------------------------------------------------------------------------------------- costs


def test_v_is_the_time_over_that_of_one_token():
    rows = [cost("packed", [1, 5], [99.0, 99.0], date=OLD), cost("int8", [5, 1, 2], [30.0, 20.0, 19.0]),
            cost("packed (int8 needs AVX2)", [1, 5], [40.0, 50.0]), cost("eager", [2, 5], [1.0, 2.0]),
            cost("eager", [1, 5], [1.0]), cost("eager", None, None), cost("eager", [1, 2], [0.0, 1.0])]
    v, t = cost_panels(rows)
    assert series(v) == {"packed": ([1, 5], [1.0, 1.25]), "int8": ([1, 2, 5], [1.0, 0.95, 1.5])}
    assert series(t) == {"packed": ([1, 5], [40.0, 50.0]), "int8": ([1, 2, 5], [20.0, 19.0, 30.0])}
    assert v.rows == t.rows == [rows[2], rows[1]]
    chains, all_widths = cost_panels([cost("packed", [1, 17, 18, 64], [40.0, 50.0, 60.0, 80.0])])
    assert series(chains) == {"packed": ([1, 17], [1.0, 1.25])}
    assert series(all_widths) == {"packed": ([1, 17, 18, 64], [40.0, 50.0, 60.0, 80.0])}
    drawn = [[list(line.get_xdata()), list(line.get_ydata())] for line in draw_costs([v, t]).axes[1].lines]
    assert drawn == [[[1, 5], [40.0, 50.0]], [[1, 2, 5], [20.0, 19.0, 30.0]]]


@pytest.mark.parametrize("change", [{"device": "cuda (H200)"}, {"target": "Other"}, {"threads": 1}])
def test_costs_of_another_machine_or_model_are_no_lines_beside_these(change):
    rows = [cost("eager", [1, 2], [50.0, 90.0], **change, date=OLD), cost("packed", [1, 2], [30.0, 33.0])]
    assert list(series(cost_panels(rows)[0])) == ["packed"]


# ------------------------------------------------------------------------------------- gamma over rounds


def test_gamma_over_the_rounds():
    rows = [dynamic("cost", [8], engine="int8", date=OLD), dynamic("cost", [9, 9], date=OLD),
            dynamic("aimd", [9], date=OLD), dynamic("aimd", [4, 5, 2]), dynamic("cost", [4, 0, 6]),
            dynamic("aimd", [1], text="pg19", speedup=None), dynamic("cost", [2], text="pg19"),
            row("dynamic", gamma="fixed"), dynamic("heuristic", None)]
    one, two = gamma_panels(rows)
    assert series(one) == {"aimd": ([1, 2, 3], [4, 5, 2]), "cost": ([1, 2, 3], [4, 0, 6])}
    assert [line.note for line in one.lines + two.lines] == [
        "mean gamma 3.2, speedup 2.00"] * 2 + ["mean gamma 3.2", "mean gamma 3.2, speedup 2.00"]
    heights = [[bar.get_height() for bar in ax.patches] for ax in draw_gammas([one, two]).axes]
    assert heights == [[4, 5, 2], [1], [4, 0, 6], [2]]


def test_a_run_of_several_controllers_goes_before_later_single_ones():
    both = [dynamic(name, [4], date=OLD, text=text) for name in ("aimd", "cost") for text in ("wikitext", "pg19")]
    assert [list(series(panel)) for panel in gamma_panels(both + [dynamic("fixed", [9])])] == [["aimd", "cost"]] * 2
    single = [dynamic("cost", [9], date=OLD), dynamic("aimd", [4]), dynamic("cost", [5], date=LATER)]
    assert [series(panel) for panel in gamma_panels(single)] == [{"aimd": ([1], [4]), "cost": ([1], [5])}]
    assert [list(series(panel)) for panel in gamma_panels(single[:1])] == [["cost"]]


def test_a_controller_that_was_not_run_on_a_text_is_said_so():
    panels = gamma_panels([dynamic("aimd", [1])]) + gamma_panels([dynamic("aimd", [4]), dynamic("cost", [4])])
    drawn = draw_gammas(panels).axes
    assert [len(ax.patches) for ax in drawn] == [1, 1, 0, 1] and drawn[2].texts[0].get_text() == "not measured"


# ------------------------------------------------------------------------------------- acceptance by position


def test_acceptance_by_position():
    rows = [judged("spec", [100, 50], [50, 40], label="spec:2"), judged("spec", [100, 60, 40, 19], [60, 40, 30, 19],
                                                                        label="spec:4"),
            judged("lookup", [20], [5]), judged("hf", [], []), row("target"), judged("multi", [40], None),
            judged("combined", [40, 30], [10])]
    panel, = acceptance_panels(rows)
    assert series(panel) == {"spec:4": ([1, 2, 3], [0.6, 40 / 60, 0.75]), "lookup": ([1], [0.25])}
    assert panel.lines[0].counts == [100, 60, 40]  # of 19 nothing can be said
    ax, = draw_acceptance([panel]).axes
    assert [points.get_offsets().tolist() for points in ax.collections] == [
        [[1, 0.6], [2, 40 / 60], [3, 0.75]], [[1, 0.25]]]
    assert [text.get_text() for text in ax.texts] == ["lookup", "spec:4"]
    sizes = [list(points.get_sizes()) for points in ax.collections]
    assert sizes[0][0] > sizes[0][1] > sizes[0][2] > sizes[1][0]


def test_the_fields_are_those_that_a_run_writes(tmp_path):
    out = Generation(levels=[Level("draft")])
    for i in range(30):
        out.commit([1, 2, 3], Round(4, 2, 3), now=float(i))
    summary = summarise([run_record(out, 0, 0, peak_memory_mb=None, loop_share=None)], [])
    meta = {key: row()[key] for key in ("date", "command", "commit")}
    results = Results(tmp_path, meta)
    results.table([])
    results.row(text="wikitext", method="dynamic", gamma="aimd", lossless=True, **summary)
    rows = read_rows(tmp_path / "results.jsonl")
    assert series(acceptance_panels(rows)[0]) == {"dynamic:aimd": ([1, 2, 3], [1.0, 1.0, 0.0])}
    assert series(gamma_panels(rows)[0]) == {"aimd": (list(range(1, 31)), [4] * 30)}
    assert series(tpot_panels(rows)[0]) == {"dynamic:aimd": ([0], [pytest.approx(1000 / 3)])}


# ------------------------------------------------------------------------------------- trees


def test_speedup_over_nodes_has_a_panel_for_each_text_and_a_line_for_each_method():
    rows = [tree("eagle", 4, 9.0, date=OLD), tree("eagle", 8, 9.5, date=OLD),
            tree("eagle", 16, 2.5), tree("eagle", 4, 1.5), tree("tree", 10, 1.25, label="tree:2x2x1"),
            tree("eagle", None, 2.75), tree("eagle", None, 7.0, text="pg19"), spec(4, 8.0), spec(8, 8.5)]
    panel, = nodes_panels(rows)
    assert panel.title == "wikitext" and series(panel) == {"eagle": ([4, 16], [1.5, 2.5]), "tree": ([10], [1.25])}
    assert [line.star for line in panel.lines] == [(5.5, 2.75), None] and panel.lines[0].predicted == [2.0, 3.0]
    drawn, = draw_nodes([panel]).axes
    lines = [(list(map(float, line.get_xdata())), list(map(float, line.get_ydata()))) for line in drawn.lines]
    for line in (([4, 16], [1.5, 2.5]), ([4, 16], [2.0, 3.0]), ([10], [1.25]), ([5.5], [2.75])):
        assert line in lines
    assert [text.get_text() for text in drawn.texts] == ["tree", "eagle"]
    assert not nodes_panels([spec(4, 8.0), spec(8, 8.5), tree("eagle", None, 2.0)])  # chains have no tree


def test_no_panel_over_nodes_cuts_off_its_lines():
    """The panels share their axis: the limits of the first one must leave room for the others."""
    panels = nodes_panels([tree("eagle", 4, 1.5), tree("eagle", 8, 1.2), tree("eagle", 4, 2.5, text="pg19"),
                           tree("eagle", 8, 2.7, text="pg19")])
    for ax in draw_nodes(panels).axes:
        assert ax.get_ylim()[0] == 0 and ax.get_ylim()[1] > max(max(line.get_ydata()) for line in ax.lines)


def test_acceptance_by_depth_of_a_tree_are_the_rounds_that_came_so_far():
    """Three trees of depth 2, of which two, one and none of the levels were accepted."""
    out = Generation(levels=[Level("eagle")])
    for i in range(30):
        accepted = i % 3
        out.commit([1] * (accepted + 1), Round(2, accepted, accepted + 1), now=float(i))
    run = run_record(out, 0, 0, peak_memory_mb=None, loop_share=None)
    panel, = acceptance_panels([row("eagle", **{key: run[key] for key in ("proposed_at", "accepted_at")})])
    assert series(panel) == {"eagle": ([1, 2], [20 / 30, 10 / 20])}


def test_lossy_methods_are_marked_in_every_picture_that_compares():
    def said(figure):
        return [text.get_text() for part in (figure, *figure.axes) for text in part.texts]

    rows = [tree(name, nodes, 2.0, lossless=name == "medusa", proposed_at=[90], accepted_at=[60])
            for name in ("medusa", "medusa-typical") for nodes in (4, 8)]
    for panels, draw, names in ((nodes_panels(rows), draw_nodes, ["medusa", "medusa-typical*"]),
                                (acceptance_panels(rows), draw_acceptance, ["medusa:4", "medusa-typical:4*"])):
        text = said(draw(panels))
        assert text[-2:] == names and text[1].endswith("; *: lossy")
    panels = nodes_panels(rows[:2])
    assert [line.name for line in panels[0].lines] == ["medusa"] and "lossy" not in said(draw_nodes(panels))[1]


def test_a_sparse_tree_and_what_is_expected_of_it():
    accuracy = [[0.5, 0.25], [0.25], [0.125]]
    expected = {(0,): 0.5, (0, 0): 0.125, (1,): 0.25, (1, 0): 0.0625, (0, 0, 0): 0.015625}
    rows = [tree("medusa", 4, 2.0, tree=[[0]], accuracy=accuracy),
            tree("medusa", 5, 2.0, tree=SPARSE, accuracy=accuracy, tokens_per_round=1.875), row("target"),
            tree("medusa-typical", 5, 2.0, tree=SPARSE[:2], accuracy=accuracy, lossless=False)]
    assert tree_of(rows[1]) == expected
    panel, = sparse_tree_panels(rows)
    assert panel.title == (
        "medusa:5, 5 nodes; tokens per round expected on greedy text: 1.95, measured on wikitext: 1.88")
    places = places_of(expected)
    assert places == {(0, 0, 0): 0, (0, 0): 0, (0,): 0, (1, 0): 1, (1,): 1, (): 0.5}
    ax, = draw_sparse_tree([panel]).axes
    dots = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in ax.lines if line.get_marker() == "o"}
    assert dots == {(places[path], len(path)) for path in expected}
    edges = {tuple(map(tuple, line.get_xydata().tolist())) for line in ax.lines if line.get_marker() == "None"}
    assert edges == {((places[path[:-1]], len(path) - 1), (places[path], len(path))) for path in expected}
    assert sorted(text.get_text() for text in ax.texts) == ["1", "1", "1", "1", "2"]


@pytest.mark.parametrize("tree, accuracy", [
    (None, [[0.5]]), ([[0]], None), ([[0, 0]], [[0.5], [0.5]]), ([[1]], [[0.5]]), ([[0], [0, 0]], [[0.5]]),
    ([0], [[0.5]]), ([["a"]], [[0.5]]), ([[0]], [[None]]), ([[]], [[0.5]])])
def test_what_is_no_tree_is_not_drawn(tree, accuracy):
    assert not sparse_tree_panels([row("medusa", tree=tree, accuracy=accuracy)])


# ------------------------------------------------------------------------------------- what stands on the pictures


def test_the_footer_names_machine_pair_engine_commit_and_command():
    foot = footer([row(), row("target")])
    assert foot == ["smollm2: Big <- Small | cpu (Chip, 2 cores) | engine packed, float32, 2 threads | greedy | "
                    "commit abc1234, 2026-01-02 | python test.py --speed 1"]
    foot = footer([row(), row("hf", engine="eager"), row("lookup")])
    assert foot[0].startswith("all: smollm2: Big <- Small | cpu") and "engine" not in foot[0]
    assert foot[1:] == ["spec, lookup: engine packed, float32, 2 threads", "hf: engine eager, float32, 2 threads"]
    foot = footer([cost("int8", [1], [1]), cost("packed", [1], [1], commit="def5678", command="python costModel.py")])
    assert [line.split(" | ")[1:] for line in foot[1:]] == [["commit abc1234, 2026-01-02", "python test.py --speed 1"],
                                                           ["commit def5678, 2026-01-02", "python costModel.py"]]
    drawn = footer([row(temperature=0.7, top_k=50, draft=None, command="python " + 50 * "--a-long-flag ")])
    assert "temperature 0.7, top_k 50, top_p 1.0" in drawn[0] and len(drawn) > 3 and max(map(len, drawn)) <= 165


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_cut_off_and_no_names_overlap(name):
    panels_of, draw, _ = PICTURES[name]
    panels = panels_of(everything())
    with matplotlib.rc_context(plotResults.STYLE):
        figure = draw(panels)
        figure.draw_without_rendering()
    canvas = figure.bbox
    texts = [t for ax in figure.axes for t in (*ax.texts, ax._left_title)] + figure.texts
    ticks = [t for ax in figure.axes for t in ax.get_yticklabels() if t.get_visible() and t.get_text()]
    for text in texts + ticks:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= canvas.x1 and box.y0 >= 0 and box.y1 <= canvas.y1, text.get_text()
    for ax in figure.axes:
        boxes = [t.get_window_extent().padded(-1) for t in ax.texts]
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        others = [other.get_window_extent() for other in figure.axes if other is not ax]
        assert not any(box.overlaps(other) for box in boxes for other in others)
    foot = figure.texts[-1].get_text()
    for fact in ("smollm2: Big <- Small", "cpu (Chip, 2 cores)", "engine", "abc1234", "python test.py --speed 1"):
        assert fact in foot
    assert figure.texts[-1].get_window_extent().y1 < min(ax.get_tightbbox().y0 for ax in figure.axes)


# ------------------------------------------------------------------------------------- files and flags


def chunks(png):
    """The names of a PNG's chunks, and its size."""
    names, at = [], 8
    while at < len(png):
        length, name = struct.unpack(">I4s", png[at:at + 8])
        names.append(name.decode())
        at += 12 + length
    return names, struct.unpack(">II", png[16:24])


def test_all_pictures_the_same_bytes_each_time_whatever_matplotlib_is_set_to(tmp_path, capsys):
    results = write(tmp_path / "r.jsonl", everything())
    assert main(["--results", str(results), "--out", str(tmp_path / "a" / "b")]) == 0
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "a" / "b" / f"{name}.png") for name in PICTURES]
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red", "savefig.dpi": 50, "savefig.bbox": "tight"}):
        assert main(["--results", str(results), "--out", str(tmp_path)]) == 0
        assert matplotlib.rcParams["font.size"] == 20
    for name in PICTURES:
        png = (tmp_path / f"{name}.png").read_bytes()
        assert png == (tmp_path / "a" / "b" / f"{name}.png").read_bytes()
        names, (width, height) = chunks(png)
        assert width == 1800 and 600 < height < 2400 and set(names) == {"IHDR", "pHYs", "IDAT", "IEND"}


def test_a_picture_without_rows_is_left_out_with_the_command_that_measures_them(tmp_path, capsys):
    results = write(tmp_path / "r.jsonl", [row("target"), row(gamma=4)])
    assert main(["--results", str(results), "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PICTURES) and [path.name for path in tmp_path.glob("*.png")] == ["tpot_by_method.png"]
    for line, (name, (_, _, command)) in zip(lines, PICTURES.items()):
        assert line.endswith(f"{command} measures them") == (name != "tpot_by_method")
        assert (ROOT / command.split()[1]).is_file()
    assert main(["v_of_n", "--results", str(results), "--out", str(tmp_path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_half_written_last_line_is_skipped_with_a_warning(tmp_path, capsys):
    results = write(tmp_path / "r.jsonl", [row("target"), row()])
    results.write_text(results.read_text() + json.dumps(row("lookup"))[:100])
    assert main(["--results", str(results), "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.err == f"plotResults.py: {results}, line 3 is half written: skipped\n" and "tpot_by_method" in said.out
    assert [r["method"] for r in read_rows(results)] == ["target", "spec"]


@given(st.data())
def test_wherever_the_file_is_cut_the_whole_rows_are_read(tmp_path_factory, data):
    rows = [{"date": NEW, "n": n, "text": "\u00e9\u4e2d"} for n in range(3)]
    whole = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows).encode()
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.getbasetemp() / "cut.jsonl"
    path.write_bytes(whole[:cut])
    ends = [i for i, byte in enumerate(whole) if byte == ord("\n")]
    assert read_rows(path) == rows[: sum(cut >= end for end in ends)]


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.sampled_from(["", "spec", "cost"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner), max_leaves=4)


@given(st.lists(st.fixed_dictionaries({"method": st.sampled_from(["spec", "dynamic", "cost target", "simulated"])},
                                      optional={key: JUNK for key in (
                                          "date", "text", "label", "gamma", "controller", "speedup", "speedup_ci",
                                          "predicted", "tpot_ms", "tpot_ms_ci", "alpha_asked", "widths", "step_ms",
                                          "gamma_log", "proposed_at", "accepted_at", "engine", "temperature", "draft",
                                          "lossless", "mean_gamma")}), max_size=4))
def test_rows_with_anything_in_them_end_in_no_traceback(rows):
    for panels_of, _, _ in PICTURES.values():
        for panel in panels_of(sorted(rows, key=plotResults.when)):
            assert panel.rows and footer(panel.rows)


@pytest.mark.parametrize("arguments, said", [
    (["--results", "nowhere.jsonl"], "--results nowhere.jsonl: no such file; python test.py writes it"),
    (["--results", "empty"], "empty has no rows: python test.py writes them"),
    (["--results", "broken"], "broken, line 2 is no row (one JSON object a line): mend it"),
    (["--results", "."], "--results .: no such file"),
    (["--results", "good", "--engine", "warp"], "no row for --engine warp: there are packed"),
    (["--results", "good", "--run", "peers"], "no row for --run 'peers': no command has these words"),
    (["--results", "good", "--out", "broken"], "broken"),
    (["--results", "good", "cake"], "no picture 'cake': there are speedup_vs_gamma, tpot_by_method"),
    (["--results", "good", "--colour", "red"], "unrecognized arguments: --colour"),
    (["--eng", "packed"], "unrecognized arguments: --eng"),
])
def test_bad_input_is_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "broken").write_text(json.dumps(row()) + "\n[1]\n" + json.dumps(row()) + "\n")
    write(tmp_path / "good", [row()])
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.err.count("\n") == 1 and told.err.startswith("plotResults.py: ")
    assert said in told.err and not told.out


# ------------------------------------------------------------------------------------- the project


def test_the_projects_own_results_can_be_drawn(tmp_path):
    assert main(["--results", str(ROOT / "results.jsonl"), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "tpot_by_method.png").exists()


def test_pictures_may_be_committed():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no git checkout")
    ignored = subprocess.run(["git", "check-ignore", *[f"plots/{name}.png" for name in PICTURES]], cwd=ROOT,
                             capture_output=True, text=True)
    assert ignored.returncode == 1 and not ignored.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_plots_draws_also_where_the_folder_is_there(tmp_path):
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "plots").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$*" >> calls\n')
    python.chmod(0o755)
    subprocess.run(["make", "plots"], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "plotResults.py"
