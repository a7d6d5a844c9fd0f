"""The page around the sections: one HTML file with its style and script inside, which fetches nothing.

Colours are variables with a light and a dark value; ours is the only accent, baselines are grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from arborcast.bench.page.html import section_html, sentence_html
from arborcast.bench.page.parts import Section, Sentence

TITLE = "Arborcast: should I believe it?"

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c1e21;--quiet:#646a73;--line:#e3e5e8;--soft:#f5f6f7;
--ours:#0b63b6;--base:#a3a9b1;--base-ink:#6a707a;--loss:#b3261e14;--bad:#b3261e;--good:#1b7a3d;--limit:#1c1e21}
@media(prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e6e8eb;--quiet:#9aa1ab;--line:#2d3137;
--soft:#1c1f23;--ours:#6cb2ff;--base:#6b727c;--base-ink:#a0a7b1;--loss:#ff6b5e1f;--bad:#ff8a80;--good:#7dd69b;
--limit:#e6e8eb}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1120px;padding:2.5rem 1.25rem 5rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;
font-variant-numeric:tabular-nums;-webkit-text-size-adjust:100%}
h1{font-size:1.1rem;font-weight:600;color:var(--quiet);margin:0 0 1.2rem}
h2{font-size:1.45rem;line-height:1.25;font-weight:650;margin:0 0 .3rem;letter-spacing:-.01em}
h3{font-size:1rem;font-weight:650;margin:1.6rem 0 .4rem}
h4{font-size:.84rem;font-weight:600;color:var(--quiet);margin:.9rem 0 .25rem}
p{margin:.5rem 0;max-width:46rem}
section{margin-top:4rem;padding-top:1.4rem;border-top:1px solid var(--line)}
.lead{font-size:1.32rem;line-height:1.5;max-width:50rem;margin:0 0 1rem}
.lead strong{color:var(--ours);font-weight:650}
nav{font-size:.9rem;color:var(--quiet);margin-top:1.6rem}
nav a{color:inherit;margin-right:1.1rem;display:inline-block;text-underline-offset:.2em}
.kind{font-size:.8rem;color:var(--quiet);margin:0 0 1rem}
.quiet,figcaption{color:var(--quiet)}
figcaption{font-size:.8rem;line-height:1.4}
.bad{color:var(--bad)}.good{color:var(--good)}
td.ours{color:var(--ours);font-weight:600}td.base,td.quiet{color:var(--quiet)}
code{font:.88em ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--soft);
padding:.1em .35em;border-radius:3px}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:1.8rem 2.2rem;
margin:1.2rem 0}
.box{min-width:0}.box h3{margin-top:0}
figure{margin:0}figure h3{margin:0 0 .3rem}
svg{display:block;width:100%;height:auto;max-width:440px;font-size:10.5px;overflow:visible}
svg text{fill:var(--quiet)}svg .end{text-anchor:end}svg .middle{text-anchor:middle}
svg .heading{fill:var(--ink);font-weight:600}
svg .rule{stroke:var(--line);stroke-width:1;fill:none}svg .axis{stroke:var(--base);fill:none}
svg .faint{stroke:var(--line);stroke-width:.6;fill:none}
svg .equal{stroke:var(--ink);stroke-width:1;fill:none}svg .touch{fill:transparent}
svg .loss{fill:var(--loss)}svg .loss-name{fill:var(--bad)}
svg .curve{fill:none;stroke-width:1.4;stroke-linejoin:round;stroke:var(--base)}
svg .curve.ours{stroke:var(--ours);stroke-width:2.2}svg .dashed{stroke-dasharray:4 3}
svg circle.ours{fill:var(--ours)}svg circle.base{fill:var(--base)}svg circle.quiet{fill:var(--ink)}
svg .name{font-weight:500}svg .name.ours{fill:var(--ours);font-weight:650}svg .name.base{fill:var(--base-ink)}
svg .limit{stroke:var(--limit);stroke-width:1.6;fill:none}
svg .join{stroke:var(--base);stroke-width:1.6;fill:none}
svg .cable{stroke:var(--base);fill:none}svg .cable.bad{stroke:var(--bad)}
svg .rank{fill:var(--paper);stroke:var(--ink);stroke-width:1.2}
svg .switch{fill:var(--soft);stroke:var(--quiet)}
svg .number{fill:var(--ink);text-anchor:middle}
.bar{display:grid;grid-template-columns:8.6rem 1fr 3.9rem;gap:.6rem;align-items:center;font-size:.8rem;
line-height:1.55}
.bar .label{color:var(--quiet);overflow:hidden;text-overflow:ellipsis;white-space:nowrap;text-align:right}
.bar .track{height:.62rem;border-right:1.6px solid var(--limit)}
.bar .track span{display:block;height:100%;background:var(--base);border-radius:0 2px 2px 0}
.bar.ours .track span{background:var(--ours)}
.bar.ours .label,.bar.ours .value{color:var(--ours);font-weight:600}
.wide{overflow-x:auto;margin:.6rem 0}
table{border-collapse:collapse;font-size:.86rem;line-height:1.45}
th,td{padding:.3rem .9rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--quiet);cursor:pointer;vertical-align:bottom;user-select:none}
th[aria-sort]::after{content:" \\2193"}th[aria-sort=ascending]::after{content:" \\2191"}
.n{text-align:right}th.n{min-width:5.5rem}td.n{white-space:nowrap}td.long:not(.n){min-width:13rem}td:first-child:not(.long){white-space:nowrap}
details{margin:.8rem 0}summary{cursor:pointer;color:var(--quiet);font-size:.86rem}
.circumstances summary{font-size:.78rem}.circumstances{margin-top:1.4rem}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;font-size:.78rem;color:var(--quiet);
margin:.5rem 0}dt{font-weight:600}dd{margin:0;overflow-wrap:anywhere}
footer{margin-top:4rem;color:var(--quiet);font-size:.8rem}
@media(max-width:520px){body{padding:1.4rem 1rem 3rem;font-size:15px}.lead{font-size:1.12rem}
.bar{grid-template-columns:8rem 1fr 3.6rem}dl{grid-template-columns:1fr}dt{margin-top:.3rem}}
@media print{details{display:block}section{break-inside:avoid-page}}
"""

