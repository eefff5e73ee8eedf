// What is chosen, and what is drawn again when it changes.

function choose(at) {
  state.measure = at;
  drawThumbnailsChosen();
  drawMeasure();
}

function drawThumbnailsChosen() {
  [...document.getElementById("thumbnails").children].forEach((node, at) => {
    node.setAttribute("aria-checked", String(at === state.measure));
    node.setAttribute("tabindex", at === state.measure ? "0" : "-1");
  });
}

function rangeWords({low, high}) {
  if (low === null) return high === null ? "" : ` Range: at most ${high}.`;
  return high === null ? ` Range: at least ${low}.` : ` Range: ${low} to ${high}.`;
}

function drawMeasure() {
  const of = measure();
  document.getElementById("map-title").textContent = of.label + (state.rows === "special" ? " at special tokens" : "");
  const range = rangeWords(of);
  const better = of.better ? ` Better: ${of.better}.` : "";
  const sentence = of.description ? of.description.replace(/[.\s]*$/, ".") : "";
  document.getElementById("measure-about").textContent = `${sentence}${of.unit ? ` Unit: ${of.unit}.` : ""}${range}${better}${of.source ? ` Source: ${of.source.replace(/[.\s]*$/, ".")}` : ""}`;
  document.getElementById("full-range").hidden = of.low === null || of.high === null;
  hideTip();
  drawLegend();
  drawMaps();
  drawSpread();
  drawCard();
}

function select(at) {
  state.selected = at;
  ringSelected();
  drawSpread();
  drawCard();
  markRow();
}

function drawGlossary() {
  const list = document.getElementById("glossary");
  for (const of of data.measures) {
    list.append(element("dt", {}, of.label), element("dd", {}, of.description || "No description.", of.source ? element("span", {class: "sd"}, ` ${of.source}`) : ""));
  }
}

function draw() {
  drawThumbnails();
  drawMeasure();
}

const entropy = data.measures.findIndex((of) => of.name === "entropy");
state.measure = Math.max(0, entropy);
fillFilters();
drawTable();
filterRows();
drawGlossary();
draw();

document.getElementById("row-class")?.addEventListener("change", (event) => {
  state.rows = event.target.value;
  draw();
  redrawTable();
});
document.getElementById("spread-order").addEventListener("change", (event) => { state.order = event.target.value; drawSpread(); });
document.getElementById("full-range").addEventListener("change", (event) => {
  state.fullRange = event.target.checked;
  drawLegend();
  drawMaps();
});
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawThumbnails);

let lastWidth = window.innerWidth;
let waiting = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === lastWidth) return;
  lastWidth = window.innerWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => { layThumbnails(); drawMaps(); drawSpread(); });
});
document.documentElement.dataset.ready = "true";
