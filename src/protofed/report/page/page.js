// The page: `update(data)` shows what a report consists of, at first and whenever there is something new.
"use strict";

const state = { data: null, hidden: new Set(), chosen: {}, theme: null, printing: false, turn: 0 };
const SYMBOLS = { circle: "●", diamond: "◆", star: "★", square: "■" };
const DASHES = { solid: "", dash: "5 3", dot: "2 2", dashdot: "6 2 2 2" };
const WORDS = 12; // pixels of the letters beside a bar
const LINE = 10; // pixels that a name beside a heat map takes
const PAPER = { wide: 670, narrow: 325 }; // pixels on a printed page

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isDark = () => !state.printing && document.documentElement.dataset.theme === "dark";
const shade = (colour) => (isDark() && state.data.dark[colour]) || colour;

// ---- a hand on the page ----

const SETTLED = 400; // milliseconds after a pointer is let go: plotly has then zoomed, or seen a double click
const hand = { on: null, timer: null, waiting: [] };

function letGo() {
  if (!hand.on) return;
  hand.timer ??= setTimeout(() => {
    hand.on = hand.timer = null;
    for (const go of hand.waiting.splice(0)) go();
  }, SETTLED);
}

/** Wait while a pointer is down on what matches: a drag that meets new data would be lost. */
async function untouched(where = "*") {
  while (hand.on?.closest?.(where)) await new Promise((go) => hand.waiting.push(go));
}

addEventListener("pointerdown", (event) => {
  clearTimeout(hand.timer);
  Object.assign(hand, { on: event.target, timer: null });
}, true);
addEventListener("pointermove", (event) => event.buttons || letGo(), true); // let go where nobody saw it
for (const end of ["pointerup", "pointercancel"]) addEventListener(end, letGo, true);
addEventListener("blur", letGo);

// ---- what is shown before and after the figures ----

function swatch(method, colour = shade(method.colour)) {
  const name = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(name, "svg");
  svg.setAttribute("viewBox", "0 0 22 10");
  const line = document.createElementNS(name, "line");
  const look = { x1: 1, y1: 5, x2: 21, y2: 5, "stroke-width": 3.5, stroke: colour, "stroke-dasharray": DASHES[method.dash] };
  for (const [key, value] of Object.entries(look)) line.setAttribute(key, value);
  svg.append(line);
  return svg;
}

function showMethods() {
  const buttons = state.data.methods.map((method) =>
    make("button", {
      type: "button", class: "method", "data-label": method.label, title: `Hide or show ${method.label} in all figures`,
      "aria-pressed": String(!state.hidden.has(method.label)), onclick: () => toggle(method.label),
    }, swatch(method), method.name));
  byId("methods").replaceChildren(...buttons);
  byId("all").hidden = !state.hidden.size;
}

function toggle(label) {
  if (!state.hidden.delete(label)) state.hidden.add(label);
  showMethods();
  dimRows();
  draw();
}

function dimRows() {
  for (const row of document.querySelectorAll("tr[data-label]")) row.classList.toggle("off", state.hidden.has(row.dataset.label));
}

function alertBox(title, lines) {
  return make("div", { class: "alert", role: "alert" }, make("strong", {}, title), make("ul", {}, ...lines.map((line) => make("li", {}, line))));
}

/** One line for all folders of which the same is to be said. */
function byReason(remarks) {
  const folders = new Map();
  for (const [folder, why] of remarks) folders.set(why, [...(folders.get(why) || []), folder]);
  return [...folders].map(([why, some]) => `${some.join(", ")}: ${why}`);
}

function showAlerts(data) {
  const boxes = [];
  if (data.incomparable.length) boxes.push(alertBox("These runs cannot be compared as they are.", data.incomparable));
  if (data.left_out.length) boxes.push(alertBox("Left out:", byReason(data.left_out)));
  if (data.remarks.length) boxes.push(alertBox("Not all could be read:", byReason(data.remarks)));
  if (!data.methods.length) boxes.push(alertBox("Nothing to show yet.", ["No run has finished a round."]));
  byId("alerts").replaceChildren(...boxes);
}

