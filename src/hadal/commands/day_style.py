"""The look of the report of a day: one style sheet, light and dark, for screens and for paper.

Colours are few and mean one thing each: prefill, decode, income, cost, what a window measured. All
are told apart by who sees no red or green, for they differ in lightness too.
"""

STYLE = """
:root{color-scheme:light dark;--page:#fbfbf9;--card:#fff;--ink:#1b2026;--soft:#5a646f;--rule:#e3e5e3;--grid:#ecedea;
--prefill:#7aa5d8;--decode:#2f5f98;--income:#2c8c7c;--cost:#c98a3c;--window:#a8487a;--bar:#5f86b5;--warm:#c98a3c;
--mark:#a8487a;--tint:#f3f5f6}
@media (prefers-color-scheme:dark){:root{--page:#14171a;--card:#1a1e22;--ink:#e8eaec;--soft:#9aa5b0;--rule:#2c3238;
--grid:#262b31;--prefill:#8db6e6;--decode:#4679b8;--income:#4cb8a4;--cost:#dba55c;--window:#d982ae;--bar:#739fd2;
--warm:#dba55c;--mark:#d982ae;--tint:#20252a}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;font-variant-numeric:tabular-nums}
main{max-width:1120px;margin:0 auto;padding:44px 24px 72px}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,serif;font-weight:600;
letter-spacing:-.01em}
h1{font-size:36px;line-height:1.15;margin:0 0 12px}
h2{font-size:23px;line-height:1.25;margin:0 0 4px}
h3{font-size:14px;font-weight:600;margin:0 0 2px}
p{margin:0 0 10px;max-width:74ch}
.eyebrow{color:var(--soft);font-size:12px;letter-spacing:.09em;text-transform:uppercase;margin:0 0 8px}
.lead{font-size:17px;color:var(--soft);margin:0}
.lead b{color:var(--ink);font-weight:600}
section{margin-top:52px}
.sub{color:var(--soft);margin:0 0 16px}
.card .sub{font-size:13px;margin:0 0 8px}
.tiles{display:flex;flex-wrap:wrap;gap:1px;background:var(--rule);
border:1px solid var(--rule);border-radius:10px;overflow:hidden;margin:28px 0 0}
.tile{flex:1 1 180px;background:var(--card);padding:16px 18px}
.tile b{display:block;font-size:27px;line-height:1.2;font-weight:600;letter-spacing:-.02em}
.tile span{color:var(--soft);font-size:13px}
.card{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;min-width:0}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px}
.scroll{overflow-x:auto}
.chart{display:block;width:100%;height:auto;font-size:11.5px}
.at-narrow{display:none}
.chart text{fill:var(--ink)}
.chart .tick{fill:var(--soft);font-size:11px}
.chart .caption{fill:var(--soft);font-size:11.5px}
.chart .value{font-size:12px}
.chart .name{font-size:12.5px}
.chart .label,.chart .value,.chart .name{paint-order:stroke;stroke:var(--card);stroke-width:4px;stroke-linejoin:round}
.grid{stroke:var(--grid);stroke-width:1}
.zero{stroke:var(--soft);stroke-width:1;opacity:.6}
.mean{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:4 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.line.demand,.line.fluid,.line.hit{stroke:var(--ink)}
.dot.demand,.dot.fluid,.dot.hit{fill:var(--ink)}
.window{fill:var(--window)}
.area{stroke:none}
.prefill{fill:var(--prefill)}
.decode{fill:var(--decode)}
.income{fill:var(--income)}
.cost{fill:var(--cost)}
.histogram,.asked{fill:var(--bar)}
.case{fill:var(--prefill)}
.mark{stroke:var(--mark);stroke-width:1.3}
.mark.p90,.mark.p99{stroke-dasharray:3 3}
.hover{fill:transparent}
.hover:hover{fill:var(--ink);opacity:.07}
rect[class]:not(.hover):hover{opacity:.75}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:12.5px;color:var(--soft);margin:0 0 6px;max-width:none}
.swatch{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.swatch.prefill{background:var(--prefill)}
.swatch.decode{background:var(--decode)}
.swatch.income{background:var(--income)}
.swatch.cost{background:var(--cost)}
.swatch.window{background:var(--window);border-radius:50%;width:8px;height:8px;vertical-align:1px}
.swatch.demand,.swatch.fluid,.swatch.hit{background:var(--ink);height:2px;width:16px;border-radius:0;vertical-align:4px}
.swatch.mean{height:0;width:16px;border-top:1.5px dashed var(--ink);border-radius:0;vertical-align:4px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
caption{caption-side:top;text-align:left;color:var(--soft);font-size:13px;padding:0 0 8px}
th,td{padding:6px 12px 6px 0;text-align:left;border-bottom:1px solid var(--rule);vertical-align:baseline}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--soft);font-weight:500;font-size:12.5px;vertical-align:bottom}
tbody th{font-weight:400}
.n{text-align:right;white-space:nowrap}
.dim{color:var(--soft)}
thead .n{white-space:normal}
thead .group{text-align:center;border-bottom:1px solid var(--rule)}
tbody tr:hover{background:var(--tint)}
.first td,.first th{font-weight:600}
.small table{font-size:12.5px}
.small th,.small td{padding:4px 10px 4px 0}
details{margin-top:12px}
summary{cursor:pointer;color:var(--soft);font-size:13px;padding:2px 0}
summary:hover{color:var(--ink)}
details>div{margin-top:8px}
.key{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:12px;overflow-wrap:anywhere}
.notes{padding-left:20px;max-width:86ch;overflow-wrap:anywhere}
.notes li{margin:4px 0}
footer{margin-top:56px;border-top:1px solid var(--rule);padding-top:14px;color:var(--soft);font-size:12.5px}
.none{color:var(--soft);font-style:italic}
@media (max-width:640px){main{padding:28px 16px 48px}h1{font-size:28px}.card{padding:14px}section{margin-top:40px}
.at-wide{display:none}.at-narrow{display:block}.chart,.chart .tick,.chart .caption,.chart .value,.chart .name{
font-size:15px}}
@media print{:root{--page:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;--grid:#e4e4e4;color-scheme:light}
body{font-size:11px}main{max-width:none;padding:0}section{margin-top:26px}.card,.tiles,svg,tr,p{break-inside:avoid}.card.small{break-inside:auto}footer{break-before:avoid}
h1,h2,h3,.sub,summary,caption,thead,.legend{break-after:avoid}.scroll{overflow:visible}.at-wide{display:block}
.at-narrow{display:none}
.pair{grid-template-columns:1fr 1fr}details::details-content{content-visibility:visible;block-size:auto}
table{font-size:9.5px}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
