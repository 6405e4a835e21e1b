// Colours for light, dark and paper; type; tables that become cards on a narrow screen.
#include "oscar/report/style.h"

namespace oscar {

std::string_view report_style() {
  static constexpr std::string_view css = R"css(
:root{color-scheme:light dark;--paper:#fcfbf8;--ink:#1d2125;--soft:#575e66;--rule:#dedad1;--hair:#ebe8e1;
--wash:#f5f2eb;--good:#0b6b62;--care:#8a5a00;--bad:#a32c22;
--c0:#0b6b62;--c1:#b3471d;--c2:#3a5a9b;--c3:#806400;--c4:#8c3f7e;--c5:#56652b;--c6:#a03a50;--c7:#4b5157;--c8:#6a6f75;
--h0:#f4ece0;--h1:#dde8e1;--h2:#bad8cf;--h3:#8dc1b5;--h4:#2b7a70;--h5:#17665d;--h6:#084d46;--hl:#1d2125;--hd:#ffffff;
--r0:#b9aa7d;--r1:#8fae8b;--r2:#54968d;--r3:#2a6f80;--r4:#233f66}
@media screen and (prefers-color-scheme:dark){:root{--paper:#15181b;--ink:#e7e6e2;--soft:#a5acb3;--rule:#3a4046;
--hair:#292e33;--wash:#1c2024;--good:#62cbbb;--care:#e3b04f;--bad:#f28b7d;
--c0:#62cbbb;--c1:#f19a70;--c2:#93b3f2;--c3:#d9ba52;--c4:#dc96cf;--c5:#abc06d;--c6:#f28fa1;--c7:#bfc5ca;--c8:#9aa1a8;
--h0:#2c2722;--h1:#23302e;--h2:#1e403b;--h3:#1b524b;--h4:#3b9f92;--h5:#5bbdae;--h6:#93dfd3;--hl:#e7e6e2;--hd:#07110f;
--r0:#75683f;--r1:#6f8c62;--r2:#5fae9f;--r3:#86c9d8;--r4:#cfe3ff}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:1.0625rem/1.6 "Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Charter,Georgia,"DejaVu Serif",serif}
main{max-width:62rem;margin:0 auto;padding:3.5rem 1.75rem 4rem}
h1,h2,h3{font-weight:600;line-height:1.2;letter-spacing:-.01em;text-wrap:balance}
h1{font-size:2.1rem;margin:.3rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.4rem;margin:0 0 .5rem}
p{margin:0 0 .9rem;max-width:42rem}
.ui,table,dl,figcaption,.kicker,.tiles,svg text,footer,.left-out{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;font-variant-numeric:tabular-nums}
.kicker{font-size:.8rem;letter-spacing:.07em;text-transform:uppercase;color:var(--soft);margin:0}
.under{color:var(--soft);font-size:1rem;overflow-wrap:anywhere}
section{margin-top:3.25rem;padding-top:1.5rem;border-top:1px solid var(--rule)}
.lead{max-width:46rem}
.verdict{margin-top:2.25rem;padding:0 0 0 1.35rem;border:0;border-left:4px solid var(--soft)}
.verdict h2{font-size:1.65rem;margin-bottom:.7rem}
.verdict.close{border-color:var(--good)}.verdict.care{border-color:var(--care)}.verdict.lost{border-color:var(--bad)}
.stand{white-space:nowrap;font-weight:600}
.stand.close{color:var(--good)}.stand.care{color:var(--care)}.stand.lost{color:var(--bad)}.stand.unknown{color:var(--soft);font-weight:400}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1.5rem 0;margin:2.25rem 0 0;padding:1.35rem 0;border:solid var(--rule);border-width:1px 0}
.tiles div{padding:0 1.1rem;border-left:1px solid var(--hair)}
.tiles div:first-child{padding-left:0;border-left:0}
.tiles dt{font-size:.8rem;color:var(--soft);line-height:1.35}
.tiles dd{margin:.15rem 0 0;font-size:1.6rem;font-weight:600;letter-spacing:-.02em;line-height:1.2}
.tiles dd small{display:block;font-size:.8rem;font-weight:400;letter-spacing:0;color:var(--soft);margin-top:.3rem;line-height:1.4}
table{width:100%;border-collapse:collapse;font-size:.875rem;line-height:1.45;margin:1.25rem 0 0}
caption{text-align:left;color:var(--soft);padding:0 0 .6rem;font-size:.84rem;max-width:46rem}
th,td{text-align:right;padding:.55rem 0 .55rem 1.1rem;border-bottom:1px solid var(--hair);vertical-align:top;font-weight:400}
th:first-child,td:first-child{text-align:left;padding-left:0}
thead th{color:var(--soft);border-bottom:1px solid var(--rule);vertical-align:bottom;font-size:.8rem;line-height:1.3}
tbody th{font-weight:600;overflow-wrap:anywhere;min-width:8rem}
tbody th small,td small{display:block;font-weight:400;color:var(--soft);font-size:.8rem}
tr.judged th,tr.judged td{background:var(--wash)}
tr.judged th{box-shadow:inset 3px 0 var(--good);padding-left:.7rem}
table.words td{text-align:left}
table.words th{text-align:left}
.iv{color:var(--soft);white-space:nowrap}
.figures{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:2rem 3rem;margin-top:1.5rem;align-items:start}
.maps{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--map)),1fr));gap:1.6rem 1.4rem;margin-top:1.5rem}
figure{margin:0;break-inside:avoid;min-width:0}
figcaption{font-size:.84rem;line-height:1.5;color:var(--soft);margin-top:.5rem}
figure h3{font:600 .95rem/1.35 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif;letter-spacing:0;margin:0 0 .6rem;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--ink)}
svg .tick,svg .axis-title{fill:var(--soft);font-size:11.5px}
svg .mid{text-anchor:middle}svg .end{text-anchor:end}
svg .value{font-size:11.5px}
svg .grid{stroke:var(--hair)}svg .axis{stroke:var(--soft)}svg .level{stroke:var(--soft);stroke-dasharray:2 3}
svg .line{fill:none;stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
svg .interval{stroke-width:1.6}
svg .m{stroke:var(--paper);stroke-width:1}
.line.s0{stroke:var(--c0);stroke-width:2.6}.line.s1{stroke:var(--c1);stroke-dasharray:7 3}.line.s2{stroke:var(--c2);stroke-dasharray:2 3}.line.s3{stroke:var(--c3);stroke-dasharray:9 3 2 3}
.line.s4{stroke:var(--c4)}.line.s5{stroke:var(--c5);stroke-dasharray:5 2}.line.s6{stroke:var(--c6);stroke-dasharray:1.5 2.5}.line.s7{stroke:var(--c7);stroke-dasharray:11 4}
.interval.s0,.dots.s0{stroke:var(--c0)}.interval.s1,.dots.s1{stroke:var(--c1)}.interval.s2,.dots.s2{stroke:var(--c2)}.interval.s3,.dots.s3{stroke:var(--c3)}.interval.s4,.dots.s4{stroke:var(--c4)}.interval.s5,.dots.s5{stroke:var(--c5)}.interval.s6,.dots.s6{stroke:var(--c6)}.interval.s7,.dots.s7{stroke:var(--c7)}.interval.s8,.dots.s8{stroke:var(--c8)}
.m.s0{fill:var(--c0)}.m.s1{fill:var(--c1)}.m.s2{fill:var(--c2)}.m.s3{fill:var(--c3)}.m.s4{fill:var(--c4)}.m.s5{fill:var(--c5)}.m.s6{fill:var(--c6)}.m.s7{fill:var(--c7)}.m.s8{fill:var(--c8)}
svg .t0{fill:var(--c0);font-weight:600}svg .t1{fill:var(--c1)}svg .t2{fill:var(--c2)}svg .t3{fill:var(--c3)}svg .t4{fill:var(--c4)}svg .t5{fill:var(--c5)}svg .t6{fill:var(--c6)}svg .t7{fill:var(--c7)}svg .t8{fill:var(--c8)}
.line.s8{stroke:var(--c8)}svg .line.thin{stroke-width:1.1}
svg .leader{stroke:var(--rule)}svg .dots{fill:none;stroke-width:3.4;stroke-linecap:round}
.line.r0{stroke:var(--r0)}.line.r1{stroke:var(--r1)}.line.r2{stroke:var(--r2)}.line.r3{stroke:var(--r3)}.line.r4{stroke:var(--r4)}
.line.r0,.line.r1,.line.r2,.line.r3,.line.r4{stroke-width:1.2}
.h0 rect{fill:var(--h0)}.h1 rect{fill:var(--h1)}.h2 rect{fill:var(--h2)}.h3 rect{fill:var(--h3)}.h4 rect{fill:var(--h4)}.h5 rect{fill:var(--h5)}.h6 rect{fill:var(--h6)}
path.h0{fill:var(--h0)}path.h1{fill:var(--h1)}path.h2{fill:var(--h2)}path.h3{fill:var(--h3)}path.h4{fill:var(--h4)}path.h5{fill:var(--h5)}path.h6{fill:var(--h6)}
svg .h0 text,svg .h1 text,svg .h2 text,svg .h3 text{fill:var(--hl)}svg .h4 text,svg .h5 text,svg .h6 text{fill:var(--hd)}
.ramps{white-space:nowrap}
.ramp{display:inline-block;width:1.6em;height:.35em;vertical-align:middle;margin:0 .1em}
.ramp.r0{background:var(--r0)}.ramp.r1{background:var(--r1)}.ramp.r2{background:var(--r2)}.ramp.r3{background:var(--r3)}.ramp.r4{background:var(--r4)}
ul{margin:.3rem 0 0;padding-left:1.15rem;max-width:46rem}
li{margin:.2rem 0}
.notes{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem 3rem;margin-top:2rem}
.notes h3{font-size:1.05rem;margin:0 0 .3rem}
.notes li,.left-out{font-size:.95rem}
dl.facts{display:grid;grid-template-columns:11rem minmax(0,1fr);gap:.45rem 1.25rem;font-size:.875rem;margin:1.1rem 0 0}
dl.facts dt{color:var(--soft)}
dl.facts dd{margin:0;overflow-wrap:anywhere}
dl.terms{display:grid;grid-template-columns:11rem minmax(0,1fr);gap:.6rem 1.25rem;font-size:.9rem;line-height:1.5;margin:1.1rem 0 0}
dl.terms dt{font-weight:600}dl.terms dd{margin:0;max-width:42rem}
pre{font:.82rem/1.55 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--wash);padding:.85rem 1rem;margin:1.1rem 0 0;white-space:pre-wrap;overflow-wrap:anywhere}
code{font:.9em ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.turn{border-top:1px solid var(--hair);padding:.7rem 0}
.turn summary{cursor:pointer;font-weight:600;overflow-wrap:anywhere}.turn summary small{font-weight:400;color:var(--soft);font-size:.8rem}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:1rem 3rem;margin-top:.6rem}
.pair h3{font-size:.9rem;color:var(--soft);margin:0 0 .2rem}
.pair p{margin:0;font-size:.95rem;line-height:1.5;white-space:pre-wrap;overflow-wrap:anywhere}
footer{margin-top:3.25rem;padding-top:1rem;border-top:1px solid var(--rule);font-size:.8rem;color:var(--soft)}
@media (max-width:44rem){
main{padding:1.75rem 1rem 3rem}
h1{font-size:1.6rem}.verdict h2{font-size:1.35rem}.verdict{padding-left:1rem}
section{margin-top:2.5rem}
.figures,.notes,.pair{grid-template-columns:minmax(0,1fr);gap:2.25rem}.pair{gap:1rem}
.notes{gap:1.4rem}
.maps{grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--map)*.92),1fr));gap:1.4rem 1rem}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:1.3rem 0}
.tiles div{padding:0 .9rem}.tiles div:nth-child(odd){padding-left:0;border-left:0}
.tiles dd{font-size:1.35rem}
dl.facts,dl.terms{grid-template-columns:minmax(0,1fr);gap:.1rem}
dl.facts dd,dl.terms dd{margin-bottom:.7rem}
table.stack,table.stack tbody,table.stack caption{display:block}
table.stack thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
table.stack tr{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:.5rem 1rem;padding:.85rem 0;border-bottom:1px solid var(--rule)}
table.stack th,table.stack td,table.stack tr.judged td{display:block;text-align:left;padding:0;border:0;background:none}
table.stack tbody th{grid-column:1/-1;font-size:.95rem}
table.stack td::before{content:attr(data-label);display:block;color:var(--soft);font-size:.75rem;line-height:1.35}
table.stack td:empty{display:none}
table.stack tr.judged th{box-shadow:none;padding:0;background:none}
table.stack tr.judged{background:var(--wash);box-shadow:inset 3px 0 var(--good);margin:0 -.6rem;padding:.85rem .6rem .85rem .9rem}
.iv{white-space:normal}
table.words tr{grid-template-columns:minmax(0,1fr)}
}
@media print{
:root{color-scheme:light}
body{background:#fff;font-size:10pt;line-height:1.45;-webkit-print-color-adjust:exact;print-color-adjust:exact}
main{max-width:none;padding:0}
h1{font-size:18pt}h2{font-size:13pt;break-after:avoid}.verdict h2{font-size:14pt}
section{margin-top:1.6rem;padding-top:.9rem}
p,ul{max-width:none}
tr,figure,.tiles,.verdict,.notes{break-inside:avoid}
.lead,caption,thead{break-after:avoid}
.tiles{grid-template-columns:repeat(auto-fit,minmax(6.5rem,1fr))}
table,dl.facts,dl.terms,pre,figcaption{font-size:8.5pt}
.figures{gap:1.2rem 2rem}
@page{margin:16mm 15mm}
}
)css";
  return css;
}

}  // namespace oscar
