"""How a page looks, in light and in dark, on a phone and on a desk; and what the pointer reads off a curve."""

from collections.abc import Iterable
from html import escape

STYLE = """
:root {
  --paper: #f6f6f3; --card: #fff; --ink: #1b1d21; --soft: #5d646f; --faint: #8a919c; --line: #e3e3de;
  --train: #3566c8; --held: #cf5316; --mark: #7d8590; --good: #1a7a47; --bad: #b3311d; --wash: #eef2fb;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #131518; --card: #1b1e23; --ink: #e8e9eb; --soft: #a3aab5; --faint: #7c8490; --line: #2d3138;
    --train: #7ea6ff; --held: #ff9a5c; --mark: #8d95a1; --good: #5fcf94; --bad: #ff8a75; --wash: #20293a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  font-variant-numeric: tabular-nums; -webkit-text-size-adjust: 100%;
}
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px 64px; }
a { color: var(--train); text-underline-offset: 2px; }
h1, h2, h3, h4, h5, p, figure, dl, dd, pre { margin: 0; }
h1 { font-size: 28px; line-height: 1.2; letter-spacing: -.02em; margin-bottom: 14px; }
h2 { font-size: 26px; line-height: 1.2; letter-spacing: -.02em; overflow-wrap: anywhere; }
h3 { font-size: 17px; letter-spacing: -.01em; margin: 36px 0 12px; }
h4 { font-size: 14px; font-weight: 600; }
h5 { font-size: 12px; font-weight: 600; color: var(--soft); margin-bottom: 4px; }
small { font-size: 12px; font-weight: 400; color: var(--faint); }
.kicker { font-size: 13px; color: var(--faint); margin-bottom: 6px; }
.faint { color: var(--faint); }
.empty { color: var(--soft); margin-top: 18px; }
article + article, section + article { margin-top: 56px; padding-top: 40px; border-top: 1px solid var(--line); }
.scroll + article { margin-top: 44px; }
header p { color: var(--soft); margin-top: 6px; overflow-wrap: anywhere; }
.status {
  display: inline-block; vertical-align: middle; margin-left: 10px; padding: 2px 9px; border-radius: 99px;
  border: 1px solid currentColor; font-size: 12px; font-weight: 500; letter-spacing: 0; color: var(--soft);
}
.status.good { color: var(--good); }
.complaints { margin: 14px 0 0; padding: 10px 14px 10px 30px; border-left: 3px solid var(--bad); background: var(--card); }

.headline { margin-top: 20px; display: grid; gap: 12px; }
.tiles { display: flex; flex-wrap: wrap; gap: 12px; }
.tile, .board, .plot, .sample, .panels > div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tile { padding: 12px 14px; flex: 1 1 150px; max-width: 300px; }
.tile dt { font-size: 13px; color: var(--soft); line-height: 1.3; min-height: 2.6em; display: flex; align-items: end; }
.tile dd { font-size: 26px; font-weight: 600; letter-spacing: -.02em; line-height: 1.3; }
.tile p { font-size: 13px; }
.tile:first-child { border-color: var(--held); }
.better { color: var(--good); }
.worse { color: var(--bad); }
.board { padding: 14px 16px; }
.board table { margin-top: 8px; }
.board th, .board td { vertical-align: middle; }
.board th { font-weight: 400; white-space: nowrap; width: 1%; color: var(--soft); }
.board td.n { width: 1%; }
.board .bar { padding: 0 10px; }
.board i { display: block; height: 12px; min-width: 2px; border-radius: 2px; background: var(--mark); opacity: .45; }
.board .ours th, .board .ours td { color: var(--ink); font-weight: 600; }
.board .ours i { background: var(--held); opacity: 1; }

table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 4px 12px 4px 0; vertical-align: top; font-weight: 400; }
.n { text-align: right; white-space: nowrap; padding-right: 0; }
.overview th, .overview td { padding: 8px 16px 8px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
.overview tr:first-child th { font-size: 12px; color: var(--soft); }
.overview :is(th, td):nth-child(n + 4) { text-align: right; }
.overview :is(th, td):last-child { padding-right: 0; }
.scroll { overflow-x: auto; }

.plots { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 14px; }
.plot { position: relative; padding: 14px 18px 10px 14px; }
.plot:first-child, .plot:last-child:nth-child(even) { grid-column: 1 / -1; }
.plot figcaption { display: flex; flex-wrap: wrap; align-items: baseline; gap: 2px 14px; min-height: 24px; }
.plot output {
  position: absolute; right: 18px; top: 40px; z-index: 1; padding: 2px 8px; border: 1px solid var(--line); border-radius: 6px;
  font-size: 12px; background: var(--card); pointer-events: none;
}
.plot output:empty { display: none; }
.key { font-size: 13px; color: var(--soft); white-space: nowrap; }
.key::before { content: ""; display: inline-block; width: 14px; height: 0; margin-right: 5px; vertical-align: 4px; }
.key.train::before { border-top: 2px solid var(--train); }
.key.held::before { width: 8px; height: 8px; border-radius: 50%; background: var(--held); vertical-align: 0; }
.frame { position: relative; padding: 8px 0 22px 46px; }
.area { position: relative; height: 190px; border-bottom: 1px solid var(--line); }
.plot:first-child .area { height: 300px; }
.area svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; clip-path: inset(0 -5px); }
.area path, .area polyline { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round; }
.grid { stroke: var(--line); stroke-width: 1; }
.area polyline.train { stroke: var(--train); stroke-width: 2; }
.area polyline.raw { stroke-width: 1; opacity: .28; }
.area polyline.held { stroke: var(--held); stroke-width: 1.5; opacity: .55; }
.area .dot { stroke-width: 7; }
.area .dot.held { stroke: var(--held); }
.area .dot.train { stroke: var(--train); }
.area path.mark { stroke: var(--mark); stroke-width: 1; stroke-dasharray: 4 4; }
span.mark, .end, .values span, .steps span { position: absolute; white-space: nowrap; pointer-events: none; }
span.mark {
  left: 10px; padding: 0 4px; font-size: 11px; line-height: 1.1; color: var(--soft); background: var(--card);
  transform: translateY(-50%);
}
.end { font-size: 13px; font-weight: 600; color: var(--held); line-height: 1; }
.end { text-shadow: 0 0 2px var(--card), 0 0 2px var(--card), 0 0 4px var(--card); }
.end.above { transform: translate(-100%, -165%); }
.end.below { transform: translate(-100%, 75%); }
.values { position: absolute; top: 8px; bottom: 22px; left: 0; width: 40px; }
.values span { right: 0; font-size: 12px; line-height: 1; color: var(--faint); transform: translateY(-50%); }
.steps { position: absolute; left: 46px; right: 0; bottom: 2px; height: 14px; }
.steps span { font-size: 12px; line-height: 1; color: var(--faint); transform: translateX(-50%); }
.note { font-size: 12px; color: var(--soft); padding: 4px 0 4px; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--faint); pointer-events: none; }

pre { font: 12.5px/1.5 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, monospace; white-space: pre-wrap; }
pre, td { overflow-wrap: anywhere; }
code { font: 13px/1.4 ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, monospace; }
em { color: var(--faint); }
.sample { overflow: hidden; margin-bottom: 14px; }
.prompt { padding: 12px 16px; border-bottom: 1px solid var(--line); }
.prompt pre { color: var(--soft); }
.columns { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); }
.text { padding: 12px 16px; }
.columns .text + .text { border-left: 1px solid var(--line); }
.text.newest { background: var(--wash); }
.text.newest h5 { color: var(--ink); }
.sample details { border-top: 1px solid var(--line); padding: 8px 16px; }
.sample details .text { padding: 10px 0 0; }
summary { cursor: pointer; font-size: 13px; color: var(--soft); }
.settings th { width: 38%; }
section > .scroll .settings th { width: auto; }
section > .scroll .settings td.faint { width: 24%; }
section > .scroll .settings tr:first-child th { font-size: 12px; color: var(--soft); }
section > .scroll .settings :is(th, td) { border-bottom: 1px solid var(--line); padding: 6px 16px 6px 0; }
section > .scroll + details { margin-top: 12px; }
.panels { columns: 300px; column-gap: 12px; }
details .panels { margin-top: 12px; }
.panels > div { padding: 12px 16px; margin-bottom: 12px; break-inside: avoid; }
.panels td { color: var(--soft); }
.panels th { white-space: nowrap; width: 45%; }
.files { list-style: none; margin: 0; padding: 0; display: grid; gap: 4px; }

@media (max-width: 640px) {
  main { padding: 18px 14px 48px; }
  .plots { grid-template-columns: minmax(0, 1fr); }
  .plot { padding: 12px 12px 8px 10px; }
  .plot:first-child .area { height: 220px; }
  .area { height: 160px; }
  .tiles { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 10px; }
  .tile dd { font-size: 23px; }
  .overview :is(th, td):not(:first-child, :last-child) { display: none; }
  .columns { grid-auto-flow: row; }
  .columns .text + .text { border-left: 0; border-top: 1px solid var(--line); }
  .board th { white-space: normal; width: 34%; line-height: 1.25; }
  .plot output { right: 12px; }
}
@media print { .plot, .sample, .tile { break-inside: avoid; } details { display: none; } }
"""