_SCRIPT = """
document.addEventListener("click",function(event){
var head=event.target.closest("th");if(!head)return;
var table=head.closest("table"),body=table.tBodies[0],at=head.cellIndex;
var up=head.getAttribute("aria-sort")==="descending";
function value(row){var cell=row.cells[at],order=cell.getAttribute("data-order");
return order===null?cell.textContent:Number(order);}
var rows=Array.from(body.rows).sort(function(a,b){var x=value(a),y=value(b);
var less=typeof x===typeof y?(x<y?-1:x>y?1:0):(typeof x==="number"?-1:1);return up?less:-less;});
table.querySelectorAll("th").forEach(function(each){each.removeAttribute("aria-sort");});
head.setAttribute("aria-sort",up?"ascending":"descending");
rows.forEach(function(row){body.appendChild(row);});});
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(headline: Sequence[Sentence], sections: Sequence[Section]) -> str:
    """The whole page.

    Args:
        headline: the answer in a few sentences, before everything else.
        sections: in the order in which they are to be read.
    """
    lead = "\n".join(f'<p class="lead">{sentence_html(sentence)}</p>' for sentence in headline)
    links = "".join(f'<a href="#{escape(section.name)}">{escape(section.title)}</a> ' for section in sections)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            f"<title>{escape(TITLE)}</title><style>{_STYLE}</style></head><body>",
            f"<header><h1>{escape(TITLE)}</h1>{lead}<nav>{links}</nav></header>",
            *map(section_html, sections),
            "<footer>Made from the files in bench/results by python bench/report.py; no figure on this page "
            "is typed by hand. Below each section stands at which commit its figures were measured, and "
            "whether the code has changed since. Blue is ours, grey is what it is compared with. Click a "
            "column's head to sort.</footer>",
            f"<script>{_SCRIPT}</script></body></html>\n",
        ]
    )