function titled(column) {
  return column.about ? make("abbr", { title: column.about }, column.title) : column.title;
}

/** A number and its deviation, which may go below it where there is little room. */
function spread(text) {
  return text.split(/ (?=±)/).flatMap((part, i) => [i ? " " : "", make("span", { class: "part" }, part)]);
}

function showSummary(data) {
  const table = data.summary;
  const head = make("tr", {}, make("th", {}, "method"), ...table.columns.map((column) => make("th", {}, titled(column))));
  const rows = table.rows.map((row) =>
    make("tr", { "data-label": row.label },
      make("td", {}, make("span", { class: "name" }, row.label), make("span", { class: "about" }, row.about)),
      ...row.cells.map((cell) => make("td", { class: ["", "best", "second"][cell.place] }, ...spread(cell.text)))));
  const ranked = table.rows.some((row) => row.cells.some((cell) => cell.place));
  return section("summary", "Summary",
    data.headline ? make("p", { class: "headline" }, data.headline) : null,
    make("div", { class: "scroll" }, make("table", { class: "numbers" }, make("thead", {}, head), make("tbody", {}, ...rows))),
    make("p", { class: "notes" }, "Accuracies in %, mean ± standard deviation (of the population) over seeds. †: judged by the rule of the method itself; a column has one rule." + (ranked ? " Bold: best; underlined: second best of three or more." : "")),
    make("details", {}, make("summary", {}, "What the columns say"), wordTable(null, table.columns.filter((column) => column.about).map((column) => [column.title, column.about]))));
}

function wordTable(head, rows) {
  const cells = (tag, row) => make("tr", {}, ...row.map((text) => make(tag, {}, text)));
  return make("div", { class: "scroll" }, make("table", { class: "words" },
    head ? make("thead", {}, cells("th", head)) : null, make("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

function showSettings(data) {
  const { differ, methods, shared } = data.settings;
  const alone = methods.length < 2;
  return section("settings", "Settings",
    alone ? null : make("p", { class: "caption" }, differ.length ? "What differs between the runs, apart from method and seed:" : "The runs differ only in method and seed."),
    differ.length ? wordTable(["setting", ...data.methods.map((method) => method.label)], differ) : null,
    make("details", {}, make("summary", {}, "What each method is set to"), wordTable(null, methods)),
    make("details", {}, make("summary", {}, alone ? "All other settings" : "Settings that all runs share"), make("dl", {}, ...shared.map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value))))));
}

function showEnvironments(data) {
  const parts = data.environments.map((entry) => make("div", {},
    make("pre", {}, entry.commands.join("\n")),
    make("p", { class: "small" }, entry.made.map(([key, value]) => `${key} ${value}`).join(" · ")),
    make("details", {}, make("summary", {}, `${entry.folders.length} run folder${entry.folders.length > 1 ? "s" : ""}`), make("p", { class: "small" }, entry.folders.join(", ")))));
  return section("environment", "Environment and command", make("p", { class: "caption" }, "The command, and the machine that it ran on."), ...parts);
}

function section(id, title, ...children) {
  return make("section", { id }, make("h2", {}, title), ...children);
}

// ---- figures ----

function chosen(figure) {
  state.chosen[figure.id] ??= {};
  return figure.controls.map((control) => {
    const picked = state.chosen[figure.id][control.name];
    return control.options.includes(picked) ? picked : control.options[control.start];
  });
}

function choose(figure, control, option) {
  state.chosen[figure.id][control.name] = option;
  refreshControls(figure);
  draw(figure.id);
}

function controlNode(figure, control) {
  const pick = (option) => choose(current(figure.id), control, option);
  if (control.slider) {
    const input = make("input", {
      type: "range", min: 0, max: control.options.length - 1, step: 1, "aria-label": control.name,
      oninput: (event) => pick(control.options[Number(event.target.value)]),
    });
    const play = make("button", { type: "button", title: "Play", "aria-label": "Play", onclick: () => playAll(figure, control) }, "▶");
    return make("label", { class: "control", "data-control": control.name }, control.name, input, make("output", {}), play);
  }
  if (control.options.length > 4) {
    const options = control.options.map((option) => make("option", { value: option }, option));
    return make("label", { class: "control", "data-control": control.name }, control.name, make("select", { onchange: (event) => pick(event.target.value) }, ...options));
  }
  const buttons = control.options.map((option) => make("button", { type: "button", "data-option": option, onclick: () => pick(option) }, option));
  return make("span", { class: "control", "data-control": control.name }, control.name, make("span", { class: "choices", role: "group" }, ...buttons));
}

/** Every option in turn, until a hand chooses one. */
async function playAll(figure, control) {
  for (const option of control.options) {
    choose(current(figure.id), control, option);
    await new Promise((done) => setTimeout(done, 900));
    if (state.chosen[figure.id][control.name] !== option) return;
  }
}

function refreshControls(figure) {
  const node = byId(figure.id);
  figure.controls.forEach((control, i) => {
    const option = chosen(figure)[i], box = node.querySelector(`[data-control="${CSS.escape(control.name)}"]`);
    if (control.slider) {
      box.querySelector("input").value = control.options.indexOf(option);
      box.querySelector("output").textContent = option;
    } else if (box.querySelector("select")) box.querySelector("select").value = option;
    else for (const button of box.querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.option === option));
  });
}

