// Draws the bill, and recomputes it with the closed forms, which are Python (jaxllm/ledger/report/page/form.py), at each change.
"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const GIB = 2 ** 30;
const byId = id => document.getElementById(id);
const escape = text => String(text).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const capitalized = text => text[0].toUpperCase() + text.slice(1);
const TASKS = {train: "Training", infer: "Inference"};
let task = DATA.task, bills = DATA.first, compute = null;

const known = figure => typeof figure === "number";
const isError = bill => "error" in bill;

function ticks(most) {
  const rough = most / 5, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map(n => n * unit).find(n => n >= rough);
  return Array.from({length: Math.floor(most / step + 1e-9) + 1}, (_, i) => i * step);
}

const number = value => String(+value.toPrecision(6)).replace(/\B(?=(\d{3})+(?!\d)(?!.*\.))/g, ",");
const gib = bytes => bytes / GIB >= 100 ? `${Math.round(bytes / GIB).toLocaleString("en")} GiB`
  : bytes / GIB >= 0.1 ? `${(bytes / GIB).toFixed(bytes / GIB >= 10 ? 1 : 2)} GiB`
  : `${(bytes / 2 ** 20).toFixed(1)} MiB`;

function axis(most, x0, x1, bottom, top) {
  const at = bytes => x0 + (x1 - x0) * bytes / most;
  const unit = most / GIB >= 0.5 ? [GIB, "GiB"] : [2 ** 20, "MiB"];
  const lines = ticks(most / unit[0]).map(value => `<line class="grid" x1="${at(value * unit[0])}" x2="${at(value * unit[0])}"
    y1="${top}" y2="${bottom}"/><text class="quiet" font-size="11.5" x="${at(value * unit[0])}" y="${bottom + 16}"
    text-anchor="middle">${number(value)}</text>`);
  return [at, `${lines.join("")}<text class="quiet" font-size="11.5" x="${x1}" y="${bottom + 32}"
    text-anchor="end">${unit[1]} on one device</text>`];
}

// Stacked bars, one a phase, and the capacity. Bars lie, so that names of any length have a line of their own.
function bars(bill, width) {
  const phases = bill.shown.phases, capacity = bill.capacity_bytes, row = 46, top = 20;
  const most = 1.04 * Math.max(...phases.map(p => p.total), known(capacity) ? capacity : 0);
  const bottom = top + row * phases.length + 4, right = width - 4;
  const [at, grid] = axis(most, 2, right, bottom, top);
  const drawn = phases.map((phase, i) => {
    let start = 0;
    const y = top + i * row + 20;
    const parts = Object.entries(phase.groups).map(([group, bytes]) => {
      const x = at(start), w = Math.max(at(start + bytes) - x, 0.5);
      start += bytes;
      return `<rect x="${x}" y="${y}" width="${w}" height="18" fill="${DATA.colours[group]}"><title>${escape(group)}: ${gib(bytes)}</title></rect>`;
    });
    const weight = phase.name === bill.shown.peak_phase ? 700 : 400;
    return `<text font-size="12.5" font-weight="${weight}" x="2" y="${y - 5}">${escape(capitalized(phase.name))}<tspan class="quiet" dx="8">${gib(phase.total)}</tspan></text>${parts.join("")}`;
  });
  let limit = "";
  if (known(capacity)) {
    const x = at(capacity), end = x > width / 2;
    limit = `<line class="limit" x1="${x}" x2="${x}" y1="14" y2="${bottom}"/><text class="limit-text" font-size="11.5"
      x="${end ? x : x + 4}" y="10" text-anchor="${end ? "end" : "start"}">capacity ${gib(capacity)}</text>`;
  }
  return `<svg viewBox="0 0 ${width} ${bottom + 38}" role="img" aria-label="memory by kind in each phase">${grid}${drawn.join("")}${limit}</svg>`;
}

