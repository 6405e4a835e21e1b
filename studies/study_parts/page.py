"""The study as one HTML page: no script, no network, light, dark and print, readable from 390 px on."""
import re
from html import escape

from .blocks import Chart, Code, Content, Section, Table

WIDE = 7  # columns, above which an interval stands below its number

STYLE = """
:root{color-scheme:light dark;--paper:#fcfbf8;--ink:#1d2125;--soft:#575e66;--rule:#dedad1;--hair:#ebe8e1;--wash:#f5f2eb;
--c0:#0b6b62;--c1:#b3471d;--c2:#3a5a9b;--c3:#806400;--c4:#8c3f7e;--c5:#56652b;--c6:#a03a50;--c7:#4b5157}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15181b;--ink:#e7e6e2;--soft:#a5acb3;--rule:#3a4046;
--hair:#292e33;--wash:#1c2024;--c0:#62cbbb;--c1:#f19a70;--c2:#93b3f2;--c3:#d9ba52;--c4:#dc96cf;--c5:#abc06d;--c6:#f28fa1;
--c7:#bfc5ca}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:1.0625rem/1.6 Charter,"Iowan Old Style",Georgia,"DejaVu Serif",serif}
main{max-width:66rem;margin:0 auto;padding:3rem 1.75rem 4rem}
h1,h2{font-weight:600;line-height:1.2;text-wrap:balance}
h1{font-size:2rem;margin:0 0 1rem}h2{font-size:1.4rem;margin:0 0 .5rem}
p{margin:0 0 .9rem;max-width:44rem}
section{margin-top:3rem;padding-top:1.5rem;border-top:1px solid var(--rule)}
table,figcaption,svg text{font-family:system-ui,"Segoe UI",Roboto,Arial,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
table{width:100%;border-collapse:collapse;font-size:.875rem;line-height:1.45;margin:1.25rem 0 0}
caption{text-align:left;color:var(--soft);padding:0 0 .6rem;font-size:.84rem}
th,td{text-align:right;padding:.5rem 0 .5rem 1rem;border-bottom:1px solid var(--hair);vertical-align:top;font-weight:400}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);border-bottom:1px solid var(--rule);vertical-align:bottom;font-size:.8rem}
tbody th{font-weight:600;min-width:9rem}
tr.marked th,tr.marked td{background:var(--wash)}
tr.marked th{box-shadow:inset 3px 0 var(--c0);padding-left:.7rem}
table+p{margin-top:1.25rem}
table.words td{text-align:left;overflow-wrap:anywhere}table.words td:last-child{overflow-wrap:normal}table.words th{text-align:left}
.iv{color:var(--soft);white-space:nowrap}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.5rem 2.5rem;margin-top:1.25rem}
figure{margin:0;max-width:36rem;break-inside:avoid}
figcaption{font-size:.84rem;color:var(--soft);margin-top:.4rem}
svg{display:block;width:100%;height:auto}
svg text{font-size:12px;fill:var(--ink)}svg .tick{fill:var(--soft);font-size:11.5px}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}svg .grid{stroke:var(--hair)}svg .band{fill:var(--wash)}svg .equal{stroke:var(--soft)}
svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round}svg .m{stroke:var(--paper)}
.line.s0{stroke:var(--c0)}.line.s1{stroke:var(--c1);stroke-dasharray:7 3}.line.s2{stroke:var(--c2);stroke-dasharray:2 3}
.line.s3{stroke:var(--c3);stroke-dasharray:9 3 2 3}.line.s4{stroke:var(--c4)}.line.s5{stroke:var(--c5);stroke-dasharray:5 2}
.line.s6{stroke:var(--c6);stroke-dasharray:2 2}.line.s7{stroke:var(--c7);stroke-dasharray:11 4}
.line.whisker{stroke-dasharray:none}
.m.s0{fill:var(--c0)}.m.s1{fill:var(--c1)}.m.s2{fill:var(--c2)}.m.s3{fill:var(--c3)}.m.s4{fill:var(--c4)}
.m.s5{fill:var(--c5)}.m.s6{fill:var(--c6)}.m.s7{fill:var(--c7)}
pre{font:.8rem/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--wash);padding:.85rem 1rem;
margin:1.1rem 0 0;white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.9em ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media (min-width:44.01rem){
table.wide td{padding-left:.6rem}table.wide tbody th{min-width:7.5rem}table.wide .iv{display:block;font-size:.72rem}
}
@media (max-width:44rem){
main{padding:1.75rem 1rem 3rem}h1{font-size:1.55rem}section{margin-top:2.25rem}
table,tbody,caption{display:block}
thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
tr{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.4rem 1rem;padding:.8rem 0;border-bottom:1px solid var(--rule)}
th,td,tr.marked th,tr.marked td{display:block;text-align:left;padding:0;border:0;background:none;box-shadow:none}
tbody th{grid-column:1/-1}
td::before{content:attr(data-label);display:block;color:var(--soft);font-size:.75rem}
td:empty{display:none}
tr.marked{background:var(--wash);box-shadow:inset 3px 0 var(--c0);margin:0 -.6rem;padding:.8rem .6rem .8rem .9rem}
.iv{white-space:normal}table.words tr{grid-template-columns:minmax(0,1fr)}
}
@media print{
:root{color-scheme:light}body{background:#fff;font-size:10pt}main{max-width:none;padding:0}p{max-width:none}
h1{font-size:18pt}h2{font-size:13pt;break-after:avoid}section{margin-top:1.4rem;padding-top:.8rem}
tr{break-inside:avoid}table,pre,figcaption{font-size:8.5pt}.figures{grid-template-columns:1fr 1fr}@page{margin:15mm}
}
"""