const current = (id) => state.data.figures.find((figure) => figure.id === id);
const shape = (figure) => JSON.stringify([figure.controls, figure.panels.map((panel) => [panel.title, panel.label, panel.wide]), figure.missing, figure.key, figure.table.length > 0]);

/** Which method is which line, for paper; where colours mean something else the figure has a key of its own. */
function legend(figure) {
  if (figure.id === "partition" || figure.key.length || figure.panels.every((panel) => panel.label)) return [];
  const shown = state.data.methods.filter((method) => !state.hidden.has(method.label));
  return shown.map((method) => make("li", {}, swatch(method, method.colour), method.name));
}

function figureNode(figure) {
  if (figure.missing) return section(figure.id, figure.title, make("p", { class: "missing" }, figure.missing));
  const grid = figure.columns === 3 && figure.panels.length > 2 ? "panels three" : "panels";
  const panels = figure.panels.map((panel, i) => make("figure", { class: panel.wide ? "panel wide" : "panel", "data-panel": i },
    panel.title ? make("h3", {}, panel.title) : null, make("div", { class: "plot", style: `height:${panel.height}px` })));
  const keys = figure.key.map(([name, colour, symbol]) => make("li", {}, make("span", { "data-colour": colour }, SYMBOLS[symbol]), name));
  return section(figure.id, figure.title,
    make("p", { class: "caption" }, figure.caption),
    figure.controls.length ? make("div", { class: "controls" }, ...figure.controls.map((control) => controlNode(figure, control))) : null,
    make("ul", { class: "key legend" }, ...legend(figure)),
    make("div", { class: grid }, ...panels),
    make("p", { class: "away", hidden: true }, "All methods are hidden."),
    keys.length ? make("ul", { class: "key" }, ...keys) : null,
    figure.table.length ? numberTable(figure.table) : null,
    make("ul", { class: "notes" }, ...figure.notes.map((note) => make("li", {}, note))));
}

/** The figure's node with new texts, or a new one with the plots it had: what a reader zoomed into stays. */
function renewed(figure, old) {
  const node = byId(figure.id);
  if (shape(old) === shape(figure)) {
    if (figure.missing) return node;
    node.querySelector(".caption").textContent = figure.caption;
    node.querySelector(".legend").replaceChildren(...legend(figure));
    node.querySelector("ul.notes").replaceChildren(...figure.notes.map((note) => make("li", {}, note)));
    if (figure.table.length) node.querySelector(":scope > .scroll").replaceWith(numberTable(figure.table));
    return node;
  }
  const fresh = figureNode(figure), box = (where, index) => where.querySelector(`[data-panel="${index}"] .plot`);
  figure.panels.forEach((panel, index) => {
    const before = old.panels.findIndex((other) => other.title === panel.title && other.label === panel.label);
    if (before >= 0) box(fresh, index).replaceWith(box(node, before));
  });
  return fresh;
}