// Memory over a step or a request: the total of each phase in turn, over the persistent memory.
function course(bill, width) {
  const [always, ...rest] = bill.shown.phases, capacity = bill.capacity_bytes;
  const shown = [always, ...rest, always], top = 24, bottom = 190, left = 52, right = width - 8;
  const most = 1.08 * Math.max(...shown.map(p => p.total), known(capacity) ? capacity : 0);
  const y = bytes => bottom - (bottom - top) * bytes / most;
  const unit = most / GIB >= 0.5 ? [GIB, "GiB"] : [2 ** 20, "MiB"], w = (right - left) / shown.length;
  const grid = ticks(most / unit[0]).map(v => `<line class="grid" x1="${left}" x2="${right}" y1="${y(v * unit[0])}" y2="${y(v * unit[0])}"/>
    <text class="quiet" font-size="11.5" x="${left - 8}" y="${y(v * unit[0]) + 4}" text-anchor="end">${number(v)}</text>`);
  const path = shown.map((p, i) => `${i ? "L" : "M"}${left + i * w},${y(p.total)} L${left + (i + 1) * w},${y(p.total)}`).join(" ");
  const names = shown.map((p, i) => {
    const name = p.name === "persistent" ? (i ? "after" : "before") : p.name;
    const words = name.replace("/", "/ ").replace("mid-", "mid- ").split(" ");
    return words.map((word, j) => `<text class="quiet" font-size="11.5" x="${left + (i + .5) * w}" y="${bottom + 17 + 14 * j}"
      text-anchor="middle">${escape(word)}</text>`).join("") +
      `<text font-size="11.5" x="${left + (i + .5) * w}" y="${y(p.total) - 6}" text-anchor="middle">${w > 72 ? gib(p.total) : ""}</text>`;
  });
  const limit = known(capacity) ? `<line class="limit" x1="${left}" x2="${right}" y1="${y(capacity)}" y2="${y(capacity)}"/>` : "";
  return `<svg viewBox="0 0 ${width} ${bottom + 52}" role="img" aria-label="memory over the phases">
    <text class="quiet" font-size="11.5" x="${left - 8}" y="11" text-anchor="end">${unit[1]}</text>${grid.join("")}
    <path class="area" d="${path} L${right},${bottom} L${left},${bottom} Z"/>
    <rect class="base" x="${left}" y="${y(always.total)}" width="${right - left}" height="${bottom - y(always.total)}"/>
    <path class="step" d="${path}"/>${limit}${names.join("")}</svg>`;
}

function table(bill, phases, peak) {
  const share = bytes => bill.peak_bytes_per_device ? `${(100 * bytes / bill.peak_bytes_per_device).toFixed(1)} %` : "";
  const body = phases.map(phase => {
    const rows = bill.rows.map((row, i) => [row, i]).filter(([row]) => row.phase === phase);
    const sum = rows.reduce((total, [row]) => total + row.bytes_per_device, 0);
    const lines = rows.map(([row, i]) => {
      const how = escape(row.formula.slice(0, row.formula.lastIndexOf(" = ")));
      return `<tr><td class="name"><i style="background:${DATA.colours[bill.shown.groups[i]]}"></i>${escape(row.name)}<small>${how}</small></td>
        <td class="how">${how}</td><td class="bytes" title="${row.bytes_per_device.toLocaleString("en")} B">${bill.shown.texts[i]}</td>
        <td class="share">${phase === "host memory" ? "" : share(row.bytes_per_device)}</td></tr>`;
    });
    return `<tr class="phase"><td colspan="4">${escape(capitalized(phase))}</td></tr>${lines.join("")}
      <tr class="sum"><td>Sum</td><td class="how"></td><td class="bytes">${bill.shown.sums[phase]}</td>
      <td class="share">${phase === "host memory" ? "" : share(sum)}</td></tr>`;
  });
  const last = peak ? `<tr class="peak-row"><td>Peak</td><td class="how"></td><td class="bytes">${bill.shown.peak}</td><td></td></tr>` : "";
  return `<div class="scroll"><table class="bill"><thead><tr><th>memory of one device</th><th class="how">how</th>
    <th class="bytes">bytes</th><th class="share">of peak</th></tr></thead><tbody>${body.join("")}${last}</tbody></table></div>`;
}

function verdict(bill, name) {
  const [kind, word] = bill.fits === null ? ["open", "? Unknown"] : bill.fits ? ["fits", "✓ Fits"] : ["fails", "✕ Does not fit"];
  const of = known(bill.capacity_bytes) ? `of ${bill.shown.capacity} on one device` : "on one device";
  return `<section class="${kind}"><h2>${name}: ${bill.count} × ${escape(bill.device)}</h2>
    <div class="verdict"><span class="badge">${word}</span><span class="peak">${bill.shown.peak}</span><span class="of">${of}</span></div>
    <p class="fact">${escape(capitalized(bill.shown.verdict))}.</p><p class="fact">${escape(bill.shown.work)}.</p>
    <p class="fact">${escape(bill.shown.largest)}.</p></section>`;
}

function bill(one, name, width) {
  if (isError(one)) return `<section class="fails"><h2>${name}</h2><p class="fact">${escape(one.error)}</p></section>`;
  const used = DATA.groups.filter(group => one.shown.phases.some(phase => group in phase.groups));
  const legend = used.map(group => `<li><i style="background:${DATA.colours[group]}"></i>${group}</li>`).join("");
  const first = [...new Set(["persistent", one.shown.peak_phase])];
  const others = [...new Set(one.rows.map(row => row.phase))].filter(phase => !first.includes(phase));
  const more = others.length ? `<details class="more"><summary>${others.map(escape).join(", ")}</summary>${table(one, others, false)}</details>` : "";
  return `${verdict(one, name)}<section><h2>Memory by kind</h2>${bars(one, width)}<ul class="legend">${legend}</ul></section>
    <section><h2>Memory over ${one.task === "train" ? "a step" : "a request"}</h2>${course(one, width)}</section>
    <section><h2>The bill</h2>${table(one, first, true)}${more}<p class="quiet">Device: ${escape(one.shown.source)}.</p></section>`;
}

