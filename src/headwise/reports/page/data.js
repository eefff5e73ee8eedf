// The data of the page, and how numbers and places are written.

const data = JSON.parse(document.getElementById("data").textContent);
const sites = data.sites;
const heads = data.heads.site.map((site, at) => ({at, site, head: data.heads.head[at]}));
const groups = data.groups.map((group) => ({
  ...group,
  name: `${group.stack} ${group.kind}-attention`,
  sites: sites.map((site, at) => at).filter((at) => sites[at].stack === group.stack && sites[at].kind === group.kind),
}));
const severalGroups = groups.length > 1;
const groupedQueries = heads.some(({site, head}) => sites[site].kv[head] !== head);

const state = {measure: 0, rows: "token", selected: null, fullRange: false, order: "value"};

const measure = () => data.measures[state.measure];

/** Mean, standard deviation and rows of one head; mean is null when missing, odd when NaN or infinite. */
function stat(of, at, rows = state.rows) {
  const values = of[rows];
  if (!values) return {mean: null, std: null, rows: 0};
  const count = typeof values.rows === "number" ? values.rows : values.rows[at];
  return {mean: values.mean[at], std: values.std[at], rows: count, odd: values.odd[at]};
}

/** Why a head has no number. */
function why(of, at, rows = state.rows) {
  const found = stat(of, at, rows);
  if (found.odd) return `${found.odd}: the model or the measure overflowed on some rows`;
  const reason = of.absent[heads[at].site];
  if (reason) return `does not apply: ${reason}`;
  return rows === "special" ? "no rows of special tokens" : "no rows";
}

const short = (value) => {
  if (value === null || value === undefined) return "\u2013";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2).replace("-", "\u2212").replace("e+", "e");
  const digits = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 10 ? 2 : size >= 1 ? 3 : 4;
  return value.toFixed(digits).replace("-", "\u2212");
};
const whole = (value) => value.toLocaleString("en-US");
const headCount = (count) => `${whole(count)} ${count === 1 ? "head" : "heads"}`;
const unit = (of) => (of.unit ? ` ${of.unit}` : "");

function place(at) {
  const {site, head} = heads[at];
  const where = sites[site];
  return `${severalGroups ? `${where.stack} ${where.kind}, ` : ""}layer ${where.layer}, head ${head}`;
}

const moduleName = (site) => (sites[site].call ? `${sites[site].module}, call ${sites[site].call}` : sites[site].module);

/** An element with attributes, properties of text, and children; text is never parsed as HTML. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === false) continue;
    made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

/** Smallest and largest mean of a measure over all heads. */
function extent(of, rows = state.rows) {
  const there = (of[rows] ? of[rows].mean : []).filter((value) => value !== null);
  if (!there.length) return null;
  return there.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

/** The range of values that the colours span. */
function domain(of) {
  if (state.fullRange && of.low !== null && of.high !== null) return [of.low, of.high];
  const found = extent(of);
  if (!found) return null;
  const [low, high] = found;
  if (low < high) return found;
  const room = Math.max(Math.abs(low) * 0.05, 1e-9);
  return [low - room, high + room];
}
