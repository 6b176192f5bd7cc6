"""The frame of a page: one self-contained HTML file, light or dark as the reader's system.

Called by the pages. What always holds: the page loads nothing; without JavaScript it shows the same, only
without the values at the pointer.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import torchquorum
from torchquorum.errors import ConfigError
from torchquorum.formats.storage import Location, write_whole
from torchquorum.report.scene import DARK, LIGHT, Scene
from torchquorum.report.svg import to_svg

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1340px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:24px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:17px;margin:34px 0 10px}
p{margin:6px 0}.dim{color:var(--dim)}.lead{max-width:78ch}.lead li{margin:4px 0}
ul{padding-left:20px;margin:8px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px;margin:18px 0}
.tile,.card{background:var(--surface);border:1px solid var(--grid);border-radius:8px}
.tile{padding:10px 12px}.tile b{display:block;font-size:21px;font-weight:600;white-space:nowrap}
.tile span{color:var(--dim);font-size:13px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:14px}
.card{padding:6px;position:relative;max-width:640px}
.card svg{display:block;width:100%;height:auto;font-family:inherit}
.scroll{overflow-x:auto;background:var(--surface);border:1px solid var(--grid);border-radius:8px}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;width:100%}
th,td{padding:6px 12px;text-align:right;white-space:nowrap;border-top:1px solid var(--grid)}
thead th{border-top:0;color:var(--dim);font-weight:500}
th:first-child,td:first-child{text-align:left}
table.words td{text-align:left;white-space:normal;overflow-wrap:anywhere}
table.words td:first-child{color:var(--dim);width:14em}
.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
.tip{position:absolute;pointer-events:none;background:var(--ink);color:var(--surface);border-radius:5px;padding:4px 8px;
font-size:12.5px;line-height:1.4;white-space:nowrap;display:none;z-index:2}
footer{margin-top:36px;color:var(--dim);font-size:13px}
code{font-size:.92em}
@media(max-width:520px){main{padding:16px 10px 40px}h1{font-size:20px}.tiles{grid-template-columns:repeat(2,1fr)}
table.words td:first-child{width:8em}}
@media print{body{background:#fff}.card,.tile{break-inside:avoid}}
"""

# At the pointer: the values of every line of the chart at that x.
_JS = """
function point(part) { for (const svg of part.querySelectorAll('svg[data-axes]')) {
  const [ax, ay] = JSON.parse(svg.dataset.axes), card = svg.parentElement;
  const tip = card.appendChild(document.createElement('div')); tip.className = 'tip';
  const rule = svg.appendChild(document.createElementNS('http://www.w3.org/2000/svg', 'line'));
  rule.setAttribute('stroke', 'var(--dim)'); rule.setAttribute('visibility', 'hidden');
  rule.setAttribute('y1', ay.start); rule.setAttribute('y2', ay.end);
  const f = {log: Math.log10, share: v => -Math.log10(Math.max(1 - v, 1e-4)), linear: v => v};
  const g = {log: v => 10 ** v, share: v => 100 * (1 - 10 ** -v), linear: v => v};
  const value = (a, px) => {
    const lo = f[a.kind](a.low), hi = f[a.kind](a.high);
    return g[a.kind](lo + (px - a.start) / (a.end - a.start) * (hi - lo));
  };
  const show = v => Math.abs(v) >= 1000 ? Math.round(v).toLocaleString('en') : String(+v.toPrecision(3));
  const lines = [...svg.querySelectorAll('polyline[data-name]')].map(p => [p.dataset.name,
    p.getAttribute('points').split(' ').map(q => q.split(',').map(Number)), p.getAttribute('stroke')]);
  const hide = () => { tip.style.display = 'none'; rule.setAttribute('visibility', 'hidden'); };
  svg.addEventListener('pointerleave', hide);
  svg.addEventListener('pointermove', e => {
    const box = svg.getBoundingClientRect(), px = (e.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    if (px < ax.start || px > ax.end) return hide();
    tip.replaceChildren(document.createTextNode(show(value(ax, px)) + ' ' + ax.unit));
    for (const [name, points] of lines) {
      const near = points.reduce((a, b) => Math.abs(b[0] - px) < Math.abs(a[0] - px) ? b : a);
      const row = tip.appendChild(document.createElement('div'));
      row.textContent = name + ': ' + show(value(ay, near[1])) + (ay.unit ? ' ' + ay.unit : '');
    }
    rule.setAttribute('x1', px); rule.setAttribute('x2', px); rule.setAttribute('visibility', 'visible');
    tip.style.display = 'block';
    const x = e.clientX - card.getBoundingClientRect().left;
    tip.style.left = Math.max(4, Math.min(x + 14, card.clientWidth - tip.offsetWidth - 4)) + 'px';
    tip.style.top = (e.clientY - card.getBoundingClientRect().top + 14) + 'px';
  });
} }
point(document);
"""


def page(title: str, body: Sequence[str], *, below: str = "This file is self-contained.", script: str = "") -> str:
    """Returns a whole HTML page; `below` is the sentence at its end."""
    light, dark = ("".join(f"--{name}:{value};" for name, value in theme.items()) for theme in (LIGHT, DARK))
    style = f":root{{color-scheme:light dark;{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}{_CSS}"
    made = f"Made by torchquorum {torchquorum.__version__}. {escape(below)}"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<link rel="icon" href="data:,">',  # otherwise the browser requests one
            f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n<main>",
            *body,
            f"<footer>{made}</footer>\n</main>\n<script>{_JS}{script}</script>\n</body>\n</html>\n",
        ]
    )


def write_page(text: str, path: Location) -> None:
    """Writes a page, atomically.

    Raises:
        ConfigError: It cannot be written there.
    """
    try:
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror}); choose another path with --output") from None


def heading(title: str, below: str) -> str:
    """Returns the title and the line below it."""
    return f'<h1>{escape(title)}</h1>\n<p class="dim">{escape(below)}</p>'


def section(title: str) -> str:
    """Returns a heading between parts."""
    return f"<h2>{escape(title)}</h2>"


def tiles(entries: Sequence[tuple[str, str]]) -> str:
    """Returns a row of figures with their names."""
    inner = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in entries
    )
    return f'<div class="tiles">{inner}</div>'


def cards(scenes: Sequence[Scene]) -> str:
    """Returns charts in a grid that fits the width."""
    return '<div class="cards">' + "\n".join(f'<div class="card">{to_svg(s)}</div>' for s in scenes) + "</div>"


def sentences(lines: Sequence[str]) -> str:
    """Returns a list of sentences."""
    return (
        '<ul class="lead">' + "".join(f"<li>{escape(line).replace(' %', '&nbsp;%')}</li>" for line in lines) + "</ul>"
        if lines
        else ""
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]], colours: Sequence[str] = ()) -> str:
    """Returns a table of figures; `colours` mark the first cells."""
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = []
    for i, row in enumerate(rows):
        mark = f'<span class="swatch" style="background:var(--{colours[i]})"></span>' if colours else ""
        body.append(
            "<tr>" + "".join(f"<td>{mark if j == 0 else ''}{escape(c)}</td>" for j, c in enumerate(row)) + "</tr>"
        )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def word_table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns a table of names and descriptions."""
    body = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<div class="scroll"><table class="words"><tbody>{body}</tbody></table></div>'
