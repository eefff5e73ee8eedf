// The table of all heads: sorted by its headers (the sortable library), filtered by the form above it.

const filters = document.getElementById("filters");

function drawTable() {
  const head = element("tr", {});
  const column = (label, note, words) => head.append(element("th", {scope: "col", class: words ? "words" : null}, element("button", {type: "button"}, label, note ? element("small", {}, note) : null)));
  column("head", "layer.head", true);
  if (severalGroups) column("attention", null, true);
  column("layer");
  column("index");
  if (groupedQueries) column("KV head");
  for (const of of data.measures) column(of.label, of.unit || null);
  const body = element("tbody", {}, ...heads.map(({at}) => tableRow(at)));
  const table = element("table", {class: "heads sortable n-last asc"}, element("thead", {}, head), body);
  table.addEventListener("click", (event) => {
    const row = event.target.closest("tbody tr");
    if (row) select(Number(row.dataset.at));
  });
  document.getElementById("table-box").replaceChildren(table);
  markRow();
}

function tableRow(at) {
  const {site, head} = heads[at];
  const where = sites[site];
  const pick = element("button", {type: "button", class: "pick", "aria-label": `${where.layer}.${head}: select ${place(at)}`}, `${where.layer}.${head}`);
  const row = element("tr", {"data-at": at, "aria-selected": "false"}, element("td", {class: "words", "data-sort": at}, pick));
  if (severalGroups) row.append(element("td", {class: "words"}, `${where.stack} ${where.kind}`));
  row.append(element("td", {}, String(where.layer)), element("td", {}, String(head)));
  if (groupedQueries) row.append(element("td", {}, String(where.kv[head])));
  for (const of of data.measures) {
    const found = stat(of, at);
    if (found.mean === null) {
      row.append(element("td", {class: "missing", "data-sort": "", title: why(of, at)}, found.odd || "\u2013"));
    } else {
      const cell = element("td", {"data-sort": found.mean}, short(found.mean));
      if (filters.elements.std.checked) cell.append(element("span", {class: "sd"}, ` \u00b1 ${short(found.std)}`));
      row.append(cell);
    }
  }
  return row;
}

/** Draws the table again and sorts it as it was sorted. */
function redrawTable() {
  const before = document.querySelector(".heads th[aria-sort]");
  const sorted = before && {index: before.cellIndex, direction: before.getAttribute("aria-sort")};
  drawTable();
  if (sorted) {
    const button = document.querySelector(".heads thead tr").cells[sorted.index].querySelector("button");
    button.click();
    if (sorted.direction === "descending") button.click();
  }
  filterRows();
}

function fillFilters() {
  const option = (value, text) => element("option", {value}, text);
  if (severalGroups) {
    document.getElementById("filter-group").hidden = false;
    filters.elements.group.append(option("", "all"), ...groups.map((group, at) => option(String(at), `${group.stack} ${group.kind}`)));
  }
  const layers = [...new Set(sites.map((site) => site.layer))].sort((a, b) => a - b);
  filters.elements.layer.append(option("", "all"), ...layers.map((layer) => option(String(layer), String(layer))));
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("input", (event) => { if (event.target.name === "std") redrawTable(); else filterRows(); });
}

function filterRows() {
  const {group, layer, text} = filters.elements;
  const wanted = text.value.trim().toLowerCase();
  let shown = 0;
  for (const row of document.querySelectorAll(".heads tbody tr")) {
    const {site} = heads[row.dataset.at];
    const fits = (group.value === "" || groups[group.value].sites.includes(site)) &&
      (layer.value === "" || String(sites[site].layer) === layer.value) &&
      (wanted === "" || moduleName(site).toLowerCase().includes(wanted));
    row.hidden = !fits;
    if (fits) shown += 1;
  }
  document.getElementById("shown").textContent = `${whole(shown)} of ${headCount(heads.length)}`;
}

function clearFilters() {
  filters.elements.group.value = "";
  filters.elements.layer.value = "";
  filters.elements.text.value = "";
  filterRows();
}

function markRow() {
  for (const row of document.querySelectorAll('.heads tr[aria-selected="true"]')) row.setAttribute("aria-selected", "false");
  if (state.selected === null) return;
  document.querySelector(`.heads tr[data-at="${state.selected}"]`).setAttribute("aria-selected", "true");
}
