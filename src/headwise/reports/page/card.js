// The card of the selected head: where it sits and all its numbers.

function drawCard() {
  const card = document.getElementById("card");
  card.classList.toggle("empty", state.selected === null);
  if (state.selected === null) {
    card.replaceChildren(
      element("h3", {}, "Selected head"),
      element("p", {class: "hint"}, "Choose a cell of a map, a point of the distribution or a line of the table."),
    );
    return;
  }
  const at = state.selected;
  const {site, head} = heads[at];
  const where = sites[site];
  const facts = [];
  if (where.kv[head] !== head || groupedQueries) facts.push(`reads KV head ${where.kv[head]}`);
  facts.push(where.d_k === where.d_v ? `width ${where.d_k}` : `d_k ${where.d_k}, d_v ${where.d_v}`);
  if (where.causal) facts.push("causal");
  if (where.window) facts.push(`window ${whole(where.window)}`);
  const lines = data.measures.map((of, index) => {
    const found = stat(of, at);
    const value = found.mean === null
      ? element("td", {title: why(of, at)}, found.odd || "\u2013")
      : element("td", {title: `exactly ${found.mean}, ${whole(found.rows)} rows`}, short(found.mean), element("span", {class: "sd"}, ` \u00b1 ${short(found.std)}`));
    return element("tr", {class: index === state.measure ? "now" : null, "data-measure": of.name},
      element("th", {scope: "row"}, of.label, of.unit ? element("span", {class: "sd"}, ` ${of.unit}`) : null), value);
  });
  const counts = new Set(data.measures.map((of) => stat(of, at).rows).filter((rows) => rows));
  const most = counts.size ? Math.max(...counts) : 0;
  const button = element("button", {type: "button", class: "button"}, "Show in the table");
  button.addEventListener("click", () => {
    const row = document.querySelector(`.heads tr[data-at="${at}"]`);
    if (row.hidden) clearFilters();
    row.scrollIntoView({block: "center"});
    row.querySelector(".pick").focus({preventScroll: true});
  });
  card.replaceChildren(
    element("h3", {}, `Layer ${where.layer}, head ${head}`),
    element("p", {}, element("span", {class: "sd"}, severalGroups ? `${where.stack} ${where.kind}-attention; ` : "", facts.join(", "))),
    element("p", {class: "path"}, moduleName(site)),
    element("table", {}, element("tbody", {}, ...lines)),
    element("p", {class: "hint sd"}, `mean \u00b1 standard deviation over ${counts.size > 1 ? "up to " : ""}${whole(most)} ${state.rows === "special" ? "special-token rows" : "rows"}`),
    button,
  );
}