function numberTable([head, ...rows]) {
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, ...head.map((text) => make("th", {}, text)))),
    make("tbody", {}, ...rows.map((row) => make("tr", { "data-label": row[0] }, ...row.map((text) => make("td", {}, text)))))));
}

/** Names of about so many letters: of those that begin alike the end too, and more of it where that is not enough. */
function toldApart(names, most) {
  const texts = names.map(plain);
  const short = texts.map((text) => (text.length <= most ? text : `${text.slice(0, most - 1)}…`));
  const twice = (text) => short.indexOf(text) !== short.lastIndexOf(text);
  const cut = texts.map((text, i) => (twice(short[i]) && text.length > most ? `${text.slice(0, 4)}…${text.slice(5 - most)}` : short[i]));
  return new Set(cut).size === new Set(texts).size ? cut.map(safe) : toldApart(names, most + 4);
}

/** The colour of a number in a heat map, as red, green and blue from 0 to 1. */
function cellColour(trace, z) {
  const scale = trace.colorscale, at = Math.min(1, Math.max(0, (z - trace.zmin) / (trace.zmax - trace.zmin)));
  const next = Math.max(1, scale.findIndex(([place]) => place >= at));
  const [[low, from], [high, to]] = [scale[next - 1], scale[next]], share = (at - low) / (high - low);
  return [1, 3, 5].map((i) => {
    const [a, b] = [from, to].map((colour) => parseInt(colour.slice(i, i + 2), 16) / 255);
    return a + share * (b - a);
  });
}

/** Black or white: the one that reads better on a colour; a contrast of 4.5 or more with any. */
function inkOn(colour) {
  const [red, green, blue] = colour.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 ? "#000000" : "#ffffff";
}

/** The numbers in the cells of a heat map; plotly would give all of them one colour, or one that is hard to read. */
function cellNumbers(trace, size) {
  const cells = trace.z.flatMap((row, i) => row.map((z, j) => ({ x: trace.x[j], y: trace.y[i], z })).filter(({ z }) => z !== null));
  return {
    type: "scatter", mode: "text", x: cells.map(({ x }) => x), y: cells.map(({ y }) => y), hoverinfo: "skip", meta: trace.meta,
    customdata: cells.map(({ z }) => z), texttemplate: `%{customdata:${trace.meta.numbers}}`,
    textfont: { size, color: cells.map(({ z }) => inkOn(cellColour(trace, z))) },
  };
}

