// Heat maps, layer x head, one per stack and kind; the thumbnails that choose the measure; the legend.

const colour = (value, [low, high]) => charts.interpolateViridis(Math.max(0, Math.min(1, (value - low) / (high - low))));

function drawThumbnails() {
  const box = document.getElementById("thumbnails");
  layThumbnails();
  box.replaceChildren(...data.measures.map((of, at) => {
    const range = extent(of);
    const same = range && short(range[0]) === short(range[1]);
    const said = !range ? "no rows" : same ? short(range[0]) : `${short(range[0])} \u2013 ${short(range[1])}`;
    const chosen = at === state.measure;
    const button = element(
      "button",
      {type: "button", class: "thumb", role: "radio", "aria-checked": String(chosen), tabindex: chosen ? "0" : "-1", "data-measure": of.name},
      thumbnail(of), element("b", {}, of.label), element("small", {}, said),
    );
    button.addEventListener("click", () => choose(at));
    button.addEventListener("keydown", (event) => {
      const step = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
      if (!step) return;
      event.preventDefault();
      const next = (at + step + data.measures.length) % data.measures.length;
      choose(next);
      box.children[next].focus();
    });
    return button;
  }));
}

/** As many columns as fit, in lines of nearly equal length. */
function layThumbnails() {
  const box = document.getElementById("thumbnails");
  const count = data.measures.length;
  const fit = Math.max(1, Math.min(count, Math.floor((box.clientWidth + 10) / 112)));
  const columns = Math.max(Math.ceil(count / Math.ceil(count / fit)), Math.min(fit, 3));
  box.style.gridTemplateColumns = `repeat(${columns}, minmax(0, ${count < 4 ? "190px" : "1fr"}))`;
}

/** All heads of all groups, one pixel each, layers from top to bottom. */
function thumbnail(of) {
  const width = Math.max(...sites.map((site) => site.heads));
  const canvas = element("canvas", {width, height: sites.length, "aria-hidden": "true"});
  const context = canvas.getContext("2d");
  const range = extent(of);
  const span = range && range[0] === range[1] ? [range[0] - 1, range[1] + 1] : range;
  const grey = getComputedStyle(document.documentElement).getPropertyValue("--missing");
  for (const {at, site, head} of heads) {
    const {mean} = stat(of, at);
    context.fillStyle = mean === null || !span ? grey : colour(mean, span);
    context.fillRect(head, site, 1, 1);
  }
  return canvas;
}

function drawLegend() {
  const box = document.getElementById("legend");
  const of = measure();
  const span = domain(of);
  const parts = [];
  if (span) {
    const label = `${of.label}${of.unit ? ` (${of.unit})` : ""}`;
    const range = extent(of);
    const even = [0, 0.25, 0.5, 0.75, 1].map((share) => span[0] + share * (span[1] - span[0]));
    const ticks = range[0] === range[1] && !state.fullRange ? [range[0]] : even;
    parts.push(charts.legend({
      color: {type: "linear", domain: span, interpolate: charts.interpolateViridis, label},
      width: 330, height: 50, marginLeft: 24, marginRight: 24, ticks, tickFormat: short, style: {fontSize: "11.5px"},
    }));
  }
  if (heads.some(({at}) => stat(of, at).mean === null)) {
    const swatch = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    swatch.setAttribute("width", "16");
    swatch.setAttribute("height", "16");
    addHatch(swatch, "hatch-legend");
    const square = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const [key, value] of [["width", 16], ["height", 16], ["fill", "url(#hatch-legend)"]]) square.setAttribute(key, value);
    swatch.append(square);
    parts.push(element("span", {class: "swatch"}, swatch, "no value"));
  }
  box.replaceChildren(...parts);
}