# Reads values back from the drawn points, so nothing is stored twice; without it the page lacks only the read-out.
SCRIPT = """
const show = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString("en") : String(+v.toPrecision(4));
for (const plot of document.querySelectorAll(".plot")) {
  const area = plot.querySelector(".area"), output = plot.querySelector("output");
  const [s0, s1] = plot.dataset.steps.split(" ").map(Number), [v0, v1] = plot.dataset.values.split(" ").map(Number);
  const log = "log" in plot.dataset;
  const value = y => { const t = 1 - y / 1000; return log ? v0 * (v1 / v0) ** t : v0 + (v1 - v0) * t; };
  const groups = [...plot.querySelectorAll("g[data-name]")];
  const pointsOf = line => line.getAttribute("points").split(" ").map(point => point.split(",").map(Number));
  const ofRun = g => [...g.querySelectorAll(g.querySelector(".raw") ? ".raw" : "polyline")].flatMap(pointsOf);
  const series = (groups.length ? groups.map(g => [g.dataset.name, ofRun(g)]) : ["train", "held"].map(kind => {
    const raw = plot.querySelector("polyline.raw") && kind == "train" ? ".raw" : "";
    return [kind == "held" ? "held out" : "training", [...plot.querySelectorAll("polyline." + kind + raw)].flatMap(pointsOf)];
  })).filter(([, points]) => points.length);
  const cursor = Object.assign(document.createElement("div"), {className: "cursor", hidden: true});
  area.append(cursor);
  const leave = () => { cursor.hidden = true; output.textContent = ""; };
  area.addEventListener("pointermove", event => {
    const box = area.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * 1000;
    const near = series.map(([name, points]) =>
      [name, points.reduce((a, b) => Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)]);
    const at = near.reduce((a, b) => Math.abs(b[1][0] - x) < Math.abs(a[1][0] - x) ? b : a)[1][0];
    cursor.hidden = false;
    cursor.style.left = at / 10 + "%";
    const step = px => Math.round(s0 + (s1 - s0) * px / 1000).toLocaleString("en");
    output.textContent = "step " + step(at) + near.map(([name, [px, py]]) =>
      " · " + name + " " + show(value(py)) + (Math.abs(px - at) > 2 ? " (step " + step(px) + ")" : "")).join("");
  });
  area.addEventListener("pointerleave", leave);
}
"""


def html_page(name: str, kind: str, body: str, style: str = "", script: str = "") -> str:
    """A page that loads nothing, about what has that name; `body` is HTML."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(name)} · {kind}</title>
<style>{STYLE}{style}</style>
</head>
<body>
<main>
<p class="kicker">{kind.capitalize()}</p>
{body}
</main>
{f"<script>{script}</script>" if script else ""}
</body>
</html>
"""


def bars(rows: Iterable[tuple[str, float, str, str]]) -> str:
    """A table of bars from zero: of each its name, its share of the whole width, what is written behind it, its class."""
    lines = "".join(
        f'<tr class="{kind}"><th>{escape(name)}</th><td class="bar"><i style="width:{share:.1%}"></i></td>'
        f"<td class=n>{text}</td></tr>"
        for name, share, text, kind in rows
    )
    return f"<table>{lines}</table>"