/** The pixels that the longest of some texts takes. */
function widest(texts, size, family) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${size}px ${family}`;
  return Math.max(0, ...texts.map((text) => pen.measureText(plain(text)).width));
}

/** Leave out names that would lie over the one before them. */
function space(axis, gap) {
  let last = -Infinity;
  const kept = axis.tickvals.map((at) => at - last >= gap && ((last = at), true));
  for (const key of ["tickvals", "ticktext"]) axis[key] = axis[key].filter((_, i) => kept[i]);
}

/** Traces and layout of a plot in the colours of the page, without what is hidden. */
function themed(plot) {
  const dark = isDark(), small = window.innerWidth < 760 && !state.printing;
  const { data, layout } = JSON.parse(JSON.stringify(plot), (key, value) => (dark && typeof value === "string" && state.data.dark[value]) || value);
  const ink = state.printing ? "#1b2026" : css("--ink"), grid = state.printing ? "#e3e7ec" : css("--grid");
  const line = state.printing ? "#b5bec8" : css("--line"), back = state.printing ? "#ffffff" : css("--back");
  const scales = state.data.scales[dark ? "dark" : "light"];
  const traces = data.filter((trace) => !trace.meta.label || !state.hidden.has(trace.meta.label));
  for (const trace of traces) {
    if (trace.type === "heatmap") {
      trace.colorscale = trace.meta.diverging ? scales.two : scales.plain;
      Object.assign(trace.colorbar, { outlinewidth: 0, tickfont: { size: 11 } });
      trace.showscale = !(trace.meta.numbers && (small || state.printing));
    }
    if (trace.meta.bubbles && (small || state.printing)) trace.marker.size = trace.marker.size.map((size) => 0.7 * size);
    if (trace.meta.outline) trace.marker.line = { color: back, width: 1.2 };
    if (trace.mode === "text") trace.textfont = { size: WORDS, color: ink };
  }
  const family = getComputedStyle(document.body).fontFamily;
  const words = data.filter((trace) => trace.mode === "text"), far = Math.max(0, ...words.flatMap((trace) => trace.x));
  if (far > 0) layout.xaxis.range = [0, far]; // the words stand in the margin
  const right = words.length ? 8 + widest(words.flatMap((trace) => trace.text), WORDS, family) : small ? 10 : 16;
  for (const trace of traces.filter((some) => some.meta.numbers)) traces.push(cellNumbers(trace, small || state.printing ? 9 : 11));
  for (const axis of [layout.xaxis, layout.yaxis]) {
    Object.assign(axis, { gridcolor: grid, linecolor: line, zerolinecolor: grid, tickcolor: line, zeroline: false });
    axis.title.font = { size: small ? 12 : 13 };
    axis.title.standoff = 8;
    if (axis.tickfont && (small || state.printing)) axis.tickfont.size = 8;
    const heat = traces.find((trace) => trace.type === "heatmap");
    if (heat && axis.tickvals && !axis.categoryarray) space(axis, (heat.z.length * LINE) / (small || state.printing ? 180 : 380));
    if (axis.categoryarray) {
      const shown = axis.categoryarray.filter((name) => !state.hidden.has(plain(name)));
      const most = small || state.printing ? 14 : 32;
      axis.tickvals = shown;
      axis.ticktext = toldApart(shown, most);
      Object.assign(axis, { categoryarray: shown, categoryorder: "array", showgrid: false, autorange: false, range: [shown.length - 0.5, -0.5] });
    }
  }
  for (const shape of layout.shapes || []) shape.line.color = isDark() ? "#8b97a4" : "#5c6670";
  Object.assign(layout, {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, bargap: 0.18,
    font: { family, size: small ? 11 : 12.5, color: ink },
    margin: { l: 48, r: right, t: 10, b: 42 },
    hoverlabel: { bgcolor: back, bordercolor: line, font: { color: ink, size: 12.5 }, namelength: 40 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
  });
  return { traces, layout };
}

const safe = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const plain = (text) => text.replace(/&lt;/g, "<").replace(/&gt;/g, ">").replace(/&amp;/g, "&");

function drawPanel(figure, index) {
  const panel = figure.panels[index], node = byId(figure.id).querySelector(`[data-panel="${index}"]`);
  node.hidden = panel.label !== null && state.hidden.has(panel.label);
  if (node.hidden) return null;
  const box = node.querySelector(".plot"), plot = panel.plots[chosen(figure).join("|")];
  const { traces, layout } = themed(plot);
  layout.uirevision = chosen(figure).join("|"); // what a reader zoomed into stays when new data come
  if (!traces.length) {
    if (box.data) Plotly.purge(box);
    box.classList.add("none");
    box.textContent = plot.data.length ? "All methods are hidden." : "This method has none.";
    return null;
  }
  if (box.classList.contains("none")) {
    box.classList.remove("none");
    box.textContent = "";
  }
  box.style.width = "";
  if (state.printing) {
    layout.width = PAPER[panel.wide ? "wide" : "narrow"];
    box.style.width = `${layout.width}px`;
  }
  layout.height = panel.square ? Math.min(panel.height, (layout.width || box.clientWidth) + 30) : panel.height * (state.printing ? 0.75 : 1);
  box.style.height = `${layout.height}px`;
  return Plotly.react(box, traces, layout, { displayModeBar: false, responsive: true });
}

/** Draw all panels, or those of one figure: what is in sight first, the rest in turn while the page stays usable. */
async function draw(only = null) {
  const turn = ++state.turn, waiting = [];
  document.body.dataset.state = "drawing";
  for (const figure of state.data.figures) {
    for (const key of byId(figure.id).querySelectorAll("[data-colour]")) key.style.color = key.dataset.colour ? shade(key.dataset.colour) : "";
    const none = byId(figure.id).querySelector(":scope > .away");
    if (none) none.hidden = !figure.panels.every((panel) => panel.label !== null && state.hidden.has(panel.label));
    figure.panels.forEach((panel, index) => waiting.push({ figure, index, due: state.due?.has(`${figure.id}/${index}`) || !only || figure.id === only }));
  }
  const jobs = waiting.filter((job) => job.due);
  state.due = new Set(jobs.map((job) => `${job.figure.id}/${job.index}`)); // a draw that is overtaken leaves its rest to the next
  const away = ({ figure, index }) => {
    const place = byId(figure.id).querySelector(`[data-panel="${index}"]`).getBoundingClientRect();
    return Math.max(0, -place.bottom, place.top - window.innerHeight);
  };
  const order = jobs.map((job) => [away(job), job]).sort((a, b) => a[0] - b[0]);
  for (const [, job] of order) {
    await untouched(".plot");
    if (turn !== state.turn) return;
    await drawPanel(job.figure, job.index);
    state.due.delete(`${job.figure.id}/${job.index}`);
    await new Promise((done) => setTimeout(done));
  }
  document.body.dataset.state = "drawn";
}

// ---- the whole page ----

function title(labels) {
  if (labels.length > 3) return `${labels.length} methods compared`;
  const clear = labels.some((label) => label.includes(",")) && labels.length > 1 ? labels.map((label) => `‘${label}’`) : labels;
  return clear.length > 1 ? `${clear.slice(0, -1).join(", ")} and ${clear.at(-1)}` : clear[0] || "Report";
}

/** Show this data; what was chosen and hidden stays so. */
function update(data) {
  const before = state.data;
  state.data = data;
  for (const label of state.hidden) if (!data.methods.some((method) => method.label === label)) state.hidden.delete(label);
  byId("version").textContent = data.version;
  byId("title").textContent = title(data.methods.map((method) => method.label));
  document.title = `protofed: ${byId("title").textContent}`;
  byId("facts").textContent = data.facts.join(" · ");
  showAlerts(data);
  showMethods();
  const nodes = data.methods.length ? [showSummary(data), showSettings(data)] : [];
  for (const figure of data.figures) {
    const old = before?.figures.find((other) => other.id === figure.id);
    nodes.push(old ? renewed(figure, old) : figureNode(figure));
  }
  if (data.methods.length) nodes.push(showEnvironments(data));
  byId("main").replaceChildren(...nodes);
  for (const figure of data.figures) if (!figure.missing) refreshControls(figure);
  byId("contents").replaceChildren(...nodes.map((node) => make("a", { href: `#${node.id}` }, node.querySelector("h2").textContent)));
  dimRows();
  return draw();
}

function setTheme(name) {
  document.documentElement.dataset.theme = name;
  if (!state.data) return;
  showMethods();
  draw();
}

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));
byId("theme").addEventListener("click", () => setTheme(isDark() ? "light" : "dark"));
byId("all").addEventListener("click", () => { state.hidden.clear(); showMethods(); dimRows(); draw(); });

addEventListener("beforeprint", () => {
  state.printing = true;
  state.screenTheme = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
  state.shut = [...document.querySelectorAll("details:not([open])")];
  for (const details of state.shut) details.open = true;
  for (const figure of state.data.figures) {
    for (const key of byId(figure.id).querySelectorAll("[data-colour]")) key.style.color = key.dataset.colour;
    if (!figure.missing) byId(figure.id).querySelector(".legend").replaceChildren(...legend(figure));
    figure.panels.forEach((panel, index) => drawPanel(figure, index));
  }
});
addEventListener("afterprint", () => {
  state.printing = false;
  for (const details of state.shut) details.open = false;
  setTheme(state.screenTheme);
});

update(JSON.parse(byId("data").textContent));
