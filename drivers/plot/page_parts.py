"""The style sheet and the script of a snapshot's page."""

PAGE_STYLE = """
:root{color-scheme:light dark;--page:#fff;--ink:#1b1d21;--faint:#6b7280;--line:#d0d3d8;--blue:#0072b2;--red:#d55e00;
--amber:#e69f00;--keep:0 114 178;--panel:#f5f6f8}
@media(prefers-color-scheme:dark){:root{--page:#16181c;--ink:#e6e8eb;--faint:#8b919b;--line:#3a3e45;--blue:#56b4e9;
--red:#ff8a3d;--amber:#e6b04a;--keep:86 180 233;--panel:#1f2227}}
body{background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:74rem;margin:1.5rem auto;
padding:0 1rem}
h1{font-size:1.3rem}h2{font-size:1.05rem;margin-top:2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.numbers td,.numbers th{padding:.1rem .5rem;text-align:right;border-bottom:1px solid var(--line);font-weight:400}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem}dt{color:var(--faint)}dd{margin:0;
overflow-wrap:anywhere}
figure{margin:1rem 0;overflow-x:auto}figure svg{width:100%;height:auto;min-width:40rem}#kept svg{width:24rem;
min-width:0;max-width:100%}
.scroll{overflow-x:auto}.note{border-left:3px solid var(--amber);padding-left:.7rem}
#tokens{font:15px/1.75 ui-monospace,monospace;white-space:pre-wrap;overflow-wrap:anywhere;min-width:0}
#tokens b{font-weight:400;border-radius:2px;cursor:default}#tokens b:hover,#tokens .at{outline:2px solid var(--red)}
#tokens hr{border:0;border-top:2px solid var(--red);margin:.4rem 0}
#tokens .u{font-style:italic;color:var(--faint)}.n{text-decoration:underline dotted var(--faint);
text-underline-offset:.25em}
.legend{margin-left:.7rem}.legend b{font:12px ui-monospace,monospace;white-space:pre;padding:.15rem .2rem}
.tools label{margin-right:.4rem}select{font:inherit}
.s0{color:var(--faint)}
@@LEVELS@@
.two{display:grid;grid-template-columns:minmax(0,1fr) 17rem;gap:1.5rem}
aside{position:sticky;top:1rem;align-self:start;max-height:calc(100vh - 2rem);overflow:auto;background:var(--panel);
border-radius:6px;padding:.2rem .9rem .7rem;font-size:13px}
aside td,aside th{font-weight:400;padding:0 1px;text-align:right}aside th{padding-right:.4rem;color:var(--faint)}
aside i{display:block;width:.8rem;height:.8rem;border-radius:2px;border:1px solid var(--line);box-sizing:border-box}
aside i.k{background:var(--blue);border-color:var(--blue)}aside code{white-space:pre-wrap}
@media(max-width:50rem){.two{grid-template-columns:1fr}aside{order:-1;top:0;
max-height:35vh}}
""".replace("@@LEVELS@@", "".join(f".s{n}{{background:rgb(var(--keep)/{0.03 + 0.065 * n:.3f})}}" for n in range(1, 11)))
PAGE_SCRIPT = """
"use strict";(()=>{
const get=id=>document.getElementById(id),data=JSON.parse(get("data").textContent),heads=data.heads;
const tokens=[...get("tokens").querySelectorAll("b")],which=get("which");
const bit=(mask,i)=>parseInt(mask[i>>2],16)>>(3-i%4)&1;
const make=(name,text,into)=>{const made=document.createElement(name);made.textContent=text;
 if(into)into.append(made);return made};
let chosen=null;
function show(token){
 if(chosen)chosen.classList.remove("at");
 (chosen=token).classList.add("at");
 which.textContent="";
 make("p","position "+tokens.indexOf(token)+", token id "+token.dataset.i,which);
 make("code",JSON.stringify(token.textContent),which);
 if(token.dataset.m===undefined){make("p","not yet in the cache",which);return}
 const mask=data.masks[token.dataset.m],table=make("table","",null);
 let all=0;
 const top=make("tr","",table);make("th","layer",top);
 for(let h=0;h<heads;h++)make("th",h,top).title="KV head "+h;
 data.layers.forEach((layer,l)=>{
  const row=make("tr","",table);make("th",layer,row);
  for(let h=0;h<heads;h++){
   const kept=bit(mask,l*heads+h),cell=make("i","",make("td","",row));all+=kept;
   cell.title="layer "+layer+", KV head "+h+(kept?": kept":": evicted");if(kept)cell.className="k"}
 });
 make("p","kept by "+all+" of "+heads*data.layers.length+" KV heads"+(token.classList.contains("n")?
  "; not yet judged by every one":""),which);
 which.append(table);
}
for(const event of["pointerover","click"])get("tokens").addEventListener(event,e=>{
 if(e.target.dataset.i!==undefined)show(e.target)});
function shade(){
 const layer=+get("layer").value,head=+get("head").value,picked=[];
 data.layers.forEach((_,l)=>{for(let h=0;h<heads;h++)
  if((layer<0||l===layer)&&(head<0||h===head))picked.push(l*heads+h)});
 const levels=data.masks.map(mask=>Math.ceil(10*picked.reduce((n,i)=>n+bit(mask,i),0)/picked.length));
 for(const token of tokens)if(token.dataset.m!==undefined)
  token.className="s"+levels[token.dataset.m]+(token.classList.contains("n")?" n":"")+(token===chosen?" at":"");
}
for(const id of["layer","head"])get(id).addEventListener("change",shade);
})();
"""
