// How a measure is spread over heads: mean and one standard deviation over rows, head by head.

function drawSpread() {
  const of = measure();
  const box = document.getElementById("spread-plot");
  const about = document.getElementById("spread-about");
  const there = heads.map(({at}) => ({at, ...stat(of, at)})).filter(({mean}) => mean !== null);
  if (!there.length) {
    about.textContent = "No head has rows of this kind.";
    box.replaceChildren();
    return;
  }
  const ordered = [...there].sort((a, b) => a.mean - b.mean);
  about.textContent = spreadWords(of, ordered);
  const line = state.order === "layer" ? there : ordered;
  const cut = (value) => Math.min(of.high ?? Infinity, Math.max(of.low ?? -Infinity, value));
  const points = line.map((d, rank) => ({...d, rank, low: cut(d.mean - d.std), high: cut(d.mean + d.std)}));
  const starts = state.order === "layer" ? points.filter(({at, rank}) => rank === 0 || heads[at].site !== heads[points[rank - 1].at].site) : [];
  const width = Math.max(260, box.clientWidth - 4);
  const svg = charts.plot({
    width, height: width < 520 ? 220 : 280, marginLeft: 48, marginRight: 8, marginTop: 26, marginBottom: 34,
    x: {type: "linear", domain: [-0.5, points.length - 0.5], ...spreadAxis(starts, width, points.length)},
    y: {label: `${of.label}${of.unit ? ` (${of.unit})` : ""}`, nice: true, grid: true},
    style: {fontSize: "11.5px"},
    marks: [
      charts.ruleX(starts, {x: ({rank}) => rank - 0.5, stroke: "var(--line)"}),
      charts.ruleX(points, {x: "rank", y1: "low", y2: "high", stroke: "var(--accent)", strokeOpacity: 0.32, strokeWidth: Math.max(1, Math.min(7, (width - 56) / points.length * 0.62)), className: "bars"}),
      charts.dot(points, {x: "rank", y: "mean", r: points.length > 400 ? 1.2 : points.length > 150 ? 2 : 3.2, fill: "var(--accent)", className: "means"}),
      charts.dot(points.filter(({at}) => at === state.selected), {x: "rank", y: "mean", r: 6, stroke: "var(--mark)", strokeWidth: 3}),
    ],
    ariaLabel: `Mean and standard deviation of ${of.label} for each head`,
  });
  svg.setAttribute("role", "img");
  svg.querySelectorAll("g[aria-label]").forEach((node) => node.removeAttribute("aria-label"));
  const scale = svg.scale ? svg.scale("x") : null;
  const nearest = (event) => {
    const x = event.clientX - svg.getBoundingClientRect().left;
    const rank = Math.round(scale.invert(x));
    return points[Math.max(0, Math.min(points.length - 1, rank))];
  };
  svg.addEventListener("pointermove", (event) => showTip(nearest(event).at, svg, event.clientX, event.clientY));
  svg.addEventListener("pointerleave", hideTip);
  svg.addEventListener("click", (event) => select(nearest(event).at));
  box.replaceChildren(svg);
}

/** Ticks count heads by value, or name the layers where each begins. */
function spreadAxis(starts, width, count) {
  const few = count <= 12 ? [...Array(count).keys()] : 6;
  if (!starts.length) return {label: "heads, smallest first", ticks: few, tickFormat: (rank) => String(rank)};
  const every = Math.ceil(starts.length / (width / 26));
  const shown = starts.filter((start, line) => line % every === 0);
  const layer = new Map(shown.map(({at, rank}) => [rank, String(sites[heads[at].site].layer)]));
  return {label: "layer (its heads in order)", ticks: [...layer.keys()], tickFormat: (rank) => layer.get(rank)};
}

function spreadWords(of, ordered) {
  const at = (share) => {
    const spot = share * (ordered.length - 1);
    const low = ordered[Math.floor(spot)].mean;
    return low + (spot % 1) * (ordered[Math.ceil(spot)].mean - low);
  };
  const rows = state.rows === "special" ? "rows of special tokens" : "rows of real tokens";
  const bounded = of.low !== null || of.high !== null ? ", cut where the measure's range ends" : "";
  return `${headCount(ordered.length)}. Smallest ${short(ordered[0].mean)}, quartiles ${short(at(0.25))}, ${short(at(0.5))}, ${short(at(0.75))}, ` +
    `largest ${short(ordered[ordered.length - 1].mean)}${unit(of)}. A point is a head's mean over ${rows}; a bar is one standard deviation to each side${bounded}.`;
}