def _words(text: str) -> str:
    """Text with `code` and **strong** words."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", text)


def _figure_cell(text: str) -> str:
    """A number with its interval set apart."""
    return re.sub(r" (\[[^\]]+\])$", r' <span class="iv">\1</span>', _words(text))


def _table(table: Table) -> str:
    numbers = all(any(c.isdigit() for c in cell) or not cell for row in table.rows for cell in row[-1:])
    head = "".join(f'<th scope="col">{_words(c)}</th>' for c in table.columns)
    body = []
    for index, row in enumerate(table.rows):
        cells = "".join(f'<td data-label="{escape(label)}">{_figure_cell(cell)}</td>'
                        for label, cell in zip(table.columns[1:], row[1:]))
        marked = ' class="marked"' if index in table.marked else ""
        body.append(f'<tr{marked}><th scope="row">{_words(row[0])}</th>{cells}</tr>')
    kinds = [kind for kind, given in (("words", not numbers), ("wide", len(table.columns) > WIDE)) if given]
    kind = f' class="{" ".join(kinds)}"' if kinds else ""
    return (f'<table{kind}><caption>{_words(table.caption)}</caption>'
            f'<thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>')


def _blocks(section: Section) -> str:
    parts, figures = [], []

    def put_figures() -> None:
        if figures:
            parts.append(f'<div class="figures">{"".join(figures)}</div>')
            figures.clear()

    for block in section.blocks:
        if isinstance(block, Chart):
            if block.svg:
                figures.append(f"<figure>{block.svg}<figcaption>{_words(block.title)}</figcaption></figure>")
            continue
        put_figures()
        if isinstance(block, Table):
            parts.append(_table(block))
        elif isinstance(block, Code):
            parts.append(f"<pre>{escape(block.text)}</pre>")
        else:
            parts.append(f"<p>{_words(block)}</p>")
    put_figures()
    return "".join(parts)


def render(content: Content) -> str:
    sections = "".join(f"<section><h2>{_words(s.title)}</h2>{_blocks(s)}</section>\n" for s in content.sections)
    lead = "".join(f"<p>{_words(p)}</p>" for p in content.lead)
    return (f'<!DOCTYPE html>\n<html xmlns="http://www.w3.org/1999/xhtml" lang="en"><head><meta charset="utf-8"/>'
            f'<meta name="viewport" content="width=device-width,initial-scale=1"/><title>{escape(content.title)}</title>'
            f"<style>{STYLE}</style></head><body><main><h1>{_words(content.title)}</h1>{lead}\n{sections}"
            "</main></body></html>\n")