function addHatch(svg, id) {
  const made = (name, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    return node;
  };
  const pattern = made("pattern", {id, width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)"});
  pattern.append(
    made("rect", {width: 6, height: 6, fill: "var(--wash)"}),
    made("line", {x1: 0, y1: 0, x2: 0, y2: 6, stroke: "var(--missing)", "stroke-width": 4}),
  );
  const defs = made("defs", {});
  defs.append(pattern);
  svg.prepend(defs);
}

function drawMaps() {
  const box = document.getElementById("maps");
  const kept = [...box.querySelectorAll(".plot-box")].map((node) => node.scrollLeft);
  box.replaceChildren(...groups.map((group, at) => drawMap(group, at)));
  box.querySelectorAll(".plot-box").forEach((node, at) => { node.scrollLeft = kept[at] || 0; });
  ringSelected();
}

function drawMap(group, number) {
  const of = measure();
  const inside = heads.filter(({site}) => group.sites.includes(site));
  const width = Math.max(...group.sites.map((site) => sites[site].heads));
  const title = element("h3", {}, group.name[0].toUpperCase() + group.name.slice(1), " ", element("small", {}, `${group.sites.length} \u00d7 ${width}, layer \u00d7 head`));
  const made = element("div", {class: "map", "data-group": String(number)}, title);
  const reasons = new Set(group.sites.map((site) => of.absent[site]));
  const span = domain(of);
  if (reasons.size === 1 && !reasons.has(undefined)) {
    made.append(element("p", {class: "reason"}, `${of.label} does not apply here: ${[...reasons][0]}`));
    return made;
  }
  if (!span) {
    made.append(element("p", {class: "reason"}, "There are no rows of this kind."));
    return made;
  }
  made.append(element("div", {class: "plot-box"}, mapPlot(of, group, inside, width, span, number)));
  return made;
}

function mapPlot(of, group, inside, width, span, number) {
  const room = Math.max(240, document.getElementById("maps").clientWidth - 6);
  const left = 40;
  const cell = Math.max(11, Math.min(72, Math.floor((room - left - 4) / width)));
  const tall = Math.max(14, Math.min(group.sites.length <= 12 ? 42 : 30, cell));
  const every = (count, size, letters) => Math.max(1, Math.ceil((letters * 8 + 4) / size));
  const stepX = every(width, cell, String(width).length);
  const lines = new Map(group.sites.map((site, line) => [site, line]));
  const hatch = `hatch-${number}`;
  const colours = {type: "linear", domain: span, interpolate: charts.interpolateViridis, clamp: true, unknown: `url(#${hatch})`};
  const value = ({at}) => { const {mean} = stat(of, at); return mean === null ? NaN : mean; };
  const x = ({head}) => head;
  const y = ({site}) => lines.get(site);
  const marks = [charts.cell(inside, {x, y, fill: value, inset: 0.75, rx: 1.5})];
  if (cell >= 38 && inside.length <= 600) {
    const dark = (d) => (value(d) - span[0]) / (span[1] - span[0]) < 0.55;
    const said = (d) => { const found = value(d); return Number.isNaN(found) ? "" : tight(found); };
    marks.push(charts.text(inside, {x, y, text: said, fill: (d) => (dark(d) ? "#fff" : "#111"), fontSize: 11, className: "in-cell"}));
  }
  const svg = charts.plot({
    width: left + width * cell + 4, height: 24 + group.sites.length * tall + 4,
    marginLeft: left, marginTop: 24, marginRight: 4, marginBottom: 4, padding: 0,
    x: {type: "band", domain: [...Array(width).keys()], axis: "top", label: null, tickSize: 0, tickFormat: (d) => (d % stepX === 0 ? String(d) : "")},
    y: {type: "band", domain: [...lines.values()], label: null, tickSize: 0, tickFormat: (d) => String(sites[group.sites[d]].layer)},
    color: colours, marks, style: {fontSize: "11.5px"},
    ariaLabel: `Heat map of ${of.label}, ${group.name}`,
  });
  addHatch(svg, hatch);
  makeCells(svg, inside, lines);
  return svg;
}

/** A number of at most five letters, for inside a cell. */
const tight = (value) => {
  const size = Math.abs(value);
  if (size >= 1e5 || (size > 0 && size < 0.005)) return value.toExponential(0).replace("e+", "e").replace("-", "\u2212");
  return (size >= 1000 ? value.toFixed(0) : size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2)).replace("-", "\u2212");
};

/** Makes every cell of a map a thing that can be pointed at, walked to by arrow keys, and chosen. */
function makeCells(svg, inside, lines) {
  const cells = [...svg.querySelectorAll('g[aria-label="cell"] rect')];
  const at = new Map();
  cells.forEach((node, index) => {
    const d = inside[index];
    const {mean, std, rows} = stat(measure(), d.at);
    const said = mean === null ? why(measure(), d.at) : `${short(mean)}${unit(measure())}, standard deviation ${short(std)}, ${whole(rows)} rows`;
    at.set(`${lines.get(d.site)},${d.head}`, node);
    node.dataset.at = d.at;
    node.classList.add("cell");
    node.setAttribute("role", "button");
    node.setAttribute("tabindex", index === 0 ? "0" : "-1");
    node.setAttribute("aria-label", `${place(d.at)}: ${said}`);
    node.setAttribute("aria-pressed", String(state.selected === d.at));
    node.__spot = [lines.get(d.site), d.head];
  });
  svg.addEventListener("pointermove", (event) => {
    const found = event.target.closest(".cell");
    if (found) showTip(Number(found.dataset.at), found, event.clientX, event.clientY); else hideTip();
  });
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("click", (event) => {
    const found = event.target.closest(".cell");
    if (found) select(Number(found.dataset.at));
  });
  svg.addEventListener("focusin", (event) => {
    if (event.target.matches(".cell:focus-visible")) showTip(Number(event.target.dataset.at), event.target);
  });
  svg.addEventListener("focusout", hideTip);
  svg.addEventListener("keydown", (event) => walk(event, at));
}

function walk(event, at) {
  const node = event.target.closest(".cell");
  if (!node) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    select(Number(node.dataset.at));
    return;
  }
  const step = {ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0]}[event.key];
  let next = null;
  if (step) next = at.get(`${node.__spot[0] + step[0]},${node.__spot[1] + step[1]}`);
  if (event.key === "Home" || event.key === "End") {
    const line = [...at.values()].filter((other) => other.__spot[0] === node.__spot[0]);
    next = event.key === "Home" ? line[0] : line[line.length - 1];
  }
  if (!step && !next) return;
  event.preventDefault();
  if (!next) return;
  node.setAttribute("tabindex", "-1");
  next.setAttribute("tabindex", "0");
  next.focus();
}

/** Draws a ring around the selected head's cell. */
function ringSelected() {
  document.querySelectorAll("#maps .ring").forEach((node) => node.remove());
  document.querySelectorAll("#maps .cell").forEach((node) => {
    const chosen = Number(node.dataset.at) === state.selected;
    node.setAttribute("aria-pressed", String(chosen));
    if (!chosen) return;
    const ring = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    for (const key of ["x", "y", "width", "height"]) ring.setAttribute(key, node.getAttribute(key));
    ring.setAttribute("class", "ring");
    node.parentNode.append(ring);
  });
}
