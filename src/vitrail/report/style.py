"""The pages' style sheet: light and dark, narrow and wide, nothing from elsewhere."""

STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1c1e21;--soft:#55595f;--rule:#dcdcd6;--grid:#e8e8e3;
--a:#1f62c4;--b:#b8430a;--c:#6d6f75;--fill-a:#1f62c433;--fill-b:#b8430a2e;--mark:#b8430a;--bad:#a4230f;--good:#17693a;
--maybe:#7a5200;--note:#f1efe6}
@media (prefers-color-scheme:dark){:root{--page:#131519;--card:#1c1f25;--ink:#e9eaec;--soft:#a9aeb6;--rule:#363b44;
--grid:#2b2f37;--a:#7db1ff;--b:#ffa163;--c:#a0a4ac;--fill-a:#7db1ff3d;--fill-b:#ffa16338;--mark:#ffa163;--bad:#ff9a85;
--good:#7ed6a0;--maybe:#f0c469;--note:#262a31}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",sans-serif}
main{max-width:1120px;margin:0 auto;padding:20px 16px 60px}
h1{font-size:1rem;font-weight:600;color:var(--soft);margin:8px 0 4px;overflow-wrap:anywhere}
h2{font-size:1.3rem;line-height:1.25;margin:0 0 6px}
h3{font-size:1.02rem;margin:22px 0 4px}
h4{font-size:.9rem;font-weight:600;margin:14px 0 5px}
p{margin:6px 0 10px;max-width:76ch}
section,header{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;margin:16px 0;
overflow-wrap:anywhere}
.answer{font-size:1.45rem;line-height:1.3;font-weight:650;margin:4px 0 8px;max-width:60ch}
.badge{display:inline-block;border:1.5px solid currentColor;border-radius:99px;padding:1px 12px;font-weight:650;
font-size:.9rem}
.artifacts{color:var(--bad)}.none{color:var(--good)}.uncertain{color:var(--maybe)}
.soft,figcaption{color:var(--soft);font-size:.9rem}
.note{background:var(--note);border-radius:6px;padding:7px 11px;font-size:.92rem;max-width:none}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px;margin:14px 0 4px;padding:0}
.tiles div{border:1px solid var(--rule);border-radius:8px;padding:8px 12px}
.tiles dt{color:var(--soft);font-size:.83rem}
.tiles dd{margin:0;font-size:1.25rem;font-weight:650;font-variant-numeric:tabular-nums}
nav a{display:inline-block;margin:2px 14px 2px 0}
a{color:var(--a)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:14px 26px}
figure{margin:10px 0}
figcaption{margin-top:4px;max-width:76ch}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,240px),1fr));gap:16px}
.pictures.small{grid-template-columns:repeat(auto-fill,minmax(min(100%,150px),1fr))}
.pictures figure{margin:0}
.panels{display:flex;gap:6px}
.panels>*{flex:1 1 0;min-width:0}
.strip{display:grid;grid-template-columns:repeat(auto-fit,minmax(104px,1fr));gap:8px}
.strip+.strip{margin-top:12px}
.strip div{min-width:0;max-width:210px}
.strip span{display:block;font-size:.8rem;color:var(--soft)}
.panel{display:block;width:100%;height:auto;border-radius:4px;background:var(--grid)}
.panel image.map{image-rendering:pixelated}
.casing{fill:none;stroke:#000;stroke-opacity:.75;stroke-width:4;vector-effect:non-scaling-stroke}
.outlier{fill:none;stroke:#ff5fa2;stroke-width:2;vector-effect:non-scaling-stroke}
.box{fill:none;stroke-width:3;vector-effect:non-scaling-stroke}
.lost{stroke:#ffd23f}.tokencut{stroke:#4dd2ff;stroke-dasharray:7 4}.truth{stroke:#fff;stroke-dasharray:2 3}
.key{display:inline-block;width:1.7em;border-top:3px solid;margin:0 6px 4px 0;vertical-align:middle}
.explained{white-space:nowrap;margin-right:16px}
.key.k-lost{border-color:#d9a800}.key.k-tokencut{border-color:#1c9fd0;border-top-style:dashed}
.key.k-truth{border-color:var(--soft);border-top-style:dotted}
.key.s0{border-color:var(--a)}.key.s1{border-color:var(--b)}.key.s2{border-color:var(--c);border-top-style:dashed}
.key.band{border-top-width:9px;border-color:var(--fill-a)}
.ramp{display:flex;align-items:center;gap:8px;font-size:.85rem;color:var(--soft);margin:6px 0 12px;max-width:420px}
.ramp i{flex:1;height:11px;border-radius:3px}
.chart{display:block;width:100%;max-width:510px;height:auto;font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
.chart text{fill:var(--soft);font-variant-numeric:tabular-nums}
.chart .name{fill:var(--ink)}
.chart .grid{stroke:var(--grid)}.chart .axis,.chart .tick{stroke:var(--soft)}
.chart .area{stroke-width:1.5;stroke-linejoin:round}
.chart .s0{stroke:var(--a);fill:var(--fill-a)}.chart .s1{stroke:var(--b);fill:var(--fill-b)}
.chart .line{fill:none;stroke-width:2}.chart .line.s2{stroke:var(--c);stroke-dasharray:5 4}
.chart .dot{stroke:none;fill:var(--a)}.chart .dot.s1{fill:var(--b)}.chart .dot.s2{fill:var(--c)}
.chart .thin{stroke-width:1.3;stroke-dasharray:4 3}
.chart .band{fill:var(--fill-a);stroke:none}
.chart .mark{stroke:var(--mark);stroke-width:1.6;stroke-dasharray:4 3}
.chart .marked{fill:var(--mark);font-weight:600}
.chart .bar{fill:var(--fill-a);stroke:var(--a)}.chart .interval{stroke:var(--ink);stroke-width:2}
.scroll{overflow-x:auto;margin:4px 0 10px}
.scroll:focus-visible{outline:2px solid var(--a)}
table{border-collapse:collapse;font-size:.93rem;font-variant-numeric:tabular-nums}
th,td{padding:4px 14px 4px 0;text-align:left;border-bottom:1px solid var(--rule);vertical-align:top}
td{white-space:nowrap}
td.long{white-space:normal;min-width:12em}
tbody th{min-width:8.5em}
thead th{overflow-wrap:normal}
thead th{color:var(--soft);font-weight:600}
tbody th{font-weight:500}
ul{padding-left:1.2em;margin:6px 0}li{margin:5px 0;max-width:76ch}
code{font:.9em ui-monospace,SFMono-Regular,Menlo,monospace;overflow-wrap:anywhere}
details{margin-top:10px}details summary{cursor:pointer}
@media (max-width:520px){main{padding:8px 8px 40px}section,header{padding:14px 13px;border-radius:8px}
.answer{font-size:1.2rem}}
@media print{section,header{break-inside:avoid;border:none}nav{display:none}}
"""