function comparison() {
  if (!bills.comparison.length) return "";
  const strong = ["peak", "fits", "bottleneck"];
  const rows = bills.comparison.map(line => `<tr class="${strong.includes(line.name) ? "strong" : ""}"><td>${escape(line.name)}</td>
    <td>${escape(line.train)}</td><td>${escape(line.infer)}</td></tr>`);
  return `<section><h2>Training beside inference</h2><div class="scroll"><table class="compare"><thead><tr><th></th><th>training</th>
    <th>inference</th></tr></thead><tbody>${rows.join("")}</tbody></table></div></section>`;
}

function draw() {
  const shown = task === "both" ? ["train", "infer"] : [task], failed = shown.filter(name => isError(bills[name]));
  for (const tab of document.querySelectorAll("[data-task]")) tab.setAttribute("aria-selected", String(tab.dataset.task === task));
  byId("error").hidden = !failed.length;
  byId("result").classList.toggle("stale", failed.length > 0);
  if (failed.length) byId("error").textContent = bills[failed[0]].error;
  if (failed.length === shown.length && byId("result").innerHTML) return;
  const width = Math.max(300, Math.round(byId("result").clientWidth - 42)), good = shown.find(name => !isError(bills[name]));
  if (good) {
    byId("title").textContent = bills[good].model;
    byId("subtitle").textContent = `${bills[good].parameters.toLocaleString("en")} parameters`;
  }
  byId("result").innerHTML = (task === "both" ? comparison() : "") + shown.map(name => bill(bills[name], TASKS[name], width)).join("");
}

const controls = () => [...document.querySelectorAll("#form input, #form select")];
const texts = () => Object.fromEntries(controls().map(control => [control.name, control.value]));

// The devices follow the mesh, and the mesh's data axis the devices, where that can be.
function follow(name) {
  const of = axis => Number(byId(`config.mesh.${axis}`).value);
  if (name === "count") {
    const data = Number(byId("count").value) / (of("tensor") * of("replica"));
    if (Number.isInteger(data) && data > 0) byId("config.mesh.data").value = data;
  } else if (/^config\.mesh\.(data|tensor|replica)$/.test(name)) {
    byId("count").value = of("data") * of("tensor") * of("replica");
  }
}

function recompute() {
  const now = texts(), then = DATA.initial.texts, changed = Object.keys(now).filter(name => now[name] !== then[name]);
  for (const control of controls()) control.closest("label").classList.toggle("changed", changed.includes(control.name));
  byId("overrides").hidden = !changed.length;
  byId("flags").textContent = changed.map(name => `--${name}=${now[name]}`).join(" ");
  if (!compute) return draw();
  const begun = performance.now();
  bills = JSON.parse(compute(JSON.stringify(now), task));
  byId("status").textContent = `recomputed in ${Math.round(performance.now() - begun)} ms`;
  draw();
}

// Starts the Python of the page; `compute` takes the form's texts as JSON and returns the bills as JSON.
function boot() {
  if (compute) return compute;
  const program = JSON.parse(byId("program").textContent), python = globalThis.__BRYTHON__;
  brython({debug: 0, indexedDB: false, ids: [], pythonpath: ["about:blank"]});
  python.use_VFS = true;
  python.stdlib_module_names = [];
  const packages = new Set(Object.keys(program.modules).flatMap(name => name.split(".").map((_, i, all) => all.slice(0, i).join("."))));
  python.VFS = Object.assign({}, python.VFS, program.library);
  for (const [name, source] of Object.entries(program.modules)) python.VFS[name] = [".py", source, [], ...(packages.has(name) ? [1] : [])];
  globalThis.jaxllmInitial = JSON.stringify(DATA.initial);
  python.runPythonSource(`${program.standins}
install(${JSON.stringify(program.absent)}, (${program.jax_version.join(",")},), ${JSON.stringify(program.environment)})
import _json
from browser import window
from ${program.form} import compute
_initial = _json.loads(window.jaxllmInitial)
window.jaxllmCompute = lambda texts, task: _json.dumps(compute(_initial, _json.loads(texts), task))
`, "page");
  return compute = globalThis.jaxllmCompute;
}

byId("form").addEventListener("submit", event => event.preventDefault());
let waiting = 0;
byId("form").addEventListener("input", event => {
  if (event.target.name) follow(event.target.name);
  clearTimeout(waiting);
  waiting = setTimeout(recompute, 120);
});
for (const tab of document.querySelectorAll("[data-task]")) tab.addEventListener("click", () => { task = tab.dataset.task; recompute(); });
const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
byId("theme").addEventListener("click", () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; });
if (matchMedia("(max-width: 860px)").matches) byId("what-if").open = false;
let drawnAt = innerWidth;
addEventListener("resize", () => { if (drawnAt !== innerWidth) { drawnAt = innerWidth; draw(); } });
draw();
addEventListener("load", () => setTimeout(() => {
  boot();
  byId("status").textContent = "change anything: the formulas run here";
}, 30));
